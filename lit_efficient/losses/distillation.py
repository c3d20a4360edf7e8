"""Divergence between a student's and a teacher's distribution over the next token.

The teacher is given by all its logits, or by its most likely tokens.

    p = softmax(teacher / T),  q = softmax(student / T),  m = beta p + (1 - beta) q

    forward_kl = sum p log(p / q)                       q must cover all that is likely under p
    reverse_kl = sum q log(q / p)                       q must stay where p is likely
    jsd        = c (beta KL(p | m) + (1 - beta) KL(q | m)),    c = 1 / (beta (1 - beta)), or 1 if not normalised

Without c, the Jensen-Shannon divergence and its gradients vanish like beta (1 - beta) at both ends of (0, 1). With c,
its limits are forward_kl for beta -> 0 and reverse_kl for beta -> 1, and beta only interpolates between the two.
The gradient with respect to the student's logits x is, up to a constant in G that cancels,

    dD / dx_v = (G_v - q_v sum_u G_u) / T,    G = q dD/dq = -p,  q log(q / p),  c (1 - beta) q log(q / m)

Gradients shrink like 1 / T^2: once by this 1 / T, and once because q - p shrinks. ``temperature_squared`` multiplies
the loss by T^2 to compensate.
Sources: https://arxiv.org/abs/1503.02531 (temperature), https://arxiv.org/abs/2306.13649 (the three, and the limits).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_efficient.errors import check_number, checks_types, refusal

KINDS = ("forward_kl", "reverse_kl", "jsd")
# Exponents above this limit are split off. e^60 is far from the largest float32, and e^-60 far below its precision.
_LARGEST = 60.0


@checks_types
@dataclass(frozen=True)
class Divergence:
    """Divergence between two distributions, with its temperature.

    Args:
        kind: ``forward_kl``, ``reverse_kl`` or ``jsd``.
        beta: Share of the teacher in the mixture of ``jsd``, in (0, 1).
        normalized: Divide ``jsd`` by beta (1 - beta), so that its gradients do not vanish at either end.
        temperature: Divisor T of both networks' logits, above 0.
        temperature_squared: Multiply the divergence by T^2, so that gradients have about the same size for every T.
    """

    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: float = 0.5
    normalized: bool = True
    temperature: float = 1.0
    temperature_squared: bool = True

    def __post_init__(self) -> None:
        check_number("Divergence", "beta", self.beta, above=0, below=1)
        check_number("Divergence", "temperature", self.temperature, above=0)

    @property
    def factor(self) -> float:
        """Factor on the divergence: T^2, or 1."""
        return self.temperature**2 if self.temperature_squared else 1.0

    def measure(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the divergence, without ``factor``, and the term G of its gradient (see the module's docstring).

        Args:
            log_p: Log-probabilities of the teacher at the temperature, ``[N, C]``. They may be -inf.
            log_q: Log-probabilities of the student at the temperature, ``[N, C]``.

        Returns:
            The divergence ``[N]`` and G ``[N, C]``.
        """
        p = log_p.exp()
        if self.kind == "forward_kl":
            return _expectation(p, log_p - log_q), -p
        q = log_q.exp()
        if self.kind == "reverse_kl":
            terms = q * (log_q - log_p).masked_fill(q == 0, 0.0)
            return terms.sum(-1), terms
        beta = self.beta
        ratio = log_p - log_q
        scale = 1 / (beta * (1 - beta)) if self.normalized else 1.0
        over_q = q * _log_mixture(ratio, beta).masked_fill(q == 0, 0.0)  # q log(m / q)
        over_p = _expectation(p, _log_mixture(-ratio, 1 - beta))  # sum p log(m / p)
        value = -scale * (beta * over_p + (1 - beta) * over_q.sum(-1))
        return value, -scale * (1 - beta) * over_q


def _expectation(p: Tensor, values: Tensor) -> Tensor:
    return (p * values.masked_fill(p == 0, 0.0)).sum(-1)


