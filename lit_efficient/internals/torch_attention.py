"""Attention on a CPU that also returns the log-sum-exp of each query, so that results for parts of the keys can be
combined.

    out = sum_p out_p exp(lse_p - lse),    lse = log sum_p exp(lse_p)        over parts p of the keys

It calls ``aten._scaled_dot_product_flash_attention_for_cpu`` and its backward pass, which only needs ``out`` and
``lse`` over all keys. Checked with torch 2.13.
"""

import torch
from torch import Tensor

_aten = torch.ops.aten


def attention_part(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> list[Tensor]:
    """Return the attention ``[B, heads, T, head_dim]`` and its log-sum-exp ``[B, heads, T]``, float32 or wider."""
    return list(_aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale))


def joined(parts: list[list[Tensor]]) -> list[Tensor]:
    """Combine the results of `attention_part` for all parts of the keys."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    out = sum(out * (own - lse).exp()[..., None] for out, own in parts)
    return [out.to(parts[0][0].dtype), lse]  # type: ignore[union-attr]


def gradients_of_part(
    wanted: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: list[Tensor], causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values for one part of the keys.

    Args:
        wanted: Gradient of the attention over all keys.
        query: Queries.
        key: Keys of this part.
        value: Values of this part.
        whole: Result of `joined` for all parts.
        causal: Whether the mask is causal.
        scale: Factor on the logits, or ``None`` for the default.
    """
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        wanted, query, key, value, *whole, 0.0, causal, scale=scale
    )
