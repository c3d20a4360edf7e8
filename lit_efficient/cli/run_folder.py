"""The folder of a fit, the same on all ranks: a new ``ROOT/TIME``, or that of the run that goes on."""

import csv
import io
import os
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from lit_efficient.errors import CheckpointError
from lit_efficient.files.atomic_file import remove_whole, replacing
from lit_efficient.files.checkpoints import load_verified
from lit_efficient.files.events import open_events, write_event
from lit_efficient.files.runs import LATEST, hold, new_folder, point_latest, read_record, real, write_record
from lit_efficient.internals.lightning_loops import stops_now
from lit_efficient.internals.lightning_trainer import purge_from, set_default_root_dir

LAST = "last.ckpt"
END = "end.ckpt"  # its name until the fit has ended


def checkpoints(folder: Path) -> list[tuple[int, int, Path]]:
    """Checkpoints in a folder that a fit can resume, newest first: (step, time, path); the step of sharded ones is -1.

    By step, because copying a folder changes the times. Nothing is verified.
    """
    found = []
    for path in folder.glob("*.ckpt"):
        step = -1
        if not path.exists():  # a link to what was removed, left by a process that was killed before it led on
            continue
        if path.is_file():
            try:
                content = load_verified(path, verify=False, mapped=True)
            except CheckpointError:
                rank_zero_warn(f"{path} cannot be read and is passed over; --ckpt_path {path} says why")
                continue
            if not isinstance(content, dict) or "optimizer_states" not in content:
                continue
            step = int(content.get("global_step", 0))
        found.append((step, path.stat().st_mtime_ns, path))
    return sorted(found, reverse=True)


def candidates(word: str | None, root: Path) -> list[Path]:
    """Checkpoints, newest first, that ``--ckpt_path last`` may mean, or a job that its scheduler has started again.

    Of a run that has none yet they are those of its parent, the one that it started from first.

    Raises:
        CheckpointError: If the parent lies outside of ``root``: what a record says is somebody's who wrote it.
    """
    folder: Path | None = None
    if word:
        folder = root / LATEST
    elif int(os.environ.get("SLURM_RESTART_COUNT") or 0) and (job := os.environ.get("SLURM_JOB_ID")):
        runs = [run for run in root.glob("*") if run.name != LATEST and (read_record(run) or {}).get("job") == job]
        folder = max(runs, default=None)
    place = real(folder) if folder else None
    first: Path | None = None
    while place:
        if found := [path for _, _, path in checkpoints(place)]:
            return sorted(found, key=lambda path: path != first)
        parent = (read_record(place) or {}).get("parent")
        first = None
        if isinstance(parent, str):  # of older runs relative to where they were started
            first = real(path if (path := place / parent).exists() else Path(parent))
            if not Path(os.path.realpath(first)).is_relative_to(os.path.realpath(root)):
                raise CheckpointError(
                    f"{place} has saved nothing, and began from {first}, outside of {root}: give it as --ckpt_path"
                )
        place = first.parent if first else None
    return []


def _parent(checkpoint: Path, root: Path) -> str:
    """What a folder below ``root`` names its parent: found from anywhere, and where the root has been moved, too."""
    path, root = Path(os.path.realpath(checkpoint)), Path(os.path.realpath(root))
    return os.path.relpath(path, root / "run") if path.is_relative_to(root) else str(path)


