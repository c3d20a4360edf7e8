"""Record of the state of every mutable object that is reachable from some roots, which can be restored in place.

    record = Rewind([module, optimizer, ...]);    ... train, fail, validate ...;    record.restore()

A checkpoint cannot undo trial steps: it contains no gradients, train and eval modes, metrics, progress counters or
attributes that a user has added. This module therefore walks the objects themselves: values of tensors and arrays,
contents of dicts, lists and sets, attributes of objects, states of random generators. Objects keep their identity: a
reference to a tensor or list still refers to the same object afterwards, with the old contents. The walk does not enter
the machinery of a run (trainer, loggers, data fetchers), in either of Lightning's namespaces.
"""

import copy
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from lit_efficient.internals.contents import attributes, contents, is_mutable, length, restorer
from lit_efficient.internals.lightning_loops import DATA_FETCHER
from lit_efficient.internals.torch_dispatch import is_traceable_wrapper_subclass

_LEAVES = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size)
# Only these classes of torch and modules of the standard library have attributes that a training step changes. Threads,
# locks, files and process groups must not be touched.
_TORCH = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
_STDLIB = {"collections", "types", "argparse"}
_OUTSIDE = (DataLoader, Dataset, Sampler)  # trials fetch samples by index and do not use samplers and loaders
# Names instead of classes, because Lightning's classes exist twice: in lightning.pytorch and in pytorch_lightning.
_MACHINERY = {"Trainer", "Strategy", "Accelerator", "Logger", "Profiler", "CombinedLoader", DATA_FETCHER}


class Rewind:
    """Record of the state of some objects and of the global random generators.

    Args:
        roots: Objects to record, with all objects that can be reached from them except datasets, loaders and samplers.
        shallow: Objects of which only the attributes are recorded, but not the objects in them.
        outside: Function that returns True for further types whose instances are not entered.

    Example:
        >>> numbers = {"step": 1, "seen": [1]}
        >>> record = Rewind([numbers])
        >>> numbers["seen"].append(2)
        >>> record.restore()
        >>> numbers
        {'step': 1, 'seen': [1]}
    """

    def __init__(
        self,
        roots: Iterable[object],
        shallow: Iterable[object] = (),
        outside: Callable[[type], bool] = lambda kind: False,
    ) -> None:
        self.tensors: list[Tensor] = []
        self._undo: list[Callable[[], None]] = []
        roots = list(roots)
        shallow = list(shallow)
        self._movers = _movers([*roots, *shallow])
        self._move_weights_home()
        for item in shallow:
            self._undo.append(restorer(vars(item)))
        with torch.DisableTorchFunctionSubclass():  # a subclass may refuse to be copied
            for item in reachable(roots, outside):
                self._record(item)
        self._random = random_states()

    def restore(self) -> None:
        """Restore the recorded state. May be called any number of times."""
        with torch.no_grad(), torch.DisableTorchFunctionSubclass():
            self._move_weights_home()
            for undo in self._undo:
                undo()
        set_random_states(self._random)

    def _move_weights_home(self) -> None:
        for item in self._movers:
            item.come_to_rest()

    def _record(self, item: Any) -> None:
        undo = _undo_for(item)
        if undo is not None:
            self._undo.append(undo)
        if issubclass(type(item), Tensor):
            self.tensors.append(item)
        if _has_state(type(item)):
            self._undo.append(restorer(attributes(item)))
            slots = _slots_of(item)
            if slots:
                self._undo.append(_undo_slots(item, slots))


def reachable(roots: Iterable[object], outside: Callable[[type], bool] = lambda kind: False) -> Iterator[Any]:
    """Yield every mutable object that can be reached from some roots, each once.

    See :class:`Rewind` for the objects at which the walk stops.
    """
    stack = list(roots)
    seen: dict[int, object] = {}  # keeps the objects alive, because the id of a freed object can be used again
    while stack:
        item: Any = stack.pop()
        kind = type(item)
        if issubclass(kind, (*_LEAVES, *_OUTSIDE)) or id(item) in seen:
            continue
        if outside(kind) or _is_machinery(kind) or hasattr(kind, "come_to_rest"):
            continue
        seen[id(item)] = item
        yield item
        if issubclass(kind, Tensor):
            stack.append(item.grad if item.is_leaf else None)
        stack += contents(item)
        if _has_state(kind):
            stack += attributes(item).values()
            stack += _slots_of(item).values()


def _movers(roots: list[Any]) -> list[Any]:
    """Return the objects in modules' attributes that move weights between devices.

    Their method ``come_to_rest`` moves all weights back, after which they have no state to record.
    """
    movers: dict[int, Any] = {}
    for root in roots:
        if issubclass(type(root), nn.Module):
            for part in root.modules():
                for value in vars(part).values():
                    if hasattr(type(value), "come_to_rest"):
                        movers[id(value)] = value
    return list(movers.values())


def _is_machinery(kind: type) -> bool:
    """Return whether a type belongs to the machinery of a run, such as the trainer or a logger."""
    roots = {"lightning", "pytorch_lightning"}
    return any(base.__name__ in _MACHINERY and base.__module__.partition(".")[0] in roots for base in kind.__mro__)


def _has_state(kind: type) -> bool:
    """Return whether instances of a type have attributes that a training step may change."""
    root = kind.__module__.partition(".")[0]
    if root == "torch":
        return issubclass(kind, (*_TORCH, nn.Parameter))
    return root not in sys.stdlib_module_names or root in _STDLIB or kind.__module__ == "__main__"


