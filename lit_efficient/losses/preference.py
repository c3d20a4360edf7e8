"""Losses on pairs of answers, of which one is preferred: from log-probabilities of whole answers, or from rewards.

    h          = (log p(c) - log p_ref(c)) - (log p(r) - log p_ref(r)),    c chosen, r rejected
    sigmoid    -(1 - e) log s(b h) - e log s(-b h)       DPO, s the logistic function; e > 0 is conservative DPO
    hinge      max(0, 1 - b h)                           SLiC
    ipo        (h - 1 / (2 b))^2                         with log-probabilities averaged over tokens
    orpo       -a(c) - l log s(o(c) - o(r)),             o(x) = a(x) - log(1 - exp a(x)), a averaged over tokens
    simpo      -log s(b (a(c) - a(r)) - g)
    reward     -log s(R(c) - R(r) - m) + k (R(c) + R(r))^2

Everything is ``[B]`` in and ``[B]`` out, one number a pair, so that any weighting can follow.
Sources: DPO https://arxiv.org/abs/2305.18290, SLiC https://arxiv.org/abs/2305.10425 (as a loss of this family:
https://arxiv.org/abs/2309.06657), IPO https://arxiv.org/abs/2310.12036, ORPO https://arxiv.org/abs/2403.07691, SimPO
https://arxiv.org/abs/2405.14734, centred rewards https://arxiv.org/abs/2312.09244.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_choice, check_number
from lit_efficient.losses.next_token import IGNORE, token_losses

Kind = Literal["sigmoid", "hinge", "ipo"]


def sequence_log_probs(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of the labels of each sequence.

    Args:
        scores: logits ``[B, T, V]``, or what `token_losses` made of them ``[B, T]``.
        labels: ``[B, T]``, already shifted; `IGNORE` counts for nothing, so a masked prompt does not.

    Returns:
        The sum over tokens ``[B]``, in float32 at least, and the number of tokens that count ``[B]``, at least 1: their
        quotient is the average.
    """
    losses = token_losses(scores, labels) if scores.ndim == 3 else scores
    return -losses.sum(1), (labels != IGNORE).sum(1).clamp(min=1)


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    kind: Kind = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Losses ``[B]`` that raise the chosen answer above the rejected one, compared with a reference.

    Args:
        policy_chosen: log-probability of each chosen answer ``[B]``: summed over tokens, for ``ipo`` averaged.
        policy_rejected: that of each rejected one ``[B]``.
        ref_chosen: the reference's ``[B]``, without a gradient.
        ref_rejected: the same of the rejected answers.
        beta: above 0; the larger, the nearer the policy stays to the reference.
        kind: which loss, see above.
        label_smoothing: the probability e, in [0, 0.5), that a pair is labelled the wrong way round; for ``sigmoid``.

    Raises:
        ConfigurationError: For an argument out of range.
    """
    check_dpo("dpo_loss", beta, kind, label_smoothing)
    h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    if kind == "hinge":
        return F.relu(1 - beta * h)
    if kind == "ipo":
        return (h - 1 / (2 * beta)).square()
    losses = -F.logsigmoid(beta * h)
    if label_smoothing == 0:
        return losses
    return (1 - label_smoothing) * losses - label_smoothing * F.logsigmoid(-beta * h)


def check_dpo(who: str, beta: float, kind: str, label_smoothing: float) -> None:
    """Refuse arguments of :func:`dpo_loss` that are out of range, in the name of ``who``."""
    check_number(who, "beta", beta, above=0)
    check_choice(who, "kind", kind, ("sigmoid", "hinge", "ipo"))
    check_number(who, "label_smoothing", label_smoothing, least=0, below=0.5)
    if label_smoothing and kind != "sigmoid":
        raise ConfigurationError(f"{who}: label_smoothing is for the sigmoid loss, got {label_smoothing} with {kind}.")


def log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for x below 0, exact at both ends; x above -eps counts as -eps, so that it is finite."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    # Near 0 exp(x) would round to 1, far below expm1(x) to -1: each form is used where it is the exact one.
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def orpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Losses ``[B]`` of ORPO, which needs no reference, and the log odds ratio ``[B]`` without a gradient.

    Args:
        policy_chosen: average log-probability of a token of each chosen answer ``[B]``.
        policy_rejected: that of each rejected one ``[B]``.
        weight: of the odds ratio, lambda in the paper, at least 0.

    Raises:
        ConfigurationError: For a weight out of range.
    """
    check_number("orpo_loss", "weight", weight, least=0)
    log_odds = (policy_chosen - log1mexp(policy_chosen)) - (policy_rejected - log1mexp(policy_rejected))
    return -policy_chosen - weight * F.logsigmoid(log_odds), log_odds.detach()


def simpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, beta: float, gamma: float) -> Tensor:
    """Losses ``[B]`` that raise the chosen answer's average log-probability by a margin; no reference.

    Args:
        policy_chosen: average log-probability of a token of each chosen answer ``[B]``.
        policy_rejected: that of each rejected one ``[B]``.
        beta: scale of the rewards, above 0; 2 to 10 in the paper.
        gamma: the margin between rewards, at least 0.

    Raises:
        ConfigurationError: For an argument out of range.
    """
    check_number("simpo_loss", "beta", beta, above=0)
    check_number("simpo_loss", "gamma", gamma, least=0)
    return -F.logsigmoid(beta * (policy_chosen - policy_rejected) - gamma)


def reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, centering: float = 0.0) -> Tensor:
    """Losses ``[B]`` of a reward model by Bradley and Terry.

    Args:
        chosen: reward of each chosen answer ``[B]``.
        rejected: that of each rejected one ``[B]``.
        margin: by how much the chosen reward should be larger ``[B]``; None is 0.
        centering: weight k of a term that keeps rewards around 0 (0.01 in its paper), at least 0.

    Raises:
        ConfigurationError: For a centering out of range.
    """
    check_number("reward_loss", "centering", centering, least=0)
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    losses = -F.logsigmoid(difference)
    return losses + centering * (chosen + rejected).square() if centering else losses
