"""One training of a fit, measured: in a process of its own, so that nothing of it is left and nothing before it counts.

    one = measured(source, Change("ema", overlays=("ema",)), steps=40, seed=0, validations=4)
    one.timed, one.peak, one.kinds, one.held_out["val/loss"]

The fit is the user's: all of its callbacks run, but for those that write checkpoints and draw bars. Its loggers are
replaced by one that forgets, and its files go into a folder that is thrown away.
"""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger

from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource
from lit_efficient.evidence.own_process import TaskFailed, own_process
from lit_efficient.evidence.run_watch import WARM_UP, ByteWatch, LastWatch, Measured, StepWatch, warm_up
from lit_efficient.internals.lightning_trainer import set_default_root_dir
from lit_efficient.mechanisms.trials.steps import WRITERS

__all__ = ["VAL_BATCHES", "WARM_UP", "Measured", "measured"]

VAL_BATCHES = 20  # of a validation, where the fit sets no limit of its own


def measured(
    source: FitSource,
    change: Change = AS_IT_IS,
    *,
    steps: int,
    seed: int = 0,
    validations: int = 0,
    counts: bool = True,
    elsewhere: Callable[[], Any] | None = None,
    log: Path | None = None,
    heard: Callable[[int], None] = lambda step: None,
    most_seconds: float | None = None,
    cpu_time: bool = False,
) -> Measured:
    """Train in a process of its own, and measure it. What goes wrong there is a result, too.

    Args:
        source: Makes the fit.
        change: What it has that the fit as it is has not.
        steps: Optimizer steps.
        seed: What random numbers begin with: those of the weights, too, where the fit makes them anew.
        validations: How many there are in the run, at the same distance, the last one at its end; each of at most
            `VAL_BATCHES` batches, where the fit sets no limit of its own.
        counts: Whether to count the bytes of a step, and of a checkpoint.
        elsewhere: Makes a DataModule or loader of other held-out data, on which the module is validated before and
            after.
        log: The file for what the run prints.
        heard: Called with the number of steps so far, about once a second.
        most_seconds: After so many the process is killed.
        cpu_time: Take seconds in which this process computes for those of the clock; of a fit on a CPU only.

    Raises:
        ConfigurationError: If ``steps`` or ``validations`` are out of their range.
        KeyboardInterrupt: As it comes; the process is ended first.
    """
    check_number("measured", "steps", steps, least=1, whole=True)
    check_number("measured", "validations", validations, least=0, whole=True)
    change = replace(change, seed=seed)
    asked = _Asked(steps, seed, validations, counts, elsewhere, cpu_time)
    with tempfile.TemporaryDirectory(prefix="measured-", ignore_cleanup_errors=True) as folder:  # outlives a killed one
        try:
            task = (_measure, source, change, asked, Path(folder))
            return Measured.of(own_process(*task, heard=heard, log=log, most_seconds=most_seconds))
        except TaskFailed as error:
            return Measured(change.name, seed, failed=error.reason, refused=error.refused, late=error.late)


@dataclass
class _Asked:
    steps: int
    seed: int
    validations: int
    counts: bool
    elsewhere: Callable[[], Any] | None
    cpu_time: bool = False


def _measure(
    source: FitSource, change: Change, asked: _Asked, folder: Path, tell: Callable[[int], None]
) -> dict[str, Any]:
    found = Measured(change.name, asked.seed)
    _train(source, change, asked, found, folder, tell)
    return asdict(found)


def _train(
    source: FitSource, change: Change, asked: _Asked, found: Measured, folder: Path, tell: Callable[[int], None]
) -> None:
    fit = _made(source, change, asked, folder)
    trainer: Any = fit.trainer
    before = _validated(fit, asked)
    every = trainer.accumulate_grad_batches
    if before:  # a fit that has validated is no new one
        fit = _made(source, change, asked, folder)
        trainer = fit.trainer
    batches = trainer.limit_val_batches
    if asked.validations:
        times = next(n for n in range(min(asked.validations, asked.steps), 0, -1) if asked.steps % n == 0)
        every *= asked.steps // times
        fit.change({"trainer.val_check_interval": every, "trainer.check_val_every_n_epoch": None})
    else:  # schedulers and callbacks may wait for what a validation logs
        fit.change({"trainer.limit_val_batches": min(1, batches)})
    steps, last = StepWatch(found, tell, asked.cpu_time), LastWatch()
    last.steps = steps
    counting = [ByteWatch(found, warm_up(asked.steps) - 1)] if asked.counts else []
    trainer.callbacks = [steps, *trainer.callbacks, *counting, last]
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.run = partial(steps.validate, trainer, loop.run)
    last.validates = loop.run if asked.validations else None
    last.saves = folder / "end.ckpt" if asked.counts else None
    fit.run()
    steps.write(asked.steps)
    if not asked.validations:
        found.held_out = {}
    found.failed = "" if found.steps else "the fit ended before its first step"
    fit.change({"trainer.limit_val_batches": batches})
    after = _validated(fit, asked)
    found.elsewhere = {name: [value, after[name]] for name, value in before.items() if name in after}


def _made(source: FitSource, change: Change, asked: _Asked, folder: Path) -> Fit:
    """The fit, without what it writes."""
    from lightning.pytorch import seed_everything

    seed_everything(asked.seed, verbose=False)
    fit = source.make(change)
    fit.seed, trainer = asked.seed, fit.trainer
    if trainer.world_size > 1:
        raise ConfigurationError(
            f"{trainer.world_size} processes train, and one is measured: set trainer.devices to 1 (--trainer.devices 1)"
        )
    if asked.cpu_time and trainer.strategy.root_device.type != "cpu":
        raise ConfigurationError("cpu_time: this fit computes on an accelerator, whose time is not the CPU's")
    set_default_root_dir(trainer, str(folder))
    trainer.loggers = [_Forgets(folder)] if trainer.loggers else []
    trainer.callbacks = [
        one for one in trainer.callbacks if not {base.__name__ for base in type(one).__mro__} & WRITERS
    ]
    names = {"max_steps": asked.steps, "max_epochs": -1, "min_steps": None, "num_sanity_val_steps": 0}
    if isinstance(trainer.limit_val_batches, float) and trainer.limit_val_batches == 1.0:  # 1 is one batch
        names["limit_val_batches"] = VAL_BATCHES
    fit.change({f"trainer.{name}": value for name, value in names.items()})
    return fit


def _validated(fit: Fit, asked: _Asked) -> dict[str, float]:
    """The metrics on other held-out data."""
    if asked.elsewhere is None:
        return {}
    data = asked.elsewhere()
    given = {"datamodule" if hasattr(data, "prepare_data") else "dataloaders": data}
    (*rows,) = fit.trainer.validate(fit.module, verbose=False, **given)
    return {name: float(value) for row in rows for name, value in row.items()}


class _Forgets(DummyLogger):
    """A logger that keeps nothing, whose folder can be written to."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = str(folder)

    @property
    def save_dir(self) -> str:
        return self._folder