class RunFolder(Callback):
    """Has a fit write into one folder, that of rank 0 on all ranks, and note there what a later run must know.

    The fit resumes ``checkpoint``, at its ``step``, if anything (not by way of ``latest``); ``changed``: with another
    config.
    """

    def __init__(self, root: Path, checkpoint: Path | None, changed: bool, step: int = 0) -> None:
        self.step = step
        self.record = (read_record(checkpoint.parent) if checkpoint else None) or {}
        self.goes_on = bool(checkpoint and self.record and not changed and _is_newest(checkpoint))
        self._empty: list[Path] = []  # what is removed again if the run does not begin
        self._held: int | None = -1
        main = rank_zero_only.rank == 0  # type: ignore[attr-defined]  # of a function
        if self.goes_on:
            assert checkpoint is not None
            self.path = checkpoint.parent
            if main:
                self._held = hold(self.path)
            if self._held is not None:
                return
            rank_zero_info(f"{self.path} is in use by another process: this run gets a folder of its own")
            self.goes_on = False
        self.record = {
            "parent": _parent(checkpoint, root) if checkpoint else None,
            "job": os.environ.get("SLURM_JOB_ID"),
        }
        self.path = root  # of the other ranks, until rank 0 tells them
        if main:
            missing = [folder for folder in (root, *root.parents) if not folder.exists()]
            self.path = new_folder(root)
            self._held = hold(self.path)
            self._empty = [self.path, *missing]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.path = Path(trainer.strategy.broadcast(str(self.path)))
        set_default_root_dir(trainer, str(self.path))
        if trainer.is_global_zero:
            write_record(self.path, self.record)
            point_latest(self.path)
            open_events(self.path)
            write_event(self.path, "start", self.step, parent=self.record.get("parent"), resumed=self.goes_on)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Note by what names the loggers know the run; they have begun by now."""
        if trainer.is_global_zero:
            self.record["loggers"] = [logger.version for logger in trainer.loggers]
            write_record(self.path, self.record)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Let callbacks that compare folders find theirs, also where the run's folder has been moved or copied."""
        here = os.path.realpath(self.path)
        for state in checkpoint.get("callbacks", {}).values() if self.goes_on else ():
            there = str(state.get("dirpath") or "") if isinstance(state, dict) else ""
            if there != here and os.path.basename(there) == os.path.basename(here):
                state.update(_moved(state, there, here))
        if self.goes_on and trainer.is_global_zero:
            _remove_forgotten(self.path, trainer, checkpoint.get("callbacks", {}))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Lightning spares the checkpoint that a fit went on from."""
        if self.goes_on and trainer.is_global_zero:
            savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
            _remove_forgotten(self.path, trainer, {saver.state_key: saver.state_dict() for saver in savers})

    def discard(self) -> None:
        """Let go of the folder; remove it, if nothing is in it."""
        if self._held is not None and self._held >= 0:
            os.close(self._held)
            self._held = None
        for folder in self._empty:
            try:
                folder.rmdir()
            except OSError:
                return


def _moved(value: Any, there: str, here: str) -> Any:
    if isinstance(value, dict):
        return {_moved(key, there, here): _moved(item, there, here) for key, item in value.items()}
    return here + value[len(there) :] if isinstance(value, str) and value.startswith(there) else value


def _remove_forgotten(folder: Path, trainer: Any, states: dict[str, Any]) -> None:
    """Remove what a saver wrote into a folder and no longer counts among its best: a killed one had no time to.

    A checkpoint says itself which files each saver kept when it was written; what has another name is somebody else's.
    """
    savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
    all_kept = {saver.state_key for saver in savers if saver.save_top_k == -1}
    counted = _names(states, {saver.state_key for saver in savers})
    for _, _, path in checkpoints(folder):
        try:
            then = load_verified(path / "meta.pt" if path.is_dir() else path, verify=False, mapped=True)["callbacks"]
        except (CheckpointError, KeyError):
            continue
        own = _names(then, {key for key in states if key in then} - all_kept)
        if path.name in own - _names(then, all_kept) - counted:
            remove_whole(path)


def _names(states: dict[str, Any], savers: set[str]) -> set[str]:
    """The names of the files that savers keep, by their states."""
    kept = [states[key] for key in savers if key in states and "best_k_models" in states[key]]
    paths = [path for s in kept for path in (s["best_model_path"], s["last_model_path"], *s["best_k_models"])]
    return {os.path.basename(path) for path in paths}


def _is_newest(checkpoint: Path) -> bool:
    found = checkpoints(checkpoint.parent)
    steps = {path: step for step, _, path in found}
    newest = {path for step, _, path in found if step == found[0][0]} if found and found[0][0] >= 0 else set()
    return checkpoint in (newest or [path for _, _, path in found[:1]]) and checkpoint in steps


def keep_rows(logger: Any, step: int) -> None:
    """Let a logger go on with the rows of its folder: those of the checkpoint's steps, where a killed run wrote more.

    A CSVLogger begins by removing what is there. The rows of the checkpoint's last step may be logged again.
    """
    if isinstance(logger, TensorBoardLogger):
        purge_from(logger, step)
        tags = _tags_at(step - 1, Path(logger.log_dir))
        logger.log_metrics = partial(_log_new, logger.log_metrics, [tags], step - 1)  # type: ignore[method-assign]
    table = Path(logger.log_dir or "", "metrics.csv")
    kept = table.with_name("metrics.kept")
    if isinstance(logger, CSVLogger) and kept.is_file():  # of a process that was killed right here
        kept.replace(table)
    if not isinstance(logger, CSVLogger) or not table.is_file():
        return
    reader = csv.DictReader(table.read_text("utf-8").splitlines())
    rows, names = [row for row in reader if int(row["step"]) < step], [*(reader.fieldnames or ())]
    writer = csv.DictWriter(text := io.StringIO(), names)
    writer.writeheader()
    writer.writerows(rows)
    with replacing(kept) as file:
        file.write(text.getvalue().encode())
    experiment: Any = logger.experiment
    kept.replace(table)
    experiment.metrics_keys = names
    known = [{name for name in names if row[name]} for row in rows if int(row["step"]) == step - 1]
    experiment.log_metrics = partial(_log_new, experiment.log_metrics, known, step - 1)


def _tags_at(step: int, folder: Path) -> set[str]:
    """What TensorBoard's files in a folder have of a step."""
    if not find_spec("tensorboard"):  # tensorboardX reads none
        return set()
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    files = (RawEventFileLoader(str(path)) for path in folder.glob("events.out.tfevents.*"))
    events = (Event.FromString(record) for file in files for record in file.Load())  # tags need no migration
    return {value.tag for event in events if event.step == step for value in event.summary.value}


