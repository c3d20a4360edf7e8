"""Map of a network: its repeated residual blocks, the networks that they belong to, and which blocks can be skipped.

Several techniques ask for the blocks of the same module. The forward pass of each kind of module is traced once for all
of them; results are kept for as long as the module's structure and settings stay the same. Only results are kept, never
modules, parameters or graphs, so that nothing stays in memory that the network has dropped.

A module may hold a second network that does not train: a teacher, a momentum copy, a baseline. Its blocks do not count.
The map therefore starts from the parameters that train.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from lit_efficient.declaration import held
from lit_efficient.errors import ConfigurationError, check_list
from lit_efficient.internals.hugging_face import repeated_blocks
from lit_efficient.internals.torch_fx import (
    Forward,
    adds_to_input,
    has_matrices,
    has_parts,
    read_forward,
    runs_in_chain,
)
from lit_efficient.surgery import count, match_modules, parents, unmixed

Named = list[tuple[str, nn.Module]]  # dotted names and modules
T = TypeVar("T")
_TRAINED = "_lit_efficient_trained"  # on a root: names of the parameters that trained before a technique froze them


def find_blocks(
    root: nn.Module,
    patterns: str | Sequence[str] = "auto",
    *,
    who: str,
    declared: bool = True,
    every: bool = False,
    example: str = r"blocks=['layers\.\d+']",
) -> Named:
    """Return names and modules of the repeated residual blocks of a module, in the order of its forward pass.

    Args:
        root: Any module.
        patterns: ``"auto"`` for :class:`BlockMap`'s search, or regular expressions for dotted names as in
            :func:`match_modules`.
        who: Name of the technique that asks, for the error.
        declared: Whether to take the blocks that a diffusers model declares, where it declares some.
        every: Whether to include blocks of networks that do not train.
        example: Argument with which the user names blocks, for the error.

    Raises:
        ConfigurationError: If there is no such block.
    """
    if patterns != "auto":
        check_list(who, "blocks", patterns, "auto, a pattern or a list of patterns", text=True)
        return _unique(root, _outermost(match_modules(root, patterns, who=who)))
    block_map = BlockMap(root)
    found = block_map.every(declared) if every else block_map.blocks(declared)
    if not found:
        raise ConfigurationError(
            f"{who}: found no repeated blocks in {type(root).__name__}; name them: {example}, "
            f"for example. Top-level modules are: {', '.join(name for name, _ in root.named_children()) or 'none'}"
        )
    return found


def note_trained(root: nn.Module) -> None:
    """Record which parameters of ``root`` train, before the first technique freezes the base of its adapters."""
    if _TRAINED not in root.__dict__:
        root.__dict__[_TRAINED] = {name for name, p in root.named_parameters() if p.requires_grad}


@dataclass
class _Memory:
    """Results of earlier maps of one module, by keys that hold settings of modules: a changed one is searched again."""

    answers: dict[Hashable, object] = field(default_factory=dict)

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the result that is kept under ``key``, which ``compute`` gives the first time."""
        if key not in self.answers:
            self.answers[key] = compute()
        return self.answers[key]  # type: ignore[return-value]


_MEMORY: "WeakKeyDictionary[nn.Module, _Memory]" = WeakKeyDictionary()


