"""Loader that can be resumed after any batch, with the same batches and the same random draws.

    batch k of a pass = fetched with torch, Python and NumPy seeded by hash(seed, epoch, round, k, rank)

The whole state is three integers: the epoch, the round (the number of passes begun before within that epoch; a
``CombinedLoader`` in cycling mode begins several) and the number of batches that were *yielded*. Batches that workers
have fetched beyond that number are dropped and fetched again with the same random draws, because the seed of a batch
travels to the worker together with its indices.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lit_efficient.distributed.ranks import place_among_ranks
from lit_efficient.distributed.seeds import mix_seed, seed_all
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.lightning_data import sampler_inside
from lit_efficient.internals.torch_loaders import PlannedLoader, copied
from lit_efficient.mechanisms.order.keyed_batch_sampler import KeyedBatchSampler
from lit_efficient.mechanisms.order.length_sampler import LengthSampler
from lit_efficient.mechanisms.order.mixture_sampler import MixtureSampler
from lit_efficient.mechanisms.order.resumable_sampler import ResumableSampler

_REPLACEABLE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
# The order of these samplers is a pure function of a seed and of the epoch and round that the loader sets.
_PURE = (ResumableSampler, LengthSampler, MixtureSampler, KeyedBatchSampler)
# The two seeds of a batch are unrelated: one for fetching it, one for the hooks and the training step after it.
_FETCH = 0
_STEP = 1


class ResumableLoader(PlannedLoader):
    """``DataLoader`` that can be resumed after any batch it yielded, with the same batches and the same random draws.

    Workers, collation, pinned memory and all other arguments are those of ``DataLoader``. Lightning finds
    ``state_dict`` and ``load_state_dict`` and stores the state in checkpoints.

    Args:
        args: Positional arguments of ``DataLoader``.
        seed: Seed of the run.
        kwargs: Keyword arguments of ``DataLoader``. Random samplers of torch, also the one that ``shuffle=True``
            creates, are replaced by resumable ones.

    Raises:
        ConfigurationError: If the dataset is iterable, because only the dataset could know its own position.
    """

    _seed = 0
    _rank = 0
    _clock: Callable[[], int] | None = None  # returns the present epoch
    _epoch: int | None = None  # epoch of the present or last pass
    _round = 0
    _start = 0  # batches of this pass that an earlier process has yielded
    _yielded = 0
    _pending: dict[str, int] | None = None  # a loaded state that the next pass will use

    def __init__(self, *args: Any, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        resumable, remark = examine(self)
        if not resumable:
            raise ConfigurationError(f"ResumableLoader cannot resume this loader: {remark}")
        _adopt(self, seed, rank=None)

    def reseed(self, seed: int) -> None:
        """Use another seed from the next pass on. A ``KeyedBatchSampler`` keeps its seed, which belongs to the data."""
        self._seed = seed
        sampler = self._innermost_sampler
        if isinstance(sampler, ResumableSampler):
            sampler.seed = seed

    def state_dict(self) -> dict[str, int]:
        """Return the position: ``epoch``, ``round``, and the number of ``batches`` yielded in that pass."""
        if self._pending is not None:
            return dict(self._pending)
        return {"epoch": self._epoch or 0, "round": self._round, "batches": self._yielded}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resume there at the next pass if that has the same epoch. A pass of a later epoch begins at its start."""
        self._pending = {key: int(state_dict[key]) for key in ("epoch", "round", "batches")}

    @property
    def step_rows(self) -> int:
        """Number of items of a batch in all processes together, or 0 if the sampler does not know."""
        sampler: Any = self._innermost_sampler
        if isinstance(sampler, KeyedBatchSampler):
            return sampler.batch_size * sampler.num_replicas
        size = self._indices_of_batch
        return size * sampler.num_replicas if size else 0

    @property
    def rows(self) -> tuple[int, str]:
        """Number of items of a pass, or 0 if the sampler does not know, and hash of the items, or ""."""
        sampler = self._innermost_sampler
        if isinstance(sampler, KeyedBatchSampler):
            return len(sampler.index), sampler.contents
        if isinstance(sampler, ResumableSampler):
            return len(sampler.source), str(getattr(self.dataset, "contents", ""))
        return 0, ""

    @property
    def keeps_order(self) -> bool:
        """Whether the order of the items does not depend on the batch size."""
        return isinstance(self._innermost_sampler, ResumableSampler)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator on purpose: Lightning calls iter() before it has restored its counters, and workers would begin to
        # prefetch. Nothing here runs before the first batch is requested.
        if self._clock is not None:
            epoch = self._clock()
        else:
            epoch = getattr(self._innermost_sampler, "epoch", 0)
        self._begin(epoch)
        for batch in super().__iter__():
            # Hooks between here and the training step also draw, for example augmentation on the device.
            seed_all(self._batch_seed(self._yielded, _STEP))
            self._yielded += 1
            yield batch

    def _begin(self, epoch: int) -> None:
        state = self._pending
        self._pending = None
        if state is not None and state["epoch"] == epoch:
            self._round = state["round"]
            self._start = state["batches"]
        else:
            self._round = self._round + 1 if epoch == self._epoch else 0
            self._start = 0
        self._epoch = epoch
        self._yielded = self._start
        sampler = self._innermost_sampler
        if isinstance(sampler, _PURE):
            sampler.epoch = epoch
            sampler.round = self._round
            sampler.first = self._start * self._indices_of_batch

    def _batch_seed(self, number: int, purpose: int) -> int:
        return mix_seed(self._seed, self._epoch or 0, self._round, number, self._rank, purpose)

    @property
    def _innermost_sampler(self) -> object:
        return getattr(self.batch_sampler, "sampler", self.sampler)

    @property
    def _indices_of_batch(self) -> int:
        """Number of items that the sampler yields per batch, or 0 if the sampler cannot skip items by itself."""
        if type(self._innermost_sampler) not in _PURE:
            return 0
        if self.batch_sampler is None:
            return 1
        if type(self.batch_sampler) is BatchSampler:
            return self.batch_sampler.batch_size
        return 0

    def plan(self, indices: Any) -> "_Plan":
        """Attach its seed to each batch of indices, and skip the batches that an earlier process has yielded."""
        # A weak reference: persistent workers would otherwise be part of a reference cycle, and their queues would be
        # destroyed before the workers are asked to stop.
        return _Plan(weakref.proxy(self), indices)


