"""Calls of layers, recorded one by one: what each got, and what it gave out."""

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

    name: str  # the layer's, in the module
    part: nn.Module  # the layer
    nth: int  # how many calls of it came before
    outer: int  # the number of the outermost call that it is a part of
    outermost: bool  # whether it is that itself
    args: tuple[Any, ...] = ()  # what it got; without a graph that of outermost ones alone
    kwargs: dict[str, Any] = field(default_factory=dict)  # what it got by name
    output: Any = None  # what it gave

    @property
    def key(self) -> tuple[str, int]:
        """What the same call of another step has, too."""
        return self.name, self.nth

    @property
    def described(self) -> str:
        """The layer's name and class."""
        return f"{self.name} ({type(self.part).__name__})"


def floats(tree: Any) -> list[Tensor]:
    """The tensors of a tree that hold fractions."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@contextlib.contextmanager
def recorded(module: nn.Module, keep: Callable[[Any], Any]) -> Iterator[list[Call]]:
    """The calls of all layers of ``module``, in the order in which they end; not those that a checkpoint repeats."""
    done: list[Call] = []
    stack: list[Call] = []
    counts: dict[str, int] = {}
    outer = itertools.count()

    def begins(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
            if not backward_runs():
                number = stack[0].outer if stack else next(outer)
                stack.append(Call(name, part, counts.get(name, 0), number, not stack))
                counts[name] = counts.get(name, 0) + 1
                if not stack[1:] or keep is as_it_is:
                    stack[-1].args, stack[-1].kwargs = keep(args), keep(kwargs)

        return hook

    def ends(part: nn.Module, args: Any, output: Any) -> None:
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


def as_it_is(tree: Any) -> Any:
    """What keeps a call's tensors with their graph."""
    return tree


def detached(tree: Any) -> Any:
    """What keeps copies of a call's tensors."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)
