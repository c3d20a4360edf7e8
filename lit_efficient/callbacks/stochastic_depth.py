"""Stochastic depth: train a shorter network in expectation, keep the whole one for inference.

    y = x + f(x) / (1 - p_l) with probability 1 - p_l, else x;    p_l = rate * l / L for block l = 1..L

Saves: the compute of the dropped blocks, about half the rate under the linear rule; some overfitting
Costs: nothing in memory; a rate that is too high for a short run costs quality
Source: Huang et al. (2016), https://arxiv.org/abs/1603.09382; on rows: Oquab et al. (2023), https://arxiv.org/abs/2304.07193

Multiplying a block's output by a mask, as DropPath layers do, saves no time at all: here a dropped block is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lit_efficient.data.resumable_sampler import mix_seed
from lit_efficient.errors import ConfigurationError
from lit_efficient.surgery import find_blocks, mix_in
from lit_efficient.technique import Phase, Report, Technique


def drop_block(
    block: Callable[..., Tensor],
    x: Tensor,
    rate: float,
    *args: Any,
    parameters: Iterable[Tensor] = (),
    drop: bool | None = None,
    **kwargs: Any,
) -> Tensor:
    """Skip a residual block for the whole batch with probability ``rate``; otherwise scale its residual up.

    The expectation over the draw equals ``block(x)`` exactly.

    Args:
        block: A residual block: ``block(x, ...) -> Tensor`` of the shape of ``x``.
        x: Input, [B, ...].
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
        return _ZeroGradients.apply(x, *(p for p in parameters if p.requires_grad))
    y = _same_shape(block(x, *args, **kwargs), x)
    return y if rate == 0 else x + (y - x) / (1 - rate)


