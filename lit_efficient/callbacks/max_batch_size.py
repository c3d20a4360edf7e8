"""Batch-size finder: the largest batch that really ran, for training and validation, at an unchanged effective batch.

    size = largest divisor of effective whose trial stays within (1 - margin) limit;  accumulation = effective / size

Saves: time, where a larger batch uses the device better, and the runs that fail hours later on their longest batch
Costs: a few steps a tried size before the first epoch; a copy of weights and states in host memory meanwhile
Source: own; accumulation as in Goyal et al. (2017), https://arxiv.org/abs/1706.02677

A trial is two optimizer steps, each with the micro-batches that it would have (two stand for any larger number), and
one batch of each validation loader, all made of the dataset's longest samples. Micro-batches of equal size give the
gradient of one large batch exactly. Where token counts differ, a mean of means does not: add TokenWeightedAccumulation.
The same holds for an epoch's last, short window, which Lightning divides by the full number of micro-batches.
"""

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_efficient.declaration import Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice, check_number, refusal
from lit_efficient.internals.lightning_data import combined_loader, data_source, drop_loaders
from lit_efficient.internals.lightning_loops import validates_next
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.mechanisms.rewind import other_randomness
from lit_efficient.mechanisms.trials.batch_search import BatchSearch, FoundBatch, Trial
from lit_efficient.mechanisms.trials.batch_size import BatchSizeTarget
from lit_efficient.mechanisms.trials.memory import format_bytes, parse_bytes
from lit_efficient.mechanisms.trials.probes import live_generators
from lit_efficient.mechanisms.trials.steps import schedule, unschedule
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class MaxBatchSize(Technique):
    """Find the largest batch that fits, before the first epoch, and accumulate to the effective batch asked for.

    The effective batch is the batch size of the loader times ``accumulate_grad_batches``, for each process. Everything
    is afterwards as if nothing had been tried: weights, optimizers, generators, metrics, callbacks, files. Callbacks
    that only write (checkpoints, progress bars, samples) and loggers take no part in trials. The size holds until the
    run ends, and a resumed run takes it from the checkpoint. All processes agree on the smallest.

    A module or datamodule may define ``longest_samples(dataset, count)``, which returns the indices of the largest
    samples; otherwise they are found by looking at ``scan`` samples.

    Args:
        target: What holds the batch size: ``device_batch``, ``batch_size`` or another attribute of the datamodule or
            the module, dots allowed; ``auto`` for the first of the two that exists, or the loader passed to fit.
        mode: ``power`` tries steps of about two, ``binary`` finds the exact largest size.
        margin: Share of the memory that must stay free in the trial of the size that is taken, in [0, 1).
        keep_effective_batch: Only take divisors of the effective batch and accumulate. If false, accumulation stays,
            and the effective batch grows with the size.
        include_validation: Also run validation in each trial.
        memory_limit: Bytes that may be used, as a number or like ``12GiB``; null for all there are. On the CPU live
            tensors are measured, parameters and optimizer states included.
        max_size: No size is larger; null for no bound but the dataset's length.
        min_size: No size is smaller, at least 1. What does not run with 1, such as batch normalisation, starts above.
        scan: Samples to look at for the longest ones, at least 1.
        idle: Names of further callback classes that must not act in trials, because they leave traces outside.

    Raises:
        ConfigurationError: For an argument out of range, and for data whose batch size cannot be changed.
        ConflictError: For a strategy that shards, whose processes would wait for the one that runs out of memory.
        OutOfMemoryError: If not even the smallest size fits.
    """

    traits = frozenset({Trait.CHANGES_ACCUMULATION, Trait.TRIES_STEPS})
    conflicts: ClassVar[dict[str, str]] = {
        "BatchSizeFinder": "both change the batch size; keep MaxBatchSize",
        "GradualUnfreezing": (
            "the first steps train the head alone, and what fits them does not fit later ones; find the size in a run"
            " without GradualUnfreezing and set it"
        ),
        "ActivationCheckpointing(memory_budget=...)": (
            "which blocks are recomputed is decided by the first batch, after the size is found: use every or save"
        ),
        "LanguageData(stream.enabled=True)": "a stream cannot be asked for its longest rows: set batch_size by hand",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (1, "smaller batches, accumulated to the same effective one"),
        "speed": (7, "larger batches that fit"),
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
        self._asked: tuple[int, int] | None = None  # size and accumulation before the run
        self._place: BatchSizeTarget | None = None
        self._batch_counts: dict[str, int] = {}  # settings of the trainer that count batches, before the run
        self._start: dict[str, Any] = {}  # states of the global generators before data is loaded
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []  # the loaders' own, then

    def check(self, trainer: Any, module: Any) -> None:
        name, strategy = type(self).__name__, trainer.strategy
        if trainer.world_size > 1 and not traits_of(strategy).replicates:
            raise ConflictError(
                f"{name} cannot be combined with {type(strategy).__name__}: its processes need each other within a "
                "step, and would wait for ever for the one that runs out of memory; find the size on DDP or one device"
            )
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise ConfigurationError(f"{name}: training_step takes dataloader_iter, and fetches batches by itself")
        if self.keep_effective_batch and not module.automatic_optimization:
            raise ConfigurationError(
                f"{name}: {type(module).__name__} optimizes manually, where Lightning does not accumulate; "
                "use keep_effective_batch=False"
            )
        if trainer.state.fn == "fit" and trainer.optimizers:  # asked in the midst of a run: the data are set up by then
            BatchSizeTarget(trainer, self.target, name)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget an earlier run's size: a checkpoint brings its own."""
        if stage == "fit":
            self.found = None
        super().setup(trainer, pl_module, stage)

    def describe(self, module: Any) -> Report:
        limit = f"within {self.memory_limit}" if self.memory_limit else "within the device's memory"
        kept = "divisors of the effective batch" if self.keep_effective_batch else "any size"
        return Report(f"the largest batch {limit}, {self.margin:.0%} kept free; {kept}, mode {self.mode}")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        self._place = BatchSizeTarget(trainer, self.target, type(self).__name__)
        self._asked = (self._place.value, trainer.accumulate_grad_batches)
        schedule(trainer, partial(self._before_run, trainer), partial(self._before_epoch, trainer), order=0)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the batch size and the accumulation back: the next run starts from what its user asked for."""
        self._give_back(trainer)
        super().teardown(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.found) if self.found else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = FoundBatch(**state_dict) if state_dict else None

    def _give_back(self, trainer: Any) -> None:
        unschedule(trainer)
        if self._asked is not None and self._place is not None:
            self._place.set(self._asked[0])
            trainer.accumulate_grad_batches = self._asked[1]
        for name, value in self._batch_counts.items():
            setattr(trainer, name, value)
        self._asked = self._place = None
        self._batch_counts = {}

    def _before_run(self, trainer: Any, states: dict[str, Any]) -> None:
        self._start = states
        source = data_source(trainer.fit_loop)
        generators = [] if source.is_module() else live_generators(source.instance)
        self._generators = [(generator, generator.get_state()) for generator in generators]
        if self.found is not None:
            self._use(trainer, self.found)
            self._say_found("taken from the checkpoint")

    def _before_epoch(self, trainer: Any) -> None:
        if self.found is not None:
            return
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready:
            raise ConfigurationError(
                "MaxBatchSize: the checkpoint was written in the middle of an epoch by a run without MaxBatchSize, and "
                "another batch size would lose its place in the data; resume at an epoch's end, or without MaxBatchSize"
            )
        assert self._place is not None
        search = BatchSearch(
            trainer, self._place, self.memory_limit, self.margin, self.include_validation, self.scan, self.idle
        )
        self.found = search.run(self.mode, self.keep_effective_batch, self.min_size, self.max_size)
        self._use(trainer, self.found)
        if combined_loader(trainer) is None:
            self._reload(trainer)
        self._say_found("found")

    def _use(self, trainer: Any, found: FoundBatch) -> None:
        """Set size and accumulation; loaders of another size are dropped, to be made again."""
        assert self._place is not None
        trainer.accumulate_grad_batches = found.accumulation
        if self._place.value == found.size:
            return
        if self.keep_effective_batch:  # what counts batches goes on counting the same samples
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

    def _reload(self, trainer: Any) -> None:
        """Make the loaders again with the draws that made them first: as if the size had been set at the start."""
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

    def _say_found(self, how: str) -> None:
        assert self.found is not None
        assert self._asked is not None
        found, (size, accumulation) = self.found, self._asked
        lines = [
            f"MaxBatchSize ({how}): batches of {found.size} (asked: {size}), accumulate_grad_batches="
            f"{found.accumulation} (asked: {accumulation}), {format_bytes(found.peak_bytes)} of "
            f"{format_bytes(found.budget_bytes)} used",
            *(Trial(**trial).line() for trial in found.trials),
        ]
        rank_zero_info("\n".join(lines))
