"""Operators that ``torch.ops.aten`` has under private names, by what they compute. Checked with torch 2.13."""

import torch

_MATMUL = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_ATTENTION = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "another device's",
}
MATMUL = [getattr(torch.ops.aten, name).default for name in _MATMUL]
ATTENTION = [getattr(torch.ops.aten, name).default for name in _ATTENTION]
# What torch's attention runs, by the operator that only this kernel has.
ATTENTION_KERNELS = {getattr(torch.ops.aten, name).default: kind for name, kind in _ATTENTION.items()}
ATTENTION_KERNELS[torch.ops.aten._safe_softmax.default] = "math"
