"""Loader tuning: workers, prefetching and pinning of the training loaders, picked by reading a few real batches.

    seconds a batch = (time of batch w + n - time of batch w) / n,  w = workers, whose first batches come together
    a setting replaces a simpler one if it takes less than (1 - margin) of its time

Saves: the time for which steps wait for data, without trying settings by hand.
Costs: (w + n + 1) batches a setting before the first step; nothing afterwards.
Source: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html, asynchronous data loading.
"""

import copy
import math
import multiprocessing
import os
import time
from lightning.pytorch import LightningModule, Trainer
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient.declaration import Report, techniques_of
from lit_efficient.errors import check_number, refusal
from lit_efficient.internals.torch_loaders import copied, set_loading
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.mechanisms.moving import move
from lit_efficient.mechanisms.order.resumable_loader import ResumableLoader
from lit_efficient.mechanisms.rewind import (
    generator_states,
    other_randomness,
    own_generators,
    random_states,
    same_random_states,
    set_generator_states,
)
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


@dataclass(frozen=True)
class Loading:
    """How a ``DataLoader`` gets its batches, the simplest first where settings are sorted.

    Args:
        num_workers: Worker processes.
        prefetch_factor: Batches that each of them reads ahead; ``None`` without workers.
        pin_memory: Whether batches lie in pinned memory.
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> "Loading":
        """A loader's own."""
        return cls(loader.num_workers, loader.prefetch_factor, loader.pin_memory)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value is not None)


Cost = Callable[[Loading], float]


def pick(
    start: Loading,
    workers: Sequence[int],
    prefetch: Sequence[int],
    pin: Sequence[bool],
    margin: float,
    cost: Cost,
) -> tuple[Loading, dict[Loading, float]]:
    """Choose workers, then prefetching, then pinning, each with the best of the others so far.

    Args:
        start: Tried first; kept where nothing can be measured.
        workers: Numbers of workers to try, as many as ``start`` has in any case.
        prefetch: Factors to try.
        pin: What to try of pinning.
        margin: Share by which a setting must be faster than a simpler one.
        cost: Seconds a batch; infinite for what does not run.

    Returns:
        The choice, and what was measured.

    Example:
        >>> pick(Loading(), [0, 2, 4], [2], [False], 0.1, lambda loading: 1 / (1 + min(loading.num_workers, 2)))[0]
        Loading(num_workers=2, prefetch_factor=2, pin_memory=False)
    """
    costs: dict[Loading, float] = {}

    def best(candidates: list[Loading], known: Loading) -> Loading:
        for one in candidates:
            if one not in costs:
                costs[one] = cost(one)
        found = min(candidates, key=_complexity)
        for one in sorted(candidates, key=_complexity):
            if costs[one] < costs[found] * (1 - margin) or math.isinf(costs[found]):
                found = one
        return known if math.isinf(costs[found]) else found

    factor = start.prefetch_factor or min(prefetch)
    numbers = sorted({start.num_workers, *workers})
    choice = best([replace(start, num_workers=n, prefetch_factor=factor if n else None) for n in numbers], start)
    if choice.num_workers:
        choice = best([replace(choice, prefetch_factor=n) for n in sorted({factor, *prefetch})], choice)
    return best([replace(choice, pin_memory=value) for value in {start.pin_memory, *pin}], choice), costs


def _complexity(loading: Loading) -> tuple[int, ...]:
    return tuple(int(value or 0) for value in astuple(loading))


