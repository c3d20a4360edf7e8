"""Freezing and unfreezing by schedule: groups of parameters in order of depth, and a record of frozen parameters.

    group 0 = the head and other late layers;  groups 1..L = the blocks, last to first;  group L + 1 = stem, embeddings

These functions work on plain modules. Parameters are compared by identity: a tied weight is one parameter, and belongs
to the first group that contains it.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import nn

from lit_efficient.declaration import HELD
from lit_efficient.errors import ConfigurationError, check_list, listed
from lit_efficient.internals.torch_modules import BatchNorm
from lit_efficient.mechanisms.blocks.block_map import BlockMap, find_blocks, is_inside
from lit_efficient.surgery import NewLayer, match_parameters, name_pattern, parents, reshard

Groups = str | Sequence[str | Sequence[str]]  # "auto", or patterns from head to stem
Rule = Callable[[str], int | None]  # dotted name of a tensor -> number of its group


def hold(root: nn.Module, names: Iterable[str]) -> None:
    """Freeze parameters temporarily: drop their gradients, and record their names in ``root`` for :func:`release`."""
    parameters = _parameters(root)
    noted = root.__dict__.setdefault(HELD, set())
    for name in names:
        parameters[name].requires_grad_(False)
        parameters[name].grad = None
        noted.add(name)


def release(root: nn.Module, names: Iterable[str] | None = None) -> None:
    """Unfreeze the parameters ``names``, or all without ``names``. Only parameters that :func:`hold` froze change."""
    noted = root.__dict__.get(HELD, set())
    chosen = set(noted)
    if names is not None:
        chosen.intersection_update(names)
    if chosen:
        parameters = _parameters(root)
        for name in chosen & parameters.keys():
            parameters[name].requires_grad_(True)
    noted -= chosen


def _parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name, with FSDP2 their shards."""
    reshard(root)  # between two passes, gathered copies may have the names of the parameters
    return dict(root.named_parameters())


def depth_groups(module: nn.Module, groups: Groups = "auto", *, who: str = "depth_groups") -> list[list[str]]:
    """Return the dotted names of parameters that require a gradient, each once, in groups from the head to the stem.

    With ``"auto"`` each repeated block is a group, the last one first (see
    :func:`~lit_efficient.mechanisms.blocks.block_map.find_blocks`). The other modules are sorted by where they are
    defined:

    - Modules after the blocks are in the first group.
    - Modules between two blocks are in the group of the second one.
    - Modules before the blocks, and all embeddings, are in the last group.

    A copy of a network, such as an average, is in the groups of that network, layer by layer. Networks of a
    LightningModule that run side by side, such as actor and critic, each begin with their head in the first group.

    Args:
        module: Any module.
        groups: ``"auto"``, or one entry per group, from the head to the stem. An entry is one or several regular
            expressions for the ends of dotted names of parameters or of modules that contain them. A parameter belongs
            to the first group that matches.
        who: Name of the technique, for errors.

    Raises:
        ConfigurationError: If there are no blocks, if a pattern matches no trainable parameter, if a group is empty
            because earlier groups contain its parameters, or if no group matches a trainable parameter.
    """
    return depth_groups_and_norms(module, groups, who=who)[0]


