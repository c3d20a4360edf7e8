"""Distillation without two vocabularies of logits: heads are applied to a chunk of tokens at a time.

    loss_i = (1 - w) * -log softmax(student_i)[label_i] + w * D(teacher_i, student_i)

The gradients of the student's hidden states and head are made in the forward pass, while the chunk's logits exist; the
backward pass scales them. What stays are those gradients, N H + V H numbers, in place of (at least) 4 N V.

Saves: memory of 4 tokens x vocabulary tensors and more; a few chunks are left. For 2,048 tokens, 32,768 ids and float32
    on a CPU the forward KL and its gradients took 270 MiB at their peak, whole logits 2,064, in the same CPU time.
Costs: nothing to compute twice, unless tokens are weighted differently afterwards (on a GPU: by other means than a
    plain sum) and the head trains: then a second pass over the heads in the backward pass. One more gradient of
    the head's size while it is summed.
Source: gradients in the forward pass as in https://github.com/mgmalek/efficient_cross_entropy; divergences as in
    `lit_efficient.losses.distillation`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_efficient.errors import check_number, refusal
from lit_efficient.losses.chunked_cross_entropy import computes_ignored, is_expanded
from lit_efficient.losses.distillation import Divergence, coarse, log_probabilities, shared_vocabulary
from lit_efficient.losses.head_chunks import ModuleHead, drawing_again, random_states

CHUNK_SIZE = 128  # tokens: 64 MiB a tensor for a vocabulary of 128k, and about ten of them

Head = Callable[[Tensor], Tensor]
"""Hidden states ``[n, H]`` to logits ``[n, V]``, each row by itself."""


class TokenLosses(NamedTuple):
    """Losses of N tokens; the first carries gradients."""

    loss: Tensor
    cross_entropy: Tensor
    divergence: Tensor


class Teacher(Protocol):
    """What a teacher has to say of each token."""

    def compare(self, rows: slice, logits: Tensor, how: Divergence) -> tuple[Tensor, Tensor]:
        """Divergences ``[n]`` of the tokens ``rows`` and their gradients ``[n, V]`` in the logits' first V columns.

        Args:
            rows: of the N tokens.
            logits: the student's ``[n, V_s]``.
            how: the divergence.
        """


@dataclass(frozen=True)
class LiveTeacher:
    """A teacher by its hidden states and its head."""

    hidden: Tensor  # ``[N, H_t]``, constants
    head: Head  # gives ``[n, V_t]``
    vocab_size: int | None = None  # tokens that both know; None takes the smaller vocabulary

    def compare(self, rows: slice, logits: Tensor, how: Divergence) -> tuple[Tensor, Tensor]:
        """See `Teacher`."""
        theirs = self.head(self.hidden[rows])
        size = shared_vocabulary(logits.shape[1], theirs.shape[1], self.vocab_size)
        log_q = log_probabilities(logits, size, how.temperature)
        log_p = log_probabilities(theirs, size, how.temperature).to(log_q.dtype)
        values, slope = how.measure(log_p, log_q)
        gradient = slope - log_q.exp_() * slope.sum(1, keepdim=True)
        return values * how.factor, gradient.mul_(how.factor / how.temperature)


@dataclass(frozen=True)
class TopKTeacher:
    """A teacher by what `lit_efficient.losses.distillation.top_k_of` kept of it."""

    ids: Tensor  # ``[N, k]``
    log_probs: Tensor  # ``[N, k + 1]``, or ``[N, k]`` if k is the whole vocabulary
    vocab_size: int | None = None  # of the teacher; None takes all of the student's

    def compare(self, rows: slice, logits: Tensor, how: Divergence) -> tuple[Tensor, Tensor]:
        """See `Teacher`."""
        ids, log_p = self.ids[rows].long(), self.log_probs[rows]
        log_q = log_probabilities(logits, self.vocab_size or logits.shape[1], how.temperature)
        seen = coarse(log_q, ids, log_p)
        values, slope = how.measure(log_p.to(seen.dtype), seen)
        gradient = torch.zeros_like(log_q)
        if seen.shape[1] > ids.shape[1]:  # the slope of the rest is shared out as the student spreads its mass
            gradient = (log_q - seen[:, -1:]).exp_() * slope[:, -1:]
        gradient.scatter_(1, ids, slope[:, : ids.shape[1]])
        gradient.sub_(log_q.exp_() * slope.sum(1, keepdim=True))
        return values * how.factor, gradient.mul_(how.factor / how.temperature)


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
    """Losses of N tokens from hidden states and two matrices; softmaxes in float32, or float64 for it.

    Args:
        student_hidden: ``[N, H_s]``.
        student_weight: ``[V_s, H_s]``.
        teacher_hidden: ``[N, H_t]``, no gradient is made for it.
        teacher_weight: ``[V_t, H_t]``, no gradient is made for it.
        labels: ``[N]`` in [0, V_s), or None for no cross-entropy (``weight`` is 1 then).
        divergence: which one; the forward KL at temperature 1 by default.
        weight: w, of the divergence, in [0, 1].
        vocab_size: tokens that both know; rows beyond are padding. None takes the smaller vocabulary.
        chunk_size: tokens at a time, at least 1.

    Returns:
        ``loss``, ``cross_entropy`` (zeros without labels) and ``divergence``, each ``[N]``.

    Raises:
        ConfigurationError: for an argument out of range.
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
    """As `chunked_distillation`, through any head (quantised, under LoRA, softcapped) and of any teacher.

    Args:
        head: the student's; called on each chunk, and its own backward pass run at once.
        hidden: ``[N, H]``.
        parameters: what of the head trains.
        teacher: a `LiveTeacher`, a `TopKTeacher`, or None for the cross-entropy alone (``weight`` is 0 then).
        labels: as there.
        divergence: as there.
        weight: as there.
        chunk_size: as there.
        counted: ``[N]``, which tokens count: the losses of others are 0, and their labels any number. None: all.
    """
    check_number("distillation", "chunk_size", chunk_size, least=1, whole=True)
    check_number("distillation", "weight", weight, least=0, most=1)
    if labels is None and weight != 1:
        raise refusal("distillation", "weight", "1 without labels", weight)
    if teacher is None and (weight != 0 or labels is None):
        raise refusal("distillation", "weight", "0, with labels, without a teacher", weight)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    trains = torch.is_grad_enabled() and (hidden.requires_grad or bool(trained))
    if counted is not None:
        hidden = hidden.where(counted[:, None], 0)  # where it may be anything, and not finite
        labels = None if labels is None else labels.where(counted, 0)
    how = divergence or Divergence()
    sweep = _Sweep(head, trained, teacher, labels, how, weight, chunk_size, autocast, trains, counted)
    return TokenLosses(*_ChunkedLosses.apply(sweep, hidden, *trained))


