"""State of Lightning's loops, accessed by attributes only, so that both of Lightning's namespaces work.

Checked with lightning 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import sized_len

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import nn

DATA_FETCHER = "_DataFetcher"  # class of the objects that pass batches to a loop
BEFORE_TRANSFER = "_on_before_batch_transfer"  # method of a module that is called with each batch on the host


def accumulates(trainer: Trainer) -> bool:
    """Return whether gradients accumulate, so that no optimizer step follows: ``fit_loop._should_accumulate``."""
    return bool(trainer.fit_loop._should_accumulate())


def logged_step(trainer: Trainer) -> int:
    """Return the step under which loggers record metrics of a running fit: ``epoch_loop._batches_that_stepped``."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def watch_fetching(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call functions before and after each wait of a fit for a batch: ``_on_before_fetch``, ``_on_after_fetch``."""
    loop = trainer.fit_loop.epoch_loop
    for name, call in (("_on_before_fetch", before), ("_on_after_fetch", after)):
        calls = vars(loop).setdefault(name, _Calls([getattr(loop, name)]))
        if call not in calls:  # the same callback may watch several fits
            calls.append(call)


class _Calls(list[Callable[[], None]]):
    """List of functions that are called one after the other."""

    def __call__(self) -> None:
        for call in self:
            call()


def recount(trainer: Trainer) -> None:
    """Update the number of batches of this epoch from the length of the training loaders, which may have shrunk.

    ``_combined_loader`` and ``_data_fetcher.length``.
    """
    loop: Any = trainer.fit_loop
    length = sized_len(loop._combined_loader)
    if length is not None:
        loop.max_batches = length
        loop._data_fetcher.length = length
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(length * trainer.val_check_interval))


def zeroes_by_hand(module: nn.Module) -> bool:
    """Return whether a module overrides ``optimizer_zero_grad``."""
    return not module.optimizer_zero_grad.__module__.startswith(("lightning.", "pytorch_lightning."))


_TRANSFER = ("transfer_batch_to_device", "on_after_batch_transfer")


def arrives_unchanged(trainer: Trainer, names: tuple[str, ...] = _TRANSFER) -> bool:
    """Return whether a training batch on the device equals the batch on the host: no transfer hook is overridden."""
    data = getattr(trainer, "datamodule", None)
    owners = [owner for owner in (trainer.lightning_module, data) if owner is not None]
    # `is_overridden` of Lightning only supports classes of its own namespace.
    hooks = [getattr(getattr(owner, name), "__module__", "") for name in names for owner in owners]
    return all(hook.startswith(("lightning.", "pytorch_lightning.")) for hook in hooks)


def validates_next(trainer: Trainer) -> bool:
    """Return whether validation runs in this epoch: ``epoch_loop._should_check_val_epoch``."""
    return bool(trainer.fit_loop.epoch_loop._should_check_val_epoch())


def forget_restart(trainer: Trainer) -> None:
    """Make the loops of a fit treat the next batch as a regular one: ``_restarting``.

    The public setter does more: it depends on the position in the epoch.
    """
    loop = trainer.fit_loop
    for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        part._restarting = False


def settle(checkpoint: dict[str, Any], epoch: bool) -> None:
    """Set the counters of a checkpoint to the end of the last batch, or of its epoch with ``epoch``.

    ``loops.fit_loop``.
    """
    counters = checkpoint["loops"]["fit_loop"]
    completed = ["epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"]
    if epoch:
        completed.append("epoch_progress")
    for name in completed:
        for part in ("total", "current"):
            counters[name][part] = dict.fromkeys(counters[name][part], counters[name][part]["ready"])


def count_batches(trainer: Trainer, number: int) -> None:
    """Set the number of batches that a resumed fit has done in this epoch: ``epoch_loop.batch_progress.current``."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in vars(current):
        setattr(current, name, number)


def end_batch(trainer: Trainer, validated: bool) -> None:
    """Make a restarted ``epoch_loop.advance`` continue after the previous batch: ``_skip_next_val``.

    Args:
        trainer: The trainer.
        validated: Whether the validation after that batch has already run.
    """
    forget_restart(trainer)
    trainer.fit_loop.epoch_loop._skip_next_val = validated


def end_epoch(trainer: Trainer) -> None:
    """At the start of a restarted fit, step schedulers that monitor a metric, and begin the next epoch.

    ``reset_restart_stage``.
    """
    loop = trainer.fit_loop
    loop.epoch_progress.current.completed -= 1  # schedulers expect the number of the epoch that has just ended
    loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    loop.epoch_progress.current.completed += 1
    forget_restart(trainer)
    for part in (loop, loop.epoch_loop):
        part.reset_restart_stage()


def stops_now(trainer: Trainer) -> bool:
    """Return whether a fit ends after this step, even in the middle of an epoch: ``fit_loop._can_stop_early``."""
    stopped = trainer.should_stop and trainer.fit_loop._can_stop_early
    return bool(stopped or 0 < trainer.max_steps <= trainer.global_step)
