"""Schedule-free AdamW: an average of the iterates replaces the learning-rate schedule.

    y = (1 - b1) z + b1 x          weights in training, at which gradients are computed
    z <- z - lr (g / (sqrt(v_hat) + eps) + weight_decay y)
    x <- (1 - c) x + c z           weights that are validated and saved;  c = lr_max^2 / sum(lr_max^2)

``x`` is not stored, because x = z + (y - z) / b1. While x is in the parameters (after :meth:`ScheduleFreeAdamW.eval`),
y is stored, and restored bit-exactly. Validation and checkpoints do not change training.

Saves: the schedule, so that the number of steps need not be known in advance; the state is 8 bytes a parameter, as
    AdamW's
Costs: 4 bytes a parameter during validation and in checkpoints
Source: Defazio et al. (2024), https://arxiv.org/abs/2405.15682
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.errors import ChecksTypes, ConfigurationError, check_number
from lit_efficient.internals.torch_optimizers import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_sqrt,
)
from lit_efficient.optimizers.groups import parameter_groups
from lit_efficient.optimizers.stepping import loss_of, pieces, with_gradient
from lit_efficient.surgery import local
from lit_efficient.traits import Trait

_PIECE = 2**26  # bytes of parameters that are stepped at a time, which bounds the two temporary copies


class ScheduleFreeAdamW(ChecksTypes, Optimizer):
    """Schedule-free AdamW. With Lightning, add the callback ``ScheduleFree``, which switches the weights.

    Args:
        params: Parameters or groups.
        lr: Learning rate, constant after the warm-up; 1 to 10 times that of AdamW with a schedule.
        betas: Interpolation between average and iterate, in (0, 1), and decay of the second moment, in [0, 1).
        eps: Term that is added to the denominator.
        weight_decay: Decoupled weight decay.
        warmup_steps: Steps of the linear warm-up of the learning rate, at least 0.
        decay_norm_and_bias: Apply weight decay to tensors with fewer than two dimensions too.

    Raises:
        ConfigurationError: For a value out of range, and in :meth:`step` if the parameters contain the average.
    """

    traits = frozenset({Trait.NO_LOW_RANK_FORM, Trait.SCHEDULE_FREE})
    conflicts: ClassVar[dict[str | Trait, str]] = {
        "LoRA(lr_ratio=...)": "the weights are an average of those that are stepped: leave lr_ratio out",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "no schedule, so that a run may end at any step")}

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        decay_norm_and_bias: bool = True,
    ) -> None:
        check_number("ScheduleFreeAdamW", "lr", lr, least=0)
        check_number("ScheduleFreeAdamW", "weight_decay", weight_decay, least=0)
        check_number("ScheduleFreeAdamW", "warmup_steps", warmup_steps, least=0, whole=True)
        check_number("ScheduleFreeAdamW", "betas[0]", betas[0], above=0, below=1)
        check_number("ScheduleFreeAdamW", "betas[1]", betas[1], least=0, below=1)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        defaults |= {"warmup_steps": warmup_steps, "steps": 0, "lr_max": 0.0, "weight_sum": 0.0}
        self.training = False
        super().__init__(parameter_groups(params, weight_decay, decay_norm_and_bias), defaults)

    def train(self) -> None:
        """Restore the training weights y from before :meth:`eval` in the parameters."""
        if not self.training:
            for _, p in self._started():
                p.data.copy_(self.state[p].pop("y"))
        self.training = True

    def eval(self) -> None:
        """Put the averaged weights x into the parameters."""
        if self.training:
            for group, p in self._started():
                self.state[p]["y"] = p.detach().clone()
                p.data.copy_(self._average(group, p))
        self.training = False

    @contextmanager
    def moved_weights(self) -> Iterator[None]:
        """Context in which the parameters contain z. Changes to them are applied to z, and y and x follow.

        A technique that changes weights after a step uses it, so that the change counts as part of the step.
        """
        before = {p: p.detach().clone() for _, p in self._started()}
        for p in before:
            p.data.copy_(self.state[p]["z"])
        try:
            yield
        finally:
            for group, p in self._started():
                z = self.state[p]["z"]
                change = p.detach() - z
                z.copy_(p.detach())
                weight_in_y = 1 - group["betas"][0] * (1 - _share(group))
                p.data.copy_(before[p].add_(change, alpha=weight_in_y))

    def averages(self) -> dict[Tensor, Tensor]:
        """Return the averaged weights of all parameters that have stepped, as new tensors."""
        if self.training:
            return {p: self._average(group, p) for group, p in self._started()}
        return {p: p.detach().clone() for _, p in self._started()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self.training:
            raise ConfigurationError(
                "ScheduleFreeAdamW: the parameters hold the averaged weights. Call optimizer.train() before training "
                "and optimizer.eval() before validation and saving. With Lightning, the callback ScheduleFree does so: "
                "Trainer(callbacks=[ScheduleFree()])"
            )
        loss = loss_of(closure)
        for group in self.param_groups:
            self._step_group(group, with_gradient(group))
        return loss

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if not parameters:  # a frozen group starts its warm-up and its average when it is unfrozen
            return
        group["steps"] += 1
        lr = float(group["lr"]) * min(1.0, group["steps"] / max(group["warmup_steps"], 1))
        group["lr_max"] = max(lr, group["lr_max"])
        group["weight_sum"] += group["lr_max"] ** 2
        share = _share(group)
        beta1, beta2 = group["betas"]
        correction = math.sqrt(1 - beta2 ** group["steps"])
        for p in parameters:
            if not self.state[p]:
                self.state[p] |= {"z": p.detach().clone(), "exp_avg_sq": torch.zeros_like(p)}
        for piece in pieces(parameters, _PIECE):
            y = [local(p) for p in piece]
            z = [local(self.state[p]["z"]) for p in piece]
            squares = [local(self.state[p]["exp_avg_sq"]) for p in piece]
            gradients = [local(p.grad) for p in piece if p.grad is not None]
            foreach_mul_(squares, beta2)
            foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
            roots = foreach_sqrt(squares)
            foreach_div_(roots, correction)
            foreach_add_(roots, group["eps"])
            updates = foreach_div(gradients, roots)
            foreach_add_(updates, y, alpha=group["weight_decay"])
            # y = (1 - b1) z + b1 x with the new x and z, without computing x
            foreach_lerp_(y, z, share)
            foreach_add_(y, updates, alpha=lr * (beta1 * (1 - share) - 1))
            foreach_add_(z, updates, alpha=-lr)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the training weights y, because a checkpoint stores the average as its weights."""
        packed = super().state_dict()
        if self.training:
            ids = [i for group in packed["param_groups"] for i in group["params"]]
            parameters = [p for group in self.param_groups for p in group["params"]]
            owners = dict(zip(ids, parameters, strict=True))
            state = {i: {**one, "y": owners[i].detach().clone()} for i, one in packed["state"].items()}
            packed = {**packed, "state": state}
        return packed

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load a state of :meth:`state_dict`. Call :meth:`train` before the next step."""
        super().load_state_dict(state_dict)
        self.training = False

    def _started(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yield the parameters that have stepped, each with its group."""
        for group in self.param_groups:
            for p in group["params"]:
                if self.state.get(p):  # `self.state[p]` would create an empty state
                    yield group, p

    def _average(self, group: dict[str, Any], p: Tensor) -> Tensor:
        return torch.lerp(self.state[p]["z"], p.detach(), 1 / group["betas"][0])


def _share(group: dict[str, Any]) -> float:
    """Return c, the share of the last z in x."""
    if not group["weight_sum"]:
        return 0.0
    return float(group["lr_max"] ** 2 / group["weight_sum"])
