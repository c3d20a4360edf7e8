"""Text encoders that train: captions are encoded in each step, by networks that hold adapters or train themselves.

    hidden [B, L, D], mask [B, L], pooled [B, P] = encode(captions)      with a gradient for the chosen encoders

The formulas are those of :class:`~lit_efficient.models.libraries.text_encoder.TextEncoder`. Each different caption of a
batch is encoded once. Encoders that do not train remember their embeddings.

Costs: a forward and a backward pass of the chosen encoders in each step; a second copy of their weights on the CPU
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lit_efficient.errors import refusal
from lit_efficient.models.libraries.text_encoder import TextEmbedding, TextEncoder, join, members
from lit_efficient.models.libraries.text_network import TextEncoderConfig, TextNetwork
from lit_efficient.surgery import moved


class LiveText(TextEncoder):
    """Text encoder some of whose networks train. The frozen encoder that it was made from does not change.

    Args:
        spec: Description of the encoder.
        parts: All networks, in the order in which their embeddings are joined.
        chosen: Names of the networks that train: ``text_encoder``, ``text_encoder_2``, ...
    """

    def __init__(self, spec: TextEncoderConfig, parts: list[TextNetwork], chosen: Sequence[str]) -> None:
        super().__init__(spec, parts)
        self.chosen = tuple(chosen)
        self._frozen = {
            name: TextEncoder(member, [part])
            for name, member, part in zip(names_of(len(parts)), members(spec), parts)
            if name not in chosen
        }

    @classmethod
    def of(cls, frozen: TextEncoder, chosen: Sequence[str] | None) -> "LiveText":
        """Return an encoder with trainable copies of chosen networks; None chooses those of CLIP.

        Raises:
            ConfigurationError: If a name is unknown, or nothing is chosen.
        """
        parts = frozen.own_parts()
        names = names_of(len(parts))
        if chosen is None:
            chosen = [name for name, part in zip(names, parts) if part.is_clip]
        if not chosen or not set(chosen) <= set(names):
            allowed = f"a list of at least one of {', '.join(names)}"
            raise refusal("LatentDiffusion", "text_training.encoders", allowed, list(chosen))
        for name, part in zip(names, parts):
            if name in chosen:
                part.network.requires_grad_(True).train()
        return cls(frozen.spec, parts, chosen)

    @property
    def trained(self) -> dict[str, TextNetwork]:
        """Return the networks that train by their names."""
        return {name: part for name, part in zip(names_of(len(self.parts)), self.parts) if name in self.chosen}

    @property
    def networks(self) -> nn.ModuleDict:
        """Return the modules of :attr:`trained`."""
        return nn.ModuleDict({name: part.network for name, part in self.trained.items()})

    def unread(self, pooled: bool) -> list[nn.Module]:
        """Return parts of :attr:`trained` that do not change an embedding; ``pooled``: the pooled one is used.

        Of SDXL's first encoder no pooled embedding is used, and so the last layer is not.
        """
        idle = {"text_encoder"} if self.spec.pipeline == "sdxl" else set()
        return [part for name, network in self.trained.items() for part in network.unread(pooled and name not in idle)]

    def encode(
        self, captions: Sequence[str], device: torch.device | str = "cpu", negative: bool = False
    ) -> TextEmbedding:
        """Return embeddings of captions on ``device``, with gradients where they are enabled."""
        device = torch.device(device)
        distinct = list(dict.fromkeys(captions))
        parts = []
        for name, part in zip(names_of(len(self.parts)), self.parts):
            if name in self._frozen:
                parts.append(self._frozen[name].encode(distinct, device, negative))
            else:
                parts.append(part.embed(distinct, device, negative))
        joined = join(self.spec, parts)
        rows = moved(torch.tensor([distinct.index(caption) for caption in captions], device="cpu"), device)
        pooled = None if joined.pooled is None else joined.pooled[rows]
        return TextEmbedding(joined.hidden[rows], joined.mask[rows], pooled)

    def __deepcopy__(self, memo: Any) -> "LiveText":
        """Return a copy whose networks are those of the copied module that holds them."""
        return type(self)(self.spec, copy.deepcopy(self.parts, memo), self.chosen)


def names_of(count: int) -> list[str]:
    """Return the names of a pipeline's encoders: ``text_encoder``, ``text_encoder_2``, ..."""
    return ["text_encoder", *(f"text_encoder_{number}" for number in range(2, count + 1))]
