"""Spike guard: a step whose loss or gradient norm spikes is skipped, or the run returns to its last good state.

    spike:  x > mean + sigmas * std     of the last ``window`` good values; x is the loss or gradient norm of a step

Saves: runs that a single bad batch would make diverge, and the time until somebody resumes from a checkpoint
Costs: a norm over the gradients and one wait for the device per optimizer step; with ``rewind`` a copy of the trained
    weights and optimizer states in CPU memory and in checkpoints
Source: OLMo et al. (2024), https://arxiv.org/abs/2501.00656 (its optimizers that skip steps); Chowdhery et al. (2022),
    https://arxiv.org/abs/2204.02311, section 5.1 (back to an earlier state, past the bad batches)
"""

import inspect
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from lit_efficient.application.gradients import GradientHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.gradient_norm import gradient_norm
from lit_efficient.errors import ConflictError, DivergedError, check_number
from lit_efficient.internals.lightning_loops import logged_step
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_optimizers import unscales
from lit_efficient.internals.torch_trees import tree_map_only
from lit_efficient.optimizers.stepping import restore_dtypes
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

# Smallest standard deviation as a fraction of the mean: if all values are equal, rounding must not count as a spike.
_LEAST_SPREAD = 1e-3


def is_spike(value: float, history: Sequence[float], sigmas: float = 6.0) -> bool:
    """Return whether ``value`` is more than ``sigmas`` standard deviations above the mean of ``history``.

    The result is False for fewer than two earlier values, and for NaN and Inf, which `NonFiniteGuard` handles.

    Example:
        >>> is_spike(2.0, [1.0, 1.1, 0.9, 1.0]), is_spike(1.2, [1.0, 1.1, 0.9, 1.0])
        (True, False)
    """
    if len(history) < 2 or not math.isfinite(value):
        return False
    mean = math.fsum(history) / len(history)
    deviation = math.sqrt(math.fsum((earlier - mean) ** 2 for earlier in history) / (len(history) - 1))
    return value > mean + sigmas * max(deviation, _LEAST_SPREAD * abs(mean))