def _slots_of(item: object) -> dict[types.MemberDescriptorType, object]:
    """Return the values of an object's slots, read without the object's own methods."""
    values = {}
    for slot in _slots(type(item)):
        with suppress(AttributeError):  # the slot is not set
            values[slot] = slot.__get__(item)
    return values


def _slots(kind: type) -> Iterator[types.MemberDescriptorType]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            # Python mangles the names of private slots.
            private = name.startswith("__") and not name.endswith("__")
            slot = base.__dict__.get(f"_{base.__name__.lstrip('_')}{name}" if private else name)
            if isinstance(slot, types.MemberDescriptorType):
                yield slot


def _undo_for(item: Any) -> Callable[[], None] | None:
    """Return a function that restores the present content of a container, tensor, array or generator."""
    kind = type(item)  # not isinstance, which asks a proxy for the class of its target
    if issubclass(kind, Tensor):
        if item.device.type == "meta" or is_lazy(item):
            return None
        return _undo_tensor(item)
    if is_mutable(item):
        return restorer(item)
    if issubclass(kind, np.ndarray):
        array = item.copy()
        return lambda: np.copyto(item, array) if item.flags.writeable else None
    for generator, get, put in (
        (torch.Generator, "get_state", "set_state"),
        (random.Random, "getstate", "setstate"),
        (np.random.RandomState, "get_state", "set_state"),
    ):
        if issubclass(kind, generator):
            state = getattr(item, get)()
            return lambda: getattr(item, put)(state)
    if issubclass(kind, np.random.Generator):
        state = item.bit_generator.state
        return lambda: setattr(item.bit_generator, "state", state)
    return None


def _undo_tensor(tensor: Tensor) -> Callable[[], None]:
    alias = tensor.detach()
    # The copy is in host memory: on the device it would change the memory use that trials measure.
    # Subclasses override ``to``, so a tensor on the CPU is cloned.
    if tensor.device.type == "cpu":
        copy = alias.clone()
    else:
        copy = alias.to("cpu", copy=True)
    # A wrapper subclass or a sparse tensor does not consist of one piece of memory that could be exchanged.
    wrapper = is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided
    leaf = tensor.is_leaf
    gradient = tensor.grad if leaf else None
    requires_grad = tensor.requires_grad

    def undo() -> None:
        if not wrapper and (tensor.shape != alias.shape or tensor.data_ptr() != alias.data_ptr()):
            tensor.data = alias
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            alias.copy_(copy)
        if leaf:
            if tensor.grad is not gradient:
                tensor.grad = gradient
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)

    return undo


def _undo_slots(item: object, kept: dict[types.MemberDescriptorType, object]) -> Callable[[], None]:
    def undo() -> None:
        for slot, value in kept.items():
            slot.__set__(item, value)

    return undo


def random_states() -> dict[str, Any]:
    """Return the states of the global generators of torch (all devices in use), Python and NumPy."""
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    for name, backend in _backends().items():
        states[name] = backend.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the states that :func:`random_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    for name, backend in _backends().items():
        if name in states:
            backend.set_rng_state_all(states[name])
    if "mps" in states:
        torch.mps.set_rng_state(states["mps"])


def own_generators(*owners: object, depth: int = 3) -> list[object]:
    """Return the generators of torch, NumPy and Python that objects hold.

    Args:
        owners: Objects whose attributes and items are searched.
        depth: Number of levels of attributes and items.
    """
    found: dict[int, object] = {}
    for owner in owners:
        kind = type(owner)
        if issubclass(kind, torch.Generator | np.random.Generator | random.Random):
            found[id(owner)] = owner
        elif depth and not issubclass(kind, torch.Tensor | np.ndarray | str | bytes | type):
            inside = [*attributes(owner).values()]
            # A long collection holds data, and its search would take long.
            if issubclass(kind, list | tuple | dict) and length(owner) <= 64:
                inside += contents(owner)
            for generator in own_generators(*inside, depth=depth - 1):
                found[id(generator)] = generator
    return list(found.values())


def generator_states(generators: Iterable[Any]) -> list[Any]:
    """Return the states of the generators of :func:`own_generators`, in order."""
    states: list[Any] = []
    for generator in generators:
        if isinstance(generator, torch.Generator):
            states.append(generator.get_state().clone())
        elif isinstance(generator, random.Random):
            states.append(generator.getstate())
        else:
            states.append(copy.deepcopy(generator.bit_generator.state))
    return states


def set_generator_states(generators: Iterable[Any], states: Iterable[Any]) -> None:
    """Restore the states that :func:`generator_states` returned."""
    for generator, state in zip(generators, states):
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.bit_generator.state = state


def same_random_states(one: Any, other: Any) -> bool:
    """Return whether two results of :func:`random_states`, or parts of them, are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_random_states(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_random_states, one, other))
    return bool(one == other)


@contextmanager
def other_randomness(states: dict[str, object]) -> Iterator[None]:
    """Context in which the global generators have the given states. Afterwards they have their previous states."""
    before = random_states()
    set_random_states(states)
    try:
        yield
    finally:
        set_random_states(before)


def _backends() -> dict[str, types.ModuleType]:
    """Return torch's device modules that are in use, by name."""
    return {name: backend for name, backend in (("cuda", torch.cuda), ("xpu", torch.xpu)) if backend.is_initialized()}
