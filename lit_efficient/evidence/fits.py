"""A fit that can be made anew: plan, compare, tune and verify all make the user's fit several times, each time alike.

    source = LiveFit(trainer, module, data)                                   in Python: copies of what is there
    source = lit_efficient.cli.fits.ConfigFit(["-c", "language_model"])       of a config
    fit = source.make(Change(settings={"trainer.max_steps": 20}))
    fit.run()

A `Change` is what one variant has that the fit as it is has not. Settings go by the names that they have in a config.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_efficient.errors import ConfigurationError

# What a trainer that exists takes, and where it keeps it.
_OF_TRAINER = {
    "max_steps": "fit_loop.epoch_loop.max_steps",
    "min_steps": "fit_loop.epoch_loop.min_steps",
    "max_epochs": "fit_loop.max_epochs",
    "accumulate_grad_batches": "accumulate_grad_batches",
    "gradient_clip_val": "gradient_clip_val",
    "gradient_clip_algorithm": "gradient_clip_algorithm",
    "limit_train_batches": "limit_train_batches",
    "limit_val_batches": "limit_val_batches",
    "num_sanity_val_steps": "num_sanity_val_steps",
    "val_check_interval": "val_check_interval",
    "check_val_every_n_epoch": "check_val_every_n_epoch",
    "log_every_n_steps": "log_every_n_steps",
}


@dataclass(frozen=True)
class Change:
    """What a variant of a fit has that the fit as it is has not.

    Args:
        name: How people call it.
        settings: New values by their names in a config: ``trainer.max_steps``, ``data.batch_size``, ``model.lr``.
        overlays: Configs to lay over, as after ``-c``; only a fit that comes from a config takes them.
        callbacks: Makes the callbacks that are added.
    """

    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    overlays: tuple[str, ...] = ()
    callbacks: Callable[[], list[Any]] = list


AS_IT_IS = Change()


@dataclass
class Fit:
    """The parts of a fit that has not begun.

    Args:
        trainer: The trainer.
        module: The LightningModule.
        data: A DataModule, a loader to train on, a pair of one to train and one to validate on, or ``None`` where the
            module has them.
        seed: What the random numbers of its run begin with.
        resumed: The checkpoint that it goes on from, ``None`` for a new one.
    """

    trainer: Any
    module: Any
    data: Any = None
    seed: int = 0
    resumed: Any = None

    @property
    def datamodule(self) -> Any:
        """The DataModule, ``None`` where there is none."""
        return self.data if hasattr(self.data, "prepare_data") else None

    def run(self) -> None:
        """Train, from the same random numbers each time."""
        from lightning.pytorch import seed_everything

        seed_everything(self.seed, verbose=False)
        if self.datamodule is not None or self.data is None:
            self.trainer.fit(self.module, datamodule=self.datamodule, ckpt_path=self.resumed)
        else:
            loaders = self.data if isinstance(self.data, tuple) else (self.data,)
            self.trainer.fit(self.module, *loaders, ckpt_path=self.resumed)


class FitSource(ABC):
    """Makes a fit, as often as it is asked to."""

    @abstractmethod
    def make(self, change: Change = AS_IT_IS) -> Fit:
        """The parts of the fit with a change.

        Raises:
            ConfigurationError: If it cannot be changed so.
        """


class LiveFit(FitSource):
    """Makes deep copies of a trainer, a module and data that exist, which are left as they are.

    Args:
        trainer: The trainer; it has fitted nothing yet, or its fit is over.
        module: The LightningModule.
        data: As in :class:`Fit`.
        seed: What the random numbers of each run begin with.
    """

    def __init__(self, trainer: Any, module: Any, data: Any = None, seed: int = 0) -> None:
        self.parts = Fit(trainer, module, data, seed)

    def make(self, change: Change = AS_IT_IS) -> Fit:
        if change.overlays:
            raise ConfigurationError(
                f"{change.name or 'Change'}: overlays ({', '.join(change.overlays)}) are laid over a config, and this "
                "fit has none: give callbacks"
            )
        fit = copy.deepcopy(self.parts)
        callbacks = change.callbacks()
        fit.trainer.callbacks = [*callbacks, *fit.trainer.callbacks]  # as checkpoints come last
        for name, value in change.settings.items():
            _set(fit, name, value)
        return fit


def _set(fit: Fit, name: str, value: Any) -> None:
    part, _, key = name.partition(".")
    owner = {"trainer": fit.trainer, "model": fit.module, "data": fit.data}.get(part)
    path = _OF_TRAINER.get(key) if part == "trainer" else key
    if owner is None or path is None:
        raise ConfigurationError(
            f"{name}: a trainer that exists cannot be given it; of `trainer` it takes {', '.join(_OF_TRAINER)}. "
            "Make the fit from a config, or write a FitSource of your own"
        )
    *owners, last = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    if not hasattr(owner, last):
        raise ConfigurationError(f"{name}: {type(owner).__name__} has no {last}")
    setattr(owner, last, value)
