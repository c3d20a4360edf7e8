"""Analysis of a module's forward by symbolic tracing (torch.fx), which needs no batch.

Nothing is computed and nothing changes. torch.fx records which calls use the results of which other calls.
"""

import enum
import inspect
import random
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Tracer

from lit_efficient.internals.contents import contents, is_mutable, restorer
from lit_efficient.internals.torch_dispatch import has_values

_ADDS = ("add", "add_", "iadd", "sub", "sub_", "isub", "addcmul", "addcmul_")
_SIZES = ("shape", "dtype", "device", "ndim", "size", "dim", "numel", "is_cuda", "requires_grad")
_MOST_ANSWERS = 1000
_SHORTCUT = 1  # most layers in a shortcut
_KEEP_ZERO = ("getitem", "chunk", "split", "unbind", "unsqueeze", "squeeze", "view", "reshape", "expand", "tanh", "to")


class _Kind(enum.IntEnum):
    """Relation of a value in a forward to the input."""

    NONE = 0  # independent of the input
    INPUT = 1  # the input itself, up to scale and layout
    CARRIED = 2  # the input after parts that add something to it
    BRANCH = 3  # the output of layers
    SUM = 4  # input plus branch


class End(NamedTuple):
    """Last layer of a branch."""

    layer: str  # name
    norm: str  # name of the norm behind the layer, or ``""``
    closed: bool  # whether a factor on the branch is zero at the moment


_Ends = list[End]
_Known = dict[int, tuple[_Ends, _Ends]]  # results of `_ends_of`, by the id of the module


class _Recorder(Tracer):
    """Tracer that does not look into ``opaque`` modules, and gives one answer to all questions about tensors."""

    def __init__(self, opaque: Callable[[nn.Module], bool], answer: bool) -> None:
        super().__init__()
        self._opaque = opaque
        self._answer = answer
        self._asked = 0

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._opaque(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if self.is_leaf_module(m, ""):
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)
        return m.forward(*args, **kwargs)  # without hooks, which may have side effects

    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: object) -> Any:
        return attr_val

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return a
        try:
            return super().create_arg(a)
        except NotImplementedError:  # an object of a class that torch.fx does not know
            return None

    def to_bool(self, obj: object) -> bool:
        self._asked += 1
        if self._asked > _MOST_ANSWERS:  # a loop that would not end with this answer
            raise RuntimeError
        return self._answer

    def iter(self, obj: Any) -> Iterator[Any]:
        return iter((obj[0], obj[1]))  # most likely height and width


class _Call(nn.Module):
    """Root of a trace that calls a module with its required arguments, and optional tensors with ``every``."""

    def __init__(self, module: nn.Module, every: bool) -> None:
        super().__init__()
        twin = object.__new__(_own_class(module))  # a shallow copy takes the attributes that the forward sets
        twin.__dict__.update(module.__dict__)
        self.inner = twin
        parameters = inspect.signature(twin.forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and _is_given(p, every)]

    def forward(self, given: Any) -> Any:
        if not self.names:
            return self.inner.forward(given[0])
        return self.inner.forward(**{name: given[i] for i, name in enumerate(self.names)})


def _is_given(p: inspect.Parameter, every: bool) -> bool:
    if p.default is p.empty:
        return True
    return every and p.default is None and (p.annotation is p.empty or "Tensor" in str(p.annotation))


def _own_class(module: nn.Module) -> Any:
    """Return the class of a module without what :func:`lit_efficient.surgery.mix_in` has put in front of it."""
    cls: Any = type(module)
    while "mixed_from" in vars(cls):
        _, cls = cls.mixed_from
    return cls


def _record(module: nn.Module, opaque: Callable[[nn.Module], bool], every: bool = False) -> Graph | None:
    """Trace a module's forward.

    Args:
        module: The module.
        opaque: Returns whether a part is recorded as one call.
        every: Also pass optional tensors.

    Returns:
        The graph, or ``None`` if the forward cannot be traced.
    """
    if torch.cuda.is_initialized():
        devices = [torch.cuda.current_device()]
    else:
        devices = []
    state = random.getstate()
    put_back = _snapshot(module)
    # torch cannot answer for the device of a stand-in. Autocast changes no relation between values.
    asks = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda *_: False
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), warnings.catch_warnings(action="ignore"):
            for answer in (False, True):  # special cases test for one of them, assertions for the other
                with suppress(Exception):  # foreign code that runs on stand-ins can raise anything
                    return _Recorder(opaque, answer).trace(_Call(module, every))
    finally:
        torch.is_autocast_enabled = asks
        random.setstate(state)
        put_back()
    return None


