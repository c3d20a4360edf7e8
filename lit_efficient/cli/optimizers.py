"""``optimizer:`` and ``lr_scheduler:`` of a config, built when ``configure_optimizers`` is called and not before.

The stock command line builds the optimizer right after the module: before adapters exist, and over frozen parameters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
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
    """The optimization of a config.

    Args:
        optimizer: Class and arguments of the optimizer.
        scheduler: Class and arguments of the scheduler, if any.
        arrange: ``(module, optimizer, scheduler)`` -> what ``configure_optimizers`` returns.
    """

    optimizer: Spec
    scheduler: Spec | None
    arrange: Callable[..., Any]

    def check(self) -> Optimizer:
        """Build both on a temporary parameter, so that a wrong argument fails before data is touched.

        Returns:
            The optimizer. The caller asks it what it cannot be combined with.

        Raises:
            ConfigurationError: With the message of torch about the argument.
        """
        optimizer: Optimizer = _build("optimizer", self.optimizer, [nn.Parameter(torch.zeros(2, 2))])
        if self.scheduler:
            _monitored(_build("lr_scheduler", _with_horizon(self.scheduler, MANY), optimizer))
        return optimizer

    def build(self, module: LightningModule) -> object:
        """Build both over the trainable parameters of a module.

        Raises:
            ConfigurationError: If no parameter is trainable, or a scheduler needs the end of an endless run.
        """
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        parameters = [p for _, p in named]
        if not parameters:
            raise ConfigurationError(f"optimizer: no parameter of {type(module).__name__} trains (requires_grad)")
        optimizer: Optimizer = _build("optimizer", self.optimizer, named if self._needs_names() else parameters)
        count = sum(p.numel() for p in parameters)
        note = f"optimizer: {_name(self.optimizer)} over {len(parameters)} tensors, {count:,} parameters that train"
        scheduler: LRScheduler | None = None
        if self.scheduler:
            unset = _unset_horizons(self.scheduler)
            steps = _total_steps(module, unset[0]) if unset else 0
            spec = _with_horizon(self.scheduler, steps)
            _check_length(spec, module)
            scheduler = _build("lr_scheduler", spec, optimizer)
            known = [f"{key}={spec['init_args'][key]}" for key in unset]
            note += f"; lr_scheduler: {', '.join([_name(spec), *known])}"
        rank_zero_info(note)
        return self.arrange(module, optimizer, scheduler)

    def _needs_names(self) -> bool:
        """Return whether an argument that is set matches names of parameters. Not all packages accept names."""
        module, _, name = self.optimizer["class_path"].rpartition(".")
        needed = getattr(getattr(import_module(module), name), "needs_names", ())
        return any(self.optimizer.get("init_args", {}).get(argument) for argument in needed)


def attach(module: LightningModule, plan: OptimizerPlan) -> None:
    """Let ``module.configure_optimizers`` build the plan. Only this instance is changed."""
    module.__dict__["_lit_efficient_optimizers"] = plan
    module.configure_optimizers = partial(_configure_optimizers, module)  # type: ignore[method-assign]


def _configure_optimizers(module: LightningModule) -> Any:
    plan: OptimizerPlan = module.__dict__["_lit_efficient_optimizers"]
    return plan.build(module)


def arrange(module: LightningModule, optimizer: Optimizer, scheduler: LRScheduler | None) -> Any:
    """Return optimizer and scheduler in Lightning's form: the scheduler steps after every optimizer step.

    ``ReduceLROnPlateau`` steps after each validation, with the metric that it monitors.
    """
    if scheduler is None:
        return optimizer
    monitor = _monitored(scheduler)
    if monitor:
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": monitor}}
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _monitored(scheduler: LRScheduler) -> str | None:
    """Return the name of the metric that a scheduler monitors; ``None`` for one that depends on the step alone."""
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
    return str(spec["class_path"]).rpartition(".")[2]


def _build(key: str, spec: Spec, first: object) -> Any:
    try:
        return instantiate_class((first,), spec)
    except (AssertionError, TypeError, ValueError) as error:
        arguments = spec.get("init_args", {})
        if arguments.get("lr", 0.0) is None:  # CAME compares it with a number
            raise ConfigurationError(f"{key}: {_name(spec)} has no default learning rate: set {key}.lr") from error
        # torch's messages have the value, and not always the name of the argument. Some assertions have no message.
        message = str(error)
        given = [f"{name}={value!r}" for name, value in arguments.items() if not message or f": {value}" in message]
        named = f" ({', '.join(given)})" if given else ""
        raise ConfigurationError(f"{key}: {_name(spec)}: {message or 'refuses its arguments'}{named}") from error


def _unset_horizons(scheduler: Spec) -> list[str]:
    """Return the arguments that mean the run's length and were left unset."""
    arguments = scheduler.get("init_args", {})
    if arguments.get("epochs") and arguments.get("steps_per_epoch"):  # the other way to set OneCycleLR
        return []
    return [name for name in HORIZONS if name in arguments and arguments[name] is None]


def _with_horizon(scheduler: Spec, steps: int) -> Spec:
    arguments = scheduler.get("init_args", {})
    return {**scheduler, "init_args": {**arguments, **dict.fromkeys(_unset_horizons(scheduler), steps)}}


def _check_length(scheduler: Spec, module: LightningModule) -> None:
    """Refuse a OneCycleLR that ends before the run: it raises an error at its last step."""
    total = scheduler.get("init_args", {}).get("total_steps")
    most = module.trainer.max_steps
    if isinstance(total, int) and _name(scheduler) == "OneCycleLR" and 0 < total < most:
        raise refusal("OneCycleLR", "total_steps", f"at least the run's steps, {most}, or null for these", total)


def _total_steps(module: LightningModule, name: str) -> int:
    steps = module.trainer.estimated_stepping_batches
    if math.isinf(steps) or steps <= 0:
        raise ConfigurationError(
            f"lr_scheduler: {name} is unset and the run has no end: set it, or trainer.max_steps or trainer.max_epochs"
        )
    return int(steps)
