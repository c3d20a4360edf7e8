"""Selection of the samples of a batch that contribute to the loss, by their own losses.

    selective backprop:  odds c_i^beta with c_i = P(past loss <= loss_i)
    curriculum:          the samples with the smallest losses

Sources: Jiang et al. (2019), https://arxiv.org/abs/1910.00762; Kumar et al. (2010), self-paced learning.
"""

import math

import torch
from torch import Tensor


def share_of(share: float, count: int) -> int:
    """Return ``share * count`` rounded up, at least 1. Rounding errors of the product do not count.

    Example:
        >>> share_of(0.55, 100), share_of(0.551, 100), share_of(0.0, 100)
        (55, 56, 1)
    """
    return max(1, math.ceil(share * count * (1 - 1e-12)))  # 0.55 * 100 is slightly above 55 in floating point


def selection_odds(losses: Tensor, history: Tensor, beta: float) -> Tensor:
    """Return the odds with which samples are chosen: (share of past losses that are not larger) ** ``beta``.

    Args:
        losses: Losses of the batch, [B].
        history: Losses of earlier samples and of this batch, [R].
        beta: Exponent. 0 gives equal odds, and larger values favour samples with large losses.

    Returns:
        [B] float64 on the CPU, between 0 and 1.

    Source: Jiang et al. (2019), https://arxiv.org/abs/1910.00762, section 3.1.
    """
    known = history.double().cpu().sort().values
    shares = torch.searchsorted(known, losses.double().cpu(), right=True).double() / len(known)
    return shares**beta


def choose(odds: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw samples without replacement, with probabilities proportional to their odds.

    Args:
        odds: [B], on the CPU. A sample with odds of 0 is only drawn if there are too few others.
        count: Number of samples, from 1 to B.
        generator: Random generator on the CPU.

    Returns:
        Indices [count], ascending.
    """
    odds = odds.double().clamp(min=torch.finfo(torch.float64).tiny)
    draws = torch.empty_like(odds).exponential_(generator=generator)
    # The smallest exponential variables with rates `odds` have the same distribution as sequential draws.
    return (draws.log() - odds.log()).argsort()[:count].sort().values


def easiest(losses: Tensor, share: float) -> Tensor:
    """Return weights [B] of mean 1 that keep the samples with the smallest losses and set the others to 0.

    Args:
        losses: [B]. Of equal losses, the first in the batch counts as smaller.
        share: Share of the samples to keep, above 0 and at most 1. Their number is rounded up.

    Source: Kumar et al. (2010), with a quantile of the batch as threshold.
    """
    count = share_of(share, len(losses))
    weights = torch.zeros_like(losses)
    weights[losses.argsort(stable=True)[:count]] = len(losses) / count
    return weights
