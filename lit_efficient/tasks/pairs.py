"""Batches of pairs: chosen and rejected answers are joined to one batch for the network, and split again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import IGNORE

_PADDING = {"input_ids": 0, "labels": IGNORE, "attention_mask": 0}


@dataclass(frozen=True)
class Comparison:
    """Losses and rewards of a batch of pairs."""

    losses: Tensor  # ``[B]``
    chosen: Tensor  # rewards of the chosen answers ``[B]``, without a gradient
    rejected: Tensor  # rewards of the rejected answers ``[B]``, without a gradient
    router_loss: Tensor | None = None  # balancing loss of a mixture of experts, if the model has one

    def figures(self) -> dict[str, Tensor]:
        """Return means over the batch by their logged names. A tie counts as half correct."""
        margin = self.chosen - self.rejected
        return {
            "loss": self.losses.detach().mean(),
            "accuracy": ((margin.sign() + 1) / 2).mean(),
            "margin": margin.mean(),
            "rewards/chosen": self.chosen.mean(),
            "rewards/rejected": self.rejected.mean(),
        }


def joined(
    batch: Mapping[str, Tensor],
    who: str,
    needed: Sequence[str] = ("input_ids", "labels"),
    optional: Sequence[str] = ("attention_mask",),
) -> dict[str, Tensor]:
    """Concatenate chosen and rejected answers along the batch, padded on the right: ``[2 B, T]`` each.

    Args:
        batch: Tensors ``chosen_*`` and ``rejected_*`` ``[B, T]``, with different T.
        who: Name at the beginning of the error message.
        needed: Names, without prefix, of tensors that must exist.
        optional: Names of tensors that may be missing. Other tensors are left out.

    Returns:
        The tensors by their names without prefix.

    Raises:
        ConfigurationError: If the batch has no pairs.
    """
    found = {}
    for name in (*needed, *optional):
        sides = [batch.get(f"{side}_{name}") for side in ("chosen", "rejected")]
        present = [side for side in sides if side is not None]
        if len(present) < 2 and (present or name in needed):
            raise ConfigurationError(
                f"{who}: a batch must have chosen_{name} and rejected_{name}; got {', '.join(sorted(batch))}. "
                "PreferenceData makes such batches"
            )
        if present:
            length = max(side.shape[1] for side in present)
            padded = [F.pad(side, (0, length - side.shape[1]), value=_PADDING[name]) for side in present]
            found[name] = torch.cat(padded)
    return found


def pairs_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``[2 B]`` into the values of chosen ``[B]`` and rejected ``[B]`` answers."""
    chosen, rejected = values.chunk(2)
    return chosen, rejected
