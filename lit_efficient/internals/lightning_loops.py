"""Where Lightning's loops stand. Everything goes by attributes: both of Lightning's namespaces have them.

Checked with lightning 2.6.6.
"""

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.data import sized_len

DATA_FETCHER = "_DataFetcher"  # the class of what hands batches to a loop
BEFORE_TRANSFER = "_on_before_batch_transfer"  # what a module's batch passes through on the host, in each stage


def accumulates(trainer: Any) -> bool:
    """Whether the optimizer does not step after this batch: ``fit_loop._should_accumulate``."""
    return bool(trainer.fit_loop._should_accumulate())


def logged_step(trainer: Any) -> int:
    """The number under which loggers file the step of a fit that is under way: ``epoch_loop._batches_that_stepped``."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def watch_fetching(trainer: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call two functions around each wait of a fit for its next batch: ``_on_before_fetch`` and ``_on_after_fetch``."""
    loop = trainer.fit_loop.epoch_loop
    for name, call in (("_on_before_fetch", before), ("_on_after_fetch", after)):
        calls = vars(loop).setdefault(name, _Calls([getattr(loop, name)]))
        if call not in calls:  # one that watches each of several fits
            calls.append(call)


class _Calls(list[Callable[[], None]]):
    """Functions that are called as one."""

    def __call__(self) -> None:
        for call in self:
            call()


def recount(trainer: Any) -> None:
    """Ask the training loaders again how long this epoch is, no longer than it was when they were made.

    ``_combined_loader`` and ``_data_fetcher.length``.
    """
    loop = trainer.fit_loop
    length = sized_len(loop._combined_loader)
    if length is not None:
        loop.max_batches = loop._data_fetcher.length = length
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(length * trainer.val_check_interval))


def zeroes_by_hand(module: Any) -> bool:
    """Whether a module has an ``optimizer_zero_grad`` of its own."""
    return not module.optimizer_zero_grad.__module__.startswith(("lightning.", "pytorch_lightning."))


_TRANSFER = ("transfer_batch_to_device", "on_after_batch_transfer")


def arrives_unchanged(trainer: Any, names: tuple[str, ...] = _TRANSFER) -> bool:
    """Whether a batch of training is on the device what it was on the host: no hook has a hand in its transfer."""
    owners = [owner for owner in (trainer.lightning_module, trainer.datamodule) if owner is not None]
    # Lightning's is_overridden knows classes of its own namespace alone.
    hooks = [getattr(getattr(owner, name), "__module__", "") for name in names for owner in owners]
    return all(hook.startswith(("lightning.", "pytorch_lightning.")) for hook in hooks)


def validates_next(trainer: Any) -> bool:
    """Whether this epoch is one that validates: ``epoch_loop._should_check_val_epoch``."""
    return bool(trainer.fit_loop.epoch_loop._should_check_val_epoch())


def forget_restart(trainer: Any) -> None:
    """Let the fit's loops take the next batch for a first one: ``_restarting``, whose public setter asks the epoch."""
    loop = trainer.fit_loop
    for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        part._restarting = False


def settle(checkpoint: dict[str, Any], epoch: bool) -> None:
    """Let a checkpoint's counters say that its last batch is over, or with ``epoch`` its epoch: ``loops.fit_loop``."""
    counters = checkpoint["loops"]["fit_loop"]
    over = ["epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress", *(["epoch_progress"] if epoch else [])]
    for name in over:
        for part in ("total", "current"):
            counters[name][part] = dict.fromkeys(counters[name][part], counters[name][part]["ready"])


def count_batches(trainer: Any, number: int) -> None:
    """Let a fit that is resumed have begun its epoch with so many batches: ``epoch_loop.batch_progress.current``."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    for name in vars(current):
        setattr(current, name, number)


def end_batch(trainer: Any, validated: bool) -> None:
    """Inside a restarted ``epoch_loop.advance``: let the loops go on as after the batch before: ``_skip_next_val``."""
    forget_restart(trainer)
    trainer.fit_loop.epoch_loop._skip_next_val = validated


def end_epoch(trainer: Any) -> None:
    """At the start of a restarted fit: step schedulers that monitor, and begin an epoch: ``reset_restart_stage``."""
    loop = trainer.fit_loop
    loop.epoch_progress.current.completed -= 1  # the number of the epoch that is over
    loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    loop.epoch_progress.current.completed += 1
    forget_restart(trainer)
    for part in (loop, loop.epoch_loop):
        part.reset_restart_stage()


def stops_now(trainer: Any) -> bool:
    """Whether a fit ends at this step, be it in the midst of an epoch: ``fit_loop._can_stop_early``."""
    stopped = trainer.should_stop and trainer.fit_loop._can_stop_early
    return bool(stopped or 0 < trainer.max_steps <= trainer.global_step)
