"""Learning-rate range test: raise the rate in each step, record the loss, undo the steps and use the suggested rate.

    rate_i = min_lr * (max_lr / min_lr)^(i / (n - 1));    suggestion = where the smoothed loss falls fastest per decade

Saves: runs with a learning rate that is much too large or too small
Costs: ``num_steps`` training steps before the first epoch; during these, a copy of weights and states in CPU memory
Source: Smith (2015), https://arxiv.org/abs/1506.01186

The ratios between the rates of parameter groups are kept. All base rates that a scheduler stores are scaled, too, so
that LambdaLR, one-cycle and plateau schedules also use the suggested rate.
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

_DECAY = 0.8  # of the running mean that smooths the losses


class LRFinder(Technique):
    """Test a range of learning rates before the first epoch, and train with the suggested one.

    Rates are rates of the optimizer's first group; the rates of other groups keep their ratio to it. Schedulers do not
    step during the test. Afterwards weights, states, random generators and data are as before the test. A resumed run
    uses the rate of the checkpoint.

    Args:
        min_lr: First rate, above 0.
        max_lr: Last rate, above ``min_lr``.
        num_steps: Number of optimizer steps, at least 3. If the data is shorter, it is repeated.
        mode: ``exponential`` for equal ratios between rates, ``linear`` for equal differences.
        early_stop_threshold: The test ends when the smoothed loss is more than this multiple of its lowest value,
            above 1, but not within the first five steps; null for no early end.
        apply: Train with the suggested rate. If false, only report and plot it.
        plot: Path of a PNG file with a plot of the test; null for none.
        idle: Names of further callback classes that must not run during the test, because they have effects outside of
            the run, such as uploads.

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
                f"LRFinder: {type(module).__name__} uses manual optimization, so that rates and losses are unknown. "
                "Call lit_efficient.mechanisms.trials.rate_range.suggest_lr on rates and losses that you have recorded"
            )
        traits = traits_of(trainer.strategy)
        if trainer.world_size > 1 and not (traits.replicates or traits.dtensors):
            raise ConflictError(
                f"LRFinder cannot be combined with {type(trainer.strategy).__name__}: the steps of the test cannot be "
                "undone in its flattened parameters. Find the rate with ShardedStrategy, DDP or one device"
            )

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reset the results of an earlier run. A checkpoint restores its own results later."""
        if stage == "fit":
            self.suggestion = None
            self.rates = []
            self.losses = []
        super().setup(trainer, pl_module, stage)

    def describe(self, module: Any) -> Report:
        use = "used for training" if self.apply else "only reported"
        steps = f"{self.num_steps} steps at rates {self.min_lr:g} to {self.max_lr:g}, {self.mode}"
        return Report(f"{steps}; the suggested rate is {use}")

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
        self.rates = list(state_dict["rates"])
        self.losses = list(state_dict["losses"])

    def _test(self, trainer: Any) -> None:
        if self.suggestion is not None:
            rank_zero_info(f"LRFinder: the rate {self.suggestion:.3g} is taken from the checkpoint")
            return
        if trainer.global_step:
            raise ConfigurationError(
                f"LRFinder: the checkpoint has {trainer.global_step} steps of a run without LRFinder, but the test "
                "must run before the first step. Resume without LRFinder"
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
        use = "used" if self.apply else "not used (apply=False)"
        rank_zero_info(
            f"LRFinder: suggests {self.suggestion:.3g} for the first group, which is {use}; its rate was "
            f"{reference:.3g}, {len(self.losses)} of {self.num_steps} steps were run"
        )

    def _reference(self, trainer: Any) -> float:
        """Return the full rate of the first group, by which the schedule multiplies, before any warm-up factor."""
        reference = _full_rate(trainer.optimizers[0].param_groups[0])
        if not reference > 0:
            raise ConfigurationError(
                f"LRFinder: the rate of the optimizer's first group is {reference}, so that the ratios of other groups "
                "to it are undefined. Give the first group a rate above 0"
            )
        return reference


def _run(finder: LRFinder, trainer: Any, trials: Trials, reference: float) -> tuple[list[float], list[float]]:
    """Train with increasing rates.

    Returns:
        The rates and the losses of the steps. A loss is the mean over micro-batches and processes, as in the gradient.
    """
    rates = rates_to_try(finder.min_lr, finder.max_lr, finder.num_steps, finder.mode)
    tried: list[float] = []
    losses: list[float] = []
    skipped = 0  # consecutive steps without a loss
    accumulate = trainer.accumulate_grad_batches
    batches = _batches(trainer)
    generators = [(generator, generator.get_state()) for generator in live_generators(combined_loader(trainer))]
    with trials.trial(accumulate, alone=False):
        trainer.strategy.lr_scheduler_configs = []
        # Ratio of each group's rate to the first group's, from full rates: a warm-up may have set all of them to 0.
        optimizer = trainer.optimizers[0]
        shares = [_full_rate(group) / reference for group in optimizer.param_groups]
        for rate in rates:
            for group, share in zip(optimizer.param_groups, shares):
                set_rate(group, rate * share)
            loss = _step(trainer, trials, batches, accumulate)
            if loss is None:  # training_step returned None, so that the step was skipped
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
    """Run one optimizer step.

    Returns:
        The loss of the step; NaN if a guard stopped it as diverged; ``None`` if ``training_step`` returned no loss
        or no token contributes to it.
    """
    watcher = _Losses()
    trainer.callbacks = [*trainer.callbacks, watcher]
    try:
        for _ in range(accumulate):
            trials.train(partial(next, batches))
    except DivergedError:
        return math.nan  # the test looks for the rate at which training diverges
    finally:
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not watcher]
    if trials.agree(float(bool(watcher.losses))) == 0:
        return None
    weights = torch.tensor(watcher.weights, device=trainer.strategy.root_device)
    # Lightning has divided each loss by the number of micro-batches.
    losses = torch.stack(watcher.losses).to(weights) * accumulate
    sums = torch.stack(((losses * weights)[weights > 0].sum(), weights.sum()))
    total, weight = trainer.strategy.reduce(sums, reduce_op="sum")
    if not weight:  # no micro-batch has a token that contributes to the loss
        return None
    return float(total / weight)


class _Losses(Callback):
    """Callback that records the loss of each micro-batch and its weight in the step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.weights: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach().float())
            hooks = [technique for technique in techniques_of(trainer) if isinstance(technique, LossHooks)]
            weights = [hook.batch_weight for hook in hooks if hook.batch_weight is not None]
            self.weights.append(float(weights[0]) if weights else 1.0)


def _full_rate(group: dict[str, Any]) -> float:
    """Return the full rate of a group, by which its schedule multiplies; ``lr`` may include a warm-up factor."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def _batches(trainer: Any) -> Iterator[Any]:
    """Yield training batches endlessly, from copies of the loaders, so that the run's own loaders do not advance."""
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
            raise ConfigurationError("LRFinder: the training loader yields no batches, so that no rate can be tested")
