"""Batch-size finder: find the largest batch that runs, by trial, and keep the effective batch size by accumulation.

    size = largest divisor of effective whose trial stays within (1 - margin) limit;  accumulation = effective / size

Saves: time, if a larger batch uses the device better; runs that would fail after hours, at their longest batch
Costs: a few steps for each tried size before the first epoch; during these, a copy of weights and states in CPU memory
Source: own; accumulation as in Goyal et al. (2017), https://arxiv.org/abs/1706.02677

A trial consists of two optimizer steps, and one batch of each validation loader. All batches are made of the longest
samples of the dataset. Each step has as many micro-batches as in the run, but at most two, because more need no more
memory. Micro-batches of equal size give exactly the gradient of one large batch. If their token counts differ, the mean
of their means is another loss: add TokenWeightedAccumulation. The same is true at the end of an epoch, if the last step
has fewer micro-batches, because Lightning divides by the full number.
"""

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lit_efficient.application.settings import ReadBack, who_sets
from lit_efficient.declaration import Report, format_bytes
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice, check_number, parse_bytes, refusal
from lit_efficient.internals.lightning_data import combined_loader, data_source, drop_loaders
from lit_efficient.internals.lightning_loops import validates_next
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.mechanisms.rewind import other_randomness
from lit_efficient.mechanisms.trials.batch_search import BatchSearch, FoundBatch, Trial
from lit_efficient.mechanisms.trials.batch_size import BatchSizeTarget
from lit_efficient.mechanisms.trials.probes import batch_size_of, live_generators, loaders_in
from lit_efficient.mechanisms.trials.steps import schedule, unschedule
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class MaxBatchSize(Technique):
    """Find the largest batch that fits in memory before the first epoch, and accumulate to the effective batch size.

    The effective batch size of a process is the batch size of its loader times ``accumulate_grad_batches``. Trials
    leave no traces in weights, optimizers, random generators, metrics, callbacks and files. Callbacks that only write
    (checkpoints, progress bars, samples) and loggers do not run in trials. The size that is found is used until the run
    ends, and a resumed run takes it from the checkpoint. All processes use the smallest size that one of them finds.

    A module or datamodule may define ``longest_samples(dataset, count)``, which returns the indices of the largest
    samples. Otherwise the largest of ``scan`` samples are used.

    Args:
        target: Name of the attribute of the datamodule or the module that holds the batch size, such as
            ``device_batch`` or ``batch_size``; it may contain dots. ``auto`` uses the first of these two that exists,
            or the batch size of the loader that is passed to fit.
        mode: ``power`` tries sizes that differ by a factor of about two; ``binary`` finds the largest size exactly.
        margin: Share of the memory that must stay free in the trial of the chosen size, at least 0 and below 1.
        keep_effective_batch: Try only divisors of the effective batch size, and accumulate. If false, accumulation
            does not change, and the effective batch size grows with the size.
        include_validation: Also run validation in each trial.
        memory_limit: Number of bytes that may be used, as a number or as text such as ``12GiB``; null for all memory of
            the device. On the CPU the bytes of live tensors count, with parameters and optimizer states.
        max_size: Largest size that is tried; null for the length of the dataset.
        min_size: Smallest size that is tried, at least 1. Use 2 or more for networks that cannot run on one sample,
            such as networks with batch normalisation.
        scan: Number of samples to inspect for the longest ones, at least 1.
        idle: Names of further callback classes that must not run in trials, because they have effects outside of the
            run, such as uploads.

    Raises:
        ConfigurationError: For an argument out of range, and for data whose batch size cannot be changed.
        ConflictError: With a strategy that shards, whose processes would wait for a process that is out of memory.
        OutOfMemoryError: If the smallest size does not fit.
    """

    traits = frozenset({Trait.CHANGES_ACCUMULATION, Trait.TRIES_STEPS})
    conflicts: ClassVar[dict[str, str]] = {
        "BatchSizeFinder": "both change the batch size; keep MaxBatchSize",
        "GradualUnfreezing": (
            "the first steps train only the head, and a batch that fits then may not fit later; find the size in a run "
            "without GradualUnfreezing and set it"
        ),
        "ActivationCheckpointing(memory_budget=...)": (
            "it chooses the recomputed blocks in the first batch, after the size is found; use every or save instead"
        ),
        "LanguageData(stream.enabled=True)": "the longest rows of a stream are unknown; set batch_size by hand",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (1, "smaller batches, accumulated to the same effective batch size"),
        "speed": (7, "the largest batch that fits"),
    }

    def __init__(
        self,
        target: str = "auto",
        mode: str = "power",
        margin: float = 0.05,
        keep_effective_batch: bool = True,
        include_validation: bool = True,
        memory_limit: int | str | None = None,
        max_size: int | None = None,
        min_size: int = 1,
        scan: int = 256,
        idle: Sequence[str] = (),
    ) -> None:
        super().__init__()
        check_choice("MaxBatchSize", "mode", mode, ("power", "binary"))
        check_number("MaxBatchSize", "margin", margin, least=0, below=1)
        check_number("MaxBatchSize", "max_size", max_size, least=1, whole=True, null=True)
        check_number("MaxBatchSize", "min_size", min_size, least=1, whole=True)
        check_number("MaxBatchSize", "scan", scan, least=1, whole=True)
        if not target:
            raise refusal("MaxBatchSize", "target", "auto or the name of an attribute", target)
        if memory_limit is not None:
            parse_bytes(memory_limit, "MaxBatchSize")
        self.target = target
        self.mode = mode
        self.margin = margin
        self.keep_effective_batch = keep_effective_batch
        self.include_validation = include_validation
        self.memory_limit = memory_limit
        self.max_size = max_size
        self.min_size = min_size
        self.scan = scan
        self.idle = idle
        self.found: FoundBatch | None = None
        self._configured: tuple[int, int] | None = None  # batch size and accumulation before the run
        self._place: BatchSizeTarget | None = None  # the attribute or loader that holds the batch size
        self._reads: ReadBack | None = None
        self._batch_counts: dict[str, int] = {}  # settings of the trainer that count batches, before the run
        # States of the global generators, and of the loaders' own generators, before data is loaded.
        self._start: dict[str, object] = {}
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []

    def check(self, trainer: Any, module: Any) -> None:
        if trainer.world_size > 1 and not traits_of(trainer.strategy).replicates:
            raise ConflictError(
                f"MaxBatchSize cannot be combined with {type(trainer.strategy).__name__}: its processes communicate "
                "within a step, and would wait forever for a process that runs out of memory. Find the size with DDP "
                "or on one device"
            )
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise ConfigurationError(
                "MaxBatchSize: training_step takes dataloader_iter and fetches batches itself, so that trials cannot "
                "choose its batches. Let it take a batch, or leave out MaxBatchSize"
            )
        if self.keep_effective_batch and not module.automatic_optimization:
            raise ConfigurationError(
                f"MaxBatchSize: {type(module).__name__} uses manual optimization, in which Lightning does not "
                "accumulate. Use keep_effective_batch=False"
            )
        if trainer.state.fn == "fit" and trainer.optimizers:  # called during a run, when the data is set up
            BatchSizeTarget(trainer, self.target, "MaxBatchSize")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the result of an earlier run. A checkpoint restores its own result later."""
        if stage == "fit":
            self.found = None
        super().setup(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        limit = self.memory_limit or "the device's memory"
        sizes = "any size"
        if self.keep_effective_batch:
            sizes = "divisors of the effective batch"
        return Report(f"the largest batch within {limit}, {self.margin:.0%} kept free; {sizes}, mode {self.mode}")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._place = BatchSizeTarget(trainer, self.target, "MaxBatchSize")
        self._configured = (self._place.value, trainer.accumulate_grad_batches)
        schedule(trainer, partial(self._before_run, trainer), partial(self._before_epoch, trainer), order=0)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._reads is None and self.found is not None:
            self._reads = ReadBack(trainer.optimizers, partial(self._differs, trainer, self.found))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore batch size and accumulation, so that the next run starts from the user's configuration."""
        if self._reads is not None:
            self._reads.stop()
            self._reads = None
        self._restore_configuration(trainer)
        super().teardown(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        if self.found is None:
            return {}
        return asdict(self.found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = FoundBatch(**state_dict) if state_dict else None

    def _restore_configuration(self, trainer: Trainer) -> None:
        unschedule(trainer)
        if self._configured is not None and self._place is not None:
            size, accumulation = self._configured
            self._place.set(size)
            trainer.accumulate_grad_batches = accumulation
        for name, value in self._batch_counts.items():
            setattr(trainer, name, value)
        self._configured = None
        self._place = None
        self._batch_counts = {}

    def _before_run(self, trainer: Trainer, states: dict[str, object]) -> None:
        self._start = states
        source = data_source(trainer.fit_loop)
        # Loaders that the module builds do not exist yet, and neither do their generators.
        generators = [] if source.is_module() else live_generators(source.instance)
        self._generators = [(generator, generator.get_state()) for generator in generators]
        if self.found is not None:
            self._use(trainer, self.found)
            self._log_found("taken from the checkpoint")

    def _before_epoch(self, trainer: Trainer) -> None:
        if self.found is not None:
            return
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            raise ConfigurationError(
                "MaxBatchSize: the checkpoint was written in the middle of an epoch by a run without MaxBatchSize, and "
                "with another batch size its position in the data would be lost. Resume from the end of an epoch, or "
                "without MaxBatchSize"
            )
        assert self._place is not None
        search = BatchSearch(
            trainer, self._place, self.memory_limit, self.margin, self.include_validation, self.scan, self.idle
        )
        self.found = search.run(self.mode, self.keep_effective_batch, self.min_size, self.max_size)
        self._use(trainer, self.found)
        if combined_loader(trainer) is None:
            self._reload(trainer)
        self._log_found("found")

    def _use(self, trainer: Any, found: FoundBatch) -> None:
        """Set batch size and accumulation. If the size changes, loaders are dropped and will be built again."""
        assert self._place is not None
        trainer.accumulate_grad_batches = found.accumulation
        if self._place.value == found.size:
            return
        if self.keep_effective_batch:
            # Numbers of batches are converted, so that they mean the same number of samples as before.
            for name in ("limit_train_batches", "val_check_interval"):
                value = getattr(trainer, name)
                if isinstance(value, int):
                    self._batch_counts[name] = value
                    setattr(trainer, name, max(1, round(value * self._place.value / found.size)))
            if found.batches is not None:
                self._batch_counts.setdefault("limit_train_batches", trainer.limit_train_batches)
                trainer.limit_train_batches = found.batches
        self._place.set(found.size)
        loop = trainer.fit_loop
        for part in (loop, loop.epoch_loop.val_loop):
            drop_loaders(part)

    def _reload(self, trainer: Trainer) -> None:
        """Build the loaders again with the same random numbers, as if the size had been set from the start."""
        now = [(generator, generator.get_state()) for generator, _ in self._generators]
        for generator, state in self._generators:
            generator.set_state(state)
        with other_randomness(self._start):
            trainer.fit_loop.setup_data()
            if trainer.enable_validation and validates_next(trainer):
                trainer.validating = True
                trainer.fit_loop.epoch_loop.val_loop.setup_data()
                trainer.training = True
        for generator, state in now:
            generator.set_state(state)

    def _differs(self, trainer: Trainer, found: FoundBatch, optimizer: Optimizer, step: int) -> str | None:
        """Return a sentence if the loaders or the accumulation are not those of the found batch."""
        module = trainer.lightning_module
        automatic = module.automatic_optimization
        if automatic and trainer.accumulate_grad_batches != found.accumulation:
            return (
                f"MaxBatchSize: step {step} should accumulate {found.accumulation} batches, but "
                f"accumulate_grad_batches is {trainer.accumulate_grad_batches}: {who_sets(module)} sets it, too"
            )
        for loader in loaders_in(combined_loader(trainer)):
            size = batch_size_of(loader) if isinstance(loader, DataLoader) else None
            if size is not None and size != found.size:
                return (
                    f"MaxBatchSize: batches should have {found.size} samples, but the training loader has the batch "
                    f"size {size}: it is not built from {self.target}. Set target to the attribute from which it is "
                    "built"
                )
        return None

    def _log_found(self, origin: str) -> None:
        assert self.found is not None
        assert self._configured is not None
        found = self.found
        size, accumulation = self._configured
        lines = [
            f"MaxBatchSize ({origin}): batches of {found.size} (configured: {size}), accumulate_grad_batches="
            f"{found.accumulation} (configured: {accumulation}), {format_bytes(found.peak_bytes)} of "
            f"{format_bytes(found.budget_bytes)} used"
        ]
        lines += [Trial(**trial).line() for trial in found.trials]
        rank_zero_info("\n".join(lines))
