"""Stochastic depth: train a shorter network in expectation, keep the whole one for inference.

    y = x + f(x) / (1 - p_l) with probability 1 - p_l, else x;    p_l = rate * l / L for block l = 1..L

Saves: the compute of the dropped blocks, about half the rate under the linear rule; some overfitting
Costs: nothing in memory; a rate that is too high for a short run costs quality
Source: Huang et al. (2016), https://arxiv.org/abs/1603.09382; on rows: Oquab et al. (2023), https://arxiv.org/abs/2304.07193

Multiplying a block's output by a mask, as DropPath layers do, saves no time at all: here a dropped block is not run.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.ranks import data_rank
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_choice, check_number, listed
from lit_efficient.internals.torch_trees import tree_leaves, tree_map
from lit_efficient.mechanisms.blocks.block_map import BlockMap, find_blocks, trained_blocks
from lit_efficient.mechanisms.blocks.residual import (
    Streams,
    known_streams,
    probe_streams,
    why_not_residual,
    without_cache,
)
from lit_efficient.surgery import mix_in, moved
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

Stream = TypeVar("Stream", Tensor, tuple[Tensor, ...])  # one residual stream, or several of them

# Keyword arguments that all rows share, even where their first size happens to be that of the batch.
_SHARED = ("cache_position", "image_rotary_emb", "rotary_emb", "freqs_cis")


def drop_block(
    block: Callable[..., Stream],
    x: Stream,
    rate: float,
    *args: Any,
    parameters: Iterable[Tensor] = (),
    drop: bool | None = None,
    **kwargs: Any,
) -> Stream:
    """Skip a residual block for the whole batch with probability ``rate``; otherwise scale its residual up.

    The expectation over the draw equals ``block(x)`` exactly.

    Args:
        block: A residual block: ``block(x, ...)`` returns what ``x`` is, of its shape.
        x: Input, [B, ...], or a tuple of the inputs of several residual streams.
        rate: Probability of the skip, at least 0 and below 1.
        *args: Further arguments of the block.
        parameters: The block's parameters. A skip gives them zero gradients instead of none, as a mask would, so that
            all ranks of a distributed run reduce the same gradients whatever each of them drew.
        drop: The draw, if it is made already; ``None`` draws from torch's global generator.
        **kwargs: Further keyword arguments of the block.

    Source: Huang et al. (2016), https://arxiv.org/abs/1603.09382.
    """
    if drop is None:
        drop = bool(torch.rand(()) < rate)
    if drop:
        streams = (x,) if isinstance(x, Tensor) else x
        passed = _ZeroGradients.apply(len(streams), *streams, *(p for p in parameters if p.requires_grad))
        return passed[0] if isinstance(x, Tensor) else passed
    y = block(x, *args, **kwargs)
    _check_shapes(x, y)
    return y if rate == 0 else tree_map(lambda before, after: _scale_residual(before, after, rate), x, y)


def drop_rows(
    block: Callable[..., Stream], x: Stream, rate: float, *args: Any, rows: Tensor | None = None, **kwargs: Any
) -> Stream:
    """Run a residual block on a random subset of the batch's rows; the others pass unchanged.

    Of B rows, ``n = max(1, round(B (1 - rate)))`` are run and their residuals scaled by B / n, so that the expectation
    over the draw equals ``block(x)`` exactly.

    Args:
        block: A residual block: ``block(x, ...)`` returns what ``x`` is, of its shape; rows must not depend on each
            other.
        x: Input, [B, ...], or a tuple of the inputs of several residual streams.
        rate: Share of the rows that skip the block, at least 0 and below 1.
        *args: Further arguments; every tensor in them whose first size is B is cut to the same rows.
        rows: The draw, if it is made already (:func:`draw_rows`); ``None`` draws from the device's global generator.
        **kwargs: Further keyword arguments, treated the same, except for those whose names say that all rows share
            them (``cache_position``, ``image_rotary_emb``, ...).

    Source: Oquab et al. (2023), https://arxiv.org/abs/2304.07193, section 5.
    """
    first = x if isinstance(x, Tensor) else x[0]
    batch = len(first)
    rows = draw_rows(batch, rate, device=first.device) if rows is None else moved(rows, first.device)
    if len(rows) == batch:
        y = block(x, *args, **kwargs)
        _check_shapes(x, y)
        return y

    def cut(value: Any) -> Any:
        return value[rows] if isinstance(value, Tensor) and value.shape[:1] == (batch,) else value

    part = tree_map(cut, x)
    named = {key: value if key in _SHARED else tree_map(cut, value) for key, value in kwargs.items()}
    y = block(part, *tree_map(cut, args), **named)
    _check_shapes(part, y)

    def merge(whole: Tensor, before: Tensor, after: Tensor) -> Tensor:
        return whole.index_add(0, rows, (after - before).to(whole.dtype), alpha=batch / len(rows))

    return tree_map(merge, x, part, y)


def draw_rows(
    batch: int, rate: float, generator: torch.Generator | None = None, device: torch.device | None = None
) -> Tensor:
    """Which rows of a batch run: [n] indices without repetition, from a generator of ``device`` or its global one."""
    return torch.randperm(batch, generator=generator, device=device)[: max(1, round(batch * (1 - rate)))]


def linear_rates(rate: float, blocks: int) -> list[float]:
    """Skip probabilities that grow linearly over the depth and end at ``rate``: ``rate * l / L`` for l = 1..L."""
    return [rate * (block + 1) / blocks for block in range(blocks)]


def _scale_residual(x: Tensor, y: Tensor, rate: float) -> Tensor:
    """``x + (y - x) / (1 - rate)``, in one pass over memory where both are of one type."""
    return torch.lerp(x, y, 1 / (1 - rate)) if x.dtype == y.dtype else x + (y - x) / (1 - rate)


def _check_shapes(x: Any, y: Any, who: str = "a block") -> None:
    before, after = tree_leaves(x), tree_leaves(y)
    shapes, found = (
        [list(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in ts] for ts in (before, after)
    )
    if shapes != found:
        shown = [", ".join(map(str, items)) for items in (shapes, found)]
        raise ConfigurationError(
            f"StochasticDepth: {who} maps {shown[0]} to {shown[1]}; only residual blocks can be dropped, which "
            "return tensors of their inputs' shapes: name them with blocks="
        )


class _ZeroGradients(torch.autograd.Function):
    """The identity on the streams, which gives the parameters that it passes by zero gradients instead of none."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors[count:])
        return tuple(stream.view_as(stream) for stream in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class _Droppable(nn.Module):
    """Mix-in of a block. The draw of a batch is made before it, so that a recomputed forward repeats it.

    The draw for a whole batch is a plain bool: a compiled block has two graphs and no break. Rows are drawn in a break.
    """

    _drop_name: str
    _drop_rate: float
    _drop_by: str
    _drop_streams: Streams | None  # None until a block whose code does not show what it returns has done so
    _drop_now: bool | None  # None outside a trainer's loop: draw from torch's global generator
    _drop_seed: int | None  # None there, too
    _drop_rows: tuple[int, int] | None  # those that the last call by sample left out, and all

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block = super().forward
        if not self.training or self._drop_rate == 0:
            return block(*args, **kwargs)
        streams = self._drop_streams
        if streams is None:
            streams = self._drop_streams = probe_streams(self, self._drop_name, block, args, kwargs)
        if self._drop_by == "sample":
            args, kwargs = without_cache(args), without_cache(kwargs)
        x, rest, named = streams.take(args, kwargs)

        def run(x: tuple[Tensor, ...], *rest: Any, **named: Any) -> tuple[Tensor, ...]:
            positional, keywords = streams.put(x, rest, named)
            y = streams.unpack(block(*positional, **keywords))
            _check_shapes(x, y, f"block {self._drop_name!r}")
            return y

        if self._drop_by == "sample":
            rows = _rows_of(self, x[0])
            return streams.pack(drop_rows(run, x, self._drop_rate, *rest, rows=rows, **named))
        y = drop_block(run, x, self._drop_rate, *rest, parameters=self.parameters(), drop=self._drop_now, **named)
        return streams.pack(y)


@torch.compiler.disable
def _rows_of(block: _Droppable, x: Tensor) -> Tensor:
    """Drawn where the batch is: a copy to a GPU would wait for it, once a block."""
    rows = draw_rows(len(x), block._drop_rate, _generator(block._drop_seed, x.device), x.device)
    block._drop_rows = len(x) - len(rows), len(x)
    return rows


def _generator(seed: int | None, device: torch.device | str = "cpu") -> torch.Generator | None:
    return None if seed is None else torch.Generator(device).manual_seed(seed)


class StochasticDepth(Technique):
    """Drop whole residual blocks at random in training, so that their time is really saved.

    The draw of a batch is a function of ``seed`` and the number of the batch alone: all ranks drop the same blocks, a
    resumed run goes on with the same draws, and activation checkpointing recomputes what was computed.

    Args:
        rate: Probability with which the deepest block is dropped (``mode="linear"``) or every block (``"uniform"``),
            at least 0 and below 1.
        mode: ``linear``: from rate / L at the first of L blocks to ``rate`` at the last; ``uniform``: the same for all.
        skip: ``batch`` drops a block for the whole batch; ``sample`` runs each block on a random subset of the rows.
        blocks: ``auto`` finds repeated residual blocks, inside stages too, and leaves those out that change the shape;
            they count for the depth. Otherwise regular expressions for the dotted names of residual blocks.
        seed: Seed of the draws.

    Raises:
        ConfigurationError: For an argument out of range, without such blocks, or for one that is not residual; after
            the first batch if ``sample`` leaves out none of its rows, because they are too few for the rate.
    """

    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.AFTER_SHARDING, Trait.DRAWS_WORK, Trait.READS_NO_WEIGHTS, Trait.REFUSES_EARLY})
    conflicts: ClassVar[dict[str, str]] = {
        "Compile(modules='network')": "each combination of dropped blocks would be a graph of its own: modules must be "
        "blocks or patterns"
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (10, "dropped blocks cost nothing: another training")}

    def __init__(
        self,
        rate: float = 0.5,
        mode: str = "linear",
        skip: str = "batch",
        blocks: str | list[str] = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_number("StochasticDepth", "rate", rate, least=0, below=1)
        check_choice("StochasticDepth", "mode", mode, ("linear", "uniform"))
        check_choice("StochasticDepth", "skip", skip, ("batch", "sample"))
        self.rate = rate
        self.mode = mode
        self.skip = skip
        self.blocks = blocks
        self.seed = seed
        self._asked = False

    def transform(self, module: nn.Module) -> Report:
        found, left_out = self._blocks_of(module)
        depth = len(found)
        block_map = BlockMap(module)
        rates = [self.rate] * depth
        if self.mode == "linear":
            rates = [linear_rates(self.rate, size)[place] for place, size in block_map.depths(found)]
        chosen = {name: (block, rate) for (name, block), rate in zip(found, rates, strict=True) if name not in left_out}
        for name, (block, rate) in chosen.items():
            streams = known_streams(block_map, block)
            state = {"_drop_rate": rate, "_drop_by": self.skip, "_drop_streams": streams, "_drop_name": name}
            mix_in(block, _Droppable, **state, _drop_now=None, _drop_seed=None, _drop_rows=None)
        kinds = ", ".join(sorted({type(block).__name__ for block, _ in chosen.values()}))
        rates = [rate for _, rate in chosen.values()]
        of = f" of {depth}" if left_out else ""
        summary = (
            f"{len(rates)}{of} blocks ({kinds}), dropped by {self.skip} at rates {rates[0]:.2f} to {rates[-1]:.2f}"
        )
        return Report(
            f"{summary}; left out: {_reasons(left_out)}" if left_out else summary,
            modules=tuple(chosen),
            details={"expected_share_dropped": sum(rates) / depth, "rates": " ".join(f"{rate:.3g}" for rate in rates)},
        )

    def _blocks_of(self, module: nn.Module) -> tuple[list[tuple[str, nn.Module]], dict[str, str]]:
        """All blocks, and why some cannot be dropped."""
        found = find_blocks(module, self.blocks, who="StochasticDepth")
        if self.blocks == "auto":  # frozen ones, a teacher's say, count for no depth
            found = trained_blocks(found)
        for name, block in found if self.skip == "sample" else ():
            if any(getattr(part, "batch_first", True) is False for part in block.modules()):
                raise ConfigurationError(
                    f"StochasticDepth: skip='sample' needs the batch first, and {name!r} has time first "
                    "(batch_first=False): build it with batch_first=True, or use skip='batch'"
                )
        block_map = BlockMap(module)
        left_out = {name: why for name, block in found if (why := why_not_residual(block_map, block)) is not None}
        if left_out and (self.blocks != "auto" or len(left_out) == len(found)):
            raise ConfigurationError(
                f"StochasticDepth: blocks that cannot be skipped: {_reasons(left_out)}; name others with blocks="
            )
        return found, left_out

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        number = trainer.fit_loop.total_batch_idx
        rank = data_rank(trainer) if self.skip == "sample" else 0
        for i, block in enumerate(_droppable(pl_module)):
            block._drop_seed = mix_seed(self.seed, number, i, rank)
            drop = bool(torch.rand((), generator=_generator(block._drop_seed), device="cpu") < block._drop_rate)
            block._drop_now = drop and not self.worst_case

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        counts = [block._drop_rows for block in _droppable(pl_module) if block._drop_rows]
        if self._asked or self.worst_case or not counts:
            return
        self._asked = True
        none = sum(not left_out for left_out, _ in counts)
        if none == len(counts):
            raise ConfigurationError(
                f"StochasticDepth: skip='sample' leaves out no row of {counts[-1][1]} in a batch at rate={self.rate}: "
                "use skip='batch', more rows a batch or a larger rate"
            )
        if none:
            rank_zero_info(
                f"StochasticDepth: {none} of {len(counts)} blocks run on all {counts[-1][1]} rows of a batch"
            )

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        for block in _droppable(pl_module):
            block._drop_seed = block._drop_now = None

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)


def _droppable(root: nn.Module) -> list[_Droppable]:
    return [module for module in root.modules() if isinstance(module, _Droppable)]


def _reasons(left_out: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, why in left_out.items():
        by_reason.setdefault(why, []).append(name)
    return "; ".join(f"{listed(names, 6)} ({why})" for why, names in by_reason.items())
