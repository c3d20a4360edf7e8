"""Choice of a learning rate as pure functions: rates to try, the suggested rate, and the plot.

    rates = max_lr / 3^k for k = 0, 1, ...;    fall(rate) = mean over steps of (loss at rate 0 - loss at this rate)
    suggestion = sqrt(lowest * highest of the rates that are as good as the best one) / sqrt(3)

All parameter groups are scaled by one factor, so the ratios of their rates stay the same.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_optimizers import INNER_SCHEDULERS, LAST_RATES

CLEAR = 3  # standard errors by which a fall must exceed the noise
# A rate is as good as the best one if its losses are higher by at most this number of standard errors, and at most this
# share of the fall of the loss: a rate whose losses jump has a large standard error, but is not good.
ALIKE = 2
ALIKE_SHARE = 0.1
FACTOR = 3.0  # ratio of neighbouring rates
RECENT = 5  # steps whose mean loss is compared with the threshold of an early end
_NOT_AN_OBJECTIVE = "A loss that does not measure success, as in reinforcement learning, gives no rate: set it by hand"
_NAMES_A_RATE = re.compile(r"(^|_)(lr|learning_rate)(_|$)")

Losses = Sequence[float | None]  # the loss of each step of a trial; None for a step without a loss


def rates_to_try(low: float, high: float) -> list[float]:
    """Return the rates ``high / 3**k`` that are at least ``low``, the highest first.

    Example:
        >>> rates_to_try(0.1, 1.0)
        [1.0, 0.3333333333333333, 0.1111111111111111]
    """
    count = math.floor(math.log(high / low, FACTOR) + 1e-9) + 1
    return [high / FACTOR**k for k in range(count)]


def suggest_lr(trials: Mapping[float, Losses]) -> float:
    """Return the middle of the rates whose losses are not worse than the lowest, divided by the square root of 3.

    The noise between batches hides differences between neighbouring rates. Rates count as equally good if their losses
    are above the lowest by at most two standard errors and a tenth of the fall of the loss. The suggestion is the
    geometric mean of the lowest and the highest of them. The division takes half a step between neighbouring rates,
    because a run that is longer than the trials needs lower rates.

    Args:
        trials: Loss of each step of trials that start from the same weights and see the same batches, by the constant
            rate of the trial. The rate 0 must be among them. A trial has diverged if it is shorter than that of the
            rate 0, or if a loss is not finite.

    Raises:
        ConfigurationError: If the losses are too few or not finite at the rate 0, if the largest fall is not clearly
            larger than the noise between batches, and if the loss improves up to the highest or lowest rate.

    Example:
        >>> still = [2.0, 3.0, 2.0, 3.0, 2.0, 3.0]
        >>> falling = [2.0, 2.5, 1.0, 2.0, 1.0, 2.0]
        >>> trials = {0.0: still, 0.3: still, 0.1: falling, 0.03: still}
        >>> round(suggest_lr(trials), 3)
        0.058
    """
    untrained = trials[0.0]
    known = [loss for loss in untrained if loss is not None]
    if len(known) < 4 or _diverged(untrained):
        if len(known) < 4:
            reason = "training_step returned no loss in the other steps"
        else:
            reason = "the network is broken"
        raise ConfigurationError(
            f"LRFinder: the losses of the initial weights are {_few(known)}, from which no rate can be suggested: "
            f"{reason}"
        )
    best = best_of(trials)
    steps = len(untrained)
    fall = fall_between(untrained, trials[best])
    if fall.mean == -math.inf:
        raise ConfigurationError(
            f"LRFinder: training diverges at all rates down to {min(filter(None, trials)):.3g}: lower min_lr"
        )
    if not fall.clear:
        raise ConfigurationError(
            f"LRFinder: {steps} steps at the best rate of {best:.3g} lower the loss by {fall.mean:.3g} on the same "
            f"batches, which is not more than {CLEAR} times the standard error of {fall.error:.2g} between batches: no "
            f"rate can be suggested. Use more steps (num_steps) or larger batches. {_NOT_AN_OBJECTIVE}"
        )
    rates = sorted(filter(None, trials))
    for neighbour, end, advice in (
        (rates[-2:][0], rates[-1], f"raise max_lr above {rates[-1]:.3g}"),
        (rates[:2][-1], rates[0], f"lower min_lr below {rates[0]:.3g}"),
    ):
        if best == end and fall_between(trials[neighbour], trials[best]).clear:
            raise ConfigurationError(
                f"LRFinder: the loss improves up to the end of the range, from the rate {neighbour:.3g} to {best:.3g}, "
                f"so the best rate is outside: {advice}. {_NOT_AN_OBJECTIVE}"
            )
    alike = [rate for rate in rates if _is_alike(fall_between(trials[rate], trials[best]), fall.mean)]
    return math.sqrt(alike[0] * alike[-1] / FACTOR)


def _is_alike(difference: "Fall", fall: float) -> bool:
    return difference.mean <= min(ALIKE * difference.error, ALIKE_SHARE * fall)


def best_of(trials: Mapping[float, Losses]) -> float:
    """Return the rate above 0 whose trial has the lowest losses; of equal rates the highest."""
    rates = sorted(filter(None, trials), reverse=True)
    best = rates[0]
    for rate in rates[1:]:
        if fall_between(trials[best], trials[rate]).mean > 0:
            best = rate
    return best


def is_passed(trials: Mapping[float, Losses]) -> bool:
    """Return whether the two lowest rates are clearly worse than the best rate, so that lower rates are worse, too."""
    best = best_of(trials)
    lowest = sorted(filter(None, trials))[:2]
    return len(lowest) == 2 and all(rate < best and fall_between(trials[rate], trials[best]).clear for rate in lowest)


@dataclass(frozen=True)
class Fall:
    """Mean difference of the losses of two trials on the same batches, over the last third of their steps."""

    mean: float  # above 0 if the second trial has lower losses; NaN if no step can be compared
    error: float  # standard error of the mean, from the differences between neighbouring steps

    @property
    def clear(self) -> bool:
        """Whether the difference is above 0 and clearly larger than the noise."""
        return self.mean > CLEAR * self.error


def fall_between(first: Losses, second: Losses) -> Fall:
    """Compare two trials that saw the same batches. Noise that both share cancels.

    Args:
        first: Loss of each step of the first trial; ``None`` for a step without a loss.
        second: Loss of each step of the second trial. A trial has diverged if it ended earlier than the other, or if
            a loss is not finite.

    Example:
        >>> fall_between([2.0, 3.0, 2.0, 4.0], [2.0, 2.0, 1.0, 3.0])
        Fall(mean=1.0, error=0.0)
    """
    if len(second) < len(first) or _diverged(second):
        return Fall(-math.inf, 0.0)
    if len(first) < len(second) or _diverged(first):
        return Fall(math.inf, 0.0)
    pairs = [(a, b) for a, b in zip(first, second) if a is not None and b is not None]
    differences = [a - b for a, b in pairs[-max(2, len(pairs) // 3) :]]
    count = len(differences)
    if count < 2:
        return Fall(math.nan, math.nan)
    squares = sum((b - a) ** 2 for a, b in pairwise(differences))
    return Fall(sum(differences) / count, math.sqrt(squares / (2 * (count - 1)) / count))


def grows(losses: Losses, untrained: Losses, threshold: float | None) -> bool:
    """Return whether the last losses of a trial exceed ``threshold`` times those of the initial weights."""
    pairs = [(a, b) for a, b in zip(losses, untrained) if a is not None and b is not None][-RECENT:]
    if threshold is None or len(pairs) < RECENT:
        return False
    return sum(a for a, _ in pairs) > threshold * sum(b for _, b in pairs) > 0


def _diverged(losses: Losses) -> bool:
    return any(loss is not None and not math.isfinite(loss) for loss in losses)


def _few(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.3g}" for loss in losses[:6]) or "missing"


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Scale the rates of all parameter groups in place, including the rates that schedulers store in the groups."""
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr"):  # the last three: one-cycle and SWA schedules
            if key in group:
                set_rate(group, float(group[key]) * factor, key)


