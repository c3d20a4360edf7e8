"""Which layers get an adapter: all linear ones but the output head, or those that patterns name."""

from collections.abc import Sequence

from torch import nn

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.mechanisms.adapters.low_rank import kind_of
from lit_efficient.mechanisms.blocks.freezing import NewLayer
from lit_efficient.surgery import match_modules

ALL_LINEAR = "all-linear"


def find_targets(root: nn.Module, targets: str | Sequence[str], *, who: str) -> list[tuple[str, nn.Module]]:
    """The layers to adapt, in definition order.

    Args:
        root: Any module.
        targets: ``all-linear``: every linear layer (GPT-2's ``Conv1D`` too), without the output head of a transformers
            model, layers that share their weight with an embedding and layers whose weights are new; or regular
            expressions for the ends of dotted names, which may also match ``nn.Conv2d``, ``nn.Embedding`` and tied
            heads.
        who: Name of the technique that asks, for the error.

    Raises:
        ConfigurationError: If there is no such layer, or a pattern matches none; it lists those that could match.
    """
    if targets != ALL_LINEAR:
        patterns = [targets] if isinstance(targets, str) else list(targets)
        if not patterns:
            raise refusal(who, "targets", f"{ALL_LINEAR} or a list of patterns", targets)
        return match_modules(root, patterns, who=who, where=kind_of)
    heads = output_heads(root)
    tables = {id(module.weight) for module in root.modules() if isinstance(module, nn.Embedding)}
    found = [
        (name, module)
        for name, module in root.named_modules()
        if name and kind_of(module) in ("linear", "conv1d") and id(module) not in heads
        and id(module.weight) not in tables and not isinstance(module, NewLayer)
    ]  # fmt: skip
    if not found:
        raise ConfigurationError(
            f"{who}: {type(root).__name__} has no linear layer to adapt; name layers: targets=['conv1', 'embedding']"
        )
    return found


def output_heads(root: nn.Module) -> set[int]:
    """Identities of the layers that transformers models in ``root`` call their output embeddings."""
    getters = (getattr(module, "get_output_embeddings", None) for module in root.modules())
    return {id(head) for head in (getter() for getter in getters if getter is not None) if head is not None}


def is_tied(root: nn.Module, module: nn.Module) -> bool:
    """Whether another module of ``root`` has the very same weight."""
    return any(other is not module and getattr(other, "weight", None) is module.weight for other in root.modules())