def _log_new(log: Any, known: list[set[str]], last: int, metrics: dict[str, Any], step: int | None = None) -> None:
    """Log metrics, unless they are of the ``last`` step and one of its rows, with these names, has them."""
    if step != last or not any(metrics.keys() <= names for names in known):
        log(metrics, step)


def place_loggers(trainer: Namespace, folder: Path, names: Sequence[Any] | None) -> None:
    """Let the loggers of a trainer's config, which is changed in place, write into a folder, unless they have their
    own.

    ``names`` are those by which they know the run that goes on; empty for a new one, ``None`` for no run at all.
    """
    logger = trainer.get("logger")
    if logger is None or logger is True:
        kind = "TensorBoardLogger" if find_spec("tensorboard") or find_spec("tensorboardX") else "CSVLogger"
        arguments = Namespace(save_dir=None, name="lightning_logs", version=None)
        logger = trainer["logger"] = Namespace(class_path=f"lightning.pytorch.loggers.{kind}", init_args=arguments)
    for index, one in enumerate(logger if isinstance(logger, list) else [logger]):
        arguments = getattr(one, "init_args", None) or Namespace()
        if "save_dir" in arguments and arguments["save_dir"] in (None, "."):
            arguments["save_dir"] = str(folder.absolute())  # W&B's service may run in another working directory
            if names is not None and (arguments.get("name"), arguments.get("version")) == ("lightning_logs", None):
                arguments["name"] = arguments["version"] = ""  # the folder is the run's alone
        for key in ("version", "run_id"):
            if names and index < len(names) and key in arguments and arguments[key] is None:
                arguments[key] = names[index]


class LastCheckpoint(Checkpoint):
    """Saves the last step of a fit as ``last.ckpt``, from where a longer one goes on to the same bits.

    Lightning ends an epoch when it stops in the midst of one; so it is saved before, and again after the validation
    that the last step may have.
    """

    last_model_path = ""
    _step = -1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if stops_now(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and stops_now(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._step != trainer.global_step:
            self._save(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Also of a fit that has nothing left to do, because it was killed between the two names."""
        written, last = (Path(trainer.default_root_dir, name) for name in (END, LAST))
        if not trainer.strategy.broadcast(written.exists()):
            return
        if trainer.is_global_zero:
            if last.is_dir():
                remove_whole(last)
            written.replace(last)
            written.unlink(missing_ok=True)  # renaming one of two names of the same file does nothing
        trainer.strategy.barrier()
        self.last_model_path = str(last)

    def _save(self, trainer: Any) -> None:
        self._step = trainer.global_step
        # Until the end under a name of its own: others write their last.ckpt when Lightning ends the epoch.
        self.last_model_path = str(Path(trainer.default_root_dir, END))
        trainer.save_checkpoint(self.last_model_path, weights_only=False)
