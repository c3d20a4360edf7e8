"""Losses on pairs of a chosen and a rejected answer, from log-probabilities of the answers or from rewards.

    h          = (log p(c) - log p_ref(c)) - (log p(r) - log p_ref(r)),    c chosen, r rejected
    sigmoid    -(1 - e) log s(b h - o) - e log s(o - b h)    DPO, s the logistic function; e > 0 is conservative DPO,
                                                             o > 0 is DPO with an offset
    hinge      max(0, 1 - b h)                           SLiC
    ipo        (h - 1 / (2 b))^2                         with log-probabilities averaged over tokens
    orpo       -a(c) - l log s(o(c) - o(r)),             o(x) = a(x) - log(1 - exp a(x)), a = log p averaged over tokens
    simpo      -log s(b (a(c) - a(r)) - g)
    kto        w (1 - s(v)),    v = b (l - k) if the answer is good, b (k - l) if it is bad; l = log p - log p_ref,
                                k the mean of l over answers to other prompts, at least 0
    apo_zero   as kto with k = 0
    reward     -log s(R(c) - R(r) - m) + k (R(c) + R(r))^2

Inputs and outputs are ``[B]``, one number for each pair, so that any weighting can be applied afterwards.
Sources: DPO https://arxiv.org/abs/2305.18290, its offsets https://arxiv.org/abs/2402.10571, SLiC
https://arxiv.org/abs/2305.10425 (as a loss of this family: https://arxiv.org/abs/2309.06657), IPO
https://arxiv.org/abs/2310.12036, ORPO https://arxiv.org/abs/2403.07691, SimPO https://arxiv.org/abs/2405.14734, centred
rewards https://arxiv.org/abs/2312.09244, KTO https://arxiv.org/abs/2402.01306, APO https://arxiv.org/abs/2408.06266.
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
    """Return the log-probability of each sequence and its number of tokens.

    Args:
        scores: Logits ``[B, T, V]``, or the `token_losses` of these logits ``[B, T]``.
        labels: ``[B, T]``, already shifted. Tokens with the label `IGNORE`, such as a masked prompt, do not count.

    Returns:
        The sum of log-probabilities over tokens ``[B]``, in float32 at least, and the number of tokens that count
        ``[B]``, at least 1. Their quotient is the average log-probability.
    """
    losses = scores
    if scores.ndim == 3:
        losses = token_losses(scores, labels)
    return -losses.sum(1), (labels != IGNORE).sum(1).clamp(min=1)


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    kind: Kind = "sigmoid",
    label_smoothing: float = 0.0,
    offset: Tensor | None = None,
) -> Tensor:
    """Return losses ``[B]`` that make the chosen answer more likely than the rejected one, relative to a reference.

    Args:
        policy_chosen: Log-probability of each chosen answer ``[B]``, summed over tokens (averaged for ``ipo``).
        policy_rejected: Log-probability of each rejected answer ``[B]``.
        ref_chosen: Log-probability of each chosen answer under the reference ``[B]``, without a gradient.
        ref_rejected: Log-probability of each rejected answer under the reference ``[B]``.
        beta: Strength of the reference, above 0. Larger values keep the policy closer to it.
        kind: ``sigmoid`` (DPO), ``hinge`` (SLiC) or ``ipo``.
        label_smoothing: Probability e that a pair is labelled the wrong way round, in [0, 0.5). Only for ``sigmoid``.
        offset: Amount o by which the reward ``beta h`` of the chosen answer should be larger ``[B]``. Only for
            ``sigmoid``. ``None`` is 0.

    Raises:
        ConfigurationError: For an argument out of range.
    """
    check_dpo("dpo_loss", beta, kind, label_smoothing)
    if offset is not None and kind != "sigmoid":
        raise ConfigurationError(f"dpo_loss: offset needs kind 'sigmoid', got {kind!r}")
    h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    if kind == "hinge":
        return F.relu(1 - beta * h)
    if kind == "ipo":
        return (h - 1 / (2 * beta)).square()
    rewards = beta * h
    if offset is not None:
        rewards = rewards - offset
    losses = -F.logsigmoid(rewards)
    if label_smoothing == 0:
        return losses
    return (1 - label_smoothing) * losses - label_smoothing * F.logsigmoid(-rewards)


def check_dpo(who: str, beta: float, kind: str, label_smoothing: float) -> None:
    """Raise ConfigurationError for arguments of :func:`dpo_loss` that are out of range. ``who`` begins the message."""
    check_number(who, "beta", beta, above=0)
    check_choice(who, "kind", kind, ("sigmoid", "hinge", "ipo"))
    check_number(who, "label_smoothing", label_smoothing, least=0, below=0.5)
    if label_smoothing and kind != "sigmoid":
        raise ConfigurationError(f"{who}: label_smoothing needs kind 'sigmoid', got {label_smoothing} with {kind!r}")


def log1mexp(x: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` for x below 0, accurate at both ends. x is at most -eps, so the result is finite."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    # exp(x) rounds to 1 near 0, and expm1(x) rounds to -1 far below 0. Each form is used where it is accurate.
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def orpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Return the losses of ORPO, which needs no reference.

    Args:
        policy_chosen: Log-probability of each chosen answer, averaged over its tokens ``[B]``.
        policy_rejected: Log-probability of each rejected answer, averaged over its tokens ``[B]``.
        weight: Weight of the odds ratio (lambda in the paper), at least 0.

    Returns:
        The losses ``[B]``, and the log odds ratio ``[B]`` without a gradient.

    Raises:
        ConfigurationError: For a weight out of range.
    """
    check_number("orpo_loss", "weight", weight, least=0)
    log_odds = (policy_chosen - log1mexp(policy_chosen)) - (policy_rejected - log1mexp(policy_rejected))
    return -policy_chosen - weight * F.logsigmoid(log_odds), log_odds.detach()


def simpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, beta: float, gamma: float) -> Tensor:
    """Return losses ``[B]`` that make the chosen answer more likely by a margin, without a reference.

    Args:
        policy_chosen: Log-probability of each chosen answer, averaged over its tokens ``[B]``.
        policy_rejected: Log-probability of each rejected answer, averaged over its tokens ``[B]``.
        beta: Scale of the rewards, above 0. The paper uses 2 to 10.
        gamma: Margin between the rewards, at least 0.

    Raises:
        ConfigurationError: For an argument out of range.
    """
    check_number("simpo_loss", "beta", beta, above=0)
    check_number("simpo_loss", "gamma", gamma, least=0)
    return -F.logsigmoid(beta * (policy_chosen - policy_rejected) - gamma)


def kto_loss(
    log_ratios: Tensor,
    desirable: Tensor,
    beta: float,
    kl: Tensor | float = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return losses ``[B]`` that make good answers more likely than under the reference, and bad ones less likely.

    Args:
        log_ratios: Log-probability of each answer, summed over its tokens, minus that under the reference ``[B]``.
        desirable: True for good answers ``[B]``.
        beta: Strength of the reference, above 0.
        kl: Estimate k of the divergence from the reference, without a gradient. 0 gives ``apo_zero``.
        desirable_weight: Weight of good answers, at least 0.
        undesirable_weight: Weight of bad answers, at least 0.

    Raises:
        ConfigurationError: For an argument out of range.
    """
    check_number("kto_loss", "beta", beta, above=0)
    check_number("kto_loss", "desirable_weight", desirable_weight, least=0)
    check_number("kto_loss", "undesirable_weight", undesirable_weight, least=0)
    sign = desirable.to(log_ratios.dtype) * 2 - 1
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    return weights * (1 - torch.sigmoid(sign * beta * (log_ratios - kl)))


def reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, centering: float = 0.0) -> Tensor:
    """Return the losses ``[B]`` of a Bradley-Terry reward model.

    Args:
        chosen: Reward of each chosen answer ``[B]``.
        rejected: Reward of each rejected answer ``[B]``.
        margin: Amount by which the chosen reward should be larger ``[B]``. ``None`` is 0.
        centering: Weight k of a term that keeps rewards around 0, at least 0. Its paper uses 0.01.

    Raises:
        ConfigurationError: For a centering out of range.
    """
    check_number("reward_loss", "centering", centering, least=0)
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    losses = -F.logsigmoid(difference)
    if centering:
        losses = losses + centering * (chosen + rejected).square()
    return losses
