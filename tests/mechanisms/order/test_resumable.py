import copy
import gc
import weakref

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lit_efficient.distributed import seeds as seeds_module
from lit_efficient.distributed.seeds import mix_seed, seed_all
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.order.resumable_loader import ResumableLoader, examine, make_resumable
from lit_efficient.mechanisms.order.resumable_sampler import ResumableSampler, epoch_order, permutes, shard
from tests.callbacks.resume_kit import Augmented

DATA = Augmented(11)


class EveryThird(Sampler):
    def __iter__(self):
        return iter([0, 3, 6, 9])

    def __len__(self):
        return 4


class Pairs(BatchSampler):
    pass


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(6.0))


KINDS = {
    "shuffled": {"shuffle": True, "batch_size": 2},
    "in order": {"batch_size": 2, "drop_last": True},
    "with replacement": {"sampler": RandomSampler(DATA, replacement=True, num_samples=9), "batch_size": 2},
    "weighted": {"sampler": WeightedRandomSampler(torch.arange(1.0, 12), 8), "batch_size": 3},
    "subset": {"sampler": SubsetRandomSampler([1, 3, 5, 7, 9]), "batch_size": 2},
    "one by one": {"shuffle": True, "batch_size": None},
    "own sampler": {"sampler": EveryThird(), "batch_size": 1},
    "own batch sampler": {"batch_sampler": Pairs(SequentialSampler(DATA), 3, False)},
    "distributed": {"sampler": DistributedSampler(DATA, 2, 1), "batch_size": 2},
    "workers": {"shuffle": True, "batch_size": 3, "num_workers": 2},
    "lasting workers": {"shuffle": True, "batch_size": 3, "num_workers": 1, "persistent_workers": True},
}


def make(kind, epoch=0, **arguments):
    return make_resumable(DataLoader(DATA, **KINDS[kind], **arguments), seed=3, rank=0, epoch=lambda: epoch)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_after_any_batch_the_rest_is_the_same(kind):
    loader, states, whole = make(kind, epoch=4), [], []
    for batch in loader:
        whole.append(batch)
        states.append(loader.state_dict())
    assert len(whole) == len(loader)
    cuts = range(len(states)) if "workers" not in kind else (0, 2)
    for cut in cuts:
        torch.manual_seed(cut)  # whatever the new process has drawn so far
        resumed = make(kind, epoch=4)
        resumed.load_state_dict(states[cut])
        assert resumed.state_dict() == states[cut]
        rest = list(resumed)
        assert len(rest) == len(whole) - cut - 1
        assert all(map(torch.equal, rest, whole[cut + 1 :]))


def test_draws_after_the_batch_are_reproducible_too():
    def draws(loader):
        return [torch.rand(()).item() for _ in loader]

    assert draws(make("shuffled")) == draws(make("shuffled"))
    assert draws(make("shuffled")) != draws(make("shuffled", epoch=1))


def test_workers_draw_what_the_main_process_would():
    alone = list(make("shuffled"))
    helped = list(make("shuffled", num_workers=2))
    assert all(map(torch.equal, alone, helped))


def test_workers_that_last_end_with_the_loader():
    """In a cycle they would wait, five seconds each, for what nobody sends."""
    loader = make("shuffled", num_workers=1, persistent_workers=True)
    alive, batches = weakref.ref(loader), iter(loader)
    next(batches)
    gc.disable()
    try:
        del loader, batches
        assert alive() is None
    finally:
        gc.enable()


def test_a_state_of_an_earlier_epoch_is_not_used():
    loader = make("shuffled", epoch=1)
    loader.load_state_dict({"epoch": 0, "round": 0, "batches": 6})
    assert len(list(loader)) == len(loader)


def test_each_round_within_an_epoch_has_an_order_and_can_be_resumed():
    short = DataLoader(TensorDataset(torch.arange(4)), shuffle=True)

    def combined():
        pair = {"long": make("in order"), "short": make_resumable(short, 1, 0, lambda: 0)}
        return CombinedLoader(pair, "max_size_cycle"), pair

    loader, _ = combined()
    seen, states = [], []
    for batch, _, _ in loader:
        seen.append(batch["short"][0].item())
        states.append(loader._state_dicts())
    assert sorted(seen[:4]) == [0, 1, 2, 3]
    assert seen[:1] != seen[4:]  # 5 batches: the second round has begun
    resumed, pair = combined()
    resumed._load_state_dicts(states[3])
    assert [batch["short"][0].item() for batch, _, _ in resumed] == seen[4:]
    assert pair["short"].state_dict()["round"] == 1


def test_which_samplers_show_each_index_once():
    assert permutes(RandomSampler(DATA), False)
    assert not permutes(RandomSampler(DATA, replacement=True), True)  # as many, some of them twice
    assert not permutes(RandomSampler(DATA, num_samples=len(DATA) - 1), True)
    assert permutes(DATA, True)
    assert not permutes(DATA, False)


