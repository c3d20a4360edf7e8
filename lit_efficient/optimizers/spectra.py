"""Singular values that say how a matrix was trained: Adam's updates make the largest stand out, Muon's do not.

    r = s_max / (deviation of the entries * (sqrt(m) + sqrt(n)))

Random entries have r = 1 (Marchenko-Pastur). So has a small GPT after two hundred of Muon's steps: three quarters of
its matrices are below 1.05. After twenty of Adam's a quarter is above 1.7, after a hundred above 2.1; of Lion's 2.3.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

_ROUNDS = 30  # of power iteration
_LEAST = 16  # rows and columns; of fewer the largest value stands out by chance


def outlier_ratio(matrix: Tensor) -> float:
    """The largest singular value of a matrix without its mean over that of random entries of the same size."""
    matrix = matrix.detach().float()
    matrix = matrix - matrix.mean()  # a constant is no trace of training
    draws = torch.Generator(matrix.device).manual_seed(0)
    vector = torch.randn(matrix.shape[1], generator=draws, device=matrix.device)
    for _ in range(_ROUNDS):
        vector = normalize(matrix.mT @ (matrix @ vector), dim=0)
    size = matrix.square().mean().sqrt() * sum(side**0.5 for side in matrix.shape)
    return float((matrix @ vector).norm() / size.clamp_min(1e-30))


def upper_outlier_ratio(matrices: Sequence[Tensor], most: int = 16) -> float:
    """What a quarter of at most so many matrices, evenly taken from all but tiny ones, exceed; 0 for none."""
    matrices = [matrix for matrix in matrices if min(matrix.shape) >= _LEAST]
    taken = matrices[:: max(1, len(matrices) // most)][:most]
    return sorted(map(outlier_ratio, taken))[len(taken) * 3 // 4] if taken else 0.0
