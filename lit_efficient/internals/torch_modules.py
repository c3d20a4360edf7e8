"""Private methods and attributes of ``nn.Module``, base classes of torch's layers, and mix-ins of modules.

The mix-ins act when a module is loaded, saved, moved or cast. They override ``_load_from_state_dict``,
``_save_to_state_dict`` and ``_apply``. torch's public hooks are attributes of an instance, which are lost in copies and
pickles. Checked with torch 2.13.
"""

from collections.abc import Callable, Container, Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormWithStatistics
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNorm

__all__ = [
    "BatchNorm",
    "Convolution",
    "Dropout",
    "FollowsWeight",
    "Loads",
    "LoadsPartly",
    "Moves",
    "NormWithStatistics",
    "Saves",
    "SpectralNorm",
    "Stays",
    "StaysFloat32",
    "exchange",
    "forward_hooks",
    "give_memory",
    "held_beside",
    "hook_owners",
    "padded",
    "saved_names",
    "take_attributes",
    "tensor_tables",
    "whole_twin",
]


def padded(convolution: Any, x: Tensor) -> Tensor:
    """Pad an input as a convolution does in modes other than zeros: ``_reversed_padding_repeated_twice``."""
    return F.pad(x, convolution._reversed_padding_repeated_twice, mode=convolution.padding_mode)


def forward_hooks(module: nn.Module) -> int:
    """Return the number of forward hooks of a module and its parts: ``_forward_hooks``, ``_forward_pre_hooks``."""
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


def hook_owners(module: nn.Module) -> list[object]:
    """Return the objects whose bound methods are forward hooks: ``_forward_hooks``, ``_forward_pre_hooks``."""
    tables = [table for part in module.modules() for table in (part._forward_pre_hooks, part._forward_hooks)]
    owners = [getattr(hook, "__self__", None) for table in tables for hook in table.values()]
    return [owner for owner in owners if hasattr(owner, "__dict__")]


def tensor_tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dicts of a module's own parameters and buffers: ``_parameters``, ``_buffers``."""
    return module._parameters, module._buffers


def saved_names(module: nn.Module) -> list[str]:
    """Return the names of a module's own tensors in its ``state_dict``: without ``_non_persistent_buffers_set``."""
    parameters, buffers = tensor_tables(module)
    tensors = parameters | {name: buffers[name] for name in buffers if name not in module._non_persistent_buffers_set}
    return [name for name, tensor in tensors.items() if tensor is not None]


def give_memory(module: nn.Module, device: Any) -> None:
    """Allocate the tensors of ``module`` that are on the meta device, without initialising them: ``_apply``."""

    def allocated(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=device)
        return tensor

    exchange(module, lambda p: allocated(p) if type(p) is nn.Parameter else p)
    module._apply(allocated)


