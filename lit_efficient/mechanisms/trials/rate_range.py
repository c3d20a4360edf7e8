"""Learning-rate range test as pure functions: rates to try, the suggested rate, and the plot.

    factor_i = (low / reference) * (high / low)^(i / (n - 1))
    suggestion = rate at which the smoothed loss has made a quarter of its fall

All parameter groups are scaled by one factor, so the ratios of their rates stay the same.
Source: Smith (2015), https://arxiv.org/abs/1506.01186.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_optimizers import INNER_SCHEDULERS, LAST_RATES

CLEAR = 3  # standard errors by which a fall must exceed the noise
FACTOR = 3.0  # ratio of neighbouring rates that are compared
NOT_AN_OBJECTIVE = "A loss that does not measure success, as in reinforcement learning, gives no rate: set it by hand"
_NAMES_A_RATE = re.compile(r"(^|_)(lr|learning_rate)(_|$)")
_MEDIAN_DIFFERENCE = 0.954  # median of |a - b| for two normal values of standard deviation 1


def rates_to_try(low: float, high: float, steps: int, mode: str) -> list[float]:
    """Return ``steps`` rates from ``low`` to ``high`` with equal ratios (``exponential``) or equal differences."""
    fractions = [i / (steps - 1) for i in range(steps)]
    if mode == "linear":
        return [low + (high - low) * fraction for fraction in fractions]
    return [low * (high / low) ** fraction for fraction in fractions]


def smoothed(losses: Sequence[float], decay: float = 0.8) -> list[float]:
    """Return the bias-corrected exponential average after each loss. Losses that are not finite are kept."""
    average = 0.0
    weight = 0.0
    result = []
    for loss in losses:
        if not math.isfinite(loss):
            result.append(loss)
            continue
        average = decay * average + (1 - decay) * loss
        weight = decay * weight + 1 - decay
        result.append(average / weight)
    return result


def suggest_lr(
    rates: Sequence[float], losses: Sequence[float], decay: float = 0.8, untrained: Sequence[float] | None = None
) -> float:
    """Return the rate at which the smoothed loss has made a quarter of its fall to its minimum.

    At higher rates the loss still falls in a test of few steps at each rate, but a run of many steps at these rates is
    often worse or diverges.

    Args:
        rates: Rates that were tried, in ascending order.
        losses: Loss at each rate. Losses from the first one on that is not finite are ignored.
        decay: Decay of the smoothing, in [0, 1).
        untrained: Losses of the initial weights on the same batches, from which the fall is measured. ``None``: the
            fall is measured from the first losses, and must exceed the noise between them.

    Raises:
        ConfigurationError: If fewer than three losses are finite, or the loss does not fall.

    Example:
        >>> suggest_lr([1e-4, 1e-3, 1e-2, 1e-1, 1.0], [4.0, 3.9, 2.0, 1.9, 9.0], decay=0.0)
        0.01
    """
    end = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    if end < 3:
        reason = "training_step returned no loss in the other steps"
        if end < len(losses):
            reason = (
                f"the loss is {losses[end]} at the rate {rates[end]:g}; if it is finite at smaller rates, lower min_lr"
            )
        raise ConfigurationError(f"LRFinder: {end} finite losses are too few to suggest a rate: {reason}")
    if untrained is None:
        first = min(_settled(decay), end - 1) - 1  # the first value of the curve that covers enough batches
        curve = smoothed(losses[:end], decay)
        level = curve[first]
    else:
        first = 0
        curve = smoothed([loss - other for loss, other in zip(losses[:end], untrained)], decay)
        level = 0.0
    lowest = min(range(first, len(curve)), key=curve.__getitem__)
    fall = level - curve[lowest]
    noise = 0.0
    if untrained is None and lowest:
        # The median of the differences of neighbours does not depend on the fall itself, which is in few of them.
        typical = median(abs(losses[i] - losses[i - 1]) for i in range(1, lowest + 1))
        noise = typical / _MEDIAN_DIFFERENCE * math.sqrt((1 - decay) / (1 + decay))
    if not fall > CLEAR * noise:
        raise ConfigurationError(
            f"LRFinder: the smoothed loss falls by {fall:.3g} between the rates {rates[0]:g} and {rates[end - 1]:g}, "
            f"which is not more than {CLEAR} times its noise between batches of {noise:.3g}. If the loss depends on "
            f"the rate, use more steps (num_steps), larger batches or another range. {NOT_AN_OBJECTIVE}"
        )
    return float(rates[next(i for i in range(first, end) if level - curve[i] >= fall / 4)])


@dataclass(frozen=True)
class Fall:
    """Mean difference of the losses of two trials on the same batches, over the second half of their steps."""

    mean: float  # above 0 if the second trial has lower losses; NaN if no step can be compared
    error: float  # standard error of the mean, from the differences between neighbouring steps

    @property
    def clear(self) -> bool:
        """Whether the difference is above 0 and clearly larger than the noise."""
        return self.mean > CLEAR * self.error


def fall_between(first: Sequence[float | None], second: Sequence[float | None]) -> Fall:
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
    differences = [a - b for a, b in pairs[len(pairs) // 2 :]]
    count = len(differences)
    if count < 2:
        return Fall(math.nan, math.nan)
    squares = sum((b - a) ** 2 for a, b in pairwise(differences))
    return Fall(sum(differences) / count, math.sqrt(squares / (2 * (count - 1)) / count))


def _diverged(losses: Sequence[float | None]) -> bool:
    return any(loss is not None and not math.isfinite(loss) for loss in losses)


def climb(start: float, low: float, high: float, better: Callable[[float, float], bool]) -> float:
    """Return the best of the rates ``start * 3**k`` between ``low`` and ``high``, found by steps up or down.

    Args:
        start: First rate.
        low: Smallest rate.
        high: Largest rate.
        better: Function that returns whether its first rate gives a lower loss than its second.

    Example:
        >>> climb(1.0, 0.01, 30.0, lambda one, other: abs(one - 8) < abs(other - 8))
        9.0
    """
    best = start
    for factor in (FACTOR, 1 / FACTOR):
        moved = True
        while moved:
            moved = False
            for rate in (best * factor, best * factor**2):  # the second, because noise may hide one step's gain
                if not moved and low <= rate <= high and better(rate, best):
                    best = rate
                    moved = True
        if best > start:
            break
    return best


def _settled(decay: float) -> int:
    """Return the number of steps after which the smoothed loss covers enough batches to be judged."""
    return math.ceil(1 / (1 - decay))


SETTLED = _settled(0.8)


def grows(losses: Sequence[float], threshold: float | None, decay: float = 0.8) -> bool:
    """Return whether the smoothed loss exceeds ``threshold`` times its minimum. The first, noisy steps are ignored."""
    curve = smoothed(losses, decay)[_settled(decay) :]
    if threshold is None or not curve:
        return False
    return curve[-1] > threshold * min(curve) > 0


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Scale the rates of all parameter groups in place, including the rates that schedulers store in the groups."""
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr"):  # the last three: one-cycle and SWA schedules
            if key in group:
                set_rate(group, float(group[key]) * factor, key)


