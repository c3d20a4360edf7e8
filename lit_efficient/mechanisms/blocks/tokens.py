"""Blocks on part of their tokens: a trial finds the arguments that belong to tokens, to select the same tokens in them.

    block(x[p], a[p], c) = block(x, a, c)[p]  for a permutation p of the tokens

An argument belongs to tokens if permuting it together with the tokens permutes the output. Shapes cannot show this:
rotary positions and masks have an axis of tokens and conditions have none, but an argument for text may happen to have
as many entries as there are tokens. The trial runs the block once for each set of shapes, on random inputs. Its weights
are random as well, because many weights are zero at first, and would hide a dependence.
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
from lit_efficient.internals.torch_dispatch import has_values
from lit_efficient.internals.torch_trees import tree_leaves, tree_map
from lit_efficient.mechanisms.blocks.residual import Streams, find_streams
from lit_efficient.models.probes.modes import evaluating
from lit_efficient.surgery import moved, own_draws, unmixed

_TOLERANCE = 1e-2  # relative to the residual; a wrong choice of arguments is wrong by about all of it
_TRIALS = 512  # largest number of combinations of arguments that are tried


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
        leaf: Index of the argument among the leaves of a call's arguments.
        dims: Axes of tokens.
        offset: Number of other entries, such as those of text, before the entries of tokens.
        rows: True if the first axis is the batch.
    """

    leaf: int
    dims: tuple[int, ...]
    offset: int
    rows: bool

    def cut(self, value: Tensor, tokens: int, kept: Tensor) -> Tensor:
        """Return the entries of the tokens at the indices ``kept`` [B, n], and all entries that belong to no token.

        Args:
            value: The argument, with entries for ``tokens`` tokens.
            tokens: Number of tokens.
            kept: Indices [B, n].
        """
        for dim in self.dims:
            inside = value.narrow(dim, self.offset, tokens)
            if self.rows:
                shape = [1] * value.ndim
                shape[0] = kept.shape[0]
                shape[dim] = kept.shape[1]
                sizes = list(inside.shape)
                sizes[dim] = kept.shape[1]
                inside = inside.gather(dim, kept.view(shape).expand(sizes))
            else:
                inside = inside.index_select(dim, kept[0])
            end = self.offset + tokens
            before = value.narrow(dim, 0, self.offset)
            after = value.narrow(dim, end, value.shape[dim] - end)
            parts = [part for part in (before, inside, after) if part.shape[dim]]
            value = inside
            if len(parts) > 1:
                value = torch.cat(parts, dim)
        return value


