"""The batch of a plan: the largest samples of the data, or without data a batch of the configured shape."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient.evidence.fits import Fit
from lit_efficient.internals.torch_fake import FakeTensorMode, like_real_ones
from lit_efficient.internals.torch_trees import tree_map
from lit_efficient.mechanisms.trials.probes import ProbeBatches, batch_size_of

_SCAN = 512  # samples among which the longest are searched


def batch_of(fit: Fit, notes: list[str], mode: FakeTensorMode) -> tuple[object, int | None]:
    """Return a batch in the structure of the training loop, and the number of batches in an epoch if it is known.

    Without data, ``notes`` receives a sentence on the origin of the batch. Encoders of the data that need no weights
    for a plan have fake tensors of ``mode``.

    Raises:
        Exception: The error of the data, if the fit does not tell the shape of its batches either.
    """

    @contextmanager
    def without_values() -> Iterator[None]:
        with mode, like_real_ones():
            yield

    planned = getattr(fit.datamodule, "encoded_without_values", None)
    try:
        loaders = _loaders(fit, without_values)
    except Exception as error:
        batch = _configured_batch(fit)
        if batch is None:
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        notes.append(f"The data cannot be read ({lines[0][:100]}): the batch has the shape that its arguments define.")
        if getattr(fit.data, "processor_name", None) is not None:
            notes.append("The batch holds no images, which take more memory.")
        return batch, None
    # A DataModule or a module may tell which of its samples are the longest.
    longest = None
    for owner in (fit.module, fit.datamodule):
        longest = getattr(owner, "longest_samples", longest)
    batch = tree_map(lambda loader: _largest(loader, longest), loaders)
    if planned is not None:
        batch = planned(batch, without_values)
    try:
        return batch, len(loaders)
    except TypeError:  # an iterable dataset
        return batch, None


def _loaders(fit: Fit, without_values: Callable[[], AbstractContextManager[None]]) -> Any:
    data = fit.datamodule
    if data is not None:
        data.trainer = fit.trainer
        fit.trainer.strategy.connect(fit.module)  # data may read the network that it is for from the trainer
        if hasattr(data, "build_encoders"):
            data.build_encoders(without_values)
        data.prepare_data()
        data.setup("fit")
        return data.train_dataloader()
    if fit.loaders is not None:
        return fit.loaders[0]
    return fit.module.train_dataloader()


def _largest(loader: Any, longest: Any) -> Any:
    # Samples of an iterable dataset cannot be chosen.
    indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if indexed and batch_size_of(loader) is not None:
        return ProbeBatches(loader, ProbeBatches.find(loader, _SCAN, longest)).batch()
    return next(iter(loader))


def _configured_batch(fit: Fit) -> object:
    """Return a batch of tokens of the configured shape, or the module's example input; ``None`` without either."""
    data = fit.data
    length = getattr(data, "max_length", None) or getattr(data, "sequence_length", None)
    rows = getattr(data, "batch_size", None)
    if isinstance(length, int) and isinstance(rows, int):
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        batch = {"input_ids": tokens, "labels": tokens}
        if getattr(data, "pack", False):
            batch["position_ids"] = torch.arange(length).expand_as(tokens)
        return batch
    return getattr(fit.module, "example_input_array", None)
