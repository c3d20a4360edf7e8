"""A loader that knows how far it got, and goes on there with the same batches and the same random draws.

    batch k of an epoch's pass = fetched with torch, Python and NumPy seeded by hash(seed, epoch, round, k, rank)

Its whole state is three integers: the epoch, the round (how often the loader was begun within that epoch, which a
``CombinedLoader`` in cycling mode does) and the number of batches that were *yielded*. What workers fetched beyond it
is forgotten and fetched again, with the same random draws: the seed travels to the worker together with the indices.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
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

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.lightning_data import sampler_inside
from lit_efficient.internals.torch_loaders import PlannedLoader, copied
from lit_efficient.mechanisms.order.keyed_batch_sampler import KeyedBatchSampler
from lit_efficient.mechanisms.order.resumable_sampler import ResumableSampler, mix_seed, seed_all
from lit_efficient.mechanisms.ranks import place_among_ranks

_REPLACEABLE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
# Their order is a pure function of a seed and of the epoch and the round that the loader tells them.
_PURE = (ResumableSampler, KeyedBatchSampler)


class ResumableLoader(PlannedLoader):
    """A ``DataLoader`` that can be resumed after any batch it yielded, with the same batches and the same random draws.

    Workers, collation, pinned memory and all other arguments are the loader's own. Lightning finds ``state_dict`` and
    ``load_state_dict`` and stores the state in checkpoints.

    Args:
        args: As for ``DataLoader``.
        seed: The run's seed.
        kwargs: As for ``DataLoader``. Torch's random samplers, ``shuffle=True`` among them, become resumable ones.

    Raises:
        ConfigurationError: If the dataset is iterable: only the dataset itself could know how far it got.
    """

    _seed = 0
    _rank = 0
    _clock: Callable[[], int] | None = None
    _epoch: int | None = None  # of the pass that runs, or ran last
    _round = 0
    _start = 0  # batches of this pass that an earlier process has yielded
    _yielded = 0
    _pending: dict[str, int] | None = None  # a state that was loaded and waits for the first batch

    def __init__(self, *args: Any, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        takes, remark = examine(self)
        if not takes:
            raise ConfigurationError(f"ResumableLoader cannot resume this loader: {remark}")
        _adopt(self, seed, rank=None)

    def reseed(self, seed: int) -> None:
        """Take another seed, from the next iteration on. A ``KeyedBatchSampler`` keeps its own: it is the data's."""
        self._seed = seed
        if isinstance(sampler := self._innermost_sampler, ResumableSampler):
            sampler.seed = seed

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands: ``epoch``, ``round``, the number of ``batches`` yielded in it, and ``indexed`` where
        the order is computed as it is read.
        """
        if self._pending is not None:
            return dict(self._pending)
        state = {"epoch": self._epoch or 0, "round": self._round, "batches": self._yielded}
        return state | ({"indexed": 1} if getattr(self._innermost_sampler, "computes_order", False) else {})

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on there at the next iteration if that is one of the same epoch; a later epoch is begun from its start."""
        self._pending = {key: int(state_dict[key]) for key in ("epoch", "round", "batches")}
        self._pending |= {"indexed": 1} if state_dict.get("indexed") else {}

    @property
    def step_rows(self) -> int:
        """Items that a batch has in all processes together, where the sampler tells; else 0."""
        sampler: Any = self._innermost_sampler
        size = sampler.batch_size if isinstance(sampler, KeyedBatchSampler) else self._indices_of_batch
        return size * sampler.num_replicas if size else 0

    @property
    def keeps_order(self) -> bool:
        """Whether the order of its items is the same whatever number of them a batch has."""
        return isinstance(self._innermost_sampler, ResumableSampler)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator on purpose: Lightning calls iter() before it has restored its counters, and workers would prefetch
        # at once. Nothing runs here before the first batch is asked for.
        self._begin(self._clock() if self._clock is not None else getattr(self._innermost_sampler, "epoch", 0))
        for batch in super().__iter__():
            # Hooks between here and the training step draw too (augmentation on the device, say).
            seed_all(self._batch_seed(self._yielded, purpose=1))
            self._yielded += 1
            yield batch

    def _begin(self, epoch: int) -> None:
        state, self._pending = self._pending, None
        if state is not None and state["epoch"] == epoch:
            self._round, self._start = state["round"], state["batches"]
        else:
            self._round, self._start = (self._round + 1 if epoch == self._epoch else 0), 0
        self._epoch, self._yielded = epoch, self._start
        if isinstance(sampler := self._innermost_sampler, _PURE):
            sampler.epoch, sampler.round = epoch, self._round
            if state is not None:  # of a run that drew its orders, it may be
                sampler.indexed = "indexed" in state
            sampler.first = self._start * self._indices_of_batch

    def _batch_seed(self, number: int, purpose: int) -> int:
        return mix_seed(self._seed, self._epoch or 0, self._round, number, self._rank, purpose)

    @property
    def _innermost_sampler(self) -> object:
        return getattr(self.batch_sampler, "sampler", self.sampler)

    @property
    def _indices_of_batch(self) -> int:
        """How many items the sampler gives for a batch, if it can leave out those before a batch; 0 if it cannot."""
        if type(self._innermost_sampler) not in _PURE:
            return 0
        batch_sampler = self.batch_sampler
        return 1 if batch_sampler is None else batch_sampler.batch_size if type(batch_sampler) is BatchSampler else 0

    def plan(self, indices: Any) -> Any:
        """Give each batch its seed, and leave out those that an earlier process has yielded."""
        # Weakly: workers that last would be part of a cycle, in which their queues end before they are asked to.
        return _Plan(weakref.proxy(self), indices)


