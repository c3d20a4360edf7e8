"""Which samples of a batch to learn from, by their losses.

    share of the past losses that are no larger:  c_i = P(loss <= loss_i);    chosen with odds c_i^beta, or the easiest

Sources: Jiang et al. (2019), https://arxiv.org/abs/1910.00762; Kumar et al. (2010), self-paced learning.
"""

import math

import torch
from torch import Tensor


def share_of(share: float, count: int) -> int:
    """A share of ``count`` things, rounded up, at least 1; 0.55 of 100 are 55, though the product is above that.

    Example:
        >>> share_of(0.55, 100), share_of(0.551, 100), share_of(0.0, 100)
        (55, 56, 1)
    """
    return max(1, math.ceil(share * count * (1 - 1e-12)))


def selection_odds(losses: Tensor, history: Tensor, beta: float) -> Tensor:
    """The odds of samples to be chosen: the share of past losses that are no larger, to the power of ``beta``.

    Args:
        losses: [B].
        history: Losses of earlier samples, with these [R].
        beta: The larger, the more hard samples are favoured; 0: all alike.

    Returns:
        [B] float64 on the CPU, between 0 and 1.

    Source: Jiang et al. (2019), https://arxiv.org/abs/1910.00762, section 3.1.
    """
    known = history.double().cpu().sort().values
    shares = torch.searchsorted(known, losses.double().cpu(), right=True).double() / len(known)
    return shares**beta


def choose(odds: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """``count`` samples without repetition, drawn one after the other by their odds; indices [count], ascending.

    Args:
        odds: [B], on the CPU; those that are 0 are taken only where the others do not suffice.
        count: At least 1, at most B.
        generator: Of the CPU.
    """
    tiny = odds.double().clamp(min=torch.finfo(torch.float64).tiny)
    draws = torch.empty_like(tiny).exponential_(generator=generator)
    return (draws.log() - tiny.log()).argsort()[:count].sort().values  # as an exponential race, the same distribution


def easiest(losses: Tensor, share: float) -> Tensor:
    """Weights [B] of mean 1 that keep the samples of the smallest losses and leave the others out.

    Args:
        losses: [B]; of equal ones those that come first are smaller.
        share: Of the samples, above 0 and at most 1; rounded up.

    Source: Kumar et al. (2010), with the threshold at a quantile of the batch.
    """
    count = share_of(share, len(losses))
    weights = torch.zeros_like(losses)
    weights[losses.argsort(stable=True)[:count]] = len(losses) / count
    return weights
