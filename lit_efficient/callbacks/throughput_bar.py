"""A progress bar over the whole run: loss, tokens (or samples) a second, validation figures and the time left.

    rate = tokens of all processes since the last refresh / seconds since then, validation not counted

Costs: the device is waited for at a refresh only (its numbers are read then), never at the steps between.
"""

import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from torch import Tensor

from lit_efficient.distributed.ranks import readers
from lit_efficient.errors import check_number
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.mechanisms.metering import count_batch, short_number

_SECONDS_A_LINE = 60.0  # where the end of the run is unknown
_BAR = 60  # characters of a bar beside its figures


class ThroughputBar(TQDMProgressBar):
    """Shows one bar for all epochs of ``fit``; where the output is no terminal, a few plain lines instead.

    Steps are counted up to ``max_steps`` if that ends the run, else batches up to the end of the last epoch.

    Args:
        refresh_rate: batches between two refreshes of the bar, at least 1.
        lines: lines printed over the whole run where the output is no terminal, at least 1; one more a validation.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    def __init__(self, refresh_rate: int = 10, lines: int = 20) -> None:
        check_number("ThroughputBar", "refresh_rate", refresh_rate, least=1, whole=True)
        check_number("ThroughputBar", "lines", lines, least=1, whole=True)
        super().__init__(refresh_rate=refresh_rate)
        self.lines = lines
        self._interactive = True
        self._start = self._position = 0  # in steps or batches, at the start of this fit and now
        self._total: int | None = None
        self._started = self._since = self._paused = self._last_line = 0.0  # seconds
        self._counted = 0  # tokens or samples of all processes since the last refresh
        self._unit = "tokens"
        self._rate: float | None = None
        self._loss: Any = None
        self._said: dict[str, Any] = {}  # the figures of the line before

    @property
    def is_disabled(self) -> bool:
        """Whether bars are left out: on other processes, and where the output is no terminal."""
        return super().is_disabled or not self._interactive

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        notebook = "ipykernel" in sys.modules  # which draws bars, too
        self._interactive = notebook or bool(sys.stdout and sys.stdout.isatty())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar where the run stands, which is not 0 after a resume."""
        super().on_train_start(trainer, pl_module)
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        self._start, self._total = run_position(trainer, done)
        self._position = self._start
        bar = self.train_progress_bar
        bar.total, bar.n, bar.initial = self._total, self._start, self._start
        self._started = self._since = self._last_line = time.monotonic()
        self._counted, self._rate = 0, None

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        count, self._unit = count_batch(batch)
        self._counted += count * readers(trainer)
        before, (self._position, _) = self._position, run_position(trainer, batch_idx + 1)
        self._loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self.is_enabled and self._due(before, batch_idx + 1):
            self._refresh(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.is_disabled:
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = time.monotonic()
        super().on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self.is_enabled and not self._interactive and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._print_line(trainer, pl_module, validated=True)
        self._since += time.monotonic() - self._paused

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Loss, rate, then whatever was logged with ``prog_bar=True``, as text."""
        metrics = {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}
        loss = next((metrics.pop(name) for name in ("train/loss", "train/loss_step", "loss") if name in metrics), None)
        if loss is None and isinstance(self._loss, Tensor) and self._loss.numel() == 1:
            logged = None if logs_in_bar(self._loss) else trainer.callback_metrics.get("train/loss")
            loss = (self._loss if logged is None else logged).item()
        shown: dict[str, Any] = {} if loss is None else {"loss": loss}
        if self._rate is not None:
            shown[f"{self._unit}/s"] = short_number(self._rate)
        shown |= metrics
        return {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in shown.items()}

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        if self.is_disabled:
            print(*args, sep=sep, flush=True, **kwargs)
        else:
            super().print(*args, sep=sep, **kwargs)

    def _due(self, before: int, batches: int) -> bool:
        if self._interactive:
            return batches % self.refresh_rate == 0 or self._position == self._total
        if self._total is None:
            return time.monotonic() - self._last_line >= _SECONDS_A_LINE
        return before * self.lines // self._total < self._position * self.lines // self._total

    def _refresh(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().get_metrics(trainer, pl_module)  # waits for the device, so that the time is that of finished work
        now = time.monotonic()
        self._rate = self._counted / max(now - self._since, 1e-9)
        self._counted, self._since = 0, now
        if self._interactive:
            bar = self.train_progress_bar
            bar.n = self._position
            shown = self.get_metrics(trainer, pl_module)
            bar.set_postfix(shown | self._further(trainer, shown, _BAR))
        else:
            self._print_line(trainer, pl_module)

    def _print_line(self, trainer: Trainer, pl_module: LightningModule, validated: bool = False) -> None:
        """Print where the run stands: loss and rate; other figures when they have changed, or after a validation."""
        self._last_line = now = time.monotonic()
        elapsed, done = now - self._started, self._position - self._start
        place = str(self._position) if self._total is None else f"{self._position}/{self._total}"
        times = Tqdm.format_interval(elapsed)
        if self._total is not None and done > 0:
            times += f" < {Tqdm.format_interval(elapsed / done * (self._total - self._position))} left"
        figures = self.get_metrics(trainer, pl_module)
        always = ("loss", f"{self._unit}/s")
        news = {name: value for name, value in figures.items() if validated or self._said.get(name) != value}
        shown = {name: value for name, value in figures.items() if name in always or name in news}
        further = self._further(trainer, shown, len(place) + len(times) + 4)
        shown |= {name: value for name, value in further.items() if self._said.get(name) != value}
        self._said |= figures | further
        self.print("  ".join([place, *(f"{name} {value}" for name, value in shown.items()), times]))

    def _further(self, trainer: Any, shown: Mapping[str, str], taken: int) -> dict[str, str]:
        """What other callbacks offer as ``bar_figures``, as far as there is room for it in the terminal's line."""
        room = shutil.get_terminal_size().columns - taken - sum(len(f"{key} {value}  ") for key, value in shown.items())
        further = {}
        for callback in trainer.callbacks:
            for name, value in getattr(callback, "bar_figures", {}).items():
                room -= len(text := f"{value:.3g}") + len(name) + 3
                if room >= 0 and name not in shown:
                    further[name] = text
        return further


def run_position(trainer: Trainer, batches: int) -> tuple[int, int | None]:
    """(optimizer steps, ``max_steps``) if that ends the run; else (batches of all epochs, their total or None)."""
    per_epoch, steps, epochs = trainer.num_training_batches, trainer.max_steps, trainer.max_epochs
    limit = None
    if per_epoch != float("inf") and epochs is not None and epochs >= 0:
        limit = int(per_epoch) * epochs
    if steps >= 0 and (limit is None or steps < limit / trainer.accumulate_grad_batches):
        return trainer.global_step, steps
    earlier = 0 if per_epoch == float("inf") else int(per_epoch) * trainer.current_epoch
    return earlier + batches, limit
