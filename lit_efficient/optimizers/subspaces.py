"""The small subspace in which a gradient is seen: its strongest directions, or random ones.

    m < n:  low = B^T G [r, n], back B low [m, n], basis B [m, r];    else  low = G B [m, r], back low B^T, B [n, r]

The shorter side is projected. A stack [..., m, n] is a matrix each.

Source: Halko et al. (2011), https://arxiv.org/abs/0909.4061, for the randomised decomposition
"""

import torch
from torch import Tensor

_MORE = 8  # directions beyond those wanted, which make the last of these exact
_POWER_STEPS = 2


def is_wide(gradient: Tensor) -> bool:
    """Whether rows are projected: there are fewer of them than columns."""
    return gradient.shape[-2] < gradient.shape[-1]


def strongest_directions(gradient: Tensor, rank: int, generator: torch.Generator | None = None) -> Tensor:
    """The first ``rank`` singular vectors of a gradient's shorter side.

    Args:
        gradient: [..., m, n], finite.
        rank: At most the shorter side.
        generator: On the gradient's device, for a randomised decomposition, whose products are with ``rank + 8``
            vectors; ``None`` decomposes exactly, which takes many times as long for large matrices.

    Returns:
        An orthonormal basis [..., min(m, n), rank] in the gradient's type; strongest direction first.
    """
    matrix = gradient.to(torch.promote_types(gradient.dtype, torch.float32))  # of which there are decompositions
    wide = is_wide(gradient)
    if generator is None:
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        basis = left if wide else right.mT
    else:
        matrix = matrix if wide else matrix.mT  # [..., short, long]
        short, long = matrix.shape[-2:]
        size = (long, min(rank + _MORE, short))
        draws = torch.randn(size, generator=generator, device=matrix.device, dtype=matrix.dtype)
        basis = torch.linalg.qr(matrix @ draws).Q
        for _ in range(_POWER_STEPS):
            basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.mT @ basis).Q).Q
        triangle = torch.linalg.qr(matrix.mT @ basis).R.mT  # B^T G without its rotation of the long side
        basis = basis @ torch.linalg.svd(triangle).U
    return basis[..., :rank].to(gradient.dtype).contiguous()


def random_directions(gradient: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """A basis [min(m, n), rank] of normal numbers with variance 1 / rank, which keeps norms in expectation."""
    size = (min(gradient.shape[-2:]), rank)
    draws = torch.randn(size, generator=generator, device=gradient.device, dtype=torch.float32)
    return draws.mul_(rank**-0.5).to(gradient.dtype)


def into_subspace(gradient: Tensor, basis: Tensor) -> Tensor:
    """Of a gradient [..., m, n] what lies in a basis of its shorter side: [..., r, n] or [..., m, r]."""
    return basis.mT @ gradient if is_wide(gradient) else gradient @ basis


def out_of_subspace(low: Tensor, basis: Tensor, wide: bool) -> Tensor:
    """What :func:`into_subspace` gave as a matrix [..., m, n] again, of ``wide`` as the gradient was."""
    return basis @ low if wide else low @ basis.mT


def gradient_scales(low: Tensor, step: Tensor, wide: bool, tensorwise: bool = False) -> Tensor:
    """By what Adam would scale each channel of a gradient, as seen in the subspace; or all of it, by one number.

    Args:
        low: The gradient in the subspace, [..., r, n] or [..., m, r].
        step: Adam's step there.
        wide: Which of both.
        tensorwise: One scale a matrix instead of one a channel of the longer side.

    Returns:
        [..., 1, n], [..., m, 1] or [..., 1, 1].
    """
    axes = (-2, -1) if tensorwise else (-2,) if wide else (-1,)
    norms = (torch.linalg.vector_norm(t, dim=axes, keepdim=True) for t in (step, low))
    return next(norms) / next(norms).clamp_min(1e-8)
