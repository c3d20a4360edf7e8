"""Where Lightning's loops stand. Everything goes by attributes: both of Lightning's namespaces have them.

Checked with lightning 2.6.6.
"""

from typing import Any

DATA_FETCHER = "_DataFetcher"  # the class of what hands batches to a loop


def accumulates(trainer: Any) -> bool:
    """Whether the optimizer does not step after this batch: ``fit_loop._should_accumulate``."""
    return bool(trainer.fit_loop._should_accumulate())


def validates_next(trainer: Any) -> bool:
    """Whether this epoch is one that validates: ``epoch_loop._should_check_val_epoch``."""
    return bool(trainer.fit_loop.epoch_loop._should_check_val_epoch())


def forget_restart(trainer: Any) -> None:
    """Let the fit's loops take the next batch for a first one: ``_restarting``, whose public setter asks the epoch."""
    loop = trainer.fit_loop
    for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        part._restarting = False


def stops_now(trainer: Any) -> bool:
    """Whether a fit ends at this step, be it in the midst of an epoch: ``fit_loop._can_stop_early``."""
    stopped = trainer.should_stop and trainer.fit_loop._can_stop_early
    return bool(stopped or 0 < trainer.max_steps <= trainer.global_step)
