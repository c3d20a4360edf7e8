"""Blocks on part of their tokens: a trial finds the arguments that belong to tokens, which are then cut alike.

    block(x[p], a[p], c) = block(x, a, c)[p]  for a permutation p of the tokens

Rotary positions and masks have an axis of tokens, conditions have none, and an argument for text may happen to have as
many entries as there are tokens. The block is therefore run once for each set of shapes, on random inputs with random
weights (many weights are zero at first, and would show nothing). An argument belongs to tokens if permuting it with the
tokens permutes the output.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_fake import has_values
from lit_efficient.internals.torch_trees import tree_leaves, tree_map
from lit_efficient.mechanisms.blocks.residual import Streams, find_streams
from lit_efficient.models.probes.modes import evaluating
from lit_efficient.surgery import moved, own_draws, unmixed

_TOLERANCE = 1e-2  # relative to the residual; a wrong choice of arguments is wrong by about all of it
_TRIALS = 512


def gather_tokens(x: Tensor, kept: Tensor) -> Tensor:
    """Return the tokens [B, n, D] of ``x`` [B, N, D] at the indices ``kept`` [B, n]."""
    return x.gather(1, kept[..., None].expand(-1, -1, x.shape[-1]))


def scatter_tokens(x: Tensor, kept: Tensor, tokens: Tensor) -> Tensor:
    """Return ``x`` [B, N, D] with ``tokens`` [B, n, D] at the indices ``kept`` [B, n]."""
    return x.to(tokens.dtype).scatter(1, kept[..., None].expand(-1, -1, x.shape[-1]), tokens)


@dataclass(frozen=True)
class Follower:
    """Argument with one or more entries per token.

    Args:
        leaf: Its index among the leaves of a call's arguments.
        dims: Its axes of tokens.
        offset: Number of entries before those of the tokens, such as those of text.
        rows: Whether its first axis is the batch.
    """

    leaf: int
    dims: tuple[int, ...]
    offset: int
    rows: bool

    def cut(self, value: Tensor, tokens: int, kept: Tensor) -> Tensor:
        """Return the entries of the tokens ``kept`` [B, n] out of ``tokens``, with the entries that belong to no
        token.
        """
        for dim in self.dims:
            end = self.offset + tokens
            inside = value.narrow(dim, self.offset, tokens)
            if self.rows:
                shape = [1] * value.ndim
                shape[0], shape[dim] = kept.shape
                sizes = [*inside.shape]
                sizes[dim] = kept.shape[1]
                inside = inside.gather(dim, kept.view(shape).expand(sizes))
            else:
                inside = inside.index_select(dim, kept[0])
            before, after = value.narrow(dim, 0, self.offset), value.narrow(dim, end, value.shape[dim] - end)
            parts = [part for part in (before, inside, after) if part.shape[dim]]
            value = torch.cat(parts, dim) if len(parts) > 1 else inside
        return value


@dataclass(frozen=True)
class TokenAxes:
    """Arguments of a block that must be cut to run it on part of its tokens.

    Args:
        streams: Arguments that its outputs continue.
        place: Index of the tokens among the streams.
        followers: Other arguments that belong to tokens.
    """

    streams: Streams
    place: int
    followers: tuple[Follower, ...]

    @property
    def shared(self) -> bool:
        """Return whether all rows of a batch must keep the same tokens, because they share an argument that belongs to
        tokens.
        """
        return not all(follower.rows for follower in self.followers)

    def put(self, values: Sequence[Tensor], tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the streams with other tokens."""
        return self.together(tokens, self.others(values))

    def others(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the streams besides the tokens."""
        return (*values[: self.place], *values[self.place + 1 :])

    def together(self, tokens: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tokens and other streams in their order."""
        return (*others[: self.place], tokens, *others[self.place :])

    def cut(self, arguments: Any, tokens: int, kept: Tensor) -> Any:
        """Return arguments and keyword arguments, without streams, cut to the tokens ``kept``."""
        return _cut(arguments, self.followers, tokens, kept)


def _cut(arguments: Any, followers: Sequence[Follower], tokens: int, kept: Tensor) -> Any:
    by_leaf = {follower.leaf: follower for follower in followers}
    count = itertools.count()

    def cut(leaf: Any) -> Any:
        follower = by_leaf.get(next(count))
        return leaf if follower is None else follower.cut(leaf, tokens, kept)

    return tree_map(cut, arguments)


def find_axes(
    block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], what: str
) -> TokenAxes:
    """Find the arguments of a block that belong to its tokens.

    Args:
        block: Holds the weights.
        forward: The function to call: the block's own forward, without mix-ins.
        args: Arguments of a call. Only integers matter by their value.
        kwargs: Keyword arguments of the call.
        what: Name of the block, for the errors.

    Raises:
        ConfigurationError: If the stream is not tokens [B, N, D], or no choice of arguments permutes the output with
            them.
    """
    probe = _Probe(block, forward)
    with own_draws(0), torch.no_grad(), evaluating(block):
        if probe.real:
            args, kwargs = probe.random(args), probe.random(kwargs)
        output = probe(args, kwargs)
        own: Any = unmixed(block)  # whose code names what it returns
        streams = find_streams(MethodType(own.forward, block), args, kwargs, output)
        values, rest, named = streams.take(args, kwargs)
        first = [position for position, _ in filter(None, streams.sources)]
        place = first.index(min(first))
        x = values[place]
        if x.ndim != 3 or x.shape[1] < 2:
            raise ConfigurationError(f"{what} runs on {list(x.shape)}, not on tokens [B, N, D] with N of at least 2")
        beside = sum(value.shape[1] for i, value in enumerate(values) if i != place and value.ndim == 3)
        choices = [[None, *_followers(i, leaf, x, beside)] for i, leaf in enumerate(tree_leaves((rest, named)))]
        trials = [[one for one in trial if one] for trial in itertools.islice(itertools.product(*choices), _TRIALS)]
        for followers in sorted(trials, key=lambda trial: (len(trial), sum(not one.rows for one in trial))):
            axes = TokenAxes(streams, place, tuple(followers))
            if probe.agrees(axes, values, rest, named, streams.unpack(output)):
                return axes
    raise ConfigurationError(
        f"{what} does not compute the same of its tokens in another order, whatever of its arguments is put in that "
        "order, too: with convolutions, windows, causal attention or places of its own it cannot run on some of them"
    )


