"""Parts of the diffusion transformer: positions, attention to the image and to text, one block.

    sincos   tokens <- tokens + [cos(w r), sin(w r), cos(w k), sin(w k)]      of the token in row r, column k
    rope     q, k <- q e^{i (w r)}, k e^{i (w r)} on one half of each head, e^{i (w k)} on the other

With rope the attention between two tokens depends on where they are to each other, not on where they are: the turn of a
query times the conjugate turn of a key is the turn of the difference. It adds no parameter, and nothing in it is bound
to the size that was trained.

Source: Su et al. (2021), https://arxiv.org/abs/2104.09864, on each axis as in Heo et al. (2024),
https://arxiv.org/abs/2403.13298. Norm of queries and keys: Henry et al. (2020), https://arxiv.org/abs/2010.04245, in
the form of Esser et al. (2024), https://arxiv.org/abs/2403.03206.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EPS = 1e-6
_LOWEST = -math.log(10_000.0)  # frequency, by its logarithm


def sinusoids(position: Tensor, features: int, ends: bool = False) -> Tensor:
    """Cosines, then sines, of ``position`` at geometrically spaced frequencies: [N] -> [N, features], float32.

    Args:
        position: Numbers, [N].
        features: How many, even.
        ends: Whether the lowest frequency is 1 / 10,000, and not the one above it.
    """
    half = features // 2
    order = torch.arange(half, device=position.device, dtype=torch.float32)
    # Rounded as in diffusers: at times up to 1000 the last digit of a frequency shows.
    exponent = _LOWEST * order / (half - 1) if ends else _LOWEST / half * order
    frequencies = torch.exp(exponent)
    angle = position.float()[:, None] * frequencies
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def grid_positions(size: int | tuple[int, int], width: int, device: torch.device | None = None) -> Tensor:
    """2-D sine-cosine positions, row by row: [rows * columns, width]; half of the features for rows, half for columns.

    The size is rows and columns, or the one number that both are; the width a multiple of 4.
    """
    rows, columns = (size, size) if isinstance(size, int) else size
    by_row = sinusoids(torch.arange(rows, device=device), width // 2)[:, None].expand(-1, columns, -1)
    by_column = sinusoids(torch.arange(columns, device=device), width // 2)[None, :].expand(rows, -1, -1)
    return torch.cat([by_row, by_column], dim=-1).reshape(rows * columns, width)


def rotary_table(size: tuple[int, int], features: int, device: torch.device | None = None) -> Tensor:
    """Cosines and sines of the turns of a grid's tokens, row by row: [2, rows * columns, features / 2], float32.

    The features of a head are a multiple of 4.
    """
    halves = grid_positions(size, features, device).view(-1, 2, 2, features // 4)  # [N, axis, cos or sin, frequency]
    return halves.permute(2, 0, 1, 3).flatten(2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn neighbouring pairs of features by :func:`rotary_table`: [B, heads, N, D] -> the same, in x's own type."""
    cos, sin = table
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``x * (1 + scale) + shift`` with x [B, N, D] and the others [B, D]."""
    return x * (1.0 + scale[:, None]) + shift[:, None]


class Attention(nn.Module):
    """Full multi-head self-attention: [B, N, D] -> [B, N, D].

    With ``qk_norm`` queries and keys are brought to a mean square of 1, head by head, with a learned scale.
    """

    def __init__(self, width: int, heads: int, qk_norm: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.q_norm, self.k_norm = _norms(width // heads, qk_norm)

    def forward(self, x: Tensor, rotary_emb: Tensor | None = None) -> Tensor:
        """Tokens to tokens; with ``rotary_emb`` of :func:`rotary_table`, turned by their places."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [B, N, 3, heads, D / heads]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotary_emb is not None:
            q, k = rotate(q, rotary_emb), rotate(k, rotary_emb)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Multi-head attention from image tokens [B, N, D] to text tokens [B, L, context_width]: [B, N, D]."""

    def __init__(self, width: int, heads: int, context_width: int, qk_norm: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(context_width, 2 * width)
        self.out = nn.Linear(width, width)
        self.q_norm, self.k_norm = _norms(width // heads, qk_norm)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """Where ``mask`` [B, L] (bool, true: a token) holds no token for a row of the batch, its output is zero."""
        q = self.q_norm(self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2))  # [B, heads, N, D / heads]
        k, v = self.kv(context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        k = self.k_norm(k)
        if mask is None:
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        some = mask.any(dim=1)
        allowed = mask | ~some[:, None]  # a softmax over nothing is NaN in some kernels, forward or backward
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None, None, :])
        return self.out(y.transpose(1, 2).flatten(2)) * some[:, None, None].to(y.dtype)


class DiTBlock(nn.Module):
    """One adaLN-zero transformer block, with attention to text between the two halves if a text token has a width."""

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
        rotary_emb: Tensor | None = None,  # a name that tells techniques that all rows of a batch share it
    ) -> Tensor:
        """Tokens [B, N, D] under the condition [B, D] and the text [B, L, context_width] to tokens [B, N, D]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(c)).chunk(6, dim=-1)
        x = x + gate1[:, None] * self.attention(modulate(self.norm1(x), shift1, scale1), rotary_emb)
        if context is not None:
            x = x + self.cross(self.norm_cross(x), context, context_mask)
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


def _norms(features: int, wanted: bool) -> tuple[nn.Module, nn.Module]:
    if wanted:
        return nn.RMSNorm(features, eps=_EPS), nn.RMSNorm(features, eps=_EPS)
    return nn.Identity(), nn.Identity()
