"""AdamW in one fused kernel, with gradient clipping in every precision, and no decay for norms and biases on request.

    p <- p - lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p)

Saves: kernel launches, and the temporary copies that the default implementation makes of all parameters at once
Costs: nothing; with 16-bit loss scaling one pass over the gradients that the kernel would do on the side
Source: Loshchilov and Hutter (2019), https://arxiv.org/abs/1711.05101; kernels: torch.optim.AdamW
"""

from typing import Any, ClassVar

import torch

from lit_efficient.internals.torch_optimizers import fused_devices, leave_unscaling
from lit_efficient.optimizers.groups import parameter_groups


class FusedAdamW(torch.optim.AdamW):
    """AdamW that uses torch's fused kernel wherever the parameters allow it.

    Lightning refuses to clip gradients for any fused optimizer, because such a one may unscale them itself. This one
    leaves that to the gradient scaler, so both go together. What a checkpoint of torch's AdamW has begun goes on with
    that one's kernel, bit by bit.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Term in the denominator.
        weight_decay: Decoupled weight decay.
        decay_norm_and_bias: Whether tensors with fewer than two dimensions decay as well.
    """

    goes_on_from: ClassVar[tuple[str, ...]] = ("AdamW",)  # classes whose checkpoints it continues, with their kernel
    low_bit_twin: ClassVar[tuple[str, int]] = ("AdamW", 2)  # what its low-bit form imitates, and that one's moments
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
        tensors = [p for group in groups for p in group["params"]]
        fused = all(p.device.type in devices and p.is_floating_point() for p in tensors)
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused or None)
        leave_unscaling(self)