class BlockMap:
    """Repeated residual blocks of a module, and the networks that they belong to.

    Blocks are, in this order of preference:

    1. modules of the classes that a diffusers model names in ``_repeated_blocks``;
    2. subclasses of transformers' ``GradientCheckpointingLayer``, or without any, the members of each ``nn.ModuleList``
       or ``nn.Sequential`` that holds two or more modules of one class, each with children; and every class of modules
       of which two or more add something to their input, as a symbolic trace of their code shows.

    Of nested blocks the outer ones count, unless they are stages, which run two or more inner blocks of one class one
    after the other. A block that is reachable under several names counts once.

    Args:
        root: Any module.
        trains: Identities of the parameters that the optimizer holds. ``None`` takes those that require a gradient,
            and those that did before a technique froze them.
    """

    def __init__(self, root: nn.Module, trains: Collection[int] | None = None) -> None:
        self.root = root
        self._modules = dict(root.named_modules())
        self._memory = _MEMORY.setdefault(root, _Memory())
        frozen_later = held(root) | root.__dict__.get(_TRAINED, set())
        self._holders: set[str] = set()  # names of the modules that hold parameters which train
        for name, p in root.named_parameters(remove_duplicate=False):
            if trains is None:
                trained = p.requires_grad or name in frozen_later
            else:
                trained = id(p) in trains
            if trained:
                self._holders.update(parents(name))

    def every(self, declared: bool = True) -> Named:
        """Return names and modules of all blocks, also of networks that do not train."""
        settings = tuple((name, self._settings(module)) for name, module in self._modules.items())
        names = self._memory.once(("blocks", declared, settings), lambda: self._search(declared))
        return [(name, self._modules[name]) for name in names]

    def blocks(self, declared: bool = True) -> Named:
        """Return names and modules of the blocks of networks that train; all blocks if none of them trains."""
        found = self.every(declared)
        others = self.frozen_networks(declared)
        return [(name, block) for name, block in found if not is_inside(name, others)]

    def frozen_networks(self, declared: bool = True) -> tuple[str, ...]:
        """Return the names of the networks in the module that do not train, beside one that does.

        Such a network has no parameter that trains, and either holds whole blocks, while other blocks train, or has the
        class, parameter names and shapes of a network that trains. Frozen blocks in a list with blocks that train
        belong to a network that trains.
        """
        found = [name for name, _ in self.every(declared)]
        others: list[str] = []
        if any(name in self._holders for name in found):
            for name in found:
                idle = [outer for outer in (name, *parents(name)) if outer not in self._holders]
                if idle and idle[-1] != name:
                    others.append(idle[-1])
        for name, module in self._modules.items():
            around = name.rpartition(".")[0]
            top = name and name not in self._holders and (not around or around in self._holders)
            if top and _is_network(module) and not _is_container(self._modules[around]):
                training = [m for other, m in self._modules.items() if other in self._holders]
                same_class = [m for m in training if unmixed(m) is unmixed(module)]
                if self._likeness(module) in map(self._likeness, same_class):
                    others.append(name)
        return tuple(dict.fromkeys(others))

    def copies(self) -> dict[str, str]:
        """Return, for the name of each network that copies another one, the name of that first network.

        Copies have the same class, parameter names and shapes, hold blocks, and neither runs on what the other returns.
        They have the same depth, side by side: a student and its teacher, or the two halves of a siamese network.
        """
        around = {outer for name, _ in self.every() for outer in parents(name)}
        alike: dict[Hashable, list[str]] = {}
        for name, module in self._modules.items():
            if name in around and _is_network(module):
                alike.setdefault(self._likeness(module), []).append(name)
        copies: dict[str, str] = {}
        for first, *others in alike.values():  # outer networks before those in them
            for name in others:
                if not is_inside(name, copies) and not self._runs_in_chain(first, name):
                    copies[name] = first
        return copies

    def side_by_side(self, blocks: Sequence[str]) -> list[str]:
        """Return the networks of a LightningModule that hold ``blocks`` and run side by side, as actor and critic.

        The list is empty for a single network, and for networks of which one runs on what another returns, as far as
        the module's ``forward`` shows it.
        """
        names = list(dict.fromkeys(name.partition(".")[0] for name in blocks))
        networks = [self._modules[name] for name in names if name not in blocks]
        several = len(names) > 1 and len(networks) == len(names) and all(map(_is_network, networks))
        if not several or not hasattr(self.root, "training_step") or runs_in_chain(self.root, networks):
            return []
        return names

    def depths(self, found: Named) -> list[tuple[int, int]]:
        """Return, for each of the blocks, its position from 0 and the number of blocks in its network.

        Copies of a network, and networks side by side, have positions of their own.
        """
        own = (*self.copies(), *self.side_by_side([name for name, _ in found]))
        networks = [next((network for network in own if is_inside(name, (network,))), "") for name, _ in found]
        sizes = Counter(networks)
        seen: Counter[str] = Counter()
        positions = []
        for network in networks:
            positions.append((seen[network], sizes[network]))
            seen[network] += 1
        return positions

    def forward(self, module: nn.Module, adding: Collection[int] = ()) -> Forward:
        """Return what a trace of a module's forward pass shows; modules with equal settings are traced once."""
        inner = tuple(id(part) in adding for part in module.modules())
        key = ("forward", self._settings(module, inside=True), inner)
        return self._memory.once(key, lambda: read_forward(module, adding))

    def once(self, question: str, module: nn.Module, ask: Callable[[nn.Module], T]) -> T:
        """Return the answer to a question about a module's structure.

        Modules of equal settings and equal formats of weights are asked once. The answer must not depend on the values
        of weights.
        """
        settings = tuple(self._settings(part) for part in module.modules())
        tensors = [*module.named_parameters(), *module.named_buffers()]
        formats = tuple((name, tuple(t.shape), t.dtype, t.device, t.requires_grad, type(t)) for name, t in tensors)
        return self._memory.once(
            (question, self._settings(module, inside=True), settings, formats), lambda: ask(module)
        )

    def _settings(self, module: nn.Module, inside: bool = False) -> Hashable:
        """Return a module's class and the values that its code may branch on; ``inside`` adds its parts' classes."""
        plain = (bool, int, float, str, tuple, NoneType)
        own = tuple((key, repr(value)) for key, value in vars(module).items() if isinstance(value, plain))
        names = tuple(name for name, _ in module.named_parameters(recurse=inside))
        if inside:
            parts = tuple((name, unmixed(part)) for name, part in module.named_modules())
        else:
            parts = ()
        return unmixed(module), own, names, parts

    def _likeness(self, module: nn.Module) -> Hashable:
        return unmixed(module), tuple((name, tuple(p.shape)) for name, p in module.named_parameters())

    def _runs_in_chain(self, one: str, other: str) -> bool:
        shared = next((outer for outer in parents(one) if is_inside(other, (outer,))), "")
        owner = self._modules[shared]
        return _is_container(owner) or bool(runs_in_chain(owner, [self._modules[one], self._modules[other]]))

    def _search(self, declared: bool) -> list[str]:
        named = {name for module in self._modules.values() for name in repeated_blocks(module) if declared}
        found = _outermost([item for item in self._modules.items() if type(item[1]).__name__ in named])
        found = found or _Search(self).blocks()
        return [name for name, _ in _unique(self.root, found)]


