"""What the memory of a training step holds, by kind: weights, gradients, states, activations and what else there is.

    every storage is noted when it is made and when it is freed;   what it was is known at the latest when the step ends

The kind of a storage is what it became: a tensor that a backward pass makes is an activation, unless it arrives at a
parameter, and one that an optimizer's step makes is left over, unless the optimizer still has it afterwards. The meter
sees operators through torch's dispatcher, of real tensors and of fake ones alike. What it cannot see is scratch space
within a kernel.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lit_efficient.declaration import Phase, parts_of
from lit_efficient.internals.torch_dispatch import (
    ASKS_DEVICE,
    TorchDispatchMode,
    backward_runs,
    is_traceable_wrapper_subclass,
    no_dispatch_modes,
    storage_id,
)
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.rewind import reachable
from lit_efficient.models.networks.gpt import GPT

KINDS = (
    "weights",  # parameters
    "adapters",  # those that techniques put beside a frozen base
    "gradients",  # of parameters, from their arrival on
    "states",  # what optimizers keep
    "averages",  # what techniques of the phase AVERAGE keep
    "buffers",  # of modules, and other tensors that these keep
    "activations",  # all else that forward and backward passes make
    "logits",  # results, and their gradients, whose last dimension is that of the vocabulary
    "communication",  # what several processes send and gather
    "margin",  # what an accelerator's allocator rounds up to
    "other",  # batches, what an optimizer's step makes for itself, what other callbacks keep
)
_FORWARD, _STEP, _BETWEEN = "forward", "optimizer step", "between steps"
BLOCK = 512  # bytes: what torch's allocators of accelerators round up to
_POINTS = 400  # of a timeline


@dataclass(frozen=True)
class Moment:
    """One point of a step."""

    name: str  # what runs: ``forward``, ``backward``, ``optimizer step``, ``between steps``
    kinds: Mapping[str, int]  # what lives, in bytes by kind

    @property
    def bytes(self) -> int:
        """All kinds together."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class StepMemory:
    """The memory of one step."""

    peak: int  # the most bytes that lived on the device at a time
    kinds: Mapping[str, int]  # what they were, by kind; what is 0 is left out
    resident: Mapping[str, int]  # what lives after the step, by kind
    host: int  # the most bytes that lived in CPU memory, where that is not the device
    timeline: tuple[Moment, ...]  # the step in at most some hundred points


class _Piece:
    """A storage that lives or lived."""

    __slots__ = ("away", "kind", "ref", "size")

    def __init__(self, size: int, kind: str, away: bool) -> None:
        self.size, self.kind, self.away = size, kind, away
        self.ref: Any = None