class SpikeGuard(GradientHooks, Technique):
    """Skip each step whose loss or gradient norm is far above those of the last steps, before it changes the weights.

    Both values are those of the whole step: losses are averaged over micro-batches and processes, and gradients are
    complete and not yet clipped. A skipped step counts as a step, so schedules continue. Each optimizer has its own
    history. `NonFiniteGuard` handles NaN and Inf. Changes by the forward pass, such as running statistics of batch
    norm, are not undone. Each spike gives a warning and is logged as ``spikes``; the end of the run gives the number.

    With ``rewind`` the weights, buffers and optimizer states also return to the last saved good state, and training
    continues with the next batch. Averages (`EMA`) do not return.

    Args:
        action: ``skip`` skips the step. ``rewind`` also returns to the last good state.
        sigmas: Number of standard deviations above the mean from which a value is a spike, above 0.
        window: Number of good steps from which mean and deviation are computed, at least 2. Nothing is a spike before
            half of them have run.
        max_consecutive: Largest number of consecutive spikes, at least 1. One more stops the run, because a lasting
            change is no spike.
        every_n_steps: Steps between two saved states with ``rewind``, at least 1.

    Raises:
        ConfigurationError: For an argument out of range.
        ConflictError: With FSDP1 and DeepSpeed; for ``rewind`` also with sharded weights or several optimizers.
        DivergedError: During a fit, after too many consecutive spikes.
    """

    phase = Phase.GUARD
    traits = frozenset({Trait.LEAVES_TRACES, Trait.NEEDS_ALL_GRADIENTS, Trait.READS_SCALED_GRADIENTS})
    helps: ClassVar[dict[str, tuple[int, str]]] = {"safety": (7, "a single bad batch cannot make the run diverge")}

    def __init__(
        self,
        action: Literal["skip", "rewind"] = "skip",
        sigmas: float = 6.0,
        window: int = 128,
        max_consecutive: int = 10,
        every_n_steps: int = 100,
    ) -> None:
        super().__init__()
        check_number("SpikeGuard", "sigmas", sigmas, above=0)
        check_number("SpikeGuard", "window", window, least=2, whole=True)
        check_number("SpikeGuard", "max_consecutive", max_consecutive, least=1, whole=True)
        check_number("SpikeGuard", "every_n_steps", every_n_steps, least=1, whole=True)
        self.action = action
        self.sigmas = sigmas
        self.window = window
        self.max_consecutive = max_consecutive
        self.every_n_steps = every_n_steps
        self.spikes = 0
        self._consecutive = 0
        self._history: dict[str, deque[float]] = {}  # good values, by keys such as "0/loss" and "0/gradient norm"
        self._losses: list[Tensor] = []  # losses of the micro-batches since the last step
        self._restored_losses: list[Tensor] = []  # the same, from a checkpoint
        self._kept: dict[str, Any] = {}  # the last good state, its step, and the step of the next copy

    def check(self, trainer: Any, module: nn.Module) -> None:
        traits = traits_of(trainer.strategy)
        if traits.dtensors and self.action == "rewind":
            raise ConflictError(
                f"SpikeGuard: action='rewind' cannot be used with {traits.name}, which saves the states of callbacks "
                "on the first process only, where they would hold only its shards. Use action='skip' or strategy='ddp'"
            )

    def describe(self, module: nn.Module) -> Report:
        if self.action == "skip":
            action = "skips the step"
        else:
            action = "returns to the last good state"
        return Report(
            f"{action} at more than {self.sigmas:g} deviations above the mean of the last {self.window} steps"
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses = [loss.to(trainer.strategy.root_device) for loss in self._restored_losses]
        self._restored_losses = []
        if self.action == "rewind" and len(trainer.optimizers) != 1:
            raise ConflictError(
                f"SpikeGuard: action='rewind' supports one optimizer, but {type(pl_module).__name__} has "
                f"{len(trainer.optimizers)}. Use action='skip'"
            )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def change_gradients(self, gradients: dict[Tensor, Tensor], optimizer: Optimizer, module: Any) -> None:
        trainer = module.trainer
        index = next((i for i, known in enumerate(trainer.optimizers) if known is optimizer), 0)
        values = self._values(gradients, module, optimizer)
        spikes = [f"{name} {value:.4g}" for name, value in values.items() if self._is_spike(f"{index}/{name}", value)]
        if not spikes:
            self._consecutive = 0
            for name, value in values.items():
                if math.isfinite(value):
                    self._history_of(f"{index}/{name}").append(value)
            finite = all(map(math.isfinite, values.values()))
            if self.action == "rewind" and finite and trainer.global_step >= self._kept.get("next", 0):
                self._keep(trainer, module, optimizer)
            return
        self.spikes += 1
        self._consecutive += 1
        where = f"SpikeGuard: spike at step {trainer.global_step}: {' and '.join(spikes)}"
        if self._consecutive > self.max_consecutive:
            raise DivergedError(
                f"{where}, after {self.max_consecutive} consecutive skipped steps. The level has changed for good. "
                "Resume from an earlier checkpoint with a lower learning rate or, if the change is intended (other "
                "data, a ramp), with more sigmas"
            )
        optimizer.zero_grad()
        outcome = "the step is skipped"
        if self.action == "rewind" and "weights" in self._kept:
            self._go_back(module, optimizer)
            outcome = f"returned to the state of step {self._kept['step']}"
        rank_zero_warn(f"{where}; {outcome}")
        for logger in trainer.loggers:
            logger.log_metrics({"spikes": float(self.spikes)}, step=logged_step(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.spikes:
            rank_zero_info(f"SpikeGuard: {self.spikes} spikes in {trainer.global_step} steps")

    def state_dict(self) -> dict[str, Any]:
        history = {key: list(values) for key, values in self._history.items()}
        state: dict[str, object] = {
            "history": history,
            "spikes": self.spikes,
            "consecutive": self._consecutive,
            "kept": self._kept,
        }
        # Several processes would each need their own losses, but only the first process saves.
        if self._losses and not distributed.is_initialized():
            state["losses"] = torch.stack([loss.float() for loss in self._losses]).cpu()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._history = {key: deque(values, self.window) for key, values in state_dict["history"].items()}
        self.spikes = state_dict["spikes"]
        self._consecutive = state_dict["consecutive"]
        self._kept = state_dict["kept"] if self.action == "rewind" else {}
        self._restored_losses = list(state_dict.get("losses", ()))

    def _values(
        self, gradients: dict[Tensor, Tensor], module: LightningModule, optimizer: Optimizer
    ) -> dict[str, float]:
        """Return the loss and the gradient norm of the step, if they exist. They are the same on all processes."""
        trainer = module.trainer
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        found: dict[str, Tensor] = {}
        if self._losses:
            # Lightning has divided each loss by the number of micro-batches, and the scaler has scaled it.
            divisor = 1
            if module.automatic_optimization:
                divisor = trainer.accumulate_grad_batches
            found["loss"] = torch.stack([loss.float() for loss in self._losses]).mean() * (divisor / scale)
            self._losses = []
        norm = gradient_norm(gradients.values())
        if norm is not None:
            norm = norm.float()
            if unscales(optimizer):  # its gradients are still scaled
                norm = norm / scale
            found["gradient norm"] = norm.to(trainer.strategy.root_device)
        if not found:
            return {}
        values = torch.stack([value.to(trainer.strategy.root_device) for value in found.values()])
        if trainer.world_size > 1:
            values = trainer.strategy.reduce(values, reduce_op="mean")
        return dict(zip(found, values.tolist(), strict=True))

    def _history_of(self, key: str) -> deque[float]:
        return self._history.setdefault(key, deque(maxlen=self.window))

    def _is_spike(self, key: str, value: float) -> bool:
        history = self._history_of(key)
        return len(history) >= max(2, self.window // 2) and is_spike(value, history, self.sigmas)

    def _keep(self, trainer: Any, module: nn.Module, optimizer: Optimizer) -> None:
        """Copy the weights, whose loss has just been found good, and the states of their optimizer."""
        step = trainer.global_step
        self._kept = {"step": step, "next": step + self.every_n_steps}
        self._kept["weights"] = {name: _copy(tensor) for name, tensor in _changed_by_steps(module).items()}
        packed = optimizer.state_dict()
        self._kept["states"] = tree_map_only(Tensor, _copy, packed["state"])
        self._kept["counts"] = [_counts(optimizer, group) for group in packed["param_groups"]]

    def _go_back(self, module: nn.Module, optimizer: Optimizer) -> None:
        with torch.no_grad():
            for name, tensor in _changed_by_steps(module).items():
                if name in self._kept["weights"]:
                    tensor.copy_(self._kept["weights"][name])
        packed = optimizer.state_dict()
        counts = self._kept.get("counts") or [{}] * len(packed["param_groups"])
        groups = [{**now, **then} for now, then in zip(packed["param_groups"], counts, strict=True)]
        states = tree_map_only(Tensor, _copy, self._kept["states"])
        # Optimizers that exchange weights for evaluation, such as ScheduleFreeAdamW, leave the training mode here.
        training = getattr(optimizer, "training", False)
        packed |= {"state": states, "param_groups": groups}
        optimizer.load_state_dict(packed)
        restore_dtypes(optimizer, packed)
        if training:
            optimizer.train()  # type: ignore[attr-defined]


def _counts(optimizer: Optimizer, group: dict[str, object]) -> dict[str, object]:
    """Return the numbers of a group that steps change, such as step counts.

    These are the numbers that are no arguments of the optimizer. Arguments, such as the rate, belong to the schedule.
    """
    arguments = inspect.signature(type(optimizer).__init__).parameters
    known = {*arguments, "params", "param_names", "name"}
    if any(p.kind is p.VAR_KEYWORD for p in arguments.values()):  # any number may then be an argument
        return {}
    return {key: value for key, value in group.items() if key not in known and isinstance(value, int | float)}


def _changed_by_steps(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a step may change by name: parameters that require a gradient, and buffers."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return trained | dict(module.named_buffers())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
