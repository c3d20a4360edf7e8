"""What a schedule freezes and thaws: parameters in order of depth, and a note on the module of what is held back.

    group 0 = the head and what is beside it;  groups 1..L = the blocks, last to first;  group L + 1 = stem, embeddings

Everything here works on plain modules. Parameters are compared by identity: tied ones are one parameter, which belongs
to the first group that holds it.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from lit_efficient.declaration import HELD
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.internals.torch_layers import BatchNorm
from lit_efficient.internals.torch_modules import StaysFloat32
from lit_efficient.mechanisms.blocks.block_map import BlockMap, find_blocks, is_inside
from lit_efficient.surgery import match_parameters, name_pattern, parents, reshard

Groups = str | Sequence[str | Sequence[str]]  # "auto", or patterns from head to stem
Rule = Callable[[str], int | None]  # dotted name of a tensor -> number of its group


class NewLayer(nn.Module):
    """Mix-in of a layer whose weights are new: it is trained whole, and neither quantised nor adapted."""


class WideLayer(StaysFloat32, NewLayer):
    """Mix-in of a new layer that computes in float32 beside a narrower network."""

    float32 = ("",)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's own output, in the format of its input."""
        own = next(self.parameters()).dtype
        if x.dtype == own or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        y: Tensor = super().forward(x.to(own))
        return y.to(x.dtype)


def hold(root: nn.Module, names: Iterable[str]) -> None:
    """Freeze parameters for now: no gradient, and a note on ``root`` that they will be thawed."""
    parameters = _parameters(root)
    noted = root.__dict__.setdefault(HELD, set())
    for name in names:
        parameters[name].requires_grad_(False)
        parameters[name].grad = None
        noted.add(name)


def release(root: nn.Module, names: Iterable[str] | None = None) -> None:
    """Thaw those of ``names`` (all without them) that :func:`hold` froze; what others froze stays frozen."""
    noted = root.__dict__.get(HELD, set())
    chosen = set(noted if names is None else noted.intersection(names))
    parameters = _parameters(root) if chosen else {}
    for name in chosen & parameters.keys():
        parameters[name].requires_grad_(True)
    noted -= chosen


