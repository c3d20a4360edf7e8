"""Cross-entropy of a linear head without the logits: never more than one chunk of tokens times the vocabulary.

    x = cap * tanh(scale * (W h + b) / cap),    lse = log sum_v exp(x_v)
    loss = lse - (1 - eps) x_y - eps mean_v(x_v) + z lse^2
    d loss / d x_v = softmax(x)_v (1 + 2 z lse) - eps / V - (1 - eps) [v = y]

The gradients of hidden states and head are made in the forward pass, chunk by chunk, while the chunk's logits exist;
the backward pass only scales them. What is left is these gradients themselves, (V + N) H numbers, and one chunk.
On a CPU ignored tokens are left out before the matrix product and cost nothing; on a GPU where the caller says how many
are ``learned``. Otherwise a GPU computes them, too, and counts them as 0: to leave them out, the host would have to
wait in each step for how many there are.
Sources: https://arxiv.org/abs/2411.09009 (why logits dominate), https://github.com/mgmalek/efficient_cross_entropy
(gradients in the forward pass); z-loss https://arxiv.org/abs/2204.02311; softcap https://arxiv.org/abs/2408.00118.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.internals.torch_as_cuda import kind_of
from lit_efficient.losses import liger_cross_entropy
from lit_efficient.losses.head_chunks import MatrixHead, ModuleHead, drawing_again, random_states

_WHO = "chunked_cross_entropy"
CHUNK_SIZE = 256  # tokens, on a CPU; benchmarks/cross_entropy.py
_VOCABULARY = 2**17  # where it is not known, which only decides the size of a chunk
_LOGITS = 2**30  # bytes of one chunk's float32 logits, on a GPU
REDUCTIONS = ("mean", "sum", "none")
BACKENDS = ("auto", "torch", "liger")


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one token as a function of its logits."""

    ignore_index: int = -100  # label that counts for nothing
    label_smoothing: float = 0.0  # eps, at least 0 and below 1
    z_loss: float = 0.0  # z, at least 0 (1e-4 in PaLM)
    softcap: float | None = None  # bound of the logits, above 0 (30 in Gemma 2), or ``None``
    logit_scale: float = 1.0  # factor on the logits, before the bound

    def __post_init__(self) -> None:
        check_number(_WHO, "label_smoothing", self.label_smoothing, least=0, below=1)
        check_number(_WHO, "z_loss", self.z_loss, least=0)
        check_number(_WHO, "softcap", self.softcap, above=0, null=True)

    def consume(self, logits: Tensor, labels: Tensor, scale: Tensor | None) -> Tensor:
        """Losses [n] of the tokens, unscaled; the logits become ``scale`` times their gradient where it is given.

        Args:
            logits: [n, V], float32 or float64, before ``logit_scale`` and ``softcap``.
            labels: [n], none of them ignored.
            scale: [n], or ``None`` where no gradient is wanted.
        """
        eps, z = self.label_smoothing, self.z_loss
        slope = None  # of the softcap
        if self.logit_scale != 1:
            logits.mul_(self.logit_scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_()
            slope = logits.square().neg_().add_(1) if scale is not None else None
            logits.mul_(self.softcap)
        label_column = labels[:, None]
        top = logits.amax(1)
        logits.sub_(top[:, None])  # all below is shifted by the maximum: a difference of logits is what counts
        target = logits.gather(1, label_column).squeeze(1)
        mean = logits.mean(1) if eps else 0.0
        mass = logits.exp_().sum(1)
        lse = mass.log()
        losses = lse - (1 - eps) * target - eps * mean
        if z:
            losses = losses + z * (lse + top).square()
        if scale is None:
            return losses
        logits.mul_((scale * (1 + 2 * z * (lse + top)) / mass)[:, None])
        if eps:
            logits.sub_((scale * (eps / logits.shape[1]))[:, None])
        logits.scatter_add_(1, label_column, (scale * (eps - 1))[:, None])
        if slope is not None:
            logits.mul_(slope)
        if self.logit_scale != 1:
            logits.mul_(self.logit_scale)
        return losses


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    backend: str = "auto",
    learned: int | None = None,
) -> Tensor:
    """``F.cross_entropy(hidden @ weight.T + bias, labels)`` and its gradients, one chunk of tokens at a time.

    Softmax and losses are in float32 (float64 for float64). The gradient of a 16-bit weight is summed in float32 and
    rounded once, at the price of 4 bytes an element until the backward pass. No gradient is made for what needs none:
    a frozen head, or anything under ``torch.no_grad()``. Under autocast the products are in its dtype. Gradients are
    handed out, not copied: a second backward pass (``retain_graph=True``) computes them again. Second derivatives are
    refused.

    Args:
        hidden: [..., H].
        weight: [V, H].
        labels: [...], in [0, V) or ``ignore_index``.
        bias: [V].
        chunk_size: Tokens at a time, at least 1; ``None``: as :func:`chunk_size_of` has it for the device.
        ignore_index: Label that counts for nothing.
        label_smoothing: Share of the target that is spread over the vocabulary, at least 0 and below 1.
        z_loss: Weight of the squared log-partition function, at least 0; part of the returned loss.
        softcap: Bound of the logits, above 0.
        logit_scale: Factor on the logits, before the bound.
        token_weights: [...], constants, each multiplied with its token's loss.
        reduction: ``mean`` divides by the number of tokens that are not ignored, or by the sum of their weights (0 for
            none); ``sum``; ``none`` gives [...]. With ``none``, an upstream gradient that is not the same for all
            tokens costs a second pass over the head in the backward pass, and on a GPU also one that does not come
            from a plain sum: put weights into ``token_weights`` instead.
        backend: What makes losses and gradients of logits: ``torch``, ``liger`` (one kernel, on a GPU), or ``auto``:
            Liger's where it gives the right numbers, which is tried once.
        learned: At most so many labels count. Needed on a GPU alone; if there are more, all losses are NaN.

    Returns:
        [], or [...] for ``none``.

    Raises:
        ConfigurationError: For an argument out of range or shapes that do not fit.
    """
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        allowed = f"[V, {hidden.shape[-1]}] for hidden {list(hidden.shape)}"
        raise refusal(_WHO, "weight", allowed, list(weight.shape))
    terms = TokenLoss(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    parameters = (weight,) if bias is None else (weight, bias)
    vocabulary = len(weight)
    how = (chunk_size, token_weights, reduction, backend, learned)
    return _reduced(MatrixHead, hidden, parameters, labels, terms, vocabulary, *how)


def chunked_head_cross_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    parameters: Sequence[Tensor],
    terms: TokenLoss | None = None,
    *,
    chunk_size: int | None = None,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    backend: str = "auto",
    learned: int | None = None,
) -> Tensor:
    """As :func:`chunked_cross_entropy`, through any head: quantised, under LoRA or DoRA, with dropout.

    The head is called on each chunk, and its own backward pass run at once.

    Args:
        head: Maps [n, H] to [n, V], each row by itself.
        hidden: [..., H].
        labels: [...], in [0, V) or the ignored index.
        parameters: What of the head trains.
        terms: The loss of one token.
        chunk_size: Tokens at a time, at least 1; ``None``: as :func:`chunk_size_of` has it for the device.
        token_weights: [...], constants.
        reduction: ``mean``, ``sum`` or ``none``.
        backend: ``auto``, ``torch`` or ``liger``.
        learned: At most so many labels count.

    Returns:
        [], or [...] for ``none``.
    """

    def through(*_: Any) -> ModuleHead:
        return ModuleHead(head, hidden, parameters)

    terms = terms or TokenLoss()
    vocabulary = max((len(parameter) for parameter in parameters if parameter.ndim), default=_VOCABULARY)
    how = (chunk_size, token_weights, reduction, backend, learned)
    return _reduced(through, hidden, tuple(parameters), labels, terms, vocabulary, *how)