def exchange(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace parameters by ``change`` of them. Unlike with ``_apply``, tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        table = tensor_tables(part)[0]
        for name, p in table.items():
            if p is None:
                continue
            other = change(p)
            if other is not p:
                table[name] = made.setdefault(id(p), nn.Parameter(other, p.requires_grad))


def whole_twin(module: nn.Module, empty: Container[str]) -> Any:
    """Return a copy of a module that shares its attributes, but has uninitialised tensors of its own: ``_parameters``.

    Args:
        module: The module.
        empty: Names of tensors that the caller replaces. They are one expanded number, which takes no memory.
    """
    twin: Any = object.__new__(type(module))
    twin.__dict__.update(vars(module))
    for kind, table in zip(("_parameters", "_buffers"), tensor_tables(module)):
        own: dict[str, Tensor | None] = {}
        for name, tensor in table.items():
            own[name] = None
            if tensor is not None:
                shape = () if name in empty else tensor.shape
                own[name] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        twin.__dict__[kind] = own
    return twin


def take_attributes(module: nn.Module, twin: nn.Module) -> None:
    """Copy the attributes of a :func:`whole_twin` back to ``module``, except the tensors."""
    own = vars(twin).items()
    module.__dict__.update({name: value for name, value in own if name not in ("_parameters", "_buffers")})


def held_beside(module: object) -> list[object]:
    """Return the values of a module's attributes, without its parameters and parts: ``_parameters``, ``_modules``."""
    return [value for name, value in vars(module).items() if name not in ("_parameters", "_modules")]


class Loads:
    """Mix-in of an ``nn.Module`` whose ``before_load`` can change the state that the module is about to load."""

    def before_load(self, state_dict: dict[str, object], prefix: str) -> None:
        """Change ``state_dict`` in place. The module's own keys begin with ``prefix``."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *arguments: object) -> None:
        self.before_load(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)  # type: ignore[misc]


class LoadsPartly(Loads):
    """Mix-in of an ``nn.Module`` whose entries may be missing in a state. It keeps its own tensors then."""

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        module: Any = self
        for name, tensor in module.state_dict(prefix=prefix).items():
            state_dict.setdefault(name, tensor)


class FollowsWeight:
    """Mix-in of a layer with tensors that are computed from its weight, and again when the weight is replaced."""

    @property
    def made_of_weight(self) -> tuple[str, ...]:
        """Names of these tensors."""
        raise NotImplementedError

    def follow_weight(self) -> None:
        """Compute these tensors from the current weight."""
        raise NotImplementedError


class Saves:
    """Mix-in of an ``nn.Module`` whose ``after_save`` can change its saved state: ``_save_to_state_dict``."""

    def after_save(self, destination: dict[str, object], prefix: str) -> None:
        """Change ``destination`` in place. The module's own keys begin with ``prefix``."""
        raise NotImplementedError

    def _save_to_state_dict(
        self, destination: dict[str, object], prefix: str, *arguments: object, **options: object
    ) -> None:
        super()._save_to_state_dict(destination, prefix, *arguments, **options)  # type: ignore[misc]
        self.after_save(destination, prefix)


class Moves:
    """Mix-in of an ``nn.Module`` whose ``after_move`` is called after its parameters have been moved or cast."""

    def after_move(self) -> None:
        """Move tensors that are not parameters to the current device and dtype of the parameters."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> object:
        super()._apply(fn, recurse)  # type: ignore[misc]  # of the module
        self.after_move()
        return self


class Stays:
    """Mix-in of an ``nn.Module`` some of whose tensors are cast with the others, but never moved."""

    def staying(self) -> Iterable[Tensor]:
        """Return these tensors. It is called before tensors are cast or moved."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> object:
        staying = {id(tensor) for tensor in self.staying()}

        def cast(tensor: Tensor) -> Tensor:
            if id(tensor) not in staying:
                return fn(tensor)
            dtype = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).dtype
            return tensor.to(dtype)

        return super()._apply(cast, recurse)  # type: ignore[misc]


class StaysFloat32:
    """Mix-in of an ``nn.Module`` some of whose tensors stay in float32 (under ``bf16-true``).

    A bfloat16 weight hardly changes at usual learning rates: only 3 of 100 updates of 1e-5 exceed half its last digit.
    """

    float32: ClassVar[tuple[str, ...]] = ()  # prefixes of the names; those of all base classes apply

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> object:
        begin = tuple(start for cls in type(self).__mro__ for start in vars(cls).get("float32", ()))
        kept = {name: tensor.detach() for name, tensor in self._named() if name.startswith(begin)}
        super()._apply(fn, recurse)  # type: ignore[misc]
        for name, tensor in self._named():
            if name in kept and tensor.element_size() < torch.float32.itemsize:
                own = kept[name].to(tensor.device)
                if hasattr(tensor, "to_local"):  # a DTensor, whose shard does not change if `data` is assigned
                    torch.utils.swap_tensors(tensor, nn.Parameter(own, tensor.requires_grad))
                else:
                    tensor.data = own
        return self

    def _named(self) -> list[tuple[str, Tensor]]:
        module: Any = self
        return [*module.named_parameters(), *module.named_buffers()]
