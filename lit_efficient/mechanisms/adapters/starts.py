"""Initial values of low-rank adapters that are computed from the weight, or from inputs and gradients of a few batches.

    pissa     A, B = the r largest singular parts of W
    olora     A, B = the first r rows of R and columns of Q,    W = Q R
    corda     B A = the r largest singular parts of W C, times C^-1,    C = covariance of the inputs
    lora_ga   A = k V[1..r], B = k U[r+1..2r],    k = out^1/4 / sqrt(gamma),    dL/dW = U S V
    eva       A = the r main directions of the inputs around their mean (PCA), B = 0
    loftq     Q = rounded(W - s B A), and s B A = the r largest singular parts of W - Q, alternately

With all but ``eva`` and ``loftq`` the layer subtracts the initial ``s B0 A0`` from its output, which therefore starts
as ``W x``. With ``loftq`` it starts as ``Q x + s B A x``.
Sources: PiSSA https://arxiv.org/abs/2404.02948, OLoRA https://arxiv.org/abs/2406.01775, CorDA
https://arxiv.org/abs/2406.05223 (the instruction-previewed mode), LoRA-GA https://arxiv.org/abs/2407.05000, EVA
https://arxiv.org/abs/2410.07170 (without a redistribution of ranks), LoftQ https://arxiv.org/abs/2310.08659.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lit_efficient.errors import ConfigurationError

FROM_WEIGHT = ("pissa", "olora")
FROM_ROUNDING = "loftq"  # the variant that starts from the error of a quantised weight
FROM_DATA = ("corda", "lora_ga", "eva")
SUBTRACTED = (*FROM_WEIGHT, "corda", "lora_ga")  # variants whose initial product is subtracted from the output
_GAMMA = 16  # the paper's factor of LoRA-GA
_DAMPING = 0.01  # multiple of the mean variance that is added to CorDA's covariance, so that it can be inverted
_STEPS_OF_DAMPING = 20  # the damping is doubled at most as often

Factors = tuple[Tensor, Tensor]


def singular_factors(weight: Tensor, rank: int, scale: float) -> Factors:
    """Return A [r, in] and B [out, r] of PiSSA, with ``scale * B A`` the largest singular parts of the weight."""
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    root = (s[:rank] / scale).sqrt()
    return root[:, None] * vh[:rank], u[:, :rank] * root


def orthonormal_factors(weight: Tensor, rank: int) -> Factors:
    """Return A [r, in] and B [out, r] of OLoRA: B has the first orthonormal columns of Q, and A the rows of R."""
    q, r = torch.linalg.qr(weight)
    return r[:rank], q[:, :rank]


def context_factors(weight: Tensor, covariance: Tensor, rank: int, scale: float) -> Factors:
    """Return A [r, in] and B [out, r] of CorDA: the directions in which the weight changes these inputs most.

    Args:
        weight: The frozen weight, [out, in].
        covariance: Sum of ``x x^T`` over the positions of a sample, as a mean over samples, [in, in].
        rank: ``r``.
        scale: ``s``.

    Raises:
        ConfigurationError: If the covariance cannot be inverted, because it is zero or not finite.
    """
    damping = _DAMPING
    unit = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    for _ in range(_STEPS_OF_DAMPING):
        damped = covariance + damping * covariance.diagonal().mean() * unit
        inverse, failed = torch.linalg.inv_ex(damped)
        if not failed and (damped @ inverse - unit).norm() < 0.05:
            break
        damping *= 2
    else:
        raise ConfigurationError(
            "LoRA: variant='corda' needs the covariance of a layer's inputs, which is zero or not finite. Use other "
            "batches, or leave the layer out of targets"
        )
    u, s, vh = torch.linalg.svd(weight @ damped, full_matrices=False)
    root = (s[:rank] / scale).sqrt()
    return root[:, None] * (vh[:rank] @ inverse), u[:, :rank] * root


def gradient_factors(gradient: Tensor, rank: int) -> Factors:
    """Return A [r, in] and B [out, r] of LoRA-GA, whose first step is the closest one to that of full fine-tuning.

    Args:
        gradient: Gradient of the loss with respect to the weight, up to a factor, [out, in].
        rank: ``r``, at most half of the smaller side.
    """
    u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
    factor = len(gradient) ** 0.25 / _GAMMA**0.5
    return factor * vh[:rank], factor * u[:, rank : 2 * rank]


def rounding_factors(
    weight: Tensor, rounded: Callable[[Tensor], Tensor], rank: int, scale: float, rounds: int
) -> Factors:
    """Return A [r, in] and B [out, r] of LoftQ, with which a rounded weight is closest to the weight.

    Args:
        weight: The weight before rounding, [out, in].
        rounded: Function that rounds a matrix. Its last result belongs to the factors: ``weight - s B A``, rounded,
            with the factors of the round before.
        rank: ``r``.
        scale: ``s``.
        rounds: Number of alternations of rounding and singular values.
    """
    product = torch.zeros_like(weight)
    for _ in range(rounds):
        a, b = singular_factors(weight - rounded(weight - product), rank, scale)
        product = scale * (b @ a)
    return a, b


def principal_directions(moments: Tensor, rank: int) -> Tensor:
    """Return A [r, in] of EVA: the directions in which the inputs vary most, orthonormal rows, largest first.

    Args:
        moments: Sum of ``(x, 1) (x, 1)^T`` over the inputs, [in + 1, in + 1].
        rank: ``r``.
    """
    mean = moments[:-1, -1:] / moments[-1, -1]
    covariance = moments[:-1, :-1] / moments[-1, -1] - mean @ mean.T
    _, vectors = torch.linalg.eigh(covariance)
    return vectors.flip(1)[:, :rank].T


class Statistics:
    """Inputs or gradients of adapted layers, summed over batches in float32 in host memory.

    A context manager: the layers have hooks inside the ``with`` block only, also if a batch raises an error.

    Args:
        layers: The layers by their dotted names, each with a low-rank adapter and an input [..., in].
        variant: ``corda`` sums ``x x^T`` [in, in], ``eva`` the same for inputs with a further 1, and ``lora_ga`` the
            gradient of the weight [out, in].
    """

    def __init__(self, layers: Mapping[str, Any], variant: str) -> None:
        self.sums: dict[str, Tensor] = {}
        self.samples: dict[str, Tensor] = {}  # number of samples in each sum
        self.mask: Tensor | None = None  # positions that count, [batch, positions]; all if it is None
        self._layers = layers
        self._variant = variant
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        hook: Callable[..., Any] = self._gradient if self._variant == "lora_ga" else self._covariance
        for name, layer in self._layers.items():
            self._handles.append(layer.register_forward_hook(_with_name(hook, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def with_mask_of(self, batch: Any) -> Any:
        """Leave out the padding of a batch with an ``attention_mask``, and return the batch."""
        self.mask = None
        if isinstance(batch, Mapping):
            mask = batch.get("attention_mask")
            if isinstance(mask, Tensor) and mask.ndim == 2:
                self.mask = mask.bool()
        return batch

    @torch.no_grad()
    def _covariance(self, name: str, x: Tensor, y: Tensor) -> None:
        if not y.requires_grad:  # the first pass of a recomputed block
            return
        x = x.detach().float()
        if self._variant == "corda":  # each sample has the same share, as in the authors' code
            largest = x.abs().flatten(1).amax(1).clamp_min(torch.finfo(torch.float32).tiny)
            x = x / largest.view(-1, *[1] * (x.ndim - 1))
        if self.mask is not None and x.shape[:-1] == self.mask.shape:
            rows = x[self.mask.to(x.device)]
        else:
            rows = x.flatten(0, -2)
        if self._variant == "eva":
            rows = F.pad(rows, (0, 1), value=1.0)
        self._add(name, rows.T @ rows, len(x))

    def _gradient(self, name: str, x: Tensor, y: Tensor) -> None:
        if not y.requires_grad:
            return
        x = x.detach()

        def add(gradient: Tensor) -> None:
            self._add(name, gradient.flatten(0, -2).float().T @ x.flatten(0, -2).float(), len(x))

        y.register_hook(add)

    def _add(self, name: str, term: Tensor, samples: int) -> None:
        if name not in self.sums:
            self.sums[name] = torch.zeros(term.shape)
            self.samples[name] = torch.zeros(())
        self.sums[name] += term.cpu()
        self.samples[name] += samples


def _with_name(hook: Callable[[str, Tensor, Tensor], None], name: str) -> Callable[..., None]:
    def call(layer: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        if not isinstance(output, Tensor):  # logits that a chunked loss computes later
            raise ConfigurationError(
                f"LoRA: {name!r} is the head, whose logits ChunkedCrossEntropy computes in chunks, so that its adapter "
                "cannot start from inputs and gradients. Leave the head out of targets, or use another variant"
            )
        hook(name, args[0], output)

    return call
