"""Batches of pairs: chosen and rejected answers as one batch for the network, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import IGNORE

_FILLING = {"input_ids": 0, "labels": IGNORE, "attention_mask": 0}


@dataclass(frozen=True)
class Comparison:
    """What became of a batch of pairs."""

    losses: Tensor  # ``[B]``
    chosen: Tensor  # rewards of the chosen answers ``[B]``, without a gradient
    rejected: Tensor  # those of the rejected ones ``[B]``
    router_loss: Tensor | None = None  # the balancing loss of a mixture of experts, if it asks for one

    def figures(self) -> dict[str, Tensor]:
        """Means over the batch, by the names that are logged; a tie is half right."""
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
    """The chosen answers and, below them, the rejected ones, ``[2 B, T]`` each, filled up on the right.

    The batch has ``chosen_input_ids`` and so on, ``[B, T]``, and the same with ``rejected_``, whose T may be another;
    what is neither ``needed`` nor ``optional`` is left out.

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
                "PreferenceData makes such batches."
            )
        if present:
            length, filling = max(side.shape[1] for side in present), _FILLING[name]
            found[name] = torch.cat([F.pad(side, (0, length - side.shape[1]), value=filling) for side in present])
    return found


def pairs_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """``[2 B]`` as chosen ``[B]`` and rejected ``[B]``."""
    chosen, rejected = values.chunk(2)
    return chosen, rejected
