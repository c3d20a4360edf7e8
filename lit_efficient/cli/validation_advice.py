"""A line before a fit that will never validate, although it has data for it, or a part that waits for its metrics."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_efficient.cli.defaults import callbacks_of
from lit_efficient.internals.lightning_loops import has_validation_data, next_validation


class ValidationAdvice(Callback):
    """Says before the first step that no validation will run before the end of the fit."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reason = why_never(trainer)
        if reason is None:
            return
        waits = []
        for callback in callbacks_of(trainer):
            monitor = getattr(callback, "monitor", None)
            if isinstance(monitor, str) and not monitor.startswith("train"):
                waits.append(f"{type(callback).__name__} ({monitor})")
        said = f"This fit never validates: {reason}"
        if waits:
            said += f". These wait for its metrics in vain: {', '.join(waits)}"
        rank_zero_info(said)


def why_never(trainer: Any) -> str | None:
    """Return the reason why a fit with data for validation never validates; None if it does, or may do so."""
    if not has_validation_data(trainer):
        return None
    if not trainer.limit_val_batches:
        return f"trainer.limit_val_batches is {trainer.limit_val_batches}"
    if not sum(trainer.num_val_batches):
        return "its validation data has no batches"
    first = next_validation(trainer)
    done = trainer.fit_loop.total_batch_idx + 1
    ends = []
    if trainer.max_steps >= 0 and trainer.lightning_module.automatic_optimization:
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        ends.append((done + left, f"trainer.max_steps is {trainer.max_steps}"))
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        batches = trainer.max_epochs * trainer.num_training_batches
        ends.append((batches, f"trainer.max_epochs is {trainer.max_epochs}"))
    if first is None or not ends:
        return None
    end, limit = min(ends)
    if first <= end:
        return None
    return (
        f"{limit}, so it ends after batch {end:g}, and the first validation would follow batch {first:g} "
        f"(trainer.val_check_interval: {trainer.val_check_interval}, check_val_every_n_epoch: "
        f"{trainer.check_val_every_n_epoch})"
    )
