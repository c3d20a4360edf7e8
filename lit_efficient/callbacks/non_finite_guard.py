"""Non-finite guard: stop the run, or skip the step, if a gradient is NaN, infinite or extremely large.

    max_i |g_i| < 1e16, over all gradients of the optimizer

Saves: the weights and optimizer states of a run in which one batch has an error or overflows
Costs: one wait for the device per optimizer step, and one fused pass over the gradients, unless ``gradient_clip_val``
    clips by norm: then the norm that clipping computes is checked
Source: the check of torch.amp.GradScaler, usable without loss scaling

The check uses the maximum and not the 2-norm, because squares of large finite gradients overflow. The bound of 1e16
exists because they also overflow in Adam's second moment, which then stays infinite, so that its weights never change
again, without any error. No element is larger than the 2-norm, so a norm below the bound makes the maximum unnecessary.
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lit_efficient.application.gradients import gradients_of
from lit_efficient.errors import ChecksTypes, DivergedError, check_number, diagnostic, listed
from lit_efficient.files.checkpoints import is_floating
from lit_efficient.internals.lightning_clipping import clips_by_norm, clips_directly, leave_norm, watch_norm
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.lightning_trainer import TrainerOnly
from lit_efficient.internals.torch_shards import largest_of_all
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.optimizers.host_states import Streamed
from lit_efficient.optimizers.in_backward import InBackward
from lit_efficient.surgery import is_sharded, local

LIMIT = 1e16  # float32 can hold the sum of the squares of a million such numbers


def largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest magnitude of all elements, or NaN if one is NaN, with one wait for each device.

    For sharded tensors the result is the maximum over all processes, which must all call this function.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        if values.numel():
            kinds.setdefault((getattr(values, "device_mesh", None), values.device), []).append(values)
    sizes = [_largest_shard(found, mesh) for (mesh, _), found in kinds.items()]
    if any(map(math.isnan, sizes)):  # max would depend on the order
        return math.nan
    return max(sizes, default=0.0)


def _largest_shard(tensors: list[Tensor], mesh: object) -> float:
    """Return the largest magnitude over all processes of a mesh. A process may hold no elements."""
    filled = [own for own in map(local, tensors) if own.numel()]
    if filled:
        norm = get_total_norm(filled, norm_type=math.inf)
    else:
        norm = torch.zeros((), device=local(tensors[0]).device)
    if mesh is None:
        return float(norm)
    # The maximum over processes may lose NaN, so that NaN is reduced as a second number.
    both = torch.stack([norm.nan_to_num(0.0, posinf=math.inf), norm.isnan().to(norm.dtype)])
    size, is_nan = largest_of_all(both, mesh).tolist()
    if is_nan:
        return math.nan
    return float(size)


class NonFiniteGuard(Callback, ChecksTypes, TrainerOnly):
    """Stop the run, or skip the step, when a gradient is NaN, infinite or larger than 1e16.

    A skipped step changes neither weights nor optimizer states, and learning-rate schedules continue. All processes
    decide alike, from the gradients of all processes. The command line adds this guard to every fit, and exits with
    code 4 when the guard stops a run.

    With 16-mixed, the gradient scaler finds its scale by overflows and skips these steps itself. The guard then stops
    only after more than ``max_consecutive`` consecutive skipped steps with a scale below 1. If the optimizer steps in
    the backward pass, gradients that are not finite count as zeros in the last step before the run stops.

    The guard always stops at a learning rate that is not finite. It also stops if weights are not finite, which the
    next bad step or the end of the run finds, or if optimizer states are not finite at the end of the run. Such a run
    can only be resumed from an earlier checkpoint.

    The message names the cause, if it is known: values in the batch that are not finite, or what the module returns
    from a method ``explain_not_finite() -> str | None``.

    Args:
        action: ``raise`` stops with an error that names the parameters. ``skip`` skips the step with a warning.
        max_consecutive: Largest number of consecutive steps that ``skip`` skips, at least 1. One more stops the run.

    Raises:
        ConfigurationError: For an argument out of range.
        DivergedError: During a fit, when the guard stops the run.
    """

    helps: ClassVar[dict[str, tuple[int, str]]] = {"safety": (4, "NaN or Inf never reaches the weights")}

    def __init__(self, action: Literal["raise", "skip"] = "raise", max_consecutive: int = 10) -> None:
        check_number("NonFiniteGuard", "max_consecutive", max_consecutive, least=1, whole=True)
        self.action = action
        self.max_consecutive = max_consecutive
        self.skipped = 0
        self._consecutive = 0
        self._batch: Any = None  # the current batch, to find the cause of a gradient that is not finite
        self._largest: dict[Tensor, Tensor] = {}  # largest magnitudes of gradients that the backward pass has freed
        self._reads_norm = False  # True if gradients are checked when the trainer clips them

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, InBackward):
                optimizer.in_backward.watchers.append(self._check_and_clean)
        leave_norm(trainer.precision_plugin)  # a run that died may have left it
        steps_whole = not any(isinstance(optimizer, InBackward | Streamed) for optimizer in trainer.optimizers)
        self._reads_norm = steps_whole and clips_directly(trainer, pl_module)
        if self._reads_norm:
            watch_norm(trainer.precision_plugin, partial(self._check_norm, trainer, pl_module))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Check the learning rates before the backward pass, in which some optimizers step."""
        rates = [group.get("lr", 0.0) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for rate in rates:
            if isinstance(rate, Tensor) and rate.device.type != "cpu":  # reading it would wait for the device
                continue
            if not math.isfinite(float(rate)):
                raise DivergedError(
                    f"NonFiniteGuard: at step {trainer.global_step} the learning rate is {float(rate)}; the weights "
                    "are those before the step. Correct the schedule or lower the learning rate, and resume"
                )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._reads_norm or not clips_by_norm(trainer):
            self._check(trainer, pl_module, optimizer)

    def _check_norm(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer, norm: Any) -> bool:
        """Check gradients by their norm before they are clipped. Return False if the step is skipped."""
        size = float(norm.full_tensor() if is_sharded(norm) else norm)
        if size < LIMIT:
            self._consecutive = 0
            return True
        return self._check(trainer, module, optimizer)  # the norm may be infinite although no gradient is

    def _check(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> bool:
        """Check the gradients of an optimizer. Return False if the step is skipped."""
        freed = isinstance(optimizer, InBackward)
        gradients = self._largest if freed else gradients_of(optimizer)
        self._largest = {}
        size = largest(gradients.values())
        finite = size < LIMIT
        if freed or traits_of(trainer.strategy).flattens:  # each process has only its part of the gradients
            finite = trainer.strategy.reduce_boolean_decision(finite)
        if finite:
            self._consecutive = 0
            return True
        self._check_weights(trainer, pl_module)
        self.skipped += 1
        self._consecutive += 1
        scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        # The scaler skips steps with NaN or Inf by itself, but not steps with large finite gradients.
        scales = scaler is not None and not math.isfinite(size)
        if scales and (self._consecutive <= self.max_consecutive or scaler.get_scale() >= 1):
            return True
        what = "not finite"
        if LIMIT <= size < math.inf:
            what = f"beyond {LIMIT:g}"
        culprits = _culprits(pl_module, {p: [gradient] for p, gradient in gradients.items()})
        where = f"at step {trainer.global_step} gradients are {what} in {culprits}"
        cause = None
        with diagnostic("NonFiniteGuard", "the cause"):
            cause = self._cause(pl_module)
        if cause:
            where += f", because {cause}"
        if self.action == "raise" and not scales:
            if freed:
                weights = "were stepped with zeros for these gradients"
            else:
                weights = "are those before the step"
            raise DivergedError(f"NonFiniteGuard: {where}; the weights {weights}")
        if self._consecutive > self.max_consecutive:
            raise DivergedError(f"NonFiniteGuard: {where}, after {self._consecutive - 1} consecutive skipped steps")
        rank_zero_warn(f"NonFiniteGuard: {where}; the step is skipped")
        optimizer.zero_grad()
        return False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._batch = batch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._batch = None

    def _cause(self, module: nn.Module) -> str | None:
        """Return what was not finite before the gradients: the batch, or what the module reports; None if unknown.

        A module reports it with a method ``explain_not_finite() -> str | None``.
        """
        if isinstance(self._batch, Mapping):
            batch = self._batch
        else:
            batch = {"": self._batch}
        for name, part in batch.items():
            values = [value for value in tree_leaves(part) if is_floating(value)]
            if not largest(values) < math.inf:
                return f"the batch holds values that are not finite{f' ({name})' if name else ''}"
        explain = getattr(module, "explain_not_finite", None)
        return explain() if callable(explain) else None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        leave_norm(trainer.precision_plugin)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        leave_norm(trainer.precision_plugin)
        self._check_weights(trainer, pl_module)
        states: dict[Tensor, list[Tensor]] = {}
        for optimizer in trainer.optimizers:
            for p, own in optimizer.state.items():
                states[p] = [value for value in own.values() if is_floating(value) and value.itemsize > 1]
        self._check_kept(trainer, pl_module, "states of the optimizer", states)

    def _check_weights(self, trainer: Trainer, module: LightningModule) -> None:
        self._check_kept(trainer, module, "weights", {p: [p.detach()] for p in module.parameters() if _is_plain(p)})

    def _check_kept(
        self, trainer: Trainer, module: LightningModule, what: str, kept: Mapping[Tensor, list[Tensor]]
    ) -> None:
        """Raise :class:`DivergedError` if a tensor of ``kept``, the tensors of each parameter, is not finite."""
        if traits_of(trainer.strategy).flattens:  # each process has only its part, and all must decide alike
            return
        if not largest(tensor for own in kept.values() for tensor in own) < math.inf:
            where = f"at step {trainer.global_step} {what} are not finite in {_culprits(module, kept, math.inf)}"
            raise DivergedError(f"NonFiniteGuard: {where}; resume from the last checkpoint before this step")

    def _check_and_clean(self, parameter: Tensor) -> None:
        """Before one parameter steps in the backward pass, keep its gradient's largest magnitude, without waiting.

        Elements that are not finite become zero, because the step cannot be undone when the maximum is known.
        """
        values: Any = parameter.grad
        if values.is_sparse:
            parameter.grad = values.coalesce()
            values = parameter.grad.values()
        values = values.to_local() if is_sharded(values) else values
        if values.numel():
            self._largest[parameter] = torch.linalg.vector_norm(values, math.inf)
            values.masked_fill_(~(values.abs() < LIMIT), 0.0)

    def state_dict(self) -> dict[str, int]:
        """Return the numbers of skipped steps, in total and consecutively.

        The state is empty if no step was skipped, so that Lightning does not ask for the guard in evaluations.
        """
        if not self.skipped:
            return {}
        return {"skipped": self.skipped, "consecutive": self._consecutive}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.skipped = state_dict["skipped"]
        self._consecutive = state_dict["consecutive"]


def _is_plain(parameter: Tensor) -> bool:
    """Return whether a parameter is neither a shard nor the codes of a quantised weight."""
    return type(parameter) is torch.nn.Parameter and parameter.is_floating_point() and parameter.itemsize > 1


def _culprits(module: nn.Module, tensors: Mapping[Tensor, list[Tensor]], limit: float = LIMIT) -> str:
    """Return the names of the parameters that have a tensor with an element of at least ``limit``, or NaN."""
    names = [name for name, p in module.named_parameters() if p in tensors and not largest(tensors[p]) < limit]
    return listed(names)
