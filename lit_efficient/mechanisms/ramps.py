"""Linear ramps over the steps of a run, and the base of techniques that change training batches on the host."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lit_efficient.declaration import in_order, techniques_of
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.lightning_loops import BEFORE_TRANSFER
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.technique import Technique


def ramped(step: int, start: float, end: float, steps: int, delay: int = 0) -> float:
    """Return a value that is ``start`` for ``delay`` steps and then changes linearly to ``end`` within ``steps`` steps.

    Args:
        step: Optimizer step, from 0.
        start: First value.
        end: Last value.
        steps: Length of the ramp in steps, at least 1.
        delay: Number of steps before the ramp.

    Example:
        >>> [ramped(step, 64, 256, 100) for step in (0, 50, 100, 200)]
        [64.0, 160.0, 256.0, 256.0]
    """
    return start + (end - start) * min(1.0, max(0, step - delay) / steps)


def check_steps(owner: str, name: str, value: int | float, least: int = 1) -> None:
    """Check that a value is a number of optimizer steps (an integer) or a fraction of the run (a float in (0, 1)).

    Raises:
        ConfigurationError: With the argument, its value and the allowed range.
    """
    if isinstance(value, float):
        check_number(owner, name, value, above=0, below=1)
    else:
        check_number(owner, name, value, least=least, whole=True)


def steps_of(owner: str, name: str, value: int | float, trainer: Trainer) -> int:
    """Return the number of steps that ``value`` means: itself, or a float's fraction of the trainer's ``max_steps``.

    Raises:
        ConfigurationError: For a fraction if ``max_steps`` is not set.
    """
    if not isinstance(value, float):
        return value
    if trainer.max_steps < 1:
        raise ConfigurationError(f"{owner}: {name}={value:g} is a fraction of Trainer(max_steps=...), which is not set")
    return max(1, round(value * trainer.max_steps))


class BatchChanges(Technique):
    """Base of techniques that change each training batch on the host, before it is counted and copied to the device."""

    counts_steps = True

    def change(self, batch: object, step: int) -> Any:
        """Return the changed batch for the training step that follows ``step`` optimizer steps."""
        raise NotImplementedError

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            wrap_method(pl_module, BEFORE_TRANSFER, _before_transfer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        unwrap_method(pl_module, BEFORE_TRANSFER, _before_transfer)
        super().teardown(trainer, pl_module, stage)


def _before_transfer(self: LightningModule, batch: object, *args: object, **kwargs: object) -> object:
    trainer = self.trainer
    if trainer.training and batch is not None:
        for technique in in_order(techniques_of(trainer)):
            if isinstance(technique, BatchChanges) and not technique.worst_case:
                batch = technique.change(batch, trainer.global_step)
    return inner_method(self, BEFORE_TRANSFER, _before_transfer)(batch, *args, **kwargs)
