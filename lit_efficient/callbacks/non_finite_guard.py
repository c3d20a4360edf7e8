"""NaN or Inf never reaches the weights: gradients and rates are checked before each optimizer step.

    max_i |g_i| < 1e16, over all gradients of the optimizer

Saves: the weights and optimizer states of a run in which one batch or one overflow goes wrong.
Costs: one fused pass over the gradients (of the order of clipping them) and one wait for the device an optimizer step.
Source: the check of torch.amp.GradScaler, made usable without loss scaling.

The maximum is taken, and not the 2-norm, because squares of large but finite gradients overflow. They do so in Adam's
second moment, too, which is infinite ever after: its weights stand still, and nothing says so. Hence the bound.
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

from lit_efficient.application.gradients import gradients_of
from lit_efficient.errors import DivergedError, check_choice, check_number, listed
from lit_efficient.files.checkpoints import is_floating
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_shards import largest_of_all
from lit_efficient.optimizers.in_backward import InBackward
from lit_efficient.surgery import is_sharded, local

LIMIT = 1e16  # the squares of a million such numbers can be added up in float32


def largest(tensors: Iterable[Tensor]) -> float:
    """The largest magnitude of all elements, NaN if one is; one wait for the device. Shards count as a whole."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        if values.numel():
            kinds.setdefault((getattr(values, "device_mesh", None), values.device), []).append(values)
    sizes = [_largest_shard(found, mesh) for (mesh, _), found in kinds.items()]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


def _largest_shard(tensors: list[Tensor], mesh: Any) -> float:
    """The largest magnitude, of all processes of a mesh; some may hold nothing, of which there is no largest."""
    filled = [own for own in map(local, tensors) if own.numel()]
    norm = get_total_norm(filled, norm_type=math.inf) if filled else torch.zeros((), device=local(tensors[0]).device)
    if mesh is None:
        return float(norm)
    both = torch.stack([norm.nan_to_num(0.0, posinf=math.inf), norm.isnan().to(norm.dtype)])  # no maximum keeps NaN
    size, unknown = largest_of_all(both, mesh).tolist()
    return math.nan if unknown else float(size)


class NonFiniteGuard(Callback):
    """Stop, or leave out the step, when a gradient is NaN, infinite or beyond 1e16.

    A step that is left out changes neither weights nor optimizer states; learning-rate schedules go on. It looks at the
    gradients of all processes together: all take the same decision. The gradient scaler of 16-mixed finds its scale by
    overflow and leaves out such steps itself; there it stops when more of them than ``max_consecutive`` come in a row
    and the scale has fallen below 1. The command line adds it to every fit, and ends with code 4 when it stops.
    Where the optimizer steps in the backward pass, gradients that are not finite count as zeros in the last step.
    It always stops at a learning rate that is not finite, and when weights are not: after a fault of memory, or a rate
    beyond all bounds, which the next step or the run's end finds; and at the end when optimizers' states are not, whose
    weights stand still. Then only the last checkpoint helps.

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

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Some optimizers step in the backward pass."""
        rates = [group.get("lr", 0.0) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        known = [float(rate) for rate in rates if not isinstance(rate, Tensor) or rate.device.type == "cpu"]
        if wrong := [rate for rate in known if not math.isfinite(rate)]:
            where = f"at step {trainer.global_step} the learning rate is {wrong[0]}"
            raise DivergedError(f"NonFiniteGuard: {where}; the weights are those before the step")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        freed = isinstance(optimizer, InBackward)
        gradients, self._largest = self._largest, {}
        if not freed:
            gradients = gradients_of(optimizer)
        size = largest(gradients.values())
        finite = size < LIMIT
        if freed or traits_of(trainer.strategy).flattens:  # each process sees its own part
            finite = trainer.strategy.reduce_boolean_decision(finite)
        if finite:
            self._consecutive = 0
            return
        self._check_weights(trainer, pl_module)
        self.skipped += 1
        self._consecutive += 1
        scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        scales = scaler is not None and not math.isfinite(size)  # what is finite it would step with
        if scales and (self._consecutive <= self.max_consecutive or scaler.get_scale() >= 1):
            return
        what = f"beyond {LIMIT:g}" if LIMIT <= size < math.inf else "not finite"
        culprits = _culprits(pl_module, {p: [gradient] for p, gradient in gradients.items()})
        where = f"at step {trainer.global_step} gradients are {what} in {culprits}"
        if self.action == "raise" and not scales:
            weights = "have made the step with zeros in their place" if freed else "are those before the step"
            raise DivergedError(f"NonFiniteGuard: {where}; the weights {weights}")
        if self._consecutive > self.max_consecutive:
            raise DivergedError(f"NonFiniteGuard: {where}, after {self._consecutive - 1} steps left out in a row")
        rank_zero_warn(f"NonFiniteGuard: {where}; the step is left out")
        optimizer.zero_grad()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._check_weights(trainer, pl_module)
        states = {
            p: [value for value in own.values() if is_floating(value) and value.itemsize > 1]
            for optimizer in trainer.optimizers
            for p, own in optimizer.state.items()
        }
        self._check_kept(trainer, pl_module, "states of the optimizer", states)

    def _check_weights(self, trainer: Any, module: Any) -> None:
        self._check_kept(trainer, module, "weights", {p: [p.detach()] for p in module.parameters() if _is_plain(p)})

    def _check_kept(self, trainer: Any, module: Any, what: str, kept: Mapping[Tensor, list[Tensor]]) -> None:
        """Stop where what belongs to a parameter is not finite."""
        if traits_of(trainer.strategy).flattens:  # each process would see its own part
            return
        if not largest(tensor for own in kept.values() for tensor in own) < math.inf:
            where = f"at step {trainer.global_step} {what} are not finite in {_culprits(module, kept, math.inf)}"
            raise DivergedError(f"NonFiniteGuard: {where}; go on from the last checkpoint")

    def _hold_back(self, parameter: Tensor) -> None:
        """Before the step of one parameter: note whether its gradient is finite, without waiting; let none in."""
        values: Any = parameter.grad
        if values.is_sparse:
            parameter.grad = values.coalesce()
            values = parameter.grad.values()
        values = values.to_local() if is_sharded(values) else values
        if values.numel():
            self._largest[parameter] = torch.linalg.vector_norm(values, math.inf)
            values.masked_fill_(~(values.abs() < LIMIT), 0.0)

    def state_dict(self) -> dict[str, int]:
        """How many steps were left out, in all and in a row; nothing if none was: evaluations need no guard."""
        return {"skipped": self.skipped, "consecutive": self._consecutive} if self.skipped else {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.skipped, self._consecutive = state_dict["skipped"], state_dict["consecutive"]


def _is_plain(parameter: Tensor) -> bool:
    """Whether it is no shard, and no codes of quantised weights."""
    return type(parameter) is torch.nn.Parameter and parameter.is_floating_point() and parameter.itemsize > 1


def _culprits(module: Any, tensors: Mapping[Tensor, list[Tensor]], limit: float = LIMIT) -> str:
    names = [name for name, p in module.named_parameters() if p in tensors and not largest(tensors[p]) < limit]
    return listed(names)
