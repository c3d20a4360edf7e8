"""Layers whose weights are read by other code than their own forward, which would read codes after quantisation.

Mamba multiplies by ``dt_proj.weight`` itself, and fused kernels take ``out_proj.weight``. One run of a copy of the
network on the meta device, which holds no numbers, finds such reads. Other models cast the input to ``wo.weight.dtype``
(T5 and relatives), which would be the dtype of the codes. The source code of the module shows these.
"""

import ast
import contextlib
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_efficient.internals.torch_dispatch import no_dispatch_modes
from lit_efficient.models.probes.silent_layers import Watched
from lit_efficient.surgery import mix_in, unmixed


class _Guessing(TorchFunctionMode):
    """Mode that answers every question about a value with no: without it, most masks could not be built on meta."""

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if function in (Tensor.__bool__, Tensor.item):
            return False
        return function(*args, **(kwargs or {}))


class _Noted(Watched):
    """Mix-in that records reads of the weight."""

    _read = False

    def read_elsewhere(self, name: str, parameter: nn.Parameter) -> Tensor:
        self.__dict__["_read"] |= name == "weight"
        return parameter


def acts_as_linear(part: nn.Module) -> bool:
    """Return whether a layer is ``nn.Linear``, or of a class derived from it that computes the same.

    Layers that a technique has changed by a mix-in, such as new heads, are not.
    """
    kind: Any = type(part)
    return isinstance(part, nn.Linear) and kind is unmixed(part) and _computes_linear(kind)


@functools.cache
def _computes_linear(kind: type[nn.Linear]) -> bool:
    """Return whether the forward of a class computes ``x W^T + b`` from the attributes of ``nn.Linear`` alone.

    Falcon's layers do. Routers return several tensors, and layers of other packages store other weights.
    """
    if issubclass(kind, nn.modules.linear.NonDynamicallyQuantizableLinear):  # attention reads its weight
        return False
    if kind is nn.Linear:
        return True
    draw = torch.Generator().manual_seed(0)
    with (
        no_dispatch_modes(),
        torch.device("cpu"),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        contextlib.suppress(Exception),
    ):
        layer = nn.Linear(6, 4)
        layer.__class__ = kind
        x = torch.randn(2, 3, 6, generator=draw, device="cpu")
        y: Any = layer(x)
        return bool(torch.allclose(y, F.linear(x, layer.weight, layer.bias), atol=1e-5))
    return False


def read_elsewhere(module: nn.Module) -> list[str]:
    """Return the names of the linear layers in a module whose weight its causal language models read themselves."""
    return [f"{prefix}{name}" for prefix, make in _recipes(module) for name in read_layers(make)]


def _recipes(module: nn.Module) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield the name prefix of each causal model of transformers in a module, and a function that builds it again."""
    for name, part in module.named_modules():
        if callable(getattr(part, "prepare_inputs_for_generation", None)):
            kinds = [kind for kind in type(part).__mro__ if kind.__module__.startswith("transformers.models.")]
            if kinds:
                yield f"{name}." if name else "", partial(kinds[0], copy.deepcopy(part.config))


def read_layers(make: Callable[[], nn.Module]) -> list[str]:
    """Return the names of the linear layers whose weight a causal language model reads outside of the layer's forward.

    Args:
        make: Builds the model. It is run once in training and once in eval mode. A read found in one layer counts for
            the layers of the same name in all modules of the same class, because a run may stop where a decision needs
            numbers.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad(), _Guessing():
        network = make()
        layers = {name: part for name, part in network.named_modules() if acts_as_linear(part)}
        for part in layers.values():
            mix_in(part, _Noted, _read=False)
        for training in (True, False):
            with contextlib.suppress(Exception):  # reads before the exception count
                network.train(training)(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    places = {}  # name of a layer -> class of the module around it, and its name there
    for name in layers:
        owner, _, last = name.rpartition(".")
        places[name] = (type(network.get_submodule(owner)), last)
    read = {places[name] for name, part in layers.items() if part.__dict__["_read"]}
    return [name for name, place in places.items() if place in read]


def cast_to(module: nn.Module) -> list[str]:
    """Return the names of the parts whose ``weight.dtype`` is used by the code of the modules around them."""
    found = []
    for name, owner in module.named_modules():
        paths = {path for kind in type(owner).__mro__ for path in _asked_in(kind)}
        for path in sorted(paths):
            found += [".".join((name, *end)).lstrip(".") for end in _parts_at(owner, path)]
    return found


@functools.cache
def _asked_in(kind: type) -> frozenset[tuple[str, ...]]:
    """Return the paths in a class's source: ``(a, 0, b)`` for each ``self.a[0].b.weight.dtype``; ``*`` is any index."""
    if kind.__module__.partition(".")[0] in ("builtins", "torch"):
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, SyntaxError, TypeError):
        return frozenset()
    asked = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "dtype"]
    weights = [node.value for node in asked if isinstance(node, ast.Attribute) and node.attr == "weight"]
    return frozenset(map(_path, weights)) - {()}


def _path(node: ast.expr) -> tuple[str, ...]:
    """Return the path of an expression that starts at ``self``, or an empty one."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        else:
            parts.append(str(node.slice.value) if isinstance(node.slice, ast.Constant) else "*")
        node = node.value
    if isinstance(node, ast.Name) and node.id == "self":
        return tuple(reversed(parts))
    return ()


def _parts_at(owner: nn.Module, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the names, as tuples, of the parts of ``owner`` that a path describes."""
    if not path:
        yield ()
        return
    for key, child in owner.named_children():
        if path[0] in (key, "*"):
            yield from ((key, *rest) for rest in _parts_at(child, path[1:]))
