"""Statistics of BatchNorm layers for weights that never saw a batch: computed again, as a plain mean over batches.

    running statistics = mean over n batches of the batch's own statistics (momentum 1 / i in batch i)

The batches are drawn by a generator of their own, and all random states are put back: training never notices.
"""

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_layers import BatchNorm
from lit_efficient.internals.wraps import unwrap_method, wrap_method


def batch_norms(module: nn.Module) -> dict[str, BatchNorm]:
    """Layers that keep running statistics, by name."""
    layers = ((n, m) for n, m in module.named_modules() if isinstance(m, BatchNorm))
    return {name: layer for name, layer in layers if layer.track_running_stats}


def recompute_statistics(module: Any, batches: int, *, who: str) -> None:
    """Run ``training_step`` of a LightningModule on random training batches, with BatchNorm alone in training mode.

    Dropout and the like stay off: statistics should be those of the network that is evaluated. All processes draw the
    same batches and so agree without communication.

    Args:
        module: A LightningModule that is attached to a trainer in a fit.
        batches: How many batches, at most; each has the size of a training batch.
        who: Name of the technique that asks, for the error.

    Raises:
        ConfigurationError: If there are no training data to draw from at random.
    """
    trainer = module.trainer
    norms = batch_norms(module)
    loader = _random_loader(trainer.train_dataloader, batches, who)
    modes = {name: part.training for name, part in module.named_modules()}
    momenta = [norm.momentum for norm in norms.values()]
    several = len(inspect.signature(module.training_step).parameters) > 1
    with _same_random_states(), _silent(module):
        try:
            module.eval()
            for norm in norms.values():
                norm.reset_running_stats()
                norm.momentum = None
                norm.train()
            for i, drawn in enumerate(islice(loader, batches)):
                batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(drawn))
                with trainer.precision_plugin.train_step_context():
                    module.training_step(*((batch, i) if several else (batch,)))
        finally:
            for norm, momentum in zip(norms.values(), momenta):
                norm.momentum = momentum
            for name, part in module.named_modules():
                part.training = modes[name]


def _random_loader(loader: Any, batches: int, who: str) -> DataLoader:
    dataset = getattr(loader, "dataset", None)
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if dataset is None or isinstance(dataset, IterableDataset) or size is None:
        raise ConfigurationError(
            f"{who}: the network has BatchNorm, whose statistics are computed again for averaged weights, from one "
            f"DataLoader with a map-style dataset, but the training data are {type(loader).__name__} over "
            f"{type(dataset).__name__}; use GroupNorm or LayerNorm, or evaluate where such data are given"
        )
    size = min(size, len(dataset))
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
    return DataLoader(dataset, size, sampler=sampler, collate_fn=loader.collate_fn, drop_last=True)


@contextmanager
def _silent(module: Any) -> Iterator[None]:
    """What the training step logs here belongs to no epoch."""
    for name in ("log", "log_dict"):
        wrap_method(module, name, _nothing)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            unwrap_method(module, name, _nothing)


def _nothing(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def _same_random_states() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
