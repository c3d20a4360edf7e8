"""Scores of training rows: the reducible loss, and the influence of a row's gradient on a target set.

    RHO    s_i = loss(row_i | model) - loss(row_i | reference)
    LESS   s_i = mean_j cos(P u_i, P g_j),    u = m' / sqrt(v' + eps),    m' = b1 m + (1 - b1) g,
           v' = b2 v + (1 - b2) g^2,    g: the gradient of a row's mean loss,  m, v: Adam's moments,  P: random signs

Rows with high scores are kept. RHO prefers rows that can be learned and are not learned yet; the reference was trained
on data like those of the task. LESS prefers rows whose step of Adam lowers the loss of the target rows j.
Source: Mindermann et al. (2022), https://arxiv.org/abs/2206.07137; Xia et al. (2024), https://arxiv.org/abs/2402.04333
"""

import torch
from torch import Tensor

_BLOCK = 4096  # rows of the projection that exist at a time


def reducible_loss(current: Tensor, reference: Tensor) -> Tensor:
    """Return the reducible loss of each row [N].

    Args:
        current: Mean loss of each row's tokens under the model that trains [N].
        reference: The same under the reference model [N].
    """
    return current - reference


def adam_direction(
    gradients: Tensor, mean: Tensor, square: Tensor, betas: tuple[float, float], eps: float = 1e-8
) -> Tensor:
    """Return the step of Adam that each gradient would give, without bias correction, as in LESS [B, N].

    Args:
        gradients: [B, N].
        mean: Mean of past gradients, Adam's ``exp_avg`` [N].
        square: Mean of their squares, ``exp_avg_sq`` [N].
        betas: Decays of both.
        eps: Added to the squares.
    """
    first, second = betas
    return (first * mean + (1 - first) * gradients) / (second * square + (1 - second) * gradients**2 + eps).sqrt()


def project(vectors: Tensor, dim: int, seed: int) -> Tensor:
    """Return random projections that nearly keep scalar products [B, dim]. The same seed gives the same projection.

    Args:
        vectors: [B, N].
        dim: Number of random directions.
        seed: Seed of their signs.
    """
    found = vectors.new_zeros(len(vectors), dim)
    for start in range(0, vectors.shape[1], _BLOCK):
        part = vectors[:, start : start + _BLOCK]
        generator = torch.Generator().manual_seed((1_000_003 * seed + start) % 2**32)
        signs = torch.randint(0, 2, (part.shape[1], dim), generator=generator, dtype=torch.int8, device="cpu")
        found += part @ (2 * signs - 1).to(part)
    return found / dim**0.5


def influence(features: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cosine of each row's features with those of the targets [B].

    Args:
        features: [B, D].
        targets: [M, D].
    """
    return torch.nn.functional.normalize(features) @ torch.nn.functional.normalize(targets).mean(0)
