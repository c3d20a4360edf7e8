"""Losses between the features of two networks: cosine, squared error, REPA, and the VF loss for latents.

    cosine: mean(1 - cos(s_i, t_i));    l2: mean |s_i - t_i|^2;    REPA: -mean(cos(h(s_i), t_i))
    VF: mean(relu(|cos(z_i, z_j) - cos(f_i, f_j)| - m1)) + mean(relu(1 - m2 - cos(W z_i, f_i)))

Features are tokens [B, N, D], maps [B, D, H, W] or vectors [B, D]. All losses are computed in float32 at least. The
teacher gets no gradient.

Source: Yu et al. (2024), https://arxiv.org/abs/2410.06940 (REPA); Yao et al. (2025), https://arxiv.org/abs/2501.01423
    (VF); Romero et al. (2014), https://arxiv.org/abs/1412.6550 (squared error through a projection)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_number, checks_types, refusal

LAYOUTS = ("auto", "grid", "sequence")


def to_tokens(features: Tensor) -> Tensor:
    """Convert maps [B, D, H, W] (row by row) and vectors [B, D] to tokens [B, N, D]. Return tokens unchanged."""
    if features.ndim == 4:
        return features.flatten(2).transpose(1, 2)
    if features.ndim == 2:
        return features[:, None]
    if features.ndim != 3:
        allowed = "tokens [B, N, D], maps [B, D, H, W] or vectors [B, D]"
        raise refusal("to_tokens", "features", allowed, list(features.shape))
    return features


def resize_tokens(tokens: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor:
    """Interpolate tokens linearly from one grid to another: [B, N, D] -> [B, M, D].

    Args:
        tokens: [B, N, D], row by row.
        before: Current grid: (N,) for a sequence, (height, width) for an image.
        after: New grid with as many dimensions. A smaller grid averages the tokens that fall on one position.
    """
    if before == after:
        return tokens
    maps = tokens.transpose(1, 2).unflatten(2, before)
    if len(before) == 1:  # as an image of height 1: only the interpolation of images can average
        maps = maps[:, :, None]
        after = (1, *after)
    resized = F.interpolate(maps.float(), after, mode="bilinear", align_corners=False, antialias=True)
    return resized.flatten(2).transpose(1, 2).to(tokens.dtype)


def match_tokens(student: Tensor, teacher: Tensor, layout: str = "auto") -> tuple[Tensor, Tensor]:
    """Convert both networks' features to tokens, and interpolate the teacher's to the number of the student's.

    Args:
        student: Features [B, N, D], [B, D, H, W] or [B, D].
        teacher: Features of the same kinds, with any number of positions and any width.
        layout: Layout of the tokens, used for the interpolation: ``grid`` (that of a map, or a square), ``sequence``,
            or ``auto``, which takes a grid if one of the two is a map.

    Returns:
        Tokens [B, N, D] of the student and [B, N, D'] of the teacher.

    Raises:
        ConfigurationError: If the batch sizes differ, or tokens on a grid do not fill a square.
    """
    if len(student) != len(teacher):
        raise ConfigurationError(
            f"the features of student and teacher must have the same batch size, got {len(student)} and {len(teacher)}"
        )
    ours = to_tokens(student)
    theirs = to_tokens(teacher)
    if layout == "grid" or (layout == "auto" and 4 in (student.ndim, teacher.ndim)):
        return ours, resize_tokens(theirs, _grid(teacher, "teacher"), _grid(student, "student"))
    return ours, resize_tokens(theirs, (theirs.shape[1],), (ours.shape[1],))


def _grid(features: Tensor, owner: str) -> tuple[int, int]:
    if features.ndim == 4:
        return features.shape[2], features.shape[3]
    return square_of(to_tokens(features), owner)


def square_of(tokens: Tensor, owner: str = "student") -> tuple[int, int]:
    """Return the rows and columns of tokens [B, N, D] that fill a square. ``owner`` names them in the error.

    Raises:
        ConfigurationError: If N is not a square number.
    """
    count = tokens.shape[1]
    side = math.isqrt(count)
    if side * side != count:
        raise ConfigurationError(
            f"the {owner}'s {count} tokens do not fill a square: skip class tokens (head.skip_tokens of "
            "HiddenAlignment and LatentAlignment), or interpolate them as a sequence"
        )
    return side, side


def cosine_similarity(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the cosine of each token [B, N, D] with the teacher's token, [B, N]. The teacher gets no gradient."""
    return F.cosine_similarity(_wide(student), _wide(teacher.detach()), dim=-1)


def _wide(x: Tensor) -> Tensor:
    """Convert to float32 at least. Under autocast, features may be in 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.mean()
    weights = mask.to(values)
    return (values * weights).sum() / weights.sum().clamp(min=1.0)


def cosine_loss(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return ``mean(1 - cos)`` of tokens [B, N, D], in [0, 2]. ``mask`` [B, N] weights the tokens with 0 or 1."""
    return _mean(1.0 - cosine_similarity(student, teacher), mask)


def l2_loss(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean squared difference between elements of tokens [B, N, D]. ``mask``: see :func:`cosine_loss`."""
    return _mean((_wide(student) - _wide(teacher.detach())).square().mean(-1), mask)


def repa_loss(projected: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the REPA loss: minus the mean cosine of projected tokens [B, N, D] with the teacher's, in [-1, 1]."""
    return -_mean(cosine_similarity(projected, teacher), mask)


def spatial_norm(tokens: Tensor, share: float = 1.0) -> Tensor:
    """Normalise tokens [B, N, D] over the positions of each image.

    Subtracts ``share`` of the mean and divides each feature by its standard deviation.

    Source: Singh et al. (2025), https://arxiv.org/abs/2512.10794.
    """
    wide = _wide(tokens)
    centred = wide - share * wide.mean(1, keepdim=True)
    return centred / (wide.std(1, keepdim=True) + 1e-6)


LOSSES = {"cosine": cosine_loss, "l2": l2_loss}


def distance_matrix_loss(latents: Tensor, teacher: Tensor, margin: float = 0.25) -> Tensor:
    """Return ``mean(relu(|cos(z_i, z_j) - cos(f_i, f_j)| - margin))`` over all pairs of positions of each image.

    Args:
        latents: Latents z, [B, N, c]. Their width may differ from the teacher's.
        teacher: Features f, [B, N, D].
        margin: Difference of cosines that costs nothing, at least 0. It is m1 in the module's docstring.
    """
    ours = F.normalize(_wide(latents), dim=-1)
    theirs = F.normalize(_wide(teacher.detach()), dim=-1)
    difference = ours @ ours.transpose(1, 2) - theirs @ theirs.transpose(1, 2)  # [B, N, N]
    return F.relu(difference.abs() - margin).mean()


def marginal_cosine_loss(projected: Tensor, teacher: Tensor, margin: float = 0.5) -> Tensor:
    """Return ``mean(relu(1 - margin - cos))`` of projected and teacher tokens, both [B, N, D]. ``margin`` is m2."""
    return F.relu(1.0 - margin - cosine_similarity(projected, teacher)).mean()


@checks_types
@dataclass(frozen=True)
class VFLoss:
    """Settings of the VF loss.

    Args:
        distance_margin: m1, at least 0: difference between two cosines of positions that costs nothing.
        cosine_margin: m2, at least 0: distance of the cosine with the features from 1 that costs nothing.
        adaptive: Multiply the weight by the ratio of gradient norms w_a, which is at most 1e4.
    """

    distance_margin: float = 0.25
    cosine_margin: float = 0.5
    adaptive: bool = True

    def __post_init__(self) -> None:
        for name in ("distance_margin", "cosine_margin"):
            check_number("LatentAlignment", f"loss.{name}", getattr(self, name), least=0, below=2)


def vf_loss(
    latents: Tensor, projected: Tensor, teacher: Tensor, distance_margin: float = 0.25, cosine_margin: float = 0.5
) -> Tensor:
    """Return the VF loss: the sum of :func:`distance_matrix_loss` and :func:`marginal_cosine_loss`.

    Args:
        latents: [B, N, c]. The authors' public code passes the projected latents here too.
        projected: Latents after a linear map, [B, N, D].
        teacher: [B, N, D].
        distance_margin: m1, at least 0.
        cosine_margin: m2, at least 0.
    """
    distance = distance_matrix_loss(latents, teacher, distance_margin)
    return distance + marginal_cosine_loss(projected, teacher, cosine_margin)


def gradient_ratio(loss: Tensor, extra: Tensor, parameter: Tensor, limit: float = 1e4) -> Tensor:
    """Return the factor that gives ``extra`` the gradient norm of ``loss`` at ``parameter``: a scalar, detached.

    Costs a backward pass of each loss down to the parameter. The graph is kept, and ``.grad`` does not change.

    Args:
        loss: A scalar.
        extra: A scalar.
        parameter: Weight of the last layer that both losses share. A loss that does not depend on it has the norm 0.
        limit: Largest factor. It also applies if the gradient of ``extra`` vanishes.
    """
    ratio = _gradient_norm(loss, parameter) / (_gradient_norm(extra, parameter) + 1e-6)
    return ratio.clamp(0.0, limit)


def gradient_cosine(loss: Tensor, extra: Tensor, at: Sequence[Tensor]) -> Tensor:
    """Return the cosine between the gradients of two losses: a scalar, detached; 0 if a gradient vanishes.

    Costs a backward pass of each loss down to the tensors. The graph is kept, and ``.grad`` does not change.

    Args:
        loss: A scalar.
        extra: A scalar.
        at: Tensors of the graph with respect to which the gradients are taken.
    """
    main = torch.cat([gradient.flatten() for gradient in _gradients(loss, at)])
    other = torch.cat([gradient.flatten() for gradient in _gradients(extra, at)])
    return F.cosine_similarity(_wide(main), _wide(other), dim=0)


def _gradient_norm(loss: Tensor, parameter: Tensor) -> Tensor:
    (gradient,) = _gradients(loss, [parameter])
    return gradient.norm()


def _gradients(loss: Tensor, at: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of a loss with respect to tensors. They are zero where it does not depend on a tensor."""
    gradients = torch.autograd.grad(loss, at, retain_graph=True, allow_unused=True, materialize_grads=True)
    return [gradient.detach() for gradient in gradients]
