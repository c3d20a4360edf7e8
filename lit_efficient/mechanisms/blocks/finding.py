"""Which modules of a network are its blocks: what libraries declare, what stands in lists, what adds to its input."""

from collections import Counter
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.hugging_face import repeated_blocks
from lit_efficient.internals.torch_fx import adds_to_input, calls_of, has_matrices, has_parts, runs_in_chain
from lit_efficient.surgery import count, match_modules, parents, unmixed


def find_blocks(
    root: nn.Module,
    patterns: str | Sequence[str] = "auto",
    *,
    who: str,
    declared: bool = True,
    example: str = r"blocks=['layers\.\d+']",
) -> list[tuple[str, nn.Module]]:
    """The repeated residual blocks of a network, in the order in which they are defined.

    With ``"auto"`` the classes that a diffusers model names in ``_repeated_blocks`` are taken; else layers (subclasses
    of transformers' ``GradientCheckpointingLayer``, or where there are none the members of every ``nn.ModuleList`` or
    ``nn.Sequential`` that holds two or more modules of one class, each with children of its own), and each class of
    modules of which two add something to their input, as a symbolic run of their code shows. Of blocks in blocks the
    outer ones count, unless they are stages: those that run two or more of one class inside one after the other. A
    block that stands in several places counts once.

    Args:
        root: Any module.
        patterns: ``"auto"``, or regular expressions for dotted names as in :func:`match_modules`.
        who: Name of the technique that asks, for the error.
        declared: Whether ``_repeated_blocks`` decides where there is one.
        example: How its user names blocks, for the error.

    Raises:
        ConfigurationError: If there is no such block.
    """
    if patterns != "auto":
        wanted = [patterns] if isinstance(patterns, str) else list(patterns)
        return _once(root, _outermost(match_modules(root, wanted, who=who)))
    named = {name for module in root.modules() for name in repeated_blocks(module) if declared}
    found = _outermost([item for item in root.named_modules() if type(item[1]).__name__ in named])
    found = found or _Search(root).blocks()
    if not found:
        raise ConfigurationError(
            f"{who}: found no repeated blocks in {type(root).__name__}; name them: {example}, "
            f"for example. Top-level modules are: {', '.join(name for name, _ in root.named_children()) or 'none'}"
        )
    return _once(root, found)


# Of each network what was found of modules by their settings: several techniques look for its blocks, one by one.
_KNOWN: "WeakKeyDictionary[nn.Module, dict[Any, bool | None]]" = WeakKeyDictionary()


class _Search:
    """Which modules of a network are its blocks, and which are stages that hold them."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules: dict[str, nn.Module] = dict(list(root.named_modules())[1:])
        self.adding: set[int] = set()
        known = _KNOWN.setdefault(root, {})
        for module in reversed(self.modules.values()):  # what is inside comes first
            if _may_add(module) and has_matrices(module):
                alike = self._settings(module)
                if alike not in known:
                    known[alike] = adds_to_input(module, self.adding)
                if known[alike]:
                    self.adding.add(id(module))
        counts = Counter(unmixed(m) for m in self.modules.values() if id(m) in self.adding)
        repeated = {kind for kind, number in counts.items() if number > 1}
        layers = [m for m in self.modules.values() if _is_transformers_layer(m)]
        layers = layers or [m for _, m in _homogeneous(root)]
        self.candidates = {id(m) for m in layers} | {id(m) for m in self.modules.values() if unmixed(m) in repeated}
        self.stages: set[type] = set()

    def blocks(self) -> list[tuple[str, nn.Module]]:
        new = {unmixed(block) for _, block in self._inside("", self.root) if self._is_stage(block)}
        if not new:
            return self._inside("", self.root)
        self.stages |= new
        self._add_siblings([name for name, _ in self._inside("", self.root)])
        return self.blocks()

    def _settings(self, module: nn.Module) -> Any:
        """What a module's code may ask for; it does the same in modules that agree in this."""
        plain = (bool, int, float, str, tuple, NoneType)
        own = [(key, repr(value)) for key, value in vars(module).items() if isinstance(value, plain)]
        parts = [(key, unmixed(part), id(part) in self.adding) for key, part in module.named_modules()]
        return unmixed(module), tuple(own), tuple(parts), tuple(key for key, _ in module.named_parameters())

    def _inside(self, prefix: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
        found = {}
        for key, child in module.named_children():
            is_block = id(child) in self.candidates and unmixed(child) not in self.stages
            name = f"{prefix}{key}"
            found[key] = [(name, child)] if is_block else self._inside(f"{name}.", child)
        parts = [key for key, blocks in found.items() if blocks]
        called = calls_of(module) if len(parts) > 1 and _may_add(module) else []
        first = {key: next((i for i, c in enumerate(called) if f"{c}.".startswith(f"{key}.")), -1) for key in parts}
        return [block for key in sorted(parts, key=first.__getitem__) for block in found[key]]

    def _is_stage(self, module: nn.Module) -> bool:
        """Whether most of a module are two or more blocks of one class, which it runs one after the other."""
        parts = [part for part in list(module.modules())[1:] if id(part) in self.adding]
        inside = {id(p): p.numel() for part in parts for p in part.parameters()}
        if sum(inside.values()) * 2 <= count(module.parameters()):
            return False
        if len(parts) == 1 and id(module) not in self.adding:  # a block with something that changes the shape behind it
            return adds_to_input(module, whole=True) is False
        for kind in {unmixed(part) for part in parts}:
            alike = [part for part in parts if unmixed(part) is kind]
            if len(alike) > 1 and runs_in_chain(module, alike):
                return True
        return False

    def _add_siblings(self, found: Sequence[str]) -> None:
        """What stands where the blocks of other stages do is a block, though nothing proves it."""
        stages = [name for name, m in self.modules.items() if unmixed(m) in self.stages]
        places = {name.rpartition(".")[0] for name in found}
        inner = {(_owner(s), p[len(s) :]) for s in stages for p in places if f"{p}.".startswith(f"{s}.")}
        for stage in stages:
            for place in (f"{stage}{end}" for owner, end in inner if owner == _owner(stage)):
                held = self.modules.get(place)
                if isinstance(held, nn.ModuleList | nn.Sequential):
                    self.candidates |= {id(child) for child in held if _may_add(child) and has_matrices(child)}


def _once(root: nn.Module, found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    blocks = {id(block): block for _, block in found}
    names = {id(module): name for name, module in root.named_modules()}  # the first name of each
    return [(names[key], block) for key, block in blocks.items()]


def trained_blocks(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Without frozen ones, a teacher's say; all, where all are frozen."""
    return [(name, block) for name, block in found if any(p.requires_grad for p in block.parameters())] or found


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _may_add(module: nn.Module) -> bool:
    """Whether it has parts, and a forward that is more than running them one by one; a wrapped layer is no block."""
    return not isinstance(module, nn.ModuleList | nn.Sequential) and has_parts(module)


def _is_transformers_layer(module: nn.Module) -> bool:
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _homogeneous(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in root.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        kinds = {unmixed(child) for child in module}
        if len(kinds) == 1 and not isinstance(module[0], nn.ModuleList | nn.ModuleDict) and all(map(has_parts, module)):
            yield from ((f"{name}.{key}" if name else key, child) for key, child in module.named_children())


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    names = {name for name, _ in found}
    return [(name, module) for name, module in found if not any(parent in names for parent in parents(name))]
