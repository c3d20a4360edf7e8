"""This process among those that train together."""

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import distributed

from lit_efficient.errors import ConfigurationError

_PATIENCE = 30.0  # seconds


@contextmanager
def saying_who_waits(place: Any, limit: str) -> Iterator[None]:
    """Say after half a minute that this process, at its ``place`` in a cluster, still waits inside for others to start.

    Raises:
        ConfigurationError: Where they have not come, or their address is taken.
    """
    who, where = f"process {place.global_rank()} of {place.world_size()}", f"{place.main_address}:{place.main_port}"
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
    """In a command that torchrun started: meet its other processes, which wait for each other for as long as it takes.

    Returns:
        As :func:`place_among_ranks`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not distributed.is_initialized():
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        with saying_who_waits(TorchElasticEnvironment(), "as long as it takes"):
            distributed.init_process_group("gloo", timeout=timedelta(days=30))
        atexit.register(distributed.destroy_process_group)
    return place_among_ranks()


def place_among_ranks() -> tuple[int, int]:
    """This process's number, and how many there are; (0, 1) where no group has been formed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def data_rank(trainer: Any) -> int:
    """This process's number among those with batches of their own: processes of tensor parallelism share one."""
    return int((trainer.distributed_sampler_kwargs or {}).get("rank", trainer.global_rank))


def readers(trainer: Any) -> int:
    """How many processes have tokens of their own: of those that share each layer, and so a batch, one."""
    strategy, places = trainer.strategy, trainer.distributed_sampler_kwargs or {}
    slices = getattr(getattr(strategy, "parallel", None), "context", 1)
    return int(places.get("num_replicas", trainer.world_size)) * slices


def check_batches(trainer: Any) -> None:
    """Refuse a fit whose processes have unlike numbers of batches, where these are known.

    Raises:
        ConfigurationError: On all processes, before one waits for the others.
    """
    counts = gather_objects((trainer.num_training_batches, trainer.num_val_batches))
    steps, window = trainer.max_steps, trainer.accumulate_grad_batches
    for part, which in enumerate(("training", "validation")):
        found = [one[part] for one in counts]
        reached = part or steps < 0 or steps * window > min(found)
        if reached and any(one != found[0] for one in found):
            raise ConfigurationError(
                f"the processes have {', '.join(map(str, found))} batches of {which}, and would wait for each other: "
                "give each as many, by a DistributedSampler or Lightning's own (use_distributed_sampler=True)"
            )


def gather_objects(value: Any) -> list[Any]:
    """Each process's value, in all of them."""
    _, size = place_among_ranks()
    found = [value] * size
    if size > 1:
        distributed.all_gather_object(found, value)
    return found
