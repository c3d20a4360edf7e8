"""Token routing: in training, random tokens skip the middle blocks of a network, and join the others behind them.

    TREAD     x_k <- block(x_k) for the kept tokens k; other tokens do not change on the route (the middle blocks)
    SPRINT    behind the route x <- W [f; g];    f: tokens before it, g: kept tokens behind it, else a learned vector
    path drop    in training g is the learned vector in whole rows; sampling is guided by v(y) and v(no condition, no g)

Saves: in training ``rate`` of the compute of the blocks on the route; the papers report 14 (TREAD, DiT-XL) and 9.8
    (SPRINT, SiT-XL) times less training to the same FID on ImageNet
Costs: a gather and a scatter of tokens per block; with ``sprint`` 2 width^2 + width parameters that stay in the network
Source: Krause et al. (2025), https://arxiv.org/abs/2501.04765; SPRINT: Park et al. (2025), https://arxiv.org/abs/2510.21986
"""

from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.internals.lightning_strategies import data_rank
from lit_efficient.internals.torch_dispatch import backward_runs
from lit_efficient.internals.torch_modules import LoadsPartly, StaysFloat32
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.blocks.tokens import TokenAxes, find_axes, gather_tokens, scatter_tokens
from lit_efficient.models.libraries.teachers import width_of
from lit_efficient.surgery import NewLayer, mix_in, unmixed
from lit_efficient.technique import Technique


def draw_tokens(
    batch: int,
    tokens: int,
    rate: float,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
    shared: bool = False,
) -> Tensor:
    """Return the indices [B, n] of the tokens that each row keeps on the route, n = max(1, round(N (1 - rate))).

    Args:
        batch: Number of rows B.
        tokens: Number of tokens N per row.
        rate: Share of the tokens that skip the route, at least 0 and below 1.
        generator: Random generator on ``device``. ``None``: its global generator.
        device: Device of the indices.
        shared: True if all rows keep the same tokens.

    Returns:
        Indices in ascending order in each row.
    """
    count = max(1, round(tokens * (1 - rate)))
    rows = 1 if shared else batch
    order = torch.rand(rows, tokens, generator=generator, device=device).argsort(1)
    return order[:, :count].sort(1).values.expand(batch, -1)


class TokenFusion(StaysFloat32, LoadsPartly, NewLayer):
    """Layer ``W [f; g]`` of SPRINT at the end of the route, with a learned vector for each token that was not on it.

    It returns ``g`` at first, so the output of the network does not change if all tokens run.

    Args:
        width: Number of features D of a token.
    """

    float32 = ("",)
    only_here = True  # exports to layouts of other libraries cannot contain it

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = torch.float32
        initial = torch.cat([torch.zeros(width, width, dtype=wide), torch.eye(width, dtype=wide)], 1)
        self.weight = nn.Parameter(initial)
        self.mask = nn.Parameter(torch.zeros(width, dtype=wide))  # the learned vector

    def forward(self, dense: Tensor, deep: Tensor | None, kept: Tensor | None, left_out: Tensor | None) -> Tensor:
        """Return the joined tokens [B, N, D].

        Args:
            dense: Tokens [B, N, D] before the route.
            deep: Tokens [B, n, D] behind the route. ``None``: the learned vector replaces all of them.
            kept: Indices [B, n] of ``deep``. ``None``: all tokens, in order.
            left_out: Mask [B] of rows in which the learned vector replaces all of ``deep``, or ``None``.
        """
        if deep is None:
            mask = self.mask.to(dense.dtype)
            whole = mask.expand_as(dense)
        else:
            mask = self.mask.to(deep.dtype)
            if kept is None:
                whole = deep + 0 * mask  # the mask gets a gradient of zero, as all ranks of a distributed run need it
            else:
                whole = scatter_tokens(mask.expand_as(dense), kept, deep)
        if left_out is not None:
            whole = torch.where(left_out[:, None, None], mask, whole)
        return F.linear(torch.cat([dense.to(whole.dtype), whole], -1), self.weight.to(whole.dtype))


