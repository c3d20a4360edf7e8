"""What a run is measured by, step by step, and logged: the base of `RunMetrics` and of `ThroughputMeter`.

The clock runs from one logged step to the next, without validation; what lies on a device is read at those steps only.
"""

import time
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.distributed.gradient_norm import gradient_norm
from lit_efficient.distributed.ranks import readers
from lit_efficient.internals.lightning_loops import accumulates, logged_step, watch_fetching
from lit_efficient.internals.lightning_metrics import names_logged
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_optimizers import unscales
from lit_efficient.mechanisms.metering import Amount, gradients_of, measure, peak_memory


class RunFigures(Callback):
    """Logs learning rates, gradient norm, throughput, peak memory and time spent waiting, whenever the trainer logs."""

    leaves_traces = True

    def __init__(self) -> None:
        self.bar_figures: dict[str, float] = {}  # what a progress bar may show where it has room
        self._rates: dict[str, float] = {}
        self._norms: dict[int, Tensor] = {}  # by the optimizer's index
        self._noted: list[Tensor] | None = None  # norms of gradients freed in the backward pass, if to be logged
        self._held = Amount()  # of the batches since the last logged step
        self._unit = ""
        self._since = self._paused = self._asked = self._waited = 0.0  # seconds

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            watch_fetching(trainer, self._asks, self._got)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._norms, self._rates, self.bar_figures = {}, {}, {}
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "in_backward"):
                optimizer.in_backward.watchers.append(self._note)
        self._begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._noted = [] if self._logs(trainer) else None
        if self._logs(trainer) and not any(_is_rate_monitor(callback) for callback in trainer.callbacks):
            self._rates = rates_of(trainer.optimizers)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        if not self._logs(trainer) or traits_of(trainer.strategy).flattens:
            return
        freed = hasattr(optimizer, "in_backward")
        norm = gradient_norm((self._noted or ()) if freed else gradients_of(optimizer).values())
        if norm is None:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and unscales(optimizer):  # which it has not done yet
            norm = norm / scaler.get_scale()
        index = next((i for i, known in enumerate(trainer.optimizers) if known is optimizer), 0)
        self._norms[index] = norm

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._watches(trainer):
            return
        held, self._unit = measure(batch)
        self._held = self._held + held
        if self._logs(trainer) and not (pl_module.automatic_optimization and accumulates(trainer)):
            self._log(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._paused = time.monotonic()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._since += time.monotonic() - self._paused

    def _log(self, trainer: Any) -> None:
        several = len(trainer.optimizers) > 1
        values = {f"grad_norm/{i}" if several else "grad_norm": float(norm) for i, norm in self._norms.items()}
        count = float(self._held.real) * readers(trainer)
        seconds = max(time.monotonic() - self._since, 1e-9)  # after the reads above: that of finished work
        values = self._rates | values
        if count:
            values[f"{self._unit}_per_second"] = count / seconds
        values["data_wait"] = min(self._waited / seconds, 1.0)
        if peak := peak_memory(trainer.strategy.root_device):
            values["peak_memory_gib"] = peak / 2**30
        values |= self._more(trainer, seconds)
        taken = names_logged(trainer)
        values = {name: value for name, value in values.items() if name not in taken}
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=logged_step(trainer))
        rates = set(self._rates.values())
        self.bar_figures = {"lr": rates.pop()} if len(rates) == 1 else {}
        self.bar_figures |= {name: values[name] for name in ("grad_norm", "mfu") if name in values}
        self._norms = {}
        self._begin()

    def _note(self, parameter: Tensor) -> None:
        norm = gradient_norm([parameter.grad]) if self._noted is not None and parameter.grad is not None else None
        if norm is not None and self._noted is not None:
            self._noted.append(norm)

    def _begin(self) -> None:
        self._held, self._waited, self._since = Amount(), 0.0, time.monotonic()

    def _watches(self, trainer: Any) -> bool:
        return bool(trainer.loggers)

    def _logs(self, trainer: Any) -> bool:
        """Whether the step under way is one that the trainer logs: the same answer on all processes."""
        every = trainer.log_every_n_steps
        return bool(self._watches(trainer) and every) and (logged_step(trainer) + 1) % every == 0

    def _more(self, trainer: Any, seconds: float) -> dict[str, float]:
        """Further figures of the steps since the last logged one."""
        return {}

    def _asks(self) -> None:
        self._asked = time.monotonic()

    def _got(self) -> None:
        self._waited += time.monotonic() - self._asked


def rates_of(optimizers: list[Optimizer]) -> dict[str, float]:
    """The learning rate of each group of all optimizers: ``lr`` of a single one, else ``lr/NAME`` or ``lr/INDEX``."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names = [str(group.get("name") or "") for group in groups]
    keys = [name if name and names.count(name) == 1 else str(i) for i, name in enumerate(names)]
    rates = {f"lr/{key}": float(group["lr"]) for key, group in zip(keys, groups) if "lr" in group}
    return {"lr": next(iter(rates.values()))} if len(groups) == 1 and rates else rates


def _is_rate_monitor(callback: Any) -> bool:
    return any(base.__name__ == "LearningRateMonitor" for base in type(callback).__mro__)
