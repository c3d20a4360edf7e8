"""What few runs say: means of paired differences with Student's interval, and whether they are evidence of anything.

    differences d_1 .. d_n, one a pair of runs:   mean(d) +- t(n - 1) sd(d) / sqrt(n);   ratios are taken by their logs

A pair shares its seed or its round, so that what both have in common cancels. Where several variants are asked about,
p is Holm's: the chance to be wrong about any of them stays below 5 %.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

LEVEL = 0.05  # of what counts as evidence
_LOOKS = 1.6


@dataclass(frozen=True)
class Estimate:
    """A value, and what is known of it."""

    value: float  # the mean over runs, of ratios the geometric one; NaN where nothing is known
    low: float  # lower end of its 95 % interval; NaN where a single run says nothing of it
    high: float  # upper end
    p: float | None  # the chance to see as much if there were no difference; ``None`` where nobody can say
    n: int  # runs, or pairs of runs, behind it

    @property
    def evidence(self) -> bool:
        """Whether it is evidence of a difference."""
        return self.p is not None and self.p <= LEVEL

    @property
    def width(self) -> float:
        """Of the interval, relative to the value; infinite where it is unknown."""
        width = (self.high - self.low) / abs(self.value) if self.value else math.inf
        return width if math.isfinite(width) else math.inf


UNKNOWN = Estimate(math.nan, math.nan, math.nan, None, 0)


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of values, and whether it is another one than 0.

    Values that are all the same are one value, whose repetition says nothing. Where one is not finite nothing is
    known.

    Example:
        >>> found = mean_of([1.0, 2.0, 3.0])
        >>> found.value, round(found.low, 4), round(found.high, 4), round(found.p, 4), found.n
        (2.0, -0.4841, 4.4841, 0.0742, 3)
    """
    from scipy.special import stdtr, stdtrit  # Student's distribution, and its inverse

    n = len(values)
    if not n or not all(map(math.isfinite, values)):
        return replace(UNKNOWN, n=n)
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    if n == 1:
        return Estimate(mean, math.nan, math.nan, None, 1)
    if error <= 1e-12 * abs(mean):
        return Estimate(mean, mean, mean, 1.0 if mean == 0 else None, n)
    reach = float(stdtrit(n - 1, 1 - LEVEL / 2)) * error
    return Estimate(mean, mean - reach, mean + reach, 2 * float(stdtr(n - 1, -abs(mean / error))), n)


def ratio_of(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """The geometric mean of paired ratios, and whether it is another one than 1."""
    pairs = [(a, b) for a, b in zip(values, baseline) if a > 0 and b > 0]
    log = mean_of([math.log(a / b) for a, b in pairs])
    return replace(log, value=math.exp(log.value), low=math.exp(log.low), high=math.exp(log.high))


def holm(estimates: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """The same estimates with p as it is when all of them are asked about at once.

    Example:
        >>> both = {"a": Estimate(1, 0, 2, 0.03, 3), "b": Estimate(1, 0, 2, 0.01, 3)}
        >>> {name: one.p for name, one in holm(both).items()}
        {'a': 0.03, 'b': 0.02}
    """
    known = sorted((one.p, name) for name, one in estimates.items() if one.p is not None)
    found, least = dict(estimates), 0.0
    for i, (p, name) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - i)))
        found[name] = replace(found[name], p=least)
    return found


def looked_at(estimate: Estimate) -> Estimate:
    """The same estimate with p as it is where rounds ended because the interval was narrow.

    Such an end is likelier where runs are alike by chance: below 5 % lies p of up to 7.6 % of equals (40,000
    simulations of 6 to 40 rounds, seen after each), and of at most 5.2 % once it is 1.6 times as large.
    """
    return estimate if estimate.p is None else replace(estimate, p=min(1.0, _LOOKS * estimate.p))