class _Route:
    """State that the blocks of a route share in a batch: the seed, and with SPRINT the tokens before the route."""

    def __init__(self, rate: float, path_drop: float) -> None:
        self.rate = rate
        self.path_drop = path_drop
        self.seed: int | None = None  # None outside a trainer's loop: the first block draws one
        self.drawn = 0  # that drawn seed
        self.open = True  # False from the step on at which all tokens run
        self.tokens = 0  # tokens per row at the first block
        self.before: tuple[Tensor, ...] = ()  # for SPRINT: the tokens before the route, and other streams such as text
        self.passes = 0  # forward passes with gradients in this step
        self.axes: dict[tuple[object, ...], TokenAxes] = {}  # by shapes of arguments and settings of blocks
        self.kept: dict[str, Tensor] = {}  # indices of the kept tokens in this batch, by block

    def __reduce__(self) -> Any:
        # A copy of the network starts without the state of a batch.
        return _Route, (self.rate, self.path_drop)

    @property
    def number(self) -> int:
        """Seed of this batch."""
        if self.seed is None:
            return self.drawn
        return self.seed


class _Routed(nn.Module):
    """Mix-in of a block on the route.

    Each block takes and returns all tokens and selects the kept ones itself, so each block can be recomputed alone.
    Blocks only share the seed and the tokens that SPRINT needs.
    """

    _route: _Route
    _route_name: str
    _route_first: bool  # True for the first block of the route
    _route_fuses: bool  # True for SPRINT
    _route_axes: dict[tuple[object, ...], TokenAxes]
    token_fusion: TokenFusion | None  # SPRINT, in the last block
    path_left_out: bool | None  # True in samples without the route; None if it was trained without path drop

    @property
    def tokens_run(self) -> Tensor | None:
        """Indices [B, n] of the tokens of this batch that the block changed; ``None`` if it changed all tokens."""
        if self.token_fusion is not None:  # it changes all tokens
            return None
        return self._route.kept.get(self._route_name)

    def forward(self, *args: object, **kwargs: object) -> Any:
        block = super().forward
        route = self._route
        routes = self.training and route.open and route.rate > 0
        if not routes and not self._route_fuses:
            return block(*args, **kwargs)
        axes = _axes_of(self, block, args, kwargs)
        streams, rest, named = axes.streams.take(args, kwargs)
        x = streams[axes.place]
        if self._route_fuses and self._route_first:
            _set_before(self, (x, *axes.others(streams)))
        kept = _draw(self, x, axes.shared) if routes else None
        if self.path_left_out:
            output = streams
        elif kept is None:
            output = axes.streams.unpack(block(*args, **kwargs))
        else:
            rest, named = axes.cut((rest, named), x.shape[1], kept)
            positional, keywords = axes.streams.put(axes.put(streams, gather_tokens(x, kept)), rest, named)
            output = axes.streams.unpack(block(*positional, **keywords))
        y = output[axes.place]
        if self.token_fusion is not None:
            dense, *others = _before(route)
            rows = _rows_left_out(self, y)
            deep = None if self.path_left_out else y
            y = self.token_fusion(dense, deep, kept, rows)
            if rows is not None:
                # Other streams, such as text, skip the route in the same rows.
                out = rows[:, None, None]
                pairs = zip(others, axes.others(output), strict=True)
                output = axes.together(y, [torch.where(out, old, new) for old, new in pairs])
        elif kept is not None:
            y = scatter_tokens(x, kept, y)
        return axes.streams.pack(axes.put(output, y))


@torch.compiler.disable
def _axes_of(
    block: _Routed, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> TokenAxes:
    """Return the arguments that belong to tokens, found once for each set of shapes."""
    shapes = tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in tree_leaves((args, kwargs)))
    if shapes not in block._route_axes:
        # Equal blocks share the result, because the search takes seconds for large blocks.
        known = block._route.axes
        key = (shapes, *_settings(block))
        if key not in known:
            known[key] = find_axes(block, forward, args, kwargs, f"TokenRouting: block {block._route_name!r}")
        block._route_axes[shapes] = known[key]
    return block._route_axes[shapes]


def _settings(block: nn.Module) -> tuple[object, ...]:
    """Return the class of a block, the shapes of its weights, and the plain public attributes of its modules.

    Blocks with the same settings are assumed to treat their arguments in the same way.
    """
    plain = (bool, int, float, str, NoneType)
    attributes = []
    for name, part in block.named_modules():
        for key, value in vars(part).items():
            if not key.startswith("_") and isinstance(value, plain):
                attributes.append((name, type(part), key, value))
    return unmixed(block), tuple((name, p.shape) for name, p in block.named_parameters()), tuple(attributes)


