"""The last lines of a fit: where its checkpoints are, and at most three commands that make sense next.

A task names its own commands in ``commands_after_fit``, as ``"generate --ckpt {ckpt}"``. ``{output}`` is a new path.
``{prompt}`` are options with a prompt of the run's data, from its methods ``example_prompt`` and ``example_images``.
A task may name the ``export_format`` of its checkpoints, or None for the default of ``export``.
"""

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_efficient.cli.defaults import SaveRunConfig, callbacks_of
from lit_efficient.cli.run_folder import LastCheckpoint
from lit_efficient.distributed.shards import is_deepspeeds
from lit_efficient.files.runs import LATEST, through_latest
from lit_efficient.internals.lightning_wandb import LateWandbLogger
from lit_efficient.mechanisms.adapters.base import leaves_base_out

COMMAND = "python -m lit_efficient"
MOST_COMMANDS = 3


def next_steps(trainer: Trainer, allowed: Sequence[str], program: str, interrupted: str = "") -> list[str]:
    """Return at most three commands that make sense after a fit: to use the model, to export it, to see the curves.

    A task without a command of its own is evaluated first.

    Args:
        trainer: Trainer of the fit.
        allowed: Packages that configs may name: the commands need them again.
        program: The command line, or a script that knows the classes.
        interrupted: Checkpoint of a fit that a signal ended. The command that resumes it comes first.
    """
    best, last, _ = _checkpoints(trainer)
    # export and the other commands read no folder of DeepSpeed's.
    last = "" if is_deepspeeds(Path(last)) else last
    if is_deepspeeds(Path(interrupted)):
        interrupted = ""
    config = "CONFIG"
    for callback in callbacks_of(trainer):
        if isinstance(callback, SaveRunConfig) and callback.saved:
            config = short(callback.saved)
    given = "".join(f" --allow-import {name}" for name in allowed) + f" -c {config}"
    folder = trainer.default_root_dir
    commands = []
    if interrupted:
        commands.append(f"{program} fit{given} --ckpt_path {short(interrupted)}")
    elif last:
        output = short(Path(folder, f"drawn_{trainer.global_step}"))
        lost = _base_is_lost(trainer.lightning_module)
        if not lost:
            filled = {"ckpt": short(best), "output": output, "prompt": _prompt(trainer)}
            own = getattr(trainer.lightning_module, "commands_after_fit", ())
            commands += [f"{COMMAND} {command.format(**filled)}" for command in own]
        if not commands:
            commands += [f"{program} {verb}{given} --ckpt_path {short(best)}" for verb in evaluations(trainer)[:1]]
        output = short(Path(folder, f"export_{trainer.global_step}"))
        format = "peft" if lost else _export_format(trainer.lightning_module)
        kind = "" if format is None else f" --format {format}"
        commands.append(f"{COMMAND} export {short(best)}{kind} --output {output}")
    commands.append(f"{COMMAND} report {short(folder)}")
    return commands[:MOST_COMMANDS]


def _prompt(trainer: Trainer) -> str:
    """Return options of ``generate`` with a prompt from the data of the run."""
    text = ""
    is_chat = False
    images: list[str] = []
    data: Any = getattr(trainer, "datamodule", None)
    if hasattr(data, "example_prompt"):
        with suppress(Exception):  # a stream has no first row; the last lines must not end a run
            text, is_chat = data.example_prompt()
    if hasattr(data, "example_images"):
        with suppress(Exception):
            images = data.example_images()
    shown = "".join(f" --image {short(image)}" for image in images)
    return f"{'--chat ' if is_chat else ''}--prompt {shlex.quote(text or 'TEXT')}{shown}"


def last_word(trainer: Trainer, commands: Sequence[str]) -> str:
    """Return the lines after a finished fit: where its checkpoints are, and the commands that make sense next."""
    best, last, saver = _checkpoints(trainer)
    lines = ["", "Done." if last else "Done. No checkpoint was written."]
    if saver is not None:
        lines.append(f"  best checkpoint  {short(best)}  ({saver.monitor} {float(saver.best_model_score):.4g})")
    if last:
        lines.append(f"  last checkpoint  {short(last)}")
    for logger in _wandb(trainer):
        offline = getattr(logger.experiment, "offline", False)  # W&B would warn that such a run has no URL
        if offline:
            url = None
        else:
            url = getattr(logger.experiment, "url", None)
        if url:
            lines.append(f"  W&B run          {url}")
    lines += [f"  curves           {command}" for command in _curves(trainer)]
    return "\n".join([*lines, *announced(trainer, commands)])


