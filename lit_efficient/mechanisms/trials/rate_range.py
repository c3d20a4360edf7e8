"""A learning-rate range test as pure functions: which rates to try, which one to take, and the picture of it.

    factor_i = (low / reference) * (high / low)^(i / (n - 1));  suggestion = where the smoothed loss falls fastest per
    decade, before it has grown beyond its minimum

All parameter groups are scaled by one factor, so their proportions stay as their author set them.
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
    """Learning rates from ``low`` to ``high``: equal ratios (``exponential``) or equal differences (``linear``)."""
    shares = [i / (steps - 1) for i in range(steps)]
    if mode == "linear":
        return [low + (high - low) * share for share in shares]
    return [low * (high / low) ** share for share in shares]


def smoothed(losses: Sequence[float], decay: float = 0.8) -> list[float]:
    """An exponential average without bias at its start; what is not finite stays as it is and counts for nothing."""
    average = weight = 0.0
    result = []
    for loss in losses:
        if not math.isfinite(loss):
            result.append(loss)
            continue
        average, weight = decay * average + (1 - decay) * loss, decay * weight + 1 - decay
        result.append(average / weight)
    return result


def suggest_lr(rates: Sequence[float], losses: Sequence[float], decay: float = 0.8) -> float:
    """The one of ``rates`` at which the smoothed loss falls fastest for a relative increase of it, before the minimum.

    Args:
        rates: Rates that were tried, rising.
        losses: The loss at each; what follows one that is not finite is left out.
        decay: How much the losses are smoothed, in [0, 1).

    Raises:
        ConfigurationError: If fewer than three losses are finite, or the loss never falls.

    Example:
        >>> suggest_lr([1e-4, 1e-3, 1e-2, 1e-1, 1.0], [4.0, 3.9, 2.0, 1.9, 9.0], decay=0.0)
        0.01
    """
    end = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    if end < 3:
        why = "training_step returned no loss in the other steps"
        if end < len(losses):
            why = f"it is {losses[end]} at the rate {rates[end]:g}; if it is finite at smaller ones, lower min_lr"
        raise ConfigurationError(f"LRFinder: {end} finite losses are too few to suggest a rate: {why}")
    curve = smoothed(losses[:end], decay)
    settled = min(_settled(decay), end - 1)
    lowest = min(range(settled, end), key=curve.__getitem__)
    slopes = [(curve[i] - curve[i - 1]) / math.log(rates[i] / rates[i - 1]) for i in range(1, lowest + 1)]
    if not slopes or min(slopes) >= 0:
        raise ConfigurationError(
            f"LRFinder: the loss never falls between the rates {rates[0]:g} and {rates[end - 1]:g}; "
            "start from a smaller min_lr, or take more steps"
        )
    return float(rates[1 + min(range(len(slopes)), key=slopes.__getitem__)])


def _settled(decay: float) -> int:
    """Steps after which the average is no longer of a few batches, easy ones perhaps."""
    return math.ceil(1 / (1 - decay))


SETTLED = _settled(0.8)


def grows(losses: Sequence[float], threshold: float | None, decay: float = 0.8) -> bool:
    """Whether the smoothed loss is above so many times its lowest; the first, noisy steps are not judged."""
    curve = smoothed(losses, decay)[_settled(decay) :]
    return threshold is not None and bool(curve) and curve[-1] > threshold * min(curve) > 0


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Scale all rates of an optimizer's groups, and all rates that a schedule goes back to, in place; tensors stay
    tensors.
    """
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr"):  # of one-cycle and SWA schedules
            if key in group:
                set_rate(group, float(group[key]) * factor, key)


def set_rate(group: dict[str, Any], rate: Any, key: str = "lr") -> None:
    """Set a group's rate, or another option; a tensor is filled: compiled and low-bit optimizers keep hold of it."""
    if isinstance(group.get(key), Tensor):
        group[key].fill_(rate)
    else:
        group[key] = rate


_RATES = ("base_lrs", "max_lrs", "min_lrs", LAST_RATES, "eta_min", "min_lr", "default_min_lr")


def scale_schedule(scheduler: Any, factor: float) -> None:
    """Scale every rate that a scheduler holds, in place, those of schedulers within it, too.

    One that is not torch's must keep rates under the same names. A schedule that computes factors of ``base_lrs`` is
    scaled by them alone.
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
    """Draw the range test as a PNG: losses, their smoothed curve and the suggestion."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, and leaves pyplot's backend alone
    axes = figure.add_subplot()
    curve = smoothed(losses, decay)
    axes.plot(rates[: len(losses)], losses, color="0.75", linewidth=1, marker=".", markersize=4, label="loss")
    axes.plot(rates[: len(losses)], curve, color="tab:blue", linewidth=2, label="smoothed")
    if suggestion is not None:
        axes.axvline(suggestion, color="tab:red", linestyle="--", label=f"suggestion {suggestion:.3g}")
    axes.set_xscale("linear" if mode == "linear" else "log")
    finite = [loss for loss in curve if math.isfinite(loss)]
    if finite:  # one divergent loss at the end must not flatten the rest
        low, start = min(finite), finite[0]
        room = max(start - low, abs(low) * 0.05, 1e-12)
        axes.set_ylim(low - 0.15 * room, start + 0.6 * room)
    axes.set(xlabel="learning rate (first parameter group)", ylabel="training loss", title="Learning-rate range test")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