@torch.compiler.disable
def _draw(block: _Routed, x: Tensor, shared: bool) -> Tensor:
    """Return the indices of the kept tokens. Each block draws the same ones, from the seed of the batch."""
    route = block._route
    tokens = x.shape[1]
    if block._route_first and not backward_runs():
        route.tokens = tokens
        if route.seed is None and not block._route_fuses:
            route.drawn = _any_seed()
    if route.tokens != tokens:
        raise ConfigurationError(
            f"TokenRouting: block {block._route_name!r} runs on {tokens} tokens, but the first block of the route on "
            f"{route.tokens}. Name blocks of the same sequence with blocks="
        )
    # On the device of the batch: a copy from the CPU would wait for the GPU.
    generator = torch.Generator(x.device).manual_seed(route.number)
    kept = draw_tokens(len(x), tokens, route.rate, generator, x.device, shared)
    if kept.shape[1] == tokens:
        raise refusal("TokenRouting", "rate", f"large enough to leave out one of {tokens} tokens", route.rate)
    route.kept[block._route_name] = kept
    return kept


def _any_seed() -> int:
    return int(torch.randint(2**62, (), device="cpu"))


@torch.compiler.disable
def _rows_left_out(block: _Routed, x: Tensor) -> Tensor | None:
    """Return the mask [B] of the rows that are trained without the route, or ``None`` without path drop."""
    route = block._route
    if not block.training or not route.path_drop:
        return None
    seed = mix_seed(route.number, 1)
    generator = torch.Generator(x.device).manual_seed(seed)
    return torch.rand(len(x), generator=generator, device=x.device) < route.path_drop


@torch.compiler.disable
def _set_before(block: _Routed, streams: tuple[Tensor, ...]) -> None:
    """Save the tokens before the route, except in a recomputation, which has the same ones."""
    route = block._route
    if not backward_runs():
        route.before = streams
        # A pass without gradients replaces the tokens of an earlier one with gradients.
        route.passes += torch.is_grad_enabled() or route.passes > 0
        if block.training and route.seed is None:
            route.drawn = _any_seed()


@torch.compiler.disable
def _before(route: _Route) -> tuple[Tensor, ...]:
    """Return the streams before the route, the tokens first.

    Raises:
        ConfigurationError: In a recomputation, if they are those of a later forward pass.
    """
    assert route.before
    if backward_runs() and route.passes > 1:
        raise ConfigurationError(
            "TokenRouting: mode='sprint' can recompute the tokens of one forward pass per step only, but training_step "
            "runs the network several times. Leave out activation checkpointing, or use mode='tread'"
        )
    return route.before


