"""Records on a module: the transforms that it has undergone, and the wraps and reports of the present run.

The ledger stays with the module, so that a second run does not transform it twice. The session ends with the run.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lit_efficient.declaration import Declaration, Report, Wrap, in_order
from lit_efficient.errors import diagnostic

_LEDGER = "_lit_efficient_ledger"
_SESSION = "_lit_efficient_session"


@dataclass
class Session:
    """What one run has put on a module.

    It holds primitives and plain functions only, so that the module can still be deep-copied.

    Args:
        trainer: ``id`` of the trainer.
        wraps: The wraps on the module's methods, in the order in which they were put on.
        reports: Reports of optimizer rewrites, by the technique's name.
        optimizers: Optimizers, only while they are rewritten: no deep copy of the module should contain them.
        schedulers: Learning-rate schedulers, only while optimizers are rewritten.
        around_step: Functions that return contexts for ``training_step``. Code that adds one wraps the method.
        at_end: Functions that are called with the module when the run ends.
        has_stepped: Whether an optimizer after whose steps techniques change weights has stepped.
        first_step: ``trainer.global_step`` at the start of training; None before it.
        first_batch: Number of batches of earlier runs, as ``total_batch_idx``.
        has_ended_epoch: Whether an epoch of this run has ended.
        loss_is_checked: Whether the loss of a step was found to follow the loss protocol.
    """

    trainer: int
    wraps: list[Wrap] = field(default_factory=list)
    reports: dict[str, Report] = field(default_factory=dict)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    around_step: list[Callable[[], AbstractContextManager[None]]] = field(default_factory=list)
    at_end: list[Callable[[nn.Module], None]] = field(default_factory=list)
    loss_is_checked: bool = field(default=False, init=False)
    has_stepped: bool = field(default=False, init=False)
    first_step: int | None = field(default=None, init=False)
    first_batch: int = field(default=0, init=False)
    has_ended_epoch: bool = field(default=False, init=False)


@dataclass(frozen=True)
class Entry:
    """One line of the ledger: a transform that a module has undergone."""

    record: dict[str, Any]
    report: Report
    kind: type[Declaration]
    asked: dict[str, Any]  # arguments before the transform, which may read further ones from a file


def ledger(module: nn.Module) -> list[Entry]:
    """Return the transforms that ``module`` has undergone, oldest first: the list itself, if there is one."""
    return module.__dict__.get(_LEDGER, [])


def start_ledger(module: nn.Module) -> list[Entry]:
    """Return the ledger of ``module``, which is created if there is none."""
    return module.__dict__.setdefault(_LEDGER, [])


def session_of(module: nn.Module) -> Session | None:
    """Return the session of the present run, or ``None`` outside of a run."""
    return module.__dict__.get(_SESSION)


def start_session(module: nn.Module, session: Session) -> Session:
    """Keep ``session`` on ``module`` unless it has one; return the one that it has."""
    return module.__dict__.setdefault(_SESSION, session)


def end_session(module: nn.Module) -> Session | None:
    """Take the session from ``module`` and return it."""
    return module.__dict__.pop(_SESSION, None)


def step_like(
    inner: Callable[..., object],
    on_batch_and_index: Callable[..., object],
    on_batch: Callable[..., object],
    on_iterator: Callable[..., object],
) -> Callable[..., Any]:
    """Return the wrap of ``training_step`` that takes the arguments of ``inner``.

    Lightning reads the signature of ``training_step`` to decide what to pass.
    """
    parameters = inspect.signature(inner).parameters
    if "dataloader_iter" in parameters:
        return on_iterator
    several = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return on_batch_and_index if several else on_batch


def reports_of(module: nn.Module, techniques: Iterable[Declaration] = ()) -> dict[str, Report]:
    """Return what each technique changed on ``module``, by the technique's name, in the order in which they act."""
    reports = {entry.record["name"]: entry.report for entry in ledger(module)}
    session = session_of(module)
    if session is not None:
        reports |= session.reports
    for technique in in_order(techniques):
        name = type(technique).__name__
        report = None
        with diagnostic(name, "what it will do"):
            report = technique.describe(module)
        if report is not None:
            reports[name] = report.checked(name)
    return reports


def log_reports(trainer: Trainer, reports: Mapping[str, Report]) -> None:
    """Print the reports once, and log their figures as hyper-parameters of every logger and in the summary of W&B."""
    if not reports:
        return
    width = max(map(len, reports))
    lines = [f"  {name:{width}}  {report.summary}" for name, report in reports.items()]
    rank_zero_info("\n".join(["Techniques:", *lines]))
    figures = {}
    for name, report in reports.items():
        for key, value in report.figures().items():
            figures[f"techniques/{name}/{key}"] = value
    for logger in trainer.loggers:
        logger.log_hyperparams(figures)
        if isinstance(logger, WandbLogger) and trainer.is_global_zero:
            logger.experiment.summary.update(figures)
