"""Cross-entropy of a linear head that never holds the logits of more than one chunk of tokens.

    x = cap * tanh(scale * (W h + b) / cap),    lse = log sum_v exp(x_v)
    loss = lse - (1 - eps) x_y - eps mean_v(x_v) + z lse^2
    d loss / d x_v = softmax(x)_v (1 + 2 z lse) - eps / V - (1 - eps) [v = y]

The forward pass computes the gradients of the hidden states and the head chunk by chunk, while the logits of the chunk
exist. The backward pass only scales them. The memory needed is that of these gradients, (V + N) H numbers, and of one
chunk of logits.

Ignored tokens are left out of the matrix product on a CPU. On a GPU their number is unknown without a synchronisation
in each step, so they are computed and masked, unless the caller bounds the number of labels that count (``learned``).

Sources: https://arxiv.org/abs/2411.09009 (why logits dominate), https://github.com/mgmalek/efficient_cross_entropy
(gradients in the forward pass); z-loss https://arxiv.org/abs/2204.02311; softcap https://arxiv.org/abs/2408.00118.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.internals.torch_as_cuda import kind_of
from lit_efficient.losses import liger_cross_entropy
from lit_efficient.losses.head_chunks import MatrixHead, ModuleHead, apply_sweep, is_expanded
from lit_efficient.losses.token_weighting import TokenWeighting
from lit_efficient.surgery import autocast_dtype

_WHO = "chunked_cross_entropy"
CHUNK_SIZE = 256  # largest number of tokens on a CPU, measured by benchmarks/cross_entropy.py
_LEAST_CHUNK = 64  # tokens on a CPU; products with fewer rows are much slower
_SMALL = 2**23  # bytes of logits on a CPU for which no chunk is made smaller
_VOCABULARY = 2**17  # assumed where the vocabulary is unknown; it only affects the size of a chunk
# Bytes of the float32 logits of one chunk on a GPU, for a head that trains and for a frozen one.
_LOGITS = 2**30
_LOGITS_OF_FROZEN = 2**28
REDUCTIONS = ("mean", "sum", "none")
BACKENDS = ("auto", "torch", "liger")


@dataclass(frozen=True)
class TokenLoss:
    """Loss of one token as a function of its logits."""

    ignore_index: int = -100  # label of tokens that do not contribute
    label_smoothing: float = 0.0  # eps, at least 0 and below 1
    z_loss: float = 0.0  # z, at least 0 (1e-4 in PaLM)
    softcap: float | None = None  # bound of the logits, above 0 (30 in Gemma 2), or ``None``
    logit_scale: float = 1.0  # factor on the logits, before the bound
    weighting: TokenWeighting | None = None  # weights of tokens that depend on their logits

    def __post_init__(self) -> None:
        check_number(_WHO, "label_smoothing", self.label_smoothing, least=0, below=1)
        check_number(_WHO, "z_loss", self.z_loss, least=0)
        check_number(_WHO, "softcap", self.softcap, above=0, null=True)

    def consume(self, logits: Tensor, labels: Tensor, scale: Tensor | None) -> Tensor:
        """Compute losses, and overwrite the logits by ``scale`` times their gradient.

        Args:
            logits: [n, V], float32 or float64, before ``logit_scale`` and ``softcap``. Without ``scale`` they hold
                intermediate values afterwards.
            labels: [n], without ignored ones.
            scale: [n], or ``None`` if no gradient is needed.

        Returns:
            Losses [n]. ``scale`` does not apply to them.
        """
        eps = self.label_smoothing
        z = self.z_loss
        slope = None  # derivative of the softcap
        if self.logit_scale != 1:
            logits.mul_(self.logit_scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_()
            if scale is not None:
                slope = logits.square().neg_().add_(1)
            logits.mul_(self.softcap)
        weights = None
        if self.weighting is not None:
            weights = self.weighting(logits, labels)
            if scale is not None:
                scale = scale * weights
        label_column = labels[:, None]
        top = logits.amax(1)
        logits.sub_(top[:, None])  # so that exp cannot overflow; the loss depends on differences of logits only
        target = logits.gather(1, label_column).squeeze(1)
        mean = logits.mean(1) if eps else 0.0
        mass = logits.exp_().sum(1)
        lse = mass.log()
        losses = lse - (1 - eps) * target - eps * mean
        if z:
            losses = losses + z * (lse + top).square()
        if weights is not None:
            losses = losses * weights
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
    weighting: TokenWeighting | None = None,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    backend: str = "auto",
    learned: int | None = None,
) -> Tensor:
    """Compute ``F.cross_entropy(hidden @ weight.T + bias, labels)`` and its gradients, one chunk of tokens at a time.

    - Softmax and losses are computed in float32 (float64 for float64 inputs). Under autocast the matrix products are
      computed in its dtype.
    - The gradient of a 16-bit weight is summed in float32 and rounded once. It takes 4 bytes an element until the
      backward pass.
    - No gradient is computed for a frozen head or frozen hidden states, nor under ``torch.no_grad()``.
    - A second backward pass (``retain_graph=True``) computes the gradients again. Second derivatives raise an error.

    Args:
        hidden: Hidden states, [..., H].
        weight: Weight of the head, [V, H].
        labels: [...], in [0, V) or ``ignore_index``.
        bias: Bias of the head, [V].
        chunk_size: Tokens in a chunk, at least 1. ``None`` takes :func:`chunk_size_of` the device.
        ignore_index: Label of tokens that do not contribute to the loss.
        label_smoothing: Share of the target that is spread over the vocabulary, at least 0 and below 1.
        z_loss: Weight of the squared log-partition function, at least 0. The term is part of the returned loss.
        softcap: Bound of the logits, above 0.
        logit_scale: Factor on the logits, before the bound.
        weighting: Factor on the loss of each token that depends on its logits. ``mean`` does not divide by it.
        token_weights: Constant factor on the loss of each token, [...].
        reduction: ``mean`` divides by the number of tokens that contribute, or by the sum of their weights. It gives 0
            if there is none. ``sum`` adds the losses up. ``none`` gives [...]. With ``none``, an upstream gradient that
            differs between tokens costs a second pass over the head in the backward pass. On a GPU so does every
            upstream gradient other than that of a plain sum. Pass weights as ``token_weights`` instead.
        backend: Implementation of softmax and loss: ``torch``; ``liger``, one kernel on a GPU; ``auto``, which takes
            Liger if a trial on a few logits gives the right numbers.
        learned: Upper bound on the number of labels that are not ``ignore_index``. Only a GPU uses it. All losses are
            NaN if more labels count.

    Returns:
        [], or [...] for ``none``.

    Raises:
        ConfigurationError: For an argument out of range or shapes that do not match.
    """
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        allowed = f"[V, {hidden.shape[-1]}] for hidden {list(hidden.shape)}"
        raise refusal(_WHO, "weight", allowed, list(weight.shape))
    terms = TokenLoss(ignore_index, label_smoothing, z_loss, softcap, logit_scale, weighting)
    parameters = [weight]
    if bias is not None:
        parameters.append(bias)
    size = len(weight)
    return _reduced_loss(
        MatrixHead, hidden, parameters, labels, terms, size, chunk_size, token_weights, reduction, backend, learned
    )


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
    """Compute the loss of :func:`chunked_cross_entropy` for any head: quantised, with LoRA or DoRA, or with dropout.

    The head is called on each chunk, and its own backward pass runs directly afterwards.

    Args:
        head: Function of [n, H] to [n, V] that treats each row independently.
        hidden: Hidden states, [..., H].
        labels: [...], in [0, V) or the ignored index.
        parameters: Parameters of the head that train.
        terms: Loss of one token.
        chunk_size: Tokens in a chunk, at least 1. ``None`` takes :func:`chunk_size_of` the device.
        token_weights: Constant factor on the loss of each token, [...].
        reduction: ``mean``, ``sum`` or ``none``.
        backend: ``auto``, ``torch`` or ``liger``.
        learned: Upper bound on the number of labels that are not ignored.

    Returns:
        [], or [...] for ``none``.
    """

    def make_head(
        hidden: Tensor, parameters: Sequence[Tensor], needed: Sequence[bool], autocast: torch.dtype | None
    ) -> ModuleHead:
        return ModuleHead(head, hidden, parameters, any(needed))

    vocabulary = max((len(parameter) for parameter in parameters if parameter.ndim), default=_VOCABULARY)
    terms = terms or TokenLoss()
    return _reduced_loss(
        make_head, hidden, parameters, labels, terms, vocabulary, chunk_size, token_weights, reduction, backend, learned
    )


_MakeHead = Callable[[Tensor, Sequence[Tensor], Sequence[bool], torch.dtype | None], MatrixHead | ModuleHead]


def _reduced_loss(
    make_head: _MakeHead,
    hidden: Tensor,
    parameters: Sequence[Tensor],
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
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weights = None
    if token_weights is not None:
        if token_weights.requires_grad:
            raise ConfigurationError(
                f"{_WHO}: token_weights require a gradient, but weights are constants: detach() them"
            )
        weights = token_weights.reshape(-1).to(wide)
    flat = labels.reshape(-1)
    autocast = autocast_dtype(hidden.device)
    logits_dtype = wide if wide == torch.float64 else autocast or hidden.dtype
    tokens = len(flat) if learned is None else learned
    trains_head = any(parameter.requires_grad for parameter in parameters)
    sweep = _CrossEntropySweep(
        make_head=make_head,
        labels=flat,
        terms=terms,
        chunk_size=chunk_size
        or chunk_size_of(hidden.device, vocabulary, tokens, trains=trains_head, width=hidden.shape[-1]),
        weights=weights,
        autocast=autocast,
        trains=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, *parameters)),
        per_token=reduction == "none",
        liger=takes_liger(backend, hidden.device, logits_dtype, terms),
        learned=learned,
    )
    (losses,) = apply_sweep(sweep, hidden.reshape(-1, hidden.shape[-1]), parameters)
    if reduction == "none":
        return losses.view(labels.shape)
    if reduction == "sum":
        return losses
    valid = sweep.valid()
    if weights is None:
        total = valid.sum()
    elif sweep.masks_ignored:
        total = weights.where(valid, 0).sum()
    else:
        total = weights[valid].sum()
    return losses / torch.where(total == 0, 1, total)


def chunk_size_of(device: torch.device, vocabulary: int, tokens: int, *, trains: bool, width: int | None = None) -> int:
    """Return the number of tokens in a chunk: at most 256 on a CPU; on a GPU as many as have 1 GiB of float32 logits.

    On a CPU the logits of a small chunk stay in the cache. If the head trains, they take at most an eighth of the
    memory of its gradient, with at least 64 tokens in a chunk. On a GPU few large chunks are better: each chunk reads
    the gradient of the head, adds to it and writes it back, which moves 12 V H bytes in float32 (product included). For
    N = 8,192 tokens, V = 128,256 and H = 4,096 that is 6.3 GB a chunk: 202 GB for 32 chunks of 256, and 25 GB for four
    chunks of 2,048. At 3 TB/s these take 67 and 8 ms. A frozen head has no gradient, so its chunks are smaller: as many
    tokens as have 256 MiB of logits. These are estimates, not measurements on a GPU.

    Args:
        device: Device of the hidden states.
        vocabulary: V.
        tokens: N. A chunk is never larger.
        trains: Whether the head has a gradient.
        width: H, or ``None`` if it is unknown.
    """
    if kind_of(device) == "cpu":
        if width is None or not trains:
            return CHUNK_SIZE
        least = max(_LEAST_CHUNK, _SMALL // (4 * vocabulary))
        return min(CHUNK_SIZE, max(least, width // 8 // 16 * 16))
    most = _LOGITS if trains else _LOGITS_OF_FROZEN
    fitting = max(CHUNK_SIZE, most // (4 * vocabulary))
    chunks = -(-max(tokens, 1) // fitting)
    return -(-max(tokens, 1) // chunks)  # chunks of about equal size


def takes_liger(backend: str, device: torch.device, dtype: torch.dtype, terms: TokenLoss) -> bool:
    """Return whether Liger's kernel computes the losses from logits of a dtype on a device.

    ``auto`` leaves it out under ``torch.compile``, which fuses these operations itself.

    Raises:
        ConfigurationError: If ``backend`` is ``liger`` and the kernel cannot be used.
    """
    if backend == "torch" or (backend == "auto" and torch.compiler.is_compiling()):
        return False
    if terms.weighting is not None:
        reason = f"Liger's kernel does not compute the weights of {terms.weighting.kind}"
    elif kind_of(device) == device.type:
        reason = liger_cross_entropy.why_not(device, dtype, terms)
    elif liger_cross_entropy.installed():  # a plan stands in for the GPU, so the kernel cannot be tried
        reason = ""
    else:
        reason = "liger-kernel is not installed"
    if backend == "liger" and reason:
        raise ConfigurationError(f"{_WHO}: backend='liger': {reason}; use auto or torch")
    return not reason


def computes_ignored(device: torch.device) -> bool:
    """Return whether the head is applied to ignored tokens too. A GPU does so, because their number is not known."""
    return kind_of(device) != "cpu"


@dataclass(frozen=True)
class _CrossEntropySweep:
    """Computation of all losses and gradients, chunk by chunk. See :class:`lit_efficient.losses.head_chunks.Sweep`."""

    name: ClassVar[str] = _WHO

    make_head: _MakeHead
    labels: Tensor  # [N]
    terms: TokenLoss
    chunk_size: int
    weights: Tensor | None  # [N]
    autocast: torch.dtype | None
    trains: bool
    per_token: bool  # return one loss for each token instead of their sum
    liger: bool  # use Liger's kernel
    learned: int | None

    @property
    def masks_ignored(self) -> bool:
        """True if ignored tokens are masked instead of being removed."""
        return computes_ignored(self.labels.device)

    def valid(self) -> Tensor:
        """Return which tokens contribute to the loss, [N]."""
        return self.labels != self.terms.ignore_index

    def _chunks(self, valid: Tensor) -> Iterable[slice | Tensor]:
        """Yield the rows of each chunk."""
        if not self.masks_ignored:
            return valid.nonzero().squeeze(1).split(self.chunk_size)
        if self.learned is not None:  # sorting the tokens that contribute to the front needs no synchronisation
            return (~valid).byte().argsort(stable=True)[: self.learned].split(self.chunk_size)
        return [slice(start, start + self.chunk_size) for start in range(0, len(valid), self.chunk_size)]

    def run(
        self, hidden: Tensor, parameters: Sequence[Tensor], needed: Sequence[bool], upstream: Tensor | None
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = hidden.new_zeros(len(hidden), dtype=wide)
        scale = None
        if upstream is not None:
            if self.weights is None:
                scale = upstream.expand(len(hidden))
            else:
                scale = upstream * self.weights
        elif self.trains:
            scale = torch.ones_like(losses) if self.weights is None else self.weights
        trains = scale is not None
        needed = [trains and need for need in needed]
        head = self.make_head(hidden, parameters, needed, self.autocast)
        gradient = torch.zeros_like(hidden) if needed[0] else None
        labels = self.labels
        valid = self.valid()
        if self.masks_ignored:
            if not self.liger:
                labels = labels.where(valid, 0)
            if scale is not None:
                scale = scale.where(valid, 0)
        narrow = self.liger and self.terms.logit_scale == 1  # the kernel reads logits in the dtype of the product
        unscaled = scale is None or (self.liger and upstream is None and self.weights is None)
        for rows in self._chunks(valid):
            x = hidden[rows]
            if self.masks_ignored:  # hidden states of ignored tokens may be infinite or NaN
                x = x.where(valid[rows, None], 0)
            logits = head.logits(x, trains, not narrow)
            factors = None if unscaled else scale[rows]  # type: ignore[index]
            if self.liger:
                losses[rows] = liger_cross_entropy.consume(self.terms, logits, labels[rows], factors, gradients=trains)
            else:
                losses[rows] = self.terms.consume(logits, labels[rows], factors)
            if trains:
                part = head.backward(logits)
                if gradient is not None and part is not None:
                    gradient[rows] = part.to(gradient.dtype)
            del logits  # free the memory before the logits of the next chunk are allocated
        if self.masks_ignored:
            losses = losses.where(valid, 0)
            if self.learned is not None:
                losses = losses.where(valid.sum() <= self.learned, torch.nan)
        if self.weights is not None:
            losses = losses * self.weights
        return (losses if self.per_token else losses.sum(),), [gradient, *head.gradients()]

    def factors(self, count: int, upstream: Tensor) -> Sequence[Tensor] | None:
        factor = upstream.reshape(-1)[:1]
        if not is_expanded(upstream):  # the gradient of a mean is a tensor of equal numbers
            valid = self.valid()
            lowest = upstream.where(valid, torch.inf).amin()
            highest = upstream.where(valid, -torch.inf).amax()
            if not bool(lowest == highest):  # a GPU waits here, for less time than a second pass through the head takes
                return None
            factor = highest
        if not factor.numel():
            factor = upstream.new_ones(1)
        return [factor] * count