def depth_groups_and_norms(
    module: nn.Module,
    groups: Groups = "auto",
    *,
    who: str = "depth_groups",
    optimized: Collection[int] | None = None,
) -> tuple[list[list[str]], list[tuple[int, BatchNorm]]]:
    """Return :func:`depth_groups`, and pairs of a group's position and a BatchNorm layer with statistics in it.

    BatchNorm layers that belong to no group, because they were frozen before, are left out.

    Args:
        module: As in :func:`depth_groups`.
        groups: As in :func:`depth_groups`.
        who: As in :func:`depth_groups`.
        optimized: Identities of the parameters in optimizers. A network in the module without such a parameter is left
            out.

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
    check_list(who, "groups", groups, "auto or a list of patterns from head to stem")
    for entry in groups:
        check_list(who, "groups", entry, "auto or a list of patterns from head to stem", text=True)
    patterns = [[entry] if isinstance(entry, str) else list(entry) for entry in groups]
    return _by_patterns(module, patterns, who)


def _sorted(module: nn.Module, groups: Groups, rule: Rule, who: str, others: Collection[str]) -> dict[int, list[str]]:
    """Return names of parameters by the number of their group, in ascending order.

    Raises:
        ConfigurationError: If a parameter belongs to no group, or if a group of the user is empty.
    """
    aliases = {key: names for key, names in _aliases(module).items() if not is_inside(names[0], others)}
    found: dict[int, list[str]] = {}
    left: list[str] = []
    for names in aliases.values():
        numbers = [number for number in map(rule, names) if number is not None]
        if numbers:
            found.setdefault(min(numbers), []).append(names[0])
        else:
            left.append(names[0])
    if left:
        raise ConfigurationError(
            f"{who}: no group matches {len(left)} of {len(aliases)} trainable parameters: {listed(left, 8)}. Add a "
            "last group for them ('.*' matches the rest), or freeze them first"
        )
    if groups != "auto":
        for number, entry in enumerate(groups):
            if number not in found:
                raise ConfigurationError(
                    f"{who}: the group {entry!r} is empty, because earlier groups contain all parameters that it "
                    "matches (a tied weight belongs to the first of its groups). Leave it out"
                )
    return dict(sorted(found.items()))


def label(names: Sequence[str]) -> str:
    """Return a short name of a group: the common beginning of its parameters' names, or the first three modules."""
    parts = [name.split(".") for name in names]
    shared = 0
    while all(len(part) > shared and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    of_one_module = shared > 0 and all(len(part) <= shared + 1 for part in parts)
    if shared > 1 or of_one_module:
        return ".".join(parts[0][:shared])
    firsts = dict.fromkeys(".".join(part[: shared + 1]) for part in parts)
    shown = ", ".join(list(firsts)[:3])
    if len(firsts) > 3:
        shown += ", ..."
    return shown


def _aliases(module: nn.Module) -> dict[int, list[str]]:
    """Return all names of each trainable parameter by its identity. The name in ``named_parameters`` is the first."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    return names


def _by_depth(module: nn.Module, who: str, others: Collection[str]) -> Rule:
    """Return the rule of ``"auto"``. ``others`` are the names of networks to leave out."""
    modules = list(module.named_modules(remove_duplicate=False))
    order = {name: i for i, (name, _) in enumerate(modules)}
    found = find_blocks(module, who=f"{who}: groups='auto'", example=r"groups=[['head'], ['layers\.\d+']]")
    # A copy unfreezes together with its network. Otherwise a loss of only one would have no gradient for long.
    block_map = BlockMap(module)
    pairs = block_map.copies().items()
    copies = {copy: first for copy, first in pairs if not is_inside(first, others) and not is_inside(copy, others)}
    beside = (*copies, *others)
    trained = [name for name, block in found if any(p.requires_grad for p in block.parameters())]
    blocks = sorted((name for name in trained if not is_inside(name, beside)), key=order.__getitem__)
    if not blocks:
        raise ConfigurationError(
            f"{who}: no parameter of the {len(found)} repeated blocks is trainable. Set groups to patterns"
        )
    # So do networks side by side, each from its own head.
    beside_each_other = block_map.side_by_side(blocks)
    networks = {network: [name for name in blocks if is_inside(name, (network,))] for network in beside_each_other}
    numbers: dict[str, int] = {}
    for own in networks.values() or [blocks]:
        numbers |= {name: len(own) - i for i, name in enumerate(own)}
    places = [order[block] for block in blocks]
    starts = {network: [order[block] for block in own] for network, own in networks.items()}
    tables = {name for name, part in modules if isinstance(part, nn.Embedding | nn.EmbeddingBag)}

    def rule(name: str) -> int:
        copy = next((copy for copy in copies if is_inside(name, (copy,))), None)
        if copy is not None:
            name = copies[copy] + name[len(copy) :]
        owner = name.rpartition(".")[0]
        inside = next((numbers[parent] for parent in (owner, *parents(owner)) if parent in numbers), None)
        if inside is not None:
            return inside
        network = name.partition(".")[0]
        own = networks.get(network, blocks)
        above = bisect_right(starts.get(network, places), order[owner])  # number of blocks defined before it
        if owner in tables or above == 0:
            return len(own) + 1
        if above == len(own):
            return 0
        return numbers[own[above]]

    return rule


def _by_patterns(module: nn.Module, groups: list[list[str]], who: str) -> Rule:
    """Return the rule of groups that the user has given."""
    for patterns in groups:
        match_parameters(module, patterns, who=who, where=lambda parameter: parameter.requires_grad)
    compiled = [[name_pattern(pattern, who) for pattern in patterns] for patterns in groups]
    new = tuple(f"{name}." for name, part in module.named_modules() if isinstance(part, NewLayer))

    def rule(name: str) -> int | None:
        if new and name.startswith(new):
            return 0  # a layer that a technique has added always trains
        names = (name, *parents(name))
        for number, expressions in enumerate(compiled):
            if any(expression.fullmatch(each) for expression in expressions for each in names):
                return number
        return None

    return rule
