"""AdamW in one fused kernel. It supports gradient clipping in every precision, and can exclude norms and biases from
weight decay.

    p <- p - lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p)

Saves: kernel launches, and temporary copies of all parameters that the default implementation makes
Costs: nothing; with a 16-bit loss scale one pass over the gradients, which the kernel would otherwise include
Source: Loshchilov and Hutter (2019), https://arxiv.org/abs/1711.05101; kernels: torch.optim.AdamW
"""

from typing import Any, ClassVar

import torch

from lit_efficient.errors import ChecksTypes
from lit_efficient.internals.torch_optimizers import fused_devices, leave_unscaling
from lit_efficient.optimizers.groups import parameter_groups, tensor_of


class FusedAdamW(ChecksTypes, torch.optim.AdamW):
    """AdamW that uses torch's fused kernel if the device and dtype of all parameters support it.

    Lightning does not clip gradients for fused optimizers, because they may unscale gradients inside the kernel. This
    class leaves unscaling to the gradient scaler, so clipping works. A run that resumes from a checkpoint of torch's
    AdamW continues with the kernel of that checkpoint, bit-exactly.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Term that is added to the denominator.
        weight_decay: Decoupled weight decay.
        decay_norm_and_bias: Apply weight decay to tensors with fewer than two dimensions too.
    """

    goes_on_from: ClassVar[tuple[str, ...]] = ("AdamW",)  # classes whose checkpoints can be resumed, with their kernel
    low_bit_twin: ClassVar[tuple[str, int]] = ("AdamW", 2)  # low-bit class, and its number of moments
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "one kernel for the step of all parameters")}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        decay_norm_and_bias: bool = True,
    ) -> None:
        groups = parameter_groups(params, weight_decay, decay_norm_and_bias)
        devices = fused_devices()
        tensors = [tensor_of(p) for group in groups for p in group["params"]]
        fused = all(p.device.type in devices and p.is_floating_point() for p in tensors)
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused or None)
        leave_unscaling(self)
