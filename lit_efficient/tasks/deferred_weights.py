"""Decide whether a task's network may be built without its weights, which each process then reads in slices."""

from typing import Any

from lit_efficient.declaration import Phase, techniques_of
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.traits import Trait


def weights_may_wait(module: Any) -> bool:
    """Return whether the strategy reads slices of the weights later, and no technique needs the weights before."""
    trainer = trainer_of(module)
    if trainer is None or not getattr(trainer.strategy, "reads_slices", False):
        return False
    surgery = (Phase.ARCHITECTURE, Phase.QUANTIZE, Phase.ADAPT)
    return not any(one.phase in surgery and Trait.READS_NO_WEIGHTS not in one.traits for one in techniques_of(trainer))
