"""Operators that ``torch.ops.aten`` has under private names, by what they compute. Checked with torch 2.13."""

import torch

_MATMUL = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
MATMUL = [getattr(torch.ops.aten, name).default for name in _MATMUL]
ATTENTION = [getattr(torch.ops.aten, name).default for name in _ATTENTION]