def _log_mixture(ratio: Tensor, share: float) -> Tensor:
    """Return ``log(1 - share + share e^ratio)``, accurate for small shares, where the result is close to 0."""
    return torch.log1p(share * torch.expm1(ratio.clamp(max=_LARGEST))) + (ratio - _LARGEST).clamp(min=0)


def distillation_divergence(
    student_logits: Tensor, teacher_logits: Tensor, divergence: Divergence | None = None, vocab_size: int | None = None
) -> Tensor:
    """Return the divergence of every token, ``[...]`` in nats, from the logits of both networks.

    It is differentiable with respect to both.

    Args:
        student_logits: ``[..., V_s]``. They are converted to float32 at least.
        teacher_logits: ``[..., V_t]``.
        divergence: The divergence. ``None`` takes the forward KL at temperature 1.
        vocab_size: Number of tokens that both networks know, at most V_s and V_t. Further columns are padding and left
            out of both softmaxes. ``None`` takes the smaller of the two.
    """
    divergence = divergence or Divergence()
    size = shared_vocabulary(student_logits.shape[-1], teacher_logits.shape[-1], vocab_size)
    log_q = log_probabilities(student_logits, size, divergence.temperature)
    log_p = log_probabilities(teacher_logits, size, divergence.temperature)
    return divergence.measure(log_p, log_q)[0] * divergence.factor


def log_probabilities(logits: Tensor, vocab_size: int, temperature: float) -> Tensor:
    """Return ``log softmax(logits[..., :vocab_size] / temperature)`` in float32, or in float64 for float64 logits."""
    scaled = logits[..., :vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        scaled = scaled / temperature
    return scaled.log_softmax(-1)


def shared_vocabulary(student: int, teacher: int, vocab_size: int | None) -> int:
    """Return the number of tokens to compare.

    Args:
        student: Rows of the student's head.
        teacher: Rows of the teacher's head.
        vocab_size: Number of tokens that both networks know. ``None`` takes the smaller head.

    Raises:
        ConfigurationError: If ``vocab_size`` exceeds the rows of a head.
    """
    smaller = min(student, teacher)
    if vocab_size is not None and not 1 <= vocab_size <= smaller:
        allowed = f"at least 1 and at most {smaller} for a student with {student} rows and a teacher with {teacher}"
        raise refusal("distillation", "vocab_size", allowed, vocab_size)
    return vocab_size or smaller


def top_k_of(teacher_logits: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the k most likely tokens of a teacher, with all other tokens merged into one category.

    Args:
        teacher_logits: ``[N, V]``, without padding.
        k: Number of tokens, in [1, V].
        temperature: Temperature of the distillation loss. The result is only valid for this temperature.

    Returns:
        Ids ``[N, k]`` int64, most likely first, and their log-probabilities ``[N, k + 1]``. The last column is the
        log-probability of all other tokens. It is missing if k is V.
    """
    size = teacher_logits.shape[-1]
    check_number("distillation", "k", k, least=1, most=size, whole=True)
    log_p = log_probabilities(teacher_logits, size, temperature)
    values, ids = log_p.topk(k, dim=-1)
    if k < size:
        values = torch.cat((values, _rest(log_p, ids)), dim=-1)
    return ids, values


def coarse(log_q: Tensor, ids: Tensor, log_probs: Tensor) -> Tensor:
    """Merge the student's log-probabilities into the categories of :func:`top_k_of`.

    Args:
        log_q: Log-probabilities of the student, ``[N, V]``.
        ids: Ids of the tokens that are kept, ``[N, k]``.
        log_probs: Log-probabilities of the teacher, ``[N, k + 1]``, or ``[N, k]`` without a category for the rest.

    Returns:
        A tensor of the shape of ``log_probs``.
    """
    chosen = log_q.gather(-1, ids)
    if log_probs.shape[-1] > ids.shape[-1]:
        chosen = torch.cat((chosen, _rest(log_q, ids)), dim=-1)
    return chosen


def _rest(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return the log of the probability outside ``ids``, ``[N, 1]``. A sum avoids the cancellation of 1 - sum."""
    return log_probs.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
