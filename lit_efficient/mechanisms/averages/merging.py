"""Merges of models that were fine-tuned from one base, by the changes that each of them made (task vectors).

    task arithmetic   W = W0 + sum_i w_i D_i,                 D_i = W_i - W0
    TIES              D_i keeps its largest entries; entries whose sign is not that of sum_i D_i are dropped;
                      W = W0 + mean of w_i D_i over the models that are left for an entry
    DARE              D_i keeps random entries, divided by the share that is kept; then one of the two above

Each tensor is pruned separately. Sources: task arithmetic https://arxiv.org/abs/2212.04089, TIES
https://arxiv.org/abs/2306.01708, DARE https://arxiv.org/abs/2311.03099. The numbers are those of peft's merge_utils,
but TIES keeps at least one entry of each tensor.
"""

import torch
from torch import Tensor

METHODS = ("task_arithmetic", "ties", "dare_linear", "dare_ties")


def merged_change(
    changes: Tensor, weights: Tensor, method: str, density: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Return the change of the base that merges the changes of several models.

    Args:
        changes: Differences of the models from the base, [models, ...].
        weights: Factors of the models, [models]. They are not normalised.
        method: One of :data:`METHODS`.
        density: Share of each change that is kept, above 0 and at most 1. ``task_arithmetic`` keeps all.
        generator: Random numbers of DARE.
    """
    if method == "ties":
        changes = torch.stack([keep_largest(change, density) for change in changes])
    elif method != "task_arithmetic":
        kept = torch.rand(changes.shape, generator=generator, dtype=changes.dtype, device="cpu") < density
        changes = changes * kept / density
    weighted = changes * weights.to(changes.dtype).view(-1, *[1] * (changes.ndim - 1))
    if not method.endswith("ties"):
        return weighted.sum(0)
    majority = torch.where(changes.sum(0) >= 0, 1, -1)
    agrees = changes.sign() == majority
    return (weighted * agrees).sum(0) / agrees.sum(0).clamp_min(1)


def keep_largest(change: Tensor, density: float) -> Tensor:
    """Return ``change`` with zeros in place of all but the share ``density`` of its entries with the largest values.

    At least one entry is kept, so that the change of a single number is not lost.
    """
    kept = torch.zeros(change.numel(), dtype=torch.bool)
    count = min(change.numel(), max(1, int(density * change.numel())))
    kept[change.abs().flatten().topk(count).indices] = True
    return change * kept.view_as(change)
