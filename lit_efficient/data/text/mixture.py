"""Mixtures of sources: the share of each source in a stretch of training.

    p_i = w_i^(1/T) / sum_j w_j^(1/T)          share of source i, with its weight or its size as w_i
    N   = max_i n_i / p_i  (or min_i)          size of an epoch, for sources of n_i rows or tokens
    passes over source i in an epoch = p_i N / n_i

The weight of a source may be a schedule, w_i(t): the numbers of a list hold at places of training at equal distances,
and the shares change linearly between these. N is then that of the mean shares over the schedule.

With the maximum every row is read at least once in an epoch, and small sources are repeated. With the minimum no row is
read twice, and an epoch ends with the source that is the first to be used up.

Source: temperatures of shares: Raffel et al. (2020), https://arxiv.org/abs/1910.10683, section 3.5.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np

from lit_efficient.errors import ConfigurationError, check_choice, check_number, checks_types, refusal
from lit_efficient.mechanisms.order.mixture_sampler import schedule_mean

By = Literal["rows", "tokens"]
Stop = Literal["all_exhausted", "first_exhausted"]


@checks_types
@dataclass(frozen=True)
class MixtureSource:
    """Source of a mixture.

    Args:
        path: File, folder, address or name of a data set, or a list of them, such as the shards of a data set.
        weight: Share of the source relative to the others, above 0. null for all sources: their sizes. A list is a
            schedule, from the beginning of training to the end of ``mixture.epochs``: ``[1, 0]`` fades a source out.
        name: Name in logs. null: the last part of the path.
        split: Split of Hugging Face data sets. null: that of ``rows``.
        subset: Configuration of Hugging Face data sets. null: that of ``rows``.
    """

    path: str | list[str]
    weight: float | list[float] | None = None
    name: str | None = None
    split: str | None = None
    subset: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.weight, list):
            for weight in self.weight:
                check_number("LanguageData", "train.weight", weight, least=0)
            if len(self.weight) < 2 or not any(self.weight):
                raise refusal("LanguageData", "train.weight", "at least two numbers, not all of them 0", self.weight)
        else:
            check_number("LanguageData", "train.weight", self.weight, above=0, null=True)
        if not self.path or not all(self.paths):
            raise refusal("LanguageData", "train.path", "at least one path", self.path)

    @property
    def paths(self) -> list[str]:
        """All paths of the source."""
        return [self.path] if isinstance(self.path, str) else list(self.path)

    @property
    def label(self) -> str:
        """Name in logs."""
        return self.name or PurePosixPath(self.paths[0]).name


@checks_types
@dataclass(frozen=True)
class LanguageMixture:
    """Shares of the sources in ``train``, if these are given as ``{path, weight, name, split, subset}``.

    A row of a packed batch holds documents of one source.

    Args:
        by: Unit of the shares: ``rows`` of the sources, or ``tokens``.
        temperature: Shares are proportional to weight ** (1 / temperature). Above 1 they are more even.
        stop: End of an epoch. ``all_exhausted``: every row is read at least once, and small sources are repeated.
            ``first_exhausted``: no row is read twice, and large sources are cut; each epoch takes other rows of them.
            A stream does not end: there the sources start again, each on its own, or all of them with the first.
            With a schedule both hold for the mean over it: a source is repeated while its weight is large.
        epochs: Epochs from the first to the last weight of a schedule. Afterwards the last weight holds. It may be
            a part of an epoch, such as 0.5.
    """

    by: By = "rows"
    temperature: float = 1.0
    stop: Stop = "all_exhausted"
    epochs: float = 1.0

    def __post_init__(self) -> None:
        check_choice("LanguageData", "mixture.by", self.by, ("rows", "tokens"))
        check_number("LanguageData", "mixture.temperature", self.temperature, above=0)
        check_choice("LanguageData", "mixture.stop", self.stop, ("all_exhausted", "first_exhausted"))
        check_number("LanguageData", "mixture.epochs", self.epochs, above=0)

    def shares(self, sources: Sequence[MixtureSource], sizes: Sequence[float]) -> np.ndarray:
        """Return the share of each source at each point of the schedule [K, S]; K is 1 without a schedule.

        Args:
            sources: The sources, which `as_sources` has compared with each other.
            sizes: Numbers of their rows or tokens.
        """
        points = schedule_points(sources)
        weights = np.empty((points, len(sources)))
        for column, (source, size) in enumerate(zip(sources, sizes)):
            weights[:, column] = size if source.weight is None else source.weight
        powers = (weights / weights.max(axis=1, keepdims=True)) ** (1 / self.temperature)
        return powers / powers.sum(axis=1, keepdims=True)

    def passes(self, sources: Sequence[MixtureSource], sizes: Sequence[float]) -> np.ndarray:
        """Return the passes over each source in an epoch, at each point of the schedule [K, S]."""
        ratios = self.shares(sources, sizes) / np.array(sizes, dtype=np.float64)
        means = schedule_mean(ratios)
        # The reference source is passed once in the mean, exactly.
        return ratios / (means.min() if self.stop == "all_exhausted" else means.max())


def schedule_points(sources: Sequence[MixtureSource]) -> int:
    """Return the number of weights in the schedule of a mixture; 1 without a schedule."""
    return max(len(source.weight) if isinstance(source.weight, list) else 1 for source in sources)


def share_text(shares: np.ndarray) -> str:
    """Return the share of a source at each point of a schedule [K] in words."""
    return " to ".join(f"{share:.1%}" for share in shares.tolist())


def as_sources(owner: str, name: str, given: str | Sequence[Any]) -> tuple[list[MixtureSource], bool]:
    """Return the entries of ``train`` or ``val`` as sources, and whether they are a mixture with named sources.

    Args:
        owner: Name of the DataModule.
        name: Name of its argument.
        given: A path, or a list of paths and sources.

    Raises:
        ConfigurationError: If some sources of a mixture have weights and others have none, or two have one name.
    """
    entries = [given] if isinstance(given, str | Mapping | MixtureSource) else list(given)
    sources = []
    for entry in entries:
        if isinstance(entry, str):
            sources.append(MixtureSource(entry))
        else:
            sources.append(replace(entry) if isinstance(entry, MixtureSource) else MixtureSource(**entry))
    if all(isinstance(entry, str) for entry in entries):
        return sources, False
    weighted = [source.label for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        lacking = next(source.label for source in sources if source.weight is None)
        raise ConfigurationError(
            f"{owner}: {name}: {weighted[0]!r} has a weight and {lacking!r} has none. Give all sources a weight, or "
            "none."
        )
    labels = [source.label for source in sources]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigurationError(f"{owner}: {name}: two sources have the name {label!r}. Set another name.")
    lengths = {len(source.weight) for source in sources if isinstance(source.weight, list)}
    if len(lengths) > 1:
        raise ConfigurationError(
            f"{owner}: {name}: the schedules of weights have different lengths: {sorted(lengths)}. Give each the same "
            "number of weights."
        )
    for point in range(schedule_points(sources)):
        now = [source.weight[point] if isinstance(source.weight, list) else source.weight for source in sources]
        if not any(weight is None or weight > 0 for weight in now):
            raise ConfigurationError(f"{owner}: {name}: all weights are 0 at number {point + 1} of the schedule.")
    return sources, True
