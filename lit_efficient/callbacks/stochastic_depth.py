"""Stochastic depth: skip random residual blocks in training, and use the whole network for inference.

    y = x + f(x) / (1 - p_l) with probability 1 - p_l, else x;    p_l = rate * l / L for block l = 1..L

Saves: the compute of the dropped blocks, which is about half of ``rate`` under the linear rule; some overfitting
Costs: nothing in memory; a rate that is too high for a short run costs quality
Source: Huang et al. (2016), https://arxiv.org/abs/1603.09382; by rows: Oquab et al. (2023), https://arxiv.org/abs/2304.07193

DropPath layers run a block and multiply its output by a mask, which saves no time. Here a dropped block does not run.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_choice, check_number, listed
from lit_efficient.internals.lightning_strategies import data_rank
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

# Keyword arguments that all rows share, even if their first size happens to equal the batch size.
_SHARED = ("cache_position", "image_rotary_emb", "rotary_emb", "freqs_cis")


def drop_block(
    block: Callable[..., Stream],
    x: Stream,
    rate: float,
    *args: object,
    parameters: Iterable[Tensor] = (),
    drop: bool | None = None,
    **kwargs: object,
) -> Stream:
    """Skip a residual block for the whole batch with probability ``rate``. Otherwise scale its residual up.

    The expectation over the random decision equals ``block(x)`` exactly.

    Args:
        block: Residual block. ``block(x, ...)`` has the structure and the shapes of ``x``.
        x: Input [B, ...], or a tuple of the inputs of several residual streams.
        rate: Probability of skipping the block, at least 0 and below 1.
        *args: Further arguments of the block.
        parameters: Parameters of the block. If the block is skipped, they get gradients of zero instead of none, as
            with a mask. All ranks of a distributed run then reduce the same gradients, even if they decide differently.
        drop: The decision, if it is already made. ``None`` draws it from the global generator of torch.
        **kwargs: Further keyword arguments of the block.

    Returns:
        The block's output, with the structure and the shapes of ``x``.

    Raises:
        ConfigurationError: If the block changes the shape.

    Source: Huang et al. (2016), https://arxiv.org/abs/1603.09382.
    """
    if drop is None:
        drop = bool(torch.rand(()) < rate)
    if drop:
        if not torch.is_grad_enabled():  # also in forward mode, whose derivatives MeanFlow takes
            return tree_map(torch.clone, x)
        trainable = [p for p in parameters if p.requires_grad]
        if isinstance(x, Tensor):
            return _ZeroGradients.apply(1, x, *trainable)[0]
        return _ZeroGradients.apply(len(x), *x, *trainable)
    y = block(x, *args, **kwargs)
    _check_shapes(x, y)
    if rate == 0:
        return y
    return tree_map(lambda before, after: _scale_residual(before, after, rate), x, y)


def drop_rows(
    block: Callable[..., Stream], x: Stream, rate: float, *args: object, rows: Tensor | None = None, **kwargs: object
) -> Stream:
    """Run a residual block on a random subset of the batch's rows. The other rows pass unchanged.

    The block runs on ``n = max(1, round(B (1 - rate)))`` of B rows, and their residuals are multiplied by B / n. The
    expectation over the random subset equals ``block(x)`` exactly.

    Args:
        block: Residual block whose rows do not depend on each other. ``block(x, ...)`` has the structure and the
            shapes of ``x``.
        x: Input [B, ...], or a tuple of the inputs of several residual streams.
        rate: Share of the rows that skip the block, at least 0 and below 1.
        *args: Further arguments. Each tensor in them whose first size is B is reduced to the same rows.
        rows: Indices [n] of the rows that run, if they are already drawn (:func:`draw_rows`). ``None`` draws them from
            the global generator of the device.
        **kwargs: Further keyword arguments. They are treated the same, except for names of arguments that all rows
            share (``cache_position``, ``image_rotary_emb``, ``rotary_emb``, ``freqs_cis``).

    Returns:
        Output with the structure and the shapes of ``x``.

    Raises:
        ConfigurationError: If the block changes the shape.

    Source: Oquab et al. (2023), https://arxiv.org/abs/2304.07193, section 5.
    """
    first = x if isinstance(x, Tensor) else x[0]
    batch = len(first)
    if rows is None:
        rows = draw_rows(batch, rate, device=first.device)
    else:
        rows = moved(rows, first.device)
    if len(rows) == batch:
        y = block(x, *args, **kwargs)
        _check_shapes(x, y)
        return y

    def select(value: object) -> object:
        if isinstance(value, Tensor) and value.shape[:1] == (batch,):
            return value[rows]
        return value

    part = tree_map(select, x)
    keywords = dict(kwargs)
    for key in kwargs.keys() - set(_SHARED):
        keywords[key] = tree_map(select, kwargs[key])
    y = block(part, *tree_map(select, args), **keywords)
    _check_shapes(part, y)

    def merge(whole: Tensor, before: Tensor, after: Tensor) -> Tensor:
        return whole.index_add(0, rows, (after - before).to(whole.dtype), alpha=batch / len(rows))

    return tree_map(merge, x, part, y)


def draw_rows(
    batch: int, rate: float, generator: torch.Generator | None = None, device: torch.device | None = None
) -> Tensor:
    """Return the indices [n] of the rows of a batch that run, without repetition.

    Args:
        batch: Number of rows.
        rate: Share of the rows that do not run, at least 0 and below 1. At least one row runs.
        generator: Random generator on ``device``. ``None``: its global generator.
        device: Device of the indices.
    """
    count = max(1, round(batch * (1 - rate)))
    return torch.randperm(batch, generator=generator, device=device)[:count]


def linear_rates(rate: float, blocks: int) -> list[float]:
    """Return skip probabilities that grow linearly with the depth: ``rate * l / L`` for l = 1..L."""
    return [rate * (block + 1) / blocks for block in range(blocks)]


def _scale_residual(x: Tensor, y: Tensor, rate: float) -> Tensor:
    """Return ``x + (y - x) / (1 - rate)``."""
    # lerp needs one pass over the memory, but only works with equal types.
    if x.dtype == y.dtype:
        return torch.lerp(x, y, 1 / (1 - rate))
    return x + (y - x) / (1 - rate)


def _check_shapes(x: object, y: object, who: str = "a block") -> None:
    before = _shapes(x)
    after = _shapes(y)
    if before != after:
        raise ConfigurationError(
            f"StochasticDepth: {who} maps {', '.join(before)} to {', '.join(after)}. Only residual blocks can be "
            "dropped, which return tensors with the shapes of their inputs. Name such blocks with blocks="
        )


def _shapes(tree: object) -> list[str]:
    shapes = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            shapes.append(str(list(leaf.shape)))
        else:
            shapes.append(type(leaf).__name__)
    return shapes


class _ZeroGradients(torch.autograd.Function):
    """Identity function of the streams. Its backward pass gives the block's parameters gradients of zero."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors[count:])
        # Copies, because torch forbids changes in place of views that such a function returns.
        return tuple(stream.clone() for stream in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class _Droppable(nn.Module):
    """Mix-in of a block that may be dropped.

    The technique makes the decision or the seed of a batch before the forward pass, so that a recomputed forward pass
    repeats it. The decision for a whole batch is a plain bool: a compiled block has two graphs and no graph break. The
    selection of rows is a graph break.
    """

    _drop_name: str
    _drop_rate: float
    _drop_by: str
    _drop_streams: Streams | None  # None until the first call, if the code does not show what the block returns
    _drop_now: bool | None  # None outside a trainer's loop: draw from the global generator
    _drop_seed: int | None  # None outside a trainer's loop: draw from the global generator
    _drop_rows: tuple[int, int] | None  # numbers of rows left out and of all rows in the last call with skip="sample"

    def forward(self, *args: object, **kwargs: object) -> Any:
        block = super().forward
        if not self.training or self._drop_rate == 0:
            return block(*args, **kwargs)
        streams = self._drop_streams
        if streams is None:
            streams = probe_streams(self, self._drop_name, block, args, kwargs)
            self._drop_streams = streams
        if self._drop_by == "sample":
            args = without_cache(args)  # a cache holds all rows
            kwargs = without_cache(kwargs)
        x, rest, keywords = streams.take(args, kwargs)

        def run(x: tuple[Tensor, ...], *rest: object, **keywords: object) -> tuple[Tensor, ...]:
            positional, keywords = streams.put(x, rest, keywords)
            y = streams.unpack(block(*positional, **keywords))
            _check_shapes(x, y, f"block {self._drop_name!r}")
            return y

        if self._drop_by == "sample":
            rows = _rows_of(self, x[0])
            return streams.pack(drop_rows(run, x, self._drop_rate, *rest, rows=rows, **keywords))
        y = drop_block(run, x, self._drop_rate, *rest, parameters=self.parameters(), drop=self._drop_now, **keywords)
        return streams.pack(y)


@torch.compiler.disable
def _rows_of(block: _Droppable, x: Tensor) -> Tensor:
    """Draw the rows on which the block runs."""
    # On the device of the batch: a copy from the CPU would wait for the GPU in each block.
    rows = draw_rows(len(x), block._drop_rate, _generator(block._drop_seed, x.device), x.device)
    block._drop_rows = len(x) - len(rows), len(x)
    return rows


def _generator(seed: int | None, device: torch.device | str = "cpu") -> torch.Generator | None:
    """Return a seeded generator, or ``None`` (the global generator) without a seed."""
    if seed is None:
        return None
    return torch.Generator(device).manual_seed(seed)


class StochasticDepth(Technique):
    """Skip random residual blocks in training, without computing them.

    With ``skip="batch"``, ``seed`` and the number of the batch decide which blocks are dropped, so all ranks drop the
    same blocks. With ``skip="sample"`` the rank also counts. A resumed run continues with the same random decisions,
    and activation checkpointing repeats them.

    Args:
        rate: Probability with which the deepest block (``mode="linear"``) or every block (``mode="uniform"``) is
            dropped, at least 0 and below 1.
        mode: ``linear``: the probability grows from rate / L at the first of L blocks to ``rate`` at the last.
            ``uniform``: it is the same for all blocks.
        skip: ``batch`` drops a block for the whole batch. ``sample`` runs each block on a random subset of the rows.
        blocks: ``auto`` finds repeated residual blocks, also inside stages. Blocks that change the shape are never
            dropped, but count for the depth. Otherwise regular expressions for the dotted names of residual blocks.
        seed: Seed of the random decisions.

    Raises:
        ConfigurationError: For an argument out of range, if there are no such blocks, or if a named block is not
            residual. After the first batch, if ``skip="sample"`` leaves out no row because the rate is too small for
            the number of rows.
    """

    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.AFTER_SHARDING, Trait.DRAWS_WORK, Trait.READS_NO_WEIGHTS, Trait.REFUSES_EARLY})
    conflicts: ClassVar[dict[str, str]] = {
        "Compile(modules='network')": "each combination of dropped blocks would be a separate graph. Set modules to "
        "blocks or patterns"
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (10, "dropped blocks cost nothing; changes the result")}

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
        self._checked = False

    def transform(self, module: nn.Module) -> Report:
        found, left_out = self._blocks_of(module)
        depth = len(found)
        block_map = BlockMap(module)
        all_rates = [self.rate] * depth
        if self.mode == "linear":
            all_rates = [linear_rates(self.rate, size)[place] for place, size in block_map.depths(found)]
        rates: dict[str, float] = {}
        kinds = set()
        for (name, block), rate in zip(found, all_rates, strict=True):
            if name in left_out:
                continue
            rates[name] = rate
            kinds.add(type(block).__name__)
            mix_in(
                block,
                _Droppable,
                _drop_name=name,
                _drop_rate=rate,
                _drop_by=self.skip,
                _drop_streams=known_streams(block_map, block),
                _drop_now=None,
                _drop_seed=None,
                _drop_rows=None,
            )
        shown = list(rates.values())
        count = str(len(rates))
        if left_out:
            count += f" of {depth}"
        summary = (
            f"{count} blocks ({', '.join(sorted(kinds))}), dropped by {self.skip} at rates {shown[0]:.2f} to "
            f"{shown[-1]:.2f}"
        )
        if left_out:
            summary += f"; left out: {_reasons(left_out)}"
        return Report(
            summary,
            modules=tuple(rates),
            details={"expected_share_dropped": sum(shown) / depth, "rates": " ".join(f"{rate:.3g}" for rate in shown)},
        )

    def _blocks_of(self, module: nn.Module) -> tuple[list[tuple[str, nn.Module]], dict[str, str]]:
        """Return all blocks with their names, and by name the reasons why some cannot be dropped."""
        found = find_blocks(module, self.blocks, who="StochasticDepth")
        if self.blocks == "auto":  # frozen blocks, such as those of a teacher, do not count for the depth
            found = trained_blocks(found)
        for name, block in found:
            time_first = any(getattr(part, "batch_first", True) is False for part in block.modules())
            if self.skip == "sample" and time_first:
                raise ConfigurationError(
                    f"StochasticDepth: skip='sample' needs the batch as the first dimension, but {name!r} has time "
                    "first (batch_first=False). Build it with batch_first=True, or use skip='batch'"
                )
        block_map = BlockMap(module)
        left_out = {}
        for name, block in found:
            reason = why_not_residual(block_map, block)
            if reason is not None:
                left_out[name] = reason
        if left_out and (self.blocks != "auto" or len(left_out) == len(found)):
            raise ConfigurationError(
                f"StochasticDepth: these blocks cannot be skipped: {_reasons(left_out)}. Name other blocks with blocks="
            )
        return found, left_out

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        number = trainer.fit_loop.total_batch_idx
        rank = 0  # all ranks drop the same blocks, so that none waits for another one
        if self.skip == "sample":
            rank = data_rank(trainer)  # rows of different ranks are different samples
        for i, block in enumerate(_droppable(pl_module)):
            block._drop_seed = mix_seed(self.seed, number, i, rank)
            drop = bool(torch.rand((), generator=_generator(block._drop_seed), device="cpu") < block._drop_rate)
            block._drop_now = drop and not self.worst_case

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        counts = [block._drop_rows for block in _droppable(pl_module) if block._drop_rows]
        if self._checked or self.worst_case or not counts:
            return
        self._checked = True
        whole = sum(left_out == 0 for left_out, _ in counts)
        rows = counts[-1][1]
        if whole == len(counts):
            raise ConfigurationError(
                f"StochasticDepth: skip='sample' leaves out none of the {rows} rows of a batch at rate={self.rate}. "
                "Use skip='batch', more rows per batch or a larger rate"
            )
        if whole:
            rank_zero_info(f"StochasticDepth: {whole} of {len(counts)} blocks run on all {rows} rows of a batch")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for block in _droppable(pl_module):
            block._drop_seed = None
            block._drop_now = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)


def _droppable(root: nn.Module) -> list[_Droppable]:
    return [module for module in root.modules() if isinstance(module, _Droppable)]


def _reasons(left_out: dict[str, str]) -> str:
    """Return the names of blocks, grouped by the reasons why they cannot be dropped."""
    by_reason: dict[str, list[str]] = {}
    for name, why in left_out.items():
        by_reason.setdefault(why, []).append(name)
    return "; ".join(f"{listed(names, 6)} ({why})" for why, names in by_reason.items())