def seconds_a_batch(
    loader: DataLoader[Any], loading: Loading, batches: int, device: torch.device, clock: Callable[[], float]
) -> float:
    """Read a few batches with a copy of a loader, and leave its order and all generators as they were.

    Returns:
        Seconds a batch after the first ones, which workers have ready together; infinite where it cannot be read so.
    """
    other = apart(loader, loading)
    generators = own_generators(loader)
    states = generator_states(generators)
    marks: list[float] = []
    try:
        with other_randomness(random_states()):
            for batch in other:
                if device.type == "cuda":
                    move(batch, device)
                    torch.cuda.synchronize(device)
                marks.append(clock())
                if len(marks) >= max(1, loading.num_workers) + batches:
                    break
    except Exception:  # not picklable, not to be forked, too large for shared memory: another setting may do
        return math.inf
    finally:
        set_generator_states(generators, states)
    first = min(max(1, loading.num_workers), len(marks) - 1)
    return (marks[-1] - marks[first - 1]) / (len(marks) - first) if len(marks) > 1 else math.inf


def apart(loader: DataLoader[Any], loading: Loading) -> DataLoader[Any]:
    """A copy of a loader with samplers of its own, on the same data set, that reads in another way."""
    other = set_loading(copied(loader), *astuple(loading))
    memo = {id(loader.dataset): loader.dataset}
    for name in ("batch_sampler", "sampler"):
        with suppress(Exception):  # what cannot be copied is begun again for each pass anyway
            vars(other)[name] = copy.deepcopy(vars(loader)[name], memo)
    return other


