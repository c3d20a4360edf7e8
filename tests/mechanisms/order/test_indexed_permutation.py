"""Orders that are computed where they are read: permutations, exact on resume, of any size."""

import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lit_efficient.mechanisms.order import keyed_batch_sampler, resumable_sampler
from lit_efficient.mechanisms.order.indexed_permutation import IndexedPermutation
from lit_efficient.mechanisms.order.keyed_batch_sampler import BucketPlaces, KeyedBatchSampler, keyed_loader
from lit_efficient.mechanisms.order.resumable_loader import make_resumable
from lit_efficient.mechanisms.order.resumable_sampler import ResumableSampler, epoch_order

MANY = 100_000_000


class Numbers(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, key):
        return key if isinstance(key, int) else key[0]


def loader_of(count, kind="shuffled", batch=3):
    if kind in ("keyed", "buckets"):
        of = {"bucket_of": lambda i: i * i % 5} if kind == "buckets" else {}
        made = keyed_loader(Numbers(count), KeyedBatchSampler(range(count), batch, variants=2, **of), torch.tensor)
    else:
        made = DataLoader(Numbers(count), batch, shuffle=kind == "shuffled")
    return make_resumable(made, seed=3, rank=0, epoch=lambda: 2)


@pytest.fixture
def small(monkeypatch):
    for module in (resumable_sampler, keyed_batch_sampler):
        monkeypatch.setattr(module, "INDEXED_FROM", 8)


@pytest.mark.parametrize("count", [*range(1, 35), 255, 256, 257, 1000])
def test_it_is_a_permutation(count):
    orders = [IndexedPermutation(count, seed)[range(count)].tolist() for seed in range(3)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert count < 10 or len(set(map(tuple, orders))) == 3
    order = IndexedPermutation(count, 0)
    assert list(order.walk(range(1, 2 * count, 3))) == [orders[0][place % count] for place in range(1, 2 * count, 3)]


def test_places_and_what_stands_there_are_not_related():
    """As of drawn orders: each place sees each item, and neighbours are no neighbours. Limits are six deviations."""
    orders = np.stack([IndexedPermutation(50, seed)[range(50)] for seed in range(2000)])
    counts = np.stack([np.bincount(orders[:, place], minlength=50) for place in range(50)])
    assert np.abs(counts - 40).max() < 6 * 40**0.5
    long = IndexedPermutation(100_000, 1)[range(100_000)]
    assert abs(np.corrcoef(np.arange(100_000), long)[0, 1]) < 0.02
    assert abs(np.corrcoef(long[1:], long[:-1])[0, 1]) < 0.02


@pytest.mark.parametrize("kind", ["shuffled", "in order", "keyed", "buckets"])
def test_a_resumed_loader_goes_on_exactly(kind, small):
    loader, states, whole = loader_of(20, kind), [], []
    for batch in loader:
        whole.append(batch.tolist())
        states.append(loader.state_dict())
    assert sorted(number for batch in whole for number in batch) == list(range(20))
    for cut, state in enumerate(states):
        resumed = loader_of(20, kind)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert [batch.tolist() for batch in resumed] == whole[cut + 1 :]


@pytest.mark.parametrize("drop_last", [False, True])
def test_parts_of_ranks_are_those_of_the_whole_order(drop_last, small):
    parts = [list(ResumableSampler(range(20), True, 5, 3, rank, drop_last)) for rank in range(3)]
    assert {len(part) for part in parts} == {6 if drop_last else 7}
    order = epoch_order(range(20), True, 5, 0, indexed=True)[range(20)].tolist()
    assert [part[0] for part in parts] == order[:3]
    dealt = [number for row in zip(*parts) for number in row]
    assert dealt == (order[:18] if drop_last else [*order, order[0]])


@pytest.mark.parametrize("kind", ["shuffled", "in order", "keyed"])
def test_a_hundred_million_items_take_no_more_than_a_thousand(kind, monkeypatch):
    computed, compute = [], IndexedPermutation.__getitem__
    monkeypatch.setattr(IndexedPermutation, "__getitem__", lambda o, p: computed.append(len(p)) or compute(o, p))
    tracemalloc.start()
    try:
        for batches in (0, MANY // 64 - 10):
            loader = loader_of(MANY, kind, batch=64)
            loader.load_state_dict({"epoch": 2, "round": 0, "batches": batches, "indexed": 1})
            first = next(iter(loader))
            assert len(first.unique()) == 64
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20  # a list of the order is 3.7 GiB
    finally:
        tracemalloc.stop()
    assert sum(computed) <= 4 * 4096


@pytest.mark.turns(6, family="slow")
def test_buckets_take_a_byte_an_item_and_their_orders_nothing(small):
    """Each batch of one bucket, all items once, incomplete batches one a bucket; from the last batch on as fast."""
    of = np.random.default_rng(0).choice(7, 100_000, p=[0.4, 0.3, 0.2, 0.09, 0.009, 0.0009, 0.0001]) * 3
    shapes = of.tolist()
    tracemalloc.start()
    try:
        keys = KeyedBatchSampler(range(len(of)), 16, shapes.__getitem__)
        batches = list(keys._batches((0, 0, 0), len(keys) - 40))
        assert tracemalloc.get_traced_memory()[0] < 2**18  # of the order alone a list takes 3 MB
    finally:
        tracemalloc.stop()
    whole = list(keys._batches((0, 0, 0), 0))
    assert whole[-40:] == batches
    assert len(whole) == len(keys)
    assert all(len(set(of[batch])) == 1 for batch in whole)
    assert sorted(place for batch in whole for place in batch) == list(range(len(of)))
    assert sum(len(batch) < 16 for batch in whole) == sum(count % 16 > 0 for count in np.bincount(of))
    numbers = np.array([of[batch[0]] for batch in whole])
    assert abs(np.corrcoef(np.arange(len(whole)), numbers)[0, 1]) < 0.06  # no shape has a time of its own


@pytest.mark.parametrize(("count", "kinds"), [(1, 1), (5000, 3), (20_000, 300)])
def test_items_of_a_bucket_are_found_where_they_stand(count, kinds):
    of = np.random.default_rng(1).integers(kinds, size=count)
    places = BucketPlaces(of.tolist(), count)
    assert places.of.itemsize == (1 if kinds < 256 else 2)
    for number, (bucket, held) in enumerate(places.counts.items()):
        wanted = np.flatnonzero(of == bucket)
        assert held == len(wanted)
        asked = np.random.default_rng(2).permutation(held)[:50]
        assert places.find(number, asked).tolist() == wanted[asked].tolist()
