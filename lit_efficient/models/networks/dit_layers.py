"""Layers of the diffusion transformer: positions, attention to the image and to text, and the block.

    sincos   tokens <- tokens + [cos(w r), sin(w r), cos(w k), sin(w k)]      for the token in row r, column k
    rope     q, k <- q e^{i (w r)}, k e^{i (w r)} on one half of each head, e^{i (w k)} on the other

With rope the attention between two tokens depends on their distance and not on their positions: the rotation of a query
times the conjugate rotation of a key is the rotation by the difference. It adds no parameter and is not bound to the
trained size.

Source: Su et al. (2021), https://arxiv.org/abs/2104.09864, on each axis as in Heo et al. (2024),
https://arxiv.org/abs/2403.13298. Norm of queries and keys: Henry et al. (2020), https://arxiv.org/abs/2010.04245, in
the form of Esser et al. (2024), https://arxiv.org/abs/2403.03206.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EPS = 1e-6
_LOWEST = -math.log(10_000.0)  # logarithm of the lowest frequency


def sinusoids(position: Tensor, features: int, ends: bool = False) -> Tensor:
    """Return cosines, then sines, of ``position`` at geometrically spaced frequencies.

    Args:
        position: Numbers, [...].
        features: Number of features, even.
        ends: Whether the lowest frequency is exactly 1 / 10,000, as in diffusers, and not the next higher one.

    Returns:
        [..., features], float32.
    """
    half = features // 2
    order = torch.arange(half, device=position.device, dtype=torch.float32)
    # The order of operations is that of diffusers: at times up to 1000 the last digit of a frequency shows.
    if ends:
        exponent = _LOWEST * order / (half - 1)
    else:
        exponent = _LOWEST / half * order
    frequencies = torch.exp(exponent)
    angle = position.float()[..., None] * frequencies
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def grid_positions(size: int | tuple[int, int], width: int, device: torch.device | None = None) -> Tensor:
    """Return 2-D sine-cosine positions, row by row. Half of the features encode the row, half the column.

    Args:
        size: Rows and columns, or one number for both.
        width: Number of features, a multiple of 4.
        device: Device of the result.

    Returns:
        [rows * columns, width].
    """
    rows, columns = (size, size) if isinstance(size, int) else size
    by_row = sinusoids(torch.arange(rows, device=device), width // 2)[:, None].expand(-1, columns, -1)
    by_column = sinusoids(torch.arange(columns, device=device), width // 2)[None, :].expand(rows, -1, -1)
    return torch.cat([by_row, by_column], dim=-1).reshape(rows * columns, width)


def rotary_table(size: tuple[int, int], features: int, device: torch.device | None = None) -> Tensor:
    """Return cosines and sines of the rotation angles of a grid's tokens, row by row.

    Args:
        size: Rows and columns.
        features: Features of a head, a multiple of 4.
        device: Device of the result.

    Returns:
        [2, rows * columns, features / 2], float32.
    """
    halves = grid_positions(size, features, device).view(-1, 2, 2, features // 4)  # [N, axis, cos or sin, frequency]
    return halves.permute(2, 0, 1, 3).flatten(2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate neighbouring pairs of features by :func:`rotary_table`: [B, heads, N, D] to the same shape and format."""
    cos, sin = table
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return ``x * (1 + scale) + shift`` for x [B, N, D], and scale and shift [B, D] or [B, N, D]."""
    return x * (1.0 + over_tokens(scale)) + over_tokens(shift)


def over_tokens(c: Tensor) -> Tensor:
    """Return conditions of samples [B, D] as [B, 1, D], and those of tokens [B, N, D] unchanged."""
    if c.ndim == 2:
        return c[:, None]
    return c


class Attention(nn.Module):
    """Multi-head self-attention without a mask: [B, N, D] to [B, N, D].

    With ``qk_norm``, queries and keys of each head are divided by their root mean square and multiplied by a learned
    scale.
    """

    def __init__(self, width: int, heads: int, qk_norm: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.q_norm, self.k_norm = _norms(width // heads, qk_norm)

    def forward(self, x: Tensor, rotary_emb: Tensor | None = None) -> Tensor:
        """Attend among tokens [B, N, D]. ``rotary_emb`` of :func:`rotary_table` rotates queries and keys."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [B, N, 3, heads, D / heads]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q = self.q_norm(q)
        k = self.k_norm(k)
        if rotary_emb is not None:
            q = rotate(q, rotary_emb)
            k = rotate(k, rotary_emb)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Multi-head attention from image tokens [B, N, D] to text tokens [B, L, context_width], with output [B, N, D]."""

    def __init__(self, width: int, heads: int, context_width: int, qk_norm: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(context_width, 2 * width)
        self.out = nn.Linear(width, width)
        self.q_norm, self.k_norm = _norms(width // heads, qk_norm)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend to the tokens with ``mask`` [B, L] true. The output is zero for rows without any."""
        q = self.q_norm(self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2))  # [B, heads, N, D / heads]
        k, v = self.kv(context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        k = self.k_norm(k)
        if mask is None:
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        some = mask.any(dim=1)
        allowed = mask | ~some[:, None]  # a softmax over no key is NaN in some kernels, forward or backward
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None, None, :])
        return self.out(y.transpose(1, 2).flatten(2)) * some[:, None, None].to(y.dtype)


class DiTBlock(nn.Module):
    """Transformer block with adaLN-zero. With a ``context_width`` it attends to text between self-attention and MLP."""

    def __init__(self, width: int, heads: int, mlp_ratio: int, qk_norm: bool = False, context_width: int = 0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=_EPS)
        self.attention = Attention(width, heads, qk_norm)
        if context_width:
            self.norm_cross = nn.LayerNorm(width, elementwise_affine=False, eps=_EPS)
            self.cross = CrossAttention(width, heads, context_width, qk_norm)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_ratio * width), nn.GELU(approximate="tanh"), nn.Linear(mlp_ratio * width, width)
        )
        self.modulation = nn.Linear(width, 6 * width)

    def forward(
        self,
        x: Tensor,
        c: Tensor,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_emb: Tensor | None = None,  # by this name, as diffusers', techniques know that all samples share it
    ) -> Tensor:
        """Return tokens [B, N, D] for tokens, a condition [B, D] or [B, N, D], and a text [B, L, context_width]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(c)).chunk(6, dim=-1)
        x = x + over_tokens(gate1) * self.attention(modulate(self.norm1(x), shift1, scale1), rotary_emb)
        if context is not None:
            x = x + self.cross(self.norm_cross(x), context, context_mask)
        return x + over_tokens(gate2) * self.mlp(modulate(self.norm2(x), shift2, scale2))


def _norms(features: int, wanted: bool) -> tuple[nn.Module, nn.Module]:
    if wanted:
        return nn.RMSNorm(features, eps=_EPS), nn.RMSNorm(features, eps=_EPS)
    return nn.Identity(), nn.Identity()
