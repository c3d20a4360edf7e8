"""Random weights of a network larger than a host: noted as it is built, drawn tensor by tensor where each is kept.

    with DeferredDraws() as draws: network = make()      # large tensors on the meta device
    draws.note(network)  ->  shard  ->  to_empty  ->  draws.fill(network)

While the network is built, what it does to each large tensor is noted with the state of the generator before, and what
would be drawn is drawn for nothing and freed, so that the generator goes on as ever. Filling it in repeats that for one
tensor after the other and keeps this process's slice: the weights are those of a network that was built as usual, bit
for bit, on the CPU. Costs: each tensor is drawn twice, by every process; in memory one tensor at a time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_dispatch import (
    TorchDispatchMode,
    changes_arguments,
    no_dispatch_modes,
    storage_id,
    truncated_draws,
)
from lit_efficient.internals.torch_shards import own_slices
from lit_efficient.internals.torch_trees import tree_leaves, tree_map
from lit_efficient.surgery import is_sharded, local

_ATEN = torch.ops.aten
_MAKE = {_ATEN.empty, _ATEN.empty_strided, _ATEN.zeros, _ATEN.ones, _ATEN.full, _ATEN.randn, _ATEN.rand}
_ASKED = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SMALL = 1024  # elements; what is smaller is made at once: code may ask for its numbers


class _Ordinary(TorchFunctionMode):
    """What stands on the meta device says that it does not: initialisers of torch's do nothing there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if func == _ASKED else func(*args, **(kwargs or {}))


class DeferredDraws(TorchDispatchMode):
    """Build a network without memory for its large tensors; :meth:`fill` gives it the numbers that it would have."""

    def __init__(self) -> None:
        super().__init__()
        self._notes: list[tuple[Any, Any, Any, Any, Tensor | None]] = []  # operator, arguments, result, random state
        self._named: dict[str, Tensor] = {}
        self._beside = ExitStack()

    def __enter__(self) -> "DeferredDraws":
        self._beside.enter_context(truncated_draws(self._truncated))
        self._beside.enter_context(_Ordinary())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._beside.close()

    def _truncated(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not _is_meta(tensor):
                return draw(tensor, *args, **kwargs)
            state = _generator(kwargs).get_state()
            with no_dispatch_modes():
                draw(_scratch(tensor), *args, **kwargs)
            self._notes.append((draw, (tensor.detach(), *args), kwargs, tensor.detach(), state))
            return tensor

        return truncated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        makes = getattr(func, "overloadpacket", None) in _MAKE and not any(map(_is_meta, tree_leaves((args, kwargs))))
        if makes and kwargs.get("device") in (None, torch.device("cpu")) and _elements(func, args) >= _SMALL:
            kwargs["device"] = torch.device("meta")
        result = func(*args, **kwargs)
        if not any(map(_is_meta, tree_leaves((args, kwargs, result)))):
            return result
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = _generator(kwargs).get_state()
            func(*tree_map(_scratch, args), **_on_cpu(tree_map(_scratch, kwargs)))
        self._notes.append((func, args, kwargs, result, state))
        return result

    def note(self, module: nn.Module) -> None:
        """Keep what stands for each parameter and buffer of a module, before it is sharded or moved."""
        named = _tensors(module)
        self._named = {name: t.detach() if _is_meta(t) else t.detach().clone() for name, t in named.items()}

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Give the module its numbers, in place: to each process its own slices of what is sharded.

        Raises:
            ConfigurationError: For a tensor that was not noted, or has no memory, or is sharded such that no process
                has a slice of it.
        """
        for name, tensor in _tensors(module).items():
            if name not in self._named or tensor.device.type == "meta":
                lacks = "was not there when it was noted" if name not in self._named else "is on the meta device"
                raise ConfigurationError(f"DeferredDraws: {name!r} {lacks}: note after building, fill after to_empty")
            whole = self._drawn(self._named[name])
            part = own_slices(tensor) if is_sharded(tensor) else ()
            if part is None:
                raise ConfigurationError(f"DeferredDraws: {name!r} is sharded in strides, not in slices")
            local(tensor).copy_(whole[part])

    def _drawn(self, wanted: Tensor) -> Tensor:
        """What would stand in a tensor."""
        if not _is_meta(wanted):
            return wanted
        needed, chosen = {_storage(wanted)}, []
        for note in reversed(self._notes):
            func, args, kwargs, result, _ = note
            written = [t for t in tree_leaves((args, kwargs)) if _is_meta(t)] if changes_arguments(func) else []
            if any(_storage(t) in needed for t in [*written, *filter(_is_meta, tree_leaves(result))]):
                chosen.append(note)
                needed |= {_storage(t) for t in tree_leaves((args, kwargs)) if _is_meta(t)}
        real: dict[int, Tensor] = {}

        def realized(tensor: Any) -> Any:
            if not _is_meta(tensor):
                return tensor
            place = tensor.size(), tensor.stride(), tensor.storage_offset()
            return torch.as_strided(real[_storage(tensor)], *place).view(tensor.dtype)

        for func, args, kwargs, result, state in reversed(chosen):
            given = _on_cpu(tree_map(realized, kwargs))
            if state is not None:
                given = given | ({"generator": torch.Generator()} if "generator" in kwargs else {})
                generator = _generator(given)
                before = generator.get_state()
                generator.set_state(state)
            made = func(*tree_map(realized, args), **given)
            if state is not None:
                generator.set_state(before)
            for meta, own in zip(tree_leaves(result), tree_leaves(made)):
                if _is_meta(meta):
                    real.setdefault(_storage(meta), own)
        return realized(wanted)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)  # ``to_empty`` unties them
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _elements(func: Any, args: Any) -> int:
    return int(torch.Size(args[0]).numel()) if args and isinstance(args[0], list | tuple) else 0


def _scratch(value: Any) -> Any:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype) if _is_meta(value) else value


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs


def _generator(kwargs: Any) -> torch.Generator:
    return kwargs.get("generator") or torch.default_generator
