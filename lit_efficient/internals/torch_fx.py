"""What a module's forward does with its input, from a symbolic run of its code that needs no batch.

Nothing is computed and nothing changes: torch.fx records which calls follow from which.
"""

import inspect
import random
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Tracer

from lit_efficient.internals.torch_fake import has_values

_ADDS = ("add", "add_", "iadd", "sub", "sub_", "isub", "addcmul", "addcmul_")
_SIZES = ("shape", "dtype", "device", "ndim", "size", "dim", "numel", "is_cuda", "requires_grad")
_QUESTIONS = 1000
_SHORTCUT = 1  # layers of a shortcut
_KEEP_ZERO = ("getitem", "chunk", "split", "unbind", "unsqueeze", "squeeze", "view", "reshape", "expand", "tanh", "to")
# What a value of a forward is: the input itself, but for scale and layout; the input as parts that add to it return it;
# what layers have made of it; their sum.
_INPUT, _CARRIED, _BRANCH, _SUM = 1, 2, 3, 4
_Ends = list[tuple[str, str, bool]]
_Known = dict[int, tuple[_Ends, _Ends]]  # of a module, by its identity


class _Recorder(Tracer):
    def __init__(self, opaque: Callable[[nn.Module], bool], answer: bool) -> None:
        super().__init__()
        self._opaque = opaque
        self._answer = answer  # to each question about a tensor
        self._asked = 0

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._opaque(m)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.is_leaf_module(m, ""):
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)
        return m.forward(*args, **kwargs)  # without hooks, which may do anything

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        return attr_val

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return a
        try:
            return super().create_arg(a)
        except NotImplementedError:  # an object of the model's own
            return None

    def to_bool(self, obj: Any) -> bool:
        self._asked += 1
        if self._asked > _QUESTIONS:  # a loop that ends with its answer
            raise RuntimeError
        return self._answer

    def iter(self, obj: Any) -> Iterator[Any]:
        return iter((obj[0], obj[1]))  # height and width, most likely


class _Call(nn.Module):
    def __init__(self, module: nn.Module, every: bool) -> None:
        super().__init__()
        twin = object.__new__(_own_class(module))  # what the forward sets on itself, is set on this one
        twin.__dict__.update(module.__dict__)
        self.inner = twin
        parameters = inspect.signature(twin.forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and _is_given(p, every)]

    def forward(self, given: Any) -> Any:
        if not self.names:
            return self.inner.forward(given[0])
        return self.inner.forward(**{name: given[i] for i, name in enumerate(self.names)})


def _is_given(p: inspect.Parameter, every: bool) -> bool:
    tensor = p.annotation is p.empty or "Tensor" in str(p.annotation)
    return p.default is p.empty or (every and p.default is None and tensor)


def _own_class(module: nn.Module) -> Any:
    """The class whose code a module was written with, whatever :func:`lit_efficient.surgery.mix_in` put before it."""
    cls: Any = type(module)
    while "mixed_from" in vars(cls):
        _, cls = cls.mixed_from
    return cls


