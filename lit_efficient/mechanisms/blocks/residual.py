"""Residual streams of blocks: the arguments that a block's outputs continue, and blocks that cannot be skipped.

A skipped block must return its input in the form of its output. For most blocks this input is the first argument. A
block with two streams, such as image and text, returns a tuple, whose order may differ from that of the arguments.
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
from lit_efficient.surgery import computed, is_sharded, weightless


@dataclass(frozen=True)
class Streams:
    """Correspondence between the outputs of a block and its arguments."""

    # For each element of the output: position and name of the argument that it continues, or ``None`` for a ``None``.
    sources: tuple[tuple[int, str] | None, ...]
    bare: bool  # True if the block returns a tensor instead of a tuple

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Tensor, ...], list[Any], dict]:
        """Return the streams of a call, and its arguments with ``None`` in their places."""
        rest = list(args)
        named = dict(kwargs)
        streams = []
        for position, name in self._places():
            if position < len(rest):
                streams.append(rest[position])
                rest[position] = None
            else:
                streams.append(named[name])
                named[name] = None
        return tuple(streams), rest, named

    def put(
        self, streams: tuple[Tensor, ...], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[list[object], dict[str, object]]:
        """Return the arguments of a call with the streams in their places."""
        rest = list(args)
        named = dict(kwargs)
        for (position, name), stream in zip(self._places(), streams, strict=True):
            if position < len(rest):
                rest[position] = stream
            else:
                named[name] = stream
        return rest, named

    def unpack(self, output: Any) -> tuple[Tensor, ...]:
        """Return the streams in a block's output.

        Raises:
            ConfigurationError: If the output has another form than in the call that has shown the streams.
        """
        elements = output
        if isinstance(output, Tensor):
            elements = (output,)
        if self.bare != isinstance(output, Tensor) or len(elements) != len(self.sources):
            raise ConfigurationError(f"a block returned {_form(output)}, but another form of output before")
        return tuple(element for element, source in zip(elements, self.sources, strict=True) if source is not None)

    def pack(self, streams: tuple[Tensor, ...]) -> Any:
        """Return an output that consists of the streams."""
        if self.bare:
            return streams[0]
        remaining = iter(streams)
        return tuple(None if source is None else next(remaining) for source in self.sources)

    def _places(self) -> list[tuple[int, str]]:
        return [source for source in self.sources if source is not None]


def known_streams(block_map: BlockMap, block: nn.Module) -> Streams | None:
    """Return the stream of a block whose code adds to its first argument and returns the sum.

    The result is ``None`` if only a call can show the streams. This includes blocks with a stride, whose sum
    may be smaller than the argument.
    """
    strides: list[object] = [getattr(part, "stride", 1) for part in block.modules()]
    if any(max(stride) > 1 if isinstance(stride, tuple) else stride != 1 for stride in strides):
        return None
    forward = block_map.forward(block)
    if not forward.adds or not forward.returns_one:
        return None
    return Streams(((0, next(iter(inspect.signature(block.forward).parameters))),), bare=True)


def find_streams(
    forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], output: object
) -> Streams:
    """Return the streams of a block, from a call of its ``forward`` and its ``output``.

    If the output is one tensor, it continues the first tensor of the arguments. If it has several tensors, each
    continues the argument with its name in the ``return`` statement, or else the only argument of its shape.

    Raises:
        ConfigurationError: If a tensor of the output continues no argument.
    """
    elements = output
    if isinstance(output, Tensor):
        elements = (output,)
    if not isinstance(elements, tuple) or any(e is not None and not isinstance(e, Tensor) for e in elements):
        raise ConfigurationError(f"a block returns {_form(output)}, not a tensor or a tuple of tensors")
    names = list(inspect.signature(forward).parameters)
    bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    given = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
    several = sum(element is not None for element in elements) > 1
    returned = [""] * len(elements)
    if several:
        returned = _returned_names(forward, len(elements))
    sources: list[tuple[int, str] | None] = []
    for element, name in zip(elements, returned, strict=True):
        if element is None:
            sources.append(None)
            continue
        fits = [key for key, value in given.items() if value.shape == element.shape]
        source = None
        if name in fits:
            source = name
        elif fits and (not several or len(fits) == 1):
            source = fits[0]
        if source is None or (not several and source != next(iter(given))):
            shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in given.items())
            raise ConfigurationError(
                f"a block maps {shapes} to {_form(output)}. Only residual blocks can be dropped, which return "
                "tensors with the shapes of their inputs. Name such blocks with blocks="
            )
        sources.append((names.index(source), source))
    return Streams(tuple(sources), bare=isinstance(output, Tensor))


def _returned_names(forward: Callable[..., object], count: int) -> list[str]:
    """Return the names in the last ``return a, b`` of a function, or empty names if its source does not show them."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError, TypeError):
        return [""] * count
    returns = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    tuples = [value.elts for value in returns if isinstance(value, ast.Tuple) and len(value.elts) == count]
    if not tuples:
        return [""] * count
    return [getattr(element, "id", "") for element in tuples[-1]]


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
    """Run a block and return its streams. The call changes no gradient, buffer or random state.

    Raises:
        ConfigurationError: As in :func:`find_streams`.
    """
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
    """Return a call's arguments without the cache of keys and values, which part of a batch must not fill.

    Raises:
        ConfigurationError: If the cache is not empty, so that leaving it out would change the result.
    """
    if isinstance(arguments, dict):
        kept = {name: _no_cache(value) for name, value in arguments.items()}
        if "use_cache" in kept:
            kept["use_cache"] = False
        return kept
    return tuple(_no_cache(value) for value in arguments)


