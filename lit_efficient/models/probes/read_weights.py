"""Linear layers that a network does not call: it reads their weight, and would read codes where that is quantised.

Mamba multiplies by ``dt_proj.weight`` itself, fused kernels take ``out_proj.weight``. A copy of the network on the meta
device, which holds no numbers, is run once and tells. Others cast the input to ``wo.weight.dtype`` (T5 and its kin),
which is that of the codes then: the source of a module tells.
"""

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_efficient.surgery import mix_in


class _Guessing(TorchFunctionMode):
    """Decisions that need numbers are no: without it most masks could not be made."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.__bool__, Tensor.item):
            return False
        return function(*args, **(kwargs or {}))


class Watched(nn.Module):
    """Mix-in of a layer one of whose parameters other code may read than the layer's own forward."""

    _runs: bool = False  # the own forward

    def read_elsewhere(self, name: str, parameter: nn.Parameter) -> Tensor:
        """What other code gets that reads a parameter."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return value if self._runs or not isinstance(value, nn.Parameter) else self.read_elsewhere(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_runs"] = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_runs"] = False


class _Noted(Watched):
    _read = False

    def read_elsewhere(self, name: str, parameter: nn.Parameter) -> Tensor:
        self.__dict__["_read"] |= name == "weight"
        return parameter


def read_layers(make: Callable[[], nn.Module]) -> list[str]:
    """Names of the linear layers whose weight the causal language model that ``make`` gives reads by itself.

    Found in a training and an evaluation step, for every part of the same class at once: a step may break off where a
    decision needs numbers.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad(), _Guessing():
        network = make()
        layers = {name: part for name, part in network.named_modules() if type(part) is nn.Linear}
        for part in layers.values():
            mix_in(part, _Noted, _read=False)
        for training in (True, False):
            with contextlib.suppress(Exception):  # what it has read until then counts
                network.train(training)(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    owners = {name: (type(network.get_submodule(name.rpartition(".")[0])), name.rpartition(".")[2]) for name in layers}
    read = {owners[name] for name, part in layers.items() if part.__dict__["_read"]}
    return [name for name, owner in owners.items() if owner in read]


def cast_to(module: nn.Module) -> list[str]:
    """Names of the parts of a module whose ``weight.dtype`` the code of the modules around them asks for."""
    found = []
    for name, owner in module.named_modules():
        paths = {path for kind in type(owner).__mro__ for path in _asked_in(kind)}
        found += [".".join(filter(None, (name, *end))) for path in sorted(paths) for end in _parts_at(owner, path)]
    return found


@functools.cache
def _asked_in(kind: type) -> frozenset[tuple[str, ...]]:
    """Of each ``self.a[0].b.weight.dtype`` in the source of a class ``a``, ``0`` and ``b``; ``*`` for any index."""
    if kind.__module__.partition(".")[0] in ("builtins", "torch"):
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, SyntaxError, TypeError):
        return frozenset()
    asked = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "dtype"]
    weights = [node.value for node in asked if isinstance(node, ast.Attribute) and node.attr == "weight"]
    return frozenset(path for node in weights if (path := _path(node)))


def _path(node: ast.expr) -> tuple[str, ...]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        else:
            parts.append(str(node.slice.value) if isinstance(node.slice, ast.Constant) else "*")
        node = node.value
    return tuple(reversed(parts)) if isinstance(node, ast.Name) and node.id == "self" else ()


def _parts_at(owner: nn.Module, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not path:
        yield ()
        return
    for key, child in owner.named_children():
        if path[0] in (key, "*"):
            yield from ((key, *rest) for rest in _parts_at(child, path[1:]))