def _reduced(
    head: Callable[..., MatrixHead | ModuleHead],
    hidden: Tensor,
    parameters: tuple[Tensor, ...],
    labels: Tensor,
    terms: TokenLoss,
    vocabulary: int,
    chunk_size: int | None,
    token_weights: Tensor | None,
    reduction: str,
    backend: str,
    learned: int | None,
) -> Tensor:
    check_number(_WHO, "chunk_size", chunk_size, least=1, whole=True, null=True)
    check_choice(_WHO, "reduction", reduction, REDUCTIONS)
    check_choice(_WHO, "backend", backend, BACKENDS)
    for name, tensor in (("labels", labels), ("token_weights", token_weights)):
        if tensor is not None and tensor.shape != hidden.shape[:-1]:
            allowed = f"{list(hidden.shape[:-1])} for hidden {list(hidden.shape)}"
            raise refusal(_WHO, name, allowed, list(tensor.shape))
    if token_weights is not None and token_weights.requires_grad:
        raise ConfigurationError(f"{_WHO}: token_weights have a gradient, but count as constants: detach() them")
    wide = torch.promote_types(hidden.dtype, torch.float32)
    flat = labels.reshape(-1)
    weights = None if token_weights is None else token_weights.reshape(-1).to(wide)
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, *parameters))
    chunk_size = chunk_size or chunk_size_of(hidden.device, vocabulary, len(flat) if learned is None else learned)
    liger = takes_liger(backend, hidden.device, wide if wide == torch.float64 else autocast or hidden.dtype, terms)
    sweep = _Sweep(head, flat, terms, chunk_size, weights, autocast, trains, reduction == "none", liger, learned)
    losses = _ChunkedLoss.apply(sweep, hidden.reshape(-1, hidden.shape[-1]), *parameters)
    if reduction == "none":
        return losses.view(labels.shape)
    if reduction == "sum":
        return losses
    valid = flat != terms.ignore_index
    total = valid.sum() if weights is None else (weights.where(valid, 0) if sweep.whole else weights[valid]).sum()
    return losses / torch.where(total == 0, 1, total)