class _Search:
    """Search for the blocks of a network, and for the stages that hold them."""

    def __init__(self, block_map: BlockMap) -> None:
        self.map = block_map
        self.root = block_map.root
        self.modules: dict[str, nn.Module] = dict(list(self.root.named_modules())[1:])
        self.adding: set[int] = set()
        for module in reversed(self.modules.values()):  # inner modules first, as outer ones may pass their input on
            if _may_add(module) and has_matrices(module) and block_map.forward(module, self.adding).adds:
                self.adding.add(id(module))
        counts = Counter(unmixed(m) for m in self.modules.values() if id(m) in self.adding)
        repeated = {kind for kind, number in counts.items() if number > 1}
        layers = [m for m in self.modules.values() if _is_transformers_layer(m)]
        layers = layers or [m for _, m in _homogeneous(self.root)]
        self.candidates = {id(m) for m in layers} | {id(m) for m in self.modules.values() if unmixed(m) in repeated}
        self.stages: set[type] = set()

    def blocks(self) -> Named:
        """Return the outermost candidates that are no stages, in the order of the forward pass."""
        new = {unmixed(block) for _, block in self._inside("", self.root) if self._is_stage(block)}
        if not new:
            return self._inside("", self.root)
        self.stages |= new
        self._add_siblings([name for name, _ in self._inside("", self.root)])
        return self.blocks()

    def _inside(self, prefix: str, module: nn.Module) -> Named:
        found: dict[str, Named] = {}
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            is_block = id(child) in self.candidates and unmixed(child) not in self.stages
            found[key] = [(name, child)] if is_block else self._inside(f"{name}.", child)
        parts = [key for key, blocks in found.items() if blocks]
        # Definition order may differ from the order of the forward pass, which decides the depth.
        if len(parts) > 1 and _may_add(module):
            calls = self.map.forward(module).calls
        else:
            calls = ()
        first = {key: next((i for i, call in enumerate(calls) if is_inside(call, (key,))), -1) for key in parts}
        return [block for key in sorted(parts, key=first.__getitem__) for block in found[key]]

    def _is_stage(self, module: nn.Module) -> bool:
        """Return whether most of a module are two or more blocks of one class that it runs one after the other."""
        parts = [part for part in list(module.modules())[1:] if id(part) in self.adding]
        inside = {id(p): p.numel() for part in parts for p in part.parameters()}
        if sum(inside.values()) * 2 <= count(module.parameters()):
            return False
        if len(parts) == 1 and id(module) not in self.adding:  # a block with a layer behind it that changes the shape
            return adds_to_input(module, whole=True) is False
        for kind in {unmixed(part) for part in parts}:
            alike = [part for part in parts if unmixed(part) is kind]
            if len(alike) > 1 and runs_in_chain(module, alike):
                return True
        return False

    def _add_siblings(self, found: Sequence[str]) -> None:
        """Count modules in the places of other stages' blocks as blocks, although no trace proves it."""
        stages = [name for name, module in self.modules.items() if unmixed(module) in self.stages]
        places = {_owner(name) for name in found}
        inner = {(_owner(s), p[len(s) :]) for s in stages for p in places if is_inside(p, (s,))}
        for stage in stages:
            for place in (f"{stage}{end}" for owner, end in inner if owner == _owner(stage)):
                members = self.modules.get(place)
                if isinstance(members, nn.ModuleList | nn.Sequential):
                    self.candidates |= {id(child) for child in members if _may_add(child) and has_matrices(child)}