class KindMeter(TorchDispatchMode):
    """Count the bytes of tensors by kind, while active.

    Args:
        device: Type of the device that is counted; what lies on the CPU beside it counts as the host's.
        block: Bytes that sizes are rounded up to; ``None``: 512 on an accelerator, 1 on the CPU.

    Example:
        >>> layer = nn.Linear(256, 256, bias=False)
        >>> meter = KindMeter()
        >>> meter.know(layer)
        >>> with meter:
        ...     layer(torch.ones(2, 256)).sum().backward()
        >>> meter.step().kinds
        {'weights': 262144, 'gradients': 262144, 'activations': 2056}
    """

    supports_higher_order_operators = True

    def __init__(self, device: str = "cpu", block: int | None = None) -> None:
        super().__init__()
        self.device = device
        self.block = block or (1 if device == "cpu" else BLOCK)
        self.phase = _FORWARD
        self._pieces: dict[int, _Piece] = {}
        self._log: list[tuple[_Piece, bool, str]] = []
        self._start: list[_Piece] = []
        self._watched: dict[int, Any] = {}
        self._vocabularies: set[int] = set()

    def know(self, module: nn.Module, optimizers: Iterable[Any] = (), techniques: Iterable[Any] = ()) -> None:
        """Count what exists, and say of all that lives what it is. Called again it takes in what is new."""
        techniques, optimizers = list(techniques), list(optimizers)
        parameters = list(module.parameters())
        averaging = [one for one in techniques if getattr(one, "phase", None) is Phase.AVERAGE]
        others = list(_held(one for one in techniques if one not in averaging))
        known: dict[str, Iterable[Any]] = {
            "other": others,
            "buffers": _held(vars(part) for part in module.modules()),
            "averages": _held(averaging),
            "states": _held(vars(one) for one in optimizers),
            "gradients": [p.grad for p in parameters],
            "weights": [*parameters, *(one for one in others if isinstance(one, nn.Parameter))],
            "adapters": [p for one in techniques if hasattr(one, "adapters") for p in one.adapters(module)],
        }
        kinds: dict[int, tuple[Any, str, str]] = {}
        for kind, tensors in known.items():  # the last one that knows a storage is right
            kinds |= {storage_id(storage): (storage, place, kind) for t in tensors for storage, place in storages_of(t)}
        for key, (storage, place, kind) in kinds.items():
            self._add(storage, place, kind)
            if key in self._pieces:
                self._pieces[key].kind = kind
        for p in parameters:
            if p.requires_grad and p.is_leaf and id(p) not in self._watched:
                self._watched[id(p)] = p.register_hook(self._arrives)
        self._vocabularies = _vocabularies(module)

    def add(self, tree: object, kind: str = "other") -> None:
        """Count tensors that exist already, in any structure."""
        for item in tree_leaves(tree):
            for storage, place in storages_of(item):
                self._add(storage, place, kind)

    def step(self) -> StepMemory:
        """What has happened since the last call, or since the beginning."""
        log, self._log = self._log, []
        start, self._start = self._start, list(self._pieces.values())
        now: Counter[str] = Counter()
        away = 0
        for piece in start:
            away += self._count(now, piece, 1)
        most, peak, kinds, host = [Moment(self.phase, _present(now))], sum(now.values()), _present(now), away
        live, width = peak, max(1, len(log) // _POINTS)
        highest = 0
        for i, (piece, born, phase) in enumerate(log):
            sign = 1 if born else -1
            if piece.away:
                away += sign * piece.size
                host = max(host, away)
            else:
                self._count(now, piece, sign)
                live += sign * self._rounded(piece.size)
                if live > peak:
                    peak, kinds = live, _present(now)
            if i % width == 0:
                highest = 0
                most.append(Moment(phase, _present(now)))
            elif live > highest:
                most[-1] = Moment(phase, _present(now))
            highest = max(highest, live)
        return StepMemory(peak, kinds, _present(now), host, tuple(most))

    def release(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    @staticmethod
    def paused() -> contextlib.AbstractContextManager[Any]:
        """Count nothing inside."""
        return no_dispatch_modes()

    def _count(self, now: Counter[str], piece: _Piece, sign: int) -> int:
        if piece.away:
            return sign * piece.size
        now[piece.kind] += sign * piece.size
        if margin := self._rounded(piece.size) - piece.size:
            now["margin"] += sign * margin
        return 0

    def _rounded(self, size: int) -> int:
        return -(-size // self.block) * self.block

    def _arrives(self, gradient: Tensor) -> None:
        for storage, place in storages_of(gradient):
            self._add(storage, place, "gradients")
            if (key := storage_id(storage)) in self._pieces:
                self._pieces[key].kind = "gradients"

    def _add(self, storage: Any, place: str, kind: str) -> None:
        key = storage_id(storage)
        if key in self._pieces or place not in (self.device, "cpu"):
            return
        piece = self._pieces[key] = _Piece(storage.nbytes(), kind, place != self.device)
        piece.ref = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
        self._log.append((piece, True, self._now()))

    def _forget(self, key: int) -> None:
        piece = self._pieces.pop(key, None)
        if piece is not None:
            self._log.append((piece, False, self._now()))

    def _now(self) -> str:
        return "backward" if backward_runs() else self.phase

    def _kind(self, tensor: Tensor) -> str:
        if self.phase != _FORWARD:
            return "other"
        return "logits" if tensor.ndim > 1 and tensor.shape[-1] in self._vocabularies else "activations"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is ASKS_DEVICE:
            return result
        for item in (result,) if isinstance(result, Tensor) else () if result is None else tree_leaves(result):
            for storage, place in storages_of(item):
                if storage_id(storage) not in self._pieces and not _is_in(storage, (args, kwargs)):
                    self._add(storage, place, self._kind(item))
        return result


class StepMeter(Callback):
    """Measure the memory of each optimizer step of a fit by kind, of real steps and of fake ones.

    Args:
        device: Type of the device; ``None``: the one that the module is on.
        block: As in :class:`KindMeter`.
    """

    def __init__(self, device: str | None = None, block: int | None = None) -> None:
        self.device, self.block = device, block
        self.steps: list[StepMemory] = []
        self.meter: KindMeter | None = None
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.meter = KindMeter(self.device or pl_module.device.type, self.block)
        self._step = trainer.global_step
        self._end_step(trainer, pl_module)
        self.steps.clear()
        self.meter.__enter__()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert self.meter is not None
        self.meter.add(batch)
        self.meter.phase = _FORWARD

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert self.meter is not None
        self.meter.phase = _STEP

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.meter is not None
        self.meter.phase = _BETWEEN
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self._end_step(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.meter is not None:
            self.meter.__exit__(None, None, None)
            self.meter.release()
        self.meter = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def _end_step(self, trainer: Any, module: Any) -> None:
        assert self.meter is not None
        parts = [part for part in parts_of(trainer) if part is not self]
        self.meter.know(module, trainer.optimizers, parts)
        self.steps.append(self.meter.step())


def storages_of(tensor: Any) -> Iterator[tuple[Any, str]]:
    """The storages behind a tensor, of wrappers and shards those within, each with its device's type."""
    if not isinstance(tensor, Tensor):
        return
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages_of(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage(), tensor.device.type


def _is_in(storage: Any, arguments: Any) -> bool:
    """Whether a result is a view of what nobody has counted, such as a row of a dataset."""
    key = storage_id(storage)
    return any(storage_id(other) == key for item in tree_leaves(arguments) for other, _ in storages_of(item))


def _held(roots: Iterable[Any]) -> Iterator[Tensor]:
    return (item for item in reachable(roots) if isinstance(item, Tensor))


def _present(kinds: Mapping[str, int]) -> dict[str, int]:
    return {kind: kinds[kind] for kind in KINDS if kinds[kind]}


def _vocabularies(module: nn.Module) -> set[int]:
    """Numbers of logits: of heads that networks name, or else of layers as wide as the largest table of embeddings."""
    found = {int(head.out_features) for head in map(_head, module.modules()) if hasattr(head, "out_features")}
    if found:
        return found
    largest = max((part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)), default=0)
    return {largest} & {getattr(part, "out_features", None) for part in module.modules()}


def _head(network: Any) -> Any:
    if isinstance(network, GPT):
        return network.head
    named = getattr(network, "get_output_embeddings", None)
    return named() if callable(named) else None
