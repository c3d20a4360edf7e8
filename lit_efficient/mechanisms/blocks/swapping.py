"""Blocks whose weights live in CPU memory and are streamed to the device ahead of their use, two at a time.

Of weights that train the gradients leave the device one by one, as they are complete. When the backward pass is over,
weights and gradients are in CPU memory, where an optimizer made of them steps.
"""

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_dispatch import after_backward, is_traceable_wrapper_subclass, storage_id
from lit_efficient.internals.torch_tensors import version as version_of
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.blocks.side_copies import Place, SideCopies, place_of
from lit_efficient.surgery import memory_of

_ALIGNED = 256  # bytes


def swapped_names(block: nn.Module, elsewhere: set[int], trained: bool = False) -> list[str]:
    """Names of the block's parameters that can leave the device: frozen (or ``trained``), dense, and used by nobody
    elsewhere.
    """
    return [name for name, p in block.named_parameters() if id(p) not in elsewhere and _can_leave(p, trained)]


def swapped_tensors(block: nn.Module, names: Iterable[str], trained: bool = False) -> list[Tensor]:
    """Those of the named parameters that are frozen (or ``trained``), and the constants that hang on codes or stand
    beside them.
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
    """In containers and plain objects, such as bitsandbytes' constants of a quantisation."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, nn.Module | type) and not callable(value):
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        for item in (*inside, *getattr(value, "__dict__", {}).values()):
            yield from _tensors_in(item, depth - 1)


class Swap:
    """The blocks of one network, by their numbers in the order in which they run; two of them are on a device.

    While a block computes, forward or backward, the one that is next comes. It takes the memory of the one before.

    Args:
        trained: Whether what trains is swapped, too.
    """

    def __init__(self, trained: bool = False) -> None:
        self.trained = trained
        self._blocks: dict[int, _Block] = {}
        self._copies: dict[torch.device, SideCopies] = {}
        self._last: tuple[int, Any] = (-1, None)  # block of the backward pass, and when the gradients before it are out

    def __reduce__(self) -> Any:
        return Swap, (self.trained,)  # a copied network swaps on its own

    def add(self, number: int, module: nn.Module, names: tuple[str, ...]) -> "_Block":
        """The block of a number; known ones stay."""
        known = self._blocks.get(number)
        if known is None or known.module() is not module:
            known = self._blocks[number] = _Block(module, names, self.trained)
        return known

    def enter(self, number: int, device: torch.device, backward: bool = False) -> None:
        """Have a block on the device, the next one on its way, and no other one there."""
        block = self._blocks[number]
        around = [self._blocks.get(number + 1), self._blocks.get(number - 1)]
        ahead = next((other for other in (reversed(around) if backward else around) if other is not None), None)
        for other in self._blocks.values():
            if other is not block and other is not ahead:
                other.leave()
        copies = self._copies[device] = self._copies.get(device) or SideCopies(device)
        for wanted in (block, ahead):
            if wanted is not None:
                wanted.bring(copies)
        copies.wait(block.done)

    def watch(self, number: int, device: torch.device, given: Any, output: Any) -> None:
        """Have the block back as soon as the backward pass knows the gradient of what it returned."""
        memory = self._blocks[number].memory_id()
        inputs = {id(leaf) for leaf in tree_leaves(given)}
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not tensors and torch.is_grad_enabled():
            raise ConfigurationError(
                f"BlockSwap: block {number} returns no tensors that torch's trees show, so that its backward pass "
                "could not be seen: return tensors, tuples or mappings, or name other blocks"
            )
        for tensor in tensors:
            if not is_traceable_wrapper_subclass(tensor) and storage_id(tensor.untyped_storage()) == memory:
                raise ConfigurationError(
                    f"BlockSwap: block {number} returns a view of its own weights, which leave the device: return a "
                    "copy, or name other blocks"
                )
            if tensor.requires_grad and id(tensor) not in inputs:
                tensor.register_hook(functools.partial(self._back, number, device))

    def ran(self, number: int) -> None:
        """Take what trains to CPU memory after the last block, when no backward pass will: others may write to it.

        An average that takes the weights' place does, through ``data``, which nobody sees.
        """
        if self.trained and number == max(self._blocks):
            self.come_to_rest()

    def _back(self, number: int, device: torch.device, gradient: Tensor) -> None:
        self.enter(number, device, backward=True)
        if not self.trained:
            return
        self._blocks[number].set_aside()
        if number != self._last[0]:
            before, self._last = self._last[1], (number, self._copies[device].done())
            if before is not None:  # or gradients would wait on the device for the bus
                before.synchronize()
        after_backward(self._ends)

    def _ends(self) -> None:
        self.come_to_rest()
        for copies in self._copies.values():
            copies.finish()

    def come_to_rest(self, stale: bool = False) -> None:
        """Take all blocks to CPU memory, so that their weights may be read and written; ``stale``: or replaced."""
        for block in self._blocks.values():
            block.leave()
            block.stale |= stale