def places_of_rate(module: nn.Module, rate: float) -> list[tuple[object, str]]:
    """Return the places in a module's hyper-parameters, and its attributes of the same names, that hold a rate.

    Returns:
        Pairs of the object or dictionary that holds the value, and the name or key in it. The name contains ``lr`` or
        ``learning_rate`` as a word.
    """

    def holds(value: object) -> bool:
        return isinstance(value, float | int) and not isinstance(value, bool) and math.isclose(value, rate)

    places: list[tuple[object, str]] = []
    stack = [getattr(module, "hparams", None)]
    while stack:
        holder = stack.pop()
        if not isinstance(holder, dict):
            continue
        stack += holder.values()
        places += [(holder, name) for name in holder if _NAMES_A_RATE.search(str(name)) and holds(holder[name])]
    attributes = [name for name in vars(module) if _NAMES_A_RATE.search(name) and holds(vars(module)[name])]
    return [*places, *((module, name) for name in attributes)]


def set_rate(group: dict[str, Any], rate: Any, key: str = "lr") -> None:
    """Set a parameter group's rate or another option. A tensor is filled in place, because optimizers refer to it."""
    if isinstance(group.get(key), Tensor):
        group[key].fill_(rate)
    else:
        group[key] = rate


_RATES = ("base_lrs", "max_lrs", "min_lrs", LAST_RATES, "eta_min", "min_lr", "default_min_lr")


def scale_schedule(scheduler: LRScheduler, factor: float) -> None:
    """Scale all rates of a scheduler and of the schedulers inside it, in place.

    A scheduler that is not torch's must use the same attribute names. Schedulers that multiply ``base_lrs`` by a factor
    are scaled through ``base_lrs``.
    """
    state = vars(scheduler)
    for name in _RATES:
        value = state.get(name)
        if isinstance(value, list | tuple):
            state[name] = type(value)(rate * factor for rate in value)
        elif isinstance(value, float | int) and not isinstance(value, bool):
            state[name] = value * factor
    for inner in state.get(INNER_SCHEDULERS, ()):
        scale_schedule(inner, factor)


def plot_rates(path: Path, compared: Sequence[tuple[float, float, float]], suggestion: float | None) -> None:
    """Write a PNG of the fall of the loss at each rate, with its standard error, and of the suggested rate.

    Args:
        path: Path of the file.
        compared: Rate, fall and standard error of each trial. Trials that diverged are left out of the plot.
        suggestion: The suggested rate.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display and does not change pyplot's backend
    axes = figure.add_subplot()
    rows = [row for row in compared if math.isfinite(row[1])]
    rates = [row[0] for row in rows]
    falls = [row[1] for row in rows]
    axes.errorbar(rates, falls, [row[2] for row in rows], color="tab:blue", marker=".", label="fall and standard error")
    axes.axhline(0, color="0.75", linewidth=1)
    if suggestion is not None:
        axes.axvline(suggestion, color="tab:red", linestyle="--", label=f"suggestion {suggestion:.3g}")
    axes.set_xscale("log")
    if falls and max(falls) > 0:  # a rate that nearly diverged would flatten the rest
        axes.set_ylim(max(min(falls), -max(falls)) - 0.1 * max(falls), 1.2 * max(falls))
    axes.set(xlabel="learning rate (first parameter group)", ylabel="fall of the training loss", title="Learning rates")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
