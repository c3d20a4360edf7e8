"""What can be known of a fit before its data is prepared: what its parts refuse of each other.

Only what is certain counts. Where a ``setup`` that wants data may build the network, or something lacks the weights,
the data or the processes that a fit has, the fit itself says what is wrong.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_efficient.application import apply, check_run
from lit_efficient.application.ledger import reports_of
from lit_efficient.application.optimizers import configured_by
from lit_efficient.cli.optimizers import MANY
from lit_efficient.declaration import Declaration, Phase, in_order, overrides, techniques_of
from lit_efficient.errors import LitEfficientError
from lit_efficient.internals.lightning_trainer import AskedEarly, begin_fit, set_trainer
from lit_efficient.internals.wraps import temporarily
from lit_efficient.mechanisms.trials.steps import quiet
from lit_efficient.surgery import weightless
from lit_efficient.technique import AppliesTechniques
from lit_efficient.traits import Trait


def rehearse(trainer: Any, module: Any, data: Any) -> None:
    """Ask each part of a fit what it refuses of the others; nothing of the fit is touched.

    The network and its optimizers are those of a copy of the module without weights, changed by copies of the
    techniques.

    Raises:
        LitEfficientError: What a part says.
    """
    callbacks = temporarily(trainer, callbacks=trainer.callbacks)  # those that the module adds are made anew
    with torch.random.fork_rng(devices=[]), quiet(logging.WARNING, warns=False), callbacks, _uncertain():
        begin_fit(trainer, module, data)
        check_parts(trainer, module, data)
        with torch.device("meta"):
            _rehearse_network(trainer, module)


def check_parts(trainer: Any, module: Any, data: Any) -> None:
    """Ask techniques and data of a fit that has begun what they refuse of it, whatever the network is.

    Raises:
        LitEfficientError: What one of them says.
    """
    check_run(trainer, module)
    for callback in trainer.callbacks:
        if isinstance(callback, AskedEarly) and not isinstance(callback, AppliesTechniques):  # those ask all, too
            callback.refuse(trainer, module)
    if hasattr(data, "check_model"):
        data.check_model()


def _rehearse_network(trainer: Any, module: Any) -> None:
    if is_overridden("setup", module) and not getattr(type(module).setup, "builds_no_layers", False):
        return
    stand_in = copy.copy(trainer)
    memo: dict[int, Any] = {id(trainer): stand_in, id(trainer.datamodule): trainer.datamodule}
    memo |= {id(one): weightless(one) for one in (*module.parameters(), *module.buffers())}
    copied = copy.deepcopy(module, memo)
    techniques = [copy.deepcopy(one, memo) for one in in_order(techniques_of(trainer))]
    stand_in.callbacks = [memo.get(id(one), one) for one in trainer.callbacks]
    set_trainer(copied, stand_in)
    precision = trainer.precision_plugin
    with precision.module_init_context():
        type(copied).configure_model(copied)
    whole = True
    for technique in techniques:
        if not overrides(technique, "transform"):
            continue
        refuses_early = Trait.REFUSES_EARLY in technique.traits
        if refuses_early:
            apply(copied, [technique])
        elif technique.phase is Phase.ARCHITECTURE:  # what comes later meets other layers
            return
        whole = whole and refuses_early
    if whole:
        if not isinstance(precision, Declaration):  # as a technique it is applied already
            copied = precision.convert_module(copied)
        with steps_guessed(stand_in):
            configured_by(copied, techniques, copied.configure_optimizers)
        reports_of(copied, techniques)


@contextlib.contextmanager
def _uncertain() -> Iterator[None]:
    """Leave to the fit what fails for want of what is not there."""
    try:
        yield
    except Exception as error:
        if is_meant(error):
            raise


def is_meant(error: Exception) -> bool:
    """Whether an error of a network without weights says something of the network, and not that weights lack."""
    return isinstance(error, LitEfficientError) and "meta device" not in str(error)


@contextlib.contextmanager
def steps_guessed(trainer: Any) -> Iterator[None]:
    """Let schedules ask for the steps of a run whose data is not there: so many that none is too long for it."""
    kind = type(trainer)

    class Counted(kind):  # type: ignore[valid-type, misc]
        @property
        def estimated_stepping_batches(self) -> float:
            endless = self.max_epochs == -1
            return super().estimated_stepping_batches if endless else self.max_steps if self.max_steps > 0 else MANY

    with temporarily(trainer, __class__=Counted):
        yield
