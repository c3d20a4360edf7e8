"""A line before a fit that will never validate, although it has data for it, or a part that waits for its metrics."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_efficient.declaration import parts_of, traits_of_part
from lit_efficient.internals.lightning_loops import has_validation_data, next_validation
from lit_efficient.traits import Trait


class ValidationAdvice(Callback):
    """Says before the first step that no validation will run before the end of the fit."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reason = why_never(trainer)
        if reason is not None:
            rank_zero_info(_advice(reason, waiting(trainer)))


def warn_of_no_validation(trainer: Any) -> None:
    """Warn of callbacks that wait for a validation in vain, unless the trainer has a :class:`ValidationAdvice`."""
    waits = waiting(trainer)
    if not waits or any(isinstance(callback, ValidationAdvice) for callback in trainer.callbacks):
        return
    reason = why_never(trainer)
    if reason is not None:
        rank_zero_warn(_advice(reason, waits))


def waiting(trainer: Any) -> list[str]:
    """Return the names of the callbacks that act on a metric of validations, or after each of them."""
    waits = []
    for callback in trainer.callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and not monitor.startswith("train"):
            waits.append(f"{type(callback).__name__} ({monitor})")
        elif Trait.ACTS_AT_VALIDATION in traits_of_part(callback):
            waits.append(type(callback).__name__)
    return waits


def _advice(reason: str, waits: list[str]) -> str:
    said = f"This fit never validates: {reason}"
    if waits:
        said += f". These wait for validations in vain: {', '.join(waits)}"
    return said


def why_never(trainer: Any) -> str | None:
    """Return the reason why a fit with data for validation never validates; None if it does, or may do so."""
    if not has_validation_data(trainer):
        return None
    if not trainer.limit_val_batches:
        return f"trainer.limit_val_batches is {trainer.limit_val_batches}"
    # Without a sanity check, the list is empty until an epoch that validates begins.
    if trainer.num_val_batches and not sum(trainer.num_val_batches):
        return "its validation data has no batches"
    first = next_validation(trainer)
    done = trainer.fit_loop.total_batch_idx + 1
    ends = []
    changes = any(Trait.CHANGES_ACCUMULATION in traits_of_part(part) for part in parts_of(trainer))
    if trainer.max_steps >= 0 and trainer.lightning_module.automatic_optimization and not changes:
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
