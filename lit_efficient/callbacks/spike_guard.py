"""A spike of the loss or the gradient norm leaves out the step, or takes the run back to its last good state.

    spike:  x > mean + sigmas * std     of the last ``window`` good values, x the loss or the gradient norm of a step

Saves: runs that one bad batch would throw off, and the days until somebody goes back to a checkpoint
Costs: a norm over the gradients and one wait for the device an optimizer step; to go back, a copy of what trains and of
    the optimizer's states in CPU memory and in checkpoints
Source: OLMo et al. (2024), https://arxiv.org/abs/2501.00656 (its optimizers that skip steps); Chowdhery et al. (2022),
    https://arxiv.org/abs/2204.02311, section 5.1 (back to an earlier state, past the bad batches)
"""

import inspect
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from lit_efficient.application.gradients import GradientHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.gradient_norm import gradient_norm
from lit_efficient.errors import ConflictError, DivergedError, check_choice, check_number
from lit_efficient.internals.lightning_loops import logged_step
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_optimizers import unscales
from lit_efficient.internals.torch_trees import tree_map_only
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_FLAT = 1e-3  # of the mean: how far values spread at least, or rounding would be a spike where all are alike


def is_spike(value: float, history: Sequence[float], sigmas: float = 6.0) -> bool:
    """Whether ``value`` is more than ``sigmas`` standard deviations above the mean of ``history``, two values or more.

    What is not finite is none: it is `NonFiniteGuard`'s affair.

    Example:
        >>> is_spike(2.0, [1.0, 1.1, 0.9, 1.0]), is_spike(1.2, [1.0, 1.1, 0.9, 1.0])
        (True, False)
    """
    if len(history) < 2 or not math.isfinite(value):
        return False
    mean = math.fsum(history) / len(history)
    spread = math.sqrt(math.fsum((one - mean) ** 2 for one in history) / (len(history) - 1))
    return value > mean + sigmas * max(spread, _FLAT * abs(mean))


