"""Search for the largest batch size whose training and validation steps run within a memory budget.

    budget = (1 - margin) * limit;    a size fits if its training and validation steps ran within the budget

The margin is part of the trial, so the returned size has run with the margin kept free. A trial consists of two
optimizer steps, because optimizer states exist only in the second. Each step has up to two micro-batches, because
the gradients of the first exist only in the second. More micro-batches need no more memory.
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

from lit_efficient.declaration import format_bytes
from lit_efficient.errors import ConfigurationError, LitEfficientError, OutOfMemoryError, parse_bytes
from lit_efficient.internals.lightning_data import data_source, wants_distributed_sampler
from lit_efficient.internals.torch_trees import tree_map_only
from lit_efficient.mechanisms.order.keyed_batch_sampler import KeyedBatchSampler
from lit_efficient.mechanisms.trials.batch_size import BatchSizeTarget, candidate_sizes, largest_fitting
from lit_efficient.mechanisms.trials.memory import AllocationMeter, accelerator_limit, available_cpu_memory
from lit_efficient.mechanisms.trials.probes import Longest, ProbeBatches, check_loader, loaders_in
from lit_efficient.mechanisms.trials.steps import Trials


@dataclass
class Trial:
    """Result of the trial of one batch size."""

    size: int  # samples per batch and process
    accumulation: int  # batches per optimizer step
    peak_bytes: int = 0  # largest memory in use, until the failure if the trial failed
    failed_in: str = ""  # "training" or "validation", or "" if the trial ran

    def line(self) -> str:
        """Return this trial as a line of the table of trials."""
        outcome = f"out of memory in {self.failed_in}" if self.failed_in else "ran"
        return f"    {self.size:>6} x {self.accumulation:<5} {format_bytes(self.peak_bytes):>12}  {outcome}"


@dataclass
class FoundBatch:
    """Result of the search. It is stored in checkpoints, so that a resumed run does not search again.

    ``batches`` is the number of batches of an epoch that keeps its number of optimizer steps. Without it smaller
    batches would give more steps under ``drop_last``, which leaves out fewer samples.
    """

    size: int
    accumulation: int
    peak_bytes: int
    budget_bytes: int
    trials: list[dict[str, Any]] = field(default_factory=list)
    batches: int | None = None


class BatchSearch:
    """One search, on a trainer before its first epoch.

    Args:
        trainer: The trainer.
        place: Attribute or loader that holds the batch size.
        memory_limit: Memory that may be used, in bytes or as a text like ``12GiB``. ``None``: all available memory.
        margin: Fraction of that memory to keep free.
        include_validation: Run validation steps as well.
        scan: Number of samples among which the longest are searched.
        idle: Names of callback classes that do not act in trials.
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
        self.trainer = trainer
        self.place = place
        self.scan = scan
        self.requested = place.value
        self.accumulation = trainer.accumulate_grad_batches
        self.validates = include_validation and trainer.enable_validation
        # place.loaders() raises here, before any trial, if the loaders do not follow the attribute.
        self.most = min(self._samples_per_process(loader) for loader in loaders_in(place.loaders()))
        self.trials = Trials(trainer, idle)
        self.device = trainer.strategy.root_device
        limits = [self._available(), None if memory_limit is None else parse_bytes(memory_limit)]
        if limits == [None, None]:
            raise ConfigurationError(
                f"{place.owner}: the free memory cannot be read on {sys.platform}: set memory_limit"
            )
        self.limit = min(limit for limit in limits if limit is not None)
        self.budget = int(self.limit * (1 - margin))
        self.tried: list[Trial] = []
        self._size = 0  # of the present trial
        self.effective: int | None = None
        self._longest: dict[str, list[object]] = {}

    def run(self, mode: str, keep_effective_batch: bool, min_size: int, max_size: int | None) -> FoundBatch:
        """Find the largest size that fits.

        Args:
            mode: ``power`` or ``binary``, see :func:`candidate_sizes`.
            keep_effective_batch: Change the accumulation such that the effective batch stays the same.
            min_size: Smallest size to try.
            max_size: Largest size to try. ``None``: as many samples as a process has.

        Raises:
            ConfigurationError: If no size is within the bounds.
            OutOfMemoryError: If the smallest size does not fit.
        """
        requested = min(self.requested, self.most)
        if requested < self.requested:
            rank_zero_info(
                f"{self.place.owner}: the batch size is {self.requested}, but a process has only {self.most} samples "
                f"per epoch: the search begins at {self.most}"
            )
        if keep_effective_batch:
            self.effective = requested * self.accumulation
        else:
            self.effective = None
        most = min(self.most, max_size or self.most)
        sizes = [size for size in candidate_sizes(mode, most, self.effective) if size >= min_size]
        if not sizes:
            kept = ""
            if self.effective:
                kept = f" that divides the effective batch of {self.effective}"
            raise ConfigurationError(f"{self.place.owner}: there is no size from {min_size} (min_size) to {most}{kept}")
        try:
            found = largest_fitting(sizes, self._fits)
        except (RuntimeError, ValueError) as error:  # batch normalisation and losses of pairs need two samples
            if self._size != 1 or len(sizes) == 1 or isinstance(error, LitEfficientError):
                raise
            rank_zero_info(f"{self.place.owner}: a batch of 1 does not run, so {sizes[1]} is the smallest: {error}")
            sizes = sizes[1:]
            found = largest_fitting(sizes, self._fits)
        self.trials.finish()
        if found is None:
            raise self._too_much(sizes[0])
        peak = next(trial.peak_bytes for trial in self.tried if trial.size == found)
        # A size above the length of the data stays as the user wrote it.
        size = self.requested if found == requested else found
        trials = [asdict(trial) for trial in self.tried]
        batches = None
        if self.effective is not None:
            batches = math.ceil(self.trainer.num_training_batches * self.requested / size)
        return FoundBatch(size, self._accumulation(found), peak, self.budget, trials, batches)

    def _accumulation(self, size: int) -> int:
        if self.effective is None:
            return self.accumulation
        return self.effective // size

    def _fits(self, size: int) -> bool:
        trial = self._try(size, self.budget)
        self.tried.append(trial)
        return not trial.failed_in

    def _try(self, size: int, budget: int) -> Trial:
        """Run the steps of one size within a budget in bytes."""
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
        # A backend that cannot enforce a limit has raised nothing, so the peak is compared with the budget.
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
        """Context in which memory is limited to ``budget`` bytes. The peak is written to ``trial``."""
        if self.device.type == "cpu":
            meter = AllocationMeter(self.trials.record.tensors, budget)
            try:
                # Uncompiled, because the compiler permanently gives up a function that is called under a dispatch mode.
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
        """Return a function that makes a batch of the longest samples, in the structure that the loop passes on."""
        loaders = getattr(loaders, "iterables", loaders)
        probes = {id(loader): self._probe(loader, f"{name} {i}") for i, loader in enumerate(loaders_in(loaders))}

        def make() -> Any:
            # The memory of samples is not counted while they are read: they may be views of a dataset in memory.
            with contextlib.nullcontext() if meter is None else meter.paused():
                batch = tree_map_only(DataLoader, lambda loader: probes[id(loader)].batch(), loaders)
            if meter is not None:
                meter.add_all(batch)
            return batch

        return make

    def _probe(self, loader: DataLoader[Any], name: str) -> ProbeBatches:
        validation = ""
        if name.startswith("validation"):
            validation = ", validation (include_validation=False leaves it out)"
        check_loader(loader, self.place.owner + validation)
        if name not in self._longest:
            self._longest[name] = ProbeBatches.find(loader, self.scan, self._hook())
        return ProbeBatches(loader, self._longest[name])

    def _hook(self) -> Longest | None:
        owners = (self.trainer.datamodule, self.trainer.lightning_module)
        return next((owner.longest_samples for owner in owners if hasattr(owner, "longest_samples")), None)

    def _samples_per_process(self, loader: DataLoader[Any]) -> int:
        if isinstance(loader.sampler, KeyedBatchSampler):
            return loader.sampler.largest_batch()
        samples = len(loader.sampler)  # type: ignore[arg-type]
        if samples < 1:
            raise ConfigurationError(
                f"{self.place.owner}: the training dataset {type(loader.dataset).__name__} is empty"
            )
        if wants_distributed_sampler(self.trainer, loader):
            replicas = self.trainer.distributed_sampler_kwargs["num_replicas"]
            return -(-samples // int(replicas))
        return samples

    def _available(self) -> int | None:
        """Return the bytes that this process may have in total, including those in use, or ``None`` if unknown."""
        if self.device.type == "cpu":
            free = available_cpu_memory()
            if free is None:
                return None
            held = AllocationMeter(self.trials.record.tensors).live
            return held + free // max(1, getattr(self.trainer.strategy, "num_processes", 1))
        return torch.accelerator.get_memory_info(self.device)[0] + torch.accelerator.memory_reserved(self.device)

    def _too_much(self, size: int) -> OutOfMemoryError:
        """Return the error for the smallest size, with the memory that it needs where that can be measured."""
        first = self.tried[0]
        needs = f"more than {format_bytes(first.peak_bytes)} ({first.peak_bytes} bytes)"
        available = self._available()
        if self.device.type == "cpu" and available is not None and available > self.budget:
            whole = self._try(size, available)
            if not whole.failed_in:
                needs = f"{format_bytes(whole.peak_bytes)} ({whole.peak_bytes} bytes)"
        limit = f"{format_bytes(self.budget)} ({self.budget} bytes)"
        return OutOfMemoryError(
            f"{self.place.owner}: a batch of {size} needs {needs} in {first.failed_in}, but only {limit} may be used: "
            f"the limit of {format_bytes(self.limit)} less the margin. Use a smaller model, shorter samples, "
            "activation checkpointing, a low-bit optimizer or more memory"
        )
