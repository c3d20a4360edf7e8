import numpy as np
import pytest

from lit_efficient.data.text.packing import pack_lengths
from lit_efficient.errors import ConfigurationError


def realistic(count: int, capacity: int, seed: int = 0) -> np.ndarray:
    """Return lengths like those of instruction data: log-normal, median 300 tokens, cut at the capacity."""
    drawn = np.random.default_rng(seed).lognormal(np.log(300), 0.9, count)
    return np.clip(drawn, 4, capacity).astype(np.int64)


def one_by_one(lengths: np.ndarray, capacity: int) -> list[int]:
    """Return the room left in each bin by the textbook algorithm, item by item."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@pytest.mark.parametrize("capacity", [1, 7, 30, 200])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_textbook_algorithm(capacity: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, rng.integers(1, capacity + 1) + 1, rng.integers(1, 150))
    bins = pack_lengths(lengths, capacity)
    assert sorted(capacity - int(lengths[items].sum()) for items in bins) == one_by_one(lengths, capacity)
    assert sorted(item for items in bins for item in items.tolist()) == list(range(len(lengths)))


def test_a_realistic_mix_fills_99_percent_and_loses_nothing() -> None:
    lengths = realistic(20_000, 2048)
    bins = pack_lengths(lengths, 2048)
    used = np.array([lengths[items].sum() for items in bins])
    assert used.max() <= 2048
    assert np.array_equal(np.sort(np.concatenate(list(bins))), np.arange(20_000))
    assert lengths.sum() / (len(bins) * 2048) >= 0.99
    again = pack_lengths(lengths, 2048)
    assert np.array_equal(bins.items, again.items)
    assert np.array_equal(bins.starts, again.starts)


def test_no_documents_no_bins() -> None:
    assert len(pack_lengths([], 8)) == 0


@pytest.mark.parametrize("lengths", [[3, 9], [0, 3]])
def test_what_cannot_be_packed_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ConfigurationError, match=r"lengths must be in \[1, capacity = 8\], got (9|0)"):
        pack_lengths(lengths, 8)


def test_a_bin_that_is_not_there() -> None:
    with pytest.raises(IndexError, match="bin 1 of 1"):
        pack_lengths([3], 8)[1]