def _record(module: nn.Module, opaque: Callable[[nn.Module], bool], every: bool = False) -> Graph | None:
    """The graph of a module's forward, ``opaque`` parts being one call each; ``None`` where it cannot be recorded.

    Tensors that need not be given are, with ``every``.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    state, put_back = random.getstate(), _held_by(module)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), warnings.catch_warnings(action="ignore"):
            for answer in (False, True):  # special cases ask for one of them, assertions for the other
                with suppress(Exception):  # code of anybody, run on stand-ins, may raise anything
                    return _Recorder(opaque, answer).trace(_Call(module, every))
    finally:
        random.setstate(state)
        put_back()
    return None


def _held_by(module: nn.Module) -> Callable[[], None]:
    """What puts back all that a module and its parts hold: they count calls, keep outputs, gather statistics."""
    attributes = [(part, dict(vars(part))) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    containers: dict[int, tuple[Any, Any]] = {}
    stack: list[Any] = [value for _, values in attributes for value in values.values()]
    while stack:
        value = stack.pop()
        if isinstance(value, dict | list | set | deque) and id(value) not in containers:
            containers[id(value)] = value, copy(value)
            stack += value.values() if isinstance(value, dict) else value

    def put_back() -> None:
        for part, values in attributes:
            vars(part).clear()
            vars(part).update(values)
        for value, before in containers.values():
            if len(value) != len(before) or any(a is not b for a, b in zip(_flat(value), _flat(before))):
                value.clear()
                value.extend(before) if isinstance(value, list | deque) else value.update(before)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    return put_back


def _flat(container: Any) -> Iterator[Any]:
    return chain(container, container.values() if isinstance(container, dict) else ())


@dataclass(frozen=True)
class Forward:
    """What one trace of a module's forward shows, in which each direct part is one call.

    Args:
        adds: Whether it adds to its first argument what its layers make of it; ``None`` if it cannot be traced.
        calls: Names of the parts in the order of their calls; empty if it cannot be traced.
        returns_one: Whether it is known to return one value. Annotations are not always right.
    """

    adds: bool | None = None
    calls: tuple[str, ...] = ()
    returns_one: bool = False


def read_forward(module: nn.Module, adding: Collection[int] = ()) -> Forward:
    """Trace a module's forward once; parts whose identities are in ``adding`` return their input plus something."""
    graph = _record(module, lambda part: True)
    if graph is None:
        return Forward()
    nodes = list(graph.nodes)
    calls = tuple(_name_of(node) for node in nodes if node.op == "call_module")
    one = any(node.op == "output" and isinstance(node.args[0], Node) for node in nodes)
    return Forward(_adds(graph, module, adding, 0), calls, one)


def adds_to_input(
    module: nn.Module, adding: Collection[int] = (), *, whole: bool = False, argument: int = 0
) -> bool | None:
    """Whether a forward adds what its layers make of an argument to that argument; ``None`` if it hides it.

    Parts whose identities are in ``adding`` are known to do so: what they return is their input still. ``whole`` looks
    into the other parts, too; else the addition must stand in its own code.
    """

    def opaque(part: nn.Module) -> bool:
        return not whole or type(part).__module__.startswith("torch.nn") or not has_parts(part)

    graph = _record(module, opaque)
    return None if graph is None else _adds(graph, module, adding, argument)


def _adds(graph: Graph, module: nn.Module, adding: Collection[int], argument: int) -> bool | None:
    found: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op == "output":
            return any(found[n] == _SUM for n in node.all_input_nodes)
        found[node] = _kind_of(node, {found[n] for n in node.all_input_nodes} - {0}, module, adding, argument)
    return None


def _kind_of(node: Node, kinds: set[int], module: nn.Module, adding: Collection[int], argument: int = 0) -> int:
    if node.op == "placeholder":
        return 0
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "getitem" and node.all_input_nodes[0].op == "placeholder":
        return _INPUT if node.args[1] == argument else 0
    if not kinds or name in _SIZES or (name == "getattr" and node.args[1] in _SIZES):
        return 0
    both = bool(kinds & {_INPUT, _CARRIED}) and _BRANCH in kinds
    if node.op == "call_module":
        part = module.get_submodule(_name_of(node))
        if not has_matrices(part):
            return _SUM if both else max(kinds)
        return max(*kinds, _CARRIED) if id(part) in adding else _BRANCH
    if name in _ADDS:
        return _SUM if both or kinds >= {_INPUT, _CARRIED} else max(kinds)
    given = (*node.args, *node.kwargs.values())
    if _BRANCH in kinds or (name != "mul" and any(isinstance(a, nn.Parameter) and _is_matrix(a) for a in given)):
        return _BRANCH
    return max(kinds)


def _name_of(node: Node) -> str:
    return str(node.target).removeprefix("inner.")