class _Plan:
    """Iterable over the batches of indices that are still to be fetched, each with its seed."""

    def __init__(self, loader: ResumableLoader, indices: Sequence[object]) -> None:
        self.loader = loader
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        loader = self.loader
        start = loader._start
        sampler_has_skipped = bool(loader._indices_of_batch)
        for number, batch in enumerate(self.indices, start if sampler_has_skipped else 0):
            if number < start:
                continue
            seed = loader._batch_seed(number, _FETCH)
            if loader.num_workers == 0:
                seed_all(seed)  # this process fetches the batch next
                yield batch
            else:
                yield _Seeded(seed, batch)


class _Seeded:
    """Indices for a worker process. Unpickling them there seeds the worker and gives plain indices.

    Workers may outlive an epoch and may start in the middle of one, so a seed given at their start would not suffice.
    """

    def __init__(self, seed: int, indices: object) -> None:
        self.seed = seed
        self.indices = indices

    def __reduce__(self) -> tuple[Callable[[int, Any], Any], tuple[int, Any]]:
        return _arrive, (self.seed, self.indices)


def _arrive(seed: int, indices: object) -> object:
    seed_all(seed)
    return indices


def examine(loader: object) -> tuple[bool, str]:
    """Return whether a loader can be made resumable, and a remark for the user ("" if nothing is left open)."""
    kind = type(loader).__name__
    # A ResumableLoader that has not begun is under construction or the user's own: its parts are examined.
    unused = isinstance(loader, ResumableLoader) and loader._epoch is None
    if not unused and _is_stateful(loader):
        return False, ""
    if not isinstance(loader, DataLoader):
        return False, f"a {kind} without state_dict() starts again when the run is resumed"
    if isinstance(loader.dataset, IterableDataset):
        dataset = type(loader.dataset).__name__
        return (
            False,
            f"the iterable dataset {dataset} starts again when the run is resumed; give the loader a state_dict()",
        )
    if type(loader).__iter__ not in (DataLoader.__iter__, ResumableLoader.__iter__):
        return False, f"{kind} overrides __iter__, so its batches cannot be counted; give it state_dict()"
    samplers = [_sampler_of(loader)]
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        samplers.append(loader.batch_sampler)
    for sampler in samplers:
        if _is_stateful(sampler):
            return False, f"{type(sampler).__name__} has a state of its own: left alone, restore it yourself"
    foreign = [type(sampler).__name__ for sampler in samplers if not _is_known(sampler)]
    if foreign:
        return True, (
            f"the order of {' in '.join(foreign)} is not replaced, only fast-forwarded: "
            "exact if it depends on nothing but set_epoch(epoch)"
        )
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        return True, "with in_order=False the workers' speed decides the order of batches"
    return True, ""


