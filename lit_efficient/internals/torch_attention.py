"""A CPU's attention with the logarithms of its sums, from which parts of a row of keys are put together.

    out = sum_p out_p exp(lse_p - lse),    lse = log sum_p exp(lse_p)        of parts p of the keys

By ``aten._scaled_dot_product_flash_attention_for_cpu`` and its backward pass, which wants of each part the whole's
``out`` and ``lse`` alone. Checked with torch 2.13.
"""

import torch
from torch import Tensor

_aten = torch.ops.aten


def attention_part(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> list[Tensor]:
    """``[B, heads, T, head_dim]`` and the logarithms of sums ``[B, heads, T]``, float32 or wider."""
    return list(_aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale))


def joined(parts: list[list[Tensor]]) -> list[Tensor]:
    """What attention to all parts of the keys gives, of what it gives for each."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    out = sum(out * (own - lse).exp()[..., None] for out, own in parts)
    return [out.to(parts[0][0].dtype), lse]  # type: ignore[union-attr]


def gradients_of_part(
    wanted: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: list[Tensor], causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, and of the keys and values of one part; ``whole``: `joined` of all."""
    found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        wanted, query, key, value, *whole, 0.0, causal, scale=scale
    )
    return found