@dataclass(frozen=True)
class TokenAxes:
    """Arguments of a block in which tokens must be selected, to run the block on part of its tokens.

    Args:
        streams: Arguments that the outputs of the block continue.
        place: Index of the tokens among the streams.
        followers: Other arguments that belong to tokens.
    """

    streams: Streams
    place: int
    followers: tuple[Follower, ...]

    @property
    def shared(self) -> bool:
        """True if all rows of a batch must keep the same tokens, because they share an argument with a token axis."""
        return not all(follower.rows for follower in self.followers)

    def put(self, values: Sequence[Tensor], tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the streams ``values`` with ``tokens`` in the place of their tokens."""
        return self.together(tokens, self.others(values))

    def others(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the streams without the tokens."""
        return (*values[: self.place], *values[self.place + 1 :])

    def together(self, tokens: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tokens and other streams in their order."""
        return (*others[: self.place], tokens, *others[self.place :])

    def cut(self, arguments: object, tokens: int, kept: Tensor) -> Any:
        """Select the tokens ``kept`` [B, n] in ``arguments``: arguments and keyword arguments without streams."""
        return _cut(arguments, self.followers, tokens, kept)


def _cut(arguments: object, followers: Sequence[Follower], tokens: int, kept: Tensor) -> Any:
    by_leaf = {follower.leaf: follower for follower in followers}
    count = itertools.count()

    def cut(leaf: Any) -> Any:
        follower = by_leaf.get(next(count))
        if follower is None:
            return leaf
        return follower.cut(leaf, tokens, kept)

    return tree_map(cut, arguments)


def find_axes(
    block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], what: str
) -> TokenAxes:
    """Return the arguments of a block that belong to its tokens.

    Args:
        block: Block with its weights.
        forward: The block's own forward, without mix-ins.
        args: Arguments of a call. Only the shapes of floating-point and boolean tensors matter.
        kwargs: Keyword arguments of the call.
        what: Name of the block, for errors.

    Raises:
        ConfigurationError: If the first stream is not tokens [B, N, D], or if no choice of arguments permutes the
            output.
    """
    probe = _Probe(block, forward)
    with own_draws(0), torch.no_grad(), evaluating(block):
        if probe.real:
            args = probe.random(args)
            kwargs = probe.random(kwargs)
        output = probe(args, kwargs)
        own: Any = unmixed(block)  # its source names the outputs
        streams = find_streams(MethodType(own.forward, block), args, kwargs, output)
        values, rest, named = streams.take(args, kwargs)
        first = [position for position, _ in filter(None, streams.sources)]
        place = first.index(min(first))
        x = values[place]
        if x.ndim != 3 or x.shape[1] < 2:
            raise ConfigurationError(f"{what} runs on {list(x.shape)}, not on tokens [B, N, D] with N of at least 2")
        beside = sum(value.shape[1] for i, value in enumerate(values) if i != place and value.ndim == 3)
        choices = [[None, *_followers(i, leaf, x, beside)] for i, leaf in enumerate(tree_leaves((rest, named)))]
        trials = []
        for choice in itertools.islice(itertools.product(*choices), _TRIALS):
            trials.append([follower for follower in choice if follower is not None])
        # Few arguments first: the others are then not needed. Arguments of each row first: rows may then differ.
        trials.sort(key=lambda trial: (len(trial), sum(not follower.rows for follower in trial)))
        for followers in trials:
            axes = TokenAxes(streams, place, tuple(followers))
            if probe.agrees(axes, values, rest, named, streams.unpack(output)):
                return axes
    raise ConfigurationError(
        f"{what} does not compute the same for permuted tokens, even if its other arguments are permuted as well. A "
        "block with convolutions, windows, causal attention or its own positions cannot run on part of its tokens. "
        "Leave it out"
    )


def _followers(leaf: int, value: object, x: Tensor, beside: int) -> list[Follower]:
    """Return the ways in which the shape of an argument allows it to belong to the tokens ``x`` [B, N, D].

    Args:
        leaf: Index of the argument among the leaves.
        value: The argument.
        x: Tokens.
        beside: Number of tokens in other streams, which may precede the entries of these tokens.
    """
    if not isinstance(value, Tensor):
        return []
    batch, tokens = x.shape[:2]
    found = []
    for offset in dict.fromkeys((0, beside)):
        sizes = {tokens + beside}
        if offset == 0:
            sizes.add(tokens)
        for rows in (True, False):
            if rows and value.shape[:1] != (batch,):
                continue
            dims = [dim for dim in range(int(rows), value.ndim) if value.shape[dim] in sizes]
            found += [Follower(leaf, (dim,), offset, rows) for dim in dims]
            if len(dims) > 1:  # such as a mask of pairs of tokens
                found.append(Follower(leaf, tuple(dims), offset, rows))
    return found


class _Probe:
    """Block that runs with random weights. Its own weights do not change."""

    def __init__(self, block: nn.Module, forward: Callable[..., object]) -> None:
        self.forward = forward
        self.caller = _Caller(block, forward)
        tensors = dict(self.caller.named_parameters())
        self.real = all(map(has_values, tensors.values()))
        self.weights: dict[str, Tensor] = {}
        if self.real:  # not on the meta device
            self.weights = {name: _random(p) for name, p in tensors.items() if p.is_floating_point()}
            self.weights |= {name: b.float() for name, b in self.caller.named_buffers() if b.is_floating_point()}

    def __call__(self, args: Sequence[object], kwargs: dict[str, object]) -> object:
        if not self.real:
            return self.forward(*args, **kwargs)
        device = next((leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return functional_call(self.caller, self.weights, tuple(args), kwargs)

    def random(self, arguments: object) -> Any:
        """Return arguments with random values, because real ones may be equal for all tokens."""

        def draw(leaf: Any) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.dtype == torch.bool:
                return moved(torch.rand(leaf.shape) > 0.2, leaf.device)
            if leaf.is_floating_point():
                return moved(torch.randn(leaf.shape), leaf.device)
            return leaf

        return tree_map(draw, arguments)

    def agrees(
        self, axes: TokenAxes, values: tuple[Tensor, ...], rest: Any, named: Any, output: tuple[Tensor, ...]
    ) -> bool:
        """Return whether a permutation of tokens and followers permutes the output, without changing other streams."""
        x = values[axes.place]
        batch, tokens = x.shape[:2]
        if axes.shared:
            orders = [_permutation(tokens)] * batch
        else:
            orders = [_permutation(tokens) for _ in range(batch)]
        order = moved(torch.stack(orders), x.device)
        if not self.real:
            order = order[:, : (tokens + 1) // 2]  # without values to compare, test that part of the tokens fits
        rest, named = axes.cut((rest, named), tokens, order)
        args, kwargs = axes.streams.put(axes.put(values, gather_tokens(x, order)), rest, named)
        try:
            got = axes.streams.unpack(self(args, kwargs))
        except RuntimeError:  # sizes do not fit
            if self.real:
                raise
            return False
        wanted = axes.put(output, gather_tokens(output[axes.place], order))
        if not self.real:
            return [one.shape for one in got] == [one.shape for one in wanted]
        added = (output[axes.place] - x).abs().max()
        return all(bool((one - other).abs().max() <= _TOLERANCE * added) for one, other in zip(got, wanted))


class _Caller(nn.Module):
    """Module that calls a function which uses the weights of a block."""

    def __init__(self, block: nn.Module, forward: Callable[..., object]) -> None:
        super().__init__()
        self.block = block
        self.run = forward

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self.run(*args, **kwargs)


def _random(parameter: Tensor) -> Tensor:
    """Return normal random numbers, scaled so that a linear layer keeps the size of its input."""
    spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0
    return moved(torch.randn(parameter.shape) * spread, parameter.device)


def _permutation(count: int) -> Tensor:
    """Return a random permutation that is not the identity."""
    order = torch.randperm(count)
    if bool((order == torch.arange(count)).all()):
        return order.roll(1)
    return order