def drop_rows(
    block: Callable[..., Tensor], x: Tensor, rate: float, *args: Any, rows: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Run a residual block on a random subset of the batch's rows; the others pass unchanged.

    Of B rows, ``n = max(1, round(B (1 - rate)))`` are run and their residuals scaled by B / n, so that the expectation
    over the draw equals ``block(x)`` exactly.

    Args:
        block: A residual block: ``block(x, ...) -> Tensor`` of the shape of ``x``; rows must not depend on each other.
        x: Input, [B, ...].
        rate: Share of the rows that skip the block, at least 0 and below 1.
        *args: Further arguments; every tensor in them whose first size is B is cut to the same rows.
        rows: The draw, if it is made already (:func:`draw_rows`); ``None`` draws from torch's global generator.
        **kwargs: Further keyword arguments, treated likewise.

    Source: Oquab et al. (2023), https://arxiv.org/abs/2304.07193, section 5.
    """
    batch = x.shape[0]
    rows = (draw_rows(batch, rate) if rows is None else rows).to(x.device)
    if len(rows) == batch:
        return _same_shape(block(x, *args, **kwargs), x)

    def cut(value: Any) -> Any:
        return value[rows] if isinstance(value, Tensor) and value.shape[:1] == (batch,) else value

    part = x[rows]
    residual = _same_shape(block(part, *tree_map(cut, args), **tree_map(cut, kwargs)), part) - part
    return x.index_add(0, rows, residual.to(x.dtype), alpha=batch / len(rows))


def draw_rows(batch: int, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """Which rows of a batch run: [n] indices without repetition, from a CPU generator or torch's global one."""
    return torch.randperm(batch, generator=generator)[: max(1, round(batch * (1 - rate)))]


def linear_rates(rate: float, blocks: int) -> list[float]:
    """Skip probabilities that grow linearly over the depth and end at ``rate``: ``rate * l / L`` for l = 1..L."""
    return [rate * (block + 1) / blocks for block in range(blocks)]


def _same_shape(y: Any, x: Tensor) -> Tensor:
    if isinstance(y, Tensor) and y.shape == x.shape:
        return y
    found = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
    raise ConfigurationError(
        f"StochasticDepth: a block maps {list(x.shape)} to {found}; only residual blocks can be dropped, which return "
        "one tensor of their input's shape: name them with blocks="
    )


class _ZeroGradients(torch.autograd.Function):
    """The identity on x which gives the parameters that it passes by zero gradients instead of none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class _Droppable(nn.Module):
    """Mix-in of a block. The draw of a batch is made before it, so that a recomputed forward repeats it.

    The draw for a whole batch is a plain bool: a compiled block has two graphs and no break. Rows are drawn in a break.
    """

    _drop_rate: float
    _drop_by: str
    _drop_now: bool | None  # None outside a trainer's loop: draw from torch's global generator
    _drop_seed: int | None  # likewise

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        block = super().forward
        if not self.training or self._drop_rate == 0:
            return block(x, *args, **kwargs)
        if self._drop_by == "sample":
            return drop_rows(block, x, self._drop_rate, *args, rows=_rows_of(self, x.shape[0]), **kwargs)
        parameters = tuple(self.parameters())
        return drop_block(block, x, self._drop_rate, *args, parameters=parameters, drop=self._drop_now, **kwargs)


@torch.compiler.disable
def _rows_of(block: _Droppable, batch: int) -> Tensor:
    return draw_rows(batch, block._drop_rate, _generator(block._drop_seed))


def _generator(seed: int | None) -> torch.Generator | None:
    return None if seed is None else torch.Generator().manual_seed(seed)


class StochasticDepth(Technique):
    """Drop whole residual blocks at random in training, so that their time is really saved.

    The draw of a batch is a function of ``seed`` and the number of the batch alone: all ranks drop the same blocks, a
    resumed run goes on with the same draws, and activation checkpointing recomputes what was computed.

    Args:
        rate: Probability with which the deepest block is dropped (``mode="linear"``) or every block (``"uniform"``),
            at least 0 and below 1.
        mode: ``linear``: from rate / L at the first of L blocks to ``rate`` at the last; ``uniform``: the same for all.
        skip: ``batch`` drops a block for the whole batch; ``sample`` runs each block on a random subset of the rows.
        blocks: ``auto`` finds repeated blocks; otherwise regular expressions for the dotted names of residual blocks.
        seed: Seed of the draws.

    Raises:
        ConfigurationError: For an argument out of range, without such blocks, or for one that is not residual.

    Example:
        >>> Trainer(callbacks=[StochasticDepth(rate=0.2)])  # doctest: +SKIP
    """

    phase = Phase.ARCHITECTURE
    after_sharding = True  # the class of a block changes, no parameter does
    conflicts: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        rate: float = 0.5,
        mode: str = "linear",
        skip: str = "batch",
        blocks: str | list[str] = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ConfigurationError(f"StochasticDepth: rate must be at least 0 and below 1, got {rate}")
        if mode not in ("linear", "uniform"):
            raise ConfigurationError(f"StochasticDepth: mode must be linear or uniform, got {mode!r}")
        if skip not in ("batch", "sample"):
            raise ConfigurationError(f"StochasticDepth: skip must be batch or sample, got {skip!r}")
        self.rate = rate
        self.mode = mode
        self.skip = skip
        self.blocks = blocks
        self.seed = seed

    def transform(self, module: nn.Module) -> Report:
        """Mix the drop into each block's class."""
        found = find_blocks(module, self.blocks, who="StochasticDepth")
        rates = linear_rates(self.rate, len(found)) if self.mode == "linear" else [self.rate] * len(found)
        for (_, block), rate in zip(found, rates, strict=True):
            mix_in(block, _Droppable, _drop_rate=rate, _drop_by=self.skip, _drop_now=None, _drop_seed=None)
        kinds = ", ".join(sorted({type(block).__name__ for _, block in found}))
        return Report(
            f"{len(found)} blocks ({kinds}), dropped by {self.skip} at rates {rates[0]:.2f} to {rates[-1]:.2f}",
            modules=tuple(name for name, _ in found),
            details={"expected_share_dropped": sum(rates) / len(rates)},
        )

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Set the batch's draws."""
        number = trainer.fit_loop.total_batch_idx
        rank = trainer.global_rank if self.skip == "sample" else 0
        for i, block in enumerate(_droppable(pl_module)):
            block._drop_seed = mix_seed(self.seed, number, i, rank)
            block._drop_now = bool(torch.rand((), generator=_generator(block._drop_seed)) < block._drop_rate)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Outside the loop draw from torch's global generator again."""
        for block in _droppable(pl_module):
            block._drop_seed = block._drop_now = None


def _droppable(root: nn.Module) -> list[_Droppable]:
    return [module for module in root.modules() if isinstance(module, _Droppable)]
