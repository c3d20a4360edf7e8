"""What of an adapter survives when its sum with a quantised weight is rounded again, as the base was.

    share = <Q(W + D) - W, D> / <D, D>,    D what the adapter adds to the quantised weight W, Q the base's own rounding

A share of 1 keeps the update and adds noise; where D is less than half a step of the grid, nothing of it is left.
Merging here gives floats, of which all survives; who rounds them again for inference should know what it costs.
``LoRA(variant="qalora")`` and ``"rounded"`` train what survives whole.
"""

from typing import Any

import torch
from torch import nn

from lit_efficient.mechanisms.adapters.low_rank import ON_INT4, LowRank, adapted_matrix
from lit_efficient.mechanisms.adapters.quantized import dequantize, is_quantized, quantize_linear


@torch.no_grad()
def surviving(module: nn.Module) -> dict[str, tuple[float, float]]:
    """For each adapted layer on a quantised weight <Q(W + D) - W, D> and <D, D>, by its name.

    Layers whose adapter merges into the codes or zero points as it is are left out.
    """
    found = {}
    part: Any
    for name, part in module.named_modules():
        if not isinstance(part, LowRank) or not is_quantized(part) or part.lora_variant in ON_INT4:
            continue
        base, merged = dequantize(part).float(), adapted_matrix(part).float()
        plain = nn.Linear(base.shape[1], base.shape[0], bias=False, device="meta")
        plain.weight = nn.Parameter(merged, requires_grad=False)
        how: dict[str, Any] = {
            "double_quant": getattr(part, "quant_double", True),
            "group_size": getattr(part, "group_size", 32),
        }
        again = dequantize(quantize_linear(plain, part.quant_format, **how)).float().sub_(base).flatten()
        update = merged.sub_(base).flatten()
        found[name] = (again @ update).item(), (update @ update).item()
    return {name: pair for name, pair in found.items() if pair[1] > 0}


def describe_survival(found: dict[str, tuple[float, float]]) -> str:
    """A clause for people, of the update as a whole and of single layers; empty where there is nothing to say.

    Example:
        >>> describe_survival({"up": (0.5, 1.0), "down": (2.7, 3.0)})
        "; rounded again, 80.0 % of the adapter's update would survive (50.0 % in 'up' to 90.0 % in 'down')"
    """
    if not found:
        return ""
    share = {name: kept / whole for name, (kept, whole) in found.items()}
    least, most = min(share, key=share.__getitem__), max(share, key=share.__getitem__)
    total = sum(kept for kept, _ in found.values()) / sum(whole for _, whole in found.values())
    return (
        f"; rounded again, {total:.1%} of the adapter's update would survive "
        f"({share[least]:.1%} in {least!r} to {share[most]:.1%} in {most!r})"
    ).replace("%", " %")