class _Block:
    """One memory on either side for all that a block has swapped.

    The device's is emptied and filled again, not made anew: whatever autograd, bitsandbytes or a recomputation has kept
    of the weights is valid again whenever the block is there.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...], trained: bool) -> None:
        self.module, self.names, self.trained = weakref.ref(module), names, trained
        self.stale, self.there = True, False
        self.tensors: list[Tensor] = []
        self.places: list[Place] = []
        self.homes: list[Tensor] = []
        self.pointers: list[int] = []  # to the tensors' memory on the device
        self.versions: list[int] = []
        self.trains: list[bool] = []
        self.gradients: dict[Tensor, Tensor] = {}  # in CPU memory, of what is on the device
        self.hooks: list[Any] = []
        self.host: Tensor | None = None
        self.memory: torch.UntypedStorage | None = (
            None  # on the device; no tensor, which could be read while it is empty
        )
        self.device: torch.device | None = None
        self.copies: SideCopies | None = None
        self.done: Any = None

    def memory_id(self) -> int | None:
        """Of the storage on the device."""
        return None if self.memory is None else storage_id(self.memory)

    def bring(self, copies: SideCopies) -> None:
        """Start to copy the weights to the device, unless they are there or on the way."""
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
            there = torch.empty(0, dtype=torch.uint8, device=copies.device).set_(self.memory)
            there.copy_(self.host, non_blocking=True)
            self.done, self.there = copies.done(), True
            for tensor, place in zip(self.tensors, self.places, strict=True):
                tensor.data = place.view(there)
        self.pointers = [tensor.data_ptr() for tensor in self.tensors]
        self.versions = [version_of(tensor) for tensor in self.tensors]

    def leave(self) -> None:
        """Let the weights be those in CPU memory; what was written to them on the device goes there first."""
        if not self.there:
            return
        assert self.memory is not None
        self.there = False
        every = zip(self.tensors, self.pointers, self.homes, self.versions, strict=True)
        for tensor, pointer, home, version in every:
            if tensor.data_ptr() != pointer:  # somebody has given it other data
                tensor.data, self.stale = tensor.data.to("cpu"), True
                continue
            if version_of(tensor) != version:
                with torch.inference_mode(False), torch.no_grad():
                    home.copy_(tensor.data)
            tensor.data = home
        self.memory.resize_(0)
        while self.gradients:
            tensor, gradient = self.gradients.popitem()
            tensor.grad = gradient

    def set_aside(self) -> None:
        """Before the block's backward pass: autograd adds to no gradient in another memory."""
        for tensor in self.tensors:
            if tensor.grad is not None:
                self.gradients[tensor], tensor.grad = tensor.grad, None

    @torch.no_grad()
    def _send(self, tensor: Tensor) -> None:
        """Copy a gradient that is complete to CPU memory, onto what is there."""
        gradient, before = tensor.grad, self.gradients.get(tensor)
        if gradient is None or not self.there:
            return
        if gradient.requires_grad:
            raise ConfigurationError(
                "BlockSwap: a gradient of a gradient is wanted (create_graph=True), whose weights leave the device: "
                "leave out trained=True"
            )
        assert self.copies is not None
        self.copies.begin()
        with self.copies.beside():
            if before is not None:  # added on the device, as autograd adds
                gradient = before.to(gradient.device, non_blocking=True) + gradient
            self.gradients[tensor] = gradient.to("cpu", non_blocking=True)
            if self.copies.stream is not None:
                tensor.grad.record_stream(self.copies.stream)  # type: ignore[union-attr]
        tensor.grad = None

    def _changed(self, pointers: list[int]) -> bool:
        """Whether tensors have been given other data since, or have begun or ceased to train."""
        every = zip(self.tensors, self.trains, pointers, strict=True)
        return any(tensor.requires_grad != trains or tensor.data_ptr() != at for tensor, trains, at in every)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take(self, copies: SideCopies) -> None:
        """Move all that is swapped into one pinned memory, each tensor with a storage of its own, as files want it."""
        module = self.module()
        assert module is not None
        self.tensors = swapped_tensors(module, self.names, self.trained)
        swapped = {id(tensor) for tensor in self.tensors}
        for parameter in module.parameters():  # one was perhaps swapped before it trained
            if parameter.requires_grad and parameter.device != copies.device and id(parameter) not in swapped:
                parameter.data = parameter.data.to(copies.device)
        for hook in self.hooks:
            hook.remove()
        self.trains = [tensor.requires_grad for tensor in self.tensors]
        self.hooks = [t.register_post_accumulate_grad_hook(self._send) for t in self.tensors if t.requires_grad]
        starts: dict[Any, int] = {}
        size, self.places = 0, []
        for tensor in self.tensors:
            key = (memory_of(tensor), tensor.dtype, tensor.stride())
            if key not in starts:
                starts[key], size = size, size + -(-tensor.nbytes // _ALIGNED) * _ALIGNED
            self.places.append(place_of(tensor, starts[key]))
        self.host, self.memory, self.homes = copies.host(size), None, []
        storages: dict[int, Tensor] = {}
        for tensor, place in zip(self.tensors, self.places, strict=True):
            part = self.host.numpy()[place.offset : place.offset + tensor.nbytes]
            storage = storages.setdefault(place.offset, torch.from_numpy(part))
            self.homes.append(place._replace(offset=0).view(storage))
            self.homes[-1].copy_(tensor)
        for tensor, home in zip(self.tensors, self.homes, strict=True):
            tensor.data = home
        self.stale = False
