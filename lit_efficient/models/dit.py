"""Diffusion transformer: patches of a latent as tokens, the timestep and the class steering every layer norm.

    x <- x + g1(c) * attention(norm(x) * (1 + b1(c)) + a1(c));   x <- x + g2(c) * mlp(norm(x) * (1 + b2(c)) + a2(c))

``c`` is the sum of the embedded time and class; a, b and g are linear in silu(c) and start at zero (adaLN-zero), so the
untrained network is the identity on its tokens and predicts zero.

Costs: 18 width^2 parameters a block with an MLP ratio of 4, of which 6 width^2 are the modulation.
Source: Peebles and Xie (2022), https://arxiv.org/abs/2212.09748.
"""

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError

_FREQUENCIES = 64  # sines and cosines of the time embedding, in all
_TIME_SCALE = 1000.0  # t in [0, 1] spans what integer timesteps span in the paper


@dataclass(frozen=True)
class DiTConfig:
    """The network's shape.

    Args:
        channels: Channels of the latents.
        size: Height and width of the latents.
        patch_size: Side of a token, in latent positions; divides size.
        width: Features of a token; a multiple of 4 and of heads.
        depth: Number of blocks.
        heads: Attention heads.
        mlp_ratio: Hidden features of the MLP, in multiples of width.
        num_classes: Classes of the labels; one more row of the embedding stands for "no label".
    """

    channels: int = 4
    size: int = 8
    patch_size: int = 2
    width: int = 64
    depth: int = 3
    heads: int = 4
    mlp_ratio: int = 4
    num_classes: int = 10

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"DiTConfig: {field.name} must be an integer >= 1, not {value!r}.")
        if self.size % self.patch_size:
            raise ConfigurationError(f"DiTConfig: patch_size must divide size {self.size}, not {self.patch_size}.")
        if self.width % self.heads:
            raise ConfigurationError(f"DiTConfig: width must be a multiple of heads {self.heads}, not {self.width}.")
        if self.width % 4:
            raise ConfigurationError(f"DiTConfig: width must be a multiple of 4 (2-D positions), not {self.width}.")


def sinusoids(position: Tensor, features: int, period: float = 10_000.0) -> Tensor:
    """Cosines, then sines, of ``position`` at geometrically spaced frequencies: [N] -> [N, features], float32."""
    half = features // 2
    frequencies = torch.exp(-math.log(period) / half * torch.arange(half, device=position.device, dtype=torch.float32))
    angle = position.float()[:, None] * frequencies
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def grid_positions(side: int, width: int) -> Tensor:
    """2-D sine-cosine positions of a square grid, row by row: [side * side, width]; half for rows, half for columns."""
    axis = sinusoids(torch.arange(side), width // 2)
    rows = axis[:, None].expand(side, side, -1)
    columns = axis[None, :].expand(side, side, -1)
    return torch.cat([rows, columns], dim=-1).reshape(side * side, width)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``x * (1 + scale) + shift`` with x [B, N, D] and the others [B, D]."""
    return x * (1.0 + scale[:, None]) + shift[:, None]


class Attention(nn.Module):
    """Full multi-head self-attention: [B, N, D] -> [B, N, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens to tokens."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [B, N, 3, heads, D / heads]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiTBlock(nn.Module):
    """One adaLN-zero transformer block.

    Args:
        width: Features of a token.
        heads: Attention heads.
        mlp_ratio: Hidden features of the MLP, in multiples of width.
    """

    def __init__(self, width: int, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_ratio * width), nn.GELU(approximate="tanh"), nn.Linear(mlp_ratio * width, width)
        )
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Tokens [B, N, D] under the condition [B, D] to tokens [B, N, D]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(c)).chunk(6, dim=-1)
        x = x + gate1[:, None] * self.attention(modulate(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    """Predicts a diffusion target for a noisy latent, its time and its class.

    Label dropout is the caller's: it draws once per sample and passes ``null_class`` for the dropped ones.

    Args:
        config: The shape.
    """

    positions: Tensor

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.width, config.patch_size
        self.patch_in = nn.Conv2d(config.channels, width, patch, stride=patch)
        self.time = nn.Sequential(nn.Linear(_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(config.num_classes + 1, width)
        self.blocks = nn.ModuleList(DiTBlock(width, config.heads, config.mlp_ratio) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(width, 2 * width)
        self.patch_out = nn.Linear(width, patch * patch * config.channels)
        self.register_buffer("positions", grid_positions(config.size // patch, width), persistent=False)
        self._initialise()

    @property
    def null_class(self) -> int:
        """The label that stands for "no label"."""
        return self.config.num_classes

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Noisy latents [B, C, H, W], times [B] in [0, 1] and labels [B] (int64) to predictions [B, C, H, W]."""
        dtype = self.patch_out.weight.dtype
        c = self.time(sinusoids(t * _TIME_SCALE, _FREQUENCIES).to(dtype)) + self.label(y)
        tokens = self.patch_in(x.to(dtype)).flatten(2).transpose(1, 2) + self.positions.to(dtype)
        for block in self.blocks:
            tokens = block(tokens, c)
        shift, scale = self.modulation(F.silu(c)).chunk(2, dim=-1)
        patches = self.patch_out(modulate(self.norm(tokens), shift, scale)).transpose(1, 2)
        side, patch = self.config.size, self.config.patch_size
        return F.fold(patches, (side, side), patch, stride=patch)

    def _initialise(self) -> None:
        """Xavier for linear layers, small normals for the embeddings, zero for what must start as the identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patch_in.weight.flatten(1))
        nn.init.zeros_(self.patch_in.bias)  # type: ignore[arg-type]
        for name, parameter in self.named_parameters():
            if name in ("time.0.weight", "time.2.weight", "label.weight"):
                nn.init.normal_(parameter, std=0.02)
            elif "modulation" in name or name.startswith("patch_out"):
                nn.init.zeros_(parameter)
