"""What would not work on many processes, found in one: rows that all would read, steps without rows, loggers.

Each of two processes is pretended, and reads its first batch with the same random draws: of data that is not split both
read the same.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import IterableDataset

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.lightning_data import prepared
from lit_efficient.internals.torch_fake_group import pretended

TensorsIn: TypeAlias = Callable[[object], Iterator[Tensor]]  # the tensors of a batch, however they are nested


def check_loggers(trainer: Any) -> None:
    """Refuse loggers that would write from each process.

    Raises:
        ConfigurationError: Naming them.
    """
    for logger in trainer.loggers if trainer.world_size > 1 else ():
        if not hasattr(type(logger).log_metrics, "__wrapped__"):
            raise ConfigurationError(
                f"{type(logger).__name__}: its log_metrics is not decorated with rank_zero_only, so that each of "
                f"{trainer.world_size} processes would log"
            )


def check_split(trainer: Any, data: Any, tensors_in: TensorsIn) -> list[str]:
    """Refuse training data that is not split among a trainer's processes; return what is to be known of its steps.

    Raises:
        ConfigurationError: For a loader that gives processes the same rows, or none.
    """
    world = getattr(trainer.strategy, "distributed_sampler_kwargs", {}).get("num_replicas", trainer.world_size)
    sharing = trainer.world_size // world  # so many processes share each row
    if world == 1:
        _loaders(trainer, data, 0, tensors_in)
        return []
    first, second = (_loaders(trainer, data, rank, tensors_in) for rank in (0, sharing))
    return [note for pair in zip(first, second, strict=True) for note in _of_loader(trainer, *pair, world)]


def _loaders(trainer: Any, data: Any, rank: int, tensors_in: TensorsIn) -> list[tuple[Any, list[Any]]]:
    """Each training loader of a process, and the tensors of its first batch."""
    environment = trainer.strategy.cluster_environment
    before = environment.global_rank()
    environment.set_global_rank(rank)
    try:
        with pretended(rank, trainer.world_size):
            loaders = [prepared(trainer, loader) for loader in CombinedLoader(data.train_dataloader()).flattened]
            return [(loader, _first_batch(loader, tensors_in)) for loader in loaders]
    except (TypeError, MisconfigurationException) as error:  # a sampler that Lightning cannot make for each process
        raise ConfigurationError(f"{type(data).__name__}: {error}") from error
    finally:
        environment.set_global_rank(before)


def _first_batch(loader: Any, tensors_in: TensorsIn) -> list[Any]:
    torch.manual_seed(0)
    return list(tensors_in(next(iter(loader), None)))


def _of_loader(trainer: Any, one: tuple[Any, list[Any]], other: tuple[Any, list[Any]], world: int) -> list[str]:
    (loader, mine), (_, its) = one, other
    dataset = getattr(loader, "dataset", None)
    name = f"the training data ({type(dataset).__name__})"
    if not mine or not its:
        raise ConfigurationError(f"{name} has no batch for each of {world} processes: use fewer, or smaller batches")
    rows: int | None = None
    steps: int | None = None
    with contextlib.suppress(TypeError):
        rows, steps = len(dataset), len(loader)  # type: ignore[arg-type]
    if rows is not None and rows < world:
        raise ConfigurationError(f"{name} has {rows} rows for {world} processes")
    if len(mine) == len(its) and all(map(torch.equal, mine, its)):
        way_out = (
            "split it in its __iter__ by rank and worker"
            if isinstance(dataset, IterableDataset)
            else ("leave trainer.use_distributed_sampler at true, or give the loader a DistributedSampler")
        )
        raise ConfigurationError(
            f"{name} is not split: processes 0 and 1 of {world} read the same first batch; {way_out}"
        )
    if rows is None or steps is None:
        return []
    window, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
    steps = min(steps, limit) if isinstance(limit, int) else int(steps * limit)
    if hasattr(trainer.strategy, "check_window"):
        trainer.strategy.check_window(steps, window)
    notes = [f"{rows:,} rows, {steps:,} batches an epoch for each of {world} processes"]
    if steps % window:
        notes.append(
            f"the last {steps % window} of {steps:,} batches are a window of their own, of {window} accumulated"
        )
    return notes
