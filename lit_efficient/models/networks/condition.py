"""Conditions of a diffusion network beside the noisy latent and its time, and how they are dropped for guidance.

    condition_i = null with probability p, else the condition of sample i;   one draw per sample, for all its parts

Classifier-free guidance needs a network that also knows the unconditional distribution. If label and text were dropped
by separate draws, most dropped samples would keep one of the two.

Costs: one draw and one ``where`` per part and step.
Source: Ho and Salimans (2022), https://arxiv.org/abs/2207.12598.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.losses.diffusion import per_sample


@dataclass(frozen=True)
class Condition:
    """Conditions of a batch of B samples. A part that is ``None`` is absent."""

    labels: Tensor | None = None  # classes, [B] int64
    text: Tensor | None = None  # token embeddings of captions, [B, L, D]
    mask: Tensor | None = None  # true for tokens that are not padding, [B, L] bool; None: all
    pooled: Tensor | None = None  # one embedding per caption, [B, P]
    # In pixels, [B, 6]: height and width of the original, top and left of the crop, height and width of the result.
    # SDXL keeps sizes in the unconditional pass, so that they are not dropped for guidance.
    sizes: Tensor | None = None
    # Image that the network sees beside the noisy latents, [B, C, H, W]: pixels in [0, 1], latents, or latents with a
    # mask. Like sizes, it is not dropped for guidance.
    image: Tensor | None = None
    # Lengths of intervals of time, [B], over which the network averages the velocity. Guidance keeps them, too.
    interval: Tensor | None = None

    def dropped(self, hidden: Tensor, null: "Condition") -> "Condition":
        """Return B conditions, where those of samples with ``hidden`` [B] true are replaced by ``null``.

        ``null`` has one sample or B. Shorter texts are padded with masked tokens.
        """
        ours, theirs = _of_one_length(self, null)
        return _merged(ours, theirs, lambda mine, its: torch.where(per_sample(hidden, mine), its.to(mine), mine))

    def followed_by(self, other: "Condition") -> "Condition":
        """Return both batches as one, this one first. They must have the same parts."""
        return _merged(*_of_one_length(self, other), lambda mine, its: torch.cat([mine, its.to(mine)]))

    def repeated(self, count: int) -> "Condition":
        """Return the condition of one sample for ``count`` samples."""
        return self.map(lambda part: part.expand(count, *part.shape[1:]))

    def rows(self, rows: slice) -> "Condition":
        """Return the conditions of some samples."""
        return self.map(lambda part: part[rows])

    def map(self, function: Callable[[Tensor], Tensor]) -> "Condition":
        """Return a condition with ``function`` applied to every part that is present."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return Condition(**{name: None if part is None else function(part) for name, part in parts.items()})

    @property
    def parts(self) -> set[str]:
        """Return the names of the parts that are dropped for guidance. A mask belongs to its text."""
        return {name for name in ("labels", "text", "pooled") if getattr(self, name) is not None}


def _merged(ours: Condition, theirs: Condition, function: Callable[[Tensor, Tensor], Tensor]) -> Condition:
    assert ours.parts == theirs.parts, f"conditions of {sorted(ours.parts)} and {sorted(theirs.parts)}"
    found: dict[str, Tensor] = {}
    for field in fields(Condition):
        mine = getattr(ours, field.name)
        its = getattr(theirs, field.name)
        if field.name in ("sizes", "image", "interval"):
            its = mine
        if mine is not None and its is not None:
            found[field.name] = function(mine, its)
    return Condition(**found)


def _of_one_length(ours: Condition, theirs: Condition) -> tuple[Condition, Condition]:
    """Return both with texts of equal length, and with masks if lengths differ or one has a mask."""
    if ours.text is None or theirs.text is None:
        return ours, theirs
    length = max(ours.text.shape[1], theirs.text.shape[1])
    if ours.text.shape[1] == theirs.text.shape[1] and ours.mask is None and theirs.mask is None:
        return ours, theirs
    return _padded(ours, length), _padded(theirs, length)


def _padded(condition: Condition, length: int) -> Condition:
    text = condition.text
    mask = condition.mask
    assert text is not None
    if mask is None:
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    missing = length - text.shape[1]
    if missing:
        text = F.pad(text, (0, 0, 0, missing))
        mask = F.pad(mask, (0, missing))
    return replace(condition, text=text, mask=mask)
