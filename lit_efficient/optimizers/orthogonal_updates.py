"""Variants of Muon's update: balanced rows and columns, low rank (Dion), and pairs of low-rank factors (LoRA-Muon).

    MuonEq         O = orthogonal(D_r^-1 M D_c^-1),    D_r, D_c: norms of the rows and columns of M
    Muon+          O = orthogonal(M), then each row or column is divided by its norm
    Dion           M <- M + G;    P = qr(M Q);    R = M^T P;    M <- M - (1 - momentum) P R^T;
                   Q <- R with columns of norm 1;    O = P Q^T
    LoRA-Muon      W = B A;    O_B = orthogonal(M_B R_A) R_A / 2,  R_A = (A A^T)^-1/2;
                   O_A = R_B orthogonal(R_B M_A) / 2,  R_B = (B^T B)^-1/2

Source: MuonEq: https://arxiv.org/abs/2603.28254; Muon+: https://arxiv.org/abs/2602.21545; Dion: Ahn et al. (2025),
    https://arxiv.org/abs/2504.05295; LoRA-Muon: Cesista et al. (2026), https://arxiv.org/abs/2606.12921
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Balance = Literal["row", "column", "both"]
Normalisation = Literal["row", "column", "row_column", "column_row"]
# Dimensions over which norms are taken, in order.
_DIMENSIONS = {"row": (1,), "column": (0,), "both": (1, 0), "row_column": (1, 0), "column_row": (0, 1)}
_DION_EPS = 1e-8  # of the reference implementation
_ROOT_EPS = 1e-5  # added to the eigenvalues of a Gram matrix of norm 1, as in the appendix of LoRA-Muon


def balance(matrix: Tensor, way: Balance) -> Tensor:
    """Divide the rows or columns of a matrix [m, n] by their norms, both by those of ``matrix`` itself (MuonEq)."""
    result = matrix
    for dim in _DIMENSIONS[way]:
        result = result / _norms(matrix, dim)
    return result


def normalise(matrix: Tensor, way: Normalisation) -> Tensor:
    """Divide the rows or columns of a matrix [m, n] by their norms, one after another, and keep its norm (Muon+)."""
    result = matrix
    for dim in _DIMENSIONS[way]:
        result = result / _norms(result, dim)
    return result * (matrix.norm() / result.norm().clamp_min(torch.finfo(result.dtype).tiny))


def _norms(matrix: Tensor, dim: int) -> Tensor:
    return matrix.norm(dim=dim, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)


def dion(momentum: Tensor, gradient: Tensor, basis: Tensor, decay: float) -> Tensor:
    """Return Dion's update of rank r.

    Args:
        momentum: [m, n]. It is updated in place: the part that the update represents decays, and the rest is kept.
        gradient: [m, n].
        basis: Right basis [n, r] of the last step. It is updated in place.
        decay: Decay rate of the represented part, in [0, 1).

    Returns:
        [m, n] of the norm sqrt(r), unless the gradients have a lower rank.
    """
    momentum.add_(gradient)
    started = momentum.any()  # before the first gradient, as of a layer behind zeros, the basis stays
    kind = torch.promote_types(momentum.dtype, torch.float32)  # 16-bit types have no decompositions
    left = torch.linalg.qr((momentum @ basis).to(kind)).Q.to(momentum.dtype)
    right = momentum.T @ left
    momentum.addmm_(left, right.T, alpha=decay - 1)
    right = right.to(kind)
    right = right / (right.norm(dim=0, keepdim=True) + _DION_EPS)
    basis.copy_(torch.where(started, right, basis))
    return left @ right.to(basis.dtype).T


def pair_updates(
    a: Tensor, b: Tensor, momentum_a: Tensor, momentum_b: Tensor, orthogonal: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return updates of two factors, by each of which the product ``b @ a`` changes by a spectral norm of 1/2.

    Args:
        a: [r, n].
        b: [m, r].
        momentum_a: Momentum of ``a``.
        momentum_b: Momentum of ``b``.
        orthogonal: Function from a matrix to the nearest orthogonal one.

    Returns:
        Updates of ``a`` and ``b``. The update of a factor is zero while the other one is zero, as it is initially.
    """
    root_a = inverse_root(a @ a.T)
    root_b = inverse_root(b.T @ b)
    update_a = root_b @ orthogonal(root_b @ momentum_a).to(a.dtype)
    update_b = orthogonal(momentum_b @ root_a).to(b.dtype) @ root_a
    return update_a / 2, update_b / 2


def inverse_root(gram: Tensor) -> Tensor:
    """Return the inverse square root of a Gram matrix [r, r], and zeros for zeros. Small eigenvalues are bounded."""
    matrix = gram.to(torch.promote_types(gram.dtype, torch.float32))
    norm = matrix.norm()
    safe = torch.where(norm > 0, norm, 1.0)
    values, vectors = torch.linalg.eigh(matrix / safe)
    root = (vectors * (values.clamp_min(0) + _ROOT_EPS).rsqrt()) @ vectors.T
    return torch.where(norm > 0, root * safe.rsqrt(), 0.0).to(gram.dtype)
