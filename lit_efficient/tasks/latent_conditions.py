"""What a diffusion network gets of labels and captions, and the captions that samples are made for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.models.libraries.text_encoder import TextEncoder
from lit_efficient.models.networks.backbone_shape import BackboneShape
from lit_efficient.models.networks.condition import Condition
from lit_efficient.surgery import moved

_PROMPTS = 64


@dataclass(frozen=True)
class Conditioning:
    """Makes conditions of just the parts that a network takes."""

    shape: BackboneShape  # what it takes
    encoder: TextEncoder | None  # of captions; without one, batches bring embeddings, and there is none of nothing

    def check(self, num_classes: int | None = None) -> None:
        """Refuse labels of another number of classes, and a text encoder that does not fit.

        Raises:
            ConfigurationError: That says what does not agree.
        """
        shape, encoder = self.shape, self.encoder
        if num_classes is not None and shape.num_classes not in (0, num_classes):
            more = " (num_class_embeds has one row more)" if shape.name != "DiT" else ""
            allowed = f"{num_classes}, as the data has{more}"
            raise refusal("LatentDiffusion", "backbone.num_classes", allowed, shape.num_classes)
        if encoder is None:
            return
        if not shape.takes_text:
            raise ConfigurationError(
                f"LatentDiffusion: the data has a text encoder, and the backbone {shape.name} takes no text: leave the "
                "encoder out, or give the backbone attention to text (context_width of DiTConfig)."
            )
        for name, wanted, found in (
            ("width", shape.text_width, encoder.width),
            ("pooled_width", shape.pooled_width, encoder.pooled_width),
        ):
            if wanted not in (0, found):
                raise ConfigurationError(
                    f"LatentDiffusion: the backbone {shape.name} takes text of {name} {wanted}; the text encoder's is "
                    f"{found}."
                )
        if encoder.hides_padding and not shape.masks_text:
            raise ConfigurationError(
                f"LatentDiffusion: {shape.name} cannot leave tokens out, as the text encoder's padding asks for: set "
                "captions.padding: seen in its TextEncoderConfig."
            )

    def of_batch(self, batch: dict[str, Any], device: torch.device) -> Condition:
        """Conditions of a batch's samples."""
        labels = moved(self._member(batch, "labels"), device) if self.shape.num_classes else None
        sizes = moved(batch["sizes"].float(), device) if "sizes" in batch else None
        if not self.shape.takes_text:
            return Condition(labels, sizes=sizes)
        text, mask, pooled = self._text(batch, device)
        if not self.shape.text_width:
            text = mask = None
        return Condition(labels, text, mask, pooled if self.shape.pooled_width else None, sizes)

    def null(self, device: torch.device) -> Condition:
        """That of nothing, for one sample: the class after the last, the empty caption."""
        nothing: dict[str, Any] = {"labels": torch.tensor([self.shape.num_classes])}
        if self.encoder is None and self.shape.takes_text:
            raise ConfigurationError(
                "LatentDiffusion: hiding text takes the embedding of the empty caption, and there is no text encoder: "
                "give the data one (text_encoder), set the module's text_encoder, or label_dropout and guidance to 0 "
                "and 1."
            )
        return self.of_batch({**nothing, "captions": [""]}, device)

    def _text(self, batch: dict[str, Any], device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Embeddings of the tokens, which of them count (None: all), and of the whole."""
        if "text" in batch:
            text, mask, pooled = (batch.get(name) for name in ("text", "text_mask", "pooled"))
        else:
            captions = self._member(batch, "captions")
            if self.encoder is None:
                raise ConfigurationError(
                    f"LatentDiffusion: {self.shape.name} takes text and there is no text encoder for the captions: "
                    "give the data one (text_encoder), or set the module's text_encoder."
                )
            text, mask, pooled = self.encoder.encode(list(captions), device)
        if self.encoder is not None and not self.encoder.hides_padding:
            mask = None
        if mask is not None and not self.shape.masks_text:
            raise ConfigurationError(
                f"LatentDiffusion: {self.shape.name} cannot leave tokens out; the batch must have no text_mask."
            )
        if self.shape.pooled_width and pooled is None:
            raise ConfigurationError(f"LatentDiffusion: {self.shape.name} takes a pooled text, and there is none.")
        text, mask, pooled = (None if part is None else moved(part, device) for part in (text, mask, pooled))
        return text, mask, pooled

    def _member(self, batch: dict[str, Any], name: str) -> Any:
        if name not in batch:
            raise ConfigurationError(
                f"LatentDiffusion: the backbone {self.shape.name} takes {', '.join(sorted(self.shape.conditions))}; "
                f"{name} are missing (there is {', '.join(sorted(batch)) or 'nothing'})."
            )
        return batch[name]


class Prompts:
    """Captions that samples are made for: ``given`` ones, or (None) the first of the validation data, with labels."""

    def __init__(self, given: list[str] | None) -> None:
        self.captions = list(given or ())
        self.labels: list[int] = []
        self._gathering = not given

    def gather(self, batch: dict[str, Any]) -> None:
        """Keep a validation batch's captions, up to 64 in all."""
        missing = _PROMPTS - len(self.captions)
        if not self._gathering or missing <= 0 or "captions" not in batch:
            return
        self.captions += list(batch["captions"][:missing])
        if "labels" in batch:
            self.labels += batch["labels"][:missing].tolist()

    def begin(self) -> None:
        """Before a validation: forget what a sanity check, which sees less of the data, has gathered."""
        if self._gathering:
            self.captions, self.labels = [], []

    def settle(self, broadcast: Callable[[Any], Any], final: bool) -> None:
        """After a validation, on all processes: the first one's captions for all; from now on, if ``final``."""
        if self._gathering:
            self.captions, self.labels = broadcast((self.captions, self.labels))
            self._gathering = not (self.captions and final)

    def first(self, count: int) -> list[str]:
        """``count`` captions, in turn."""
        if not self.captions:
            raise ConfigurationError(
                "LatentDiffusion: there are no captions to make samples for: set prompts, or validate once on data "
                "with captions."
            )
        return [self.captions[i % len(self.captions)] for i in range(count)]

    def labels_of(self, count: int) -> Tensor | None:
        """Their labels, [count]; None if they have none."""
        if not self.captions or len(self.labels) != len(self.captions):
            return None
        return torch.tensor([self.labels[i % len(self.labels)] for i in range(count)])

    def state(self) -> dict[str, Any]:
        """As primitives."""
        return {"captions": self.captions, "labels": self.labels}

    def load(self, state: dict[str, Any]) -> None:
        """Take those of a checkpoint, unless some were given."""
        if self._gathering and state["captions"]:
            self.captions, self.labels = list(state["captions"]), list(state["labels"])
            self._gathering = False
