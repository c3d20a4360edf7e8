"""What every run of the command line gets: safe checkpoints, its config beside them, figures and events."""

import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.plugins import CheckpointIO, Precision
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

import lit_efficient
from lit_efficient.application import check_sharded
from lit_efficient.cli.run_folder import LAST, LastCheckpoint, RunFolder
from lit_efficient.cli.secrets import masked
from lit_efficient.declaration import techniques_of
from lit_efficient.distributed.ranks import report_waiting
from lit_efficient.distributed.shards import sum_shards
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.atomic_file import replacing
from lit_efficient.internals.wraps import inner_method
from lit_efficient.technique import warn_of_rounding

# Beginnings of messages that advertise something, or tell what is not there.
_CHATTER = ("💡", "TPU available: False", "HPU available: False", "Loading `train_dataloader` to estimate")
# All that the command line adds by itself, where a run has none of the kind; no other technique is named in its code.
DEFAULTS = {
    "checkpoints": "SafeCheckpointIO",
    "signals": "SignalCheckpoint",
    "metrics": "RunMetrics",
    "divergence": "NonFiniteGuard",
    "ranks": "RankWatch",  # where there are several processes
    "bar": "ThroughputBar",  # where the output is no terminal: plain lines
    "ScheduleFreeAdamW": "ScheduleFree",  # beside an optimizer of that name
    "prefetch": "DevicePrefetcher",  # where a fit's device is a GPU
}
_NOISE = (
    "does not have many workers",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "The dirpath has changed from",
    "Checkpoint directory .* exists and is not empty",
    "Experiment logs directory",
    "could not find the monitored key",  # before a validation has run; after one it is an error
)
# What loader workers raise that nobody waits for any more: as a batch is served, and as an iterator is deleted.
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
    """Give a run the CheckpointIO that can be trusted and a ``fit`` the answers to signals and to NaN, or keep its own.

    A schedule-free optimizer gets the callback that switches its weights. ``trainer_config`` is changed in place;
    ``optimizer`` is the class path of the config's, ``checked`` the state of the checkpoint's file when its checksums
    were compared.
    """
    if folder:
        trainer_config["default_root_dir"] = str(folder.path)
        trainer_config["callbacks"] = [folder, *_as_list(trainer_config.get("callbacks"))]
        _place_checkpoints(trainer_config, folder.path)
    plugins = _as_list(trainer_config.get("plugins"))
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins = trainer_config["plugins"] = [*plugins, default_part("checkpoints")()]
    for plugin in plugins:
        if isinstance(plugin, default_part("checkpoints")):
            plugin.checked = checked
        if isinstance(plugin, Precision) and (given := trainer_config.get("precision")) is not None:
            name = type(plugin).__name__
            raise ConfigurationError(
                f"trainer.precision: {name} in trainer.plugins takes its place, got {given!r}: set it to null"
            )
    callbacks = _as_list(trainer_config.get("callbacks"))
    kind = optimizer.rsplit(".", 1)[-1]
    for key in ("signals", "metrics", "divergence", "ranks", kind) if subcommand == "fit" else ():
        part = default_part(key) if key in DEFAULTS else None
        if part and not any(isinstance(callback, getattr(part, "kind", part)) for callback in callbacks):
            callbacks.append(part())
            if key == kind:
                rank_zero_info(
                    f"optimizer: {kind} trains with other weights than it validates and saves: added the callback "
                    f"{DEFAULTS[key]}(), which switches them"
                )
    bars = trainer_config.get("enable_progress_bar") is not False and not (sys.stdout and sys.stdout.isatty())
    if bars and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        callbacks.append(default_part("bar")())
    trainer_config["callbacks"] = callbacks


class LeftOut(Callback):
    """Stands in a config for a part of :data:`DEFAULTS` that is not to be added."""

    def __init__(self, name: str) -> None:
        self.name = name


def prefetch(trainer: Trainer, subcommand: str | None) -> None:
    """Let a fit on a GPU copy its next batch while it computes, unless its config says how, or that it should not."""
    part, callbacks = default_part("prefetch"), callbacks_of(trainer)
    left_out = any(isinstance(one, LeftOut) and one.name == part.__name__ for one in callbacks)
    there = left_out or any(isinstance(one, part) for one in callbacks)
    if subcommand == "fit" and trainer.strategy.root_device.type == "cuda" and not there:
        trainer.callbacks.insert(0, part())  # type: ignore[attr-defined]  # its type does not declare them


