"""Statistics of BatchNorm layers for weights that never saw a batch: computed again, as a plain mean over batches.

    running statistics = mean over n batches of the batch's own statistics (momentum 1 / i in batch i)

The batches are drawn by a generator of their own, and all that training_step changes is put back: metrics, states that
are carried from batch to batch, random states. Training never notices.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lit_efficient.declaration import LossHooks
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_layers import BatchNorm
from lit_efficient.internals.wraps import does_nothing, wrapped
from lit_efficient.mechanisms.order.keyed_batch_sampler import KeyedBatchSampler
from lit_efficient.mechanisms.rewind import Rewind
from lit_efficient.surgery import reshard


def batch_norms(module: nn.Module) -> dict[str, BatchNorm]:
    """Layers that keep running statistics, by name."""
    layers = ((n, m) for n, m in module.named_modules() if isinstance(m, BatchNorm))
    return {name: layer for name, layer in layers if layer.track_running_stats}


def statistics_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the running statistics, by name."""
    norms = batch_norms(module)
    return {f"{n}.{key}": t.clone() for n, norm in norms.items() for key, t in norm.named_buffers(recurse=False)}


def recompute_statistics(module: Any, batches: int, *, who: str) -> dict[str, Tensor]:
    """The statistics that ``training_step`` makes on random training batches, with BatchNorm alone in training mode.

    Dropout and the like stay off: statistics should be those of the network that is evaluated. All processes draw the
    same batches and so agree without communication. The module is left as it was.

    Args:
        module: A LightningModule that is attached to a trainer in a fit.
        batches: How many batches, at most; each has the size of a training batch.
        who: Name of the technique that asks, for the error.

    Raises:
        ConfigurationError: If there are no training data to draw from at random.
    """
    trainer = module.trainer
    loader = _random_loader(trainer.train_dataloader, batches, who)
    several = len(inspect.signature(module.training_step).parameters) > 1
    # Callbacks do not act in here, but for those that change the loss.
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
                    module.training_step(*((batch, i) if several else (batch,)))
        return statistics_of(module)
    finally:
        reshard(module)
        record.restore()


def _random_loader(loader: Any, batches: int, who: str) -> DataLoader:
    dataset, keyed = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    if isinstance(keyed, KeyedBatchSampler):
        keyed = copy.copy(keyed)
        keyed.seed, keyed.epoch, keyed.shuffle, keyed.num_replicas, keyed.rank = 0, 0, True, 1, 0
        return DataLoader(loader.dataset, batch_size=None, sampler=keyed, collate_fn=loader.collate_fn)
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
def silent(module: Any) -> Iterator[None]:
    """What the training step logs here belongs to no epoch."""
    if module.trainer.loggers:
        module.trainer.loggers = [DummyLogger()]
    with wrapped(module, does_nothing, "log", "log_dict"):
        yield
