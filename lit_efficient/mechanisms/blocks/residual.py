"""Residual blocks from outside: which of their arguments their outputs continue, and which blocks cannot be skipped.

A block that is skipped must return what it was given, in the form in which it would have returned it. For most blocks
that is the first argument; a block of two streams (image and text, say) returns a tuple, in an order of its own.
"""

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_fx import adds_to_input
from lit_efficient.mechanisms.blocks.block_map import BlockMap
from lit_efficient.surgery import is_sharded, weightless


@dataclass(frozen=True)
class Streams:
    """Where each element of a block's output comes from."""

    # for each element the position and the name of the argument that it continues, ``None`` for a ``None``
    sources: tuple[tuple[int, str] | None, ...]
    bare: bool  # whether the block returns one tensor instead of a tuple

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Tensor, ...], list[Any], dict]:
        """The streams of a call, and its arguments without them."""
        rest, named, streams = list(args), dict(kwargs), []
        for position, name in self._places():
            if position < len(rest):
                streams.append(rest[position])
                rest[position] = None
            else:
                streams.append(named[name])
                named[name] = None
        return tuple(streams), rest, named

    def put(
        self, streams: tuple[Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call with the streams in their places."""
        rest, named = list(args), dict(kwargs)
        for (position, name), stream in zip(self._places(), streams, strict=True):
            if position < len(rest):
                rest[position] = stream
            else:
                named[name] = stream
        return rest, named

    def unpack(self, output: Any) -> tuple[Tensor, ...]:
        """The streams in a block's output."""
        elements = (output,) if isinstance(output, Tensor) else output
        if self.bare != isinstance(output, Tensor) or len(elements) != len(self.sources):
            raise ConfigurationError(f"a block returned {_form(output)} where it returned another form before")
        return tuple(element for element, source in zip(elements, self.sources, strict=True) if source is not None)

    def pack(self, streams: tuple[Tensor, ...]) -> Any:
        """The output that holds the streams."""
        if self.bare:
            return streams[0]
        remaining = iter(streams)
        return tuple(None if source is None else next(remaining) for source in self.sources)

    def _places(self) -> list[tuple[int, str]]:
        return [source for source in self.sources if source is not None]


def known_streams(block_map: BlockMap, block: nn.Module) -> Streams | None:
    """The streams of a block whose code adds to its first argument and returns the sum, or ``None``: a call shows them.

    So must one of a block with a stride: the sum may be smaller than the argument.
    """
    strides: list[Any] = [getattr(part, "stride", 1) for part in block.modules()]
    if any(max(stride) > 1 if isinstance(stride, tuple) else stride != 1 for stride in strides):
        return None
    forward = block_map.forward(block)
    if not forward.adds or not forward.returns_one:
        return None
    return Streams(((0, next(iter(inspect.signature(block.forward).parameters))),), bare=True)


def find_streams(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Streams:
    """The streams of a block, from one call of its ``forward``.

    One tensor continues the first tensor of the arguments. Of several, each continues the argument of the same name in
    the ``return`` statement, or else the only argument of its shape.

    Raises:
        ConfigurationError: If a tensor of the output continues no argument.
    """
    elements = (output,) if isinstance(output, Tensor) else output
    if not isinstance(elements, tuple) or any(e is not None and not isinstance(e, Tensor) for e in elements):
        raise ConfigurationError(f"a block returns {_form(output)}, not a tensor or a tuple of tensors")
    names = list(inspect.signature(forward).parameters)
    bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    given = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
    several = sum(element is not None for element in elements) > 1
    returned = _returned_names(forward, len(elements)) if several else [""] * len(elements)
    sources: list[tuple[int, str] | None] = []
    for element, name in zip(elements, returned, strict=True):
        if element is None:
            sources.append(None)
            continue
        fits = [key for key, value in given.items() if value.shape == element.shape]
        source = name if name in fits else fits[0] if fits and (not several or len(fits) == 1) else None
        if source is None or (not several and source != next(iter(given))):
            shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in given.items())
            raise ConfigurationError(
                f"a block maps {shapes} to {_form(output)}; only residual blocks can be dropped, which return "
                "tensors of their inputs' shapes: name them with blocks="
            )
        sources.append((names.index(source), source))
    return Streams(tuple(sources), bare=isinstance(output, Tensor))


def _returned_names(forward: Callable[..., Any], count: int) -> list[str]:
    """Names in the last ``return a, b`` of a function; empty ones if its source does not say."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError, TypeError):
        return [""] * count
    returns = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    tuples = [value.elts for value in returns if isinstance(value, ast.Tuple) and len(value.elts) == count]
    return [getattr(element, "id", "") for element in tuples[-1]] if tuples else [""] * count


def _form(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor {list(output.shape)}"
    if isinstance(output, tuple):
        return f"a tuple ({', '.join('None' if item is None else _form(item) for item in output)})"
    return f"a {type(output).__name__}"


@torch.compiler.disable
def probe_streams(
    block: nn.Module, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Streams:
    """The streams of a block, from a call that leaves no trace: no gradient, no buffer, no random number is changed."""
    kept = {key: buffer.clone() for key, buffer in block.named_buffers()}
    devices = {value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(devices):
        output = forward(*without_cache(args), **without_cache(kwargs))
        for key, buffer in block.named_buffers():
            buffer.copy_(kept[key])
    try:
        return find_streams(forward, args, kwargs, output)
    except ConfigurationError as error:
        raise ConfigurationError(f"StochasticDepth: block {name!r}: {error}") from error


def without_cache(arguments: Any) -> Any:
    """A call's arguments without the cache of keys and values, which a block run in part would fill in part.

    Raises:
        ConfigurationError: If the cache holds something already, so that leaving it out would change the result.
    """
    if isinstance(arguments, dict):
        kept = {name: _no_cache(value) for name, value in arguments.items()}
        return {**kept, "use_cache": False} if "use_cache" in kept else kept
    return tuple(_no_cache(value) for value in arguments)


def _no_cache(value: Any) -> Any:
    if not callable(getattr(value, "get_seq_length", None)):
        return value
    if value.get_seq_length():
        raise ConfigurationError(
            "a block that trains on part of the batch was given a cache of keys and values that is not empty"
        )
    return None


def why_not_residual(block_map: BlockMap, block: nn.Module) -> str | None:
    """Why a block cannot be skipped, or ``None``: what it returns is not its input plus something, or of another shape.

    A block that needs more than one argument shows its shape in its first call only.
    """
    if not block_map.forward(block).adds and adds_to_input(block, whole=True) is False:
        return "it changes its input before it adds to it, or adds nothing"
    return "it changes the shape" if _changes_shape(block) else None


class _Adding(TorchFunctionMode):
    """Notes that a tensor cannot be added to the input: they differ in size."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x, self.misfits = x, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return function(*args, **(kwargs or {}))
        except RuntimeError:
            self.misfits |= "add" in getattr(function, "__name__", "") and any(a is self.x for a in args)
            raise


def _changes_shape(block: nn.Module) -> bool:
    """Whether a copy without numbers says so, which is given images, tokens and rows as wide as its first layer."""
    parameters = list(inspect.signature(block.forward).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(needed) != 1 or any(map(is_sharded, block.parameters())):
        return False
    widths = [getattr(part, key, None) for part in block.modules() for key in _WIDTHS]
    width = next((w if isinstance(w, int) else w[-1] for w in widths if w), 0)
    tensors = [*block.parameters(), *block.buffers()]
    twin = copy.deepcopy(block, {id(tensor): weightless(tensor) for tensor in tensors})
    for shape in ((2, width, 56, 56), (2, 56, 56, width), (2, 50, width), (2, width)):
        x = torch.empty(shape, device="meta")
        adding = _Adding(x)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("meta"), adding:
                output = twin(x)
            return isinstance(output, Tensor) and output.shape != shape
        except Exception:  # code of anybody, given what it may not take
            if adding.misfits:
                return True
    return False


_WIDTHS = ("in_channels", "in_features", "normalized_shape", "num_features", "num_channels")
