"""Token routing: random tokens skip the blocks in the middle in training, and come back behind them.

    TREAD     x_k <- block(x_k) for kept tokens k, the others pass;    all tokens again behind the route
    SPRINT    behind the route x <- W [f; g],    f: tokens before it, g: kept tokens behind it, others a learned vector;
    path drop  in training g is all learned vectors for some rows; sampling guides by v(y) and v(no condition, no g)

Saves: in training `rate` of the compute of the blocks on the route; the papers report 14 (TREAD, on DiT-XL) and 9.8
    (SPRINT, on SiT-XL) times less training to the same FID on ImageNet
Costs: a gather and a scatter of the tokens a block; with `sprint` 2 width^2 + width parameters that stay in the network
Source: Krause et al. (2025), https://arxiv.org/abs/2501.04765; SPRINT: Park et al. (2025), https://arxiv.org/abs/2510.21986
"""

from collections.abc import Iterable
from types import NoneType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.ranks import data_rank
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.internals.torch_dispatch import backward_runs
from lit_efficient.internals.torch_modules import LoadsPartly, StaysFloat32
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.blocks.freezing import NewLayer
from lit_efficient.mechanisms.blocks.tokens import TokenAxes, find_axes, gather_tokens, scatter_tokens
from lit_efficient.models.libraries.teachers import width_of
from lit_efficient.surgery import mix_in, unmixed
from lit_efficient.technique import Technique


def draw_tokens(
    batch: int,
    tokens: int,
    rate: float,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
    shared: bool = False,
) -> Tensor:
    """Which tokens of each row take the route: indices [B, n] in rising order, ``n = max(1, round(N (1 - rate)))``.

    Args:
        batch: Rows B.
        tokens: Tokens N of a row.
        rate: Share of them that skips the route, at least 0 and below 1.
        generator: Where the draw comes from, on ``device``; None is its global one.
        device: Where the indices are wanted.
        shared: Whether all rows keep the same tokens.
    """
    count = max(1, round(tokens * (1 - rate)))
    order = torch.rand(1 if shared else batch, tokens, generator=generator, device=device).argsort(1)
    return order[:, :count].sort(1).values.expand(batch, -1)


class TokenFusion(StaysFloat32, LoadsPartly, NewLayer):
    """SPRINT's end of the route: ``W [f; g]``, with a learned vector in the place of each token that was not on it.

    It begins as ``g``: where all tokens run, the network computes what it did.

    Args:
        width: Features D of a token.
    """

    float32 = ("",)
    only_here = True  # no layout of another library has a place for it

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = torch.float32
        begin = torch.cat([torch.zeros(width, width, dtype=wide), torch.eye(width, dtype=wide)], 1)
        self.weight, self.mask = nn.Parameter(begin), nn.Parameter(torch.zeros(width, dtype=wide))

    def forward(self, dense: Tensor, deep: Tensor | None, kept: Tensor | None, left_out: Tensor | None) -> Tensor:
        """Tokens [B, N, D] before the route and those behind it, [B, n, D] at ``kept`` [B, n] (None: all).

        None of these are used of rows ``left_out`` [B], and of any row where ``deep`` is None.
        """
        mask = self.mask.to(dense.dtype if deep is None else deep.dtype)
        if deep is None:
            whole = mask.expand_as(dense)
        else:
            whole = deep + 0 * mask if kept is None else scatter_tokens(mask.expand_as(dense), kept, deep)
        if left_out is not None:
            whole = torch.where(left_out[:, None, None], mask, whole)
        return F.linear(torch.cat([dense.to(whole.dtype), whole], -1), self.weight.to(whole.dtype))


class _Route:
    """What the blocks of a route share in a batch: the draw, and with SPRINT the tokens before it."""

    def __init__(self, rate: float, path_drop: float) -> None:
        self.rate = rate
        self.path_drop = path_drop
        self.seed: int | None = None  # None outside a trainer's loop: the first block draws one
        self.drawn = 0
        self.open = True
        self.tokens = 0
        self.before: tuple[Tensor, ...] = ()  # SPRINT's: the tokens, and a text's
        self.passes = 0
        self.axes: dict[Any, TokenAxes] = {}  # by shapes and kinds of blocks
        self.kept: dict[str, Tensor] = {}  # of a batch in training, by block

    def __reduce__(self) -> Any:
        return _Route, (self.rate, self.path_drop)

    @property
    def number(self) -> int:
        """What the draws of this batch are seeded with."""
        return self.drawn if self.seed is None else self.seed


