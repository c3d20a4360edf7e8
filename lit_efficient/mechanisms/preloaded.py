"""Dataset that keeps its items in memory: each item is read once, before the first epoch, if all items fit."""

import contextlib
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from lit_efficient.declaration import format_bytes
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.trials.memory import available_cpu_memory
from lit_efficient.mechanisms.trials.probes import sample_bytes

_SAMPLED = 32  # items from which the size of all items is estimated
_SHARE = 0.8  # fraction of the free memory that the items may take


class Preloaded(Dataset[Any]):
    """Dataset whose items are read when their keys are added. Forked worker processes share the items.

    Args:
        dataset: Dataset that returns an item for a key, and the same item each time.
        owner: Class whose argument ``preload`` is, for errors.
        processes: Number of processes on this machine that hold the items.
    """

    def __init__(self, dataset: Any, owner: str, processes: int = 1) -> None:
        self.dataset = dataset
        self.owner = owner
        self.processes = processes
        self.items: dict[object, Any] = {}

    def add(self, keys: Sequence[object]) -> None:
        """Read the items of those keys that have not been added yet.

        Raises:
            ConfigurationError: If the items need more memory than they may take, with both numbers.
        """
        new = [key for key in keys if key not in self.items]
        sampled = new[:: max(1, len(new) // _SAMPLED)]
        mean_bytes = sum(sample_bytes(self.dataset[key]) for key in sampled) / max(1, len(sampled))
        need = mean_bytes * len(new) * self.processes
        free = available_cpu_memory()
        if free is not None and need > _SHARE * free:
            times = ""
            if self.processes > 1:
                times = f" in each of {self.processes} processes"
            raise ConfigurationError(
                f"{self.owner}: preload: true needs {format_bytes(need)} for {len(new)} items{times}, but may take "
                f"only {_SHARE:.0%} of the {format_bytes(free)} that are free. Leave preload out, or set num_workers"
            )
        self.items |= {key: self.dataset[key] for key in new}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: object) -> Any:
        item = self.items[key]
        with contextlib.suppress(AttributeError):
            return item.copy()  # a transform that adds to the item must not change the stored one
        return item
