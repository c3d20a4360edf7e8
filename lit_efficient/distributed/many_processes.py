"""Checks, in one process, for a run on several: data that is not split, steps without rows, and loggers.

Two processes are simulated, and each reads its first batch with the same random draws. If the data is not split, both
batches are equal.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import IterableDataset

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.lightning_data import prepared
from lit_efficient.internals.torch_fake_group import pretended

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, Trainer

TensorsIn: TypeAlias = Callable[[object], Iterator[Tensor]]  # the tensors of a batch, however they are nested
Loader: TypeAlias = Any  # a DataLoader, or any other iterable of batches
Read: TypeAlias = tuple[Loader, list[Tensor]]  # a loader, and the tensors of its first batch


def check_loggers(trainer: "Trainer") -> None:
    """Refuse loggers that would write from every process.

    Raises:
        ConfigurationError: Naming the first of them.
    """
    if trainer.world_size > 1:
        for logger in trainer.loggers:
            if not hasattr(type(logger).log_metrics, "__wrapped__"):
                raise ConfigurationError(
                    f"{type(logger).__name__}: its log_metrics is not decorated with rank_zero_only, so that each of "
                    f"{trainer.world_size} processes would log"
                )


def check_split(trainer: "Trainer", data: "LightningDataModule", tensors_in: TensorsIn) -> list[str]:
    """Refuse training data that is not split among a trainer's processes.

    Args:
        trainer: The trainer.
        data: The data module.
        tensors_in: Yields the tensors of a batch.

    Returns:
        Notes on the number of rows and steps.

    Raises:
        ConfigurationError: For a loader that gives all processes the same rows, or some processes none.
    """
    world = getattr(trainer.strategy, "distributed_sampler_kwargs", {}).get("num_replicas", trainer.world_size)
    sharing = trainer.world_size // world  # number of processes that share each row
    if world == 1:
        _loaders(trainer, data, 0, tensors_in)
        return []
    first, second = (_loaders(trainer, data, rank, tensors_in) for rank in (0, sharing))
    return [note for pair in zip(first, second, strict=True) for note in _check_loader(trainer, *pair, world)]


def _loaders(trainer: Any, data: "LightningDataModule", rank: int, tensors_in: TensorsIn) -> list[Read]:
    """Return each training loader of the process ``rank``, and the tensors of its first batch."""
    environment = trainer.strategy.cluster_environment
    before = environment.global_rank()
    environment.set_global_rank(rank)
    try:
        with pretended(rank, trainer.world_size):
            loaders = [prepared(trainer, loader) for loader in CombinedLoader(data.train_dataloader()).flattened]
            return [(loader, _first_batch(loader, tensors_in)) for loader in loaders]
    except (TypeError, MisconfigurationException) as error:  # a sampler that Lightning cannot copy for each process
        raise ConfigurationError(f"{type(data).__name__}: {error}") from error
    finally:
        environment.set_global_rank(before)


def _first_batch(loader: Loader, tensors_in: TensorsIn) -> list[Tensor]:
    torch.manual_seed(0)
    return list(tensors_in(next(iter(loader), None)))


def _check_loader(trainer: "Trainer", one: Read, other: Read, world: int) -> list[str]:
    loader, mine = one
    _, its = other
    dataset = getattr(loader, "dataset", None)
    name = f"the training data ({type(dataset).__name__})"
    if not mine or not its:
        raise ConfigurationError(f"{name} has no batch for each of {world} processes: use fewer, or smaller batches")
    rows: int | None = None
    steps: int | None = None
    with contextlib.suppress(TypeError):
        rows = len(dataset)  # type: ignore[arg-type]
        steps = len(loader)
    if rows is not None and rows < world:
        raise ConfigurationError(f"{name} has {rows} rows for {world} processes")
    if len(mine) == len(its) and all(map(torch.equal, mine, its)):
        way_out = "leave trainer.use_distributed_sampler at true, or give the loader a DistributedSampler"
        if isinstance(dataset, IterableDataset):
            way_out = "split it in its __iter__ by rank and worker"
        raise ConfigurationError(
            f"{name} is not split: processes 0 and 1 of {world} read the same first batch; {way_out}"
        )
    if rows is None or steps is None:
        return []
    window = trainer.accumulate_grad_batches
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        steps = min(steps, limit)
    else:
        steps = int(steps * limit)
    if hasattr(trainer.strategy, "check_window"):
        trainer.strategy.check_window(steps, window)
    notes = [f"{rows:,} rows, {steps:,} batches an epoch for each of {world} processes"]
    if steps % window:
        notes.append(
            f"the last {steps % window} of {steps:,} batches form a shorter window; others accumulate {window}"
        )
    return notes
