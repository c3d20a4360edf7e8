"""Memory limits that can be enforced: bytes of live tensors on the CPU, the allocator's own limit on accelerators.

    live = sum of the bytes of all distinct storages that an operator returned and that still exist;  live <= limit

A CPU's allocator has neither counters nor a limit: if memory runs out, the operating system kills the process.
:class:`AllocationMeter` intercepts every operator, including those of the backward pass and the optimizer, through
torch's dispatcher. It counts each storage once while the storage exists, and raises in the middle of a step. Scratch
memory inside a kernel is not counted. On accelerators the allocator's peak is read, and its limit is set where the
backend supports that.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lit_efficient.declaration import format_bytes
from lit_efficient.errors import OutOfMemoryError
from lit_efficient.internals.torch_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    no_dispatch_modes,
    saving_hooks,
    storage_id,
)
from lit_efficient.internals.torch_trees import tree_leaves


class AllocationMeter(TorchDispatchMode):
    """Dispatch mode that counts the bytes of live CPU tensors and enforces a limit.

    Args:
        resident: Existing tensors that count from the beginning.
        limit: Largest number of bytes that may be live at a time. ``None``: only count.

    Raises:
        OutOfMemoryError: From within the operator that exceeds the limit.

    Example:
        >>> with AllocationMeter() as meter:
        ...     _ = torch.zeros(256) + 1.0
        >>> meter.peak
        2048
    """

    def __init__(self, resident: Iterable[Tensor] = (), limit: int | None = None) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.limit: int | None = None
        self._storages: dict[int, tuple[weakref.ref[object], int]] = {}
        for tensor in resident:
            self.add(tensor)
        self.limit = limit

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted already or not on the CPU."""
        if is_traceable_wrapper_subclass(tensor):  # quantised or sharded: the wrapped tensors take the space
            for name in tensor.__tensor_flatten__()[0]:
                self.add_all(getattr(tensor, name))  # a shard's attributes include its mesh, which is not a tensor
            return
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._storages:
            return
        size = storage.nbytes()
        self._storages[key] = (weakref.ref(storage, lambda _, key=key: self._forget(key)), size)  # type: ignore[misc]
        self.live += size
        self.peak = max(self.peak, self.live)

    def add_all(self, tree: object) -> None:
        """Count all tensors in a nested structure."""
        for item in tree_leaves(tree):
            if isinstance(item, Tensor):
                self.add(item)

    @staticmethod
    def paused() -> contextlib.AbstractContextManager[object]:
        """Return a context in which nothing is counted."""
        return no_dispatch_modes()

    def _forget(self, key: int) -> None:
        entry = self._storages.pop(key, None)
        if entry is not None:
            self.live -= entry[1]

    def _refuse_excess(self) -> None:
        if self.limit is not None and self.live > self.limit:
            raise OutOfMemoryError(
                f"out of memory: {self.live} bytes ({format_bytes(self.live)}) of tensors are live, and the limit is "
                f"{self.limit} bytes ({format_bytes(self.limit)})"
            )

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.add(result)
        elif result is not None:
            self.add_all(result)
        self._refuse_excess()
        return result


class SavedTensors(saved_tensors_hooks):
    """Context that counts the bytes that operators save for the backward pass, each storage once.

    Hooks that were active before, such as those of offloading or activation checkpointing, still run.

    Args:
        without: Tensors whose storages are not counted, such as parameters.

    Example:
        >>> x = torch.ones(64, requires_grad=True)
        >>> with SavedTensors() as saved:
        ...     y = x.exp()
        >>> saved.bytes
        256
    """

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        super().__init__(self._pack, self._unpack)
        self.bytes = 0
        # Storages are kept alive, because a freed one's address could be used by another storage.
        self._storages = {}
        for tensor in without:
            storage = tensor.untyped_storage()
            self._storages[storage_id(storage)] = storage
        self._inner: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key not in self._storages:
            self._storages[key] = storage
            self.bytes += storage.nbytes()
        if self._inner is None:
            return tensor.detach()
        pack, _ = self._inner
        return pack(tensor)

    def _unpack(self, packed: object) -> Any:
        if self._inner is None:
            return packed
        _, unpack = self._inner
        return unpack(packed)

    def __enter__(self) -> SavedTensors:  # type: ignore[override]
        self._inner = saving_hooks()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._storages.clear()


def available_cpu_memory() -> int | None:
    """Return the bytes that this process may still allocate, or ``None`` if they are unknown.

    The result respects the limits of the operating system and of the control group.
    """
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Windows has no such call, macOS no such name
        return None
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()  # the page cache counts as available, too
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # "max", or no control group
        group = Path("/sys/fs/cgroup")
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, free)


@contextlib.contextmanager
def accelerator_limit(device: torch.device, limit: int | None) -> Iterator[None]:
    """Context that limits an accelerator's allocator to ``limit`` bytes and resets the peak.

    A backend without such a limit only gets its peak reset.
    """
    backend = getattr(torch, device.type)
    total = torch.accelerator.get_memory_info(device)[1]
    enforce = limit is not None and hasattr(backend, "set_per_process_memory_fraction")
    before = 1.0
    if enforce:
        before = backend.get_per_process_memory_fraction(device)
    torch.accelerator.reset_peak_memory_stats(device)
    if limit is not None and enforce:
        backend.set_per_process_memory_fraction(min(before, limit / total), device)
    try:
        yield
    finally:
        if enforce:
            backend.set_per_process_memory_fraction(before, device)


def release_frames(error: BaseException) -> None:
    """Release the tensors that the stack frames of an error and of its causes hold, by clearing their tracebacks."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            chain += [link.__cause__, link.__context__]
            link.__traceback__ = link.__cause__ = link.__context__ = None


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Context after which reference cycles are collected and an accelerator's cached blocks are released.

    Objects that exist before are frozen, because a collection over everything that was imported takes a second.
    """
    freeze = gc.get_freeze_count() == 0
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if freeze:
            gc.unfreeze()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
