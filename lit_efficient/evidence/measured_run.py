"""Measure one training of a fit, in a separate process, so that earlier runs have no effect and nothing is left.

    one = measured(source, Change("ema", overlays=("ema",)), steps=40, seed=0, validations=4)
    one.timed, one.peak, one.kinds, one.held_out["val/loss"]

All callbacks of the fit run, except those that write checkpoints and draw progress bars. Loggers are replaced by one
that keeps nothing, and files go into a temporary folder.
"""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from lightning.pytorch import seed_everything
from lightning.pytorch.loggers.logger import DummyLogger

from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource
from lit_efficient.evidence.own_process import TaskFailed, own_process
from lit_efficient.evidence.run_watch import WARM_UP, ByteWatch, LastWatch, Measured, StepWatch, warm_up
from lit_efficient.internals.lightning_trainer import set_default_root_dir
from lit_efficient.mechanisms.trials.steps import WRITERS

__all__ = ["VAL_BATCHES", "WARM_UP", "Measured", "measured"]

VAL_BATCHES = 20  # of a validation, if the fit sets no limit


def measured(
    source: FitSource,
    change: Change = AS_IT_IS,
    *,
    steps: int,
    seed: int = 0,
    validations: int = 0,
    counts: bool = True,
    elsewhere: Callable[[], object] | None = None,
    log: Path | None = None,
    heard: Callable[[int], None] = lambda step: None,
    most_seconds: float | None = None,
    cpu_time: bool = False,
) -> Measured:
    """Train in a separate process and return the measurements. A failure of the training is a result too.

    Args:
        source: Makes the fit.
        change: Change of the fit.
        steps: Number of optimizer steps.
        seed: Seed of the run, and of the initial weights if the source creates them anew.
        validations: Number of validations in the run, evenly spaced, the last one at the end. Each has at most
            `VAL_BATCHES` batches, if the fit sets no limit.
        counts: Count the bytes of a step and of a checkpoint.
        elsewhere: Function that creates a DataModule or loader of other held-out data. The module is validated on it
            before and after.
        log: File for the output of the run.
        heard: Function that receives the number of steps so far, about once a second.
        most_seconds: Time after which the process is killed.
        cpu_time: Take the CPU time of the process instead of elapsed time. Only for a fit on a CPU.

    Raises:
        ConfigurationError: If ``steps`` or ``validations`` are out of range.
        KeyboardInterrupt: If the user interrupts. The process is ended first.
    """
    check_number("measured", "steps", steps, least=1, whole=True)
    check_number("measured", "validations", validations, least=0, whole=True)
    asked = _Asked(steps, seed, validations, counts, elsewhere, cpu_time)
    # A killed process may still write into the folder while it is removed.
    with tempfile.TemporaryDirectory(prefix="measured-", ignore_cleanup_errors=True) as folder:
        task = (_measure, source, replace(change, seed=seed), asked, Path(folder))
        # A crash of the training ends the child process only, and becomes a result.
        try:
            return Measured.of(own_process(*task, heard=heard, log=log, most_seconds=most_seconds))
        except TaskFailed as error:
            return Measured(change.name, seed, failed=error.reason, refused=error.refused, late=error.late)


@dataclass
class _Asked:
    steps: int
    seed: int
    validations: int
    counts: bool
    elsewhere: Callable[[], object] | None
    cpu_time: bool


def _measure(
    source: FitSource, change: Change, asked: _Asked, folder: Path, tell: Callable[[int], None]
) -> dict[str, object]:
    found = Measured(change.name, asked.seed)
    fit = _made(source, change, asked, folder)
    before = _validated(fit, asked)
    if before:
        # The fit that has validated is not in its first state any more.
        fit = _made(source, change, asked, folder)
    trainer = fit.trainer
    batches = trainer.limit_val_batches
    if asked.validations:
        # The largest possible number of validations that divides the steps evenly.
        times = next(n for n in range(min(asked.validations, asked.steps), 0, -1) if asked.steps % n == 0)
        interval = trainer.accumulate_grad_batches * asked.steps // times
        fit.change({"trainer.val_check_interval": interval, "trainer.check_val_every_n_epoch": None})
    else:
        # Schedulers and callbacks may wait for a metric of the validation.
        fit.change({"trainer.limit_val_batches": min(1, batches)})
    steps = StepWatch(found, tell, asked.cpu_time)
    # Wrapping the loop catches every validation, whatever triggers it.
    validation = trainer.fit_loop.epoch_loop.val_loop
    validates = partial(steps.validate, trainer, validation.run)
    validation.run = validates
    last = LastWatch(steps)
    trainer.callbacks = [steps, *trainer.callbacks]
    if asked.counts:
        last.saves = folder / "end.ckpt"
        trainer.callbacks.append(ByteWatch(found, warm_up(asked.steps) - 1))
    if asked.validations:
        last.validates = validates
    trainer.callbacks.append(last)
    fit.run()
    steps.write(asked.steps)
    if not asked.validations:
        found.held_out = {}
    if not found.steps:
        found.failed = "the fit ended before its first step"
    # The validation on other data has the limit of the fit.
    fit.change({"trainer.limit_val_batches": batches})
    after = _validated(fit, asked)
    found.elsewhere = {name: [value, after[name]] for name, value in before.items() if name in after}
    return asdict(found)


def _made(source: FitSource, change: Change, asked: _Asked, folder: Path) -> Fit:
    """Make the fit without its checkpoints, progress bars and logs."""
    seed_everything(asked.seed, verbose=False)
    fit = source.make(change)
    fit.seed = asked.seed
    trainer = fit.trainer
    if trainer.world_size > 1:
        raise ConfigurationError(
            f"the fit has {trainer.world_size} processes, but only one can be measured: set trainer.devices to 1 "
            "(--trainer.devices 1)"
        )
    if asked.cpu_time and trainer.strategy.root_device.type != "cpu":
        raise ConfigurationError("cpu_time: this fit runs on an accelerator, whose time is not CPU time")
    set_default_root_dir(trainer, str(folder))
    trainer.loggers = [_Forgets(folder)] if trainer.loggers else []
    # Writing checkpoints and drawing bars would be measured too.
    trainer.callbacks = [
        one for one in trainer.callbacks if not {base.__name__ for base in type(one).__mro__} & WRITERS
    ]
    settings = {
        "trainer.max_steps": asked.steps,
        "trainer.max_epochs": -1,
        "trainer.min_steps": None,
        "trainer.num_sanity_val_steps": 0,
    }
    # 1.0 stands for all batches, and 1 for one batch.
    if isinstance(trainer.limit_val_batches, float) and trainer.limit_val_batches == 1.0:
        settings["trainer.limit_val_batches"] = VAL_BATCHES
    fit.change(settings)
    return fit


def _validated(fit: Fit, asked: _Asked) -> dict[str, float]:
    """Return the metrics on the other held-out data; empty if there is none."""
    found: dict[str, float] = {}
    if asked.elsewhere is not None:
        data = asked.elsewhere()
        argument = "dataloaders"
        if hasattr(data, "prepare_data"):
            argument = "datamodule"
        for row in fit.trainer.validate(fit.module, verbose=False, **{argument: data}):
            found.update({name: float(value) for name, value in row.items()})
    return found


class _Forgets(DummyLogger):
    """A logger that keeps nothing but has a folder that callbacks can write to."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = str(folder)

    @property
    def save_dir(self) -> str:
        return self._folder
