"""Figures of a run that are logged with its steps: the base of `RunMetrics` and of `ThroughputMeter`.

Times are measured from one logged step to the next, without validation. Values on a device are read only at logged
steps, so that other steps do not wait for the device.
"""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.application.gradients import gradients_of
from lit_efficient.distributed.gradient_norm import gradient_norm
from lit_efficient.errors import ChecksTypes, diagnostic
from lit_efficient.internals.lightning_loops import accumulates, logged_step, watch_fetching
from lit_efficient.internals.lightning_metrics import names_logged
from lit_efficient.internals.lightning_strategies import readers, traits_of
from lit_efficient.internals.lightning_trainer import TrainerOnly
from lit_efficient.internals.torch_optimizers import unscales
from lit_efficient.mechanisms.metering import Amount, measure, peak_memory
from lit_efficient.traits import Trait


class RunFigures(Callback, ChecksTypes, TrainerOnly):
    """Log learning rates, gradient norm, throughput, peak memory and waiting time at the trainer's logging interval."""

    traits = frozenset({Trait.LEAVES_TRACES})

    def __init__(self) -> None:
        self.bar_figures: dict[str, float] = {}  # for a progress bar, if it has room
        self._rates: dict[str, float] = {}
        self._norms: dict[int, Tensor] = {}  # gradient norm by the optimizer's index
        # Norms of gradients that are freed during the backward pass, or None in steps that are not logged.
        self._freed_norms: list[Tensor] | None = None
        self._amount = Amount()  # content of the batches since the last logged step
        self._unit = ""
        # Times in seconds: of the last logged step, of a validation's begin, of a batch's request, and spent waiting.
        self._since = 0.0
        self._paused = 0.0
        self._requested = 0.0
        self._waited = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            watch_fetching(trainer, self._on_request, self._on_batch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._norms = {}
        self._rates = {}
        self.bar_figures = {}
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "in_backward"):
                optimizer.in_backward.watchers.append(self._note_norm)
        self._begin()

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._freed_norms = None
        if self._logs(trainer):
            self._freed_norms = []
            if not any(_is_rate_monitor(callback) for callback in trainer.callbacks):
                with diagnostic(type(self).__name__, "the learning rates"):
                    self._rates = rates_of(trainer.optimizers)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._logs(trainer) and not traits_of(trainer.strategy).flattens:
            with diagnostic(type(self).__name__, "the gradients"):
                self._read_norm(trainer, optimizer)

    def _read_norm(self, trainer: Trainer, optimizer: Optimizer) -> None:
        if hasattr(optimizer, "in_backward"):
            norm = gradient_norm(self._freed_norms or ())
        else:
            norm = gradient_norm(gradients_of(optimizer).values())
        if norm is None:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and unscales(optimizer):  # the optimizer will unscale the gradients in its step
            norm = norm / scaler.get_scale()
        index = next((i for i, known in enumerate(trainer.optimizers) if known is optimizer), 0)
        self._norms[index] = norm

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if not self._watches(trainer):
            return
        with diagnostic(type(self).__name__, f"the batch, a {type(batch).__name__},"):
            amount, self._unit = measure(batch)
            self._amount = self._amount + amount
        if self._logs(trainer) and not (pl_module.automatic_optimization and accumulates(trainer)):
            self._log(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since += time.monotonic() - self._paused

    def _log(self, trainer: Trainer) -> None:
        values = dict(self._rates)
        with diagnostic(type(self).__name__, "the figures of the run"):
            values |= self._measured(trainer)
        logged_by_module = names_logged(trainer)
        values = {name: value for name, value in values.items() if name not in logged_by_module}
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=logged_step(trainer))
        self.bar_figures = {name: values[name] for name in ("grad_norm", "mfu") if name in values}
        rates = {value for name, value in self._rates.items() if name.startswith("lr")}
        if len(rates) == 1:
            self.bar_figures = {"lr": rates.pop(), **self.bar_figures}
        self._norms = {}
        self._begin()

    def _measured(self, trainer: Trainer) -> dict[str, float]:
        """Return norms, throughput, waiting time and memory since the last logged step."""
        values = {}
        for index, norm in self._norms.items():
            name = f"grad_norm/{index}" if len(trainer.optimizers) > 1 else "grad_norm"
            values[name] = float(norm)
        count = float(self._amount.real) * readers(trainer)
        # The clock is read after the values, because reading them waits for the device to finish its work.
        seconds = max(time.monotonic() - self._since, 1e-9)
        if count:
            values[f"{self._unit}_per_second"] = count / seconds
        values["data_wait"] = min(self._waited / seconds, 1.0)
        peak = peak_memory(trainer.strategy.root_device)
        if peak:
            values["peak_memory_gib"] = peak / 2**30
        return values | self._more(trainer, seconds)

    def _note_norm(self, parameter: Tensor) -> None:
        """Keep the norm of a gradient that is about to be freed."""
        if self._freed_norms is None or parameter.grad is None:
            return
        norm = gradient_norm([parameter.grad])
        if norm is not None:
            self._freed_norms.append(norm)

    def _begin(self) -> None:
        self._amount = Amount()
        self._waited = 0.0
        self._since = time.monotonic()

    def _watches(self, trainer: Trainer) -> bool:
        return bool(trainer.loggers)

    def _logs(self, trainer: Any) -> bool:
        """Return whether the trainer logs the present step. The answer is the same on all processes."""
        every = trainer.log_every_n_steps
        return bool(self._watches(trainer) and every) and (logged_step(trainer) + 1) % every == 0

    def _more(self, trainer: Trainer, seconds: float) -> dict[str, float]:
        """Return further figures of the ``seconds`` since the last logged step."""
        return {}

    def _on_request(self) -> None:
        self._requested = time.monotonic()

    def _on_batch(self) -> None:
        self._waited += time.monotonic() - self._requested


def rates_of(optimizers: list[Optimizer]) -> dict[str, float]:
    """Return the learning rates of all parameter groups, by the name under which they are logged.

    The name is ``lr`` for a single group, else ``lr/NAME`` for a group with a unique name, else ``lr/INDEX``.
    Optimizers that estimate their step size (Prodigy, D-Adaptation) multiply the rate by the estimate ``d``, which is
    logged, too.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names = [str(group.get("name") or "") for group in groups]
    rates = {}
    for index, (group, name) in enumerate(zip(groups, names)):
        if "lr" in group:
            key = name if name and names.count(name) == 1 else str(index)
            rates[f"lr/{key}"] = float(group["lr"])
    if len(groups) == 1 and rates:
        rates = {"lr": next(iter(rates.values()))}
    estimates = [float(one.param_groups[0]["d"]) for one in optimizers if "d" in one.param_groups[0]]
    for index, estimate in enumerate(estimates):
        rates["d" if len(estimates) == 1 else f"d/{index}"] = estimate
    return rates


def _is_rate_monitor(callback: object) -> bool:
    return any(base.__name__ == "LearningRateMonitor" for base in type(callback).__mro__)
