"""NaN or Inf never reaches the weights: gradients are checked before each optimizer step.

    finite = isfinite(max_i |g_i|), over all gradients of the optimizer

Saves: the weights and optimizer states of a run in which one batch or one overflow goes wrong.
Costs: one fused pass over the gradients (of the order of clipping them) and one wait for the device an optimizer step.
Source: the check of torch.amp.GradScaler, made usable without loss scaling.

The maximum is taken, and not the 2-norm, because squares of large but finite gradients overflow.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lit_efficient.errors import DivergedError, check_choice, check_number
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.mechanisms.metering import gradients_of
from lit_efficient.optimizers.in_backward import InBackward
from lit_efficient.surgery import is_sharded


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element of any tensor is NaN or infinite; one wait for the device. Shards count as a whole."""
    values = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    filled = [tensor for tensor in values if tensor.numel()]
    kinds = [[tensor for tensor in filled if is_sharded(tensor) is sharded] for sharded in (False, True)]
    return all(_finite(tensors) for tensors in kinds if tensors)


def _finite(tensors: list[Tensor]) -> bool:
    largest: Any = get_total_norm(tensors, norm_type=math.inf)
    largest = largest.full_tensor() if is_sharded(largest) else largest
    return bool(torch.isfinite(largest))


class NonFiniteGuard(Callback):
    """Stop, or leave out the step, when a gradient is NaN or infinite.

    A step that is left out changes neither weights nor optimizer states; learning-rate schedules go on. It looks at the
    gradients of all processes together: all take the same decision. The gradient scaler of 16-mixed finds its scale by
    overflow and leaves out such steps itself; there it stops when more of them than ``max_consecutive`` come in a row
    and the scale has fallen below 1. The command line adds it to every fit, and ends with code 4 when it stops.
    Where the optimizer steps in the backward pass, gradients that are not finite count as zeros in the last step.

    Args:
        action: ``raise`` stops with an error that names parameters, ``skip`` leaves out the step with a warning.
        max_consecutive: With ``skip``, so many steps in a row are left out before it stops, 1 or more.

    Raises:
        ConfigurationError: If an argument is not allowed.
    """

    helps: ClassVar[dict[str, tuple[int, str]]] = {"safety": (4, "NaN or Inf never reaches the weights")}

    def __init__(self, action: Literal["raise", "skip"] = "raise", max_consecutive: int = 10) -> None:
        check_choice("NonFiniteGuard", "action", action, ("raise", "skip"))
        check_number("NonFiniteGuard", "max_consecutive", max_consecutive, least=1, whole=True)
        self.action = action
        self.max_consecutive = max_consecutive
        self.skipped = 0
        self._consecutive = 0
        self._largest: dict[Tensor, Tensor] = {}  # of each gradient that was freed in the backward pass

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, InBackward):
                optimizer.in_backward.watchers.append(self._hold_back)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Check the gradients, before they are clipped.

        Raises:
            DivergedError: If one is not finite and the action is ``raise``, or too many in a row were left out.
        """
        freed = isinstance(optimizer, InBackward)
        gradients, self._largest = self._largest, {}
        if not freed:
            gradients = gradients_of(optimizer)
        finite = all_finite(gradients.values())
        if freed or traits_of(trainer.strategy).flattens:  # each process sees its own part
            finite = trainer.strategy.reduce_boolean_decision(finite)
        if finite:
            self._consecutive = 0
            return
        self.skipped += 1
        self._consecutive += 1
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and (self._consecutive <= self.max_consecutive or scaler.get_scale() >= 1):
            return
        where = f"at step {trainer.global_step} gradients are not finite in {_culprits(pl_module, gradients)}"
        if self.action == "raise" and scaler is None:
            weights = "have made the step with zeros in their place" if freed else "are those before the step"
            raise DivergedError(f"NonFiniteGuard: {where}; the weights {weights}")
        if self._consecutive > self.max_consecutive:
            raise DivergedError(f"NonFiniteGuard: {where}, after {self._consecutive - 1} steps left out in a row")
        rank_zero_warn(f"NonFiniteGuard: {where}; the step is left out")
        optimizer.zero_grad()

    def _hold_back(self, parameter: Tensor) -> None:
        """Before the step of one parameter: note whether its gradient is finite, without waiting; let none in."""
        values: Any = parameter.grad
        if values.is_sparse:
            parameter.grad = values.coalesce()
            values = parameter.grad.values()
        values = values.to_local() if is_sharded(values) else values
        if values.numel():
            self._largest[parameter] = torch.linalg.vector_norm(values, math.inf)
            values.nan_to_num_(0.0, 0.0, 0.0)

    def state_dict(self) -> dict[str, int]:
        """How many steps were left out, in all and in a row; nothing if none was: evaluations need no guard."""
        return {"skipped": self.skipped, "consecutive": self._consecutive} if self.skipped else {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on counting."""
        self.skipped, self._consecutive = state_dict["skipped"], state_dict["consecutive"]


def _culprits(module: Any, gradients: Mapping[Tensor, Tensor], most: int = 3) -> str:
    names = [name for name, p in module.named_parameters() if p in gradients and not all_finite([gradients[p]])]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
