"""Selection of the layers that get an adapter: all linear layers except the output head, or named layers."""

from collections.abc import Sequence

from torch import nn

from lit_efficient.errors import ConfigurationError, check_list
from lit_efficient.mechanisms.adapters.low_rank import LowRank, kind_of, returns_rows
from lit_efficient.mechanisms.blocks.block_map import BlockMap, is_inside
from lit_efficient.surgery import NewLayer, UnusedPart, endings, expert_stacks, match_modules, name_pattern

ALL_LINEAR = "all-linear"
WITH_EXPERTS = "all-linear+experts"


def find_targets(root: nn.Module, targets: str | Sequence[str], *, who: str) -> list[tuple[str, nn.Module]]:
    """Return the layers to adapt with their names, in definition order.

    Args:
        root: Any module.
        targets: ``all-linear``, ``all-linear+experts`` or regular expressions.

            - ``all-linear``: every linear layer (and GPT-2's ``Conv1D``) of the networks that train, except the output
              head of a `GPT` or of a model of transformers, layers that share their weight with an embedding, layers
              with new, untrained weights, parts that the task does not call, and routers that return several tensors.
            - ``all-linear+experts``: the same layers; the experts are those of :func:`find_experts`.
            - Regular expressions for the ends of dotted names: they may also match ``nn.Conv2d``, ``nn.Embedding`` and
              tied heads. A pattern that matches only stacked experts selects no layer.
        who: Name of the technique, for messages.

    Raises:
        ConfigurationError: If there is no such layer, or a pattern matches nothing. The message lists names.
    """
    if targets not in (ALL_LINEAR, WITH_EXPERTS):
        patterns = _patterns(targets, who)
        stacked = {pattern for found in _matched(root, targets, who).values() for pattern in found}
        patterns = [pattern for pattern in patterns if pattern not in stacked]
        if not patterns:
            return []
        return match_modules(root, patterns, who=who, where=kind_of)
    heads = output_heads(root)
    tables = {id(module.weight) for module in root.modules() if isinstance(module, nn.Embedding)}
    # Adapters of a frozen teacher, or of a part that is not called, would never get a gradient.
    unused = [name for name, part in root.named_modules() if isinstance(part, UnusedPart)]
    idle = (*BlockMap(root).frozen_networks(), *unused)
    found = []
    for name, module in root.named_modules():
        if not name or kind_of(module) not in ("linear", "conv1d") or isinstance(module, NewLayer):
            continue
        if id(module) in heads or id(module.weight) in tables or is_inside(name, idle):
            continue
        if not returns_rows(module):
            continue
        found.append((name, module))
    if not found:
        others = other_targets(root)
        advice = ""
        if others:
            advice = f"; name other layers by the ends of their names: targets={others}"
        raise ConfigurationError(f"{who}: {type(root).__name__} has no linear layer to adapt{advice}")
    return found


def find_experts(root: nn.Module, targets: str | Sequence[str], *, who: str) -> list[tuple[str, nn.Module, list[str]]]:
    """Return the stacked weights of experts to adapt, in definition order.

    Args:
        root: Any module.
        targets: ``all-linear+experts`` for all stacked weights, ``all-linear`` for none, or regular expressions for the
            ends of their dotted names. Patterns that match a layer are not applied to stacked weights.
        who: Name of the technique, for messages.

    Returns:
        Name of a module, the module, and the names of its stacked parameters.
    """
    stacks = expert_stacks(root)
    if targets == ALL_LINEAR:
        return []
    if targets == WITH_EXPERTS:
        others = BlockMap(root).frozen_networks()
        return [stack for stack in stacks if not is_inside(stack[0], others)]
    wanted = _matched(root, targets, who)
    chosen = []
    for name, part, keys in stacks:
        matched = [key for key in keys if f"{name}.{key}" in wanted]
        if matched:
            chosen.append((name, part, matched))
    return chosen


def _matched(root: nn.Module, targets: str | Sequence[str], who: str) -> dict[str, list[str]]:
    """Return the patterns that match stacked weights but no layer, by the weights' dotted names."""
    layers = [name for name, part in root.named_modules() if kind_of(part)]
    found: dict[str, list[str]] = {}
    for pattern in _patterns(targets, who):
        expression = name_pattern(pattern, who)
        if not any(map(expression.fullmatch, layers)):
            for full in (f"{name}.{key}".lstrip(".") for name, _, keys in expert_stacks(root) for key in keys):
                if expression.fullmatch(full):
                    found.setdefault(full, []).append(pattern)
    return found


def _patterns(targets: str | Sequence[str], who: str) -> list[str]:
    patterns = [targets] if targets and isinstance(targets, str) else targets
    check_list(who, "targets", patterns, f"{ALL_LINEAR}, {WITH_EXPERTS} or a list of patterns")
    return list(patterns)


def other_targets(root: nn.Module, kinds: Sequence[str] = ("conv2d", "embedding")) -> list[str]:
    """Return patterns for at most six kinds of layers without an adapter that are adapted only if they are named."""
    names = []
    for name, part in root.named_modules():
        if name and not isinstance(part, LowRank) and kind_of(part) in kinds:
            names.append(name)
    return [end.replace(".", r"\.") for end in endings(names)[:6]]


def output_heads(root: nn.Module) -> set[int]:
    """Return the ids of the output heads in ``root``: of networks with a ``get_output_embeddings``."""
    heads = set()
    for module in root.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if getter is not None:
            head = getter()
            if head is not None:
                heads.add(id(head))
    return heads


def is_tied(root: nn.Module, module: nn.Module) -> bool:
    """Return whether another module of ``root`` shares the weight of ``module``."""
    return any(other is not module and getattr(other, "weight", None) is module.weight for other in root.modules())
