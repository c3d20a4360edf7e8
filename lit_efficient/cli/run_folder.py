"""The folder of a fit, the same on all ranks: a new ``ROOT/TIME``, or the folder of the run that continues."""

import csv
import io
import os
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from lit_efficient.cli.tree import as_list
from lit_efficient.errors import CheckpointError
from lit_efficient.files.atomic_file import remove_stale, remove_whole, replacing
from lit_efficient.files.background import finish_writing
from lit_efficient.files.checkpoints import load_verified
from lit_efficient.files.events import open_events, write_event
from lit_efficient.files.runs import LATEST, hold, new_folder, point_latest, read_record, real, write_record
from lit_efficient.internals.lightning_loops import stops_now
from lit_efficient.internals.lightning_trainer import purge_from, set_default_root_dir

LAST = "last.ckpt"
END = "end.ckpt"  # its name until the fit has ended
_RENAMING_S = 30.0  # seconds in which a run that has written end.ckpt gives it its name


def checkpoints(folder: Path) -> list[tuple[int, int, Path]]:
    """Return the checkpoints in a folder that a fit can resume, newest first. Nothing is verified.

    Returns:
        ``(step, time, path)`` for each. They are sorted by step, because copying a folder changes the times. The step
        of a sharded checkpoint is -1.
    """
    found = []
    for path in folder.glob("*.ckpt"):
        step = -1
        if not path.exists():  # a link to a removed file: the process was killed before it changed the link
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
    """Return the checkpoints that ``--ckpt_path last``, or a job that its scheduler started again, may continue from.

    A run without any checkpoint yet continues from those of its parent: first from the one that it began from.

    Args:
        word: The word that was given as ``--ckpt_path``, if any.
        root: Folder of the runs.

    Returns:
        Paths, newest first.

    Raises:
        CheckpointError: If the parent is outside of ``root``: a record may be written by anybody.
    """
    place = _newest_run(word, root)
    first: Path | None = None
    while place:
        found = _named_checkpoints(place)
        if found:
            return sorted(found, key=lambda path: path != first)
        parent = (read_record(place) or {}).get("parent")
        if not isinstance(parent, str):
            return []
        path = place / parent
        first = real(path if path.exists() else Path(parent))
        if not Path(os.path.realpath(first)).is_relative_to(os.path.realpath(root)):
            raise CheckpointError(
                f"{place} has saved nothing, and began from {first}, outside of {root}: give it as --ckpt_path"
            )
        place = first.parent
    return []


