"""Learning-rate range test: raise the rate step by step, watch the loss, put everything back and take the best rate.

    rate_i = min_lr * (max_lr / min_lr)^(i / (n - 1));    suggestion = where the smoothed loss falls fastest per decade

Saves: runs at a rate that is far off
Costs: num_steps training steps before the first epoch; a copy of weights and states in host memory meanwhile
Source: Smith (2015), https://arxiv.org/abs/1506.01186

All parameter groups keep their proportions, and the rate that is taken is the schedule's own: every rate that a
scheduler goes back to is scaled with it, so that LambdaLR, one-cycle and plateau schedules hold what was found.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader

from lit_efficient.application.loss import LossHooks
from lit_efficient.declaration import Phase, Report, techniques_of
from lit_efficient.errors import (
    ConfigurationError,
    ConflictError,
    DivergedError,
    check_choice,
    check_installed,
    check_number,
)
from lit_efficient.internals.lightning_data import combined_loader
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_loaders import copied
from lit_efficient.mechanisms.trials.probes import live_generators
from lit_efficient.mechanisms.trials.rate_range import (
    SETTLED,
    grows,
    plot_rates,
    rates_to_try,
    scale_rates,
    scale_schedule,
    set_rate,
    suggest_lr,
)
from lit_efficient.mechanisms.trials.steps import Trials, schedule, unschedule
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_DECAY = 0.8


class LRFinder(Technique):
    """Test a range of learning rates before the first epoch, and train with the suggested one.

    A rate is that of the optimizer's first group; the others follow in proportion. Schedulers do not step in the test.
    Afterwards everything is as if nothing had been tried; a resumed run takes the rate from the checkpoint.

    Args:
        min_lr: First rate, above 0.
        max_lr: Last rate, above ``min_lr``.
        num_steps: Optimizer steps, at least 3; the data is begun again where it is shorter.
        mode: ``exponential`` for equal ratios, ``linear`` for equal differences.
        early_stop_threshold: Stop when the smoothed loss is above so many times the lowest, once it is a mean of five
            steps; null for never.
        apply: Train with the suggestion. If false, only report and draw it.
        plot: Path of a PNG of the test; null for none.
        idle: Names of further callback classes that must not act in the test, because they leave traces outside.

    Raises:
        ConfigurationError: For an argument out of range, and if the loss falls nowhere in the range.
    """

    phase = Phase.OPTIMIZER
    traits = frozenset({Trait.TRIES_STEPS})
    conflicts: ClassVar[dict[str, str]] = {"LearningRateFinder": "both set the learning rate; keep LRFinder"}
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "finds a learning rate before the run")}

    def __init__(
        self,
        min_lr: float = 1e-7,
        max_lr: float = 1.0,
        num_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        apply: bool = True,
        plot: str | None = None,
        idle: Sequence[str] = (),
    ) -> None:
        super().__init__()
        check_number("LRFinder", "max_lr", max_lr, above=0)
        check_number("LRFinder", "min_lr", min_lr, above=0, below=max_lr)
        check_number("LRFinder", "num_steps", num_steps, least=3, whole=True)
        check_choice("LRFinder", "mode", mode, ("exponential", "linear"))
        check_number("LRFinder", "early_stop_threshold", early_stop_threshold, above=1, null=True)
        if plot is not None:
            check_installed("LRFinder(plot=...)", "matplotlib")
        self.min_lr = min_lr
        self.max_lr = max_lr
        self.num_steps = num_steps
        self.mode = mode
        self.early_stop_threshold = early_stop_threshold
        self.apply = apply
        self.plot = plot
        self.idle = idle
        self.suggestion: float | None = None
        self.rates: list[float] = []
        self.losses: list[float] = []

    def check(self, trainer: Any, module: Any) -> None:
        if not module.automatic_optimization:
            raise ConfigurationError(
                f"LRFinder: {type(module).__name__} optimizes manually, with rates and losses of its own; call "
                "lit_efficient.mechanisms.trials.rate_range.suggest_lr on rates and losses that you have recorded"
            )
        traits = traits_of(trainer.strategy)
        if trainer.world_size > 1 and not (traits.replicates or traits.dtensors):
            raise ConflictError(
                f"LRFinder cannot be combined with {type(trainer.strategy).__name__}: it steps what no process can "
                "put back; find the rate with ShardedStrategy, DDP or one device"
            )

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget an earlier run's rate: a checkpoint brings its own."""
        if stage == "fit":
            self.suggestion, self.rates, self.losses = None, [], []
        super().setup(trainer, pl_module, stage)

    def describe(self, module: Any) -> Report:
        use = "the suggested one is taken" if self.apply else "only reported"
        return Report(f"{self.num_steps} steps at rates {self.min_lr:g} to {self.max_lr:g}, {self.mode}; {use}")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        schedule(trainer, lambda _: None, partial(self._test, trainer), order=1)  # after the batch size is found

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        unschedule(trainer)
        super().teardown(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        return {"suggestion": self.suggestion, "rates": self.rates, "losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.suggestion = state_dict["suggestion"]
        self.rates, self.losses = list(state_dict["rates"]), list(state_dict["losses"])

    def _test(self, trainer: Any) -> None:
        if self.suggestion is not None:
            rank_zero_info(f"LRFinder: the rate {self.suggestion:.3g} is the checkpoint's")
            return
        if trainer.global_step:
            raise ConfigurationError(
                f"LRFinder: the checkpoint has {trainer.global_step} steps of a run without LRFinder: a test belongs "
                "before the first one; resume without LRFinder"
            )
        reference = self._reference(trainer)
        trials = Trials(trainer, self.idle)
        self.rates, self.losses = _run(self, trainer, trials, reference)
        problem: ConfigurationError | None = None
        try:
            self.suggestion = suggest_lr(self.rates, self.losses, _DECAY)
        except ConfigurationError as error:
            problem = error
        if self.plot is not None and trainer.is_global_zero:
            plot_rates(Path(self.plot), self.rates, self.losses, self.suggestion, self.mode, _DECAY)
        if problem is not None:
            raise problem
        assert self.suggestion is not None
        if self.apply:
            for optimizer in trainer.optimizers:
                scale_rates(optimizer, self.suggestion / reference)
            for config in trainer.lr_scheduler_configs:
                scale_schedule(config.scheduler, self.suggestion / reference)
        done = "taken" if self.apply else "not taken (apply=False)"
        rank_zero_info(
            f"LRFinder: suggests {self.suggestion:.3g} for the first group, {done}; its rate was {reference:.3g}, "
            f"{len(self.losses)} of {self.num_steps} steps were run"
        )

    def _reference(self, trainer: Any) -> float:
        """The rate of the first group that the schedule multiplies, whatever its warm-up makes of it at first."""
        reference = _full_rate(trainer.optimizers[0].param_groups[0])
        if not reference > 0:
            raise ConfigurationError(
                f"LRFinder: the first group's rate is {reference}, and others in proportion to it cannot be had"
            )
        return reference


def _run(finder: LRFinder, trainer: Any, trials: Trials, reference: float) -> tuple[list[float], list[float]]:
    """Train at rising rates; the loss of a step is that which its gradient is of, over all processes."""
    rates = rates_to_try(finder.min_lr, finder.max_lr, finder.num_steps, finder.mode)
    tried: list[float] = []
    losses: list[float] = []
    skipped = 0  # steps without a loss, one after the other
    accumulate = trainer.accumulate_grad_batches
    batches = _batches(trainer)
    generators = [(generator, generator.get_state()) for generator in live_generators(combined_loader(trainer))]
    with trials.trial(accumulate, alone=False):
        trainer.strategy.lr_scheduler_configs = []
        # Each group's share of the first one's rate, as the schedule's full rates have it.
        optimizer = trainer.optimizers[0]
        shares = [_full_rate(group) / reference for group in optimizer.param_groups]
        for rate in rates:
            for group, share in zip(optimizer.param_groups, shares):
                set_rate(group, rate * share)
            loss = _step(trainer, trials, batches, accumulate)
            if loss is None:  # training_step gave none: of a step that was skipped nothing is known
                skipped += 1
                if skipped == SETTLED:
                    break
                continue
            skipped = 0
            tried.append(rate)
            losses.append(loss)
            if not math.isfinite(loss) or grows(losses, finder.early_stop_threshold, _DECAY):
                break
    for generator, state in generators:
        generator.set_state(state)
    trials.finish()
    return tried, losses


def _step(trainer: Any, trials: Trials, batches: Iterator[Any], accumulate: int) -> float | None:
    """One optimizer step; its loss, NaN where a guard refuses it, ``None`` if ``training_step`` gave none."""
    trainer.callbacks = [*trainer.callbacks, watcher := _Losses()]
    try:
        for _ in range(accumulate):
            trials.train(partial(next, batches))
    except DivergedError:
        return math.nan  # what the test is after
    finally:
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not watcher]
    if trials.agree(float(bool(watcher.losses))) == 0:
        return None
    weights = torch.tensor(watcher.weights, device=trainer.strategy.root_device)
    losses = torch.stack(watcher.losses).to(weights) * accumulate  # Lightning has divided each by the micro-batches
    sums = torch.stack(((losses * weights)[weights > 0].sum(), weights.sum()))
    total, weight = trainer.strategy.reduce(sums, reduce_op="sum")
    return float(total / weight) if weight else None


class _Losses(Callback):
    """Keeps the loss of every micro-batch, and how much it weighs in a step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.weights: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach().float())
            hooks = [one for one in techniques_of(trainer) if isinstance(one, LossHooks)]
            weights = (one.batch_weight for one in hooks if one.batch_weight is not None)
            self.weights.append(float(next(weights, 1.0)))


def _full_rate(group: dict[str, Any]) -> float:
    """The rate of a group that its schedule multiplies, whatever a warm-up makes of it at first."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def _batches(trainer: Any) -> Iterator[Any]:
    """Training batches without end, from copies of the loaders: how far the run's own ones are is not touched."""
    combined = combined_loader(trainer)
    while True:
        copies = copy.copy(combined)
        copies.flattened = [copied(x) if isinstance(x, DataLoader) else copy.copy(x) for x in combined.flattened]
        copies.limits = None
        empty = True
        for batch, _, _ in copies:
            empty = False
            yield batch
        if empty:
            raise ConfigurationError("LRFinder: the training loader is empty: there is nothing to test with")
