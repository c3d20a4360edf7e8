"""Ranks: the place of this process among those that train together, and messages between them."""

import atexit
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import distributed

from lit_efficient.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch import Trainer

T = TypeVar("T")
_PATIENCE = 30.0  # seconds without a message


@contextmanager
def report_waiting(place: "ClusterEnvironment", limit: str) -> Iterator[None]:
    """Print, after half a minute in this context, that this process still waits for others to start.

    Args:
        place: Lightning's cluster environment of this process.
        limit: Limit of the waiting time, in words.

    Raises:
        ConfigurationError: If the others do not come, or the address is in use.
    """
    who = f"process {place.global_rank()} of {place.world_size()}"
    where = f"{place.main_address}:{place.main_port}"
    said = f"{who} waits for the others to start and to reach {where}, {limit}"
    timer = threading.Timer(_PATIENCE, print, (said,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    except (distributed.DistStoreError, distributed.DistNetworkError) as error:
        why = str(error).splitlines()[0]
        raise ConfigurationError(f"{who} has not met the others at {where}: {why}") from error
    finally:
        timer.cancel()


def join_ranks() -> tuple[int, int]:
    """Join the other processes of a command that torchrun started. They wait for each other without a limit.

    Returns:
        As :func:`place_among_ranks`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not distributed.is_initialized():
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        with report_waiting(TorchElasticEnvironment(), "as long as it takes"):
            distributed.init_process_group("gloo", timeout=timedelta(days=30))
        atexit.register(distributed.destroy_process_group)
    return place_among_ranks()


def place_among_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of processes; (0, 1) without a process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def check_batches(trainer: "Trainer") -> None:
    """Refuse a fit whose processes have different numbers of batches, where these are known.

    Raises:
        ConfigurationError: In all processes, before one waits for the others.
    """
    training = gather_objects(trainer.num_training_batches)
    # A fit that ends before the shortest epoch does not reach the difference.
    if trainer.max_steps < 0 or trainer.max_steps * trainer.accumulate_grad_batches > min(training):
        _check_equal(training, "training")
    _check_equal(gather_objects(trainer.num_val_batches), "validation")


def _check_equal(counts: Sequence[object], which: str) -> None:
    if any(count != counts[0] for count in counts):
        raise ConfigurationError(
            f"the processes have {', '.join(map(str, counts))} batches of {which}, and would wait for each other: "
            "give each as many, by a DistributedSampler or Lightning's own (use_distributed_sampler=True)"
        )


def gather_objects(value: T, group: Any = None) -> list[T]:
    """Return the values of all processes, in every process. A thread needs a ``group`` of its own."""
    _, size = place_among_ranks()
    found = [value] * size
    if size > 1:
        distributed.all_gather_object(found, value, group=group)
    return found


def await_ranks(group: Any = None) -> None:
    """Wait until all processes have called this function. A thread needs a ``group`` of its own."""
    gather_objects(None, group)