class SpikeGuard(GradientHooks, Technique):
    """Leave out each step whose loss or gradient norm is far above the last ones, before it reaches the weights.

    Both are those of the whole step: micro-batches' losses and processes' are averaged, gradients are complete and not
    yet clipped. A step that is left out counts as a step, and schedules go on. With several optimizers each has its own
    history. NaN and Inf are left to `NonFiniteGuard`. What a forward pass changes, as batch norm's running statistics,
    has seen the batch. Spikes are warned of, counted, logged as ``spikes``, and summed up at the run's end. With
    ``rewind`` weights, buffers and optimizer states go back to the last state that was good ``every_n_steps`` or fewer
    steps ago, and training goes on with the next batch; averages (`EMA`) do not go back.

    Args:
        action: ``skip`` leaves out the step, ``rewind`` goes back as well.
        sigmas: Standard deviations above the mean from which on it is a spike, above 0.
        window: Good steps that mean and deviation are taken of, 2 or more. Until half of them are there nothing is one.
        max_consecutive: So many spikes in a row are left out before it stops, 1 or more: what lasts is no spike.
        every_n_steps: With ``rewind``, steps from one state that is kept to the next, 1 or more.

    Raises:
        ConfigurationError: For an argument out of range.
        ConflictError: With FSDP1 and DeepSpeed; ``rewind`` with sharded weights or several optimizers.
        DivergedError: In a fit, after too many spikes in a row.
    """

    phase = Phase.GUARD
    traits = frozenset({Trait.LEAVES_TRACES, Trait.NEEDS_ALL_GRADIENTS, Trait.READS_SCALED_GRADIENTS})
    helps: ClassVar[dict[str, tuple[int, str]]] = {"safety": (7, "no outlier of a batch throws the run off")}

    def __init__(
        self,
        action: Literal["skip", "rewind"] = "skip",
        sigmas: float = 6.0,
        window: int = 128,
        max_consecutive: int = 10,
        every_n_steps: int = 100,
    ) -> None:
        super().__init__()
        check_choice("SpikeGuard", "action", action, ("skip", "rewind"))
        check_number("SpikeGuard", "sigmas", sigmas, above=0)
        check_number("SpikeGuard", "window", window, least=2, whole=True)
        check_number("SpikeGuard", "max_consecutive", max_consecutive, least=1, whole=True)
        check_number("SpikeGuard", "every_n_steps", every_n_steps, least=1, whole=True)
        self.action, self.sigmas, self.window = action, sigmas, window
        self.max_consecutive, self.every_n_steps = max_consecutive, every_n_steps
        self.spikes = 0
        self._consecutive = 0
        self._history: dict[str, deque[float]] = {}  # of "loss" and "gradient norm", by the optimizer's index
        self._losses: list[Tensor] = []  # of the micro-batches since the last step
        self._read: list[Tensor] = []  # of those before a checkpoint
        self._kept: dict[str, Any] = {}  # the last good state, and the step that it was kept at

    def check(self, trainer: Any, module: Any) -> None:
        traits = traits_of(trainer.strategy)
        if traits.dtensors and self.action == "rewind":
            raise ConflictError(
                f"SpikeGuard: {traits.name} saves what callbacks keep of the first process alone, which has shards to "
                "go back to, not weights: use action='skip', or strategy='ddp'"
            )

    def describe(self, module: nn.Module) -> Report:
        does = "leaves out the step" if self.action == "skip" else "goes back to the last good state"
        return Report(f"{does} at more than {self.sigmas:g} deviations above the last {self.window}")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._losses, self._read = [loss.to(trainer.strategy.root_device) for loss in self._read], []
        if self.action == "rewind" and len(trainer.optimizers) != 1:
            raise ConflictError(
                f"SpikeGuard: action='rewind' takes back the step of one optimizer, but {type(pl_module).__name__} has "
                f"{len(trainer.optimizers)}: use action='skip'"
            )

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
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
        where = f"SpikeGuard: at step {trainer.global_step} a spike: {' and '.join(spikes)}"
        if self._consecutive > self.max_consecutive:
            raise DivergedError(
                f"{where}, after {self.max_consecutive} in a row that were left out: this is another level, and no "
                "spike. Go on from an earlier checkpoint at a lower rate, or, if it is as it should be (other data, a "
                "ramp), with more sigmas"
            )
        optimizer.zero_grad()
        back = self.action == "rewind" and "weights" in self._kept
        if back:
            self._go_back(module, optimizer)
        done = f"back to the state of step {self._kept['step']}" if back else "the step is left out"
        rank_zero_warn(f"{where}; {done}")
        for logger in trainer.loggers:
            logger.log_metrics({"spikes": float(self.spikes)}, step=logged_step(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.spikes:
            rank_zero_info(f"SpikeGuard: {self.spikes} spikes in {trainer.global_step} steps")

    def state_dict(self) -> dict[str, Any]:
        history = {key: list(values) for key, values in self._history.items()}
        state: dict[str, Any] = {
            "history": history,
            "spikes": self.spikes,
            "consecutive": self._consecutive,
            "kept": self._kept,
        }
        if self._losses and not distributed.is_initialized():  # those of other processes nobody knows here
            state["losses"] = torch.stack([loss.float() for loss in self._losses]).cpu()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._history = {key: deque(values, self.window) for key, values in state_dict["history"].items()}
        self.spikes, self._consecutive = state_dict["spikes"], state_dict["consecutive"]
        self._kept = state_dict["kept"] if self.action == "rewind" else {}
        self._read = list(state_dict.get("losses", ()))

    def _values(self, gradients: dict[Tensor, Tensor], module: Any, optimizer: Optimizer) -> dict[str, float]:
        """Loss and gradient norm of the step, whichever are known; the same on all processes."""
        trainer = module.trainer
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        found: dict[str, Tensor] = {}
        if self._losses:
            share = trainer.accumulate_grad_batches if module.automatic_optimization else 1
            found["loss"] = torch.stack([loss.float() for loss in self._losses]).mean() * (share / scale)
            self._losses = []
        norm = gradient_norm(gradients.values())
        if norm is not None:
            norm = norm.float() / (scale if unscales(optimizer) else 1.0)
            found["gradient norm"] = norm.to(trainer.strategy.root_device)
        if not found:
            return {}
        values = torch.stack([value.to(trainer.strategy.root_device) for value in found.values()])
        values = trainer.strategy.reduce(values, reduce_op="mean") if trainer.world_size > 1 else values
        return dict(zip(found, values.tolist(), strict=True))

    def _history_of(self, key: str) -> deque[float]:
        return self._history.setdefault(key, deque(maxlen=self.window))

    def _is_spike(self, key: str, value: float) -> bool:
        history = self._history_of(key)
        return len(history) >= max(2, self.window // 2) and is_spike(value, history, self.sigmas)

    def _keep(self, trainer: Any, module: nn.Module, optimizer: Optimizer) -> None:
        """Copy weights whose loss has just proved good, and the states of their optimizer."""
        step = trainer.global_step
        self._kept = {"step": step, "next": step + self.every_n_steps}
        self._kept["weights"] = {name: _copy(tensor) for name, tensor in _that_train(module).items()}
        packed = optimizer.state_dict()
        self._kept["states"] = tree_map_only(Tensor, _copy, packed["state"])
        self._kept["counts"] = [_counts(optimizer, group) for group in packed["param_groups"]]

    def _go_back(self, module: nn.Module, optimizer: Optimizer) -> None:
        with torch.no_grad():
            for name, tensor in _that_train(module).items():
                if name in self._kept["weights"]:
                    tensor.copy_(self._kept["weights"][name])
        packed = optimizer.state_dict()
        counts = self._kept.get("counts") or [{}] * len(packed["param_groups"])
        groups = [{**now, **then} for now, then in zip(packed["param_groups"], counts, strict=True)]
        states = tree_map_only(Tensor, _copy, self._kept["states"])
        training = getattr(optimizer, "training", False)  # of one that switches weights, as ScheduleFreeAdamW
        optimizer.load_state_dict({**packed, "state": states, "param_groups": groups})
        if training:
            optimizer.train()  # type: ignore[attr-defined]


def _counts(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """What steps change in a group: numbers that are no argument of the optimizer's; rates stay the schedule's."""
    arguments = inspect.signature(type(optimizer).__init__).parameters
    known = {*arguments, "params", "param_names", "name"}
    if any(p.kind is p.VAR_KEYWORD for p in arguments.values()):  # they may be any
        return {}
    return {key: value for key, value in group.items() if key not in known and isinstance(value, int | float)}


def _that_train(module: nn.Module) -> dict[str, Tensor]:
    """What a step may change: parameters with a gradient, and buffers."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return trained | dict(module.named_buffers())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
