"""A data set that is kept in memory: each item is read once, before the first epoch, if all of them fit."""

import contextlib
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.trials.memory import available_cpu_memory, format_bytes
from lit_efficient.mechanisms.trials.probes import sample_bytes

_LOOKED_AT = 32  # items, which tell the size of all
_SHARE = 0.8  # of the free memory that they may take


class Preloaded(Dataset[Any]):
    """The items of a data set by key, read when they are added; workers that are forked share them.

    Args:
        dataset: Its items are found by key, and are the same whenever they are read.
        owner: Whose argument ``preload`` is, for errors.
        processes: How many on this machine keep as much.
    """

    def __init__(self, dataset: Any, owner: str, processes: int = 1) -> None:
        self.dataset = dataset
        self.owner = owner
        self.processes = processes
        self.items: dict[Any, Any] = {}

    def add(self, keys: Sequence[Any]) -> None:
        """Read what is not there yet.

        Raises:
            ConfigurationError: If that needs more than is free, with both numbers.
        """
        new = [key for key in keys if key not in self.items]
        some = new[:: max(1, len(new) // _LOOKED_AT)]
        need = sum(sample_bytes(self.dataset[key]) for key in some) / max(1, len(some)) * len(new) * self.processes
        free = available_cpu_memory()
        if free is not None and need > _SHARE * free:
            times = f" in each of {self.processes} processes" if self.processes > 1 else ""
            raise ConfigurationError(
                f"{self.owner}: preload: true needs {format_bytes(need)} for {len(new)} items{times}, and of "
                f"{format_bytes(free)} that are free it may take {_SHARE:.0%}: leave preload out, or set num_workers"
            )
        self.items |= {key: self.dataset[key] for key in new}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> Any:
        item = self.items[key]
        with contextlib.suppress(AttributeError):
            return item.copy()  # what is put into a batch's items is not put into these
        return item
