"""Distillation that never holds the logits of all tokens: the heads are applied to one chunk of tokens at a time.

    loss_i = (1 - w) * -log softmax(student_i)[label_i] + w * D(teacher_i, student_i)

The forward pass computes the gradients of the student's hidden states and head while the logits of a chunk exist. The
backward pass only scales them. The gradients take N H + V H numbers, where dense logits would take at least 4 N V.

Saves: memory of at least four tensors of tokens x vocabulary; only a few chunks are held. For 2,048 tokens and 32,768
    ids in float32 on a CPU, the forward KL and its gradients peaked at 270 MiB instead of 2,064, in the same CPU time.
Costs: a second pass over the heads in the backward pass if the head trains and the losses of tokens are weighted
    differently afterwards (on a GPU: by anything but a plain sum). One more tensor of the size of the head's gradient.
Source: gradients in the forward pass as in https://github.com/mgmalek/efficient_cross_entropy; divergences as in
    `lit_efficient.losses.distillation`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import check_number, refusal
from lit_efficient.losses.distillation import Divergence, coarse, log_probabilities, shared_vocabulary
from lit_efficient.losses.head_chunks import ModuleHead, apply_sweep, is_expanded
from lit_efficient.surgery import autocast_dtype

CHUNK_SIZE = 128  # tokens: 64 MiB a tensor for a vocabulary of 128k, and about ten such tensors

Head = Callable[[Tensor], Tensor]
"""Function of hidden states ``[n, H]`` to logits ``[n, V]`` that treats each row independently."""


class TokenLosses(NamedTuple):
    """Losses of N tokens. Only ``loss`` is differentiable."""

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor


class Teacher(Protocol):
    """Source of the teacher's distribution for each token."""

    def compare(self, rows: slice, logits: Tensor, how: Divergence) -> tuple[Tensor, Tensor]:
        """Compute the divergence of some tokens and its gradient with respect to the student's logits.

        Args:
            rows: Positions of these tokens among all N.
            logits: Logits of the student for them, ``[n, V_s]``.
            how: The divergence.

        Returns:
            Divergences ``[n]``, and gradients ``[n, V]`` of the first V columns of the logits.
        """


@dataclass(frozen=True)
class LiveTeacher:
    """Teacher that is given by its hidden states and its head."""

    hidden: Tensor  # ``[N, H_t]``, without gradients
    head: Head  # gives ``[n, V_t]``
    vocab_size: int | None = None  # number of tokens that both networks know; ``None`` takes the smaller vocabulary

    def compare(self, rows: slice, logits: Tensor, how: Divergence) -> tuple[Tensor, Tensor]:
        """Compute the divergence as :meth:`Teacher.compare` describes."""
        teacher_logits = self.head(self.hidden[rows])
        size = shared_vocabulary(logits.shape[1], teacher_logits.shape[1], self.vocab_size)
        log_q = log_probabilities(logits, size, how.temperature)
        log_p = log_probabilities(teacher_logits, size, how.temperature).to(log_q.dtype)
        values, slope = how.measure(log_p, log_q)
        gradient = slope - log_q.exp_() * slope.sum(1, keepdim=True)
        return values * how.factor, gradient.mul_(how.factor / how.temperature)


@dataclass(frozen=True)
class TopKTeacher:
    """Teacher that is given by its most likely tokens, as `lit_efficient.losses.distillation.top_k_of` returns them."""

    ids: Tensor  # ``[N, k]``
    log_probs: Tensor  # ``[N, k + 1]``, or ``[N, k]`` if k is the whole vocabulary
    vocab_size: int | None = None  # vocabulary of the teacher; ``None`` takes that of the student

    def compare(self, rows: slice, logits: Tensor, how: Divergence) -> tuple[Tensor, Tensor]:
        """Compute the divergence as :meth:`Teacher.compare` describes."""
        ids = self.ids[rows].long()
        log_p = self.log_probs[rows]
        log_q = log_probabilities(logits, self.vocab_size or logits.shape[1], how.temperature)
        seen = coarse(log_q, ids, log_p)
        values, slope = how.measure(log_p.to(seen.dtype), seen)
        gradient = torch.zeros_like(log_q)
        if seen.shape[1] > ids.shape[1]:
            # The slope of the rest category is spread over its tokens in proportion to the student's probabilities.
            gradient = (log_q - seen[:, -1:]).exp_() * slope[:, -1:]
        gradient.scatter_(1, ids, slope[:, : ids.shape[1]])
        gradient.sub_(log_q.exp_() * slope.sum(1, keepdim=True))
        return values * how.factor, gradient.mul_(how.factor / how.temperature)