def setup_environment(self: Any) -> None:
    """In the place of a strategy's method, which waits in silence for processes that have not started."""
    with report_waiting(self.cluster_environment, "as long as trainer.strategy's `timeout` says"):
        inner_method(self, "setup_environment", setup_environment)()


def _place_checkpoints(trainer_config: dict[str, Any], folder: Path) -> None:
    """Let checkpoints lie in the run's folder, and the last step be among them."""
    if trainer_config.get("enable_checkpointing") is False:
        return
    callbacks = trainer_config["callbacks"]
    if not any(isinstance(callback, Checkpoint) for callback in callbacks):
        callbacks.append(ModelCheckpoint(filename=Path(LAST).stem, enable_version_counter=False))
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = os.path.realpath(folder)
            callback.last_model_path = os.path.join(callback.dirpath, LAST)  # or its own gets another name beside ours
    callbacks.append(LastCheckpoint())


def default_part(key: str) -> Any:
    """The class of :data:`DEFAULTS`."""
    return getattr(lit_efficient, DEFAULTS[key])


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


class CheckSharding(Callback):
    """Refuse a fit under FSDP2 that shards nothing, and warn of what is rounded, with techniques and without.

    Folders of shards get the hashes of their files.
    """

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        sum_shards(trainer.strategy)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        check_sharded(trainer, pl_module)
        if not techniques_of(trainer):  # which say it themselves
            warn_of_rounding(trainer, pl_module)


class SaveRunConfig(SaveConfigCallback):
    """Write the config of a fit into its folder, and log it where the logger shows configs.

    A resumed run keeps the config that lies there as ``config_1.yaml`` and so on.
    """

    saved: Path | None = None  # where it was written

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if self.already_saved or not trainer.is_global_zero:
            return
        self.already_saved = True
        config = self.config.clone()
        config["ckpt_path"] = None  # the run's record names it; a run from this config alone begins anew
        text = self.parser.dump(config, skip_none=False)
        if (shown := masked(whole := yaml.safe_load(text))) != whole:
            text = yaml.safe_dump(shown, sort_keys=False)
        for logger in trainer.loggers:
            if not isinstance(logger, TensorBoardLogger | CSVLogger):
                logger.log_hyperparams(yaml.safe_load(text))
        if stage == "fit":
            self.saved = Path(trainer.default_root_dir, self.config_filename)
            write_config(self.saved, text)


def write_config(path: Path, text: str) -> None:
    """Write a config in one piece; one that is there and differs is kept under the next free number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        if path.read_text(encoding="utf-8") == text:
            return
        number = 1
        while (kept := path.with_name(f"{path.stem}_{number}{path.suffix}")).exists():
            number += 1
        path.rename(kept)
    with replacing(path) as file:
        file.write(text.encode())


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the trainer's callbacks, which its type does not declare."""
    return list(trainer.callbacks)


class _NoAdvertising(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_CHATTER)


def _unless_orphaned(hook: Any, *given: Any) -> None:
    """Call a hook of :mod:`sys`, but not for what :data:`_ORPHANED` lists; processes that are forked inherit it."""
    error = given[1] if len(given) > 1 else given[0].exc_value
    frame = error and error.__traceback__ and error.__traceback__.tb_frame
    if not frame or not isinstance(error, _ORPHANED.get((frame.f_globals.get("__name__"), frame.f_code.co_name), ())):
        hook(*given)


def quiet() -> None:
    """Silence advertisements and warnings that ask for nothing."""
    from lightning_utilities.core import rank_zero  # its logger is that of the Lightning namespace imported last

    if not any(isinstance(existing, _NoAdvertising) for existing in rank_zero.log.filters):
        rank_zero.log.addFilter(_NoAdvertising())
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", f".*{pattern}.*")
    for name in ("excepthook", "unraisablehook"):
        if getattr(hook := getattr(sys, name), "func", None) is not _unless_orphaned:
            setattr(sys, name, partial(_unless_orphaned, hook))
