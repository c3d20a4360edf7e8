"""What happens in a fit, noted in its folder: see :mod:`lit_efficient.files.events`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lit_efficient.application.ledger import reports_of
from lit_efficient.cli.environment import environment
from lit_efficient.cli.run import write_config
from lit_efficient.cli.run_folder import END, LAST, RunFolder
from lit_efficient.cli.run_log import RunLog
from lit_efficient.cli.secrets import masked
from lit_efficient.declaration import techniques_of
from lit_efficient.files.events import write_event


class RunEvents(Callback):
    """Writes log and environment of a fit, and notes its techniques, metrics, checkpoints and warnings as they come."""

    def __init__(self, folder: RunFolder, lines: RunLog, command: str) -> None:
        self.folder, self.lines, self.command = folder, lines, command
        self.saved = ""  # the checkpoint that was written last
        self.trainer: Any = None
        self._samples: set[Path] = set()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer
        self.lines.warned = lambda text: self.note("warning", text=text)
        self.lines.open(self.folder.path / "log.txt", trainer.global_rank)
        if trainer.is_global_zero:
            found = environment(trainer.strategy.root_device, trainer.device_ids, self.command)
            write_config(self.folder.path / "environment.json", json.dumps(found, indent=1))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        reports = reports_of(pl_module, techniques_of(trainer))
        if reports:
            self.note("techniques", report=[{"name": name, "text": one.summary} for name, one in reports.items()])
        self._samples = set(self.folder.path.glob("samples/*"))
        self._watch_saving(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for logger in trainer.loggers[:1]:  # to which the trainer and callbacks log alike
            self._watch_logging(logger)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if not trainer.loggers:
            self._note_metrics(trainer.callback_metrics)
        for path in sorted(set(self.folder.path.glob("samples/*")) - self._samples):
            self._samples.add(path)
            self.note("sample", path=f"samples/{path.name}")

    def note(self, kind: str, **more: Any) -> None:
        """Add an event, where the fit has come to; one process does."""
        trainer = self.trainer
        if trainer is not None and trainer.is_global_zero:
            write_event(self.folder.path, kind, max(trainer.global_step, self.folder.step), **masked(more))

    def _note_metrics(self, metrics: Mapping[str, Any]) -> None:
        values = {}
        for name, value in metrics.items():
            try:
                values[name] = float(value)
            except (TypeError, ValueError):
                continue
        epoch = int(values.pop("epoch", self.trainer.current_epoch))
        if values:
            self.note("metrics", epoch=epoch, values=values)

    def _watch_logging(self, logger: Any) -> None:
        own = logger.log_metrics

        def log_metrics(metrics: Mapping[str, Any], step: int | None = None, **more: Any) -> None:
            own(metrics, step=step, **more)
            self._note_metrics(metrics)

        logger.log_metrics = log_metrics

    def _watch_saving(self, trainer: Any) -> None:
        own = trainer.save_checkpoint

        def save_checkpoint(filepath: Any, *arguments: Any, **options: Any) -> None:
            own(filepath, *arguments, **options)
            self.saved = str(filepath)
            path, folder = os.path.realpath(filepath), os.path.realpath(self.folder.path)
            path = os.path.relpath(path, folder) if path.startswith(folder + os.sep) else str(filepath)
            path = LAST if path == END else path
            savers = [c for c in trainer.checkpoint_callbacks if str(filepath) in getattr(c, "best_k_models", {})]
            scores = [{"monitor": c.monitor, "score": float(c.best_k_models[str(filepath)])} for c in savers]
            self.note("checkpoint", path=path, **(scores[0] if scores else {}))

        trainer.save_checkpoint = save_checkpoint