class _Plan:
    """The batches of indices still to fetch, each with its seed."""

    def __init__(self, loader: ResumableLoader, indices: Any) -> None:
        self.loader = loader
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        loader, start = self.loader, self.loader._start
        for number, batch in enumerate(self.indices, start if loader._indices_of_batch else 0):
            if number < start:
                continue
            seed = loader._batch_seed(number, purpose=0)
            if loader.num_workers == 0:
                seed_all(seed)  # the batch is fetched in this process, next
                yield batch
            else:
                yield _Seeded(seed, batch)


class _Seeded:
    """Indices on their way to a worker: arriving there, they seed it and turn into plain indices.

    Workers may outlive an epoch and may start in the middle of one, so nothing that they are given at their start could
    tell them where the run stands.
    """

    def __init__(self, seed: int, indices: Any) -> None:
        self.seed = seed
        self.indices = indices

    def __reduce__(self) -> tuple[Callable[[int, Any], Any], tuple[int, Any]]:
        return _arrive, (self.seed, self.indices)


def _arrive(seed: int, indices: Any) -> Any:
    seed_all(seed)
    return indices


def examine(loader: object) -> tuple[bool, str]:
    """Whether a loader can be made resumable, and what has to be said about it ("" if all of it is covered)."""
    kind = type(loader).__name__
    if isinstance(loader, ResumableLoader) and loader._epoch is None:
        pass  # under construction, or the user's own and not begun: judged by its parts
    elif _is_stateful(loader):
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
    own = [type(sampler).__name__ for sampler in samplers if not _is_known(sampler)]
    if own:
        return True, (
            f"the order of {' in '.join(own)} is not replaced, only fast-forwarded: "
            "exact if it depends on nothing but set_epoch(epoch)"
        )
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        return True, "with in_order=False the workers' speed decides the order of batches"
    return True, ""


def make_resumable(
    loader: DataLoader[Any], seed: int, rank: int | None = None, epoch: Callable[[], int] | None = None
) -> ResumableLoader:
    """A resumable copy of a loader: same class with :class:`ResumableLoader` in front, same arguments and attributes.

    ``rank`` is the process's data-parallel one (``None`` asks the process group); ``epoch`` returns the current one
    (``None``: the sampler's ``epoch``).

    Raises:
        ConfigurationError: If the loader cannot be made resumable.
    """
    takes, remark = examine(loader)
    if not takes:
        raise ConfigurationError(f"this loader cannot be made resumable: {remark or 'it has a state of its own'}")
    resumable: Any = copied(loader)
    resumable.__class__ = _resumable_class(type(loader))  # type: ignore[arg-type]
    _adopt(resumable, seed, rank, epoch)
    return resumable


@functools.cache
def _resumable_class(kind: type[DataLoader[Any]]) -> type[ResumableLoader]:
    if issubclass(kind, ResumableLoader):
        return kind
    return ResumableLoader if kind is DataLoader else type(f"Resumable{kind.__name__}", (ResumableLoader, kind), {})


def _adopt(loader: ResumableLoader, seed: int, rank: int | None, epoch: Callable[[], int] | None = None) -> None:
    loader._seed, loader._clock = seed, epoch
    loader._rank = place_among_ranks()[0] if rank is None else rank
    # DataLoader forbids to set these two after __init__, because it could not re-check them; the kinds stay the same.
    if type(loader.batch_sampler) is BatchSampler:
        batch_sampler = copy.copy(loader.batch_sampler)
        batch_sampler.sampler = _deterministic(batch_sampler.sampler, seed)
        loader.__dict__["batch_sampler"] = batch_sampler
        loader.__dict__["sampler"] = batch_sampler.sampler
    elif loader.batch_sampler is None:
        loader.__dict__["sampler"] = _deterministic(loader.sampler, seed)


def _deterministic(sampler: Any, seed: int) -> Any:
    if type(sampler) in _REPLACEABLE:
        return ResumableSampler(sampler, seed=seed, num_replicas=1, rank=0)
    if isinstance(sampler, DistributedSampler) and not isinstance(sampler, _PURE) and _is_known(sampler):
        inside = sampler_inside(sampler)
        source = sampler.dataset if inside is None else inside
        parts, part = sampler.num_replicas, sampler.rank
        return ResumableSampler(source, sampler.shuffle, seed, parts, part, sampler.drop_last)  # type: ignore[arg-type]
    return sampler


def _is_known(sampler: object) -> bool:
    if type(sampler) in (*_REPLACEABLE, *_PURE, BatchSampler, DistributedSampler):
        return True
    # Lightning (in either of its namespaces) wraps a sampler that is not distributed in a DistributedSamplerWrapper.
    return type(sampler).__name__ == "DistributedSamplerWrapper" and type(sampler_inside(sampler)) in _REPLACEABLE


def _sampler_of(loader: DataLoader[Any]) -> Any:
    batch_sampler = loader.batch_sampler
    return loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", batch_sampler)


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
