"""Parts that every run of the command line gets: safe checkpoints, its config, metrics, answers to signals."""

import itertools
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.plugins import CheckpointIO, Precision
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

import lit_efficient
from lit_efficient.application import check_sharded
from lit_efficient.cli.parameter_summary import ParameterSummary
from lit_efficient.cli.run_folder import LAST, LastCheckpoint, RunFolder
from lit_efficient.cli.secrets import masked
from lit_efficient.cli.tree import DEFAULTS, as_list, by_option, class_name
from lit_efficient.declaration import techniques_of
from lit_efficient.distributed.ranks import report_waiting
from lit_efficient.distributed.shards import sum_shards
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.atomic_file import replacing
from lit_efficient.internals.lightning_wandb import LateWandbLogger
from lit_efficient.internals.wraps import inner_method
from lit_efficient.technique import warn_of_rounding

# Beginnings of messages that advertise, or report that hardware is not there.
_CHATTER = (
    "💡",
    "TPU available: False",
    "HPU available: False",
    "Loading `train_dataloader` to estimate",
    "Trainer already configured with model summary",
)
_NOISE = (
    "does not have many workers",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "The dirpath has changed from",
    "Checkpoint directory .* exists and is not empty",
    "Experiment logs directory",
    "could not find the monitored key",  # before a validation has run; after one it is an error
)
# Errors of loader workers whose result is no longer needed: while a batch is served, and an iterator is deleted.
_ORPHANED: dict[Any, Any] = {
    ("multiprocessing.resource_sharer", "_serve"): (ConnectionError, EOFError),
    ("torch.utils.data.dataloader", "__del__"): RuntimeError,
}


def add_default_parts(
    trainer_config: dict[str, Any],
    subcommand: str | None,
    optimizer: str = "",
    folder: RunFolder | None = None,
    checked: tuple[int, ...] | None = None,
) -> None:
    """Add the safe CheckpointIO to a run, and the handling of signals and of NaN to a fit, unless it has its own.

    Args:
        trainer_config: Arguments of the trainer. They are changed in place.
        subcommand: The subcommand.
        optimizer: Class path of the config's optimizer. A schedule-free one gets the callback that switches weights.
        folder: Folder of the run.
        checked: State of the checkpoint's file when its checksums were compared.

    Raises:
        ConfigurationError: If both a precision and a precision plugin are given, or a progress bar is given and off.
    """
    if folder:
        trainer_config["default_root_dir"] = str(folder.path)
        trainer_config["callbacks"] = [folder, *as_list(trainer_config.get("callbacks"))]
        _place_checkpoints(trainer_config, folder.path)
    plugins = as_list(trainer_config.get("plugins"))
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(default_part("checkpoints")())
        trainer_config["plugins"] = plugins
    for plugin in plugins:
        if isinstance(plugin, default_part("checkpoints")):
            plugin.checked = checked
        given = trainer_config.get("precision")
        if isinstance(plugin, Precision) and given is not None:
            name = type(plugin).__name__
            raise ConfigurationError(
                f"trainer.precision: {name} in trainer.plugins takes its place, got {given!r}: set it to null"
            )
    callbacks = as_list(trainer_config.get("callbacks"))
    if subcommand == "fit":
        for key in ("signals", "metrics", "divergence", "ranks"):
            _add(callbacks, key)
        kind = class_name(optimizer)
        if kind in DEFAULTS and _add(callbacks, kind):
            rank_zero_info(
                f"optimizer: {kind} trains with other weights than it validates and saves: added the callback "
                f"{DEFAULTS[kind]}(), which switches them"
            )
    wants_bar = trainer_config.get("enable_progress_bar") is not False
    bars = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
    if bars and not wants_bar:
        name = type(bars[0]).__name__
        raise ConfigurationError(
            f"trainer.callbacks has {name}, and trainer.enable_progress_bar is False. Leave out the callback "
            f"(--without {name}), or the option"
        )
    if wants_bar and not bars:
        callbacks.append(default_part("bar")())
    wants_summary = trainer_config.get("enable_model_summary") is not False
    if wants_summary and not any(isinstance(callback, ModelSummary) for callback in callbacks):
        callbacks.append(ParameterSummary())
    trainer_config["callbacks"] = callbacks


def _add(callbacks: list[Any], key: str) -> bool:
    """Add a part of :data:`DEFAULTS` if no callback is of its kind; return whether it was added."""
    part = default_part(key)
    kind = getattr(part, "kind", part)
    if any(isinstance(callback, kind) for callback in callbacks):
        return False
    callbacks.append(part())
    return True


class LeftOut(Callback):
    """Marks in a config that a part of :data:`DEFAULTS` must not be added.

    Args:
        name: The part.
    """

    def __init__(self, name: str) -> None:
        self.name = name


