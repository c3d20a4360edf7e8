"""Liger's fused linear cross-entropy behind the names of :mod:`lit_efficient.losses.chunked_cross_entropy`.

Its Triton kernel makes softmax and gradient in one pass over a chunk of logits. It is used where it is installed and
the tensors are on a GPU; nothing here imports it before. Source: https://arxiv.org/abs/2410.10989.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from lit_efficient.losses.chunked_cross_entropy import TokenLoss


def installed() -> bool:
    """Whether ``liger_kernel`` can be imported."""
    return find_spec("liger_kernel") is not None


def liger_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, terms: TokenLoss
) -> Tensor:
    """The sum of the tokens' losses, [].

    Args:
        hidden: [N, H].
        weight: [V, H].
        labels: [N].
        bias: [V].
        terms: The loss of one token; its ``logit_scale`` is applied to the hidden states, and to the bias.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    scale = terms.logit_scale
    return liger_fused_linear_cross_entropy(
        hidden if scale == 1 else hidden * scale,
        weight,
        labels,
        bias=bias if bias is None or scale == 1 else bias * scale,
        ignore_index=terms.ignore_index,
        lse_square_scale=terms.z_loss,
        label_smoothing=terms.label_smoothing,
        reduction="sum",
        softcap=terms.softcap,
        accum_dtype=torch.float32,
    )
