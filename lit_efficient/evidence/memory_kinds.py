"""Memory of a training step by kind: weights, gradients, optimizer states, activations and others.

    every storage is noted when it is created and when it is freed;   its kind is known at the end of the step at latest

The kind of a storage is its final use. A tensor that a backward pass creates is an activation, unless it becomes the
gradient of a parameter. A tensor that an optimizer step creates is temporary, unless it becomes an optimizer state. The
meter observes operators through torch's dispatcher, for real and for fake tensors. It does not see scratch memory
inside a kernel.

Where a tensor is used several times, autograd adds the gradients of its uses. It adds in place if the first one is no
view and nobody else holds it, but never if a dispatch mode is active or the tensors are fake. The meter counts such a
sum as made in place, as it would be without the meter.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, parts_of
from lit_efficient.internals.torch_as_cuda import watching_moves
from lit_efficient.internals.torch_dispatch import (
    ASKS_DEVICE,
    TorchDispatchMode,
    backward_runs,
    is_traceable_wrapper_subclass,
    no_dispatch_modes,
    running_node,
    storage_id,
)
from lit_efficient.internals.torch_tensors import viewed
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.rewind import reachable

KINDS = (
    "weights",  # parameters
    "adapters",  # parameters that techniques add to a frozen base
    "gradients",  # of parameters, from the moment at which they reach the parameter
    "states",  # of optimizers
    "averages",  # of techniques of the phase AVERAGE
    "buffers",  # of modules, and other tensors that modules hold
    "activations",  # all other tensors that forward and backward passes create
    "logits",  # activations whose last dimension is the size of the vocabulary, and their gradients
    "communication",  # tensors that processes send and gather
    "margin",  # rounding of an accelerator's allocator
    "other",  # batches, temporary tensors of an optimizer step, tensors of other callbacks
)
_FORWARD = "forward"
_STEP = "optimizer step"
_BETWEEN = "between steps"
BLOCK = 512  # bytes to whose multiples torch's allocators of accelerators round up
_POINTS = 400  # of a timeline
Bytes: TypeAlias = Mapping[str, int]  # by kind


@dataclass(frozen=True)
class Moment:
    """One point of a step."""

    name: str  # ``forward``, ``backward``, ``optimizer step`` or ``between steps``
    kinds: Bytes  # allocated bytes by kind

    @property
    def bytes(self) -> int:
        """Allocated bytes of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class StepMemory:
    """Memory of one step."""

    peak: int  # most bytes allocated on the device at a time
    kinds: Bytes  # the peak by kind, without kinds of 0 bytes
    resident: Bytes  # bytes allocated after the step, by kind
    host: int  # most bytes allocated in CPU memory, if the device is another one
    timeline: tuple[Moment, ...]  # at most some hundred points


class _Piece:
    """A storage."""

    __slots__ = ("away", "kind", "node", "ref", "size")

    def __init__(self, size: int, kind: str, away: bool, node: tuple[str, int] | None = None) -> None:
        self.size = size
        self.kind = kind
        self.node = node  # of the backward pass that created it
        self.away = away  # in CPU memory, if the device is another one
        self.ref: weakref.ref[object] | None = None


