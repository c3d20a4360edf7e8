"""Progress bar over the whole run: loss, learning rate, tokens (or samples) per second, memory and remaining time.

    rate = tokens of all processes since the last refresh / seconds since then, without validation

Costs: one wait for the device per refresh, which reads the metrics; none at other steps.
"""

import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from torch import Tensor

from lit_efficient.errors import ChecksTypes, check_number, diagnostic
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.internals.lightning_strategies import readers
from lit_efficient.internals.lightning_trainer import TrainerOnly
from lit_efficient.mechanisms.metering import count_batch, short_number

_SECONDS_PER_LINE = 60.0  # if the end of the run is unknown, and within a validation
_BAR = 60  # characters of a bar without its figures


class ThroughputBar(TQDMProgressBar, ChecksTypes, TrainerOnly):
    """Show one bar for all epochs of ``fit``, or print a few plain lines if the output is no terminal.

    The bar counts steps if ``max_steps`` ends the run, else batches until the end of the last epoch.

    Args:
        refresh_rate: Number of batches between two refreshes of the bar, at least 1.
        lines: Number of lines that are printed over the whole run if the output is no terminal, at least 1. Each
            validation prints one more, and one a minute while it goes on.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    def __init__(self, refresh_rate: int = 10, lines: int = 20) -> None:
        check_number("ThroughputBar", "refresh_rate", refresh_rate, least=1, whole=True)
        check_number("ThroughputBar", "lines", lines, least=1, whole=True)
        super().__init__(refresh_rate=refresh_rate)
        self.lines = lines
        self._interactive = True
        # Position in steps or batches: at the start of this fit, now, and at the end of the run.
        self._start = 0
        self._position = 0
        self._total: int | None = None
        # Times in seconds: start of the fit, last refresh, begin of a validation, last printed line.
        self._started = 0.0
        self._since = 0.0
        self._paused = 0.0
        self._last_line = 0.0
        self._counted = 0  # tokens or samples of all processes since the last refresh
        self._unit = "tokens"
        self._rate: float | None = None
        self._loss: Any = None
        self._printed: dict[str, object] = {}  # latest printed value of each metric

    @property
    def is_disabled(self) -> bool:
        """Whether no bar is shown: on all processes but the first, and if the output is no terminal."""
        return super().is_disabled or not self._interactive

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        notebook = "ipykernel" in sys.modules  # notebooks display bars, too
        self._interactive = notebook or bool(sys.stdout and sys.stdout.isatty())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar at the present position, which is not 0 after a resume."""
        super().on_train_start(trainer, pl_module)
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        self._start, self._total = run_position(trainer, done)
        self._position = self._start
        bar = self.train_progress_bar
        bar.total = self._total
        bar.n = self._start
        bar.initial = self._start
        now = time.monotonic()
        self._started = now
        self._since = now
        self._last_line = now
        self._counted = 0
        self._rate = None

    def on_train_epoch_start(self, trainer: Trainer, *_: object) -> None:
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        with diagnostic("ThroughputBar", f"the batch, a {type(batch).__name__},"):
            count, self._unit = count_batch(batch)
            self._counted += count * readers(trainer)
        before = self._position
        self._position, _ = run_position(trainer, batch_idx + 1)
        if isinstance(outputs, Mapping):
            self._loss = outputs.get("loss")
        else:
            self._loss = outputs
        if self.is_enabled and self._due(before, batch_idx + 1):
            self._refresh(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.is_disabled:
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = time.monotonic()
        super().on_validation_start(trainer, pl_module)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        super().on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)
        now = time.monotonic()
        if self.is_enabled and not self._interactive and now - max(self._paused, self._last_line) >= _SECONDS_PER_LINE:
            self._last_line = now
            loader = ""
            if len(trainer.num_val_batches) > 1:
                loader = f" of loader {dataloader_idx}"
            self.print(f"validation: batch {batch_idx + 1}/{trainer.num_val_batches[dataloader_idx]}{loader}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self.is_enabled and not self._interactive and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._print_line(trainer, pl_module, validated=True)
        self._since += time.monotonic() - self._paused

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return what the bar shows, as text by name, in the order of its importance.

        These are the loss, the tokens or samples per second, the learning rate of the first parameter group, on a GPU
        the peak memory that tensors took in GiB, and all metrics that were logged with ``prog_bar=True``. In a
        terminal the last ones are left out if the line has no room for them.
        """
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        loss = None
        for name in ("train/loss", "train/loss_step", "loss"):
            if name in metrics:
                loss = metrics.pop(name)
                break
        if loss is None and isinstance(self._loss, Tensor) and self._loss.numel() == 1:
            loss = self._loss.item()
            logged = trainer.callback_metrics.get("train/loss")
            if logged is not None and not logs_in_bar(self._loss):
                loss = logged.item()
        shown: dict[str, Any] = {}
        if loss is not None:
            shown["loss"] = loss
        if self._rate is not None:
            shown[f"{self._unit}/s"] = short_number(self._rate)
        if trainer.state.fn == "fit" and trainer.optimizers:
            shown["lr"] = f"{float(trainer.optimizers[0].param_groups[0]['lr']):.3g}"
        device = trainer.strategy.root_device
        if device.type == "cuda":
            shown["memory"] = f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f}G"
        shown |= metrics
        texts = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in shown.items()}
        if self._interactive:
            texts = _fitting(texts, shutil.get_terminal_size().columns - _BAR)
        return texts

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        if self.is_disabled:
            print(*args, sep=sep, flush=True, **kwargs)
        else:
            super().print(*args, sep=sep, **kwargs)

    def _due(self, before: int, batches: int) -> bool:
        """Return whether to refresh now, given the position at the last batch and the batches of this epoch."""
        if self._interactive:
            return batches % self.refresh_rate == 0 or self._position == self._total
        if self._total is None:
            return time.monotonic() - self._last_line >= _SECONDS_PER_LINE
        return before * self.lines // self._total < self._position * self.lines // self._total

    def _refresh(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().get_metrics(trainer, pl_module)  # waits for the device, so that the time includes its work
        now = time.monotonic()
        self._rate = self._counted / max(now - self._since, 1e-9)
        self._counted = 0
        self._since = now
        if self._interactive:
            bar = self.train_progress_bar
            bar.n = self._position
            shown = self.get_metrics(trainer, pl_module)
            bar.set_postfix(shown | self._further(trainer, shown, _BAR))
        else:
            self._print_line(trainer, pl_module)

    def _print_line(self, trainer: Trainer, pl_module: LightningModule, validated: bool = False) -> None:
        """Print the position, loss and rate, and other metrics if they have changed or after a validation."""
        now = time.monotonic()
        self._last_line = now
        elapsed = now - self._started
        done = self._position - self._start
        place = str(self._position)
        times = Tqdm.format_interval(elapsed)
        if self._total is not None:
            place += f"/{self._total}"
            if done > 0:
                times += f" < {Tqdm.format_interval(elapsed / done * (self._total - self._position))} left"
        metrics = self.get_metrics(trainer, pl_module)
        always = ("loss", f"{self._unit}/s", "lr", "memory")
        shown = {}
        for name, value in metrics.items():
            if name in always or validated or self._printed.get(name) != value:
                shown[name] = value
        further = self._further(trainer, shown, len(place) + len(times) + 4)
        for name, value in further.items():
            if self._printed.get(name) != value:
                shown[name] = value
        self._printed |= metrics | further
        self.print("  ".join([place, *(f"{name} {value}" for name, value in shown.items()), times]))

    def _further(self, trainer: Any, shown: Mapping[str, str], taken: int) -> dict[str, str]:
        """Return the ``bar_figures`` of other callbacks that fit into the rest of the terminal's line.

        Args:
            trainer: The trainer.
            shown: Metrics that are in the line already.
            taken: Number of characters that other text of the line takes.
        """
        room = shutil.get_terminal_size().columns - taken - sum(len(f"{key} {value}  ") for key, value in shown.items())
        further = {}
        for callback in trainer.callbacks:
            for name, value in getattr(callback, "bar_figures", {}).items():
                text = f"{value:.3g}"
                room -= len(text) + len(name) + 3
                if room >= 0 and name not in shown:
                    further[name] = text
        return further


def _fitting(shown: Mapping[str, str], room: int) -> dict[str, str]:
    """Return the first figures that fit into ``room`` characters, and always the first two."""
    fitting: dict[str, str] = {}
    for name, value in shown.items():
        room -= len(f"{name}={value}, ")
        if room < 0 and len(fitting) >= 2:
            break
        fitting[name] = value
    return fitting


def run_position(trainer: Trainer, batches: int) -> tuple[int, int | None]:
    """Return the position in the run and its end.

    Args:
        trainer: The trainer.
        batches: Number of batches of the present epoch that have been processed.

    Returns:
        Optimizer steps and ``max_steps``, if that ends the run. Otherwise batches of all epochs and their total, or
        None if the total is unknown.
    """
    per_epoch = trainer.num_training_batches
    epochs = trainer.max_epochs
    known_length = per_epoch != float("inf")
    total_batches = None
    if known_length and epochs is not None and epochs >= 0:
        total_batches = int(per_epoch) * epochs
    steps = trainer.max_steps
    if steps >= 0 and (total_batches is None or steps < total_batches / trainer.accumulate_grad_batches):
        return trainer.global_step, steps
    if known_length:
        batches += int(per_epoch) * trainer.current_epoch
    return batches, total_batches
