"""Losses between features of two networks: cosine, squared error, REPA's, and the VF loss for latents.

    cosine: mean(1 - cos(s_i, t_i));    l2: mean |s_i - t_i|^2;    REPA: -mean(cos(h(s_i), t_i))
    VF: mean(relu(|cos(z_i, z_j) - cos(f_i, f_j)| - m1)) + mean(relu(1 - m2 - cos(W z_i, f_i)))

Features are tokens [B, N, D], maps [B, D, H, W] or vectors [B, D]. All losses are computed in float32 at least, and no
gradient goes to the teacher.

Source: Yu et al. (2024), https://arxiv.org/abs/2410.06940 (REPA); Yao et al. (2025), https://arxiv.org/abs/2501.01423
    (VF); Romero et al. (2014), https://arxiv.org/abs/1412.6550 (squared error through a projection)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_number, refusal

LAYOUTS = ("auto", "grid", "sequence")


def to_tokens(features: Tensor) -> Tensor:
    """Maps [B, D, H, W] row by row and vectors [B, D] as tokens [B, N, D]; tokens as they are."""
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
        tokens: Row by row.
        before: Their grid: (N,) for a sequence, (height, width) for an image.
        after: The grid wanted, of as many dimensions. Smaller grids average what falls on a position.
    """
    if before == after:
        return tokens
    maps = tokens.transpose(1, 2).unflatten(2, before)
    if len(before) == 1:  # as an image of height 1, for which there is an averaging interpolation
        maps, after = maps[:, :, None], (1, *after)
    resized = F.interpolate(maps.float(), after, mode="bilinear", align_corners=False, antialias=True)
    return resized.flatten(2).transpose(1, 2).to(tokens.dtype)


def match_tokens(student: Tensor, teacher: Tensor, layout: str = "auto") -> tuple[Tensor, Tensor]:
    """[B, N, D] of the student and of the teacher, the latter interpolated to as many tokens as the student has.

    Args:
        student: Features [B, N, D], [B, D, H, W] or [B, D].
        teacher: The same, of any number of positions and any width.
        layout: How tokens lie where their numbers differ: ``grid`` (a map's, or a square), ``sequence``; ``auto`` is a
            grid if one of the two is a map.

    Raises:
        ConfigurationError: If batches differ, or tokens on a grid do not fill a square.
    """
    if len(student) != len(teacher):
        raise ConfigurationError(f"the student has features of {len(student)} rows, the teacher of {len(teacher)}")
    ours, theirs = to_tokens(student), to_tokens(teacher)
    on_grid = layout == "grid" or (layout == "auto" and 4 in (student.ndim, teacher.ndim))
    if on_grid:
        return ours, resize_tokens(theirs, _grid(teacher, "teacher"), _grid(student, "student"))
    return ours, resize_tokens(theirs, (theirs.shape[1],), (ours.shape[1],))


def _grid(features: Tensor, whose: str) -> tuple[int, int]:
    return (features.shape[2], features.shape[3]) if features.ndim == 4 else square_of(to_tokens(features), whose)


def square_of(tokens: Tensor, whose: str = "student") -> tuple[int, int]:
    """Rows and columns of tokens [B, N, D].

    Raises:
        ConfigurationError: If they fill no square.
    """
    count = tokens.shape[1]
    side = math.isqrt(count)
    if side * side != count:
        raise ConfigurationError(
            f"the {whose}'s {count} tokens fill no square: leave class tokens out (head.skip_tokens of "
            "HiddenAlignment and LatentAlignment), or interpolate them as a sequence"
        )
    return side, side


def cosine_similarity(student: Tensor, teacher: Tensor) -> Tensor:
    """Cosine of each token [B, N, D] with its teacher's: [B, N], no gradient to the teacher."""
    return F.cosine_similarity(_wide(student), _wide(teacher.detach()), dim=-1)


def _wide(x: Tensor) -> Tensor:
    """At least float32, whatever autocast made of it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.mean()
    weights = mask.to(values)
    return (values * weights).sum() / weights.sum().clamp(min=1.0)


def cosine_loss(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """``mean(1 - cos)`` of tokens [B, N, D], in [0, 2]; of those alone whose ``mask`` [B, N] is not zero."""
    return _mean(1.0 - cosine_similarity(student, teacher), mask)


def l2_loss(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean squared difference an element of tokens [B, N, D]; ``mask`` [B, N] as in :func:`cosine_loss`."""
    return _mean((_wide(student) - _wide(teacher.detach())).square().mean(-1), mask)


