"""Which layers get an adapter: all linear ones but the output head, or those that patterns name."""

from collections.abc import Sequence

from torch import nn

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.mechanisms.adapters.low_rank import LowRank, kind_of
from lit_efficient.mechanisms.blocks.block_map import BlockMap, is_inside
from lit_efficient.mechanisms.blocks.freezing import NewLayer
from lit_efficient.surgery import endings, expert_stacks, match_modules, name_pattern

ALL_LINEAR = "all-linear"
WITH_EXPERTS = "all-linear+experts"


def find_targets(root: nn.Module, targets: str | Sequence[str], *, who: str) -> list[tuple[str, nn.Module]]:
    """The layers to adapt, in definition order.

    Args:
        root: Any module.
        targets: ``all-linear``: every linear layer (GPT-2's ``Conv1D`` too) of the networks that train, without the
            output head of a transformers model, layers that share their weight with an embedding and layers whose
            weights are new; or regular expressions for the ends of dotted names, which may also match ``nn.Conv2d``,
            ``nn.Embedding`` and tied heads. ``all-linear+experts`` and patterns for :func:`find_experts` are
            ``all-linear`` and nothing here.
        who: Name of the technique that asks, for the error.

    Raises:
        ConfigurationError: If there is no such layer, or a pattern matches none; it lists those that could match.
    """
    if targets not in (ALL_LINEAR, WITH_EXPERTS):
        patterns = [targets] if isinstance(targets, str) else list(targets or ())
        if not patterns:
            raise refusal(who, "targets", f"{ALL_LINEAR}, {WITH_EXPERTS} or a list of patterns", targets)
        stacked = {pattern for found in _matched(root, targets, who).values() for pattern in found}
        patterns = [pattern for pattern in patterns if pattern not in stacked]
        return match_modules(root, patterns, who=who, where=kind_of) if patterns else []
    heads = output_heads(root)
    tables = {id(module.weight) for module in root.modules() if isinstance(module, nn.Embedding)}
    idle = BlockMap(root).frozen_networks()  # adapters of a teacher would never have a gradient
    found = [
        (name, module)
        for name, module in root.named_modules()
        if name and kind_of(module) in ("linear", "conv1d") and id(module) not in heads
        and id(module.weight) not in tables and not isinstance(module, NewLayer)
        and not is_inside(name, idle)
    ]  # fmt: skip
    if not found:
        raise ConfigurationError(
            f"{who}: {type(root).__name__} has no linear layer to adapt"
            + (f"; name others by the ends of their names: targets={others}" if (others := other_targets(root)) else "")
        )
    return found


def find_experts(root: nn.Module, targets: str | Sequence[str], *, who: str) -> list[tuple[str, nn.Module, list[str]]]:
    """The stacked weights of experts to adapt: module and parameters, in definition order.

    ``all-linear+experts`` takes all of them, ``all-linear`` none; a pattern those whose dotted names it matches, if it
    matches no layer.
    """
    stacks = expert_stacks(root)
    if targets == ALL_LINEAR:
        return []
    if targets == WITH_EXPERTS:
        others = BlockMap(root).frozen_networks()
        return [stack for stack in stacks if not is_inside(stack[0], others)]
    wanted = _matched(root, targets, who)
    chosen = [(name, part, [key for key in keys if f"{name}.{key}" in wanted]) for name, part, keys in stacks]
    return [item for item in chosen if item[2]]


def _matched(root: nn.Module, targets: str | Sequence[str], who: str) -> dict[str, list[str]]:
    """The patterns that match stacked weights, and no layer, by the weights' dotted names."""
    layers = [name for name, part in root.named_modules() if kind_of(part)]
    found: dict[str, list[str]] = {}
    for pattern in [targets] if isinstance(targets, str) else targets:
        expression = name_pattern(pattern, who)
        if not any(map(expression.fullmatch, layers)):
            for full in (f"{name}.{key}".lstrip(".") for name, _, keys in expert_stacks(root) for key in keys):
                if expression.fullmatch(full):
                    found.setdefault(full, []).append(pattern)
    return found


def other_targets(root: nn.Module, kinds: Sequence[str] = ("conv2d", "embedding")) -> list[str]:
    """Ends of the names of convolutions and embeddings without an adapter, which are taken only if they are named."""
    parts = [(name, part) for name, part in root.named_modules() if name and not isinstance(part, LowRank)]
    return [end.replace(".", r"\.") for end in endings(name for name, part in parts if kind_of(part) in kinds)[:6]]


def output_heads(root: nn.Module) -> set[int]:
    """Identities of the layers that transformers models in ``root`` call their output embeddings."""
    getters = (getattr(module, "get_output_embeddings", None) for module in root.modules())
    return {id(head) for head in (getter() for getter in getters if getter is not None) if head is not None}


def is_tied(root: nn.Module, module: nn.Module) -> bool:
    """Whether another module of ``root`` has the very same weight."""
    return any(other is not module and getattr(other, "weight", None) is module.weight for other in root.modules())
