"""Lion: an optimizer that steps by the sign of an interpolated moment.

    u = sign(b1 * m + (1 - b1) * g);    p <- p - lr * (u + weight_decay * p);    m <- b2 * m + (1 - b2) * g

Saves: half of AdamW's state: 4 bytes a float32 parameter, 1.02 with LowBitOptimizer
Costs: needs a learning rate 3 to 10 times below AdamW's, and a weight decay larger by the same factor
Source: Chen et al. (2023), https://arxiv.org/abs/2302.06675
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.errors import ChecksTypes, check_number
from lit_efficient.internals.torch_optimizers import (
    foreach_add_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    foreach_sign_,
)
from lit_efficient.optimizers.groups import parameter_groups
from lit_efficient.optimizers.stepping import loss_of, with_gradient
from lit_efficient.traits import Trait


def lion(
    parameters: list[Tensor],
    gradients: list[Tensor],
    moments: list[Tensor],
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """Do one step of Lion, in place.

    Args:
        parameters: Tensors that are stepped.
        gradients: Their gradients.
        moments: Their moments, which are updated.
        lr: Learning rate.
        betas: Interpolation for the step, and decay of the moment.
        weight_decay: Decoupled weight decay.
    """
    if not parameters:
        return
    updates = foreach_lerp(moments, gradients, weight=1 - betas[0])
    foreach_sign_(updates)
    foreach_mul_(parameters, 1 - lr * weight_decay)
    foreach_add_(parameters, updates, alpha=-lr)
    foreach_lerp_(moments, gradients, weight=1 - betas[1])


class Lion(ChecksTypes, Optimizer):
    """Optimizer with one moment, which steps by the sign of an update.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Interpolation for the step and decay of the moment, each in [0, 1).
        weight_decay: Decoupled weight decay.
        decay_norm_and_bias: Apply weight decay to tensors with fewer than two dimensions too.

    Raises:
        ConfigurationError: For a value out of range.
    """

    traits = frozenset({Trait.NO_LOW_RANK_FORM, Trait.NO_SCHEDULE_FREE_FORM})
    low_bit_twin: ClassVar[tuple[str, int]] = ("Lion", 1)  # low-bit class, and its number of moments
    helps: ClassVar[dict[str, tuple[int, str]]] = {"memory": (0, "half of the optimizer's states")}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        decay_norm_and_bias: bool = True,
    ) -> None:
        check_number("Lion", "lr", lr, least=0)
        check_number("Lion", "weight_decay", weight_decay, least=0)
        for beta in betas:
            check_number("Lion", "betas", beta, least=0, below=1)
        groups = parameter_groups(params, weight_decay, decay_norm_and_bias)
        super().__init__(groups, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            parameters = with_gradient(group)
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            moments = [self.state[p]["exp_avg"] for p in parameters]
            gradients = [p.grad for p in parameters if p.grad is not None]
            lion(parameters, gradients, moments, float(group["lr"]), group["betas"], group["weight_decay"])
        return loss