def repa_loss(projected: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """REPA's term: minus the mean cosine of projected tokens [B, N, D] with the teacher's, in [-1, 1]."""
    return -_mean(cosine_similarity(projected, teacher), mask)


def spatial_norm(tokens: Tensor, share: float = 1.0) -> Tensor:
    """Tokens [B, N, D] without ``share`` of their mean over an image, each feature divided by its deviation over it.

    Source: Singh et al. (2025), https://arxiv.org/abs/2512.10794.
    """
    wide = _wide(tokens)
    centred = wide - share * wide.mean(1, keepdim=True)
    return centred / (wide.std(1, keepdim=True) + 1e-6)


LOSSES = {"cosine": cosine_loss, "l2": l2_loss}


def distance_matrix_loss(latents: Tensor, teacher: Tensor, margin: float = 0.25) -> Tensor:
    """``mean(relu(|cos(z_i, z_j) - cos(f_i, f_j)| - margin))`` over all pairs of positions of each image.

    Args:
        latents: [B, N, c]; its width need not be the teacher's.
        teacher: [B, N, D].
        margin: What a pair may differ by for nothing, at least 0; m1 in the formula.
    """
    ours, theirs = (F.normalize(_wide(x), dim=-1) for x in (latents, teacher.detach()))
    difference = ours @ ours.transpose(1, 2) - theirs @ theirs.transpose(1, 2)  # [B, N, N]
    return F.relu(difference.abs() - margin).mean()


def marginal_cosine_loss(projected: Tensor, teacher: Tensor, margin: float = 0.5) -> Tensor:
    """``mean(relu(1 - margin - cos))`` of projected tokens and the teacher's, both [B, N, D]; m2 in the formula."""
    return F.relu(1.0 - margin - cosine_similarity(projected, teacher)).mean()


@dataclass(frozen=True)
class VFLoss:
    """The numbers of the VF loss.

    Args:
        distance_margin: m1, at least 0: what two cosines between positions may differ by for nothing.
        cosine_margin: m2, at least 0: what the cosine with the features may miss 1 by for nothing.
        adaptive: Whether the weight is multiplied by w_a, at most 1e4.
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
    """The VF loss: positions of an image relate to each other as the teacher's do, and each looks like the teacher's.

    Args:
        latents: [B, N, c]. Public code of the method compares projected latents here, too: give them twice for that.
        projected: [B, N, D], the latents through a linear map.
        teacher: [B, N, D].
        distance_margin: m1, at least 0.
        cosine_margin: m2, at least 0.
    """
    distance = distance_matrix_loss(latents, teacher, distance_margin)
    return distance + marginal_cosine_loss(projected, teacher, cosine_margin)


def gradient_ratio(loss: Tensor, extra: Tensor, parameter: Tensor, limit: float = 1e4) -> Tensor:
    """The weight that gives ``extra`` the same gradient norm as ``loss`` has at ``parameter``: a scalar, detached.

    Costs a backward pass of each from the loss down to the parameter. The graph is kept, and ``.grad`` is not touched.

    Args:
        loss: A scalar.
        extra: A scalar.
        parameter: Weight of the last layer that both share; what does not depend on it has the norm 0.
        limit: Largest weight; also what a vanished gradient of ``extra`` gets.
    """
    main, other = (_gradient_norm(x, parameter) for x in (loss, extra))
    return (main / (other + 1e-6)).clamp(0.0, limit)


def gradient_cosine(loss: Tensor, extra: Tensor, at: Sequence[Tensor]) -> Tensor:
    """Cosine between the gradients of two losses at common tensors: a scalar, detached; 0 where one has none.

    Costs a backward pass of each from the loss down to the tensors. The graph is kept, and ``.grad`` is not touched.

    Args:
        loss: A scalar.
        extra: A scalar.
        at: Tensors of the graph.
    """
    gradients = [torch.autograd.grad(one, at, retain_graph=True, allow_unused=True) for one in (loss, extra)]
    main, other = (
        torch.cat([torch.zeros_like(t).flatten() if g is None else g.detach().flatten() for g, t in zip(found, at)])
        for found in gradients
    )
    return F.cosine_similarity(_wide(main), _wide(other), dim=0)


def _gradient_norm(loss: Tensor, parameter: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)
    return parameter.new_zeros(()) if gradient is None else gradient.detach().norm()
