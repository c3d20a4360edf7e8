"""``optimizer:`` and ``lr_scheduler:`` of a config, built when ``configure_optimizers`` is called and not before.

The stock command line builds the optimizer right after the module: before adapters exist, over frozen parameters too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_efficient.cli.parsing import HORIZONS
from lit_efficient.errors import ConfigurationError, refusal

MANY = 10**9  # steps of a run whose length is not known yet: no warm-up is longer
Spec = dict[str, Any]  # {"class_path": ..., "init_args": {...}}


@dataclass
class OptimizerPlan:
    """What the config says about optimization."""

    optimizer: Spec  # class and arguments of the optimizer
    scheduler: Spec | None  # class and arguments of the scheduler, if any
    arrange: Callable[..., Any]  # ``(module, optimizer, scheduler)`` -> what ``configure_optimizers`` returns

    def check(self) -> Optimizer:
        """Build both on a throwaway parameter, so that a wrong argument fails before data is touched.

        Returns:
            The optimizer, to be asked what it cannot be combined with.

        Raises:
            ConfigurationError: With what torch says about the argument.
        """
        optimizer: Optimizer = _build("optimizer", self.optimizer, [nn.Parameter(torch.zeros(2, 2))])
        if self.scheduler:
            _monitored(_build("lr_scheduler", _with_horizon(self.scheduler, MANY), optimizer))
        return optimizer

    def build(self, module: LightningModule) -> Any:
        """Build both over the parameters that train.

        Raises:
            ConfigurationError: If nothing trains, or a scheduler needs the end of an endless run.
        """
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise ConfigurationError(f"optimizer: no parameter of {type(module).__name__} trains (requires_grad)")
        optimizer: Optimizer = _build("optimizer", self.optimizer, parameters)
        scheduler: LRScheduler | None = None
        filled = None
        if self.scheduler:
            open_ended = _open_horizons(self.scheduler)
            steps = _total_steps(module, open_ended[0]) if open_ended else 0
            filled = _with_horizon(self.scheduler, steps)
            total = filled.get("init_args", {}).get("total_steps")
            if isinstance(total, int) and _name(filled) == "OneCycleLR" and 0 < total < module.trainer.max_steps:
                allowed = f"at least the run's steps, {module.trainer.max_steps}, or null for these"
                raise refusal("OneCycleLR", "total_steps", allowed, total)
            scheduler = _build("lr_scheduler", filled, optimizer)
        rank_zero_info(self._note(parameters, filled))
        return self.arrange(module, optimizer, scheduler)

    def _note(self, parameters: list[nn.Parameter], scheduler: Spec | None) -> str:
        count = sum(p.numel() for p in parameters)
        note = f"optimizer: {_name(self.optimizer)} over {len(parameters)} tensors, {count:,} parameters that train"
        if scheduler is None or self.scheduler is None:
            return note
        known = [f"{key}={scheduler['init_args'][key]}" for key in _open_horizons(self.scheduler)]
        return f"{note}; lr_scheduler: {', '.join([_name(scheduler), *known])}"


def attach(module: LightningModule, plan: OptimizerPlan) -> None:
    """Let ``module.configure_optimizers`` build what the plan says; only this instance is changed."""
    module.__dict__["_lit_efficient_optimizers"] = plan
    module.configure_optimizers = MethodType(_configure_optimizers, module)  # type: ignore[method-assign]


def _configure_optimizers(module: LightningModule) -> Any:
    plan: OptimizerPlan = module.__dict__["_lit_efficient_optimizers"]
    return plan.build(module)


def arrange(module: LightningModule, optimizer: Optimizer, scheduler: LRScheduler | None) -> Any:
    """Return optimizer and scheduler as Lightning wants them: the scheduler steps after every optimizer step.

    ``ReduceLROnPlateau`` steps when Lightning has the metric that it monitors, after each validation.
    """
    if scheduler is None:
        return optimizer
    if monitor := _monitored(scheduler):
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": monitor}}
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _monitored(scheduler: LRScheduler) -> str | None:
    """Name of the metric that the scheduler follows; ``None`` for one that follows the step."""
    if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return None
    monitor: str | None = getattr(scheduler, "monitor", None)
    if monitor is None:
        raise ConfigurationError(
            "lr_scheduler: torch's ReduceLROnPlateau does not know what to monitor; write "
            "`class_path: ReduceLROnPlateau` with `monitor: val/loss` in its init_args"
        )
    return monitor


def _name(spec: Spec) -> str:
    return str(spec["class_path"]).rsplit(".", 1)[-1]


def _build(key: str, spec: Spec, first: Any) -> Any:
    try:
        return instantiate_class((first,), spec)
    except (TypeError, ValueError) as error:
        given = [f"{name}={value!r}" for name, value in spec.get("init_args", {}).items() if f": {value}" in str(error)]
        raise ConfigurationError(f"{key}: {_name(spec)}: {error} ({', '.join(given)})".replace(" ()", "")) from error


def _open_horizons(scheduler: Spec) -> list[str]:
    """Names of the arguments that mean the run's length and were left unset."""
    arguments = scheduler.get("init_args", {})
    if arguments.get("epochs") and arguments.get("steps_per_epoch"):  # the other way to tell OneCycleLR
        return []
    return [name for name in HORIZONS if name in arguments and arguments[name] is None]


def _with_horizon(scheduler: Spec, steps: int) -> Spec:
    arguments = scheduler.get("init_args", {})
    return {**scheduler, "init_args": {**arguments, **dict.fromkeys(_open_horizons(scheduler), steps)}}


def _total_steps(module: LightningModule, name: str) -> int:
    steps = module.trainer.estimated_stepping_batches
    if math.isinf(steps) or steps <= 0:
        raise ConfigurationError(
            f"lr_scheduler: {name} is unset and the run has no end: set it, or trainer.max_steps or trainer.max_epochs"
        )
    return int(steps)
