"""The search for a batch size: what is tried, within which memory, and what came of it.

    budget = (1 - margin) * limit;    a size fits if its training and validation steps ran within the budget

The margin is inside the trial, so that what is returned is what ran. A trial is two optimizer steps, because the second
has the optimizer's states, and up to two micro-batches each, because the second has the first one's gradients; more
micro-batches need no more.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from lit_efficient.errors import ConfigurationError, LitEfficientError, OutOfMemoryError
from lit_efficient.internals.lightning_data import data_source, wants_distributed_sampler
from lit_efficient.internals.torch_trees import tree_map_only
from lit_efficient.mechanisms.order.keyed_batch_sampler import KeyedBatchSampler
from lit_efficient.mechanisms.trials.batch_size import BatchSizeTarget, candidate_sizes, largest_fitting
from lit_efficient.mechanisms.trials.memory import (
    AllocationMeter,
    accelerator_limit,
    available_cpu_memory,
    format_bytes,
    parse_bytes,
)
from lit_efficient.mechanisms.trials.probes import Longest, ProbeBatches, check_loader, loaders_in
from lit_efficient.mechanisms.trials.steps import Trials


@dataclass
class Trial:
    """One size that was tried."""

    size: int  # samples a batch and process
    accumulation: int  # batches an optimizer step would have
    peak_bytes: int = 0  # the most memory that was in use, up to the failure where it failed
    failed_in: str = ""  # ``training`` or ``validation``, or an empty string if it ran

    def line(self) -> str:
        """A line of the table of trials."""
        outcome = f"out of memory in {self.failed_in}" if self.failed_in else "ran"
        return f"    {self.size:>6} x {self.accumulation:<5} {format_bytes(self.peak_bytes):>12}  {outcome}"


@dataclass
class FoundBatch:
    """What the search found: it is kept in checkpoints, so that a resumed run does not search again.

    ``batches`` of an epoch are as many optimizer steps as before: smaller batches leave less out under ``drop_last``.
    """

    size: int
    accumulation: int
    peak_bytes: int
    budget_bytes: int
    trials: list[dict[str, Any]] = field(default_factory=list)
    batches: int | None = None


class BatchSearch:
    """One search on a trainer that stands before its first epoch.

    Of the memory that may be used, or all there is, ``margin`` is a share to keep free; ``scan`` samples are looked at
    for the longest ones, and callbacks whose classes ``idle`` names do not act.
    """

    def __init__(
        self,
        trainer: Any,
        place: BatchSizeTarget,
        memory_limit: int | str | None,
        margin: float,
        include_validation: bool,
        scan: int,
        idle: Iterable[str],
    ) -> None:
        self.trainer, self.place, self.scan = trainer, place, scan
        self.asked = place.value
        self.accumulation = trainer.accumulate_grad_batches
        self.validates = include_validation and trainer.enable_validation
        # An early error if the attribute is not what the loader follows.
        self.most = min(self._samples_a_process(loader) for loader in loaders_in(place.loaders()))
        self.trials = Trials(trainer, idle)
        self.device = trainer.strategy.root_device
        limits = [self._available(), None if memory_limit is None else parse_bytes(memory_limit)]
        if limits == [None, None]:
            raise ConfigurationError(
                f"{place.owner}: how much memory is free cannot be read on {sys.platform}: give memory_limit"
            )
        self.limit = min(limit for limit in limits if limit is not None)
        self.budget = int(self.limit * (1 - margin))
        self.tried: list[Trial] = []
        self._size = 0  # of the present trial
        self.effective: int | None = None
        self._longest: dict[str, list[Any]] = {}

    def run(self, mode: str, keep_effective_batch: bool, min_size: int, max_size: int | None) -> FoundBatch:
        """Find the largest size.

        Raises:
            ConfigurationError: If no size is within the bounds.
            OutOfMemoryError: If the smallest does not fit.
        """
        asked = min(self.asked, self.most)
        if asked < self.asked:
            rank_zero_info(
                f"{self.place.owner}: batches of {self.asked} were asked for, but a process has {self.most} samples an "
                f"epoch: {self.most} is the largest size there is"
            )
        self.effective = asked * self.accumulation if keep_effective_batch else None
        most = min(self.most, max_size or self.most)
        sizes = [size for size in candidate_sizes(mode, most, self.effective) if size >= min_size]
        if not sizes:
            kept = f" that divides the effective batch of {self.effective}" if self.effective else ""
            raise ConfigurationError(f"{self.place.owner}: there is no size from {min_size} (min_size) to {most}{kept}")
        try:
            found = largest_fitting(sizes, self._fits)
        except (RuntimeError, ValueError) as error:  # batch normalisation, and losses of pairs, need two
            if self._size != 1 or len(sizes) == 1 or isinstance(error, LitEfficientError):
                raise
            rank_zero_info(f"{self.place.owner}: a batch of 1 does not run, so {sizes[1]} is the smallest: {error}")
            sizes = sizes[1:]
            found = largest_fitting(sizes, self._fits)
        self.trials.finish()
        if found is None:
            raise self._too_much(sizes[0])
        peak = next(trial.peak_bytes for trial in self.tried if trial.size == found)
        size = self.asked if found == asked else found  # what is above the data's length stays as it was written
        trials = [asdict(trial) for trial in self.tried]
        batches = None if self.effective is None else math.ceil(self.trainer.num_training_batches * self.asked / size)
        return FoundBatch(size, self._accumulation(found), peak, self.budget, trials, batches)

    def _accumulation(self, size: int) -> int:
        return self.accumulation if self.effective is None else self.effective // size

    def _fits(self, size: int) -> bool:
        trial = self._try(size, self.budget)
        self.tried.append(trial)
        return not trial.failed_in

    def _try(self, size: int, budget: int) -> Trial:
        """Run the steps of one size within a budget."""
        self._size = size
        trial = Trial(size, self._accumulation(size), failed_in="training")
        micro_batches = min(trial.accumulation, 2)
        try:
            with self.trials.trial(micro_batches), self._sized(size), self._measured(budget, trial) as meter:
                train = self._maker(self.place.loaders(), "training", meter)
                for _ in range(2 * micro_batches):
                    self.trials.train(train)
                trial.failed_in = "validation"
                if self.validates:
                    source = data_source(self.trainer.fit_loop.epoch_loop.val_loop)
                    loaders = loaders_in(source.dataloader())
                    makers = [self._maker(loader, f"validation {i}", meter) for i, loader in enumerate(loaders)]
                    self.trials.validate(makers)
        except OutOfMemoryError:
            return trial
        # A backend without a limit of its own has not refused anything: compare.
        if self.trials.agree(float(trial.peak_bytes <= budget)) == 1:
            trial.failed_in = ""
        return trial

    @contextlib.contextmanager
    def _sized(self, size: int) -> Any:
        before = self.place.value
        self.place.set(size)
        try:
            yield
        finally:
            self.place.set(before)

    @contextlib.contextmanager
    def _measured(self, budget: int, trial: Trial) -> Any:
        """Hold the steps inside to a budget; the peak goes into ``trial``."""
        if self.device.type == "cpu":
            meter = AllocationMeter(self.trials.record.tensors, budget)
            try:
                # Uncompiled: the compiler gives up, for good, a function that is called under a dispatch mode.
                with torch.compiler.set_stance("force_eager"), meter:
                    yield meter
            finally:
                trial.peak_bytes = meter.peak
        else:
            try:
                with accelerator_limit(self.device, budget):
                    yield None
            finally:
                trial.peak_bytes = torch.accelerator.max_memory_allocated(self.device)

    def _maker(self, loaders: Any, name: str, meter: AllocationMeter | None) -> Callable[[], Any]:
        """What makes a batch of the longest samples, in the structure in which the loop hands batches on."""
        loaders = getattr(loaders, "iterables", loaders)
        probes = {id(loader): self._probe(loader, f"{name} {i}") for i, loader in enumerate(loaders_in(loaders))}

        def make() -> Any:
            # Reading samples is not counted: they may be views of a whole dataset, which has its place anyway.
            with contextlib.nullcontext() if meter is None else meter.paused():
                batch = tree_map_only(DataLoader, lambda loader: probes[id(loader)].batch(), loaders)
            if meter is not None:
                meter.add_all(batch)
            return batch

        return make

    def _probe(self, loader: DataLoader[Any], name: str) -> ProbeBatches:
        validation = ", validation (include_validation=False leaves it out)" if name.startswith("validation") else ""
        check_loader(loader, self.place.owner + validation)
        if name not in self._longest:
            self._longest[name] = ProbeBatches.find(loader, self.scan, self._hook())
        return ProbeBatches(loader, self._longest[name])

    def _hook(self) -> Longest | None:
        owners = (self.trainer.datamodule, self.trainer.lightning_module)
        return next((owner.longest_samples for owner in owners if hasattr(owner, "longest_samples")), None)

    def _samples_a_process(self, loader: DataLoader[Any]) -> int:
        if isinstance(loader.sampler, KeyedBatchSampler):
            return loader.sampler.largest_batch()
        samples = len(loader.sampler)  # type: ignore[arg-type]
        if samples < 1:
            raise ConfigurationError(
                f"{self.place.owner}: {type(loader.dataset).__name__} is empty: there is nothing to try"
            )
        if wants_distributed_sampler(self.trainer, loader):
            replicas = self.trainer.distributed_sampler_kwargs["num_replicas"]
            return -(-samples // int(replicas))
        return samples

    def _available(self) -> int | None:
        """Bytes of the device that this process may have in all, what it holds now included; ``None``: unknown."""
        if self.device.type == "cpu":
            if (free := available_cpu_memory()) is None:
                return None
            held = AllocationMeter(self.trials.record.tensors).live
            return held + free // max(1, getattr(self.trainer.strategy, "num_processes", 1))
        return torch.accelerator.get_memory_info(self.device)[0] + torch.accelerator.memory_reserved(self.device)

    def _too_much(self, size: int) -> OutOfMemoryError:
        """The error for a smallest size that does not fit, with what it needs where that can be measured."""
        first = self.tried[0]
        needs = f"more than {format_bytes(first.peak_bytes)} ({first.peak_bytes} bytes)"
        available = self._available()
        if self.device.type == "cpu" and available is not None and available > self.budget:
            whole = self._try(size, available)
            if not whole.failed_in:
                needs = f"{format_bytes(whole.peak_bytes)} ({whole.peak_bytes} bytes)"
        limit = f"{format_bytes(self.budget)} ({self.budget} bytes)"
        return OutOfMemoryError(
            f"{self.place.owner}: a batch of {size} needs {needs} in {first.failed_in}, and {limit} may be used, the "
            f"margin already taken from the limit of {format_bytes(self.limit)}; use a smaller model, shorter samples, "
            "activation checkpointing, a low-bit optimizer or more memory"
        )
