"""Where a run keeps its batch size, which sizes are worth trying, and how the largest that fits is found.

    effective = size * accumulation stays:   size in the divisors of effective,  accumulation = effective / size

Only sizes that divide the effective batch keep every optimizer step what it was. The search never returns a size that
it has not tried.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.lightning_data import data_source
from lit_efficient.mechanisms.trials.probes import batch_size_of, check_loader, loaders_in, resize

NAMES = ("device_batch", "batch_size")  # what "auto" looks for, in this order


def divisors(number: int) -> list[int]:
    """All divisors of a number of 1 or more, smallest first."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def halvings(number: int) -> list[int]:
    """A number divided by its smallest prime factors, one after the other, smallest first: 1, 3, 6, 12 for 12."""
    chain = [number]
    factor = 2
    while chain[-1] > 1:
        while chain[-1] % factor:
            factor += 1
        chain.append(chain[-1] // factor)
    return chain[::-1]


def candidate_sizes(mode: str, most: int, effective: int | None = None) -> list[int]:
    """The batch sizes to choose from, smallest first.

    Args:
        mode: ``power`` for steps of about two, ``binary`` for every size.
        most: No size is larger.
        effective: Only sizes that divide this; ``None`` for any.

    Example:
        >>> candidate_sizes("power", most=100, effective=96)
        [1, 3, 6, 12, 24, 48, 96]
        >>> candidate_sizes("binary", most=20, effective=96)
        [1, 2, 3, 4, 6, 8, 12, 16]
        >>> candidate_sizes("power", most=20)
        [1, 2, 4, 8, 16, 20]
    """
    if effective is not None:
        sizes = divisors(effective) if mode == "binary" else halvings(effective)
        return [size for size in sizes if size <= most]
    if mode == "binary":
        return list(range(1, most + 1))
    return sorted({*(2**i for i in range(most.bit_length())), most})


def largest_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest size that was tried and fits, if larger sizes never need less; ``None`` if the smallest does not fit.

    Doubling finds the first that does not fit, halving the interval the last that does.

    Args:
        sizes: The sizes to choose from, smallest first.
        fits: Tries one.

    Example:
        >>> largest_fitting(range(1, 1000), lambda size: size <= 300)
        300
    """
    low, high = -1, 0  # what fits, what is tried next
    while high < len(sizes) and fits(sizes[high]):
        low = high
        high = max(high + 1, bisect.bisect_left(sizes, 2 * sizes[high]))
        if high >= len(sizes) and low < len(sizes) - 1:
            high = len(sizes) - 1
    if low < 0:
        return None
    high = min(high, len(sizes))
    while high - low > 1:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            low = middle
        else:
            high = middle
    return sizes[low]


class BatchSizeTarget:
    """What holds the batch size: an attribute of the datamodule or the module, or the loader that was passed to fit.

    The path has dots, or is ``auto``; data is attached to the trainer.

    Raises:
        ConfigurationError: If there is no such attribute, it is not a whole number, or it is not what loaders follow.
    """

    def __init__(self, trainer: Any, path: str, owner: str) -> None:
        self.owner = owner
        self._source = data_source(trainer.fit_loop)
        self._passed = None if self._source.is_module() else self._source.instance
        holders = [holder for holder in (trainer.datamodule, trainer.lightning_module) if holder is not None]
        self._places: list[tuple[Any, str]] = []
        if self._passed is not None:
            self._check_passed(path)
            return
        for name in NAMES if path == "auto" else (path,):
            self._places = [place for holder in holders for place in places_of(holder, name)]
            if self._places:
                self.name = name
                break
        else:
            tried = " and ".join(type(holder).__name__ for holder in holders)
            wanted = " or ".join(repr(name) for name in (NAMES if path == "auto" else (path,)))
            raise ConfigurationError(
                f"{owner}: target={path!r}, but {tried} has no attribute {wanted}; name the one that the training "
                "loader's batch_size comes from"
            )
        check_number(owner, self.name, self.value, least=1, whole=True)

    def _check_passed(self, path: str) -> None:
        if path != "auto":
            raise ConfigurationError(
                f"{self.owner}: target={path!r}, but a loader was passed to fit, and no attribute decides its size; "
                "use target='auto' for the loader's own"
            )
        self.name = "the loader's batch_size"
        loaders = loaders_in(self._passed)
        for loader in loaders:
            check_loader(loader, self.owner)
        if len({batch_size_of(loader) for loader in loaders}) != 1:
            sizes = [batch_size_of(loader) for loader in loaders]
            raise ConfigurationError(
                f"{self.owner}: the loaders passed to fit have batches of {sizes}, and which of them to change cannot "
                "be known; give them one size, or put it into an attribute of a datamodule"
            )

    @property
    def value(self) -> int:
        """The batch size of now."""
        if self._passed is not None:
            return int(batch_size_of(loaders_in(self._source.instance)[0]) or 1)
        return value_at(self._places[0])

    def set(self, size: int) -> None:
        """Change the batch size wherever it is held; loaders that exist already do not follow."""
        if self._passed is not None:
            unchanged = size == batch_size_of(loaders_in(self._passed)[0])
            self._source.instance = self._passed if unchanged else resize(self._passed, size)
        set_at(self._places, size)

    def loaders(self) -> Any:
        """The training loaders of the batch size of now, in the collection in which they are handed to the trainer.

        Raises:
            ConfigurationError: If they are of a kind that has none, or have another one.
        """
        collection = self._source.dataloader()
        for loader in loaders_in(collection):
            check_loader(loader, self.owner)
            if batch_size_of(loader) != self.value:
                raise ConfigurationError(
                    f"{self.owner}: {self.name} is {self.value}, but the training loader has batches of "
                    f"{batch_size_of(loader)}: it does not follow it; name the attribute that it does follow in target"
                )
        return collection


def places_of(holder: Any, path: str) -> list[tuple[Any, str]]:
    """The places of one holder that hold an attribute: the attribute, and its copy in ``hparams``."""
    *parents, name = path.split(".")
    for parent in parents:
        holder = holder.get(parent) if isinstance(holder, dict) else getattr(holder, parent, None)
        if holder is None:
            return []
    places: list[tuple[Any, str]] = []
    if isinstance(holder, dict):
        return [(holder, name)] if name in holder else []
    if hasattr(holder, name):
        places.append((holder, name))
    hyperparameters = getattr(holder, "hparams", None)
    if isinstance(hyperparameters, dict) and name in hyperparameters:
        places.append((hyperparameters, name))
    return places


def value_at(place: tuple[Any, str]) -> Any:
    """What a place of :func:`places_of` holds."""
    holder, name = place
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def set_at(places: list[tuple[Any, str]], value: Any) -> None:
    """Let places hold another value."""
    for holder, name in places:
        if isinstance(holder, dict):
            holder[name] = value
        else:
            setattr(holder, name, value)
