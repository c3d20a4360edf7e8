"""Liger's cross-entropy kernel, applied to a chunk of logits: it computes the losses and overwrites the logits by their
gradient.

One Triton program reads a row twice and writes it once. That is 6 bytes for a 16-bit logit, where the torch operations
of :meth:`lit_efficient.losses.chunked_cross_entropy.TokenLoss.consume` move about 44. Only the kernel is used, not
Liger's loss function: that one reads the number of tokens from the device in each call, and supports no weights of
tokens without a second pass. Liger is imported on first use. Source: https://arxiv.org/abs/2410.10989.
"""

from __future__ import annotations

import functools
import inspect
import os
from contextlib import nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_efficient.internals.torch_as_cuda import kind_of

if TYPE_CHECKING:  # `chunked_cross_entropy` imports this module
    from lit_efficient.losses.chunked_cross_entropy import TokenLoss

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TRIAL = ((1.0, -2.0, 4.0), (0.5, 3.0, -1.0))  # logits on which the kernel is compared with torch


def installed() -> bool:
    """Return whether ``liger_kernel`` is installed."""
    return find_spec("liger_kernel") is not None


@functools.cache
def why_not(device: torch.device, dtype: torch.dtype, terms: TokenLoss) -> str:
    """Return the reason why Liger's kernel cannot be used, or an empty string if it can.

    The kernel is run once on a few logits and compared with :meth:`TokenLoss.consume`. It needs a GPU, or a CPU under
    ``TRITON_INTERPRET=1``.

    Args:
        device: Device of the logits.
        dtype: Dtype of the logits.
        terms: Loss of one token.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Liger's kernel runs on GPUs, not on {device.type}"
    if dtype not in _DTYPES:
        return f"Liger's kernel does not support {dtype}"
    if not installed():
        return "liger-kernel is not installed"
    try:
        logits = torch.tensor(_TRIAL, dtype=dtype, device=device)
        labels = torch.tensor([0, terms.ignore_index], device=device)
        slopes = logits[:1].float().clone()
        expected = terms.consume(slopes, labels[:1], torch.ones_like(slopes[:, 0]))
        if terms.logit_scale != 1:
            logits = logits.float()
        losses = consume(terms, logits, labels, None, gradients=True)
        expected = torch.cat((expected, torch.zeros_like(expected)))  # the second token is ignored
        slopes = torch.cat((slopes, torch.zeros_like(slopes)))
        torch.testing.assert_close(losses, expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(logits.float(), slopes, rtol=1e-2, atol=1e-2)
    except Exception as error:  # another signature, a driver, a missing compiler: torch computes the loss then
        return f"Liger's kernel fails here: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


def consume(terms: TokenLoss, logits: Tensor, labels: Tensor, scale: Tensor | None, *, gradients: bool) -> Tensor:
    """Compute losses like :meth:`TokenLoss.consume`, on logits in their own dtype.

    Args:
        terms: Loss of one token.
        logits: [n, V], rows contiguous. They are overwritten by their gradient, or by intermediate values.
        labels: [n]. Ignored labels get a loss and a gradient of 0.
        scale: Factors on the gradients, [n], or ``None`` for ones.
        gradients: Whether to compute gradients.

    Returns:
        Losses [n], float32.
    """
    if kind_of(logits.device) != logits.device.type:  # a plan without a GPU: only the allocation matters
        return logits.new_zeros(len(logits), dtype=torch.float32)
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    if terms.logit_scale != 1:
        logits.mul_(terms.logit_scale)
    losses = torch.zeros(len(logits), device=logits.device)
    given = {
        "X_ptr": logits, "X_stride": logits.stride(0), "Y_ptr": labels, "Y_stride": labels.stride(0),
        "weight_ptr": None, "loss_ptr": losses, "z_loss_ptr": None, "loss_stride": 1,
        "token_accuracy_ptr": None, "token_accuracy_stride": 0,
        "predicted_tokens_ptr": None, "predicted_tokens_stride": 0,
        "n_cols": logits.shape[1], "n_non_ignore": 1, "sum_non_ignore_weight": 1, "weight_sum": 0.0,
        "ignore_index": terms.ignore_index, "lse_square_scale": terms.z_loss,
        "label_smoothing": terms.label_smoothing, "reduction": "sum", "softcap": terms.softcap,
        "RETURN_Z_LOSS": False, "RETURN_TOKEN_ACCURACY": False, "RETURN_PREDICTED_TOKENS": False,
        "HAS_WEIGHT": False, "HAS_SOFTCAPPING": terms.softcap is not None, "HAS_GRADIENTS": gradients,
        "BLOCK_SIZE": min(MAX_FUSED_SIZE, 1 << (logits.shape[1] - 1).bit_length()),
        "num_warps": 32 if torch.version.hip is None else 16,
    }  # fmt: skip
    accepted = {*inspect.signature(liger_cross_entropy_kernel.fn).parameters, "num_warps"}  # depends on the version
    arguments = {key: value for key, value in given.items() if key in accepted}
    # Triton launches on the current device, which may not be that of the logits.
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        if len(logits):
            liger_cross_entropy_kernel[(len(logits),)](**arguments)
    if gradients and terms.logit_scale != 1:
        logits.mul_(terms.logit_scale)
    if gradients and scale is not None:
        logits.mul_(scale[:, None])
    return losses
