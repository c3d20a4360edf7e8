"""What blocks save for the backward pass, in CPU memory: copied out behind the forward, back in ahead of the backward.

A storage is copied once, however many tensors that are views of it are saved. Parameters and their views stay.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lit_efficient.internals.torch_dispatch import is_traceable_wrapper_subclass, saving_hooks, storage_id
from lit_efficient.internals.torch_tensors import version as version_of
from lit_efficient.internals.torch_tensors import viewed
from lit_efficient.mechanisms.blocks.side_copies import Place, SideCopies, place_of, whole


class Offload:
    """The calls of some blocks, in the order in which they ran, and where what they saved is.

    Two calls' tensors are on the device at most: in the forward pass those of the block that runs and of the one before
    it, which are still on their way out; in the backward pass those of the block that is differentiated and of the one
    before it, which are on their way in. What the last call saved never leaves before it is used.

    Args:
        min_bytes: Smaller storages stay on the device.

    Example:
        >>> offload = Offload(min_bytes=1)
        >>> x = torch.ones(4, requires_grad=True)
        >>> with offload.call():
        ...     y = x.exp().exp()
        >>> y.sum().backward()
        >>> offload.bytes
        32
    """

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.reset()
        self._copies: dict[torch.device, SideCopies] = {}
        self._saved: dict[int, tuple[weakref.ref[Any], int, weakref.ref[_Saved]]] = {}
        self._last: weakref.ref[_Call] | None = None  # in the forward pass
        self._active: weakref.ref[_Call] | None = None  # in the backward pass

    def __reduce__(self) -> Any:
        return Offload, (self.min_bytes,)  # a copied network has calls of its own

    def reset(self) -> None:
        """Begin to count anew: what is copied out, and the largest storage that is looked at."""
        self.bytes = self.tensors = self.largest = 0

    def call(self, parameters: Callable[[], Iterable[Tensor]] = tuple) -> "_Hooks":
        """A context for the forward of one block: what is saved in it is offloaded, but for the memory of
        ``parameters()``, which is asked within, once something is saved.
        """
        return _Hooks(self, parameters)

    def copies(self, device: torch.device) -> SideCopies:
        """The stream of a device."""
        if device not in self._copies:
            self._copies[device] = SideCopies(device)
        return self._copies[device]

    def saved(self, tensor: Tensor, call: "_Call") -> "_Saved":
        """The copy of a tensor's storage as it is now: one that is under way already, or a new one."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        known, version, saved = self._saved.get(key, (lambda: None, 0, lambda: None))
        found = saved()
        if found is not None and known() is storage and version == version_of(tensor):
            return found
        fresh = _Saved(self.copies(tensor.device), tensor, call)
        self._saved = {key: entry for key, entry in self._saved.items() if entry[2]() is not None}
        self._saved[key] = (weakref.ref(storage), version_of(tensor), weakref.ref(fresh))
        self.bytes, self.tensors = self.bytes + storage.nbytes(), self.tensors + 1
        return fresh

    def ran(self, call: "_Call") -> None:
        """After a block's forward: what the one before it saved has had that long to be copied."""
        before = call.before = self._last
        if before is not None and (earlier := before()) is not None:
            earlier.leave()
        self._last = weakref.ref(call)

    def differentiates(self, call: "_Call") -> None:
        """The backward pass needs what a call saved: bring all of that, and what the one before it saved."""
        active = self._active() if self._active is not None else None
        if active is call:
            return
        if active is not None:
            active.leave()  # the graph may be kept, and what it needs again is in CPU memory
        self._active = weakref.ref(call)
        call.fetch()
        earlier = call.before() if call.before is not None else None
        if earlier is not None:
            earlier.fetch()


class _Call:
    """One forward of a block; kept alive by what it saved."""

    def __init__(self) -> None:
        self.saved: list[weakref.ref[_Saved]] = []
        self.before: weakref.ref[_Call] | None = None

    def fetch(self) -> None:
        for saved in self._alive():
            saved.fetch()

    def leave(self) -> None:
        for saved in self._alive():
            saved.leave()

    def _alive(self) -> list["_Saved"]:
        return [saved for ref in self.saved if (saved := ref()) is not None]


class _Saved:
    """A storage in CPU memory, and on the device for as long as it is being copied or used."""

    def __init__(self, copies: SideCopies, tensor: Tensor, call: _Call) -> None:
        self.copies, self.call = copies, call
        self.original: Tensor | None = tensor.detach()  # whose version tells whether it has changed since
        self.version = version_of(tensor)
        self.device: Tensor | None = whole(self.original)
        self.host = copies.host(self.device.nbytes)
        copies.begin()
        with copies.beside():
            self.host.copy_(self.device, non_blocking=True)
        self.done = copies.done()
        self.changed = False
        call.saved.append(weakref.ref(self))

    def fetch(self) -> None:
        if self.device is not None:
            return
        self.copies.begin()
        with self.copies.beside():
            self.device = torch.empty_like(self.host, device=self.copies.device)
            self.device.copy_(self.host, non_blocking=True)
        self.done = self.copies.done()

    def leave(self) -> None:
        if self.device is None:
            return
        self.check()
        self.copies.wait(self.done)  # its memory is taken for something else then
        self.device = self.original = None

    def check(self) -> None:
        self.changed |= self.original is not None and version_of(self.original) != self.version

    def used(self) -> Tensor:
        self.check()
        if self.changed:  # perhaps before it was copied: without offloading torch refuses that, too
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: it "
                "was saved by a block whose activations are offloaded"
            )
        self.fetch()
        self.copies.wait(self.done)
        assert self.device is not None
        return self.device


class _Hooks(saved_tensors_hooks):
    """Hooks that are around these ones get what is not offloaded."""

    def __init__(self, offload: Offload, parameters: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__(self._pack, self._unpack)
        self._offload, self._parameters = offload, parameters
        self._stay: set[int] | None = None
        self._call = _Call()
        self._inner: tuple[Any, Any] | None = None

    @torch.compiler.disable  # it is called beside what is compiled, and sizes would become symbols
    def _pack(self, tensor: Tensor) -> Any:
        if not self._takes(tensor):
            return None, tensor.detach() if self._inner is None else self._inner[0](tensor)
        return self._offload.saved(tensor, self._call), place_of(tensor)

    @torch.compiler.disable
    def _unpack(self, packed: Any) -> Any:
        saved, rest = packed
        if saved is None:
            return rest if self._inner is None else self._inner[1](rest)
        self._offload.differentiates(saved.call)
        place: Place = rest
        return place.view(saved.used())

    def _takes(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or isinstance(viewed(tensor), nn.Parameter):
            return False
        if tensor.device.type == "meta" or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        storage = tensor.untyped_storage()
        if self._stay is None:  # sharded ones are whole from within the forward on
            plain = (p for p in self._parameters() if not is_traceable_wrapper_subclass(p))
            self._stay = {storage_id(p.untyped_storage()) for p in plain}
        if storage_id(storage) in self._stay:
            return False
        self._offload.largest = max(self._offload.largest, storage.nbytes())
        return self._offload.min_bytes <= storage.nbytes()

    def __enter__(self) -> None:
        self._inner = saving_hooks()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._offload.ran(self._call)
