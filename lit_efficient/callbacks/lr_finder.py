"""Learning-rate finder: try constant rates on the same batches, and train with one of those that lower the loss most.

    rates = max_lr, max_lr / 3, max_lr / 9, ... until two in a row are clearly worse than the best
    fall(rate) = mean over the last n / 3 of n steps of (loss at rate 0 - loss at this rate)
    suggestion = sqrt(lowest * highest of the rates that are as good as the best one) / sqrt(3)

Saves: runs with a learning rate that is much too large or too small
Costs: five to ten times ``num_steps`` training steps before the first epoch; during these, a copy of weights and states
    in CPU memory
Source: own. The range test of Smith (2015), https://arxiv.org/abs/1506.01186, which raises the rate in each step,
    takes the noise between batches for an effect of the rate

All trials see the same batches and random numbers, so most of the noise between batches cancels in their differences. A
fall that is not clearly larger than the remaining noise is refused, and so is a best rate at an end of the range. Rates
count as equally good if their losses are above the lowest by at most two standard errors and a tenth of the fall. The
division by the square root of 3, half a step between the rates, is there because longer runs need lower rates.

The ratios between the rates of parameter groups are kept. All base rates that a scheduler stores are scaled, too, so
that LambdaLR, one-cycle and plateau schedules also use the suggested rate. The rates of the first two steps are read
back from the optimizer, because a module may set its own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.application.loss import LossHooks
from lit_efficient.application.settings import ReadBack, who_sets
from lit_efficient.declaration import Phase, Report, techniques_of
from lit_efficient.errors import (
    ConfigurationError,
    ConflictError,
    DivergedError,
    LitEfficientError,
    check_installed,
    check_number,
    is_out_of_memory,
)
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.mechanisms.trials.batch_size import set_at
from lit_efficient.mechanisms.trials.memory import release_frames
from lit_efficient.mechanisms.trials.rate_range import (
    RECENT,
    Losses,
    fall_between,
    grows,
    is_passed,
    places_of_rate,
    plot_rates,
    rates_to_try,
    scale_rates,
    scale_schedule,
    set_rate,
    suggest_lr,
)
from lit_efficient.mechanisms.trials.steps import Trials, repeated_batches, schedule, unschedule
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class LRFinder(Technique):
    """Compare learning rates before the first epoch, and train with the suggested one.

    ``suggestion`` is the suggested rate, ``compared`` holds the rates that were tried with the fall of the loss and its
    standard error, and ``taken`` is the rate of the first training step, read from the optimizer. A hyper-parameter or
    attribute of the module that holds the configured rate under a name with ``lr`` or ``learning_rate`` in it is set to
    the suggestion.

    Rates are rates of the optimizer's first group; the rates of other groups keep their ratio to it. Schedulers do not
    step during the test. Afterwards weights, states, random generators and data are as before the test. A resumed run
    uses the rate of the checkpoint.

    Args:
        min_lr: Lowest rate that may be tried, above 0.
        max_lr: Highest rate, which is tried first, above ``min_lr``.
        num_steps: Number of optimizer steps of each trial, at least 10. If the data is shorter, it is repeated.
        early_stop_threshold: A trial ends when the mean loss of five steps is more than this multiple of the loss of
            the initial weights on the same batches, above 1; null for no early end.
        apply: Train with the suggested rate. If false, only report and plot it; a refusal is then a warning.
        plot: Path of a PNG file with a plot of the falls; null for none.
        idle: Names of further callback classes that must not run during the test, because they have effects outside of
            the run, such as uploads.

    Raises:
        ConfigurationError: For an argument out of range, if the fall of the loss is not clearly larger than the noise
            between batches, if the best rate is at an end of the range, and if the module sets its own rates.
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
        early_stop_threshold: float | None = 4.0,
        apply: bool = True,
        plot: str | None = None,
        idle: Sequence[str] = (),
    ) -> None:
        super().__init__()
        check_number("LRFinder", "max_lr", max_lr, above=0)
        check_number("LRFinder", "min_lr", min_lr, above=0, below=max_lr)
        check_number("LRFinder", "num_steps", num_steps, least=10, whole=True)
        check_number("LRFinder", "early_stop_threshold", early_stop_threshold, above=1, null=True)
        if plot is not None:
            check_installed("LRFinder(plot=...)", "matplotlib")
        self.min_lr = min_lr
        self.max_lr = max_lr
        self.num_steps = num_steps
        self.early_stop_threshold = early_stop_threshold
        self.apply = apply
        self.plot = plot
        self.idle = idle
        self.suggestion: float | None = None
        self.compared: list[tuple[float, float, float]] = []
        self.taken: float | None = None
        self._configured: float | None = None  # rate of the first group before the test
        self._expected: list[float] = []  # rates of the groups in the next step
        self._reads: ReadBack | None = None

    def check(self, trainer: Any, module: Any) -> None:
        if not module.automatic_optimization:
            raise ConfigurationError(
                f"LRFinder: {type(module).__name__} uses manual optimization, so that rates and losses are unknown. "
                "Record the losses of trials at constant rates, and call lit_efficient.suggest_lr"
            )
        traits = traits_of(trainer.strategy)
        if trainer.world_size > 1 and not (traits.replicates or traits.dtensors):
            raise ConflictError(
                f"LRFinder cannot be combined with {type(trainer.strategy).__name__}: the steps of the test cannot be "
                "undone in its flattened parameters. Find the rate with ShardedStrategy, DDP or one device"
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the results of an earlier run. A checkpoint restores its own results later."""
        if stage == "fit":
            self.suggestion = None
            self.compared = []
            self.taken = None
        super().setup(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        use = "used for training" if self.apply else "only reported"
        steps = f"{self.num_steps} steps at each of the rates {self.max_lr:g} / 3^k down to at most {self.min_lr:g}"
        return Report(f"{steps}; the suggested rate is {use}")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        schedule(
            trainer, lambda _: None, partial(self._test, trainer), order=2
        )  # after batch size and adapters are found

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        unschedule(trainer)
        if self._reads is not None:
            self._reads.stop()
            self._reads = None
        super().teardown(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        return {
            "suggestion": self.suggestion,
            "compared": self.compared,
            "configured": self._configured,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.suggestion = state_dict["suggestion"]
        self.compared = [tuple(row) for row in state_dict["compared"]]
        self._configured = state_dict["configured"]

    def _test(self, trainer: Trainer) -> None:
        if self.compared:
            self._resume(trainer)
            return
        if trainer.global_step:
            raise ConfigurationError(
                f"LRFinder: the checkpoint has {trainer.global_step} steps of a run without LRFinder, but the test "
                "must run before the first step. Resume without LRFinder"
            )
        reference = self._reference(trainer)
        self._configured = reference
        trials = Trials(trainer, self.idle)
        losses = self._try_rates(trainer, trials, reference)
        trials.finish()
        problem: ConfigurationError | None = None
        try:
            self.suggestion = suggest_lr(losses)
        except ConfigurationError as error:
            problem = error
        falls = {rate: fall_between(losses[0.0], losses[rate]) for rate in losses if rate}
        self.compared = [(rate, fall.mean, fall.error) for rate, fall in falls.items()]
        if self.plot is not None and trainer.is_global_zero:
            plot_rates(Path(self.plot), self.compared, self.suggestion)
        if problem is not None and self.apply:
            raise problem
        if problem is not None:
            rank_zero_warn(str(problem))
            return
        named = ""
        if self.apply:
            self._use(trainer, reference)
            named = self._name_it(trainer)
        use = "set" if self.apply else "not set (apply=False)"
        tried = ", ".join(f"{fall.mean:.3g} at {rate:.3g}" for rate, fall in falls.items())
        rank_zero_info(
            f"LRFinder: suggests {self.suggestion:.3g} for the first group, which is {use}; its rate was "
            f"{reference:.3g}. Fall of the loss in {self.num_steps} steps: {tried}{named}"
        )

    def _resume(self, trainer: Trainer) -> None:
        if self.suggestion is not None:
            named = self._name_it(trainer) if self.apply else ""
            rank_zero_info(f"LRFinder: the rate {self.suggestion:.3g} is taken from the checkpoint{named}")

    def _try_rates(self, trainer: Trainer, trials: Trials, reference: float) -> dict[float, Losses]:
        """Return the losses of the trials, by their rates, the first of which is 0."""
        losses: dict[float, Losses] = {0.0: _run(self, trainer, trials, reference, 0.0, [])}
        for rate in rates_to_try(self.min_lr, self.max_lr):
            losses[rate] = _run(self, trainer, trials, reference, rate, losses[0.0])
            if is_passed(losses):
                break
        return losses

    def _use(self, trainer: Trainer, reference: float) -> None:
        assert self.suggestion is not None
        for optimizer in trainer.optimizers:
            scale_rates(optimizer, self.suggestion / reference)
        for config in trainer.lr_scheduler_configs:
            scale_schedule(config.scheduler, self.suggestion / reference)
        optimizer = trainer.optimizers[0]
        self._expected = [float(group["lr"]) for group in optimizer.param_groups]
        self._reads = ReadBack([optimizer], partial(self._differs, trainer))

    def _name_it(self, trainer: Trainer) -> str:
        """Set the suggestion in the module's hyper-parameters and attributes that hold the configured rate."""
        assert self._configured is not None
        places = places_of_rate(trainer.lightning_module, self._configured)
        set_at(places, self.suggestion)
        names = sorted({name for _, name in places})
        if names:
            return f"; the module's {' and '.join(names)} is set to it"
        return ""

    def _differs(self, trainer: Trainer, optimizer: Optimizer, step: int) -> str | None:
        """Return a sentence if a step has another rate than the suggestion or its schedule gives."""
        used = [float(group["lr"]) for group in optimizer.param_groups]
        expected = self._expected
        if step == 1:
            self.taken = used[0]
        else:
            for config in trainer.lr_scheduler_configs:
                if hasattr(config.scheduler, "get_last_lr"):
                    expected = [float(rate) for rate in config.scheduler.get_last_lr()]
        if len(used) != len(expected) or _close(used, expected):
            return None
        self.taken = used[0]
        return (
            f"LRFinder: step {step} should have the rate {expected[0]:.3g}, but it is {used[0]:.3g} in the optimizer: "
            f"{who_sets(trainer.lightning_module)} sets its own rate. The suggestion of {self.suggestion:.3g} is used "
            "only where this code takes it from the module's hyper-parameters or the groups. Use a scheduler for a "
            "warm-up"
        )

    def _reference(self, trainer: Trainer) -> float:
        """Return the full rate of the first group, by which the schedule multiplies, before any warm-up factor."""
        reference = _full_rate(trainer.optimizers[0].param_groups[0])
        if not reference > 0:
            raise ConfigurationError(
                f"LRFinder: the rate of the optimizer's first group is {reference}, so that the ratios of other groups "
                "to it are undefined. Give the first group a rate above 0"
            )
        return reference


def _run(
    finder: LRFinder, trainer: Trainer, trials: Trials, reference: float, rate: float, untrained: Losses
) -> list[float | None]:
    """Train with a constant rate of the first group, and undo everything.

    Returns:
        The loss of each step, the mean over micro-batches and processes as in the gradient; ``None`` for a step without
        a loss. The list is shorter than ``num_steps`` if the run diverged.

    Raises:
        ConfigurationError: If the optimizer steps with another rate.
    """
    losses: list[float | None] = []
    accumulate = trainer.accumulate_grad_batches
    optimizer = trainer.optimizers[0]
    used: list[float] = []  # rate of the first group in the optimizer's step
    hook = optimizer.register_step_post_hook(lambda one, *_: used.append(float(one.param_groups[0]["lr"])))
    with repeated_batches(trainer, "LRFinder") as batches, trials.trial(accumulate, alone=False):
        trainer.strategy.lr_scheduler_configs = []
        # Ratio of each group's rate to the first group's, from full rates: a warm-up may have set all of them to 0.
        shares = [_full_rate(group) / reference for group in optimizer.param_groups]
        while len(losses) < finder.num_steps:
            for group, share in zip(optimizer.param_groups, shares):
                set_rate(group, rate * share)  # in each step, because a module may change it after a step
            # The trial with rate 0 has run the same batches, so a later error comes from the weights.
            may_diverge = bool(rate) and bool(losses) and trainer.world_size == 1
            losses.append(_step(trainer, trials, batches, accumulate, may_diverge))
            if used and not _close(used[-1:], [rate]):
                raise ConfigurationError(
                    f"LRFinder: the rate {rate:.3g} was set, but the optimizer steps with {used[-1]:.3g}: "
                    f"{who_sets(trainer.lightning_module)} sets its own rate, so that no other can be tested. "
                    "Use a scheduler for a warm-up, or leave out LRFinder"
                )
            last = losses[-1]
            if last is not None and not math.isfinite(last):
                break
            if losses[-RECENT:] == [None] * RECENT or grows(losses, untrained, finder.early_stop_threshold):
                break
    hook.remove()
    return losses


def _close(rates: Sequence[float], others: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(rates, others))


def _step(trainer: Any, trials: Trials, batches: Iterator[object], accumulate: int, may_diverge: bool) -> float | None:
    """Run one optimizer step.

    Args:
        trainer: The trainer.
        trials: The trials.
        batches: Iterator of the batches.
        accumulate: Number of micro-batches.
        may_diverge: Take an error of the module for divergence. Modules raise their own errors for losses or
            distributions that are not finite.

    Returns:
        The loss of the step; NaN if a guard or the module stopped it as diverged; ``None`` if ``training_step``
        returned no loss or no token contributes to it.
    """
    watcher = _Losses()
    trainer.callbacks = [*trainer.callbacks, watcher]
    try:
        for _ in range(accumulate):
            trials.train(partial(next, batches))
    except DivergedError:
        return math.nan  # the test looks for the rate at which training diverges
    except Exception as error:
        if not may_diverge or isinstance(error, LitEfficientError) or is_out_of_memory(error):
            raise
        release_frames(error)
        return math.nan
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

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach().float())
            hooks = [technique for technique in techniques_of(trainer) if isinstance(technique, LossHooks)]
            weights = [hook.batch_weight for hook in hooks if hook.batch_weight is not None]
            self.weights.append(float(weights[0]) if weights else 1.0)


def _full_rate(group: dict[str, Any]) -> float:
    """Return the full rate of a group, by which its schedule multiplies; ``lr`` may include a warm-up factor."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))
