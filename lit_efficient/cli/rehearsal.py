"""Compatibility checks of a fit before its data is prepared: each part is asked what it refuses of the others.

Only certain refusals count. If the network may be built in a ``setup`` that needs data, or a check lacks the weights,
the data or the processes of a fit, the fit itself reports what is wrong.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_efficient.application import apply, check_run
from lit_efficient.application.ledger import reports_of
from lit_efficient.application.optimizers import configured_by
from lit_efficient.cli.defaults import callbacks_of
from lit_efficient.cli.optimizers import MANY
from lit_efficient.declaration import Declaration, Phase, in_order, overrides, techniques_of
from lit_efficient.errors import LitEfficientError
from lit_efficient.internals.lightning_trainer import AskedEarly, begin_fit, set_trainer
from lit_efficient.internals.wraps import temporarily
from lit_efficient.mechanisms.trials.steps import quiet
from lit_efficient.surgery import computed, weightless
from lit_efficient.technique import AppliesTechniques
from lit_efficient.traits import Trait


def rehearse(trainer: Trainer, module: LightningModule, data: LightningDataModule) -> None:
    """Run the compatibility checks of all parts of a fit, without changing any of them.

    The network and its optimizers are those of a copy of the module without weights, changed by copies of the
    techniques.

    Raises:
        LitEfficientError: The refusal of a part.
    """
    callbacks = temporarily(trainer, callbacks=callbacks_of(trainer))  # the module adds its own ones again in the fit
    with torch.random.fork_rng(devices=[]), quiet(logging.WARNING, warns=False), callbacks, _uncertain():
        begin_fit(trainer, module, data)
        check_parts(trainer, module, data)
        with torch.device("meta"):
            _rehearse_network(trainer, module)


def check_parts(trainer: Trainer, module: LightningModule, data: LightningDataModule | None) -> None:
    """Run the checks of techniques and data that do not depend on the network, in a fit that has begun.

    Raises:
        LitEfficientError: The refusal of a part.
    """
    check_run(trainer, module)
    for callback in callbacks_of(trainer):
        if isinstance(callback, AskedEarly) and not isinstance(callback, AppliesTechniques):  # check_run asks these
            callback.refuse(trainer, module)
    check_model = getattr(data, "check_model", None)
    if check_model is not None:
        check_model()


def _rehearse_network(trainer: Trainer, module: LightningModule) -> None:
    if is_overridden("setup", module) and not getattr(type(module).setup, "builds_no_layers", False):
        return
    stand_in = copy.copy(trainer)
    data = getattr(trainer, "datamodule", None)
    memo: dict[int, object] = {id(trainer): stand_in, id(data): data, **computed(module)}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = weightless(tensor)
    copied: Any = copy.deepcopy(module, memo)
    techniques = [copy.deepcopy(one, memo) for one in in_order(techniques_of(trainer))]
    setattr(stand_in, "callbacks", [memo.get(id(one), one) for one in callbacks_of(trainer)])  # noqa: B010
    set_trainer(copied, stand_in)
    precision = trainer.precision_plugin
    with precision.module_init_context():
        type(copied).configure_model(copied)
    if getattr(copied, "awaits_data", False):  # techniques may name layers that are not there yet
        return
    whole = True
    for technique in techniques:
        if not overrides(technique, "transform"):
            continue
        refuses_early = Trait.REFUSES_EARLY in technique.traits
        if refuses_early:
            apply(copied, [technique])
        elif technique.phase is Phase.ARCHITECTURE:  # later techniques would meet other layers
            return
        whole = whole and refuses_early
    if whole:
        if not isinstance(precision, Declaration):  # a precision that is a technique is applied already
            copied = precision.convert_module(copied)
        with steps_guessed(stand_in):
            configured_by(copied, techniques, copied.configure_optimizers)
        reports_of(copied, techniques)


@contextlib.contextmanager
def _uncertain() -> Iterator[None]:
    """Ignore errors that come from missing weights, data or processes."""
    try:
        yield
    except Exception as error:
        if is_meant(error):
            raise


def is_meant(error: Exception) -> bool:
    """Return whether an error of a network without weights is about the network, and not about missing weights."""
    return isinstance(error, LitEfficientError) and "meta device" not in str(error)


@contextlib.contextmanager
def steps_guessed(trainer: Trainer) -> Iterator[None]:
    """Answer schedules that ask for the number of steps while the data is missing: no schedule is too long for it."""
    kind = type(trainer)

    class Counted(kind):  # type: ignore[valid-type, misc]
        @property
        def estimated_stepping_batches(self) -> float:
            if self.max_epochs == -1:
                return float(super().estimated_stepping_batches)
            if self.max_steps > 0:
                return self.max_steps
            return MANY

    with temporarily(trainer, __class__=Counted):
        yield