class _Routed(nn.Module):
    """Mix-in of a block on the route. Each block cuts and returns whole tokens, so that any of them may be recomputed,
    and nothing but the draw and SPRINT's tokens is handed from one to the next.
    """

    _route: _Route
    _route_name: str
    _route_first: bool
    _route_axes: dict[Any, TokenAxes]
    token_fusion: TokenFusion | None
    path_left_out: bool | None  # None: it has not learned to be

    @property
    def tokens_run(self) -> Tensor | None:
        """Which tokens [B, n] of this batch it ran on, where it returns the others as they came; ``None``: all."""
        return self._route.kept.get(self._route_name) if self.token_fusion is None else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block, route = super().forward, self._route
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
            (dense, *others), rows = _before(route), _rows_left_out(self, y)
            y = self.token_fusion(dense, None if self.path_left_out else y, kept, rows)
            if rows is not None:
                out = rows[:, None, None]
                pairs = zip(others, axes.others(output), strict=True)
                output = axes.together(y, [torch.where(out, old, new) for old, new in pairs])
        elif kept is not None:
            y = scatter_tokens(x, kept, y)
        return axes.streams.pack(axes.put(output, y))

    _route_fuses: bool


@torch.compiler.disable
def _axes_of(block: _Routed, forward: Any, args: Any, kwargs: Any) -> TokenAxes:
    shapes = tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in tree_leaves((args, kwargs)))
    if shapes not in block._route_axes:
        alike, known = (shapes, *_settings(block)), block._route.axes  # of large blocks each question takes seconds
        if alike not in known:
            what = f"TokenRouting: block {block._route_name!r}"
            known[alike] = find_axes(block, forward, args, kwargs, what)
        block._route_axes[shapes] = known[alike]
    return block._route_axes[shapes]


def _settings(block: nn.Module) -> tuple[Any, ...]:
    """What a block's code may ask for: its class, its weights' shapes, and the plain public attributes in it."""
    plain = (bool, int, float, str, NoneType)
    held = [
        (name, type(part), key, value)
        for name, part in block.named_modules()
        for key, value in vars(part).items()
        if not key.startswith("_") and isinstance(value, plain)
    ]
    return unmixed(block), tuple((name, p.shape) for name, p in block.named_parameters()), tuple(held)


@torch.compiler.disable
def _draw(block: _Routed, x: Tensor, shared: bool) -> Tensor:
    """Drawn where the batch is, and by each block anew: a copy to a GPU would wait for it."""
    route, tokens = block._route, x.shape[1]
    if block._route_first and not backward_runs():
        route.tokens = tokens
        if route.seed is None and not block._route_fuses:
            route.drawn = _any_seed()
    if route.tokens != tokens:
        raise ConfigurationError(
            f"TokenRouting: block {block._route_name!r} runs on {tokens} tokens, those before it on {route.tokens}: "
            "name blocks of one sequence"
        )
    generator = torch.Generator(x.device).manual_seed(route.number)
    kept = draw_tokens(len(x), tokens, route.rate, generator, x.device, shared)
    if kept.shape[1] == tokens:
        raise refusal("TokenRouting", "rate", f"enough to leave out one of {tokens} tokens", route.rate)
    route.kept[block._route_name] = kept
    return kept


def _any_seed() -> int:
    return int(torch.randint(2**62, (), device="cpu"))


@torch.compiler.disable
def _rows_left_out(block: _Routed, x: Tensor) -> Tensor | None:
    """Which rows [B] learn to go without the route; of the seed's next draw."""
    route = block._route
    if not block.training or not route.path_drop:
        return None
    seed = mix_seed(route.number, 1)
    return torch.rand(len(x), generator=torch.Generator(x.device).manual_seed(seed), device=x.device) < route.path_drop


@torch.compiler.disable
def _set_before(block: _Routed, streams: tuple[Tensor, ...]) -> None:
    route = block._route
    if not backward_runs():
        route.before, route.passes = streams, route.passes + torch.is_grad_enabled()
        if block.training and route.seed is None:
            route.drawn = _any_seed()


@torch.compiler.disable
def _before(route: _Route) -> tuple[Tensor, ...]:
    assert route.before
    if backward_runs() and route.passes > 1:
        raise ConfigurationError(
            "TokenRouting: mode='sprint' recomputes the tokens of one forward a step, and training_step runs the "
            "network several times: leave out activation checkpointing, or use mode='tread'"
        )
    return route.before


