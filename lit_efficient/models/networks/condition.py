"""What a diffusion network gets besides the noisy latent and its time, and how it is hidden for guidance.

    condition_i = null with probability p, else what belongs to sample i;   one draw a sample, for all its parts

Classifier-free guidance needs a network that also knows the distribution without any condition. A label and a text that
were hidden by draws of their own would leave it, for most of the hidden samples, with the other half of the answer.

Costs: one draw and one ``where`` a part and step.
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
    """Conditions of a batch of B samples; a part that is None is none."""

    labels: Tensor | None = None  # classes, [B] int64
    text: Tensor | None = None  # token embeddings of captions, [B, L, D]
    mask: Tensor | None = None  # which of the tokens count, [B, L] bool; None: all
    pooled: Tensor | None = None  # one embedding a caption, [B, P]
    # Pixels, [B, 6]: height and width of the original, top and left of the crop, height and width of the result. They
    # are not hidden for guidance.
    sizes: Tensor | None = None

    def dropped(self, hidden: Tensor, null: "Condition") -> "Condition":
        """B conditions, of which those ``hidden`` [B] are replaced by that of nothing, of one sample or of B; shorter
        texts are padded with masked tokens.
        """
        ours, theirs = _of_one_length(self, null)
        return _merged(ours, theirs, lambda mine, its: torch.where(per_sample(hidden, mine), its.to(mine), mine))

    def followed_by(self, other: "Condition") -> "Condition":
        """Both batches as one, this one first; they have the same parts."""
        return _merged(*_of_one_length(self, other), lambda mine, its: torch.cat([mine, its.to(mine)]))

    def repeated(self, count: int) -> "Condition":
        """One sample's condition for ``count`` samples."""
        return self.map(lambda part: part.expand(count, *part.shape[1:]))

    def rows(self, rows: slice) -> "Condition":
        """The conditions of some samples."""
        return self.map(lambda part: part[rows])

    def map(self, function: Callable[[Tensor], Tensor]) -> "Condition":
        """``function`` of every part that there is."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return Condition(**{name: None if part is None else function(part) for name, part in parts.items()})

    @property
    def parts(self) -> set[str]:
        """Names of the parts that are hidden for guidance; a mask belongs to its text."""
        return {name for name in ("labels", "text", "pooled") if getattr(self, name) is not None}


def _merged(ours: Condition, theirs: Condition, function: Callable[[Tensor, Tensor], Tensor]) -> Condition:
    assert ours.parts == theirs.parts, f"conditions of {sorted(ours.parts)} and {sorted(theirs.parts)}"
    found: dict[str, Tensor] = {}
    for field in fields(Condition):
        mine, its = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "sizes":
            its = mine
        if mine is not None and its is not None:
            found[field.name] = function(mine, its)
    return Condition(**found)


def _of_one_length(ours: Condition, theirs: Condition) -> tuple[Condition, Condition]:
    """Both with a mask if one has it, and texts of as many tokens."""
    if ours.text is None or theirs.text is None:
        return ours, theirs
    lengths = ours.text.shape[1], theirs.text.shape[1]
    if lengths[0] == lengths[1] and ours.mask is None and theirs.mask is None:
        return ours, theirs
    return _padded(ours, max(lengths)), _padded(theirs, max(lengths))


def _padded(condition: Condition, length: int) -> Condition:
    text, mask = condition.text, condition.mask
    assert text is not None
    if mask is None:
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    missing = length - text.shape[1]
    if missing:
        text, mask = F.pad(text, (0, 0, 0, missing)), F.pad(mask, (0, missing))
    return replace(condition, text=text, mask=mask)