def _snapshot(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores the attributes, containers and buffers of a module and its parts.

    A forward may count calls, keep outputs or gather statistics.
    """
    attributes = [(part, dict(vars(part))) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    containers: dict[int, tuple[object, Callable[[], None]]] = {}  # the objects stay alive, so that ids are unique
    stack: list[Any] = [value for _, values in attributes for value in values.values()]
    while stack:
        value = stack.pop()
        if is_mutable(value) and id(value) not in containers:
            containers[id(value)] = value, restorer(value)
            stack += contents(value)

    def put_back() -> None:
        for part, values in attributes:
            vars(part).clear()
            vars(part).update(values)
        for _, restore in containers.values():
            restore()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    return put_back


@dataclass(frozen=True)
class Forward:
    """Result of one trace of a module's forward, in which each direct part is one call.

    Args:
        adds: Whether the forward adds the output of its layers to its first argument. ``None`` if it cannot be traced.
        calls: Names of the parts in the order of their calls. Empty if the forward cannot be traced.
        returns_one: Whether the forward is known to return one value. Annotations may be wrong.
    """

    adds: bool | None = None
    calls: tuple[str, ...] = ()
    returns_one: bool = False


def read_forward(module: nn.Module, adding: Collection[int] = ()) -> Forward:
    """Trace a module's forward once.

    Args:
        module: The module.
        adding: Ids of parts that are known to return their input plus something.
    """
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
    """Return whether a forward adds the output of its layers to an argument, or ``None`` if it cannot be traced.

    Args:
        module: The module.
        adding: Ids of parts that are known to return their input plus something.
        whole: Also look into other parts. Otherwise the addition must be in the module's own code.
        argument: Position of the argument.
    """

    def opaque(part: nn.Module) -> bool:
        return not whole or type(part).__module__.startswith("torch.nn") or not has_parts(part)

    graph = _record(module, opaque)
    if graph is None:
        return None
    return _adds(graph, module, adding, argument)


def _adds(graph: Graph, module: nn.Module, adding: Collection[int], argument: int) -> bool | None:
    found: dict[Node, _Kind] = {}
    for node in graph.nodes:
        if node.op == "output":
            return any(found[n] == _Kind.SUM for n in node.all_input_nodes)
        found[node] = _kind_of(node, {found[n] for n in node.all_input_nodes}, module, adding, argument)
    return None


def _kind_of(node: Node, inputs: set[_Kind], module: nn.Module, adding: Collection[int], argument: int = 0) -> _Kind:
    """Return the kind of a value from the kinds of the values that it is computed from."""
    if node.op == "placeholder":
        return _Kind.NONE
    if isinstance(node.target, str):
        name = node.target
    else:
        name = getattr(node.target, "__name__", "")
    if name == "getitem" and node.all_input_nodes[0].op == "placeholder":
        if node.args[1] == argument:
            return _Kind.INPUT
        return _Kind.NONE
    kinds = inputs - {_Kind.NONE}
    if not kinds or name in _SIZES or (name == "getattr" and node.args[1] in _SIZES):
        return _Kind.NONE
    both = _Kind.BRANCH in kinds and not kinds.isdisjoint({_Kind.INPUT, _Kind.CARRIED})
    if node.op == "call_module":
        part = module.get_submodule(_name_of(node))
        if id(part) in adding and has_matrices(part):
            return max(*kinds, _Kind.CARRIED)
        if has_matrices(part):
            return _Kind.BRANCH
        return _Kind.SUM if both else max(kinds)
    if name in _ADDS:
        if both or kinds >= {_Kind.INPUT, _Kind.CARRIED}:
            return _Kind.SUM
        return max(kinds)
    given = (*node.args, *node.kwargs.values())
    uses_matrix = any(isinstance(a, nn.Parameter) and _is_matrix(a) for a in given)
    if _Kind.BRANCH in kinds or (name != "mul" and uses_matrix):
        return _Kind.BRANCH
    return max(kinds)


def _name_of(node: Node) -> str:
    return str(node.target).removeprefix("inner.")


def adds_to_several(module: nn.Module) -> bool:
    """Return whether a forward has several residual streams, as with joint attention of images and text."""
    return any(adds_to_input(module, argument=i) for i in range(1, len(_Call(module, every=False).names)))


def runs_in_chain(module: nn.Module, parts: Collection[nn.Module]) -> bool | None:
    """Return whether the input of one of ``parts`` depends on the output of another.

    ``None`` means that the forward cannot be traced.
    """
    inside = {id(part) for part in parts}
    for children in module.modules():
        if isinstance(children, nn.Sequential) and sum(id(child) in inside for child in children) > 1:
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
    """Return whether a module consists of others. A layer with an adapter (``one_layer``) counts as one."""
    return not getattr(module, "one_layer", False) and any(True for _ in module.children())


def has_matrices(module: nn.Module) -> bool:
    """Return whether a module has a parameter that is not a vector."""
    return any(map(_is_matrix, module.parameters()))


def _is_matrix(parameter: Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1


def all_residual_ends(root: nn.Module) -> Iterator[tuple[nn.Module, str, str, bool]]:
    """Yield each part of a network with each of its :func:`residual_ends`. Every forward is traced once."""
    known: _Known = {}
    for part in root.modules():
        if has_parts(part) and not isinstance(part, nn.ModuleList):
            for end in residual_ends(part, known):
                yield part, *end


def residual_ends(module: nn.Module, known: _Known | None = None) -> _Ends:
    """Return the last layers of the branches that a forward adds to its first argument.

    - The additions are searched in the module's own code. If the branch ends in a part that consists of others, its
      last layer is the last layer with a matrix that the code of the part calls. If that code cannot be traced, it is
      the last such layer that the part defines.
    - In a product, the factor that is computed last is the branch, and the others are gates.
    - A branch that is added to a shortcut of one layer counts too.

    Args:
        module: The module.
        known: Cache for several calls on one network, which must not change in between.
    """
    known = {} if known is None else known
    found: dict[tuple[str, str], End] = {}
    for end in _ends_of(module, known)[0]:
        for inner in _last_layers(module.get_submodule(end.layer), known):
            joined = _inside(end, inner)
            found[joined[:2]] = joined
    return list(found.values())


def _inside(outer: End, inner: End) -> End:
    """Return an end inside the part that is the layer of ``outer``, with names from outside."""
    layer = f"{outer.layer}.{inner.layer}" if inner.layer else outer.layer
    norm = f"{outer.layer}.{inner.norm}" if inner.norm else ""
    return End(layer, outer.norm or norm, outer.closed or inner.closed)


def _last_layers(part: nn.Module, known: _Known) -> _Ends:
    """Return the last layers with matrices in a part."""
    if not has_parts(part):
        return [End("", "", False)]
    found: _Ends = []
    for end in _ends_of(part, known)[1]:
        found += [_inside(end, inner) for inner in _last_layers(part.get_submodule(end.layer), known)]
    if found:
        return found
    defined = [name for name, layer in part.named_modules() if name and not has_parts(layer) and has_matrices(layer)]
    return [End(name, "", False) for name in defined[-1:]]


def _ends_of(module: nn.Module, known: _Known) -> tuple[_Ends, _Ends]:
    """Return the direct parts with matrices that a forward adds to its input, and those that it returns."""
    if id(module) not in known:
        added, returned = _trace_ends(_record(module, lambda part: True), module, known)
        if added:  # a block, which may have further branches for optional inputs, such as cross-attention
            more, _ = _trace_ends(_record(module, lambda part: True, every=True), module, known)
            added = list(dict.fromkeys([*added, *more]))
        known[id(module)] = added, returned
    return known[id(module)]


@dataclass
class _Value:
    """Properties of a value in a trace."""

    kind: _Kind
    depth: int  # most layers with matrices between the input and this value
    called: int  # position of the last of these layers in the trace
    ends: _Ends = field(default_factory=list)  # of a branch
    zero: bool = False  # zero for every input


def _trace_ends(graph: Graph | None, module: nn.Module, known: _Known) -> tuple[_Ends, _Ends]:
    values: dict[Node, _Value] = {}
    added: _Ends = []
    for position, node in enumerate(graph.nodes if graph is not None else ()):
        if node.op == "output":
            first = node.args[0]
            if isinstance(first, list | tuple) and first:
                first = first[0]
            returned = values.get(first)
            return added, returned.ends if returned is not None and returned.kind == _Kind.BRANCH else []
        inputs = [values[n] for n in node.all_input_nodes]
        name = getattr(node.target, "__name__", str(node.target))
        value = _Value(
            _kind_of(node, {one.kind for one in inputs}, module, ()),
            depth=max((one.depth for one in inputs if one.kind), default=0),
            called=max((one.called for one in inputs), default=-1),
        )
        values[node] = value
        branch_nodes = [n for n in node.all_input_nodes if values[n].kind == _Kind.BRANCH]
        branches = [values[n] for n in branch_nodes]
        factors = []
        if name.startswith("addcmul"):
            factors = inputs[1:]
        elif "mul" in name:
            factors = inputs
        closed = False
        if factors:
            branches = sorted(branches, key=lambda one: one.called)[-1:]
            constants = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, Tensor)]
            gates = [one for one in factors if not any(one is branch for branch in branches)]
            closed = any(gate.zero for gate in gates) or any(map(_is_zero, constants))
        elif name in _ADDS and value.kind == _Kind.BRANCH and len(branches) == 2 and {*branch_nodes} <= {*node.args}:
            short, deep = sorted(branches, key=lambda one: one.depth)
            if short.depth <= _SHORTCUT < deep.depth and short.ends != deep.ends:
                value.kind = _Kind.SUM
                branches = [deep]
        ends = [End(end.layer, end.norm, closed or end.closed) for branch in branches for end in branch.ends]
        if value.kind == _Kind.BRANCH:
            value.ends = ends
        value.zero = closed or (name in _KEEP_ZERO and inputs[0].zero)
        if node.op == "call_module":
            _trace_call(value, position, _name_of(node), module, known)
        if value.kind == _Kind.SUM:
            added += ends
    return added, []


def _trace_call(value: _Value, position: int, name: str, module: nn.Module, known: _Known) -> None:
    """Update the result of a call of a part."""
    part = module.get_submodule(name)
    if has_matrices(part):
        value.depth += sum(not has_parts(layer) and has_matrices(layer) for layer in part.modules())
        value.called = position
        last = [part.get_submodule(end.layer) for end in _last_layers(part, known)]
        if all(_is_zero(*layer.parameters()) for layer in last):
            value.zero = True
        value.ends = [End(name, "", False)] if value.kind == _Kind.BRANCH else []
    elif value.kind == _Kind.BRANCH and getattr(part, "weight", None) is not None:
        value.ends = [End(end.layer, name, end.closed) for end in value.ends]
    elif value.kind == _Kind.BRANCH and _is_zero(*part.parameters()):
        value.ends = [End(end.layer, end.norm, True) for end in value.ends]


def _is_zero(*tensors: Tensor) -> bool:
    return bool(tensors) and all(has_values(tensor) and not tensor.any() for tensor in tensors)


def fed_alone(module: nn.Module) -> dict[str, set[str]]:
    """Return the layers that a forward calls, each with the names of the layers that its output goes to.

    ``""`` stands for anything but one layer. Parts are included if their code can be traced. The result is empty if the
    module's own code cannot be traced.
    """
    graph = _record(module, lambda part: not has_parts(part)) or _record(module, lambda part: True)
    found: dict[str, set[str]] = {}
    if graph is not None:
        for node in graph.nodes:
            if node.op == "call_module":
                users = list(node.users)
                alone = len(users) == 1 and users[0].op == "call_module" and users[0].args[:1] == (node,)
                found.setdefault(_name_of(node), set()).add(_name_of(users[0]) if alone else "")
    return found
