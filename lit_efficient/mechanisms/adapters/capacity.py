"""How much a low-rank adapter can learn, beside what there is to learn: a rank as a function of the data's size.

    bits that it holds = 2 * r * sum (in + out);    bits of the data = 1 * tokens that are learned in an epoch

Both are rules of thumb: two bits a parameter were measured of facts that networks store, and about a bit a token is
what is left to learn of text. An adapter with less than the data learns slower than a full training from there on.
Source: Schulman and Thinking Machines Lab (2025), https://thinkingmachines.ai/blog/lora; the two bits: Allen-Zhu and Li
(2024), https://arxiv.org/abs/2404.05405
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_BITS, _IGNORED = 2.0, -100


def rank_for(tokens: int, parameters_a_rank: int) -> int:
    """The smallest rank whose adapters hold as much as a data set.

    Args:
        tokens: That are learned in an epoch.
        parameters_a_rank: Sum of inputs and outputs of the adapted layers.

    Example:
        >>> rank_for(10_000_000, 500_000)
        10
    """
    return max(1, math.ceil(tokens / (_BITS * parameters_a_rank)))


def learned_tokens(batch: Any) -> int | None:
    """How many labels of a batch of tokens count; ``None`` for another batch."""
    labels = batch.get("shift_labels", batch.get("labels")) if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return None
    shifted = labels if "shift_labels" in batch else labels[:, 1:]
    return int((shifted != _IGNORED).sum())


def capacity_line(tokens: int, parameters: int, rank: int) -> str:
    """What is to be said of an adapter of ``parameters`` numbers and an epoch of ``tokens``."""
    need = rank_for(tokens, max(1, parameters // rank))
    verdict = "enough" if need <= rank else f"too little: about rank {need} holds it, with less the loss falls slower"
    return (
        f"about {tokens:,} tokens an epoch to learn, at a bit each; adapters of {parameters:,} parameters hold about "
        f"{_BITS:g} bits in each: {verdict}"
    )
