"""What one asks of every run, in its loggers: rates, gradient norm, throughput, memory, time spent waiting for data.

    lr                  each group's: lr/NAME, or lr/INDEX where groups have no names and there are several
    grad_norm           2-norm of all gradients, unscaled, before clipping; grad_norm/INDEX of several optimizers
    tokens_per_second   of all processes, each taken to have as many as this one; padding is not counted, nor time in
                        validation; samples_per_second of what has no input_ids
    data_wait           share of that time in which the loop waited for its next batch
    peak_memory_gib     most that tensors took on the device so far; on a CPU most that the process took

Costs: one fused norm over the gradients and one wait for the device a logged step; none at those between.
"""

import time
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.internals.lightning_loops import accumulates, logged_step, watch_fetching
from lit_efficient.internals.lightning_metrics import names_logged
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_optimizers import unscales
from lit_efficient.mechanisms.metering import count_real, gradient_norm, peak_memory
from lit_efficient.optimizers.host_states import gradients_of
from lit_efficient.optimizers.in_backward import InBackward


class RunMetrics(Callback):
    """Logs learning rates, gradient norm, throughput, peak memory and time spent waiting, whenever the trainer logs.

    Names that the module logs itself stay the module's, and rates are left to a ``LearningRateMonitor``. Strategies
    that join parameters (FSDP1, DeepSpeed) have no gradient norm. The command line adds it to every fit.
    """

    leaves_traces = True

    def __init__(self) -> None:
        self.bar_figures: dict[str, float] = {}  # what a progress bar may show where it has room
        self._rates: dict[str, float] = {}
        self._norms: dict[int, Tensor] = {}  # by the optimizer's index
        self._noted: list[Tensor] | None = (
            None  # norms of gradients that are freed in the backward pass, if to be logged
        )
        self._counted: int | Tensor = 0  # since the last logged step
        self._unit = ""
        self._since = self._paused = self._asked = self._waited = 0.0  # seconds

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            watch_fetching(trainer, self._asks, self._got)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._norms, self._rates, self.bar_figures = {}, {}, {}
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, InBackward):
                optimizer.in_backward.watchers.append(self._note)
        self._begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the rates that the step is made with."""
        self._noted = [] if _logs(trainer) else None
        if _logs(trainer) and not any(_is_rate_monitor(callback) for callback in trainer.callbacks):
            self._rates = rates_of(trainer.optimizers)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        if not _logs(trainer) or traits_of(trainer.strategy).flattens:
            return
        freed = isinstance(optimizer, InBackward)
        norm = gradient_norm((self._noted or ()) if freed else gradients_of(optimizer).values())
        if norm is None:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and unscales(optimizer):  # which it has not done yet
            norm = norm / scaler.get_scale()
        index = next((i for i, known in enumerate(trainer.optimizers) if known is optimizer), 0)
        self._norms[index] = norm

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.loggers:
            return
        count, self._unit = count_real(batch)
        self._counted = self._counted + count
        if _logs(trainer) and not (pl_module.automatic_optimization and accumulates(trainer)):
            self._log(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._paused = time.monotonic()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._since += time.monotonic() - self._paused

    def _log(self, trainer: Any) -> None:
        several = len(trainer.optimizers) > 1
        values = {f"grad_norm/{i}" if several else "grad_norm": float(norm) for i, norm in self._norms.items()}
        count = float(self._counted) * trainer.world_size
        seconds = max(time.monotonic() - self._since, 1e-9)  # after the reads above: that of finished work
        values = self._rates | values
        if count:
            values[f"{self._unit}_per_second"] = count / seconds
        values["data_wait"] = min(self._waited / seconds, 1.0)
        if peak := peak_memory(trainer.strategy.root_device):
            values["peak_memory_gib"] = peak / 2**30
        taken = names_logged(trainer)
        values = {name: value for name, value in values.items() if name not in taken}
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=logged_step(trainer))
        rates = set(self._rates.values())
        self.bar_figures = {"lr": rates.pop()} if len(rates) == 1 else {}
        self.bar_figures |= {name: values[name] for name in ("grad_norm",) if name in values}
        self._norms = {}
        self._begin()

    def _note(self, parameter: Tensor) -> None:
        norm = gradient_norm([parameter.grad]) if self._noted is not None and parameter.grad is not None else None
        if norm is not None and self._noted is not None:
            self._noted.append(norm)

    def _begin(self) -> None:
        self._counted, self._waited, self._since = 0, 0.0, time.monotonic()

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


def _logs(trainer: Any) -> bool:
    """Whether the step under way is one that the trainer logs: the same answer on all processes."""
    every = trainer.log_every_n_steps
    return bool(trainer.loggers and every) and (logged_step(trainer) + 1) % every == 0


def _is_rate_monitor(callback: Any) -> bool:
    return any(base.__name__ == "LearningRateMonitor" for base in type(callback).__mro__)