def announced(trainer: Trainer, commands: Sequence[str]) -> list[str]:
    """Return the lines that print the next commands, with ``latest`` as the name of the run's folder if it is that."""
    folder = Path(trainer.default_root_dir)
    latest = folder.parent / LATEST
    name = folder.name
    if os.path.realpath(through_latest(latest)) == os.path.realpath(folder):
        name = LATEST
    return ["Next:", *(f"  {command.replace(folder.name, name)}" for command in commands)]


def last_saved(trainer: Trainer) -> str:
    """Return the line that names the newest checkpoint of a fit that ended early."""
    paths = []
    for saver in trainer.checkpoint_callbacks:
        for kind in ("last", "best"):
            path = getattr(saver, f"{kind}_model_path", "")
            if path and os.path.exists(path):
                paths.append(Path(path))
    if not paths:
        return "No checkpoint was written before."
    return f"The last good checkpoint: {short(max(paths, key=lambda path: path.stat().st_mtime_ns))}"


def _checkpoints(trainer: Trainer) -> tuple[str, str, Any]:
    """Return the best checkpoint, the last one, and the callback that has rated the best, if one has."""
    savers: list[Checkpoint] = list(trainer.checkpoint_callbacks)
    last = next((saver.last_model_path for saver in savers if isinstance(saver, LastCheckpoint)), "")
    last = str(last or trainer.ckpt_path or "")
    if not savers or not last:
        return "", "", None
    for saver in savers:
        best = getattr(saver, "best_model_path", "")
        if getattr(saver, "best_model_score", None) is not None and os.path.exists(best):
            return best, last, saver
    return last, last, None


def _base_is_lost(module: LightningModule) -> bool:
    """Return whether checkpoints have adapters alone, and no file has their base: it was drawn at random."""
    parts = vars(module).values()
    return leaves_base_out(module) and any(getattr(part, "draws_weights", False) for part in parts)


def _export_format(module: LightningModule) -> str | None:
    """Return the format of the export; None for the default, which needs the base of adapters."""
    usual = "peft" if leaves_base_out(module) else None
    format: str | None = getattr(module, "export_format", usual)
    return format


def _curves(trainer: Trainer) -> list[str]:
    """Return the commands of the loggers that show the curves, or upload them."""
    run = os.path.realpath(trainer.default_root_dir)
    commands = []
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and find_spec("tensorboard"):
            # Of logs in the run's folder, the runs of the root are shown together.
            within = os.path.realpath(logger.log_dir).startswith(run)
            commands.append(f"tensorboard --logdir {short(os.path.dirname(run) if within else logger.log_dir)}")
    for wandb in _wandb(trainer):
        if getattr(wandb.experiment, "offline", False):
            commands.append(f"wandb sync {short(Path(wandb.experiment.dir).parent)}")
    return list(dict.fromkeys(commands))


def _wandb(trainer: Trainer) -> list[WandbLogger]:
    """Return the loggers of W&B whose runs have begun."""
    begun = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
    return [logger for logger in begun if not isinstance(logger, LateWandbLogger) or logger.has_begun]


def evaluations(trainer: Trainer) -> list[str]:
    """Return the subcommands for which the module and its data have something to run."""
    module = trainer.lightning_module
    sources = [source for source in (module, getattr(trainer, "datamodule", None)) if source is not None]
    hooks = {
        "validate": ("validation_step", "val_dataloader"),
        "test": ("test_step", "test_dataloader"),
        "predict": ("predict_step", "predict_dataloader"),
    }
    found = []
    for verb, (step, loader) in hooks.items():
        giving = [source for source in sources if is_overridden(loader, source)]
        if is_overridden(step, module) and giving and not _is_empty(trainer, giving[-1], loader):
            found.append(verb)
    return found


def _is_empty(trainer: Trainer, source: object, loader: str) -> bool:
    """Return whether a source has no loaders of a kind, as data of which nothing is held out."""
    held_out_nothing = not sum(trainer.num_val_batches) and trainer.limit_val_batches != 0
    return held_out_nothing and getattr(source, loader)() == []


def short(path: str | Path) -> str:
    """Return a path for the shell, relative to the working directory if it is below it."""
    relative = os.path.relpath(path)
    return shlex.quote(str(path) if relative.startswith("..") else relative)
