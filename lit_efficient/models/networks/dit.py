"""Diffusion transformer: patches of a latent are tokens; the timestep and the class modulate every layer norm.

    x <- x + g1(c) * attention(norm(x) * (1 + b1(c)) + a1(c))
    x <- x + attention_to_text(norm(x), text)                         with context_width > 0
    x <- x + g2(c) * mlp(norm(x) * (1 + b2(c)) + a2(c))

``c`` is the sum of the embedded time and class. a, b and g are linear in silu(c) and start at zero (adaLN-zero), as
does the attention to text. The untrained network is therefore the identity on its tokens and predicts zero.

Costs: 18 width^2 parameters per block with an MLP ratio of 4, of which 6 width^2 are the modulation; text adds
2 width^2 + 2 width context_width.
Source: Peebles and Xie (2022), https://arxiv.org/abs/2212.09748; attention to text in the place where Chen et al.
(2023)
have it, https://arxiv.org/abs/2310.00426.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, check_choice, check_number, checks_types, refusal
from lit_efficient.models.networks.class_token import ClassToken, TokenPort, join_token, rows_of, split_token
from lit_efficient.models.networks.dit_layers import DiTBlock, grid_positions, modulate, rotary_table, sinusoids

Positions = Literal["sincos", "rope"]
TimeEmbedding = Literal["compact", "diffusers"]

_FREQUENCIES = {"compact": 64, "diffusers": 256}  # number of sines and cosines of the time embedding, together
# Scale of t in [0, 1]: to the paper's integer timesteps, but not with intervals, because objectives of average
# velocities need a derivative with respect to the time that is not a thousand times larger.
_TIME_SCALE = {False: 1000.0, True: 1.0}


@checks_types
@dataclass(frozen=True)
class DiTVariant:
    """Variants of a network of the same size.

    Args:
        positions: sincos adds positions to the tokens; rope rotates queries and keys by them, so that attention depends
            on distances only, and generalises better to other sizes. rope needs width / heads to be a multiple of 4.
        qk_norm: Normalise queries and keys, which keeps large networks and large learning rates stable in bfloat16.
        time_embedding: Number of frequencies of the time embedding: compact has 64, diffusers has the 256 of diffusers'
            DiT, which an export to its layout needs.
        class_token: Token of the image's content that is noised and generated with its latents (REG).
        interval: Take the length of an interval as a second time, for networks that predict the average velocity
            over it. Times are not scaled by 1000 then. `FewStepDiffusion` sets it.
    """

    positions: Positions = "sincos"
    qk_norm: bool = False
    time_embedding: TimeEmbedding = "compact"
    class_token: ClassToken = ClassToken()  # noqa: RUF009 (frozen)
    interval: bool = False

    def __post_init__(self) -> None:
        check_choice("DiTConfig", "variant.positions", self.positions, get_args(Positions))
        check_choice("DiTConfig", "variant.qk_norm", self.qk_norm, (True, False))
        check_choice("DiTConfig", "variant.time_embedding", self.time_embedding, get_args(TimeEmbedding))


@checks_types
@dataclass(frozen=True)
class DiTConfig:
    """Sizes and options of a `DiT`.

    Args:
        channels: Channels of the latents.
        size: Height and width of the latents. Other sizes that patch_size divides work as well.
        patch_size: Side of a token, in latent positions; divides size.
        width: Features of a token; a multiple of 4 and of heads.
        depth: Number of blocks, at most 10,000.
        heads: Attention heads.
        mlp_ratio: Hidden features of the MLP, in multiples of width.
        num_classes: Number of classes. The embedding has one more row for "no label". 0: no labels at all.
        context_width: Features of the text tokens that each block attends to; 0 for no text.
        variant: Positions, norms of queries and keys, frequencies of the time embedding, and further inputs.
    """

    draws_weights: ClassVar[bool] = True  # weights are random: there is no file to read

    channels: int = 4
    size: int = 8
    patch_size: int = 2
    width: int = 64
    depth: int = 3
    heads: int = 4
    mlp_ratio: int = 4
    num_classes: int = 10
    context_width: int = 0
    variant: DiTVariant = DiTVariant()

    def __post_init__(self) -> None:
        # Building more blocks takes long, even without weights.
        check_number("DiTConfig", "depth", self.depth, least=1, most=10_000, whole=True)
        for name in ("channels", "size", "patch_size", "width", "heads", "mlp_ratio"):
            check_number("DiTConfig", name, getattr(self, name), least=1, whole=True)
        for name in ("num_classes", "context_width"):
            check_number("DiTConfig", name, getattr(self, name), least=0, whole=True)
        if self.size % self.patch_size:
            raise refusal("DiTConfig", "patch_size", f"a divisor of size {self.size}", self.patch_size)
        units = {f"heads {self.heads}": self.heads, "4 (2-D positions)": 4}
        if self.variant.positions == "rope":
            said = f"4 times heads {self.heads} for variant.positions='rope' (pairs of rows and of columns)"
            units[said] = 4 * self.heads
        for said, unit in units.items():
            if self.width % unit:
                raise refusal("DiTConfig", "width", f"a multiple of {said}", self.width)


class DiT(nn.Module):
    """Network that predicts a diffusion target from a noisy latent, its time, and a class, a text, both or neither.

    The caller drops conditions for guidance: it draws once per sample and passes ``null_class``, or an empty text, for
    the dropped samples.

    Args:
        config: Sizes and options.
    """

    positions: Tensor | None  # of the configured size; None with rope
    # Division of the layers among processes, read by distributed/tensor_parallel. qkv is one layer, and no part of its
    # rows holds whole heads: its output is gathered.
    tp_plan: ClassVar[dict[str, str]] = {
        **{f"blocks.*.{name}": "colwise_gather_output" for name in ("attention.qkv", "cross.q", "cross.kv")},
        **{f"blocks.*.{name}.out": "rowwise_split_input" for name in ("attention", "cross")},
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
        "blocks.*.modulation": "colwise_gather_output",
    }

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        patch = config.patch_size
        self.patch_in = nn.Conv2d(config.channels, width, patch, stride=patch)
        frequencies = _FREQUENCIES[config.variant.time_embedding]
        self.time = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))
        self.interval = None
        if config.variant.interval:
            self.interval = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))
        self.label = None
        if config.num_classes:
            self.label = nn.Embedding(config.num_classes + 1, width)
        self.blocks = nn.ModuleList(
            DiTBlock(width, config.heads, config.mlp_ratio, config.variant.qk_norm, config.context_width)
            for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(width, 2 * width)
        self.patch_out = nn.Linear(width, patch * patch * config.channels)
        features = config.variant.class_token.features
        self.class_token = TokenPort(features, width) if features else None
        positions = None
        if config.variant.positions == "sincos":
            positions = grid_positions(config.size // patch, width)
        self.register_buffer("positions", positions, persistent=False)
        self._initialise()

    @property
    def null_class(self) -> int:
        """Return the label that means "no label"."""
        return self.config.num_classes

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        interval: Tensor | None = None,
    ) -> Tensor:
        """Predict the diffusion target.

        Args:
            x: Noisy latents, [B, C, H, W]; height and width are multiples of the patch size. With a class token, its
                rows follow them (see :mod:`lit_efficient.models.networks.class_token`).
            t: Times, [B] in [0, 1]; or a time for each token, [B, N] row by row, without a class token and intervals.
            y: Labels, [B] int64; for networks with classes.
            context: Text tokens, [B, L, context_width]; for networks with text.
            context_mask: True for tokens that are not padding, [B, L] bool; None: all. A row without any is a sample
                without text.
            interval: Lengths of intervals of time that end at the times, [B] in [0, 1]; for networks with
                ``variant.interval``. None: 0.

        Returns:
            Predictions, of the shape of ``x``.

        Raises:
            ConfigurationError: For a condition that is missing or that the network does not take, and for other shapes.
        """
        tokens, c, named = self.enter(x, t, y, context, context_mask, interval)
        for block in self.blocks:
            tokens = block(tokens, c, **named)
        return self.leave(tokens, c, (x.shape[2], x.shape[3]))

    def enter(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        interval: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
        """Return the tokens before the first block, and the condition and further arguments of all blocks.

        Arguments and errors are those of :meth:`forward`.
        """
        token = None
        if self.class_token is not None:
            x, token = split_token(x, self.class_token.enter.in_features)
        self._check_inputs(x, y, context, context_mask)
        dtype = self.patch_in.weight.dtype  # a convolution, which is never quantised
        patch = self.config.patch_size
        grid = (x.shape[2] // patch, x.shape[3] // patch)
        c = self.time(self._embed_time(t).to(dtype))
        if self.interval is not None:
            length = torch.zeros_like(t) if interval is None else interval
            c = c + self.interval(self._embed_time(length).to(dtype))
        if self.label is not None:
            label = self.label(y)
            c = c + (label if c.ndim == 2 else label[:, None])
        tokens = self.patch_in(x.to(dtype)).flatten(2).transpose(1, 2)
        rotary = None
        if self.positions is None:
            rotary = rotary_table(grid, self.config.width // self.config.heads, x.device)
        else:
            tokens = tokens + self._positions(grid).to(dtype)
        if self.class_token is not None:
            tokens = torch.cat([tokens, self.class_token.enter(token.to(dtype))[:, None]], 1)  # type: ignore[union-attr]
            if rotary is not None:  # the class token has no position: the identity rotation
                rotary = torch.cat([rotary, torch.eye(2, 1, device=x.device).expand(2, rotary.shape[2])[:, None]], 1)
        if context is not None:
            context = context.to(dtype)
        return tokens, c, {"context": context, "context_mask": context_mask, "rotary_emb": rotary}

    def leave(self, tokens: Tensor, c: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the prediction of the tokens behind the last block, for an input of a height and width."""
        shift, scale = self.modulation(F.silu(c)).chunk(2, dim=-1)
        tokens = modulate(self.norm(tokens), shift, scale)
        patch = self.config.patch_size
        if self.class_token is None:
            return F.fold(self.patch_out(tokens).transpose(1, 2), size, patch, stride=patch)
        rows = rows_of(self.class_token.enter.in_features, self.config.channels, size[1])
        size = (size[0] - rows, size[1])
        latents = F.fold(self.patch_out(tokens[:, :-1]).transpose(1, 2), size, patch, stride=patch)
        return join_token(latents, self.class_token.leave(tokens[:, -1]))

    def _embed_time(self, t: Tensor) -> Tensor:
        kind = self.config.variant.time_embedding
        return sinusoids(t * _TIME_SCALE[self.config.variant.interval], _FREQUENCIES[kind], ends=kind == "diffusers")

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        side = self.config.size // self.config.patch_size
        assert self.positions is not None
        if grid == (side, side):
            return self.positions
        return grid_positions(grid, self.config.width, self.positions.device)

    def _check_inputs(self, x: Tensor, y: Tensor | None, context: Tensor | None, context_mask: Tensor | None) -> None:
        config = self.config
        if x.shape[1] != config.channels or x.shape[2] % config.patch_size or x.shape[3] % config.patch_size:
            allowed = f"[B, {config.channels}, H, W] with H and W multiples of patch_size {config.patch_size}"
            raise refusal("DiT", "x", allowed, list(x.shape))
        for name, value, size, argument in (
            ("y (labels)", y, config.num_classes, "num_classes"),
            ("context (text)", context, config.context_width, "context_width"),
        ):
            if (value is None) == (size > 0):
                wanted = "needs" if value is None else "has no use for"
                raise ConfigurationError(f"DiT: a network with {argument}={size} {wanted} {name}.")
        if context is not None and (context.dim() != 3 or context.shape[-1] != config.context_width):
            raise refusal("DiT", "context", f"[B, L, {config.context_width}]", list(context.shape))
        if context_mask is not None and (
            context is None or context_mask.dtype != torch.bool or context_mask.shape != context.shape[:2]
        ):
            if context is None:
                allowed = "None without context"
            else:
                allowed = f"bool {list(context.shape[:2])}"
            raise refusal("DiT", "context_mask", allowed, (context_mask.dtype, list(context_mask.shape)))

    def _initialise(self) -> None:
        """Initialise linear layers by Xavier, embeddings by small normals, and with zero the layers that must start as
        identity.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patch_in.weight.flatten(1))
        nn.init.zeros_(self.patch_in.bias)  # type: ignore[arg-type]
        for name, parameter in self.named_parameters():
            if name.startswith(("time.", "interval.", "label.")) and name.endswith("weight"):
                nn.init.normal_(parameter, std=0.02)
            elif "modulation" in name or name.startswith(("patch_out", "class_token.leave")) or ".cross.out." in name:
                nn.init.zeros_(parameter)
