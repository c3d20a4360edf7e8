"""Block swapping: weights are kept in CPU memory and copied to the device ahead of their use, two blocks at a time.

Gradients of swapped weights are moved to the CPU one by one, as soon as they are complete. After the backward pass both
weights and gradients are in CPU memory, where the optimizer steps.
"""

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.contents import attributes, contents
from lit_efficient.internals.torch_as_cuda import moves, stands_in
from lit_efficient.internals.torch_dispatch import after_backward, is_traceable_wrapper_subclass, storage_id
from lit_efficient.internals.torch_tensors import version as version_of
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.blocks.side_copies import Place, SideCopies, place_of
from lit_efficient.surgery import memory_of

_ALIGNED = 256  # alignment of tensors in a block's memory, in bytes


def swapped_names(block: nn.Module, elsewhere: set[int], trained: bool = False) -> list[str]:
    """Return the names of the block's parameters that can be swapped.

    Args:
        block: The block.
        elsewhere: Ids of parameters that modules outside the block use as well.
        trained: Include parameters that require a gradient. Otherwise only frozen ones are swapped.
    """
    return [name for name, p in block.named_parameters() if id(p) not in elsewhere and _can_leave(p, trained)]


def swapped_tensors(block: nn.Module, names: Iterable[str], trained: bool = False) -> list[Tensor]:
    """Return the tensors to swap: the named parameters, and the quantisation constants of quantised ones.

    Args:
        block: The block.
        names: Names of parameters.
        trained: Include parameters that require a gradient.
    """
    found: dict[int, Tensor] = {}
    held = dict(block.named_parameters())
    for name in names:
        parameter = held.get(name)
        if parameter is None or not _can_leave(parameter, trained):
            continue
        found[id(parameter)] = parameter
        if not parameter.is_floating_point():
            part = block.get_submodule(name.rpartition(".")[0])
            public = [value for key, value in vars(part).items() if not key.startswith("_")]
            constants = [t for t in _tensors_in([vars(parameter), public]) if _can_leave(t)]
            found |= {id(t): t for t in constants if not isinstance(t, nn.Parameter)}
    return list(found.values())


def _can_leave(tensor: Tensor, trained: bool = False) -> bool:
    if (
        (tensor.requires_grad and not trained)
        or is_traceable_wrapper_subclass(tensor)
        or tensor.layout is not torch.strided
    ):
        return False
    return tensor.device.type != "meta" and 0 < tensor.numel() == _extent(tensor)


