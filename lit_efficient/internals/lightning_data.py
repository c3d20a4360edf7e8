"""The loaders of a fit: where they come from, where they are kept, what is put around their samplers.

Checked with lightning 2.6.6, in both of its namespaces.
"""

from typing import Any


def data_source(loop: Any) -> Any:
    """What makes a loop's loaders, of which ``instance``, ``is_module()`` and ``dataloader()``: ``_data_source``."""
    return loop._data_source


def combined_loader(trainer: Any) -> Any:
    """The training loaders in one, ``None`` before they are made: ``fit_loop._combined_loader``."""
    return trainer.fit_loop._combined_loader


def drop_loaders(loop: Any) -> None:
    """Stop a loop's workers, and have its loaders made again: ``_data_fetcher`` and ``_combined_loader``."""
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = loop._data_fetcher = None


def restore_loader_states(trainer: Any) -> None:
    """Give loaders that were made early what the checkpoint has of them: ``fit_loop._load_combined_loader_states``."""
    trainer.fit_loop._load_combined_loader_states()


def validate_on(trainer: Any, loaders: Any, batches: list[int]) -> None:
    """Let the next validation of a fit run on a ``CombinedLoader`` that is passed, so many batches of each loader.

    ``val_loop._combined_loader``, ``_max_batches`` and ``_last_val_dl_reload_epoch``.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop._combined_loader, loop._max_batches = loaders, batches
    loop._last_val_dl_reload_epoch = trainer.current_epoch


def validation_loaders(trainer: Any) -> Any:
    """A fit's validation loaders, made now if they are needed later; ``None`` without any: ``val_loop.setup_data``."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if not trainer.enable_validation or not data_source(loop).is_defined():
        return None
    loop.setup_data()
    return trainer.val_dataloaders


def wants_distributed_sampler(trainer: Any, loader: Any) -> bool:
    """Whether Lightning gives each process a part of a loader: ``_data_connector._requires_distributed_sampler``."""
    return bool(trainer._data_connector._requires_distributed_sampler(loader))


def sampler_inside(sampler: Any) -> Any:
    """What a ``DistributedSamplerWrapper`` takes its order from, ``None`` for another sampler: ``_sampler``."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def prepared(trainer: Any, loader: Any) -> Any:
    """A training loader as a fit reads it, with a part of the rows for each process:
    ``_data_connector._prepare_dataloader``.
    """
    from lightning.pytorch.trainer.states import RunningStage

    return trainer._data_connector._prepare_dataloader(loader, shuffle=True, mode=RunningStage.TRAINING)