class DataLoaderTuner(Technique):
    """Pick workers, prefetching and pinning of the training loaders by reading a few batches before the first step.

    The order of the data, random draws and resuming do not depend on the choice: a resumed run measures anew. Where
    they would (an iterable data set, one that draws random numbers without `ExactResume`), the workers stay as many as
    they are. Loaders of other kinds, and those with a state of their own, are left alone, and that is said.

    Args:
        workers: numbers of workers to try. ``null``: 0, 1, 2, 4 and so on up to the processors of each process.
        prefetch: batches that a worker may read ahead.
        batches: batches to measure with each setting.
        margin: share by which a setting must be faster than a simpler one.

    Raises:
        ConfigurationError: For an argument out of range.
    """

    computes = "same"
    helps = {"speed": (5, "workers and pinning by measuring, where steps wait")}

    def __init__(
        self,
        workers: Sequence[int] | None = None,
        prefetch: Sequence[int] = (2, 4),
        batches: int = 8,
        margin: float = 0.1,
    ) -> None:
        super().__init__()
        for name, values, least in (("workers", workers, 0), ("prefetch", prefetch, 1)):
            if values is not None and not values:
                raise refusal("DataLoaderTuner", name, "a list of numbers", values)
            for value in values or ():
                check_number("DataLoaderTuner", name, value, least=least, whole=True)
        check_number("DataLoaderTuner", "batches", batches, least=1, whole=True)
        check_number("DataLoaderTuner", "margin", margin, least=0, below=1)
        self.workers = workers
        self.prefetch = prefetch
        self.batches = batches
        self.margin = margin
        self.chosen: list[Loading] = []  # of each training loader in turn
        self._cost: Callable[..., float] = seconds_a_batch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.chosen = []
            wrap_method(trainer.strategy, "process_dataloader", _process_dataloader)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        unwrap_method(trainer.strategy, "process_dataloader", _process_dataloader)
        super().teardown(trainer, pl_module, stage)

    def describe(self, module: Any) -> Report:
        if not self.chosen:
            return Report(f"tries training loaders, {self.batches} batches a setting")
        return Report("; ".join(map(str, self.chosen)))

    def tuned(self, trainer: Trainer, loader: Any) -> Any:
        """The loader with the setting that was picked for it, or itself where that must not change."""
        if not isinstance(loader, DataLoader):
            return self._leave(loader, "is no DataLoader")
        own_state = callable(getattr(loader, "state_dict", None)) and not isinstance(loader, ResumableLoader)
        if own_state or type(loader).__iter__ not in (DataLoader.__iter__, ResumableLoader.__iter__):
            return self._leave(loader, "has a state or an iterator of its own, which may depend on its workers")
        iterable = isinstance(loader.dataset, IterableDataset)
        if iterable and not loader.num_workers:
            return self._leave(loader, f"reads {type(loader.dataset).__name__} here, where trying would move it on")
        start, device = Loading.of(loader), trainer.strategy.root_device
        workers = [start.num_workers]
        counters = {} if iterable else _counters(loader.dataset)
        draws = iterable or self._draws(trainer, loader)
        if moved := [name for name, value in counters.items() if getattr(loader.dataset, name) != value]:
            vars(loader.dataset).update(counters)
            return self._leave(loader, f"reads {type(loader.dataset).__name__}, whose {moved[0]} changes as it is read")
        if not draws:
            workers = [n for n in self._numbers(trainer, start) if n or not loader.timeout]
        pin = [False, True] if device.type == "cuda" else []

        def cost(loading: Loading) -> float:
            return self._cost(loader, loading, self.batches, device, time.perf_counter)

        choice, costs = pick(start, workers, self.prefetch, pin, self.margin, cost)
        choice = trainer.strategy.broadcast(choice)
        self.chosen.append(choice)
        lines = [f"{seconds * 1000:10.2f} ms  {one}" + "  <-" * (one == choice) for one, seconds in costs.items()]
        rank_zero_info("\n".join([f"DataLoaderTuner: {choice} (was: {start})", *lines]))
        return set_loading(copied(loader), *astuple(choice))

    def _numbers(self, trainer: Trainer, start: Loading) -> list[int]:
        if self.workers is not None:
            return list(self.workers)
        if not start.num_workers and multiprocessing.get_start_method() != "fork":
            rank_zero_info(
                "DataLoaderTuner: workers would import the main script again, which may not be made for that: none are "
                "tried. Name their numbers if it is: workers=[0, 2, 4]"
            )
            return [0]
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        most = max(1, processors // max(1, trainer.num_devices))
        return [0, *(2**i for i in range(most.bit_length()))]

    def _draws(self, trainer: Trainer, loader: DataLoader[Any]) -> bool:
        """Whether reading a batch draws random numbers, in an order that depends on the workers."""
        own, every = own_generators(loader.dataset), own_generators(loader)
        states, states_of_all = generator_states(own), generator_states(every)
        drew = False
        with other_randomness(random_states()), suppress(Exception):  # what cannot be read here shows when it is tried
            other = iter(apart(loader, Loading()))
            for _ in range(2):  # a sampler may draw for the first
                before = random_states()
                next(other, None)
            drew = not same_random_states(before, random_states())
        seeded = isinstance(loader, ResumableLoader) or any(
            Trait.SEEDS_BATCHES in one.traits for one in techniques_of(trainer)
        )
        drew = (drew and not seeded) or not same_random_states(states, generator_states(own))
        set_generator_states(every, states_of_all)
        if drew:
            way_out = "" if seeded else ". ExactResume seeds each batch, and lets it change"
            rank_zero_info(
                f"DataLoaderTuner: {type(loader.dataset).__name__} draws random numbers in an order that depends on "
                f"the number of workers: that stays as it is{way_out}"
            )
        return drew

    def _leave(self, loader: Any, why: str) -> Any:
        rank_zero_info(f"DataLoaderTuner: a {type(loader).__name__} stays as it is: it {why}")
        return loader


def _counters(dataset: Any) -> dict[str, Any]:
    """The numbers and texts among the attributes of a data set: positions and counts, if it has any."""
    return {
        name: value for name, value in getattr(dataset, "__dict__", {}).items() if isinstance(value, int | float | str)
    }


def _process_dataloader(self: Any, dataloader: Any) -> Any:
    trainer = self.lightning_module.trainer
    technique = next((one for one in trainer.callbacks if isinstance(one, DataLoaderTuner)), None)
    # The trainer is in its training stage for training loaders only.
    if technique is not None and trainer.training:
        dataloader = technique.tuned(trainer, dataloader)
    return inner_method(self, "process_dataloader", _process_dataloader)(dataloader)
