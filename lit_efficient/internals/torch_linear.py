"""Linear layers of float32 on a CPU, computed by oneDNN in the place of the BLAS library that torch calls.

torch calls oneDNN for these layers only in compiled code, by ``mkldnn._linear_pointwise``, which has no gradient.
Measured on a processor of AMD, where torch calls MKL: 0.5 of the time for a prompt, and 0.7 for 8 rows of one token.
Checked with torch 2.13.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.internals.wraps import temporarily

_LARGE = 2**18  # numbers in a weight; smaller products gain little
_BY_BLAS = F.linear


def linear_by_onednn() -> AbstractContextManager[None]:
    """Return a context, for code without gradients, in which oneDNN computes large linear layers.

    ``F.linear`` is replaced by a function. A ``TorchFunctionMode`` would slow all other calls down, and
    ``torch.compile`` traces less code inside it.
    """
    return temporarily(F, linear=_linear)


def _linear(x: Tensor, weight: Any, bias: Any = None) -> Tensor:
    if _is_plain(weight) and weight.numel() >= _LARGE and _is_plain(x) and not _needs_more():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return _BY_BLAS(x, weight, bias)


def _is_plain(one: Tensor) -> bool:
    plain = type(one) in (Tensor, nn.Parameter) and one.dtype == torch.float32
    return plain and one.device.type == "cpu" and one.layout == torch.strided


def _needs_more() -> bool:
    """Return whether gradients, other dtypes or a graph are wanted, or oneDNN is missing."""
    wanted = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
    return wanted or not torch.backends.mkldnn.is_available()