@dataclass(frozen=True)
class _Sweep:
    """One pass over all tokens, chunk by chunk."""

    head: Head
    parameters: Sequence[Tensor]
    teacher: Teacher | None
    labels: Tensor | None
    divergence: Divergence
    weight: float
    chunk_size: int
    autocast: torch.dtype | None
    trains: bool
    counted: Tensor | None

    def __call__(self, hidden: Tensor, scale: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """Losses ``[3, N]``, and the gradients of the losses' sum, or of their sum weighted with ``scale`` ``[N]``."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.zeros(3, len(hidden), dtype=wide, device=hidden.device)
        head = ModuleHead(self.head, hidden, self.parameters)
        gradient = torch.zeros_like(hidden) if self.trains else hidden
        for start in range(0, len(hidden), self.chunk_size):
            rows = slice(start, start + self.chunk_size)
            logits = head.logits(hidden[rows], keep=self.trains)
            with torch.no_grad():
                slope = self._chunk(rows, logits, losses[:, rows])
                if self.counted is not None:
                    losses[:, rows] = losses[:, rows].where(self.counted[rows], 0)
                    slope = slope.where(self.counted[rows, None], 0)
            if self.trains:
                gradient[rows] = head.backward(slope if scale is None else slope.mul_(scale[rows, None]))
        return losses, [gradient, *head.gradients()]

    def _chunk(self, rows: slice, logits: Tensor, losses: Tensor) -> Tensor:
        """Write the losses ``[3, n]`` and return the gradient of their first row in the logits ``[n, V_s]``."""
        losses_of_all, entropies, divergences = losses
        weight = self.weight
        slope = torch.zeros_like(logits) if self.trains else logits
        if self.teacher is not None:
            values, gradient = self.teacher.compare(rows, logits, self.divergence)
            divergences.copy_(values)
            losses_of_all.add_(values, alpha=weight)
            if self.trains:
                slope[:, : gradient.shape[1]] = gradient.mul_(weight)
        if self.labels is not None:
            log_q, label = logits.log_softmax(1), self.labels[rows, None]
            entropies.copy_(-log_q.gather(1, label).squeeze(1))
            losses_of_all.add_(entropies, alpha=1 - weight)
            if self.trains and weight != 1:
                slope.add_(log_q.exp_(), alpha=1 - weight)
                slope.scatter_add_(1, label, torch.full_like(label, weight - 1, dtype=slope.dtype))
        return slope


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sweep: _Sweep, hidden: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.sweep, ctx.dtypes = sweep, [tensor.dtype for tensor in (hidden, *parameters)]
        if sweep.trains:
            ctx.save_for_backward(hidden, *parameters)  # so that a change of them before backward is an error
            ctx.random = random_states(hidden.device)
        losses, ctx.gradients = sweep(hidden, None)
        loss, entropies, divergences = losses.unbind()
        ctx.mark_non_differentiable(entropies, divergences)
        return loss, entropies, divergences

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # handed out, not copied
        hidden, *parameters = ctx.saved_tensors
        alike = not parameters or is_expanded(upstream)
        if not alike and not computes_ignored(upstream.device):
            alike = bool((upstream == upstream[0]).all())
        if gradients is None or not alike:  # a second backward pass, or tokens whose gradients were mixed too early
            with drawing_again(hidden.device, ctx.random, ctx.sweep.autocast):
                _, gradients = ctx.sweep(hidden, upstream)
        elif len(upstream):
            gradients[0].mul_(upstream[:, None])
            for gradient in gradients[1:]:
                gradient.mul_(upstream[0])
        return None, *(gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes))
