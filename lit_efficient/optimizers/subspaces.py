"""Projection of gradients into a small subspace, spanned by their strongest directions or by random ones.

    m < n:  low = B^T G [r, n], back B low [m, n], basis B [m, r];    else  low = G B [m, r], back low B^T, B [n, r]

The shorter side is projected. Leading dimensions of a stack [..., m, n] are independent matrices.

Source: Halko et al. (2011), https://arxiv.org/abs/0909.4061, for the randomised decomposition
"""

import torch
from torch import Tensor

_MORE = 8  # additional directions, which make the last of the wanted directions accurate
_POWER_STEPS = 2


def is_wide(gradient: Tensor) -> bool:
    """Return whether there are fewer rows than columns, so that rows are projected."""
    return gradient.shape[-2] < gradient.shape[-1]


def strongest_directions(gradient: Tensor, rank: int, generator: torch.Generator | None = None) -> Tensor:
    """Return the first ``rank`` singular vectors of the shorter side of a gradient.

    Args:
        gradient: [..., m, n], finite.
        rank: Number of vectors, at most the shorter side.
        generator: Random generator on the device of the gradient, for a randomised decomposition with ``rank + 8``
            vectors. ``None`` decomposes exactly, which takes many times as long for large matrices.

    Returns:
        Orthonormal basis [..., min(m, n), rank] in the dtype of the gradient, strongest direction first.
    """
    matrix = gradient.to(torch.promote_types(gradient.dtype, torch.float32))  # 16-bit types have no decompositions
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
        triangle = torch.linalg.qr(matrix.mT @ basis).R.mT  # B^T G up to a rotation of the longer side
        basis = basis @ torch.linalg.svd(triangle).U
    return basis[..., :rank].to(gradient.dtype).contiguous()


def random_directions(gradient: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """Draw a basis [min(m, n), rank] of normal numbers with variance 1 / rank, which preserves norms on average."""
    size = (min(gradient.shape[-2:]), rank)
    draws = torch.randn(size, generator=generator, device=gradient.device, dtype=torch.float32)
    return draws.mul_(rank**-0.5).to(gradient.dtype)


def into_subspace(gradient: Tensor, basis: Tensor) -> Tensor:
    """Project a gradient [..., m, n] onto a basis of its shorter side: [..., r, n] or [..., m, r]."""
    if is_wide(gradient):
        return basis.mT @ gradient
    return gradient @ basis


def out_of_subspace(low: Tensor, basis: Tensor, wide: bool) -> Tensor:
    """Invert :func:`into_subspace`: return a matrix [..., m, n]. ``wide``: see :func:`is_wide` of the gradient."""
    return basis @ low if wide else low @ basis.mT


def gradient_scales(low: Tensor, step: Tensor, wide: bool, tensorwise: bool = False) -> Tensor:
    """Return the factors by which Adam scales a gradient, estimated in the subspace.

    Args:
        low: Gradient in the subspace, [..., r, n] or [..., m, r].
        step: Adam's step in the subspace.
        wide: True for [..., r, n].
        tensorwise: Return one factor for each matrix instead of one for each channel of the longer side.

    Returns:
        [..., 1, n], [..., m, 1] or [..., 1, 1].
    """
    axes = [-2] if wide else [-1]
    if tensorwise:
        axes = [-2, -1]
    norm = torch.linalg.vector_norm(low, dim=axes, keepdim=True)
    return torch.linalg.vector_norm(step, dim=axes, keepdim=True) / norm.clamp_min(1e-8)