class KindMeter(TorchDispatchMode):
    """Dispatch mode that counts the bytes of tensors by kind.

    Args:
        device: Type of the device to count. Tensors on the CPU count as memory of the host otherwise.
        block: Bytes to whose multiples sizes are rounded up; ``None`` takes 512 on an accelerator and 1 on the CPU.

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
        self.block = block or BLOCK
        if block is None and device == "cpu":
            self.block = 1  # the allocator of the CPU is not modelled
        self.phase = _FORWARD
        self._pieces: dict[int, _Piece] = {}  # that are allocated, by the identity of the storage
        self._log: list[tuple[_Piece, bool, str]] = []  # piece, whether it was created or freed, phase
        self._start: list[_Piece] = []
        # First summand of autograd's last sum, and index of the sum in the log.
        self._sum: tuple[_Piece, int] | None = None
        self._watched: dict[int, RemovableHandle] = {}
        self._vocabularies: set[int] = set()
        self._watching: contextlib.ExitStack | None = None

    def __enter__(self) -> KindMeter:
        self._watching = contextlib.ExitStack()
        self._watching.enter_context(watching_moves(self._move))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        assert self._watching is not None
        self._watching.close()

    def _move(self, tensor: Tensor, away: bool) -> None:
        """Count the memory of a stand-in as memory of the host from now on, or of the device again."""
        for storage, place in storages_of(tensor):
            key = storage_id(storage)
            self._add(storage, place, "other")
            piece = self._pieces.get(key)
            if piece is None or piece.away == away:
                continue
            moved = _Piece(piece.size, piece.kind, away)
            moved.ref = self._reference(storage)
            piece.ref = None
            self._pieces[key] = moved
            self._log += [(piece, False, self._now()), (moved, True, self._now())]

    def know(self, module: nn.Module, optimizers: Iterable[object] = (), techniques: Iterable[object] = ()) -> None:
        """Count all existing tensors and determine their kinds. A repeated call adds new tensors."""
        techniques = list(techniques)
        parameters = list(module.parameters())
        # Tensors of averages are a separate kind; those of other techniques count as other.
        averaging = [one for one in techniques if getattr(one, "phase", None) is Phase.AVERAGE]
        others = list(_held(one for one in techniques if one not in averaging))
        adapters: list[Tensor] = []
        for one in techniques:
            if isinstance(one, OptimizerHooks):
                adapters += one.adapters(module)
        # A storage that is listed several times has the last kind.
        known: dict[str, Iterable[object]] = {
            "other": others,
            "buffers": _held(vars(part) for part in module.modules()),
            "averages": _held(averaging),
            "states": _held(vars(one) for one in optimizers),
            "gradients": [p.grad for p in parameters],
            "weights": [*parameters, *(one for one in others if isinstance(one, nn.Parameter))],
            "adapters": adapters,
        }
        for kind, tensors in known.items():
            for tensor in tensors:
                self._declare(tensor, kind)
        # A hook tells when a gradient reaches its parameter. Until then it is an activation.
        for p in parameters:
            if p.requires_grad and p.is_leaf and id(p) not in self._watched:
                self._watched[id(p)] = p.register_hook(self._gradient_arrives)
        self._vocabularies = _vocabularies(module)

    def add(self, tree: object) -> None:
        """Count the existing tensors of a nested structure as "other"."""
        for item in tree_leaves(tree):
            for storage, place in storages_of(item):
                self._add(storage, place, "other")

    def step(self) -> StepMemory:
        """Return the memory since the last call, or since the beginning."""
        log = self._log
        self._log = []
        now: Counter[str] = Counter()
        live = 0
        away = 0
        # What exists at the start is counted before the log is replayed.
        for piece in self._start:
            if piece.away:
                away += piece.size
            else:
                live += self._count(now, piece, 1)
        self._start = list(self._pieces.values())
        timeline = [Moment(self.phase, _present(now))]
        peak = live
        kinds = _present(now)
        host = away
        width = max(1, len(log) // _POINTS)
        highest = 0  # since the last point
        for i, (piece, born, phase) in enumerate(log):
            sign = 1 if born else -1
            if piece.away:
                away += sign * piece.size
                host = max(host, away)
            else:
                live += self._count(now, piece, sign)
                if live > peak:
                    peak = live
                    kinds = _present(now)
            # A point is the highest moment of as many events as are ``width``.
            if i % width == 0:
                highest = 0
                timeline.append(Moment(phase, _present(now)))
            elif live > highest:
                timeline[-1] = Moment(phase, _present(now))
            highest = max(highest, live)
        return StepMemory(peak, kinds, _present(now), host, tuple(timeline))

    def release(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    @staticmethod
    def paused() -> contextlib.AbstractContextManager[object]:
        """Return a context in which nothing is counted."""
        return no_dispatch_modes()

    def _count(self, now: Counter[str], piece: _Piece, sign: int) -> int:
        """Add or subtract a piece, and return the change in bytes."""
        rounded = -(-piece.size // self.block) * self.block
        now[piece.kind] += sign * piece.size
        if rounded != piece.size:
            now["margin"] += sign * (rounded - piece.size)
        return sign * rounded

    def _gradient_arrives(self, gradient: Tensor) -> None:
        self._declare(gradient, "gradients")

    def _declare(self, tensor: object, kind: str) -> None:
        """Count a tensor if it is new, and set its kind."""
        for storage, place in storages_of(tensor):
            self._add(storage, place, kind)
            piece = self._pieces.get(storage_id(storage))
            if piece is not None:
                piece.kind = kind

    def _add(self, storage: torch.UntypedStorage, place: str, kind: str) -> None:
        key = storage_id(storage)
        if key in self._pieces or place not in (self.device, "cpu"):
            return
        piece = _Piece(storage.nbytes(), kind, place != self.device, running_node())
        piece.ref = self._reference(storage)
        self._pieces[key] = piece
        self._log.append((piece, True, self._now()))

    def _reference(self, storage: torch.UntypedStorage) -> weakref.ref[object]:
        """Return a reference whose callback tells when the storage is freed."""
        key = storage_id(storage)
        return weakref.ref(storage, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        piece = self._pieces.pop(key, None)
        if piece is None:
            return
        entry = (piece, False, self._now())
        if self._sum is not None and self._sum[0] is piece and self._sum[1] == len(self._log) - 1:
            self._log.insert(self._sum[1], entry)  # the sum takes its place
        else:
            self._log.append(entry)

    def _now(self) -> str:
        return "backward" if backward_runs() else self.phase

    def _kind(self, tensor: Tensor) -> str:
        if self.phase != _FORWARD:
            return "other"
        if tensor.ndim > 1 and tensor.shape[-1] in self._vocabularies:
            return "logits"
        return "activations"

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func is not ASKS_DEVICE and result is not None:
            # Most operators return one tensor, for which no tree is needed.
            for item in (result,) if isinstance(result, Tensor) else tree_leaves(result):
                for storage, place in storages_of(item):
                    if storage_id(storage) not in self._pieces and not _is_in(storage, (args, kwargs)):
                        self._add(storage, place, self._kind(item))
                        if func is torch.ops.aten.add.Tensor:
                            self._note_sum(storage, args[0])
        return result

    def _note_sum(self, storage: torch.UntypedStorage, first: object) -> None:
        """Note a sum that autograd makes in place if its first summand is freed next, because nobody else holds it.

        The first summand comes from an earlier node. A node that adds its own tensors makes a new tensor.
        """
        node = running_node()
        if node is None or not isinstance(first, Tensor) or viewed(first) is not None:
            return
        made = self._pieces.get(storage_id(storage))
        for other, _ in storages_of(first):
            piece = self._pieces.get(storage_id(other))
            if made and piece and piece.node not in (None, node) and piece.size == made.size:
                self._sum = (piece, len(self._log) - 1)


class StepMeter(Callback):
    """Callback that measures the memory of each optimizer step by kind, for real and for fake tensors.

    Args:
        device: Type of the device; ``None`` takes that of the module.
        block: As in :class:`KindMeter`.
    """

    def __init__(self, device: str | None = None, block: int | None = None) -> None:
        self.device = device
        self.block = block
        self.steps: list[StepMemory] = []
        self.meter: KindMeter | None = None
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.meter = KindMeter(self.device or pl_module.device.type, self.block)
        self._step = trainer.global_step
        # Everything that exists before the first step is counted, but is no step.
        self._end_step(trainer, pl_module)
        self.steps.clear()
        self.meter.__enter__()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        assert self.meter is not None
        self.meter.add(batch)
        self.meter.phase = _FORWARD

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        assert self.meter is not None
        self.meter.phase = _STEP

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        assert self.meter is not None
        self.meter.phase = _BETWEEN
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self._end_step(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.meter is not None:
            self.meter.__exit__(None, None, None)
            self.meter.release()
        self.meter = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def _end_step(self, trainer: Trainer, module: LightningModule) -> None:
        assert self.meter is not None
        parts = [part for part in parts_of(trainer) if part is not self]
        self.meter.know(module, trainer.optimizers, parts)
        self.steps.append(self.meter.step())


def storages_of(tensor: object) -> Iterator[tuple[torch.UntypedStorage, str]]:
    """Yield the storages of a tensor, or of the tensors inside a wrapper or shard, each with the type of its device."""
    if not isinstance(tensor, Tensor):
        return
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages_of(getattr(tensor, name))
    # A sparse tensor has no single storage.
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage(), tensor.device.type


def _is_in(storage: torch.UntypedStorage, arguments: object) -> bool:
    """True if a result is a view of an argument. An argument that is not counted may be a row of a dataset."""
    key = storage_id(storage)
    return any(storage_id(other) == key for item in tree_leaves(arguments) for other, _ in storages_of(item))


def _held(roots: Iterable[object]) -> Iterator[Tensor]:
    return (item for item in reachable(roots) if isinstance(item, Tensor))


def _present(kinds: Bytes) -> dict[str, int]:
    return {kind: kinds[kind] for kind in KINDS if kinds[kind]}


def _vocabularies(module: nn.Module) -> set[int]:
    """Return the sizes of the vocabularies.

    They are the widths of the output heads that networks name. Without any, it is the number of rows of the largest
    embedding, if some layer has as many outputs.
    """
    heads = [_head(network) for network in module.modules()]
    found = {int(head.out_features) for head in heads if hasattr(head, "out_features")}
    if found:
        return found
    largest = max((part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)), default=0)
    return {largest} & {getattr(part, "out_features", None) for part in module.modules()}


def _head(network: nn.Module) -> object:
    get_output_embeddings = getattr(network, "get_output_embeddings", None)  # of GPT and of transformers
    if callable(get_output_embeddings):
        return get_output_embeddings()
    return None
