"""Data loaders of a fit: their source, the attributes that hold them, and the samplers that Lightning adds.

Checked with lightning 2.6.6, in both of its namespaces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def data_source(loop: Any) -> Any:
    """Return the source of the data loaders of a loop: ``_data_source``."""
    return loop._data_source


def combined_loader(trainer: Trainer) -> Any:
    """Return the ``CombinedLoader`` of training, or ``None`` before it is created: ``fit_loop._combined_loader``."""
    return trainer.fit_loop._combined_loader


def drop_loaders(loop: Any) -> None:
    """Stop the workers of a loop, and make Lightning create its loaders again.

    ``_data_fetcher``, ``_combined_loader``.
    """
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = None
    loop._data_fetcher = None


def restore_loader_states(trainer: Trainer) -> None:
    """Load the loaders' states of a checkpoint into loaders that were created before the checkpoint was read.

    ``fit_loop._load_combined_loader_states``.
    """
    trainer.fit_loop._load_combined_loader_states()


def validate_on(trainer: Trainer, loaders: Any, batches: list[int]) -> None:
    """Make the next validation of a fit use a ``CombinedLoader`` and a number of batches for each of its loaders.

    ``val_loop._combined_loader``, ``_max_batches`` and ``_last_val_dl_reload_epoch``.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop._combined_loader = loaders
    loop._max_batches = [*batches]
    loop._last_val_dl_reload_epoch = trainer.current_epoch


def validation_loaders(trainer: Trainer) -> object:
    """Return the validation loaders of a fit, created now if necessary, or ``None``: ``val_loop.setup_data``."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if not trainer.enable_validation or not data_source(loop).is_defined():
        return None
    loop.setup_data()
    return trainer.val_dataloaders


def wants_distributed_sampler(trainer: Trainer, loader: Any) -> bool:
    """Return whether Lightning splits a loader over processes: ``_data_connector._requires_distributed_sampler``."""
    return bool(trainer._data_connector._requires_distributed_sampler(loader))


def sampler_inside(sampler: object) -> Any:
    """Return the sampler inside a ``DistributedSamplerWrapper``, or ``None`` for other samplers: ``_sampler``."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def prepared(trainer: Trainer, loader: object) -> Any:
    """Return a training loader as a fit uses it, with the rows split over processes.

    ``_data_connector._prepare_dataloader``.
    """
    from lightning.pytorch.trainer.states import RunningStage

    return trainer._data_connector._prepare_dataloader(loader, shuffle=True, mode=RunningStage.TRAINING)