def places_of_rate(module: Any, rate: float) -> list[tuple[Any, str]]:
    """Return the places in a module's hyper-parameters, and its attributes of the same names, that hold a rate.

    Returns:
        Pairs of the object or dictionary that holds the value, and the name or key in it. The name contains ``lr`` or
        ``learning_rate`` as a word.
    """

    def holds(value: object) -> bool:
        return isinstance(value, float | int) and not isinstance(value, bool) and math.isclose(value, rate)

    places: list[tuple[Any, str]] = []
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


def scale_schedule(scheduler: Any, factor: float) -> None:
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


def plot_rates(
    path: Path, rates: Sequence[float], losses: Sequence[float], suggestion: float | None, mode: str, decay: float
) -> None:
    """Write a PNG of the range test: the losses, their smoothed curve and the suggested rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # needs no display and does not change pyplot's backend
    axes = figure.add_subplot()
    curve = smoothed(losses, decay)
    axes.plot(rates[: len(losses)], losses, color="0.75", linewidth=1, marker=".", markersize=4, label="loss")
    axes.plot(rates[: len(losses)], curve, color="tab:blue", linewidth=2, label="smoothed")
    if suggestion is not None:
        axes.axvline(suggestion, color="tab:red", linestyle="--", label=f"suggestion {suggestion:.3g}")
    axes.set_xscale("linear" if mode == "linear" else "log")
    finite = [loss for loss in curve if math.isfinite(loss)]
    if finite:  # limits from the finite losses, so that a diverged loss at the end does not flatten the rest
        low = min(finite)
        start = finite[0]
        room = max(start - low, abs(low) * 0.05, 1e-12)
        axes.set_ylim(low - 0.15 * room, start + 0.6 * room)
    axes.set(xlabel="learning rate (first parameter group)", ylabel="training loss", title="Learning-rate range test")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
