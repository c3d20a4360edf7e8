"""How far a student's distribution over the next token is from its teacher's, from whole logits or the likeliest few.

    p = softmax(teacher / T),  q = softmax(student / T),  m = beta p + (1 - beta) q

    forward_kl = sum p log(p / q)                       q must cover whatever p may say
    reverse_kl = sum q log(q / p)                       q must stay where p is likely
    jsd        = c (beta KL(p | m) + (1 - beta) KL(q | m)),    c = 1 / (beta (1 - beta)), or 1 if not normalised

Without c the Jensen-Shannon divergence and its gradients vanish like beta (1 - beta) at both ends of (0, 1); with it
the limits are forward_kl for beta -> 0 and reverse_kl for beta -> 1, and beta only chooses between the two.
With x the student's logits, and up to a constant that drops out,

    dD / dx_v = (G_v - q_v sum_u G_u) / T,    G = q dD/dq = -p,  q log(q / p),  c (1 - beta) q log(q / m)

Gradients thus shrink like 1 / T^2 (once more in q - p); ``temperature_squared`` multiplies by T^2.
Sources: https://arxiv.org/abs/1503.02531 (temperature), https://arxiv.org/abs/2306.13649 (the three, and the limits).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_efficient.errors import check_choice, check_number, refusal

KINDS = ("forward_kl", "reverse_kl", "jsd")
_LARGEST = (
    60.0  # exponents beyond it are split off: e^60 is far from float32's limit, and e^-60 far below its precision
)


@dataclass(frozen=True)
class Divergence:
    """Which divergence, at which temperature.

    Args:
        kind: ``forward_kl``, ``reverse_kl`` or ``jsd``.
        beta: of ``jsd``, the teacher's share in the mixture, in (0, 1).
        normalized: divide ``jsd`` by beta (1 - beta), so that its gradients do not vanish at either end.
        temperature: divides both logits, above 0.
        temperature_squared: multiply by T^2, which keeps gradients of one size for all temperatures.
    """

    kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: float = 0.5
    normalized: bool = True
    temperature: float = 1.0
    temperature_squared: bool = True

    def __post_init__(self) -> None:
        check_choice("Divergence", "kind", self.kind, KINDS)
        check_number("Divergence", "beta", self.beta, above=0, below=1)
        check_number("Divergence", "temperature", self.temperature, above=0)

    @property
    def factor(self) -> float:
        """T^2, or 1."""
        return self.temperature**2 if self.temperature_squared else 1.0

    def measure(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """The divergence ``[N]``, without ``factor``, and the G ``[N, C]`` of its gradient in the module's docstring.

        Args:
            log_p: the teacher's log-probabilities ``[N, C]``, at the temperature; -inf is allowed.
            log_q: the student's ``[N, C]``.
        """
        p = log_p.exp()
        if self.kind == "forward_kl":
            return _expectation(p, log_p - log_q), -p
        q = log_q.exp()
        if self.kind == "reverse_kl":
            terms = q * (log_q - log_p).masked_fill(q == 0, 0.0)
            return terms.sum(-1), terms
        beta, ratio = self.beta, log_p - log_q
        scale = 1 / (beta * (1 - beta)) if self.normalized else 1.0
        over_q = q * _log_mixture(ratio, beta).masked_fill(q == 0, 0.0)  # q log(m / q)
        over_p = _expectation(p, _log_mixture(-ratio, 1 - beta))  # sum p log(m / p)
        value = -scale * (beta * over_p + (1 - beta) * over_q.sum(-1))
        return value, -scale * (1 - beta) * over_q


def _expectation(p: Tensor, values: Tensor) -> Tensor:
    return (p * values.masked_fill(p == 0, 0.0)).sum(-1)


def _log_mixture(ratio: Tensor, share: float) -> Tensor:
    """``log(1 - share + share e^ratio)``, exact for small shares too: the difference to 0 is what counts."""
    return torch.log1p(share * torch.expm1(ratio.clamp(max=_LARGEST))) + (ratio - _LARGEST).clamp(min=0)


def distillation_divergence(
    student_logits: Tensor, teacher_logits: Tensor, divergence: Divergence | None = None, vocab_size: int | None = None
) -> Tensor:
    """The divergence of every token ``[...]`` in nats, from logits that are held whole; differentiable in both.

    Args:
        student_logits: ``[..., V_s]``, computed with in float32 at least.
        teacher_logits: ``[..., V_t]``.
        divergence: which one; the forward KL at temperature 1 by default.
        vocab_size: tokens that both know, at most V_s and V_t: rows beyond are padding and left out of both softmaxes.
            None takes the smaller of the two.
    """
    divergence = divergence or Divergence()
    size = shared_vocabulary(student_logits.shape[-1], teacher_logits.shape[-1], vocab_size)
    log_q = log_probabilities(student_logits, size, divergence.temperature)
    log_p = log_probabilities(teacher_logits, size, divergence.temperature)
    return divergence.measure(log_p, log_q)[0] * divergence.factor


def log_probabilities(logits: Tensor, vocab_size: int, temperature: float) -> Tensor:
    """``log softmax(logits[..., :vocab_size] / temperature)``, in float32 or, for float64, in it."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    scaled = logits[..., :vocab_size].to(wide)
    return (scaled if temperature == 1 else scaled / temperature).log_softmax(-1)


def shared_vocabulary(student: int, teacher: int, vocab_size: int | None) -> int:
    """Number of tokens to compare, of two heads with so many rows.

    Raises:
        ConfigurationError: if ``vocab_size`` is more than one of them has.
    """
    smaller = min(student, teacher)
    if vocab_size is not None and not 1 <= vocab_size <= smaller:
        allowed = f"at least 1 and at most {smaller} for a student with {student} rows and a teacher with {teacher}"
        raise refusal("distillation", "vocab_size", allowed, vocab_size)
    return vocab_size or smaller


def top_k_of(teacher_logits: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """What is kept of a teacher: its likeliest tokens, and all others together as one more.

    Args:
        teacher_logits: ``[N, V]``, without padded rows.
        k: tokens to keep, in [1, V].
        temperature: of the student's loss; what is kept is good for this one alone.

    Returns:
        Ids ``[N, k]`` int64, likeliest first, and their log-probabilities ``[N, k + 1]``, the last column being that of
        the rest; ``[N, k]`` if k is V and there is no rest.
    """
    size = teacher_logits.shape[-1]
    check_number("distillation", "k", k, least=1, most=size, whole=True)
    log_p = log_probabilities(teacher_logits, size, temperature)
    values, ids = log_p.topk(k, dim=-1)
    return ids, values if k == size else torch.cat((values, _rest(log_p, ids)), dim=-1)


def coarse(log_q: Tensor, ids: Tensor, log_probs: Tensor) -> Tensor:
    """The student's log-probabilities ``[N, V]`` in the categories of ``log_probs``: the same shape."""
    chosen = log_q.gather(-1, ids)
    return chosen if log_probs.shape[-1] == ids.shape[-1] else torch.cat((chosen, _rest(log_q, ids)), dim=-1)


def _rest(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Log of the mass ``[N, 1]`` outside ``ids``: summed up, not 1 minus the others, which would cancel."""
    return log_probs.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