class TokenRouting(OptimizerHooks, Technique):
    """Let random tokens of a diffusion transformer skip the middle blocks (the route) in training.

    ``seed``, the number of the batch and the rank decide which tokens skip the route. A resumed run continues with the
    same random decisions, and activation checkpointing repeats them. Each row keeps its own tokens, unless all rows
    share an argument that belongs to tokens, such as a table of rotary positions: all rows then keep the same tokens.
    In evaluation and in sampling all tokens run.

    A trial of each block on random numbers finds the arguments that belong to tokens (see
    :mod:`lit_efficient.mechanisms.blocks.tokens`). A separate stream of text is not shortened.

    Args:
        rate: Share of the tokens that skip the route, at least 0 and below 1: 0.5 in TREAD, 0.75 in SPRINT.
        before: Number of blocks before the route, in which all tokens run, at least 0; 2 in both papers.
        after: Number of blocks behind the route, in which all tokens run, at least 0.
        mode: ``tread``, or ``sprint``: a new layer joins the tokens from before the route with those behind it. This
            layer stays in the network, and exports to layouts of other libraries cannot contain it.
        path_drop: With ``sprint``, share of the rows that are trained without the route, at least 0 and below 1;
            ``Sampler(path_drop=True)`` can then use it for guidance. The authors' code uses 0.1.
        stop_at: Optimizer step from which all tokens run, as at the end of both papers' training. ``None``: never.
        blocks: ``auto`` finds repeated blocks. Otherwise regular expressions for the dotted names of all blocks.
        seed: Seed of the random decisions.

    Raises:
        ConfigurationError: For an argument out of range, or if there are too few blocks. In the first batch for blocks
            that are not residual over tokens [B, N, D], or that depend on the positions of tokens, unless an argument
            contains these positions.
    """

    phase = Phase.ARCHITECTURE
    alters: ClassVar[tuple[str, ...]] = ("weights",)
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (11, "tokens of an image that skip blocks cost no compute")}

    def __init__(
        self,
        rate: float = 0.5,
        before: int = 1,
        after: int = 1,
        mode: str = "tread",
        path_drop: float = 0.0,
        stop_at: int | None = None,
        blocks: str | list[str] = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_number("TokenRouting", "rate", rate, least=0, below=1)
        check_number("TokenRouting", "before", before, least=0, whole=True)
        check_number("TokenRouting", "after", after, least=0, whole=True)
        check_choice("TokenRouting", "mode", mode, ("tread", "sprint"))
        check_number("TokenRouting", "path_drop", path_drop, least=0, below=1)
        if path_drop and mode != "sprint":
            raise refusal(
                "TokenRouting", "path_drop", "0 with mode='tread', which has no path around the route", path_drop
            )
        check_number("TokenRouting", "stop_at", stop_at, least=1, whole=True, null=True)
        self.rate = rate
        self.before = before
        self.after = after
        self.mode = mode
        self.path_drop = path_drop
        self.stop_at = stop_at
        self.counts_steps = stop_at is not None
        self.blocks = blocks
        self.seed = seed
        if mode == "tread":
            self.alters = ()  # type: ignore[misc]

    def arguments(self) -> dict[str, Any]:
        given = super().arguments()
        if not self.path_drop:  # records of runs without it do not contain it
            del given["path_drop"]
        return given

    def transform(self, module: nn.Module) -> Report:
        found = find_blocks(module, self.blocks, who="TokenRouting")
        if self.blocks == "auto":  # leave frozen blocks out, such as those of a teacher
            trained = [(name, block) for name, block in found if any(p.requires_grad for p in block.parameters())]
            found = trained or found
        route = found[self.before : len(found) - self.after]
        if not route:
            allowed = f"so small that at least one of {len(found)} blocks is on the route"
            raise refusal("TokenRouting", "before and after", allowed, (self.before, self.after))
        fuses = self.mode == "sprint"
        shared = _Route(self.rate, self.path_drop)
        for name, block in route:
            mix_in(
                block,
                _Routed,
                _route=shared,
                _route_name=name,
                _route_first=block is route[0][1],
                _route_axes={},
                _route_fuses=fuses,
                token_fusion=None,
                path_left_out=False if self.path_drop else None,
            )
        last = route[-1][1]
        if fuses:
            width = width_of(module, route[-1][0])
            if width is None:
                raise ConfigurationError(
                    f"TokenRouting: mode='sprint' cannot find the width of block {route[-1][0]!r}. Use mode='tread'"
                )
            like = next(p for p in last.parameters())
            del last.token_fusion
            last.token_fusion = TokenFusion(width).to(like.device)
        added = sum(p.numel() for p in self.trains(module))
        kinds = ", ".join(sorted({type(block).__name__ for _, block in route}))
        summary = f"{self.rate:.0%} of the tokens skip {len(route)} of {len(found)} blocks ({kinds})"
        if self.stop_at:
            summary += f" until step {self.stop_at}"
        if fuses:
            summary += f", joined by a layer of {added:,} parameters"
        return Report(
            summary,
            modules=tuple(name for name, _ in route),
            parameters=added or None,
            details={"share_of_blocks_skipped": self.rate * len(route) / len(found)},
            idle=not self.rate,
        )

    def trains(self, module: nn.Module) -> Iterable[nn.Parameter]:
        return [p for part in module.modules() if isinstance(part, TokenFusion) for p in part.parameters()]

    def prepare_parameters(self, module: nn.Module) -> None:
        for parameter in self.trains(module):  # adapters freeze it together with the base
            parameter.requires_grad_(True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        route = _route_of(pl_module)
        route.seed = mix_seed(self.seed, trainer.fit_loop.total_batch_idx, data_rank(trainer))
        route.open = self.stop_at is None or (trainer.global_step < self.stop_at and not self.worst_case)
        route.passes = 0
        route.kept = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        route = _route_of(pl_module)
        route.seed = None
        route.before = ()
        route.open = True
        route.kept = {}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if any(isinstance(part, _Routed) for part in pl_module.modules()):
            self.on_train_end(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)


def _route_of(root: nn.Module) -> _Route:
    return next(part._route for part in root.modules() if isinstance(part, _Routed))
