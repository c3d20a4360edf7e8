"""What each technique saves on a fit of one's own: the fit as it is, with each alone, with all, with all but one.

    found = compare(trainer, module, data, with_={"lora": [LoRA(rank=8)], "ema": [EMA()]})
    found["lora"].time, found["lora"].peak_ratio, found["lora"].loss.evidence

Every run is a process of its own; :mod:`~.comparison_runs` says which runs there are, and :mod:`~.estimates` what few
of them can say.
"""

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_efficient.evidence.comparing.comparison import Comparison
from lit_efficient.evidence.comparing.comparison_page import log_to_wandb, write_report
from lit_efficient.evidence.comparing.comparison_runs import Comparing, Schedule
from lit_efficient.evidence.fits import Change, FitSource, LiveFit

With = Mapping[str, Change | Sequence[Any] | Callable[[], list[Any]]]


def compare(
    fit: Any,
    module: Any = None,
    data: Any = None,
    *,
    with_: With,
    steps: int = 100,
    seeds: int = 3,
    minutes: float = 10.0,
    validations: int = 10,
    narrow: float | None = 0.05,
    metric: str | None = None,
    forgetting: Callable[[], Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    cpu_time: bool = False,
    said: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Measure a fit as it is, and with each technique, on this machine.

    Args:
        fit: A Trainer, with ``module`` and ``data``, which are copied and left as they are; or a
            :class:`~lit_efficient.evidence.fits.FitSource`.
        module: The LightningModule.
        data: A DataModule, or loaders, where the module has none.
        with_: By name the callbacks that are added, what makes them, or a
            :class:`~lit_efficient.evidence.fits.Change`.
        steps: Optimizer steps of each training; rounded up to a multiple of ``validations``.
        seeds: Trainings of each variant, each from other random numbers.
        minutes: Begin no run after so many.
        validations: In each training.
        narrow: Relative width of the intervals of all ratios of times that is enough; ``None`` runs nothing for times
            alone.
        metric: What is compared, lower is better; ``None``: the validation loss, or where there is none the training
            loss.
        forgetting: Makes a DataModule or a loader of other held-out data, on which the loss is taken before and after.
        folder: Keeps the report, and the runs, so that another call with the same arguments goes on; ``None`` keeps
            nothing. A Trainer's W&B logger gets the report, too.
        cpu_time: Compare seconds in which the process computes: on a CPU that others use, too.
        said: Gets a line now and then on what runs, and how long it will take.

    Raises:
        ConfigurationError: If an argument is out of its range, or ``folder`` holds another comparison, or one
            of code that has been edited since.

    Example:
        >>> from lit_efficient import EMA, compare
        >>> from lit_efficient.testing import Toy, data, trainer
        >>> found = compare(trainer(), Toy(), data(), with_={"ema": [EMA()]}, steps=4, seeds=1, narrow=None)
        >>> found["ema"].kinds["averages"] == found["ema"].kinds["weights"]
        True
    """
    source = fit if isinstance(fit, FitSource) else LiveFit(fit, module, data)
    with contextlib.ExitStack() as stack:
        place = Path(folder) if folder is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        schedule = Schedule(steps, seeds, minutes, validations, narrow, cpu_time)
        run = Comparing(source, [_change(name, one) for name, one in with_.items()], schedule, place, forgetting, said)
        run.run()
        found = run.result(metric)
        log_to_wandb(found, write_report(found, place), getattr(fit, "loggers", ()))
        return found


def _change(name: str, given: Change | Sequence[Any] | Callable[[], list[Any]]) -> Change:
    if isinstance(given, Change):
        return replace(given, name=name)
    return Change(name, callbacks=given if callable(given) else lambda: copy.deepcopy(list(given)))