def _extent(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in containers and plain objects, such as bitsandbytes' quantisation constants."""
    kind = type(value)  # not isinstance, which asks a proxy for the class of its target
    if issubclass(kind, Tensor):
        yield value
    elif depth and not issubclass(kind, nn.Module | type) and not callable(value):
        for item in (*contents(value), *attributes(value).values()):
            yield from _tensors_in(item, depth - 1)


class Swap:
    """Swapped blocks of one network, by their number in execution order. Two of them are on the device at a time.

    While a block computes, forward or backward, the next one is copied to the device into the memory of the previous
    one.

    Args:
        trained: Swap parameters that require a gradient as well.
    """

    def __init__(self, trained: bool = False) -> None:
        self.trained = trained
        self._blocks: dict[int, _Block] = {}
        self._copies: dict[torch.device, SideCopies] = {}
        # Number of the last block in the backward pass, and the event after which earlier gradients have left.
        self._last: tuple[int, torch.cuda.Event | None] = (-1, None)

    def __reduce__(self) -> Any:
        return Swap, (self.trained,)  # a copied network gets a Swap without blocks, which it adds itself

    def add(self, number: int, module: nn.Module, names: tuple[str, ...]) -> "_Block":
        """Return the block of a number. It is created if it is not known or belongs to another module."""
        known = self._blocks.get(number)
        if known is None or known.module() is not module:
            known = self._blocks[number] = _Block(module, names, self.trained)
        return known

    def enter(self, number: int, device: torch.device, backward: bool = False) -> None:
        """Bring a block to the device, start to copy the next one, and move all others to the CPU.

        Args:
            number: Number of the block.
            device: The device.
            backward: Set in the backward pass, in which the next block is the one before.
        """
        block = self._blocks[number]
        neighbours = [self._blocks.get(number + 1), self._blocks.get(number - 1)]
        if backward:
            neighbours.reverse()
        ahead = next((other for other in neighbours if other is not None), None)
        for other in self._blocks.values():
            if other is not block and other is not ahead:
                other.leave()
        if device not in self._copies:
            self._copies[device] = SideCopies(device)
        copies = self._copies[device]
        block.bring(copies)
        if ahead is not None:
            ahead.bring(copies)
        copies.wait(block.done)

    def watch(self, number: int, device: torch.device, given: object, output: object) -> None:
        """Register hooks that bring the block back when the backward pass reaches its output.

        Args:
            number: Number of the block.
            device: The device.
            given: Arguments of the block.
            output: Result of the block.

        Raises:
            ConfigurationError: If the output contains no tensors, or a view of the block's weights.
        """
        memory = self._blocks[number].memory_id()
        inputs = {id(leaf) for leaf in tree_leaves(given)}
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not tensors and torch.is_grad_enabled():
            raise ConfigurationError(
                f"BlockSwap: the output of block {number} contains no tensors that torch's pytrees find, so its "
                "backward pass cannot be observed. Return tensors, tuples or mappings, or name other blocks"
            )
        for tensor in tensors:
            if not is_traceable_wrapper_subclass(tensor) and storage_id(tensor.untyped_storage()) == memory:
                raise ConfigurationError(
                    f"BlockSwap: block {number} returns a view of its own weights, which are moved to the CPU. Return "
                    "a copy, or name other blocks"
                )
            if tensor.requires_grad and id(tensor) not in inputs:
                tensor.register_hook(functools.partial(self._back, number, device))

    def ran(self, number: int) -> None:
        """Move all blocks to the CPU after the last one has run without gradients.

        Other code may then write to the weights through ``data``, as the exchange with an average does. Such a write to
        a copy on the device would be lost.
        """
        if self.trained and number == max(self._blocks):
            self.come_to_rest()

    def _back(self, number: int, device: torch.device, gradient: Tensor) -> None:
        self.enter(number, device, backward=True)
        if not self.trained:
            return
        self._blocks[number].set_aside()
        last_number, last_done = self._last
        if number != last_number:
            self._last = (number, self._copies[device].done())
            # Without this wait gradients would accumulate on the device while the bus is busy.
            if last_done is not None:
                last_done.synchronize()
        after_backward(self._finish)

    def _finish(self) -> None:
        self.come_to_rest()
        for copies in self._copies.values():
            copies.finish()

    def come_to_rest(self, stale: bool = False) -> None:
        """Move all blocks to the CPU, so that other code may read and write their weights.

        Args:
            stale: Set if the weights may also be replaced, so that they are collected anew before the next use.
        """
        for block in self._blocks.values():
            block.leave()
            block.stale |= stale


class _Block:
    """Swapped tensors of one block, with one piece of memory on the CPU and one on the device.

    The device memory is resized to 0 and back instead of being freed, so that references to the weights in autograd,
    bitsandbytes or a recomputation become valid again whenever the block is on the device.

    Args:
        module: The block's module.
        names: Names of the parameters to swap.
        trained: Swap parameters that require a gradient as well.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...], trained: bool) -> None:
        self.module = weakref.ref(module)
        self.names = names
        self.trained = trained
        self.stale = True  # the lists below must be built before the next use
        self.there = False  # the tensors are on the device
        self.tensors: list[Tensor] = []
        self.places: list[Place] = []  # of each tensor in the memory
        self.homes: list[Tensor] = []  # each tensor in CPU memory
        self.pointers: list[int] = []  # address of each tensor on the device
        self.versions: list[int] = []  # version counter of each tensor when it came to the device
        self.trains: list[bool] = []  # whether each tensor required a gradient
        self.gradients: dict[Tensor, Tensor] = {}  # gradients in CPU memory of tensors on the device
        self.hooks: list[RemovableHandle] = []
        self.host: Tensor | None = None
        # A storage on the device and not a tensor, because a tensor could be read while the storage is empty.
        self.memory: torch.UntypedStorage | None = None
        self.device: torch.device | None = None
        self.copies: SideCopies | None = None
        self.done: Any = None

    def memory_id(self) -> int | None:
        """Return the id of the storage on the device, or None if there is none."""
        if self.memory is None:
            return None
        return storage_id(self.memory)

    def bring(self, copies: SideCopies) -> None:
        """Start to copy the weights to the device, unless they are there or being copied."""
        if self._stands_in():
            self._pretend(there=True)
            return
        if self.there and (self.device != copies.device or self._changed(self.pointers)):
            self.leave()
        if self.there:
            return
        if self.stale or self._changed([home.data_ptr() for home in self.homes]):
            self._take(copies)
        assert self.host is not None
        self.copies = copies
        copies.begin()
        with torch.inference_mode(False), torch.no_grad(), copies.beside():
            if self.memory is None or self.device != copies.device:
                self.memory = torch.empty_like(self.host, device=copies.device).untyped_storage()
                self.device = copies.device
            self.memory.resize_(self.host.nbytes)
            on_device = torch.empty(0, dtype=torch.uint8, device=copies.device).set_(self.memory)
            on_device.copy_(self.host, non_blocking=True)
            self.done = copies.done()
            self.there = True
            for tensor, place in zip(self.tensors, self.places, strict=True):
                tensor.data = place.view(on_device)
        self.pointers = [tensor.data_ptr() for tensor in self.tensors]
        self.versions = [version_of(tensor) for tensor in self.tensors]

    def leave(self) -> None:
        """Make the weights refer to CPU memory. Weights that were written on the device are copied there first."""
        if self._stands_in():
            self._pretend(there=False)
            return
        if not self.there:
            return
        assert self.memory is not None
        self.there = False
        every = zip(self.tensors, self.pointers, self.homes, self.versions, strict=True)
        for tensor, pointer, home, version in every:
            if tensor.data_ptr() != pointer:  # other code has set ``data``
                tensor.data = tensor.data.to("cpu")
                self.stale = True
                continue
            if version_of(tensor) != version:
                with torch.inference_mode(False), torch.no_grad():
                    home.copy_(tensor.data)
            tensor.data = home
        self.memory.resize_(0)
        while self.gradients:
            tensor, gradient = self.gradients.popitem()
            tensor.grad = gradient

    def _stands_in(self) -> bool:
        """Return whether the weights have no values and stand for weights on another device, as in a plan."""
        module = self.module()
        return module is not None and any(stands_in(parameter) for parameter in module.parameters())

    def _pretend(self, there: bool) -> None:
        """Report to the meter of a plan where the weights would be. Nothing is moved."""
        module = self.module()
        assert module is not None
        if there != self.there or not self.tensors:
            self.tensors = swapped_tensors(module, self.names, self.trained)
            self.there = there
            for tensor in self.tensors:
                moves(tensor, away=not there)

    def set_aside(self) -> None:
        """Detach the gradients before the block's backward pass, because autograd cannot add to them on the CPU."""
        for tensor in self.tensors:
            if tensor.grad is not None:
                self.gradients[tensor] = tensor.grad
                tensor.grad = None

    @torch.no_grad()
    def _send(self, tensor: Tensor) -> None:
        """Move a complete gradient to CPU memory and add the gradient that is there."""
        gradient = tensor.grad
        before = self.gradients.get(tensor)
        if gradient is None or not self.there:
            return
        if gradient.requires_grad:
            raise ConfigurationError(
                "BlockSwap: trained=True cannot compute gradients of gradients (create_graph=True), because the "
                "weights leave the device. Leave out trained=True"
            )
        assert self.copies is not None
        self.copies.begin()
        with self.copies.beside():
            if before is not None:  # added on the device, where autograd would add it, for the same rounding
                gradient = before.to(gradient.device, non_blocking=True) + gradient
            self.gradients[tensor] = gradient.to("cpu", non_blocking=True)
            if self.copies.stream is not None:
                tensor.grad.record_stream(self.copies.stream)  # type: ignore[union-attr]
        tensor.grad = None

    def _changed(self, pointers: list[int]) -> bool:
        """Return whether a tensor's address differs from ``pointers``, or its ``requires_grad`` has changed."""
        for tensor, trains, pointer in zip(self.tensors, self.trains, pointers, strict=True):
            if tensor.requires_grad != trains or tensor.data_ptr() != pointer:
                return True
        return False

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(self, copies: SideCopies) -> None:
        """Move all tensors to swap into one piece of pinned memory.

        Each tensor gets a storage of its own, because a file would otherwise hold the whole memory for each of them.
        """
        module = self.module()
        assert module is not None
        self.tensors = swapped_tensors(module, self.names, self.trained)
        swapped = {id(tensor) for tensor in self.tensors}
        # A parameter that was swapped while it was frozen may train now and belongs on the device.
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.device != copies.device and id(parameter) not in swapped:
                parameter.data = parameter.data.to(copies.device)
        for hook in self.hooks:
            hook.remove()
        self.trains = [tensor.requires_grad for tensor in self.tensors]
        self.hooks = [t.register_post_accumulate_grad_hook(self._send) for t in self.tensors if t.requires_grad]
        starts: dict[object, int] = {}  # offset of each tensor; tensors that are views of each other share one
        size = 0
        self.places = []
        for tensor in self.tensors:
            key = (memory_of(tensor), tensor.dtype, tensor.stride())
            if key not in starts:
                starts[key] = size
                size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
            self.places.append(place_of(tensor, starts[key]))
        self.host = copies.host(size)
        self.memory = None
        self.homes = []
        storages: dict[int, Tensor] = {}
        for tensor, place in zip(self.tensors, self.places, strict=True):
            part = self.host.numpy()[place.offset : place.offset + tensor.nbytes]
            storage = storages.setdefault(place.offset, torch.from_numpy(part))
            self.homes.append(place._replace(offset=0).view(storage))
            self.homes[-1].copy_(tensor)
        for tensor, home in zip(self.tensors, self.homes, strict=True):
            tensor.data = home
        self.stale = False
