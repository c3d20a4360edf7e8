"""What every run of the command line gets: safe checkpoints, its config beside them, a last word."""

import logging
import os
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

import lit_efficient
from lit_efficient.application import check_sharded
from lit_efficient.cli.run_folder import LAST, LastCheckpoint, RunFolder
from lit_efficient.files.atomic_file import replacing

# Beginnings of messages that advertise something, or tell what is not there.
_CHATTER = ("💡", "TPU available: False", "HPU available: False", "Loading `train_dataloader` to estimate")
# All that the command line adds by itself, where a run has none of the kind; no other technique is named in its code.
DEFAULTS = {
    "checkpoints": "SafeCheckpointIO",
    "signals": "SignalCheckpoint",
    "divergence": "NonFiniteGuard",
    "ScheduleFreeAdamW": "ScheduleFree",  # beside an optimizer of that name
}
COMMAND = "python -m lit_efficient"
# Those of folders: they are the command line's to choose.
_NOISE = (
    "does not have many workers",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "The dirpath has changed from",
    "Checkpoint directory .* exists and is not empty",
    "Experiment logs directory",
    "could not find the monitored key",  # before a validation has run; after one it is an error
)


def add_default_parts(
    trainer_config: dict[str, Any],
    subcommand: str | None,
    optimizer: str = "",
    folder: RunFolder | None = None,
    checked: tuple[int, ...] | None = None,
) -> None:
    """Give a run the CheckpointIO that can be trusted and a ``fit`` the answers to signals and to NaN, or keep its own.

    A schedule-free optimizer gets the callback that switches its weights.

    Args:
        trainer_config: Arguments of the trainer, instantiated; changed in place.
        subcommand: Which subcommand runs.
        optimizer: Class path of the config's optimizer, if it names one.
        folder: Where a fit writes.
        checked: The state of the checkpoint's file when its checksums were compared.
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
    callbacks = _as_list(trainer_config.get("callbacks"))
    kind = optimizer.rsplit(".", 1)[-1]
    for key in ("signals", "divergence", kind) if subcommand == "fit" else ():
        if key in DEFAULTS and not any(isinstance(callback, default_part(key)) for callback in callbacks):
            callbacks.append(default_part(key)())
            if key == kind:
                rank_zero_info(
                    f"optimizer: {kind} trains with other weights than it validates and saves: added the callback "
                    f"{DEFAULTS[key]}(), which switches them"
                )
    trainer_config["callbacks"] = callbacks


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
    """Refuse a fit under FSDP2 that shards nothing, with techniques and without."""

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        check_sharded(trainer, pl_module)


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


def last_word(trainer: Trainer, allowed: Sequence[str] = ()) -> str:
    """Say where the checkpoints of a finished fit lie and what to type next.

    Args:
        trainer: The trainer after ``fit``.
        allowed: What the user gave as ``--allow-import``; the commands need it again.
    """
    sync = [f"  wandb sync {_short(folder)}" for folder in _offline_runs(trainer)]
    savers: list[Any] = list(trainer.checkpoint_callbacks)
    last = next((c.last_model_path for c in savers if isinstance(c, LastCheckpoint)), "") or trainer.ckpt_path
    if not savers or not last:
        return "\n".join(["", "Done. No checkpoint was written.", *sync])
    rated = [
        c for c in savers if getattr(c, "best_model_score", None) is not None and os.path.exists(c.best_model_path)
    ]
    best = rated[0].best_model_path if rated else last
    lines = ["", "Done."]
    if rated:
        lines.append(f"  best checkpoint  {_short(best)}  ({rated[0].monitor} {float(rated[0].best_model_score):.4g})")
    lines += [f"  last checkpoint  {_short(last)}", "Next:"]
    saver: Any = next((c for c in callbacks_of(trainer) if isinstance(c, SaveRunConfig)), None)
    config = _short(saver.saved) if saver and saver.saved else "CONFIG"
    given = f"{''.join(f' --allow-import {name}' for name in allowed)} -c {config}"
    lines += [f"  {COMMAND} {verb}{given} --ckpt_path {_short(best)}" for verb in _evaluations(trainer)]
    lines.append(f"  {COMMAND} fit{given} --ckpt_path {_short(last)}{_twice_as_long(trainer)}")
    return "\n".join([*lines, *sync])


def last_saved(trainer: Trainer) -> str:
    """Say where the newest checkpoint of a fit lies that has ended before its time."""
    paths = [
        getattr(saver, f"{kind}_model_path", "") for saver in trainer.checkpoint_callbacks for kind in ("last", "best")
    ]
    whole = [Path(path) for path in paths if path and os.path.exists(path)]
    if not whole:
        return "No checkpoint was written before."
    return f"The last good checkpoint: {_short(max(whole, key=lambda path: path.stat().st_mtime_ns))}"


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the trainer's callbacks, which its type does not declare."""
    return list(trainer.callbacks)


def _evaluations(trainer: Trainer) -> list[str]:
    """Subcommands for which the module and its data have something to run."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    hooks = {
        "validate": ("validation_step", "val"),
        "test": ("test_step", "test"),
        "predict": ("predict_step", "predict"),
    }
    sources = [source for source in (module, data) if source is not None]
    return [
        verb
        for verb, (step, stage) in hooks.items()
        if is_overridden(step, module) and any(is_overridden(f"{stage}_dataloader", source) for source in sources)
    ]


def _twice_as_long(trainer: Trainer) -> str:
    """The option that lets a finished run go on; a run without an end needs none."""
    reached = {"max_steps": trainer.global_step, "max_epochs": trainer.current_epoch}
    limits = {name: (getattr(trainer, name) or -1, least) for name, least in reached.items()}
    return "".join(f" --trainer.{name} {2 * max(limit, n)}" for name, (limit, n) in limits.items() if limit > 0)


def _offline_runs(trainer: Trainer) -> list[Path]:
    loggers = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
    return [Path(logger.experiment.dir).parent for logger in loggers if getattr(logger.experiment, "offline", False)]


def _short(path: str | Path) -> str:
    relative = os.path.relpath(path)
    return shlex.quote(str(path) if relative.startswith("..") else relative)


class _NoAdvertising(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_CHATTER)


def quiet() -> None:
    """Silence advertisements and warnings that ask for nothing."""
    from lightning_utilities.core import rank_zero  # its logger is that of the Lightning namespace imported last

    logger = rank_zero.log
    if not any(isinstance(existing, _NoAdvertising) for existing in logger.filters):
        logger.addFilter(_NoAdvertising())
    for pattern in _NOISE:
        warnings.filterwarnings("ignore", f".*{pattern}.*")
