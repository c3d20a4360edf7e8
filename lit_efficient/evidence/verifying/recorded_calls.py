"""Recorded calls of layers: the inputs and the output of each call."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lit_efficient.internals.torch_dispatch import backward_runs
from lit_efficient.internals.torch_trees import tree_leaves, tree_map_only


@dataclass
class Call:
    """One call of a layer."""

    name: str  # of the layer, in the module
    part: nn.Module  # the layer
    nth: int  # number of earlier calls of the layer
    outer: int  # number of the outermost call that contains this one
    outermost: bool  # True if no recorded call contains this one
    args: tuple[Any, ...] = ()  # inputs; recorded for all calls if graphs are kept, else for outermost ones only
    kwargs: dict[str, Any] = field(default_factory=dict)  # inputs by name, under the same condition
    output: Any = None

    @property
    def key(self) -> tuple[str, int]:
        """Key that the same call has in another step."""
        return self.name, self.nth

    @property
    def described(self) -> str:
        """Name and class of the layer."""
        return f"{self.name} ({type(self.part).__name__})"


def floats(tree: object) -> list[Tensor]:
    """Return the floating-point tensors of a nested structure."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@contextlib.contextmanager
def recorded(module: nn.Module, keep: Callable[[Any], Any]) -> Iterator[list[Call]]:
    """Record the calls of all layers of a module, in the order in which they end.

    Repetitions by activation checkpoints in the backward pass are not recorded.

    Args:
        module: The module.
        keep: Function that is applied to inputs and outputs before they are stored.
    """
    done: list[Call] = []
    stack: list[Call] = []
    counts: dict[str, int] = {}
    outer = itertools.count()

    def begins(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if backward_runs():
                return
            nth = counts.get(name, 0)
            counts[name] = nth + 1
            call = Call(name, part, nth, stack[0].outer if stack else next(outer), outermost=not stack)
            # Inputs of inner layers are needed for gradients only, and copies take memory.
            if call.outermost or keep is as_it_is:
                call.args = keep(args)
                call.kwargs = keep(kwargs)
            stack.append(call)

        return hook

    def ends(part: nn.Module, args: tuple[object, ...], output: object) -> None:
        if stack and stack[-1].part is part and not backward_runs():
            call = stack.pop()
            call.output = keep(output)
            done.append(call)

    with contextlib.ExitStack() as hooks:
        for name, part in module.named_modules():
            if name:
                hooks.enter_context(part.register_forward_pre_hook(begins(name), with_kwargs=True, prepend=True))
                hooks.enter_context(part.register_forward_hook(ends))
        yield done


def as_it_is(tree: object) -> object:
    """Return tensors with their graph."""
    return tree


def detached(tree: object) -> object:
    """Return copies of tensors without their graph."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)
