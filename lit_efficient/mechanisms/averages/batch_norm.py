"""Running statistics of BatchNorm layers for averaged weights: recomputed as a plain mean over training batches.

    running statistics = mean over n batches of the batch's own statistics (momentum 1 / i in batch i)

Averaged weights have never processed a batch, so the running statistics of training do not fit them. The batches are
drawn with a separate generator. Everything that training_step changes is restored: metrics, states that the module
carries from batch to batch, random states. Training is not affected.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lit_efficient.application.loss import LossHooks
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_modules import BatchNorm
from lit_efficient.internals.torch_shards import reshard
from lit_efficient.internals.wraps import does_nothing, wrapped
from lit_efficient.mechanisms.order.keyed_batch_sampler import KeyedBatchSampler
from lit_efficient.mechanisms.rewind import Rewind


def batch_norms(module: nn.Module) -> dict[str, BatchNorm]:
    """Return the BatchNorm layers that keep running statistics, by name."""
    layers = {}
    for name, layer in module.named_modules():
        if isinstance(layer, BatchNorm) and layer.track_running_stats:
            layers[name] = layer
    return layers


def statistics_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the running statistics by buffer name."""
    copies = {}
    for name, norm in batch_norms(module).items():
        for key, buffer in norm.named_buffers(recurse=False):
            copies[f"{name}.{key}"] = buffer.clone()
    return copies


def recompute_statistics(module: Any, batches: int, *, who: str) -> dict[str, Tensor]:
    """Return the statistics that ``training_step`` gives on random training batches, by buffer name.

    Only BatchNorm layers are in training mode. Dropout and similar layers are off, because the statistics shall be
    those of the evaluated network. All processes draw the same batches, so their results agree without communication.
    The module is left unchanged.

    Args:
        module: LightningModule that is attached to a trainer in a fit.
        batches: Largest number of batches. Each has the size of a training batch.
        who: Name of the calling technique, for the error.

    Raises:
        ConfigurationError: If the training data cannot be drawn from at random.
    """
    trainer = module.trainer
    loader = _random_loader(trainer.train_dataloader, batches, who)
    takes_batch_index = len(inspect.signature(module.training_step).parameters) > 1
    # The only callbacks that act during training_step are those that change the loss.
    record = Rewind([module, *(c for c in trainer.callbacks if isinstance(c, LossHooks))], shallow=[trainer])
    try:
        with silent(module):
            module.eval()
            for norm in batch_norms(module).values():
                norm.reset_running_stats()
                norm.momentum = None
                norm.train()
            for i, drawn in enumerate(islice(loader, batches)):
                batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(drawn))
                with trainer.precision_plugin.train_step_context():
                    module.training_step(*((batch, i) if takes_batch_index else (batch,)))
        return statistics_of(module)
    finally:
        reshard(module)
        record.restore()


def _random_loader(loader: Any, batches: int, who: str) -> DataLoader:
    """Return a loader over the dataset of ``loader`` that draws random batches with a generator of its own."""
    dataset = getattr(loader, "dataset", None)
    keyed = getattr(loader, "sampler", None)
    if isinstance(keyed, KeyedBatchSampler):
        keyed = copy.copy(keyed)
        keyed.seed = 0
        keyed.epoch = 0
        keyed.shuffle = True
        # All processes draw the whole batches of one process, and so the same ones.
        keyed.num_replicas = 1
        keyed.rank = 0
        return DataLoader(loader.dataset, batch_size=None, sampler=keyed, collate_fn=loader.collate_fn)
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if dataset is None or isinstance(dataset, IterableDataset) or size is None:
        raise ConfigurationError(
            f"{who}: the network has BatchNorm layers, whose statistics are recomputed for averaged weights. That "
            f"needs one DataLoader with a map-style dataset, but the training data are {type(loader).__name__} over "
            f"{type(dataset).__name__}. Use such a DataLoader, or GroupNorm or LayerNorm in the network"
        )
    size = min(size, len(dataset))
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
    return DataLoader(dataset, size, sampler=sampler, collate_fn=loader.collate_fn, drop_last=True)


@contextmanager
def silent(module: LightningModule) -> Iterator[None]:
    """Context in which nothing is logged: values of these training steps belong to no epoch."""
    if module.trainer.loggers:
        module.trainer.loggers = [DummyLogger()]
    with wrapped(module, does_nothing, "log", "log_dict"):
        yield