def _parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters, under FSDP2 their shards: gathered copies of them take their names between two passes."""
    reshard(root)
    return dict(root.named_parameters())


def depth_groups(module: nn.Module, groups: Groups = "auto", *, who: str = "depth_groups") -> list[list[str]]:
    """Dotted names of the parameters that require a gradient, each once, in groups from the head to the stem.

    With ``"auto"`` the repeated blocks make a group each, the last one first (see
    :func:`~lit_efficient.mechanisms.blocks.block_map.find_blocks`). What is defined after them comes before them; what
    is defined before them, and embeddings wherever they are, comes last; what is defined between two of them goes with
    the second. A copy of a network goes with that network, layer by layer.

    Args:
        module: Any module.
        groups: ``"auto"``, or one entry a group from the head to the stem, each a regular expression or several, for
            the ends of dotted names of parameters or of modules that hold them. The first group that matches takes it.
        who: Name of the technique that asks, for the error.

    Raises:
        ConfigurationError: If there are no blocks, if a pattern matches nothing that trains or nothing that an earlier
            group does not hold, and if a parameter that trains is matched by none.
    """
    return depth_groups_and_norms(module, groups, who=who)[0]


def depth_groups_and_norms(
    module: nn.Module,
    groups: Groups = "auto",
    *,
    who: str = "depth_groups",
    optimized: Collection[int] | None = None,
) -> tuple[list[list[str]], list[tuple[int, BatchNorm]]]:
    """Return :func:`depth_groups`, and each BatchNorm layer that keeps statistics with the position of its group.

    Layers of no group are left out: those in parts that were frozen before.

    Args:
        module: As in :func:`depth_groups`.
        groups: As in :func:`depth_groups`.
        who: As in :func:`depth_groups`.
        optimized: Identities of the parameters that optimizers hold. A network in the module of which they hold nothing
            is left out.

    Raises:
        ConfigurationError: As in :func:`depth_groups`.
    """
    others = BlockMap(module, optimized).frozen_networks()
    rule = _rule(module, groups, who, others)
    found = _sorted(module, groups, rule, who, others)
    positions = {number: i for i, number in enumerate(found)}
    norms = []
    for name, layer in module.named_modules():
        if isinstance(layer, BatchNorm) and layer.track_running_stats:
            number = rule(f"{name}.weight")
            if number in positions:
                norms.append((positions[number], layer))
    return list(found.values()), norms


def _rule(module: nn.Module, groups: Groups, who: str, others: Collection[str]) -> Rule:
    if groups == "auto":
        return _by_depth(module, who, others)
    if isinstance(groups, str) or not groups:
        raise refusal(who, "groups", "auto or a list of patterns from head to stem", groups)
    return _by_patterns(module, [[entry] if isinstance(entry, str) else list(entry) for entry in groups], who)


def _sorted(module: nn.Module, groups: Groups, rule: Rule, who: str, others: Collection[str]) -> dict[int, list[str]]:
    """Names by the number of their group, ascending; checked where the user named the groups."""
    aliases = {key: names for key, names in _aliases(module).items() if not is_inside(names[0], others)}
    found: dict[int, list[str]] = {}
    left: list[str] = []
    for names in aliases.values():
        numbers = [number for number in map(rule, names) if number is not None]
        (found.setdefault(min(numbers), []) if numbers else left).append(names[0])
    if left:
        raise ConfigurationError(
            f"{who}: no group matches {len(left)} of {len(aliases)} parameters that train: {', '.join(left[:8])}"
            f"{', ...' if len(left) > 8 else ''}. Add a last group for them ('.*' takes the rest), or freeze them first"
        )
    for number, entry in enumerate(groups if groups != "auto" else ()):
        if number not in found:
            raise ConfigurationError(
                f"{who}: the group {entry!r} is empty: earlier groups hold all that it matches (a tied weight belongs "
                "to the first of its groups). Leave it out"
            )
    return dict(sorted(found.items()))


def label(names: Sequence[str]) -> str:
    """A short name for a group: what its parameters' names have in common."""
    parts = [name.split(".") for name in names]
    shared = 0
    while all(len(part) > shared and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    of_one_module = shared > 0 and all(len(part) <= shared + 1 for part in parts)
    if shared > 1 or of_one_module:
        return ".".join(parts[0][:shared])
    firsts = dict.fromkeys(".".join(part[: shared + 1]) for part in parts)
    return ", ".join(list(firsts)[:3]) + (", ..." if len(firsts) > 3 else "")


def _aliases(module: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter that trains, the one of ``named_parameters`` first."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    return names


def _by_depth(module: nn.Module, who: str, others: Collection[str]) -> Rule:
    modules = list(module.named_modules(remove_duplicate=False))
    order = {name: i for i, (name, _) in enumerate(modules)}
    found = find_blocks(module, who=f"{who}: groups='auto'")
    # A copy thaws together with its network: in sequence, a loss of one of them would have no gradient for long.
    pairs = BlockMap(module).copies().items()
    copies = {copy: first for copy, first in pairs if not is_inside(first, others) and not is_inside(copy, others)}
    beside = (*copies, *others)
    trained = [name for name, block in found if any(p.requires_grad for p in block.parameters())]
    blocks = sorted((name for name in trained if not is_inside(name, beside)), key=order.__getitem__)
    if not blocks:
        raise ConfigurationError(f"{who}: no parameter of the {len(found)} repeated blocks trains: name the groups")
    starts = [order[name] for name in blocks]
    numbers = {name: len(blocks) - i for i, name in enumerate(blocks)}
    tables = {name for name, part in modules if isinstance(part, nn.Embedding | nn.EmbeddingBag)}

    def rule(name: str) -> int:
        copy = next((copy for copy in copies if is_inside(name, (copy,))), None)
        if copy is not None:
            name = copies[copy] + name[len(copy) :]
        owner = name.rpartition(".")[0]
        inside = next((numbers[parent] for parent in (owner, *parents(owner)) if parent in numbers), None)
        if inside is not None:
            return inside
        above = bisect_right(starts, order[owner])  # number of blocks that begin before it
        if owner in tables or above == 0:
            return len(blocks) + 1
        return 0 if above == len(blocks) else numbers[blocks[above]]

    return rule


def _by_patterns(module: nn.Module, groups: list[list[str]], who: str) -> Rule:
    for patterns in groups:
        match_parameters(module, patterns, who=who, where=lambda parameter: parameter.requires_grad)
    compiled = [[name_pattern(pattern, who) for pattern in patterns] for patterns in groups]
    new = tuple(f"{name}." for name, part in module.named_modules() if isinstance(part, NewLayer))

    def rule(name: str) -> int | None:
        if new and name.startswith(new):
            return 0  # what a technique has added is trained whole, whatever else is frozen
        names = (name, *parents(name))
        hits = (i for i, group in enumerate(compiled) if any(any(map(e.fullmatch, names)) for e in group))
        return next(hits, None)

    return rule