def prefetch(trainer: Trainer, subcommand: str | None) -> None:
    """Let a fit on a GPU copy its next batch while it computes, unless the config has or leaves out this part."""
    part = default_part("prefetch")
    callbacks = callbacks_of(trainer)
    left_out = any(isinstance(one, LeftOut) and one.name == part.__name__ for one in callbacks)
    there = left_out or any(isinstance(one, part) for one in callbacks)
    if subcommand == "fit" and trainer.strategy.root_device.type == "cuda" and not there:
        trainer.callbacks.insert(0, part())  # type: ignore[attr-defined]  # its type does not declare them


def setup_environment(self: Any) -> None:
    """Set up a strategy's processes. Lightning's method waits for missing processes without a message."""
    with report_waiting(self.cluster_environment, "as long as trainer.strategy's `timeout` says"):
        inner_method(self, "setup_environment", setup_environment)()


def _place_checkpoints(trainer_config: dict[str, Any], folder: Path) -> None:
    """Save checkpoints into the run's folder, including one of the last step."""
    if trainer_config.get("enable_checkpointing") is False:
        return
    callbacks = trainer_config["callbacks"]
    if not any(isinstance(callback, Checkpoint) for callback in callbacks):
        callbacks.append(ModelCheckpoint(filename=Path(LAST).stem, enable_version_counter=False))
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = os.path.realpath(folder)
            # Without it, its own last checkpoint would get another name than ours.
            callback.last_model_path = os.path.join(callback.dirpath, LAST)
    callbacks.append(LastCheckpoint())


def default_part(key: str) -> Any:
    """Return a class of :data:`DEFAULTS`."""
    return getattr(lit_efficient, DEFAULTS[key])


class CheckSharding(Callback):
    """Refuses a fit under FSDP2 that shards nothing, and warns of rounding. Folders of shards get file hashes."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy  # its type does not tell whether it is parallel
        sum_shards(strategy)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_sharded(trainer, pl_module)
        if not techniques_of(trainer):  # techniques warn themselves
            warn_of_rounding(trainer, pl_module)


class BeginWandb(Callback):
    """Begins the runs of W&B with the first batch of a fit, when all checks have passed."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(logger, LateWandbLogger):
                    logger.begin()


class SaveRunConfig(SaveConfigCallback):
    """Writes the config of a fit into its folder, and logs it where the logger shows configs.

    A resumed run keeps the earlier config of the folder as ``config_1.yaml`` and so on.
    """

    saved: Path | None = None  # the file

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if self.already_saved or not trainer.is_global_zero:
            return
        self.already_saved = True
        config = self.config.clone()
        config["ckpt_path"] = None  # the run's record names it; a run from this config alone begins anew
        text = self.parser.dump(config, skip_none=False)
        whole = yaml.safe_load(text)
        shown = masked(whole)
        if shown != whole:
            text = yaml.safe_dump(shown, sort_keys=False)
        for logger in trainer.loggers:
            if isinstance(logger, LateWandbLogger):
                logger.log_config(by_option(shown))
            elif not isinstance(logger, TensorBoardLogger | CSVLogger):
                logger.log_hyperparams(shown)
        if stage == "fit":
            self.saved = Path(trainer.default_root_dir, self.config_filename)
            write_config(self.saved, text)


def write_config(path: Path, text: str) -> None:
    """Write a config atomically. An earlier, different one is kept under the next free number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        if path.read_text(encoding="utf-8") == text:
            return
        kept = (path.with_name(f"{path.stem}_{number}{path.suffix}") for number in itertools.count(1))
        path.rename(next(name for name in kept if not name.exists()))
    with replacing(path) as file:
        file.write(text.encode())


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the trainer's callbacks. Lightning's type does not declare the attribute."""
    return list(trainer.callbacks)


class _NoAdvertising(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_CHATTER)


def _unless_orphaned(hook: Any, *given: Any) -> None:
    """Call a hook of :mod:`sys`, except for errors of :data:`_ORPHANED`. Forked processes inherit it."""
    error = given[1] if len(given) > 1 else given[0].exc_value
    traceback = getattr(error, "__traceback__", None)
    if traceback is not None:
        frame = traceback.tb_frame
        place = (frame.f_globals.get("__name__"), frame.f_code.co_name)
        if isinstance(error, _ORPHANED.get(place, ())):
            return
    hook(*given)


def quiet() -> None:
    """Silence advertisements and warnings that require no action."""
    from lightning_utilities.core import rank_zero  # the Lightning package that is imported last sets its logger

    if not any(isinstance(existing, _NoAdvertising) for existing in rank_zero.log.filters):
        rank_zero.log.addFilter(_NoAdvertising())
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", f".*{pattern}.*")
    for name in ("excepthook", "unraisablehook"):
        hook = getattr(sys, name)
        if getattr(hook, "func", None) is not _unless_orphaned:
            setattr(sys, name, partial(_unless_orphaned, hook))
