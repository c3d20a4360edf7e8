"""Batches of pairs: chosen and rejected answers as one batch for the network, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import IGNORE

_FILLING = {"input_ids": 0, "labels": IGNORE, "attention_mask": 0}


def joined(batch: Mapping[str, Tensor], who: str) -> dict[str, Tensor]:
    """One batch of the chosen answers and, below them, the rejected ones, filled up on the right to the same length.

    Args:
        batch: ``chosen_input_ids``, ``chosen_labels`` and maybe ``chosen_attention_mask`` ``[B, T]``, and the same with
            ``rejected_``, whose T may be another. Further entries are left out.
        who: the task that asks, for the error.

    Returns:
        ``input_ids``, ``labels`` and maybe ``attention_mask``, ``[2 B, T]``.

    Raises:
        ConfigurationError: If the batch has no pairs.
    """
    found = {}
    for name, filling in _FILLING.items():
        sides = [batch.get(f"{side}_{name}") for side in ("chosen", "rejected")]
        present = [side for side in sides if side is not None]
        if len(present) < 2 and (present or name != "attention_mask"):
            raise ConfigurationError(
                f"{who}: a batch must have chosen_{name} and rejected_{name}; got {', '.join(sorted(batch))}. "
                "PreferenceData makes such batches."
            )
        if present:
            length = max(side.shape[1] for side in present)
            found[name] = torch.cat([F.pad(side, (0, length - side.shape[1]), value=filling) for side in present])
    return found


def pairs_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """``[2 B]`` as chosen ``[B]`` and rejected ``[B]``."""
    chosen, rejected = values.chunk(2)
    return chosen, rejected
