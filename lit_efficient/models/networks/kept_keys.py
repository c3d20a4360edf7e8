"""Masks of attention in which some keys are left out, for all queries but their own."""

import torch
from torch import Tensor


def only_kept(mask: Tensor, kept: Tensor) -> Tensor:
    """``mask`` without the keys that are not kept; each query sees its own key, so that no row is empty.

    Args:
        mask: True, or a number that is not very low, where a query sees a key: [T, S] or [B or 1, H or 1, T, S]. The
            queries are the last T of the S tokens.
        kept: [B, S] bool.

    Returns:
        [B, H or 1, T, S], of the type of ``mask``.
    """
    mask = mask if mask.ndim == 4 else mask[None, None]
    queries, keys = mask.shape[-2:]
    own = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
    own = own.triu(keys - queries)
    allowed = kept[:, None, None, :] | own
    if mask.dtype == torch.bool:
        return (mask & allowed) | own
    low = torch.finfo(mask.dtype).min
    return torch.where(own, torch.zeros_like(mask), torch.where(allowed, mask, low))
