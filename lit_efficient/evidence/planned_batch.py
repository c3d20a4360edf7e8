"""The batch that a plan is made for: of the data's largest samples, or one of the shape that it would have."""

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient.evidence.fits import Fit
from lit_efficient.internals.torch_trees import tree_map
from lit_efficient.mechanisms.trials.probes import ProbeBatches, batch_size_of

_SCAN = 512  # samples that are looked at for the longest


def batch_of(fit: Fit, notes: list[str]) -> tuple[Any, int | None]:
    """A batch in the structure in which the training loop gets it, and how many there are in an epoch.

    Args:
        fit: The fit; its data is prepared.
        notes: Gets a sentence on where the batch comes from.
    """
    loaders = _loaders(fit)
    longest = next(
        (owner.longest_samples for owner in (fit.datamodule, fit.module) if hasattr(owner, "longest_samples")), None
    )
    batch = tree_map(lambda loader: _largest(loader, longest), loaders)
    try:
        batches = len(loaders)
    except TypeError:
        batches = None
    return batch, batches


def _loaders(fit: Fit) -> Any:
    data = fit.datamodule
    if data is not None:
        data.trainer = fit.trainer
        data.prepare_data()
        data.setup("fit")
        return data.train_dataloader()
    if fit.data is None:
        return fit.module.train_dataloader()
    return fit.data[0] if isinstance(fit.data, tuple) else fit.data


def _largest(loader: Any, longest: Any) -> Any:
    indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if indexed and batch_size_of(loader) is not None:
        return ProbeBatches(loader, ProbeBatches.find(loader, _SCAN, longest)).batch()
    return next(iter(loader))
