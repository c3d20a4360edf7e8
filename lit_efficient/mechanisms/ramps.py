"""What grows with the steps of a run, and where a batch of training is changed before it is counted and moved."""

from typing import Any

from lit_efficient.declaration import in_order, techniques_of
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.lightning_loops import BEFORE_TRANSFER
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.technique import Technique


def ramped(step: int, start: float, end: float, steps: int, delay: int = 0) -> float:
    """A value that is ``start`` for ``delay`` steps and then rises in a line, to ``end`` after ``steps`` more.

    Args:
        step: Optimizer step, from 0.
        start: At first.
        end: At last.
        steps: That it takes, at least 1.
        delay: Steps before.

    Example:
        >>> [ramped(step, 64, 256, 100) for step in (0, 50, 100, 200)]
        [64.0, 160.0, 256.0, 256.0]
    """
    return start + (end - start) * min(1.0, max(0, step - delay) / steps)


def check_steps(owner: str, name: str, value: int | float, least: int = 1) -> None:
    """Refuse what is neither a number of optimizer steps nor a share of the run, between 0 and 1.

    Raises:
        ConfigurationError: Naming both.
    """
    if isinstance(value, float):
        check_number(owner, name, value, above=0, below=1)
    else:
        check_number(owner, name, value, least=least, whole=True)


def steps_of(owner: str, name: str, value: int | float, trainer: Any) -> int:
    """So many steps of a trainer's run.

    Raises:
        ConfigurationError: For a share of a run without ``max_steps``.
    """
    if not isinstance(value, float):
        return value
    if trainer.max_steps < 1:
        raise ConfigurationError(f"{owner}: {name}={value:g} is a share of Trainer(max_steps=...), which is not set")
    return max(1, round(value * trainer.max_steps))


class BatchChanges(Technique):
    """Base of techniques that change each batch of training on the host, before anything counts it."""

    def change(self, batch: Any, step: int) -> Any:
        """The batch that the step after ``step`` optimizer steps trains on."""
        raise NotImplementedError

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            wrap_method(pl_module, BEFORE_TRANSFER, _before_transfer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        unwrap_method(pl_module, BEFORE_TRANSFER, _before_transfer)
        super().teardown(trainer, pl_module, stage)


def _before_transfer(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    trainer = self.trainer
    if trainer.training and batch is not None:
        for technique in in_order(techniques_of(trainer)):
            if isinstance(technique, BatchChanges) and not technique.worst_case:
                batch = technique.change(batch, trainer.global_step)
    return inner_method(self, BEFORE_TRANSFER, _before_transfer)(batch, *args, **kwargs)