def _unique(root: nn.Module, found: Named) -> Named:
    """Return each block once, under the first of its names."""
    blocks = {id(block): block for _, block in found}
    names = {id(module): name for name, module in root.named_modules()}
    return [(names[key], block) for key, block in blocks.items()]


def trained_blocks(found: Named) -> Named:
    """Return the blocks that hold a parameter which trains; all, if none does."""
    return [(name, block) for name, block in found if any(p.requires_grad for p in block.parameters())] or found


def is_inside(name: str, prefixes: Collection[str]) -> bool:
    """Return whether a dotted name is one of ``prefixes``, or lies below one of them."""
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _is_network(module: nn.Module) -> bool:
    return has_parts(module) and not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _may_add(module: nn.Module) -> bool:
    """Return whether a module has parts and a forward of its own; a layer that an adapter wraps is no block."""
    return not _is_container(module) and has_parts(module)


def _is_transformers_layer(module: nn.Module) -> bool:
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _homogeneous(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in root.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        kinds = {unmixed(child) for child in module}
        if len(kinds) == 1 and not isinstance(module[0], nn.ModuleList | nn.ModuleDict) and all(map(has_parts, module)):
            yield from ((f"{name}.{key}" if name else key, child) for key, child in module.named_children())


def _outermost(found: Named) -> Named:
    names = {name for name, _ in found}
    return [(name, module) for name, module in found if not any(outer in names for outer in parents(name))]
