"""Schedule-free AdamW: an average of the iterates takes the place of a learning-rate schedule.

    y = (1 - b1) z + b1 x          gradients are taken here: the weights while training
    z <- z - lr (g / (sqrt(v_hat) + eps) + weight_decay y)
    x <- (1 - c) x + c z           the weights that are validated and saved;  c = lr_max^2 / sum(lr_max^2)

``x`` is not stored: x = z + (y - z) / b1. While it is in the parameters (after :meth:`ScheduleFreeAdamW.eval`), ``y``
is kept aside and comes back bit by bit, so that a validation or a checkpoint never changes training.

Saves: the schedule, and knowing the number of steps beforehand; the state is AdamW's 8 bytes a parameter
Costs: 4 bytes a parameter while validating, and in checkpoints
Source: Defazio et al. (2024), https://arxiv.org/abs/2405.15682
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.torch_foreach import (
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

_PIECE = 2**26  # bytes of parameters that are stepped at a time: two temporary tensors of each


class ScheduleFreeAdamW(Optimizer):
    """Schedule-free AdamW. Under Lightning add the callback ``ScheduleFree``, which switches the weights.

    Args:
        params: Parameters or groups.
        lr: Learning rate, constant after the warm-up; 1 to 10 times that of AdamW with a schedule.
        betas: Interpolation between average and iterate, in (0, 1), and decay of the second moment, in [0, 1).
        eps: Term in the denominator.
        weight_decay: Decoupled weight decay.
        warmup_steps: Steps over which the rate grows linearly to ``lr``, at least 0.
        decay_norm_and_bias: Whether tensors with fewer than two dimensions decay as well.

    Raises:
        ConfigurationError: For a value out of range; in :meth:`step`, if the weights are the averaged ones.
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
        """Put the training weights y into the parameters, as they were before :meth:`eval`."""
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
        """Hold z in the parameters, to change it right after a step as if the step had ended there; y and x follow."""
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
                p.data.copy_(before[p].add_(change, alpha=1 - group["betas"][0] * (1 - _share(group))))  # z's part of y

    def averages(self) -> dict[Tensor, Tensor]:
        """The averaged weights of the parameters that have stepped, as new tensors."""
        return {p: self._average(group, p) if self.training else p.detach().clone() for group, p in self._started()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self.training:
            raise ConfigurationError(
                "ScheduleFreeAdamW: the parameters hold the averaged weights. Call optimizer.train() before training "
                "and optimizer.eval() before validation and saving; under Lightning the callback ScheduleFree does it: "
                "Trainer(callbacks=[ScheduleFree()])"
            )
        loss = loss_of(closure)
        for group in self.param_groups:
            self._step_group(group, with_gradient(group))
        return loss

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if not parameters:  # a group that is frozen for now begins its warm-up and its average when it thaws
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
            z, squares = ([local(self.state[p][name]) for p in piece] for name in ("z", "exp_avg_sq"))
            gradients = [local(p.grad) for p in piece if p.grad is not None]
            foreach_mul_(squares, beta2)
            foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
            roots = foreach_sqrt(squares)
            foreach_div_(roots, correction)
            foreach_add_(roots, group["eps"])
            updates = foreach_div(gradients, roots)
            foreach_add_(updates, y, alpha=group["weight_decay"])
            # y = (1 - b1) z + b1 x with the new x and z, without making x
            foreach_lerp_(y, z, share)
            foreach_add_(y, updates, alpha=lr * (beta1 * (1 - share) - 1))
            foreach_add_(z, updates, alpha=-lr)

    def state_dict(self) -> dict[str, Any]:
        """The state, with the training weights in it: the checkpoint's own weights are the averaged ones."""
        packed = super().state_dict()
        if self.training:
            ids = [i for group in packed["param_groups"] for i in group["params"]]
            owners = dict(zip(ids, (p for group in self.param_groups for p in group["params"]), strict=True))
            state = {i: {**one, "y": owners[i].detach().clone()} for i, one in packed["state"].items()}
            packed = {**packed, "state": state}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; call :meth:`train` before the next step."""
        super().load_state_dict(state_dict)
        self.training = False

    def _started(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            yield from ((group, p) for p in group["params"] if self.state.get(p))  # none is made by looking

    def _average(self, group: dict[str, Any], p: Tensor) -> Tensor:
        return torch.lerp(self.state[p]["z"], p.detach(), 1 / group["betas"][0])


def _share(group: dict[str, Any]) -> float:
    """c: how much of the last z is in x."""
    return float(group["lr_max"] ** 2 / group["weight_sum"]) if group["weight_sum"] else 0.0