def _no_cache(value: Any) -> object:
    if not callable(getattr(value, "get_seq_length", None)):
        return value
    if value.get_seq_length():
        raise ConfigurationError(
            "a block that trains on part of the batch has a cache of keys and values that is not empty. Call the "
            "network without a cache"
        )
    return None


def why_not_residual(block_map: BlockMap, block: nn.Module) -> str | None:
    """Return the reason why a block cannot be skipped, or ``None``.

    A block must return its input plus a term of the same shape. For a block with more than one required argument, only
    its first call shows the shape.
    """
    if not block_map.forward(block).adds and adds_to_input(block, whole=True) is False:
        return "it changes its input before the addition, or adds nothing to it"
    if block_map.once("changes the shape", block, _changes_shape):
        return "it changes the shape"
    return None


class _Adding(TorchFunctionMode):
    """Mode that records whether an addition to the input fails because of its size."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x
        self.misfits = False

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        try:
            return function(*args, **(kwargs or {}))
        except RuntimeError:
            self.misfits |= "add" in getattr(function, "__name__", "") and any(a is self.x for a in args)
            raise


def _changes_shape(block: nn.Module) -> bool:
    """Return whether a copy of the block on the meta device changes the shape of images, tokens or rows.

    The inputs have as many channels or features as the first layer of the block.
    """
    parameters = list(inspect.signature(block.forward).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(needed) != 1 or any(map(is_sharded, block.parameters())):
        return False
    widths = [getattr(part, key, None) for part in block.modules() for key in _WIDTHS]
    width = next((w if isinstance(w, int) else w[-1] for w in widths if w), 0)
    tensors = [*block.parameters(), *block.buffers()]
    twin = copy.deepcopy(block, computed(block) | {id(tensor): weightless(tensor) for tensor in tensors})
    for shape in ((2, width, 56, 56), (2, 56, 56, width), (2, 50, width), (2, width)):
        x = torch.empty(shape, device="meta")
        adding = _Adding(x)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("meta"), adding:
                output = twin(x)
            return isinstance(output, Tensor) and output.shape != shape
        except Exception:  # the block may not support this shape
            if adding.misfits:
                return True
    return False


_WIDTHS = ("in_channels", "in_features", "normalized_shape", "num_features", "num_channels")
