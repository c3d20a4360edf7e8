"""Offloading of activations: tensors that blocks save for the backward pass are kept in CPU memory.

They are copied to the CPU while the next block runs, and back while the backward pass is in the block after them. A
storage is copied once, even if several views of it are saved. Parameters and their views stay on the device.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lit_efficient.internals.torch_dispatch import is_traceable_wrapper_subclass, saving_hooks, storage_id
from lit_efficient.internals.torch_fake import FakeTensor
from lit_efficient.internals.torch_tensors import version as version_of
from lit_efficient.internals.torch_tensors import viewed
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.blocks.side_copies import Place, SideCopies, place_of, whole


class Offload:
    """Offloaded tensors of the calls of some blocks, in execution order.

    At most two calls' tensors are on the device. In the forward pass these are the tensors of the running block and of
    the block before it, which are being copied to the CPU. In the backward pass these are the tensors of the block that
    is differentiated and of the block before it, which are being copied to the device. Tensors of the last call are
    used before they would leave.

    Args:
        min_bytes: Smallest storage that is offloaded, in bytes.

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
        self._saved: dict[int, tuple[weakref.ref[object], int, weakref.ref[_Saved]]] = {}
        self._last: weakref.ref[_Call] | None = None  # last call of the forward pass
        self._active: weakref.ref[_Call] | None = None  # call that the backward pass differentiates

    def __reduce__(self) -> Any:
        return Offload, (self.min_bytes,)  # the calls of a copied network are recorded anew

    def reset(self) -> None:
        """Reset the counters of offloaded bytes and tensors, and the size of the largest storage that was seen."""
        self.bytes = 0
        self.tensors = 0
        self.largest = 0

    def call(self, parameters: Callable[[], Iterable[Tensor]] = tuple) -> "_Hooks":
        """Return a context for the forward of one block in which saved tensors are offloaded.

        Args:
            parameters: Function that returns tensors whose storages stay. It is called when the first tensor is saved.
        """
        return _Hooks(self, parameters)

    def copies(self, device: torch.device) -> SideCopies:
        """Return the stream for copies of a device."""
        if device not in self._copies:
            self._copies[device] = SideCopies(device)
        return self._copies[device]

    def saved(self, tensor: Tensor, call: "_Call") -> "_Saved":
        """Return the copy of a tensor's storage in its present version. The copy is created if it does not exist."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._saved:
            storage_ref, version, saved_ref = self._saved[key]
            found = saved_ref()
            if found is not None and storage_ref() is storage and version == version_of(tensor):
                return found
        fresh = _Saved(self.copies(tensor.device), tensor, call)
        self._saved = {key: entry for key, entry in self._saved.items() if entry[2]() is not None}
        self._saved[key] = (weakref.ref(storage), version_of(tensor), weakref.ref(fresh))
        self.bytes += storage.nbytes()
        self.tensors += 1
        return fresh

    def ran(self, call: "_Call") -> None:
        """Note that a block's forward has run, and free the device memory of the call before it.

        The copies of the earlier call had the time of this forward to complete.
        """
        call.before = self._last
        earlier = call.earlier()
        if earlier is not None:
            earlier.leave()
        self._last = weakref.ref(call)

    def passed(self, output: object) -> None:
        """Free the device memory of the last call after a block that is not offloaded, whose forward hid the copies.

        The backward pass fetches it when the gradient of ``output`` arrives, and so hides these copies behind the same
        blocks.
        """
        last = self._last() if self._last is not None else None
        if last is None:
            return
        last.leave()
        reference = weakref.ref(last)

        def fetch(gradient: Tensor) -> None:
            call = reference()
            if call is not None:
                call.fetch()

        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(fetch)
                break

    def differentiates(self, call: "_Call") -> None:
        """Bring the tensors of a call and of the call before it to the device, because the backward pass needs them."""
        active = self._active() if self._active is not None else None
        if active is call:
            return
        if active is not None:
            active.leave()  # a graph that is kept for another backward pass finds its tensors in CPU memory
        self._active = weakref.ref(call)
        call.fetch()
        earlier = call.earlier()
        if earlier is not None:
            earlier.fetch()


def choose_hidden(
    flops: Sequence[float], sizes: Sequence[float], flops_per_byte: float
) -> tuple[list[bool], list[bool]]:
    """Return the blocks whose copies are hidden behind the forward of later blocks, and the blocks that hide them.

    Copies run one after the other. A block is chosen if no copy runs when its forward ends, and if its own copy
    completes within the forward of the blocks after it. The second list marks the block in whose forward a copy
    completes. The backward pass takes about twice as long, so copies back are hidden by the same blocks.

    Args:
        flops: Operations of the forward of each block, in execution order.
        sizes: Bytes that each block saves for the backward pass.
        flops_per_byte: Operations that the device computes while one byte is copied.

    Example:
        >>> choose_hidden([10, 10, 10, 10, 10], [2, 2, 2, 2, 2], 10)
        ([True, False, True, False, False], [False, False, True, False, True])
    """
    chosen = [False] * len(flops)
    frees = [False] * len(flops)
    ends = [sum(flops[: index + 1]) for index in range(len(flops))]
    free = 0.0  # number of operations after which the bus is free
    for index, size in enumerate(sizes):
        done = ends[index] + flops_per_byte * size
        later = [number for number in range(index + 1, len(flops)) if ends[number] >= done]
        if size and later and ends[index] >= free:
            chosen[index] = True
            frees[later[0]] = True
            free = done
    return chosen, frees


class _Call:
    """One forward of a block. Its saved tensors keep this object alive."""

    def __init__(self) -> None:
        self.saved: list[weakref.ref[_Saved]] = []
        self.before: weakref.ref[_Call] | None = None

    def earlier(self) -> "_Call | None":
        """Return the call before this one, unless all its saved tensors are gone."""
        if self.before is not None:
            return self.before()
        return None

    def fetch(self) -> None:
        for saved in self._alive():
            saved.fetch()

    def leave(self) -> None:
        for saved in self._alive():
            saved.leave()

    def _alive(self) -> list["_Saved"]:
        references = [ref() for ref in self.saved]
        return [saved for saved in references if saved is not None]


class _Saved:
    """Offloaded storage: in CPU memory, and on the device while it is being copied or used."""

    def __init__(self, copies: SideCopies, tensor: Tensor, call: _Call) -> None:
        self.copies = copies
        self.call = call
        self.original: Tensor | None = tensor.detach()  # its version counter shows in-place changes
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
        self.copies.wait(self.done)  # the memory may be reused after the next line
        self.device = None
        self.original = None

    def check(self) -> None:
        self.changed |= self.original is not None and version_of(self.original) != self.version

    def used(self) -> Tensor:
        self.check()
        # The change may have come before the copy was complete. Without offloading torch raises the same error.
        if self.changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: it "
                "was saved by a block whose activations are offloaded"
            )
        self.fetch()
        self.copies.wait(self.done)
        assert self.device is not None
        return self.device


class _Hooks(saved_tensors_hooks):
    """Hooks of one forward that offload saved tensors. Tensors that stay are passed to the hooks around these."""

    def __init__(self, offload: Offload, parameters: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__(self._pack, self._unpack)
        self._offload = offload
        self._parameters = parameters
        self._staying: set[int] | None = None  # ids of storages that stay on the device
        self._call = _Call()
        self._inner: tuple[Any, Any] | None = None

    @torch.compiler.disable  # compiled code calls the hooks, whose sizes would otherwise become symbols
    def _pack(self, tensor: Tensor) -> Any:
        if self._offloads(tensor):
            return self._offload.saved(tensor, self._call), place_of(tensor)
        if self._inner is None:
            return None, tensor.detach()
        pack, _ = self._inner
        return None, pack(tensor)

    @torch.compiler.disable
    def _unpack(self, packed: Any) -> Any:
        saved, rest = packed
        if saved is None:
            if self._inner is None:
                return rest
            _, unpack = self._inner
            return unpack(rest)
        self._offload.differentiates(saved.call)
        place: Place = rest
        return place.view(saved.used())

    def _offloads(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor is offloaded."""
        if (
            type(tensor) not in (Tensor, FakeTensor)
            or tensor.layout is not torch.strided
            or isinstance(viewed(tensor), nn.Parameter)
        ):
            return False
        if tensor.device.type == "meta" or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        storage = tensor.untyped_storage()
        if self._staying is None:  # built inside the forward, where sharded parameters are gathered
            plain = (p for p in self._parameters() if not is_traceable_wrapper_subclass(p))
            self._staying = {storage_id(p.untyped_storage()) for p in plain}
        if storage_id(storage) in self._staying:
            return False
        self._offload.largest = max(self._offload.largest, storage.nbytes())
        return self._offload.min_bytes <= storage.nbytes()

    def __enter__(self) -> None:
        self._inner = saving_hooks()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._offload.ran(self._call)
