"""Loader tuning: choose workers, prefetching and pinning of the training loaders by reading a few real batches.

    seconds per batch = (time of batch w + n - time of batch w) / n,  w = workers, whose first batches come together
    a setting replaces a simpler one if it takes less than (1 - margin) of its time

Saves: the time for which steps wait for data, and the work of trying settings by hand.
Costs: (w + n + 1) batches per setting before the first step; nothing afterwards.
Source: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html, asynchronous data loading.
"""

import copy
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient.declaration import Report, technique_of, techniques_of
from lit_efficient.errors import check_list, check_number
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
    """Settings with which a ``DataLoader`` gets its batches.

    Args:
        num_workers: Number of worker processes.
        prefetch_factor: Number of batches that each worker reads ahead; ``None`` without workers.
        pin_memory: Copy batches into pinned memory.
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False

    @classmethod
    def of(cls, loader: DataLoader[object]) -> "Loading":
        """Return the settings of a loader."""
        return cls(loader.num_workers, loader.prefetch_factor, loader.pin_memory)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value is not None)


def pick(
    start: Loading,
    workers: Sequence[int],
    prefetch: Sequence[int],
    pin: Sequence[bool],
    margin: float,
    cost: Callable[[Loading], float],
) -> tuple[Loading, dict[Loading, float]]:
    """Choose workers, then prefetching, then pinning, each with the best values of the others so far.

    Args:
        start: Settings that are tried first, and kept if nothing can be measured.
        workers: Numbers of workers to try, besides that of ``start``.
        prefetch: Prefetch factors to try.
        pin: Values of ``pin_memory`` to try, besides that of ``start``.
        margin: Fraction by which a setting must be faster than a simpler one.
        cost: Function that returns the seconds per batch of a setting, infinite if it does not run.

    Returns:
        The chosen setting, and the costs of all settings that were tried.

    Example:
        >>> pick(Loading(), [0, 2, 4], [2], [False], 0.1, lambda loading: 1 / (1 + min(loading.num_workers, 2)))[0]
        Loading(num_workers=2, prefetch_factor=2, pin_memory=False)
    """
    costs: dict[Loading, float] = {}

    def best(candidates: list[Loading], known: Loading) -> Loading:
        for loading in candidates:
            if loading not in costs:
                costs[loading] = cost(loading)
        simplest, *others = sorted(candidates, key=_complexity)
        found = simplest
        for loading in others:
            if costs[loading] < costs[found] * (1 - margin) or math.isinf(costs[found]):
                found = loading
        return known if math.isinf(costs[found]) else found

    factor = start.prefetch_factor or min(prefetch)
    numbers = sorted({start.num_workers, *workers})
    choice = best([replace(start, num_workers=n, prefetch_factor=factor if n else None) for n in numbers], start)
    if choice.num_workers:
        choice = best([replace(choice, prefetch_factor=n) for n in sorted({factor, *prefetch})], choice)
    return best([replace(choice, pin_memory=value) for value in {start.pin_memory, *pin}], choice), costs


def _complexity(loading: Loading) -> tuple[int, ...]:
    """Return the key by which settings are sorted, the simplest first."""
    return tuple(int(value or 0) for value in astuple(loading))


def seconds_a_batch(
    loader: DataLoader[object], loading: Loading, batches: int, device: torch.device, clock: Callable[[], float]
) -> float:
    """Read a few batches with a copy of a loader. Its order and the states of all generators do not change.

    Args:
        loader: The loader.
        loading: Settings of the copy.
        batches: Number of batches to measure, after the first batches of the workers, which are ready together.
        device: Device to which batches are copied if it is a GPU.
        clock: Function that returns the time in seconds.

    Returns:
        Seconds per batch; infinite if the loader cannot be read with these settings.
    """
    copied_loader = apart(loader, loading)
    generators = own_generators(loader)
    states = generator_states(generators)
    warmup = max(1, loading.num_workers)
    times: list[float] = []
    try:
        with other_randomness(random_states()):
            for batch in copied_loader:
                if device.type == "cuda":
                    move(batch, device)
                    torch.cuda.synchronize(device)
                times.append(clock())
                if len(times) >= warmup + batches:
                    break
    except Exception:  # for example data that cannot be pickled or is too large: another setting may work
        return math.inf
    finally:
        set_generator_states(generators, states)
    if len(times) < 2:
        return math.inf
    first = min(warmup, len(times) - 1)
    return (times[-1] - times[first - 1]) / (len(times) - first)


def apart(loader: DataLoader[object], loading: Loading) -> DataLoader[object]:
    """Return a copy of a loader with other settings and its own samplers, on the same data set."""
    other = set_loading(copied(loader), *astuple(loading))
    memo = {id(loader.dataset): loader.dataset}
    for name in ("batch_sampler", "sampler"):
        with suppress(Exception):  # a sampler that cannot be copied starts again in each pass anyway
            vars(other)[name] = copy.deepcopy(vars(loader)[name], memo)
    return other


_MOST_WORKERS = 512  # per process; more than the processors of nearly all machines


class DataLoaderTuner(Technique):
    """Choose workers, prefetching and pinning of the training loaders by reading a few batches before the first step.

    The order of the data, random numbers and resuming do not depend on the choice, and a resumed run measures again. If
    they would depend on the number of workers (an iterable data set, or one that draws random numbers without
    `ExactResume`), this number does not change. Loaders of other classes and loaders with a state do not change
    either. A log line gives the reason.

    Args:
        workers: Numbers of workers to try, at most 512. ``null``: 0, 1, 2, 4 and so on up to the number of processors
            per process.
        prefetch: Numbers of batches to try that a worker may read ahead.
        batches: Number of batches to measure with each setting.
        margin: Fraction by which a setting must be faster than a simpler one.

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
        check_list("DataLoaderTuner", "workers", workers, "a list of numbers or null", null=True)
        check_list("DataLoaderTuner", "prefetch", prefetch, "a list of numbers")
        for number in workers or ():  # each of them is started
            check_number("DataLoaderTuner", "workers", number, least=0, most=_MOST_WORKERS, whole=True)
        for number in prefetch:
            check_number("DataLoaderTuner", "prefetch", number, least=1, whole=True)
        check_number("DataLoaderTuner", "batches", batches, least=1, whole=True)
        check_number("DataLoaderTuner", "margin", margin, least=0, below=1)
        self.workers = workers
        self.prefetch = prefetch
        self.batches = batches
        self.margin = margin
        self.chosen: list[Loading] = []  # settings of each training loader, in their order
        self._cost: Callable[..., float] = seconds_a_batch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.chosen = []
            wrap_method(trainer.strategy, "process_dataloader", _process_dataloader)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        unwrap_method(trainer.strategy, "process_dataloader", _process_dataloader)
        super().teardown(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        if not self.chosen:
            return Report(f"tries settings of training loaders, {self.batches} batches per setting")
        return Report("; ".join(map(str, self.chosen)))

    def tuned(self, trainer: Trainer, loader: Any) -> Any:
        """Return a copy of the loader with the best settings, or the loader itself if they must not change."""
        obstacle = _obstacle(loader)
        if obstacle:
            return self._leave(loader, obstacle)
        iterable = isinstance(loader.dataset, IterableDataset)
        start = Loading.of(loader)
        device = trainer.strategy.root_device
        workers = [start.num_workers]
        # Workers have a copy of an iterable data set. Others are read in this process, which may change attributes.
        counters = {} if iterable else _counters(loader.dataset)
        draws = iterable or self._draws(trainer, loader)
        changed = [name for name, value in counters.items() if getattr(loader.dataset, name) != value]
        if changed:
            vars(loader.dataset).update(counters)
            kind = type(loader.dataset).__name__
            return self._leave(loader, f"reads {kind}, whose attribute {changed[0]} changes when it is read")
        if not draws:
            workers = [n for n in self._numbers(trainer, start) if n or not loader.timeout]
        pin = [False, True] if device.type == "cuda" else []

        def cost(loading: Loading) -> float:
            return self._cost(loader, loading, self.batches, device, time.perf_counter)

        choice, costs = pick(start, workers, self.prefetch, pin, self.margin, cost)
        choice = trainer.strategy.broadcast(choice)
        self.chosen.append(choice)
        lines = [f"DataLoaderTuner: {choice} (was: {start})"]
        for loading, seconds in costs.items():
            line = f"{seconds * 1000:10.2f} ms  {loading}"
            lines.append(f"{line}  <-" if loading == choice else line)
        rank_zero_info("\n".join(lines))
        return set_loading(copied(loader), *astuple(choice))

    def _numbers(self, trainer: Trainer, start: Loading) -> list[int]:
        """Return the numbers of workers to try."""
        if self.workers is not None:
            return list(self.workers)
        if not start.num_workers and multiprocessing.get_start_method() != "fork":
            rank_zero_info(
                "DataLoaderTuner: no workers are tried, because they would import the main script again, which may "
                "not be written for this. If it is, name the numbers to try: workers=[0, 2, 4]"
            )
            return [0]
        processors = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):  # on Linux: a container may be limited to fewer
            processors = len(os.sched_getaffinity(0))
        most = max(1, processors // max(1, trainer.num_devices))
        return [0, *(2**i for i in range(most.bit_length()))]

    def _draws(self, trainer: Trainer, loader: DataLoader[object]) -> bool:
        """Return whether reading a batch draws random numbers in an order that depends on the workers."""
        own = own_generators(loader.dataset)
        every = own_generators(loader)
        own_before = generator_states(own)
        every_before = generator_states(every)
        draws = False
        with other_randomness(random_states()), suppress(Exception):  # an error is found when the loader is tried
            batches = iter(apart(loader, Loading()))
            next(batches, None)  # a sampler may draw for the first batch
            before = random_states()
            next(batches, None)
            draws = not same_random_states(before, random_states())
        seeds = (Trait.SEEDS_BATCHES in technique.traits for technique in techniques_of(trainer))
        seeded = isinstance(loader, ResumableLoader) or any(seeds)
        draws = (draws and not seeded) or not same_random_states(own_before, generator_states(own))
        set_generator_states(every, every_before)
        if draws:
            if seeded:
                remedy = ""
            else:
                remedy = ". ExactResume seeds each batch, so that it can change"
            rank_zero_info(
                f"DataLoaderTuner: {type(loader.dataset).__name__} draws random numbers in an order that depends on "
                f"the number of workers, so this number does not change{remedy}"
            )
        return draws

    def _leave(self, loader: object, reason: str) -> object:
        rank_zero_info(f"DataLoaderTuner: a {type(loader).__name__} does not change, because it {reason}")
        return loader


def _obstacle(loader: Any) -> str:
    """Return why the settings of a loader cannot change, as the end of a sentence, or an empty string."""
    if not isinstance(loader, DataLoader):
        return "is not a DataLoader"
    own_state = hasattr(loader, "state_dict") and not isinstance(loader, ResumableLoader)
    if own_state or type(loader).__iter__ not in (DataLoader.__iter__, ResumableLoader.__iter__):
        return "has its own state or iterator, which may depend on the workers"
    if isinstance(loader.dataset, IterableDataset) and not loader.num_workers:
        return f"reads {type(loader.dataset).__name__} in this process, which would advance it"
    return ""


def _counters(dataset: object) -> dict[str, object]:
    """Return the numbers and strings among the attributes of a data set, which include its positions and counts."""
    attributes = getattr(dataset, "__dict__", {})
    return {name: value for name, value in attributes.items() if isinstance(value, int | float | str)}


def _process_dataloader(self: Any, dataloader: Any) -> Any:
    """Wrap of ``strategy.process_dataloader`` that tunes training loaders."""
    trainer = self.lightning_module.trainer
    technique = technique_of(trainer, DataLoaderTuner)
    # The trainer is in its training stage only while training loaders are processed.
    if technique is not None and trainer.training:
        dataloader = technique.tuned(trainer, dataloader)
    return inner_method(self, "process_dataloader", _process_dataloader)(dataloader)