def _followers(leaf: int, value: Any, x: Tensor, beside: int) -> list[Follower]:
    if not isinstance(value, Tensor):
        return []
    batch, tokens = x.shape[:2]
    found = []
    for offset in {0: None, beside: None}:
        sizes = (tokens, tokens + beside) if offset == 0 else (tokens + beside,)
        for rows in (True, False):
            if rows and value.shape[:1] != (batch,):
                continue
            dims = [dim for dim in range(int(rows), value.ndim) if value.shape[dim] in sizes]
            several = [tuple(dims)] if len(dims) > 1 else []
            found += [Follower(leaf, dims, offset, rows) for dims in [*((dim,) for dim in dims), *several]]
    return found


class _Probe:
    """A block with random weights, which are used in its calls only."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.caller = _Caller(block, forward)
        tensors = dict(self.caller.named_parameters())
        self.real = all(map(has_values, tensors.values()))
        self.weights = {name: _random(p) for name, p in tensors.items() if p.is_floating_point()} if self.real else {}
        held = self.caller.named_buffers() if self.real else ()
        self.weights |= {name: b.float() for name, b in held if b.is_floating_point()}

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if not self.real:
            return self.forward(*args, **kwargs)
        device = next((leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return functional_call(self.caller, self.weights, tuple(args), kwargs)

    def random(self, arguments: Any) -> Any:
        """Return arguments with random values, because real ones may be equal for all tokens."""

        def draw(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.dtype == torch.bool:
                return moved(torch.rand(leaf.shape) > 0.2, leaf.device)
            return moved(torch.randn(leaf.shape), leaf.device) if leaf.is_floating_point() else leaf

        return tree_map(draw, arguments)

    def agrees(
        self, axes: TokenAxes, values: tuple[Tensor, ...], rest: Any, named: Any, output: tuple[Tensor, ...]
    ) -> bool:
        """Return whether a permutation of the tokens and their followers permutes the output, and leaves other streams
        unchanged.
        """
        x = values[axes.place]
        batch, tokens = x.shape[:2]
        orders = [_disorder(tokens) for _ in range(1 if axes.shared else batch)]
        order = moved(torch.stack(orders * (batch if axes.shared else 1)), x.device)
        if not self.real:
            order = order[:, : (tokens + 1) // 2]  # no values to compare: a part must fit
        rest, named = axes.cut((rest, named), tokens, order)
        args, kwargs = axes.streams.put(axes.put(values, gather_tokens(x, order)), rest, named)
        try:
            got = axes.streams.unpack(self(args, kwargs))
        except RuntimeError:  # of sizes that do not fit
            if self.real:
                raise
            return False
        wanted = axes.put(output, gather_tokens(output[axes.place], order))
        if not self.real:
            return [one.shape for one in got] == [one.shape for one in wanted]
        added = (output[axes.place] - x).abs().max()
        return all(bool((one - other).abs().max() <= _TOLERANCE * added) for one, other in zip(got, wanted))


class _Caller(nn.Module):
    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.run = block, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _random(parameter: Tensor) -> Tensor:
    spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0
    return moved(torch.randn(parameter.shape) * spread, parameter.device)


def _disorder(count: int) -> Tensor:
    order = torch.randperm(count)
    return order.roll(1) if bool((order == torch.arange(count)).all()) else order