class TokenRouting(OptimizerHooks, Technique):
    """Let random tokens of a diffusion transformer skip the middle blocks in training, so that their time is saved.

    The draw is a function of ``seed``, the batch's number and the rank: a resumed run goes on with the same draws, and
    activation checkpointing recomputes what was computed. Each row draws its own tokens, unless rows share an argument
    that goes with the tokens, as a table of rotary positions: then all rows of a batch keep the same. In evaluation,
    and so in sampling, all tokens run.

    What goes with the tokens is found by asking each block once, on random numbers (see
    :mod:`lit_efficient.mechanisms.blocks.tokens`). Beside image tokens, text has a stream of its own and stays whole.

    Args:
        rate: Share of the tokens that skips the route, at least 0 and below 1: half in TREAD, 0.75 in SPRINT.
        before: Blocks before the route, which all tokens run, at least 0; 2 in both papers.
        after: Blocks behind it, at least 0.
        mode: ``tread``; or ``sprint``, which joins the tokens from before the route to those behind it by a layer that
            stays in the network, and that exports to other libraries' layouts cannot hold.
        path_drop: With ``sprint``, share of the rows that learn to go without the route, at least 0 and below 1, so
            that ``Sampler(path_drop=True)`` can guide by it; 0.1 in the authors' code.
        stop_at: Optimizer step from which all tokens run, as both papers end; ``None``: never.
        blocks: ``auto`` finds repeated blocks; or regular expressions for the dotted names of all of them.
        seed: Seed of the draws.

    Raises:
        ConfigurationError: For an argument out of range and for too few blocks; in the first batch for blocks that are
            not residual over tokens [B, N, D], or depend on the places of tokens in a way that no argument says.
    """

    phase = Phase.ARCHITECTURE
    alters: ClassVar[tuple[str, ...]] = ("weights",)
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (11, "tokens of an image that skip blocks cost nothing")}

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
                "TokenRouting", "path_drop", "0 with mode='tread', which has no path beside the route", path_drop
            )
        check_number("TokenRouting", "stop_at", stop_at, least=1, whole=True, null=True)
        self.rate = rate
        self.before = before
        self.after = after
        self.mode = mode
        self.path_drop = path_drop
        self.stop_at = stop_at
        self.blocks = blocks
        self.seed = seed
        if mode == "tread":
            self.alters = ()  # type: ignore[misc]

    def arguments(self) -> dict[str, Any]:
        given = super().arguments()
        if not self.path_drop:  # so that records stay what they were before it
            del given["path_drop"]
        return given

    def transform(self, module: nn.Module) -> Report:
        found = find_blocks(module, self.blocks, who="TokenRouting")
        if self.blocks == "auto":  # frozen ones, a teacher's say, are none of them
            found = [(n, block) for n, block in found if any(p.requires_grad for p in block.parameters())] or found
        route = found[self.before : len(found) - self.after]
        if not route:
            allowed = f"so few that of {len(found)} blocks one is left on the route"
            raise refusal("TokenRouting", "before and after", allowed, (self.before, self.after))
        fuses, shared = self.mode == "sprint", _Route(self.rate, self.path_drop)
        for name, block in route:
            state = {"_route": shared, "_route_name": name, "_route_first": block is route[0][1], "_route_axes": {}}
            left_out = False if self.path_drop else None
            mix_in(block, _Routed, **state, _route_fuses=fuses, token_fusion=None, path_left_out=left_out)
        last: Any = route[-1][1]
        if fuses:
            width = width_of(module, route[-1][0])
            if width is None:
                raise ConfigurationError(f"TokenRouting: cannot tell the width of block {route[-1][0]!r}")
            like = next(p for p in last.parameters())
            del last.token_fusion
            last.token_fusion = TokenFusion(width).to(like.device)
        added = sum(p.numel() for p in self.trains(module))
        kinds = ", ".join(sorted({type(block).__name__ for _, block in route}))
        summary = f"{self.rate:.0%} of the tokens skip {len(route)} of {len(found)} blocks ({kinds})"
        summary += f" until step {self.stop_at}" if self.stop_at else ""
        return Report(
            f"{summary}, joined by a layer of {added:,} parameters" if fuses else summary,
            modules=tuple(name for name, _ in route),
            parameters=added,
            details={"share_of_blocks_skipped": self.rate * len(route) / len(found)},
        )

    def trains(self, module: nn.Module) -> Iterable[nn.Parameter]:
        return [p for part in module.modules() if isinstance(part, TokenFusion) for p in part.parameters()]

    def prepare_parameters(self, module: nn.Module) -> None:
        for parameter in self.trains(module):  # adapters have frozen it with the base
            parameter.requires_grad_(True)

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        route = _route_of(pl_module)
        route.seed = mix_seed(self.seed, trainer.fit_loop.total_batch_idx, data_rank(trainer))
        route.open = self.stop_at is None or (trainer.global_step < self.stop_at and not self.worst_case)
        route.passes, route.kept = 0, {}

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        route = _route_of(pl_module)
        route.seed, route.before = None, ()
        route.open, route.kept = True, {}

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        if any(isinstance(part, _Routed) for part in pl_module.modules()):
            self.on_train_end(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)


def _route_of(root: nn.Module) -> _Route:
    return next(part._route for part in root.modules() if isinstance(part, _Routed))
