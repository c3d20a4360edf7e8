"""Losses of policy optimisation on groups of samples, from the log-probabilities of their tokens.

    A         advantage of a sample: its reward r compared with those of the group of samples of its prompt
    q_t       p(token t) / p_old(token t),  p_old the policy that the samples came from
    clip(q)   -min(q A, clamp(q, 1 - low, 1 + high) A)

    grpo          A = (r - mean) / (std + 1e-4)    mean over samples of the mean over tokens of clip(q_t)
    dr_grpo       A = r - mean                     sum over tokens of clip(q_t) / (samples x longest answer)
    dapo          as grpo                          mean over all tokens of clip(q_t), with high > low
    gspo          as grpo                          mean over samples of clip(s), s = exp(mean over tokens of log q_t)
    rloo          A = r - mean of the others       mean over samples of clip(product over tokens of q_t)
    reinforce++   A normalised over all samples    mean over all tokens of clip(q_t)

    k1            r - b sum log(p_old / p_ref), or token by token for reinforce++: A_t from r - b sum over t' >= t
    k3            loss + b (p_ref / p - log(p_ref / p) - 1) for each token
    k3_weighted   the same times the ratio of probabilities, whose gradient is that of the divergence (DeepSeek-V3.2)

    w_t = p_old(token t) / p_drawn(token t),  p_drawn the distribution that the generator drew from
    token         the loss of a token, without the divergence, times min(w_t, cap)                (truncated weights)
    sequence      that of a sample times the product of its w_t, or 0 if this is above the cap    (masked weights)

All probabilities are those at the temperature of generation. w_t differs from 1 where generation rounds in another way
than training (another program or number format), and where top-k, top-p and min-p leave out tokens.

k1 is part of the reward, because as a loss its gradient vanishes in expectation. A reward that is NaN leaves its sample
out: it is in no mean of rewards, and its advantage is 0. reinforce++ normalises over the samples of a micro-batch in
all processes, and no other loss depends on how an optimizer step is divided into micro-batches.

Sources: GRPO https://arxiv.org/abs/2402.03300, Dr. GRPO https://arxiv.org/abs/2503.20783, DAPO
https://arxiv.org/abs/2503.14476, GSPO https://arxiv.org/abs/2507.18071, RLOO https://arxiv.org/abs/2402.14740,
REINFORCE++ https://arxiv.org/abs/2501.03262, k1 and k3 http://joschu.net/blog/kl-approx.html, DeepSeek-V3.2
https://arxiv.org/abs/2512.02556, truncated weights https://fengyao.notion.site/off-policy-rl, masked weights
https://richardli.xyz/rl-collapse.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_efficient.errors import check_choice, check_number, checks_types, refusal

Kind = Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++"]
KL = Literal["none", "k1", "k3", "k3_weighted"]
Correction = Literal["none", "token", "sequence"]
KINDS = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++")
PER_TOKEN = ("dapo", "reinforce++")  # means over the tokens of all samples
_IN_LOSS = ("k3", "k3_weighted")
_EPS = 1e-4  # added to standard deviations
_MOST = 80.0  # exp() of more is soon infinite in float32, and infinity times an advantage of 0 is NaN
# Published defaults: a ratio of whole answers, normalised by their length, is much closer to 1 than one of tokens.
_LOW = {"gspo": 3e-4}
_HIGH = {"gspo": 4e-4, "dapo": 0.28}


@checks_types
@dataclass(frozen=True)
class PolicyLoss:
    """Loss of `PolicyOptimization`.

    Args:
        kind: ``grpo``, ``dr_grpo``, ``dapo``, ``gspo``, ``rloo`` or ``reinforce++``.
        clip_low: How far below 1 a ratio of probabilities may fall, above 0 and at most 1. null takes 0.2, and 3e-4 for
            gspo.
        clip_high: How far above 1 a ratio may rise, above 0. null takes 0.28 for dapo, 4e-4 for gspo, else
            ``clip_low``.
        kl: Divergence from the network before training: ``none``, ``k1`` (part of the reward), or ``k3`` or
            ``k3_weighted`` (part of the loss).
        beta: Weight of the divergence, above 0 unless ``kl`` is none.
        mask_truncated: Leave samples that end because of ``max_new_tokens`` out of the loss, and out of the means of
            rewards.
        overlong: Number of tokens before ``max_new_tokens`` over which a penalty grows from 0 to 1. It is subtracted
            from the reward (DAPO). 0: no penalty.
        prompts: Number of prompts of a batch to train on (dynamic sampling of DAPO). Those whose samples all have one
            reward are replaced by further prompts of the batch, which are answered when they are needed. null: all.
        correction: Weights for the difference between the probabilities of generation and of training: ``token``
            (truncated), ``sequence`` (masked), or ``none``.
        cap: Largest weight, at least 1.
    """

    kind: Kind = "grpo"
    clip_low: float | None = None
    clip_high: float | None = None
    kl: KL = "none"
    beta: float = 0.0
    mask_truncated: bool = False
    overlong: int = 0
    prompts: int | None = None
    correction: Correction = "token"
    cap: float = 3.0

    def __post_init__(self) -> None:
        check_choice("PolicyLoss", "kind", self.kind, KINDS)
        check_choice("PolicyLoss", "kl", self.kl, ("none", "k1", "k3", "k3_weighted"))
        check_number("PolicyLoss", "clip_low", self.clip_low, above=0, most=1, null=True)
        check_number("PolicyLoss", "clip_high", self.clip_high, above=0, null=True)
        check_number("PolicyLoss", "beta", self.beta, least=0)
        check_number("PolicyLoss", "overlong", self.overlong, least=0, whole=True)
        check_number("PolicyLoss", "prompts", self.prompts, least=1, whole=True, null=True)
        if self.prompts is not None and self.kind == "reinforce++":
            allowed = "null for reinforce++, which compares the samples of different prompts"
            raise refusal("PolicyLoss", "prompts", allowed, self.prompts)
        check_choice("PolicyLoss", "correction", self.correction, ("none", "token", "sequence"))
        check_number("PolicyLoss", "cap", self.cap, least=1)
        if (self.kl == "none") != (self.beta == 0):
            raise refusal("PolicyLoss", "beta", "above 0 with a kl, and 0 without", self.beta)

    @property
    def limits(self) -> tuple[float, float]:
        """Return the smallest and the largest ratio that are not clipped."""
        low = self.clip_low if self.clip_low is not None else _LOW.get(self.kind, 0.2)
        high = self.clip_high if self.clip_high is not None else _HIGH.get(self.kind, low)
        return 1 - low, 1 + high


def _own(values: Tensor) -> Tensor:
    return values


def advantages(rewards: Tensor, group: int, kind: Kind, gather: Callable[[Tensor], Tensor] = _own) -> Tensor:
    """Return the advantage of each sample ``[N]``.

    Args:
        rewards: ``[N]``, NaN for samples without one. Each ``group`` neighbours are samples of one prompt.
        group: Number of samples of a prompt.
        kind: Loss.
        gather: Returns the numbers ``[N]`` of all processes, for reinforce++.
    """
    grouped = rewards.view(-1, group)
    if kind == "reinforce++":
        return _normalised(rewards, gather(rewards)).nan_to_num(0.0)
    if kind == "rloo":
        count = grouped.isfinite().sum(1, keepdim=True)
        others = (grouped.nansum(1, keepdim=True) - grouped) / (count - 1)
        found = torch.where(count > 1, grouped - others, 0.0)
    elif kind == "dr_grpo":
        found = grouped - grouped.nanmean(1, keepdim=True)
    else:
        found = torch.stack([_normalised(row, row) for row in grouped])
    # The mean of equal numbers may differ from them by rounding, which an optimizer such as Adam scales up.
    return torch.where(differing(rewards, group)[:, None], found, 0.0).flatten().nan_to_num(0.0)


def differing(rewards: Tensor, group: int) -> Tensor:
    """Return for each group of rewards ``[N]`` whether it has different ones, ``[N / group]`` bool."""
    grouped = rewards.view(-1, group)
    return grouped.nan_to_num(-torch.inf).amax(1) > grouped.nan_to_num(torch.inf).amin(1)


def token_advantages(
    rewards: Tensor, penalties: Tensor, mask: Tensor, gather: Callable[[Tensor], Tensor] = _own
) -> Tensor:
    """Return the advantages of tokens ``[N, T]`` of REINFORCE++ with a penalty for each token.

    Args:
        rewards: ``[N]``, for the last token.
        penalties: ``[N, T]``. That of a token counts for it and for those before it.
        mask: ``[N, T]`` bool, the tokens of the samples.
        gather: Returns the numbers ``[N]`` of all processes.
    """
    later = (penalties * mask).flip(1).cumsum(1).flip(1)
    returns = rewards[:, None] - later
    counted = gather(returns[mask & rewards.isfinite()[:, None]])
    return torch.where(mask, _normalised(returns, counted), 0.0).nan_to_num(0.0)


def _normalised(values: Tensor, like: Tensor) -> Tensor:
    """Return ``values`` minus the mean of ``like``, divided by its standard deviation. NaN does not count."""
    counted = like[like.isfinite()]
    if len(counted) < 2 or bool((counted == counted[0]).all()):  # the mean of equal numbers is rounded
        return torch.zeros_like(values)
    return (values - counted.mean()) / (counted.std() + _EPS)


def overlong_penalty(lengths: Tensor, longest: int, room: int) -> Tensor:
    """Return the penalty ``[N]`` of answers: 0 up to ``longest - room`` tokens, then growing to 1 at ``longest``."""
    lengths = lengths.float()
    if not room:
        return torch.zeros_like(lengths)
    return ((lengths - (longest - room)) / room).clamp(0, 1)


@dataclass(frozen=True)
class PolicyResult:
    """Loss, and figures of a batch without a gradient.

    Args:
        loss: Loss to minimise.
        clipped_low: Share of ratios below the limit, where that lowers the loss.
        clipped_high: Share of ratios above the limit, where that lowers the loss.
        kl: Mean of k3 over tokens; 0 without a reference.
    """

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kl: Tensor


def policy_loss(
    how: PolicyLoss,
    log_probs: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    reference: Tensor | None = None,
    longest: int = 0,
    tokens: Tensor | None = None,
    drawn: Tensor | None = None,
) -> PolicyResult:
    """Return the loss of a batch of samples.

    Args:
        how: The loss.
        log_probs: Log-probabilities of the tokens under the policy, ``[N, T]``, with a gradient.
        old: Those under the policy that the samples came from.
        advantage: ``[N]``, or ``[N, T]`` for each token.
        mask: ``[N, T]`` bool, the tokens that count. Samples without any are part of the means, with 0.
        reference: Log-probabilities under the reference, for a ``kl`` that is part of the loss.
        longest: Largest number of tokens of an answer, for dr_grpo.
        tokens: Number of tokens to divide by for dapo and reinforce++. None: those of the mask.
        drawn: Log-probabilities under the distribution that the tokens were drawn from, for the correction. None: no
            correction.
    """
    low, high = how.limits
    weight = mask.to(log_probs.dtype)
    counts = weight.sum(1).clamp(min=1)
    log_ratio = (log_probs - old) * weight
    if advantage.ndim == 1:
        advantage = advantage[:, None]
    if how.kind == "gspo":
        log_ratio = (log_ratio.sum(1) / counts)[:, None]
    elif how.kind == "rloo":
        log_ratio = log_ratio.sum(1, keepdim=True)
    ratio = log_ratio.clamp(max=_MOST).exp()
    losses = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if drawn is not None and how.correction != "none":
        losses = losses * _importance(how, (old - drawn) * weight)
    divergence = torch.zeros_like(log_probs)
    if reference is not None:
        gap = (reference - log_probs).clamp(max=_MOST)
        divergence = gap.exp() - gap - 1
    penalty = how.beta * divergence
    if how.kl == "k3_weighted":
        penalty = penalty * ratio
    if how.kind == "rloo":
        if losses.shape == weight.shape:
            losses = (losses * weight).sum(1) / counts
        loss = losses.mean()
        if how.kl in _IN_LOSS:
            loss = loss + (penalty * weight).sum(1).mean()
    else:
        if how.kl in _IN_LOSS:
            losses = losses + penalty
        total = losses * weight
        if how.kind in ("grpo", "gspo"):
            loss = (total.sum(1) / counts).mean()
        elif how.kind == "dr_grpo":
            loss = total.sum() / (len(total) * longest)
        else:
            loss = total.sum() / (weight.sum() if tokens is None else tokens).clamp(min=1)
    with torch.no_grad():
        share = weight if ratio.shape == weight.shape else weight.amax(1, keepdim=True)
        below = (ratio < low) & (advantage < 0)
        above = (ratio > high) & (advantage > 0)
        clipped_low = _mean(below.to(weight.dtype), share)
        clipped_high = _mean(above.to(weight.dtype), share)
        return PolicyResult(loss, clipped_low, clipped_high, _mean(divergence, weight))


def _importance(how: PolicyLoss, log_ratio: Tensor) -> Tensor:
    """Return the weights of tokens ``[N, T]`` or of samples ``[N, 1]``.

    Args:
        how: The loss.
        log_ratio: Logarithm of the ratio of the probabilities of training to those of generation, ``[N, T]``, 0 for
            tokens that do not count.
    """
    if how.correction == "token":
        return log_ratio.exp().clamp(max=how.cap)
    ratio = log_ratio.sum(1, keepdim=True).exp()
    return torch.where(ratio > how.cap, 0.0, ratio)


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    values = values.expand_as(weight) if values.shape[1] == 1 else values
    if values.shape != weight.shape:
        values = values.amax(1, keepdim=True)
    return (values * weight).sum() / weight.sum().clamp(min=1)