def _named_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, newest first.

    If the run is just ending in another process, its last checkpoint gets its name first. Otherwise the file could be
    renamed after it was listed and before it is read.
    """
    deadline = time.monotonic() + _RENAMING_S
    while True:
        found = [path for _, _, path in checkpoints(folder)]
        if all(path.name != END for path in found) or time.monotonic() > deadline:
            return found
        held = hold(folder)
        if held is not None:  # nobody is left who would rename it
            if held >= 0:
                os.close(held)
            return found
        time.sleep(0.1)


def _newest_run(word: str | None, root: Path) -> Path | None:
    if word:
        return real(root / LATEST)
    job = os.environ.get("SLURM_JOB_ID")
    if not job or not int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        return None
    runs = [run for run in root.glob("*") if run.name != LATEST and (read_record(run) or {}).get("job") == job]
    return real(max(runs)) if runs else None


def finish_killed_run(checkpoint: str) -> str:
    """Do what a run that was killed after its last step had left to do: name its checkpoint, remove hidden files.

    Args:
        checkpoint: Path of a checkpoint from which no step is left.

    Returns:
        Its path. It is the given one if the checkpoint has its name, or if its run has not ended.
    """
    written = Path(checkpoint)
    main = rank_zero_only.rank == 0  # type: ignore[attr-defined]  # of a function
    if not main or read_record(written.parent) is None:
        return checkpoint
    held = hold(written.parent)
    if held is None:
        return checkpoint
    remove_stale(written.parent)
    last = written.with_name(LAST) if written.name == END else written
    if last != written:
        _rename(written, last)
    if held >= 0:
        os.close(held)
    return str(last)


def _rename(written: Path, last: Path) -> None:
    if last.is_dir():
        remove_whole(last)
    written.replace(last)
    written.unlink(missing_ok=True)  # renaming one of two names of the same file does nothing


def _parent(checkpoint: Path, root: Path) -> str:
    """Return the path by which a folder below ``root`` names its parent. It stays right if the root is moved."""
    path = Path(os.path.realpath(checkpoint))
    root = Path(os.path.realpath(root))
    if path.is_relative_to(root):
        return os.path.relpath(path, root / "run")
    return str(path)


class RunFolder(Callback):
    """Lets a fit write into the folder of rank 0 on all ranks, and records there what a later run must know.

    Args:
        root: Folder of the runs.
        checkpoint: The checkpoint that the fit resumes, if any, without links in its path.
        changed: Whether the config is another one than the checkpoint's.
        step: Step of the checkpoint.
    """

    def __init__(self, root: Path, checkpoint: Path | None, changed: bool, step: int = 0) -> None:
        self.step = step
        self.record = (read_record(checkpoint.parent) if checkpoint else None) or {}
        self.goes_on = bool(checkpoint and self.record and not changed and _is_newest(checkpoint))
        self._empty: list[Path] = []  # folders that are removed again if the run does not begin
        self._held: int | None = -1  # the lock: a file descriptor, -1 for none, None if another process has it
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

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.path = Path(trainer.strategy.broadcast(str(self.path)))
        set_default_root_dir(trainer, str(self.path))
        if trainer.is_global_zero:
            write_record(self.path, self.record)
            point_latest(self.path)
            open_events(self.path)
            write_event(self.path, "start", self.step, parent=self.record.get("parent"), resumed=self.goes_on)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the names that the loggers, which have begun by now, have for the run."""
        if trainer.is_global_zero:
            self.record["loggers"] = [logger.version for logger in trainer.loggers]
            write_record(self.path, self.record)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Rewrite the folder in the states of callbacks if the run's folder was moved or copied: they compare it."""
        here = os.path.realpath(self.path)
        if not self.goes_on:
            return
        states = checkpoint.get("callbacks", {})
        for state in states.values():
            there = ""
            if isinstance(state, dict):
                there = str(state.get("dirpath") or "")
            if there != here and os.path.basename(there) == os.path.basename(here):
                state.update(_moved(state, there, here))
        if trainer.is_global_zero:
            _remove_forgotten(self.path, trainer, states)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the checkpoint that the fit resumed, if it is no longer among the best: Lightning keeps it."""
        if self.goes_on and trainer.is_global_zero:
            savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
            _remove_forgotten(self.path, trainer, {saver.state_key: saver.state_dict() for saver in savers})

    def discard(self) -> None:
        """Release the folder, and remove it if it is empty."""
        if self._held is not None and self._held >= 0:
            os.close(self._held)
            self._held = None
        for folder in self._empty:
            try:
                folder.rmdir()
            except OSError:
                return


def _moved(value: object, there: str, here: str) -> Any:
    if isinstance(value, dict):
        return {_moved(key, there, here): _moved(item, there, here) for key, item in value.items()}
    if isinstance(value, str) and value.startswith(there):
        return here + value[len(there) :]
    return value


def _remove_forgotten(folder: Path, trainer: Trainer, states: dict[str, Any]) -> None:
    """Remove checkpoints that a saver wrote and no longer keeps: a killed process had no time to remove them.

    Each checkpoint has the names of the files that its savers kept when it was written. A file with another name is
    not theirs.

    Args:
        folder: Folder of the checkpoints.
        trainer: The trainer.
        states: Present state of each saver by its key.
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
    """Return the names of the files that savers keep, according to their states."""
    names = set()
    for key in savers:
        state = states.get(key, {})
        if "best_k_models" in state:
            for path in (state["best_model_path"], state["last_model_path"], *state["best_k_models"]):
                names.add(os.path.basename(path))
    return names


def _is_newest(checkpoint: Path) -> bool:
    """Return whether no checkpoint of the folder is newer. Several may be of the newest step."""
    found = checkpoints(checkpoint.parent)
    if not found:
        return False
    newest_step, _, newest = found[0]
    if newest_step < 0:  # sharded: the step is not known
        return checkpoint == newest
    return checkpoint in [path for step, _, path in found if step == newest_step]


def keep_rows(logger: Logger, step: int) -> None:
    """Let a logger continue with the rows of its folder up to the checkpoint. A killed run may have written more.

    The rows of the checkpoint's last step may be logged again: they are written once.

    Args:
        logger: The logger.
        step: Step of the checkpoint.
    """
    if isinstance(logger, TensorBoardLogger):
        purge_from(logger, step)
        tags = _tags_at(step - 1, Path(logger.log_dir))
        logger.log_metrics = partial(_log_new, logger.log_metrics, [tags], step - 1)  # type: ignore[method-assign]
    if isinstance(logger, CSVLogger):
        _keep_csv_rows(logger, step)
    if isinstance(logger, MLFlowLogger):  # MLflow refuses another value of a parameter, as of max_epochs
        logger.log_hyperparams = lambda *_, **__: None  # type: ignore[method-assign]


