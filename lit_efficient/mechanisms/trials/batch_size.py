"""Attribute or loader that holds a run's batch size, candidate sizes, and the search for the largest that fits.

    effective = size * accumulation is kept:   size in the divisors of effective,  accumulation = effective / size

Only sizes that divide the effective batch keep every optimizer step the same. The search returns only sizes that it
has tried.
"""

import bisect
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.lightning_data import data_source
from lit_efficient.mechanisms.trials.probes import batch_size_of, check_loader, loaders_in, resize

NAMES = ("device_batch", "batch_size")  # attributes that "auto" looks for, in this order


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive integer, smallest first."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def halvings(number: int) -> list[int]:
    """Return a number divided by its smallest prime factors one by one, in ascending order: 1, 3, 6, 12 for 12."""
    chain = [number]
    factor = 2
    while chain[-1] > 1:
        while chain[-1] % factor:
            factor += 1
        chain.append(chain[-1] // factor)
    return chain[::-1]


def candidate_sizes(mode: str, most: int, effective: int | None = None) -> list[int]:
    """Return the batch sizes to choose from, smallest first.

    Args:
        mode: ``power`` for sizes that roughly double, ``binary`` for all sizes.
        most: Largest size.
        effective: Effective batch that all sizes must divide. ``None``: no such condition.

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
    """Return the largest size that was tried and fits, or ``None`` if the smallest does not fit.

    Doubling finds a first size that does not fit, then bisection finds the largest that does. This assumes that a
    larger size never needs less memory.

    Args:
        sizes: Sizes to choose from, smallest first.
        fits: Function that tries a size.

    Example:
        >>> largest_fitting(range(1, 1000), lambda size: size <= 300)
        300
    """
    low = -1  # index of the largest size that fits
    high = 0  # index of the size to try next
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
    """Holder of the batch size: an attribute of the datamodule or module, or the loader that was passed to fit.

    Args:
        trainer: Trainer to which the data is attached.
        path: Dotted path of the attribute, or ``auto``.
        owner: Name of the technique, for errors.

    Raises:
        ConfigurationError: If there is no such attribute, if it is not a whole number, or if the loaders' batch size is
            another one.
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
        names = NAMES if path == "auto" else (path,)
        for name in names:
            self._places = []
            for holder in holders:
                for one in paths_to(holder, name) if path == "auto" else [path]:
                    self._places += places_of(holder, one)
            if self._places:
                self.name = name
                break
        else:
            tried = " and ".join(type(holder).__name__ for holder in holders)
            wanted = " or ".join(map(repr, names))
            raise ConfigurationError(
                f"{owner}: target={path!r}, but {tried} has no attribute {wanted}. Name the attribute from which the "
                "training loader's batch_size comes"
            )
        check_number(owner, self.name, self.value, least=1, whole=True)

    def _check_passed(self, path: str) -> None:
        if path != "auto":
            raise ConfigurationError(
                f"{self.owner}: target={path!r}, but a loader was passed to fit, whose batch size no attribute decides."
                " Use target='auto' to change the loader itself"
            )
        self.name = "the loader's batch_size"
        loaders = loaders_in(self._passed)
        for loader in loaders:
            check_loader(loader, self.owner)
        sizes = [batch_size_of(loader) for loader in loaders]
        if len(set(sizes)) != 1:
            raise ConfigurationError(
                f"{self.owner}: the loaders passed to fit have the batch sizes {sizes}, and the one to change is "
                "unknown. Use one batch size for all, or an attribute of a datamodule"
            )

    @property
    def value(self) -> int:
        """Present batch size."""
        if self._passed is not None:
            return int(batch_size_of(loaders_in(self._source.instance)[0]) or 1)
        return value_at(self._places[0])

    def set(self, size: int) -> None:
        """Change the batch size in all its holders. Loaders that exist already do not change."""
        if self._passed is not None:
            unchanged = size == batch_size_of(loaders_in(self._passed)[0])
            if unchanged:
                self._source.instance = self._passed
            else:
                self._source.instance = resize(self._passed, size)
        set_at(self._places, size)

    def loaders(self) -> Any:
        """Return new training loaders of the present batch size, in the collection that the trainer gets.

        Raises:
            ConfigurationError: If a loader has no batch size, or another one.
        """
        collection = self._source.dataloader()
        for loader in loaders_in(collection):
            check_loader(loader, self.owner)
            if batch_size_of(loader) != self.value:
                raise ConfigurationError(
                    f"{self.owner}: {self.name} is {self.value}, but the training loader has the batch size "
                    f"{batch_size_of(loader)}. Set target to the attribute from which the loader takes its batch size"
                )
        return collection


def paths_to(holder: object, name: str) -> list[str]:
    """Return the dotted paths at which a module or DataModule may have an attribute such as its batch size.

    A DataModule that was given another one, as ``LatentData(images=ImageData(...))``, has the batch size of that one.
    """
    paths = [name]
    for argument in inspect.signature(type(holder)).parameters:
        if isinstance(stored_argument(holder, argument), LightningDataModule):
            paths.append(f"{argument}.{name}")
    return paths


def stored_argument(holder: object, name: str) -> Any:
    """Return the attribute that has the name of an argument, or ``None`` without one.

    A property of that name may raise an error before `setup`, such as the tokenizer of a DataModule. It is no setting.
    """
    try:
        return getattr(holder, name, None)
    except Exception:  # properties raise different errors
        return None


def places_of(holder: Any, path: str) -> list[tuple[Any, str]]:
    """Return the places of a holder where an attribute is stored: the attribute itself, and its copy in ``hparams``.

    Args:
        holder: A module, a datamodule or a dictionary.
        path: Dotted path of the attribute.

    Returns:
        Pairs of the object or dictionary that holds the value, and the name or key in it.
    """
    *parents, name = path.split(".")
    for parent in parents:
        if isinstance(holder, dict):
            holder = holder.get(parent)
        else:
            holder = getattr(holder, parent, None)
        if holder is None:
            return []
    places: list[tuple[object, str]] = []
    if isinstance(holder, dict):
        return [(holder, name)] if name in holder else []
    if hasattr(holder, name):
        places.append((holder, name))
    hyperparameters = getattr(holder, "hparams", None)
    if isinstance(hyperparameters, dict) and name in hyperparameters:
        places.append((hyperparameters, name))
    return places


def value_at(place: tuple[object, str]) -> Any:
    """Return the value that is stored in a place of :func:`places_of`."""
    holder, name = place
    if isinstance(holder, dict):
        return holder[name]
    return getattr(holder, name)


def set_at(places: list[tuple[object, str]], value: object) -> None:
    """Store a value in all places."""
    for holder, name in places:
        if isinstance(holder, dict):
            holder[name] = value
        else:
            setattr(holder, name, value)
