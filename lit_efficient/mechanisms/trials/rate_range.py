"""Learning-rate range test as pure functions: rates to try, the suggested rate, and the plot.

    factor_i = (low / reference) * (high / low)^(i / (n - 1))
    suggestion = rate at which the smoothed loss falls fastest per decade, before its minimum

All parameter groups are scaled by one factor, so the ratios of their rates stay the same.
Source: Smith (2015), https://arxiv.org/abs/1506.01186.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_optimizers import INNER_SCHEDULERS, LAST_RATES


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


def suggest_lr(rates: Sequence[float], losses: Sequence[float], decay: float = 0.8) -> float:
    """Return the rate at which the smoothed loss falls fastest per relative increase of the rate, before its minimum.

    Args:
        rates: Rates that were tried, in ascending order.
        losses: Loss at each rate. Losses from the first one on that is not finite are ignored.
        decay: Decay of the smoothing, in [0, 1).

    Raises:
        ConfigurationError: If fewer than three losses are finite, or the loss never falls.

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
    curve = smoothed(losses[:end], decay)
    settled = min(_settled(decay), end - 1)
    lowest = min(range(settled, end), key=curve.__getitem__)
    slopes = [(curve[i] - curve[i - 1]) / math.log(rates[i] / rates[i - 1]) for i in range(1, lowest + 1)]
    if not slopes or min(slopes) >= 0:
        raise ConfigurationError(
            f"LRFinder: the loss never falls between the rates {rates[0]:g} and {rates[end - 1]:g}. "
            "Lower min_lr, or use more steps"
        )
    return float(rates[1 + min(range(len(slopes)), key=slopes.__getitem__)])


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