def test_orders_are_pure_functions_and_differ():
    orders = {tuple(epoch_order(range(50), True, *key)) for key in [(0, 0), (0, 1), (1, 0), (0, 0, 1), (0, 0)]}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert mix_seed(1, 2) != mix_seed(12) != mix_seed(2, 1)
    assert mix_seed(7) == mix_seed(7) < 2**63


@pytest.mark.parametrize("drop_last", [False, True])
def test_parts_are_equally_long_and_cover_the_whole(drop_last):
    parts = [shard(range(11), rank, 3, drop_last) for rank in range(3)]
    assert {len(part) for part in parts} == {3 if drop_last else 4}
    assert set().union(*parts) == set(range(9 if drop_last else 11))
    samplers = [ResumableSampler(DATA, True, 5, 3, rank, drop_last) for rank in range(3)]
    assert [len(list(sampler)) for sampler in samplers] == [len(sampler) for sampler in samplers]
    assert shard([], 0, 2, False) == []


def test_a_loader_of_the_users_own_class_keeps_class_attributes_and_stays_unchanged():
    class Mine(DataLoader):
        def __init__(self, dataset, extra):
            super().__init__(dataset, batch_size=4, shuffle=True, collate_fn=len)
            self.extra = extra

    mine = Mine(DATA, "kept")
    sampler = mine.sampler
    resumable = make_resumable(mine, 0)
    assert isinstance(resumable, Mine)
    assert isinstance(resumable, ResumableLoader)
    assert (resumable.extra, resumable.batch_size, resumable.collate_fn) == ("kept", 4, len)
    assert list(resumable) == [4, 4, 3]
    assert type(mine) is Mine
    assert mine.sampler is sampler
    assert mine.batch_sampler.sampler is sampler


def test_the_class_can_be_used_directly():
    loaders = [ResumableLoader(DATA, batch_size=4, shuffle=True, seed=seed) for seed in (1, 1, 2)]
    first, second, third = (torch.cat(list(loader)) for loader in loaders)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    loaders[0].sampler.set_epoch(1)
    assert not torch.equal(torch.cat(list(loaders[0])), first)


class Counting(DataLoader):
    def __iter__(self):
        return iter(())


class Remembering(EveryThird):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("loader", "takes", "remark"),
    [
        (DataLoader(DATA, shuffle=True), True, ""),
        (DataLoader(Stream()), False, "iterable dataset Stream starts again"),
        ([1, 2], False, "a list without state_dict()"),
        (Counting(DATA), False, "Counting overrides __iter__"),
        (DataLoader(DATA, sampler=Remembering()), False, "Remembering has a state of its own"),
        (DataLoader(DATA, sampler=EveryThird()), True, "the order of EveryThird is not replaced"),
        (DataLoader(DATA, batch_sampler=Pairs(EveryThird(), 2, False)), True, "EveryThird in Pairs is not replaced"),
        (DataLoader(DATA, num_workers=1, in_order=False), True, "in_order=False"),
    ],
)
def test_what_is_covered_and_what_is_said(loader, takes, remark):
    assert examine(loader)[0] is takes
    assert remark in examine(loader)[1]
    assert bool(remark) is bool(examine(loader)[1])
    if not takes:
        with pytest.raises(ConfigurationError, match="cannot be made resumable"):
            make_resumable(loader, 0)


def test_loaders_with_a_state_are_left_alone():
    begun = make("shuffled")
    next(iter(begun))
    assert examine(begun) == (False, "")
    with pytest.raises(ConfigurationError, match="iterable dataset"):
        ResumableLoader(Stream())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"rank": 2, "num_replicas": 2}, "rank must be a whole number of at least 0 and below 2, got 2"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ResumableSampler(DATA, **arguments)


def test_seeding_covers_the_three_generators():
    import random

    import numpy as np

    def draw():
        return torch.rand(()).item(), random.random(), np.random.rand()

    seed_all(2**63 - 1)
    first = draw()
    seed_all(2**63 - 1)
    assert draw() == first
    assert copy.copy(first) != draw()


def test_seeds_and_orders_are_those_of_earlier_releases():
    """Or a checkpoint of theirs would go on with another order."""
    assert (mix_seed(0, 1, 2), mix_seed(7)) == (5458876493991123480, 843011692241435484)
    assert epoch_order(range(6), shuffle=True, seed=3, epoch=1) == [1, 0, 5, 4, 2, 3]


@pytest.mark.parametrize("there", [False, True])
def test_apples_generator_is_seeded_where_there_is_one(there, monkeypatch):
    seeds = []
    monkeypatch.setattr(seeds_module, "_MPS", there)
    monkeypatch.setattr(torch.mps, "manual_seed", seeds.append)
    seed_all(5)
    assert seeds == [5] * there
