"""Share of an adapter's update that remains after the merged weight is quantised again.

    share = <Q(W + D) - W, D> / <D, D>,    W quantised weight, D the adapter's update, Q quantisation of the base

At a share of 1 the update remains, with noise. An update below half a step of the grid is lost. Merging gives float
weights, which contain the whole update, so the share matters only if they are quantised again for inference.
``LoRA(variant="qalora")`` and ``LoRA(variant="rounded")`` train adapters that lose nothing.
"""

from typing import Any

import torch
from torch import nn

from lit_efficient.mechanisms.adapters.low_rank import ON_INT4, LowRank, adapted_matrix
from lit_efficient.mechanisms.adapters.quantized import dequantize, is_quantized, quantize_linear


@torch.no_grad()
def surviving(module: nn.Module) -> dict[str, tuple[float, float]]:
    """Return ``<Q(W + D) - W, D>`` and ``<D, D>`` of each adapted layer with a quantised weight, by name.

    Layers whose adapter merges exactly into codes or zero points, and layers with an update of zero, are left out.
    """
    found = {}
    part: Any
    for name, part in module.named_modules():
        if not isinstance(part, LowRank) or not is_quantized(part) or part.lora_variant in ON_INT4:
            continue
        base = dequantize(part).float()
        merged = adapted_matrix(part).float()
        # The merged weight is rounded like the base, with the same format and scales of its own.
        plain = nn.Linear(base.shape[1], base.shape[0], bias=False, device="meta")
        plain.weight = nn.Parameter(merged, requires_grad=False)
        again = quantize_linear(
            plain,
            part.quant_format,
            double_quant=getattr(part, "quant_double", True),
            group_size=getattr(part, "group_size", 32),
        )
        remaining = dequantize(again).float().sub_(base).flatten()
        update = merged.sub_(base).flatten()
        size = (update @ update).item()
        if size > 0:
            found[name] = ((remaining @ update).item(), size)
    return found


def describe_survival(found: dict[str, tuple[float, float]]) -> str:
    """Return a clause with the share of all layers and the extremes, or an empty string if there are no layers.

    Args:
        found: Result of :func:`surviving`.

    Example:
        >>> describe_survival({"up": (0.5, 1.0), "down": (2.7, 3.0)})
        "; rounded again, 80.0 % of the adapter's update would survive (50.0 % in 'up' to 90.0 % in 'down')"
    """
    if not found:
        return ""
    share = {name: kept / whole for name, (kept, whole) in found.items()}
    least = min(share, key=share.__getitem__)
    most = max(share, key=share.__getitem__)
    total = sum(kept for kept, _ in found.values()) / sum(whole for _, whole in found.values())
    return (
        f"; rounded again, {total:.1%} of the adapter's update would survive "
        f"({share[least]:.1%} in {least!r} to {share[most]:.1%} in {most!r})"
    ).replace("%", " %")