@dataclass(frozen=True)
class WeightedTeachers:
    """Several teachers, whose divergences are averaged by weights."""

    teachers: Sequence[Teacher]
    weights: Sequence[float]

    def compare(self, rows: slice, logits: Tensor, how: Divergence) -> tuple[Tensor, Tensor]:
        """Compute the mean divergence as :meth:`Teacher.compare` describes."""
        mean = logits.new_zeros(len(logits))
        gradient = torch.zeros_like(logits)
        for teacher, weight in zip(self.teachers, self.weights):
            values, own = teacher.compare(rows, logits, how)
            share = weight / sum(self.weights)
            mean = mean + share * values
            gradient[:, : own.shape[1]].add_(own, alpha=share)
        return mean, gradient


def chunked_distillation(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None = None,
    *,
    divergence: Divergence | None = None,
    weight: float = 1.0,
    vocab_size: int | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> TokenLosses:
    """Compute the losses of N tokens from hidden states and two output matrices.

    Softmaxes are computed in float32, or in float64 for float64 inputs.

    Args:
        student_hidden: ``[N, H_s]``.
        student_weight: ``[V_s, H_s]``.
        teacher_hidden: ``[N, H_t]``. It gets no gradient.
        teacher_weight: ``[V_t, H_t]``. It gets no gradient.
        labels: ``[N]`` in [0, V_s), or ``None`` for no cross-entropy, which needs ``weight=1``.
        divergence: The divergence D. ``None`` takes the forward KL at temperature 1.
        weight: Weight w of the divergence, in [0, 1].
        vocab_size: Number of tokens that both networks know. Further rows are padding. ``None`` takes the smaller
            vocabulary.
        chunk_size: Tokens in a chunk, at least 1.

    Returns:
        ``loss``, ``cross_entropy`` (zeros without labels) and ``divergence``, each ``[N]``.

    Raises:
        ConfigurationError: For an argument out of range.
    """
    return chunked_losses(
        partial(F.linear, weight=student_weight),
        student_hidden,
        [student_weight],
        LiveTeacher(teacher_hidden.detach(), partial(F.linear, weight=teacher_weight.detach()), vocab_size),
        labels,
        divergence=divergence,
        weight=weight,
        chunk_size=chunk_size,
    )


def chunked_losses(
    head: Head,
    hidden: Tensor,
    parameters: Sequence[Tensor],
    teacher: Teacher | None,
    labels: Tensor | None,
    *,
    divergence: Divergence | None = None,
    weight: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    counted: Tensor | None = None,
) -> TokenLosses:
    """Compute the losses of `chunked_distillation` for any head (quantised, LoRA, softcap) and any kind of teacher.

    Args:
        head: Head of the student. It is called on each chunk, and its own backward pass runs directly afterwards.
        hidden: Hidden states of the student, ``[N, H]``.
        parameters: Parameters of the head that train.
        teacher: A `LiveTeacher`, a `TopKTeacher`, `WeightedTeachers`, or ``None`` for the cross-entropy alone, which
            needs ``weight=0``.
        labels: ``[N]`` in [0, V_s), or ``None`` for no cross-entropy, which needs ``weight=1``.
        divergence: The divergence D. ``None`` takes the forward KL at temperature 1.
        weight: Weight w of the divergence, in [0, 1].
        chunk_size: Tokens in a chunk, at least 1.
        counted: ``[N]``, true for tokens that contribute. The losses of other tokens are 0 and their labels may be
            any number. ``None``: all tokens contribute.

    Raises:
        ConfigurationError: For an argument out of range.
    """
    check_number("distillation", "chunk_size", chunk_size, least=1, whole=True)
    check_number("distillation", "weight", weight, least=0, most=1)
    if labels is None and weight != 1:
        raise refusal("distillation", "weight", "1 without labels", weight)
    if teacher is None and (weight != 0 or labels is None):
        raise refusal("distillation", "weight", "0, with labels, without a teacher", weight)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if counted is not None:
        hidden = hidden.where(counted[:, None], 0)  # hidden states of the other tokens may be infinite or NaN
        if labels is not None:
            labels = labels.where(counted, 0)
    sweep = _DistillationSweep(
        head=head,
        teacher=teacher,
        labels=labels,
        divergence=divergence or Divergence(),
        weight=weight,
        chunk_size=chunk_size,
        autocast=autocast_dtype(hidden.device),
        trains=torch.is_grad_enabled() and (hidden.requires_grad or bool(trained)),
        counted=counted,
    )
    return TokenLosses(*apply_sweep(sweep, hidden, trained))


@dataclass(frozen=True)
class _DistillationSweep:
    """Computation of all losses and gradients, chunk by chunk. See :class:`lit_efficient.losses.head_chunks.Sweep`."""

    name: ClassVar[str] = "chunked_distillation"

    head: Head
    teacher: Teacher | None
    labels: Tensor | None
    divergence: Divergence
    weight: float
    chunk_size: int
    autocast: torch.dtype | None
    trains: bool
    counted: Tensor | None

    def run(
        self, hidden: Tensor, parameters: Sequence[Tensor], needed: Sequence[bool], upstream: Tensor | None
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.zeros(3, len(hidden), dtype=wide, device=hidden.device)
        head = ModuleHead(self.head, hidden, parameters, self.trains)
        gradient = torch.zeros_like(hidden) if self.trains else hidden
        for start in range(0, len(hidden), self.chunk_size):
            rows = slice(start, start + self.chunk_size)
            logits = head.logits(hidden[rows], keep=self.trains)
            with torch.no_grad():
                slope = self._losses_of_chunk(rows, logits, losses[:, rows])
                if self.counted is not None:
                    losses[:, rows] = losses[:, rows].where(self.counted[rows], 0)
                    slope = slope.where(self.counted[rows, None], 0)
            if self.trains:
                if upstream is not None:
                    slope.mul_(upstream[rows, None])
                gradient[rows] = head.backward(slope)
        return losses.unbind(), [gradient, *head.gradients()]

    def _losses_of_chunk(self, rows: slice, logits: Tensor, losses: Tensor) -> Tensor:
        """Write loss, cross-entropy and divergence of a chunk into ``losses`` ``[3, n]``.

        Returns:
            Gradient of the loss with respect to the logits, ``[n, V_s]``. Without training its values are undefined.
        """
        total, entropies, divergences = losses
        slope = torch.zeros_like(logits) if self.trains else logits
        if self.teacher is not None:
            values, gradient = self.teacher.compare(rows, logits, self.divergence)
            divergences.copy_(values)
            total.add_(values, alpha=self.weight)
            if self.trains:
                slope[:, : gradient.shape[1]] = gradient.mul_(self.weight)
        if self.labels is not None:
            log_q = logits.log_softmax(1)
            label = self.labels[rows, None]
            entropies.copy_(-log_q.gather(1, label).squeeze(1))
            total.add_(entropies, alpha=1 - self.weight)
            if self.trains and self.weight != 1:
                slope.add_(log_q.exp_(), alpha=1 - self.weight)
                slope.scatter_add_(1, label, torch.full_like(label, self.weight - 1, dtype=slope.dtype))
        return slope

    def factors(self, count: int, upstream: Tensor) -> Sequence[Tensor] | None:
        # The hidden states have one gradient a token, so only the gradients of parameters need equal factors.
        # A GPU waits for the comparison, for less time than a second pass through the head takes.
        if count > 1 and not is_expanded(upstream) and not bool((upstream == upstream[0]).all()):
            return None
        one = upstream[0] if len(upstream) else upstream.new_ones(())
        return [upstream[:, None], *[one] * (count - 1)]