def make_resumable(
    loader: DataLoader[object], seed: int, rank: int | None = None, epoch: Callable[[], int] | None = None
) -> ResumableLoader:
    """Return a resumable copy of a loader, with the same arguments and attributes.

    Args:
        loader: The loader. Its class stays a base class of the copy's class.
        seed: Seed of the run.
        rank: Data-parallel rank of this process. ``None`` asks the process group.
        epoch: Function that returns the present epoch. ``None`` reads the ``epoch`` of the sampler.

    Raises:
        ConfigurationError: If the loader cannot be made resumable.
    """
    possible, remark = examine(loader)
    if not possible:
        raise ConfigurationError(f"this loader cannot be made resumable: {remark or 'it has a state of its own'}")
    resumable: Any = copied(loader)
    resumable.__class__ = _resumable_class(type(loader))  # type: ignore[arg-type]
    _adopt(resumable, seed, rank, epoch)
    return resumable


@functools.cache
def _resumable_class(kind: type[DataLoader[object]]) -> type[ResumableLoader]:
    if issubclass(kind, ResumableLoader):
        return kind
    if kind is DataLoader:
        return ResumableLoader
    return type(f"Resumable{kind.__name__}", (ResumableLoader, kind), {})


def _adopt(loader: ResumableLoader, seed: int, rank: int | None, epoch: Callable[[], int] | None = None) -> None:
    """Set the seed, rank and clock of a loader, and replace its samplers by deterministic ones."""
    loader._seed = seed
    loader._clock = epoch
    loader._rank = place_among_ranks()[0] if rank is None else rank
    # DataLoader forbids setting its samplers after __init__, where it checks them. The new ones are of the same kind,
    # so the checks still hold, and the instance's dictionary is written instead.
    if type(loader.batch_sampler) is BatchSampler:
        batch_sampler = copy.copy(loader.batch_sampler)
        batch_sampler.sampler = _deterministic(batch_sampler.sampler, seed)
        loader.__dict__["batch_sampler"] = batch_sampler
        loader.__dict__["sampler"] = batch_sampler.sampler
    elif loader.batch_sampler is None:
        loader.__dict__["sampler"] = _deterministic(loader.sampler, seed)


def _deterministic(sampler: Any, seed: int) -> Any:
    """Return a resumable sampler in place of one of torch's or Lightning's, or another sampler itself."""
    if type(sampler) in _REPLACEABLE:
        return ResumableSampler(sampler, seed=seed, num_replicas=1, rank=0)
    if isinstance(sampler, DistributedSampler) and not isinstance(sampler, _PURE) and _is_known(sampler):
        source = sampler_inside(sampler)
        if source is None:
            source = sampler.dataset
        return ResumableSampler(
            source,
            sampler.shuffle,
            seed,
            num_replicas=sampler.num_replicas,
            rank=sampler.rank,
            drop_last=sampler.drop_last,
        )
    return sampler


def _is_known(sampler: object) -> bool:
    if type(sampler) in (*_REPLACEABLE, *_PURE, BatchSampler, DistributedSampler):
        return True
    # Lightning (in either of its namespaces) wraps a sampler that is not distributed in a DistributedSamplerWrapper.
    return type(sampler).__name__ == "DistributedSamplerWrapper" and type(sampler_inside(sampler)) in _REPLACEABLE


def _sampler_of(loader: DataLoader[object]) -> object:
    if loader.batch_sampler is None:
        return loader.sampler
    return getattr(loader.batch_sampler, "sampler", loader.batch_sampler)


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
