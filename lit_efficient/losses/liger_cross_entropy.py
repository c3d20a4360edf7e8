"""Liger's softmax kernel on a chunk of logits: a token's loss, and its gradient in the place of its logits.

One Triton program reads a row twice and writes it once: 6 bytes a 16-bit logit, where the operations of
:meth:`lit_efficient.losses.chunked_cross_entropy.TokenLoss.consume` move about 44. Liger's own loss around it is not
taken: it reads the number of tokens from the device in each call, and has no gradient for tokens of unlike weights, or
makes it in a second pass. Nothing here imports Liger before it is asked for. Source: https://arxiv.org/abs/2410.10989.
"""

import functools
import inspect
import os
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lit_efficient.internals.torch_as_cuda import kind_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ROWS = ((1.0, -2.0, 4.0), (0.5, 3.0, -1.0))  # logits that the kernel is tried on


def installed() -> bool:
    """Whether ``liger_kernel`` can be imported."""
    return find_spec("liger_kernel") is not None


@functools.cache
def why_not(device: torch.device, dtype: torch.dtype, terms: Any) -> str:
    """Why Liger's kernel is not taken for such logits; empty where it gives the numbers of ``terms``, which is tried.

    The device is a GPU, or a CPU under ``TRITON_INTERPRET=1``.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Liger's kernel runs on GPUs, not on {device.type}"
    if dtype not in _DTYPES:
        return f"Liger's kernel knows no {dtype}"
    if not installed():
        return "liger-kernel is not installed"
    try:
        logits = torch.tensor(_ROWS, dtype=dtype, device=device)
        labels = torch.tensor([0, terms.ignore_index], device=device)
        known = logits[:1].float().clone()
        expected = terms.consume(known, labels[:1], torch.ones_like(known[:, 0]))
        logits = logits if terms.logit_scale == 1 else logits.float()
        losses = consume(terms, logits, labels, None, gradients=True)
        expected = torch.cat((expected, torch.zeros_like(expected)))
        slopes = torch.cat((known, torch.zeros_like(known)))
        for found, right in ((losses, expected), (logits.float(), slopes)):
            torch.testing.assert_close(found, right, rtol=1e-2, atol=1e-2)
    except Exception as error:  # a version with another signature, a driver, a missing compiler: the loss has its own
        return f"Liger's kernel fails here: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


def consume(terms: Any, logits: Tensor, labels: Tensor, scale: Tensor | None, *, gradients: bool) -> Tensor:
    """As :meth:`lit_efficient.losses.chunked_cross_entropy.TokenLoss.consume`, of logits in their own dtype.

    Args:
        terms: The loss of one token.
        logits: [n, V], rows without gaps; they become the gradient, or nothing of use.
        labels: [n], also ignored ones, whose loss and gradient are 0.
        scale: [n], or ``None`` for ones.
        gradients: Whether they are wanted.

    Returns:
        [n], float32.
    """
    if kind_of(logits.device) != logits.device.type:  # a plan: the kernel makes nothing else
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
    wanted = {*inspect.signature(liger_cross_entropy_kernel.fn).parameters, "num_warps"}  # versions differ
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():  # Triton asks for the current one
        if len(logits):
            liger_cross_entropy_kernel[(len(logits),)](**{key: value for key, value in given.items() if key in wanted})
    if gradients and terms.logit_scale != 1:
        logits.mul_(terms.logit_scale)
    if gradients and scale is not None:
        logits.mul_(scale[:, None])
    return losses
