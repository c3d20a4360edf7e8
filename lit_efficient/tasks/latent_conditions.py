"""Conditions of a diffusion network from labels and captions, and the captions of the samples in validation."""

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.distributed.ranks import gather_objects
from lit_efficient.errors import ConfigurationError, check_number, checks_types, refusal
from lit_efficient.models.libraries.pipeline_folder import EmptyCaption
from lit_efficient.models.libraries.text_encoder import TextEncoder
from lit_efficient.models.networks.backbone_shape import BackboneShape
from lit_efficient.models.networks.condition import Condition
from lit_efficient.surgery import moved

T = TypeVar("T")
_PROMPTS = 64  # most captions of the validation data that are kept
_IMAGES = 8  # most captions if a network sees images, which are kept with them


@dataclass(frozen=True)
class Conditioning:
    """Builds the conditions that a network supports from batches."""

    shape: BackboneShape  # inputs of the network
    encoder: TextEncoder | None  # of captions; without one, batches contain their embeddings
    empty: EmptyCaption | None = None  # condition of hidden captions; None: encoded
    live: bool = False  # the encoder trains, so that stored embeddings are not those of its present weights
    stored: bool = False  # batches have embeddings: the encoder, which only embeds a few prompts, stays on the CPU

    def check(self, num_classes: int | None = None) -> None:
        """Check that the classes of the data and the text encoder fit the network.

        Raises:
            ConfigurationError: Naming the values that do not agree.
        """
        shape = self.shape
        encoder = self.encoder
        if num_classes is not None and shape.num_classes not in (0, num_classes):
            more = " (num_class_embeds has one row more)" if shape.name != "DiT" else ""
            allowed = f"{num_classes}, as the data has{more}"
            raise refusal("LatentDiffusion", "backbone.num_classes", allowed, shape.num_classes)
        if encoder is None:
            return
        if not shape.takes_text:
            raise ConfigurationError(
                f"LatentDiffusion: the data has a text encoder, but the backbone {shape.name} takes no text: leave the "
                "encoder out, or add attention to text to the backbone (context_width of DiTConfig)"
            )
        for name, wanted, found in (
            ("width", shape.text_width, encoder.width),
            ("pooled_width", shape.pooled_width, encoder.pooled_width),
        ):
            if wanted not in (0, found) and not (name == "width" and encoder.is_padded and found < wanted):
                raise ConfigurationError(
                    f"LatentDiffusion: the backbone {shape.name} takes text of {name} {wanted}; the text encoder's is "
                    f"{found}"
                )
        if encoder.hides_padding and not shape.masks_text:
            raise ConfigurationError(
                f"LatentDiffusion: {shape.name} cannot mask tokens, as the text encoder requires for its padding: set "
                "captions.padding: seen in its TextEncoderConfig"
            )

    def of_batch(self, batch: dict[str, Any], device: torch.device, negative: bool = False) -> Condition:
        """Return the conditions of the samples in a batch; with ``negative`` its captions are negative prompts."""
        labels = None
        if self.shape.num_classes:
            labels = moved(self._member(batch, "labels"), device)
        sizes = None
        if "sizes" in batch:
            sizes = moved(batch["sizes"].float(), device)
        if not self.shape.takes_text:
            return Condition(labels, sizes=sizes)
        text, mask, pooled = self._text(batch, device, negative)
        if not self.shape.text_width:
            text = None
            mask = None
        if not self.shape.pooled_width:
            pooled = None
        return Condition(labels, text, mask, pooled, sizes)

    def null(self, device: torch.device, prompt: str | None = None) -> Condition:
        """Return the empty condition of one sample: the class after the last one, and the empty caption.

        ``prompt`` is a negative prompt in place of the empty caption.
        """
        if self.encoder is None and self.shape.takes_text:
            raise ConfigurationError(
                "LatentDiffusion: hiding text needs the embedding of the empty caption, but there is no text encoder: "
                "add one to the data (text_encoder), set the module's text_encoder, or set label_dropout to 0 and the "
                "guidance scale to 1"
            )
        batch = {"labels": torch.tensor([self.shape.num_classes]), "captions": [prompt or ""]}
        empty = self.of_batch(batch, device, negative=True)
        if self.empty != "zeros" or prompt is not None:
            return empty
        zeros = empty.map(torch.zeros_like)
        return replace(empty, text=zeros.text, pooled=zeros.pooled)

    def _text(
        self, batch: dict[str, Any], device: torch.device, negative: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the embeddings of tokens, their mask (None if all count), and the pooled embedding."""
        if "text" in batch and self.live:
            raise ConfigurationError(
                "LatentDiffusion: the batch has embeddings of captions that the frozen encoder computed, and "
                "text_training trains the encoder: set cached_text: false in LatentData, so that captions are encoded "
                "in each step"
            )
        if "text" in batch:
            text, mask, pooled = (batch.get(name) for name in ("text", "text_mask", "pooled"))
        else:
            captions = self._member(batch, "captions")
            if self.encoder is None:
                raise ConfigurationError(
                    f"LatentDiffusion: {self.shape.name} takes text, but there is no text encoder for the captions: "
                    "add one to the data (text_encoder), or set the module's text_encoder"
                )
            place = torch.device("cpu") if self.stored else device
            text, mask, pooled = self.encoder.encode(list(captions), place, negative)
        if self.encoder is not None and not self.encoder.hides_padding:
            mask = None
        if mask is not None and not self.shape.masks_text:
            raise ConfigurationError(
                f"LatentDiffusion: {self.shape.name} cannot mask tokens; the batch must have no text_mask"
            )
        if self.shape.pooled_width and pooled is None:
            raise ConfigurationError(f"LatentDiffusion: {self.shape.name} takes a pooled text, but there is none")
        text, mask, pooled = (part if part is None else moved(part, device) for part in (text, mask, pooled))
        if text is not None and self.encoder is not None and self.encoder.is_padded:
            text = F.pad(text, (0, self.shape.text_width - text.shape[-1]))
        return text, mask, pooled

    def _member(self, batch: dict[str, Any], name: str) -> Any:
        if name not in batch:
            raise ConfigurationError(
                f"LatentDiffusion: the backbone {self.shape.name} takes {', '.join(sorted(self.shape.conditions))}; "
                f"{name} are missing (the batch has {', '.join(sorted(batch)) or 'nothing'})"
            )
        return batch[name]


@checks_types
@dataclass(frozen=True)
class TextTraining:
    """Text encoders that train together with the network, or whose adapters and new tokens do.

    Args:
        encoders: Names of the encoders, as in pipelines: text_encoder, text_encoder_2, text_encoder_3. null takes all
            that belong to CLIP.
        until: Share of the run's steps after which the encoders stay as they are, in (0, 1]. Captions are encoded by
            the trained encoders without gradients from then on.
        tokens: New words in captions (textual inversion), and for each the known words as which its embedding starts;
            null starts at random. All other weights are frozen except adapters: with `LoRA` this is pivotal tuning.
        vectors: Number of tokens that a new word stands for, each with an embedding: one number, or one for each word.
        seed: Seed of random first embeddings.
    """

    encoders: list[str] | None = None
    until: float = 1.0
    tokens: dict[str, str | None] | None = None
    vectors: int | dict[str, int] = 1
    seed: int = 0

    def __post_init__(self) -> None:
        owner = "LatentDiffusion"
        check_number(owner, "text_training.until", self.until, above=0, most=1)
        if self.tokens is not None and not self.tokens:
            raise refusal(owner, "text_training.tokens", "null or a mapping with at least one new word", self.tokens)
        vectors = self.vectors
        if isinstance(vectors, dict) and set(vectors) != set(self.tokens or ()):
            raise refusal(owner, "text_training.vectors", "a number, or one for each new word of tokens", vectors)
        for number in vectors.values() if isinstance(vectors, dict) else [vectors]:
            check_number(owner, "text_training.vectors", number, least=1, whole=True)

    @property
    def words(self) -> dict[str, list[str]]:
        """Return the tokens of each new word, named as by diffusers: the word, word_1, word_2, ..."""
        found = {}
        for word in self.tokens or ():
            count = self.vectors[word] if isinstance(self.vectors, dict) else self.vectors
            found[word] = [word, *(f"{word}_{number}" for number in range(1, count))]
        return found


class Prompts:
    """Captions for which samples are drawn: ``given`` ones, or the first of the validation data, with their labels.

    For networks that see images, images of the validation data are kept with the captions, and not in checkpoints.
    """

    def __init__(self, given: list[str] | None) -> None:
        self.captions = list(given or ())
        self.labels: list[int] = []
        self.images: list[Tensor] = []  # of one size, on the CPU
        self._gathering = not given

    def gather(self, batch: dict[str, Any], images: Tensor | None = None) -> None:
        """Keep the captions of a validation batch, up to 64 in all, or up to 8 with images [B, C, H, W]."""
        most = _PROMPTS
        if images is not None:
            most = _IMAGES
            if self.images and self.images[0].shape != images.shape[1:]:  # of another bucket
                return
            self.images += list(images[: most - len(self.images)].float().cpu())
        missing = most - len(self.captions)
        if not self._gathering or missing <= 0 or "captions" not in batch:
            return
        self.captions += list(batch["captions"][:missing])
        if "labels" in batch:
            self.labels += batch["labels"][:missing].tolist()

    def begin(self) -> None:
        """Before a validation, forget the captions of the sanity check, which sees only a part of the data."""
        if self._gathering:
            self.captions = []
            self.labels = []
        self.images = []

    def settle(self, rank: int, final: bool, images: bool = False) -> None:
        """After a validation, use the captions that one process alone would have, on all processes.

        Every process must call it.

        Args:
            rank: Rank among the processes with batches of their own.
            final: Stop gathering captions if there are some.
            images: Whether the network sees images.
        """
        if images:
            found = _in_turn(rank, self.images)[:_IMAGES]
            self.images = [image for image in found if image.shape == found[0].shape]
        if self._gathering:
            most = _IMAGES if images else _PROMPTS
            self.captions = _in_turn(rank, self.captions)[:most]
            self.labels = _in_turn(rank, self.labels)[:most]
            self._gathering = not (self.captions and final)

    def first(self, count: int) -> list[str]:
        """Return ``count`` captions. They repeat if there are fewer."""
        if not self.captions:
            raise ConfigurationError(
                "LatentDiffusion: there are no captions to draw samples for: set prompts, or validate once on data "
                "with captions"
            )
        return [self.captions[i % len(self.captions)] for i in range(count)]

    def labels_of(self, count: int) -> Tensor | None:
        """Return the labels of :meth:`first`, [count], or ``None`` if there are none."""
        if not self.captions or len(self.labels) != len(self.captions):
            return None
        return torch.tensor([self.labels[i % len(self.labels)] for i in range(count)])

    def first_images(self, count: int) -> Tensor:
        """Return the images of :meth:`first`, [count, C, H, W]."""
        if not self.images:
            raise ConfigurationError(
                "LatentDiffusion: the network sees images, and none are known to sample with: validate once, predict "
                "on data with condition images, or give images to `sample` (--images)"
            )
        return torch.stack([self.images[i % len(self.images)] for i in range(count)])

    def state(self) -> dict[str, Any]:
        """Return the state as primitives, for a checkpoint."""
        return {"captions": self.captions, "labels": self.labels}

    def load(self, state: dict[str, Any]) -> None:
        """Use the captions of a checkpoint, unless some were given."""
        if self._gathering and state["captions"]:
            self.captions = list(state["captions"])
            self.labels = list(state["labels"])
            self._gathering = False


def _in_turn(rank: int, own: list[T]) -> list[T]:
    """Return the entries of all processes, the first of each, then the second of each, and so on: rank r has every R-th
    row of the data, from the r-th on.
    """
    by_rank = dict(gather_objects((rank, own)))  # processes that share batches count once
    rows = zip_longest(*([(entry,) for entry in by_rank[one]] for one in sorted(by_rank)), fillvalue=())
    return [entry for row in rows for entries in row for entry in entries]