def chunk_size_of(device: torch.device, vocabulary: int, tokens: int) -> int:
    """Tokens at a time: 256 on a CPU, whose cache holds them; on a GPU as many as have 1 GiB of logits.

    Each chunk reads the head's gradient, adds to it and writes it, for V rows of H numbers: with the product in between
    12 V H bytes in float32, whatever the chunk's size, besides what grows with the tokens. For N = 8,192 tokens,
    V = 128,256 ids and H = 4,096 that are 6.3 GB a chunk: 202 GB in the 32 chunks of 256, 25 GB in four of 2,048, for
    which a GPU that moves 3 TB/s takes 67 and 8 ms. This is arithmetic: it was not measured on a GPU.

    Args:
        device: Of the hidden states.
        vocabulary: V.
        tokens: N, which one chunk never exceeds.
    """
    if kind_of(device) == "cpu":
        return CHUNK_SIZE
    fitting = max(CHUNK_SIZE, _LOGITS // (4 * vocabulary))
    chunks = -(-max(tokens, 1) // fitting)
    return -(-max(tokens, 1) // chunks)  # of about one size


def takes_liger(backend: str, device: torch.device, dtype: torch.dtype, terms: TokenLoss) -> bool:
    """Whether Liger's kernel is what makes the losses of logits of a dtype on a device; what is compiled fuses its own.

    Raises:
        ConfigurationError: If ``backend`` is ``liger`` and it cannot.
    """
    if backend == "torch" or (backend == "auto" and torch.compiler.is_compiling()):
        return False
    if kind_of(device) == device.type:
        reason = liger_cross_entropy.why_not(device, dtype, terms)
    else:  # a plan, which can try nothing
        reason = "" if liger_cross_entropy.installed() else "liger-kernel is not installed"
    if backend == "liger" and reason:
        raise ConfigurationError(f"{_WHO}: backend='liger': {reason}; use auto or torch")
    return not reason


def computes_ignored(device: torch.device) -> bool:
    """Whether tokens that count for nothing go through the head: a GPU does not tell how many they are."""
    return kind_of(device) != "cpu"


def is_expanded(gradient: Tensor) -> bool:
    """Whether all its numbers are one in memory, as for the terms of a sum (not of a mean): nothing is read."""
    return gradient.numel() <= 1 or not any(gradient.stride())


@dataclass(frozen=True)
class _Sweep:
    """One pass over all tokens, chunk by chunk."""

    head: Callable[..., MatrixHead | ModuleHead]
    labels: Tensor
    terms: TokenLoss
    chunk_size: int
    weights: Tensor | None
    autocast: torch.dtype | None
    trains: bool
    per_token: bool
    liger: bool  # its kernel makes losses and gradients
    learned: int | None

    @property
    def whole(self) -> bool:
        """Whether ignored tokens are masked, and so computed unless ``learned`` is known."""
        return computes_ignored(self.labels.device)

    def valid(self) -> Tensor:
        return self.labels != self.terms.ignore_index

    def __call__(
        self,
        hidden: Tensor,
        parameters: tuple[Tensor, ...],
        needed: Sequence[bool],
        scale: Tensor | None,
        ones: bool = False,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Losses [N] times the token weights and, with ``scale`` [N], the gradients of the scaled losses' sum.

        ``ones`` if that is what ``scale`` holds.
        """
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = hidden.new_zeros(len(hidden), dtype=wide)
        gradient = torch.zeros_like(hidden) if scale is not None and needed[0] else None
        head = self.head(hidden, parameters, needed, self.autocast)
        valid, labels, starts = self.valid(), self.labels, range(0, len(hidden), self.chunk_size)
        chunks: Iterable[Any] = (slice(start, start + self.chunk_size) for start in starts)
        narrow = self.liger and self.terms.logit_scale == 1
        if self.whole:
            labels = labels if self.liger else labels.where(valid, 0)
            scale = None if scale is None else scale.where(valid, 0)
            if self.learned is not None:  # nothing is read: what counts is sorted to the front
                chunks = (~valid).byte().argsort(stable=True)[: self.learned].split(self.chunk_size)
        else:
            chunks = valid.nonzero().squeeze(1).split(self.chunk_size)
        for rows in chunks:
            x = hidden[rows]  # of ignored tokens 0: they may hold what is not finite
            logits = head.logits(x.where(valid[rows, None], 0) if self.whole else x, scale is not None, not narrow)
            each = None if scale is None or (ones and self.liger) else scale[rows]
            if self.liger:
                losses[rows] = liger_cross_entropy.consume(
                    self.terms, logits, labels[rows], each, gradients=scale is not None
                )
            else:
                losses[rows] = self.terms.consume(logits, labels[rows], each)
            if scale is not None:
                part = head.backward(logits)
                if gradient is not None and part is not None:
                    gradient[rows] = part.to(gradient.dtype)
            del logits  # before the next chunk's are made
        losses = losses.where(valid, 0) if self.whole else losses
        if self.whole and self.learned is not None:
            losses = losses.where(valid.sum() <= self.learned, torch.nan)
        losses = losses if self.weights is None else losses * self.weights
        return losses, [gradient, *head.gradients()]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sweep: _Sweep, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.sweep, ctx.dtypes, scale = sweep, [tensor.dtype for tensor in (hidden, *parameters)], None
        if sweep.trains:
            wide = torch.promote_types(hidden.dtype, torch.float32)
            scale = (
                torch.ones(len(hidden), dtype=wide, device=hidden.device) if sweep.weights is None else sweep.weights
            )
            ctx.save_for_backward(hidden, *parameters)
            ctx.random = random_states(hidden.device)
        ones = sweep.weights is None
        losses, ctx.gradients = sweep(hidden, parameters, ctx.needs_input_grad[1:], scale, ones)
        return losses if sweep.per_token else losses.sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "chunked_cross_entropy: its gradient is made in the forward pass and has no derivative of its own: "
                "use F.cross_entropy where create_graph=True is needed"
            )
        sweep: _Sweep = ctx.sweep
        gradients, ctx.gradients = ctx.gradients, None  # handed out, not copied: autograd may take them as they are
        among, alike = upstream.reshape(-1)[:1], is_expanded(upstream)
        if not alike and not sweep.whole:
            among = upstream[sweep.valid()]
            alike = len(among) <= 1 or bool((among == among[0]).all())
        if gradients is None or not alike:  # a second backward pass, or tokens whose gradients were mixed too early
            hidden, *parameters = ctx.saved_tensors
            scale = upstream.expand(len(hidden)) if sweep.weights is None else upstream * sweep.weights
            with drawing_again(hidden.device, ctx.random, sweep.autocast):
                _, gradients = sweep(hidden, tuple(parameters), ctx.needs_input_grad[1:], scale)
        elif len(among):
            gradients = [g if g is None else g.mul_(among[0]) for g in gradients]
        return None, *(g if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes))
