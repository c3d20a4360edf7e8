"""The batch that a plan is made for: of the data's largest samples, or one of the shape that it would have."""

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient.evidence.fits import Fit
from lit_efficient.internals.torch_trees import tree_map
from lit_efficient.mechanisms.trials.probes import ProbeBatches, batch_size_of

_SCAN = 512  # samples that are looked at for the longest


def batch_of(fit: Fit, notes: list[str]) -> tuple[Any, int | None]:
    """A batch in the structure in which the training loop gets it, and how many there are in an epoch; ``notes`` gets a
    sentence on where it comes from.
    """
    try:
        loaders = _loaders(fit)
    except Exception as error:
        batch = _made_up(fit)
        if batch is None:
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        notes.append(f"The data is not there ({lines[0][:100]}): the batch has the shape that its arguments say.")
        return batch, None
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


def _made_up(fit: Fit) -> Any:
    """A batch of tokens by the data's arguments, or what the module names as an example of its input; else ``None``."""
    data = fit.data
    length = getattr(data, "max_length", None) or getattr(data, "sequence_length", None)
    if isinstance(length, int) and isinstance(getattr(data, "batch_size", None), int):
        tokens = torch.zeros(data.batch_size, length, dtype=torch.int64)
        positions = {"position_ids": torch.arange(length).expand_as(tokens)} if getattr(data, "pack", False) else {}
        return {"input_ids": tokens, "labels": tokens, **positions}
    return getattr(fit.module, "example_input_array", None)