def adds_to_several(module: nn.Module) -> bool:
    """Whether a forward has more than one residual stream, as where images and text attend to each other."""
    return any(adds_to_input(module, argument=i) for i in range(1, len(_Call(module, every=False).names)))


def runs_in_chain(module: nn.Module, parts: Collection[nn.Module]) -> bool | None:
    """Whether a module gives to one of ``parts`` what follows from another; ``None`` if its forward hides it."""
    inside = {id(part) for part in parts}
    lists = (part for part in module.modules() if isinstance(part, nn.Sequential))
    if any(sum(id(child) in inside for child in children) > 1 for children in lists):
        return True
    graph = _record(module, lambda part: id(part) in inside or not any(id(m) in inside for m in part.modules()))
    if graph is None:
        return None
    after: set[Node] = set()
    for node in graph.nodes:
        follows = any(n in after for n in node.all_input_nodes)
        is_part = node.op == "call_module" and id(module.get_submodule(_name_of(node))) in inside
        if follows and is_part:
            return True
        if follows or is_part:
            after.add(node)
    return False


def has_parts(module: nn.Module) -> bool:
    """Whether a module is made of others; a layer that is wrapped with its adapter (``one_layer``) is not."""
    return not getattr(module, "one_layer", False) and any(True for _ in module.children())


def has_matrices(module: nn.Module) -> bool:
    """Whether a module holds more than vectors."""
    return any(map(_is_matrix, module.parameters()))


