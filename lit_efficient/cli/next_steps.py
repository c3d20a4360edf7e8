"""The last lines of a fit: where its checkpoints lie, and the commands that one would type now.

A task names its own ones in ``commands_after_fit``, as ``"generate --ckpt {ckpt}"``; ``{output}`` is a new path, too.
"""

import os
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_efficient.cli.run import SaveRunConfig, callbacks_of
from lit_efficient.cli.run_folder import LastCheckpoint
from lit_efficient.distributed.shards import is_deepspeeds
from lit_efficient.mechanisms.adapters.base import leaves_base_out

COMMAND = "python -m lit_efficient"


def next_steps(trainer: Trainer, allowed: Sequence[str], program: str, interrupted: str = "") -> list[str]:
    """The commands that make sense after a fit.

    They need again what the user allowed to import, and ``program`` may be a script that knows its classes. Where a
    signal has ``interrupted`` the fit, resuming that checkpoint comes first.
    """
    best, *saved, _ = _checkpoints(trainer)
    last, interrupted = ("" if is_deepspeeds(Path(path)) else path for path in (*saved, interrupted))
    saver: Any = next((c for c in callbacks_of(trainer) if isinstance(c, SaveRunConfig)), None)
    config = short(saver.saved) if saver and saver.saved else "CONFIG"
    given = f"{''.join(f' --allow-import {name}' for name in allowed)} -c {config}"
    folder, commands = trainer.default_root_dir, []
    if last and not interrupted:
        output = short(Path(folder, f"drawn_{trainer.global_step}"))
        lost = _base_is_nowhere(trainer.lightning_module)
        own = () if lost else getattr(trainer.lightning_module, "commands_after_fit", ())
        commands += [f"{COMMAND} {command.format(ckpt=short(best), output=output)}" for command in own]
        commands += [f"{program} {verb}{given} --ckpt_path {short(best)}" for verb in _evaluations(trainer)]
        output = short(Path(folder, f"export_{trainer.global_step}"))
        commands.append(f"{COMMAND} export {short(best)}{' --format peft' if lost else ''} --output {output}")
    commands.append(f"{COMMAND} report {short(folder)}")
    if interrupted:
        commands.insert(0, f"{program} fit{given} --ckpt_path {short(interrupted)}")
    elif last:
        commands.append(f"{program} fit{given} --ckpt_path {short(last)}{_twice_as_long(trainer)}")
    return commands + _of_loggers(trainer)


def last_word(trainer: Trainer, commands: Sequence[str]) -> str:
    """Say where the checkpoints of a finished fit lie, and what to type next."""
    best, last, rated = _checkpoints(trainer)
    lines = ["", "Done." if last else "Done. No checkpoint was written."]
    if rated is not None:
        lines.append(f"  best checkpoint  {short(best)}  ({rated.monitor} {float(rated.best_model_score):.4g})")
    lines += [f"  last checkpoint  {short(last)}"] if last else []
    lines += [f"  W&B run          {url}" for url in _addresses(trainer)]
    return "\n".join([*lines, "Next:", *(f"  {command}" for command in commands)])


def last_saved(trainer: Trainer) -> str:
    """Say where the newest checkpoint of a fit lies that has ended before its time."""
    paths = [
        getattr(saver, f"{kind}_model_path", "") for saver in trainer.checkpoint_callbacks for kind in ("last", "best")
    ]
    whole = [Path(path) for path in paths if path and os.path.exists(path)]
    if not whole:
        return "No checkpoint was written before."
    return f"The last good checkpoint: {short(max(whole, key=lambda path: path.stat().st_mtime_ns))}"


def _checkpoints(trainer: Trainer) -> tuple[str, str, Any]:
    """The best checkpoint, the last one, and the callback that knows the best, if one does."""
    savers: list[Any] = list(trainer.checkpoint_callbacks)
    last = next((c.last_model_path for c in savers if isinstance(c, LastCheckpoint)), "") or trainer.ckpt_path or ""
    if not savers or not last:
        return "", "", None
    rated = [
        c for c in savers if getattr(c, "best_model_score", None) is not None and os.path.exists(c.best_model_path)
    ]
    return (rated[0].best_model_path if rated else str(last)), str(last), (rated[0] if rated else None)


def _base_is_nowhere(module: Any) -> bool:
    """Whether checkpoints hold adapters alone, and no file what they stand beside: it was drawn at random."""
    parts = vars(module).values()
    return leaves_base_out(module) and any(getattr(part, "draws_weights", False) for part in parts)


def _of_loggers(trainer: Trainer) -> list[str]:
    """What shows the curves: all runs of the root where the logs lie in the run's folder, else the logger's own."""
    folders = [logger.log_dir for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    run = os.path.realpath(trainer.default_root_dir)
    inside = [os.path.realpath(folder).startswith(run) for folder in folders]
    shown = dict.fromkeys(os.path.dirname(run) if within else folder for within, folder in zip(inside, folders))
    boards = [f"tensorboard --logdir {short(folder)}" for folder in shown] if find_spec("tensorboard") else []
    offline = [logger for logger in _wandb(trainer) if getattr(logger.experiment, "offline", False)]
    return boards + [f"wandb sync {short(Path(logger.experiment.dir).parent)}" for logger in offline]


def _addresses(trainer: Trainer) -> list[str]:
    return [str(url) for logger in _wandb(trainer) if (url := getattr(logger.experiment, "url", None))]


def _wandb(trainer: Trainer) -> list[WandbLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]


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


def short(path: str | Path) -> str:
    """A path for the shell, relative to here if it lies below."""
    relative = os.path.relpath(path)
    return shlex.quote(str(path) if relative.startswith("..") else relative)
