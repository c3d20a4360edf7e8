"""Measure the effect of techniques on a fit: the fit as it is, with each technique, with all, and with all but one.

    found = compare(trainer, module, data, with_={"lora": [LoRA(rank=8)], "ema": [EMA()]})
    found["lora"].time, found["lora"].peak_ratio, found["lora"].loss.evidence

Every run has a separate process. :mod:`~.comparison_runs` defines the runs, :mod:`~.estimates` the statistics.
"""

import copy
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_efficient.evidence.comparing.comparison import Comparison
from lit_efficient.evidence.comparing.comparison_page import log_to_wandb, write_report
from lit_efficient.evidence.comparing.comparison_runs import Comparing, Schedule
from lit_efficient.evidence.fits import Change, FitSource, LiveFit

Added: TypeAlias = Change | Sequence[Callback] | Callable[[], list[Callback]]


def compare(
    fit: Trainer | FitSource,
    module: LightningModule | None = None,
    data: object = None,
    *,
    with_: Mapping[str, Added],
    steps: int = 100,
    seeds: int = 3,
    minutes: float = 10.0,
    validations: int = 10,
    narrow: float | None = 0.05,
    metric: str | None = None,
    forgetting: Callable[[], object] | None = None,
    folder: str | os.PathLike[str] | None = None,
    cpu_time: bool = False,
    said: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Measure a fit as it is and with each technique, on this machine.

    Args:
        fit: A Trainer, with ``module`` and ``data``, of which copies are trained; or a
            :class:`~lit_efficient.evidence.fits.FitSource`.
        module: The LightningModule.
        data: A DataModule or loaders, unless the module has its own.
        with_: For each variant its name and the callbacks to add, a function that creates them, or a
            :class:`~lit_efficient.evidence.fits.Change`.
        steps: Optimizer steps of each training, rounded up to a multiple of ``validations``.
        seeds: Number of trainings of each variant, each with another seed.
        minutes: Time after which no new run begins.
        validations: Number of validations in each training.
        narrow: Relative width of the intervals of all time ratios at which the runs end. ``None`` makes no extra runs
            to measure times.
        metric: Metric to compare; lower is better. ``None`` takes the validation loss, or without one the training
            loss.
        forgetting: Function that creates a DataModule or a loader of other held-out data. The loss on it is measured
            before and after each training.
        folder: Folder for the report and the runs. Another call with the same arguments continues from it. ``None``
            keeps nothing. The report is also logged to the W&B logger of a Trainer.
        cpu_time: Compare the CPU time of the process instead of the elapsed time, for a CPU that other programs use.
        said: Function that receives lines of progress.

    Raises:
        ConfigurationError: If an argument is out of its range, or ``folder`` holds another comparison, or a comparison
            of code that has changed since.

    Example:
        >>> from lit_efficient import EMA, compare
        >>> from lit_efficient.testing import Toy, data, trainer
        >>> found = compare(trainer(), Toy(), data(), with_={"ema": [EMA()]}, steps=4, seeds=1, narrow=None)
        >>> found["ema"].kinds["averages"] == found["ema"].kinds["weights"]
        True
    """
    source = fit if isinstance(fit, FitSource) else LiveFit(fit, module, data)
    changes = [_change(name, added) for name, added in with_.items()]
    # Wrong arguments are refused before anything runs.
    schedule = Schedule(steps, seeds, minutes, validations, narrow, cpu_time)
    # Without a folder, runs and report are needed only until they are logged.
    with tempfile.TemporaryDirectory() as temporary:
        run = Comparing(source, changes, schedule, Path(folder or temporary), forgetting, said)
        run.run()
        found = run.result(metric)
        log_to_wandb(found, write_report(found, run.folder), getattr(fit, "loggers", ()))
    return found


def _change(name: str, added: Added) -> Change:
    if isinstance(added, Change):
        return replace(added, name=name)
    if callable(added):
        return Change(name, callbacks=added)
    # A callback must not be shared between runs, since it keeps state.
    return Change(name, callbacks=lambda: copy.deepcopy(list(added)))