def _keep_csv_rows(logger: CSVLogger, step: int) -> None:
    """Keep the rows before a step. A CSVLogger begins by removing the table, so they are written beside it first."""
    table = Path(logger.log_dir or "", "metrics.csv")
    kept = table.with_name("metrics.kept")
    if kept.is_file():  # a process was killed between the two steps below
        kept.replace(table)
    if not table.is_file():
        return
    reader = csv.DictReader(table.read_text("utf-8").splitlines())
    rows = [row for row in reader if int(row["step"]) < step]
    names = list(reader.fieldnames or ())
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    with replacing(kept) as file:
        file.write(text.getvalue().encode())
    experiment = logger.experiment
    kept.replace(table)
    experiment.metrics_keys = names
    known = [{name for name in names if row[name]} for row in rows if int(row["step"]) == step - 1]
    experiment.log_metrics = partial(_log_new, experiment.log_metrics, known, step - 1)


def _tags_at(step: int, folder: Path) -> set[str]:
    """Return the tags that TensorBoard's files in a folder have for a step."""
    if not find_spec("tensorboard"):  # tensorboardX cannot read them
        return set()
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    files = (RawEventFileLoader(str(path)) for path in folder.glob("events.out.tfevents.*"))
    events = (Event.FromString(record) for file in files for record in file.Load())  # tags need no migration
    return {value.tag for event in events if event.step == step for value in event.summary.value}


def _log_new(log: Any, known: list[set[str]], last: int, metrics: dict[str, object], step: int | None = None) -> None:
    """Log metrics, unless they are of the ``last`` step and one of its rows already has all these names."""
    if step != last or not any(metrics.keys() <= names for names in known):
        log(metrics, step)


def place_loggers(trainer: Namespace, folder: Path, names: Sequence[Any] | None) -> None:
    """Let the loggers of a trainer's config write into a folder, unless they have their own.

    Args:
        trainer: The trainer's config. It is changed in place.
        folder: The folder.
        names: Names that the loggers have for the run that continues; empty for a new run, ``None`` for no run.
    """
    logger = trainer.get("logger")
    if logger is None or logger is True:
        kind = "CSVLogger"
        if find_spec("tensorboard") or find_spec("tensorboardX"):
            kind = "TensorBoardLogger"
        arguments = Namespace(save_dir=None, name="lightning_logs", version=None)
        logger = Namespace(class_path=f"lightning.pytorch.loggers.{kind}", init_args=arguments)
        trainer["logger"] = logger
    for index, one in enumerate(as_list(logger)):
        arguments = getattr(one, "init_args", None) or Namespace()
        if "save_dir" in arguments and arguments["save_dir"] in (None, "."):
            arguments["save_dir"] = str(folder.absolute())  # W&B's service may run in another working directory
            if names is not None and (arguments.get("name"), arguments.get("version")) == ("lightning_logs", None):
                arguments["name"] = arguments["version"] = ""  # the folder is the run's alone
        for key in ("version", "run_id"):
            if names and index < len(names) and key in arguments and arguments[key] is None:
                arguments[key] = names[index]


class LastCheckpoint(Checkpoint):
    """Saves the last step of a fit as ``last.ckpt``. A longer fit continues from it to the same bits.

    Lightning ends the epoch when it stops inside of one. So the checkpoint is saved before that, and again after the
    validation that the last step may have.
    """

    last_model_path = ""
    _step = -1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if stops_now(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and stops_now(trainer):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._step != trainer.global_step:
            self._save(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the checkpoint its name, also if an earlier process was killed before it could."""
        finish_writing()
        written = Path(trainer.default_root_dir, END)
        last = Path(trainer.default_root_dir, LAST)
        if not trainer.strategy.broadcast(written.exists()):
            return
        if trainer.is_global_zero:
            _rename(written, last)
        trainer.strategy.barrier()
        self.last_model_path = str(last)

    def _save(self, trainer: Trainer) -> None:
        self._step = trainer.global_step
        # It has another name until the end, because other savers write last.ckpt when Lightning ends the epoch.
        self.last_model_path = str(Path(trainer.default_root_dir, END))
        trainer.save_checkpoint(self.last_model_path, weights_only=False)
