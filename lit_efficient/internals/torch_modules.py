"""What a module does when it is loaded, moved or cast: ``nn.Module._load_from_state_dict`` and ``nn.Module._apply``.

torch's public hooks would be attributes of each instance, which copies and pickles of a changed class lose.
Checked with torch 2.13.
"""

from collections.abc import Callable, Container, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


def forward_hooks(module: nn.Module) -> int:
    """How many hooks the forwards of ``module`` and its parts call: ``_forward_hooks``, ``_forward_pre_hooks``."""
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


def hook_owners(module: nn.Module) -> list[Any]:
    """Whose methods the forwards' hooks are: of ``_forward_hooks`` and ``_forward_pre_hooks`` that are bound."""
    tables = [table for part in module.modules() for table in (part._forward_pre_hooks, part._forward_hooks)]
    owners = [getattr(hook, "__self__", None) for table in tables for hook in table.values()]
    return [owner for owner in owners if hasattr(owner, "__dict__")]


def tensor_tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """The tables in which a module keeps its own parameters and buffers: ``_parameters``, ``_buffers``."""
    return module._parameters, module._buffers


def saved_names(module: nn.Module) -> list[str]:
    """The names of a module's own tensors that it saves: those of ``_non_persistent_buffers_set`` are left out."""
    parameters, buffers = tensor_tables(module)
    passing = module._non_persistent_buffers_set
    kept = {**parameters, **{name: buffer for name, buffer in buffers.items() if name not in passing}}
    return [name for name, tensor in kept.items() if tensor is not None]


def give_memory(module: nn.Module, device: Any) -> None:
    """Put what is on meta in ``module`` onto a device, with any values, and leave the rest where it is: ``_apply``."""
    exchange(module, lambda p: torch.empty_like(p, device=device) if type(p) is nn.Parameter and p.is_meta else p)
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def exchange(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Put what ``change`` makes of them in the place of parameters; unlike in ``_apply``, what is tied stays so."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        table = tensor_tables(part)[0]
        for name, p in table.items():
            if p is not None and (other := change(p)) is not p:
                table[name] = made.setdefault(id(p), nn.Parameter(other, p.requires_grad))


def whole_twin(module: nn.Module, empty: Container[str]) -> Any:
    """A module with the attributes of this one, and tensors of its own, unshared and unset: ``_parameters``.

    Of those that ``empty`` names there is but one number each, for whoever gives it others to ask for shape and format.
    """
    twin: Any = object.__new__(type(module))
    twin.__dict__.update(vars(module))
    for kind, table in zip(("_parameters", "_buffers"), tensor_tables(module)):
        own = {}
        for name, t in table.items():
            shape = t.shape if t is not None and name not in empty else ()
            own[name] = None if t is None else torch.empty(shape, dtype=t.dtype, device=t.device).expand(t.shape)
        twin.__dict__[kind] = own
    return twin


def take_attributes(module: nn.Module, twin: nn.Module) -> None:
    """Give ``module`` what has been set on its :func:`whole_twin`, but for the tensors."""
    own = vars(twin).items()
    module.__dict__.update({name: value for name, value in own if name not in ("_parameters", "_buffers")})


def held_beside(module: object) -> list[Any]:
    """The attributes of ``module`` but the tables of its parameters and parts: ``_parameters``, ``_modules``."""
    return [value for name, value in vars(module).items() if name not in ("_parameters", "_modules")]


class Loads:
    """Put in front of an ``nn.Module``: ``before_load`` may change what the module is about to read."""

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Change ``state_dict`` in place; the module's own entries begin with ``prefix``."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        self.before_load(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)  # type: ignore[misc]


class LoadsPartly(Loads):
    """Weights that are loaded need not hold its own: then these stay as they are."""

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        module: Any = self
        for name, tensor in module.state_dict(prefix=prefix).items():
            state_dict.setdefault(name, tensor)


class FollowsWeight:
    """Put in front of a layer: some of its tensors are made of its weight, and are made again of another one."""

    @property
    def made_of_weight(self) -> tuple[str, ...]:
        """Their names."""
        raise NotImplementedError

    def follow_weight(self) -> None:
        """Make them of the weight that the layer has now."""
        raise NotImplementedError


class Saves:
    """Put in front of an ``nn.Module``: ``after_save`` may change what it has written: ``_save_to_state_dict``."""

    def after_save(self, destination: dict[str, Any], prefix: str) -> None:
        """Change ``destination`` in place; the module's own entries begin with ``prefix``."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, *arguments: Any, **options: Any) -> None:
        super()._save_to_state_dict(destination, prefix, *arguments, **options)  # type: ignore[misc]
        self.after_save(destination, prefix)


class Moves:
    """Put in front of an ``nn.Module``: ``after_move`` takes along what lies beside its parameters."""

    def after_move(self) -> None:
        """Follow the parameters to where they are now, in whatever type they are now."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]  # of the module
        self.after_move()
        return self


class Stays:
    """Put in front of an ``nn.Module``: some tensors in it are cast with the others, but never moved."""

    def staying(self) -> Iterable[Tensor]:
        """Those tensors; asked before anything is cast or moved."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        staying = {id(tensor) for tensor in self.staying()}

        def cast(tensor: Tensor) -> Tensor:
            if id(tensor) not in staying:
                return fn(tensor)
            dtype = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).dtype
            return tensor if dtype == tensor.dtype else tensor.to(dtype)

        return super()._apply(cast, recurse)  # type: ignore[misc]


class StaysFloat32:
    """Put in front of an ``nn.Module``: some of its tensors move with it, but are never cast to less (``bf16-true``).

    At usual rates a bfloat16 weight hardly moves: of steps of 1e-5, 3 in 100 are more than half its last digit.
    """

    float32: ClassVar[tuple[str, ...]] = ()  # how the names begin; those of all classes that a module is made of count

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        begin = tuple(start for cls in type(self).__mro__ for start in vars(cls).get("float32", ()))
        kept = {name: tensor.detach() for name, tensor in self._named() if name.startswith(begin)}
        super()._apply(fn, recurse)  # type: ignore[misc]
        for name, tensor in self._named():
            if name in kept and tensor.element_size() < torch.float32.itemsize:
                own = kept[name].to(tensor.device)
                if hasattr(tensor, "to_local"):  # a DTensor, whose shard an assignment to `data` leaves as it is
                    torch.utils.swap_tensors(tensor, nn.Parameter(own, tensor.requires_grad))
                else:
                    tensor.data = own
        return self

    def _named(self) -> list[tuple[str, Tensor]]:
        module: Any = self
        return [*module.named_parameters(), *module.named_buffers()]