def _is_matrix(parameter: Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1


def all_residual_ends(root: nn.Module) -> Iterator[tuple[nn.Module, str, str, bool]]:
    """The :func:`residual_ends` of each part of a network that has parts, behind that; its forwards are run once."""
    known: _Known = {}
    for part in root.modules():
        if has_parts(part) and not isinstance(part, nn.ModuleList):
            yield from ((part, *end) for end in residual_ends(part, known))


def residual_ends(module: nn.Module, known: _Known | None = None) -> list[tuple[str, str, bool]]:
    """The layers whose output a forward adds to its first argument, each with the norm behind it, or ``""``.

    Looked for in its own code; of a part that is made of others it is the last layer of matrices that the part's code
    calls, or where that is hidden, that it defines. Of factors the one that is computed last is the branch, and the
    others are its gates; the third value tells whether one of these is zero now. A branch beside a shortcut that is one
    layer of the input is added, too. What is ``known`` of a network's parts while it stays as it is, is kept there.
    """
    found, known = [], {} if known is None else known
    for name, norm, closed in _ends(module, known)[0]:
        found += [_inside(name, norm, closed, inner) for inner in _last_layers(module.get_submodule(name), known)]
    return list({end[:2]: end for end in found}.values())


def _inside(name: str, norm: str, closed: bool, inner: tuple[str, str, bool]) -> tuple[str, str, bool]:
    end, behind, shut = inner
    return (
        f"{name}.{end}" if end else name,
        norm or (f"{name}.{behind}" if behind else ""),
        closed or shut,
    )


def _last_layers(part: nn.Module, known: _Known) -> _Ends:
    if not has_parts(part):
        return [("", "", False)]
    found = []
    for name, norm, closed in _ends(part, known)[1]:
        found += [_inside(name, norm, closed, inner) for inner in _last_layers(part.get_submodule(name), known)]
    if found:
        return found
    defined = [name for name, layer in part.named_modules() if name and not has_parts(layer) and has_matrices(layer)]
    return [(defined[-1], "", False)] if defined else []


def _ends(module: nn.Module, known: _Known) -> tuple[_Ends, _Ends]:
    """Parts with matrices, each with the norm behind it, that a forward adds to its input, and that it returns."""
    if id(module) not in known:
        added, returned = _ends_in(_record(module, lambda part: True), module, known)
        if added:  # a block, which may have more branches, as for attention to another text
            more, _ = _ends_in(_record(module, lambda part: True, every=True), module, known)
            added = list(dict.fromkeys([*added, *more]))
        known[id(module)] = added, returned
    return known[id(module)]


def _ends_in(graph: Graph | None, module: nn.Module, known: _Known) -> tuple[_Ends, _Ends]:
    kinds: dict[Node, int] = {}
    ends: dict[Node, _Ends] = {}
    depths: dict[Node, int] = {}  # layers of matrices on the way from the input
    called: dict[Node, int] = {}  # when the last of them was
    zeros: set[Node] = set()  # what is zero whatever the input is
    added: _Ends = []
    for i, node in enumerate(graph.nodes if graph is not None else ()):
        if node.op == "output":
            first = node.args[0][0] if isinstance(node.args[0], list | tuple) and node.args[0] else node.args[0]
            return added, ends.get(first, []) if kinds.get(first) == _BRANCH else []
        inputs, name = node.all_input_nodes, getattr(node.target, "__name__", str(node.target))
        kinds[node] = kind = _kind_of(node, {kinds[n] for n in inputs} - {0}, module, ())
        branches = [n for n in inputs if kinds[n] == _BRANCH]
        depths[node] = max((depths[n] for n in inputs if kinds[n]), default=0)
        called[node] = max((called[n] for n in inputs), default=-1)
        closed, factors = False, inputs[1:] if name.startswith("addcmul") else inputs if "mul" in name else []
        if factors:
            branches = sorted(branches, key=called.__getitem__)[-1:]
            constants = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, Tensor)]
            closed = any(n in zeros for n in factors if n not in branches) or any(map(_is_zero, constants))
        elif name in _ADDS and kind == _BRANCH and len(branches) == 2 and {*branches} <= {*node.args}:
            short, deep = sorted(branches, key=depths.__getitem__)
            if depths[short] <= _SHORTCUT < depths[deep] and ends[short] != ends[deep]:
                kinds[node], kind, branches = _SUM, _SUM, [deep]
        given = [(end, norm, closed or shut) for n in branches for end, norm, shut in ends[n]]
        ends[node] = given if kind == _BRANCH else []
        if closed or (name in _KEEP_ZERO and inputs[0] in zeros):
            zeros.add(node)
        if node.op == "call_module":
            part, name = module.get_submodule(_name_of(node)), _name_of(node)
            if has_matrices(part):
                depths[node] += sum(not has_parts(layer) and has_matrices(layer) for layer in part.modules())
                called[node] = i
                if all(_is_zero(*part.get_submodule(end).parameters()) for end, _, _ in _last_layers(part, known)):
                    zeros.add(node)
                ends[node] = [(name, "", False)] if kind == _BRANCH else []
            elif kind == _BRANCH and getattr(part, "weight", None) is not None:
                ends[node] = [(end, name, shut) for end, _, shut in given]
            elif kind == _BRANCH and _is_zero(*part.parameters()):
                ends[node] = [(end, norm, True) for end, norm, _ in given]
        if kind == _SUM:
            added += given
    return added, []


def _is_zero(*tensors: Tensor) -> bool:
    return bool(tensors) and all(has_values(tensor) and not tensor.any() for tensor in tensors)


def fed_alone(module: nn.Module) -> dict[str, set[str]]:
    """Names of the layers that a forward calls -> the layers that their outputs go to; ``""`` for anything else.

    Looks into parts, too, as far as their code can be recorded; empty where its own cannot be.
    """
    graph = _record(module, lambda part: not has_parts(part)) or _record(module, lambda part: True)
    found: dict[str, set[str]] = {}
    for node in graph.nodes if graph is not None else ():
        if node.op == "call_module":
            users = list(node.users)
            alone = len(users) == 1 and users[0].op == "call_module" and users[0].args[:1] == (node,)
            found.setdefault(_name_of(node), set()).add(_name_of(users[0]) if alone else "")
    return found
