"""Events of a fit, recorded in its folder: see :mod:`lit_efficient.files.events`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger

from lit_efficient.application.ledger import reports_of
from lit_efficient.cli.defaults import write_config
from lit_efficient.cli.environment import environment
from lit_efficient.cli.run_folder import END, LAST, RunFolder
from lit_efficient.cli.run_log import RunLog
from lit_efficient.cli.secrets import masked
from lit_efficient.declaration import techniques_of
from lit_efficient.files.events import write_event


class RunEvents(Callback):
    """Records log, environment, techniques, metrics, samples, checkpoints and warnings of a fit.

    Args:
        folder: Folder of the run.
        lines: The `RunLog` that copies what the process prints into ``log.txt``.
        command: The command line, without secrets.
    """

    def __init__(self, folder: RunFolder, lines: RunLog, command: str) -> None:
        self.folder = folder
        self.lines = lines
        self.command = command
        self.saved = ""  # the checkpoint that was written last
        self.trainer: Trainer | None = None
        self._samples: set[Path] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.trainer = trainer
        self.lines.warned = lambda text: self.note("warning", text=text)
        self.lines.open(self.folder.path / "log.txt", trainer.global_rank)
        if trainer.is_global_zero:
            found = environment(trainer.strategy.root_device, trainer.device_ids, self.command)
            write_config(self.folder.path / "environment.json", json.dumps(found, indent=1))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reports = reports_of(pl_module, techniques_of(trainer))
        if reports:
            self.note("techniques", report=[{"name": name, "text": one.summary} for name, one in reports.items()])
        self._samples = set(self.folder.path.glob("samples/*"))
        self._watch_saving(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers[:1]:  # the trainer and callbacks log the same to all loggers
            self._watch_logging(logger)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if not trainer.loggers:
            self._note_metrics(trainer.callback_metrics)
        for path in sorted(set(self.folder.path.glob("samples/*")) - self._samples):
            self._samples.add(path)
            self.note("sample", path=f"samples/{path.name}")

    def note(self, kind: str, **more: Any) -> None:
        """Add an event with the step of the fit, on rank 0."""
        trainer = self.trainer
        if trainer is not None and trainer.is_global_zero:
            write_event(self.folder.path, kind, max(trainer.global_step, self.folder.step), **masked(more))

    def _note_metrics(self, metrics: Mapping[str, Any]) -> None:
        values = {}
        for name, value in metrics.items():
            try:
                values[name] = float(value)
            except (TypeError, ValueError, RuntimeError):  # not one number
                continue
        current = self.trainer.current_epoch if self.trainer else 0
        epoch = int(values.pop("epoch", current))
        if values:
            self.note("metrics", epoch=epoch, values=values)

    def _watch_logging(self, logger: Logger) -> None:
        own = logger.log_metrics

        def log_metrics(metrics: dict[str, float], step: int | None = None, **more: object) -> None:
            own(metrics, step=step, **more)
            self._note_metrics(metrics)

        logger.log_metrics = log_metrics  # type: ignore[method-assign]

    def _watch_saving(self, trainer: Trainer) -> None:
        own = trainer.save_checkpoint

        def save_checkpoint(filepath: Any, *arguments: Any, **options: Any) -> None:
            own(filepath, *arguments, **options)
            self.saved = str(filepath)
            path = os.path.realpath(filepath)
            folder = os.path.realpath(self.folder.path)
            shown = self.saved
            if path.startswith(folder + os.sep):
                shown = os.path.relpath(path, folder)
            if shown == END:  # the name until the fit has ended
                shown = LAST
            score: dict[str, object] = {}
            for saver in trainer.checkpoint_callbacks:
                best = getattr(saver, "best_k_models", {})
                if not score and self.saved in best:
                    score = {"monitor": getattr(saver, "monitor", None), "score": float(best[self.saved])}
            self.note("checkpoint", path=shown, **score)

        trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
