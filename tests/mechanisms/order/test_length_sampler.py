"""Batches of rows with similar lengths: as little padding as in transformers, and the same batches on two ranks."""

import numpy as np
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from lit_efficient.mechanisms.order.length_sampler import LengthSampler

LENGTHS = np.random.default_rng(0).geometric(0.01, 2005)


def padded(order: list[int], size: int) -> int:
    """Tokens of all batches with their padding."""
    rows = LENGTHS[order[: len(order) // size * size]].reshape(-1, size)
    return int(rows.max(1).sum()) * size


def test_padding_is_that_of_transformers_and_each_row_comes_once_in_another_order() -> None:
    sampler = LengthSampler(LENGTHS, 8, num_replicas=1, rank=0)
    order = list(sampler)
    assert len(order) == len(sampler) == len({*order}) == 2000
    theirs = get_length_grouped_indices(LENGTHS.tolist(), 8, generator=torch.Generator().manual_seed(0))
    assert abs(padded(order, 8) / padded(theirs, 8) - 1) < 0.05
    assert padded(order, 8) < 0.5 * padded(np.random.default_rng(1).permutation(2005).tolist(), 8)
    means = LENGTHS[order].reshape(-1, 8).mean(1)
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.5  # batches are not sorted by length
    assert order == list(sampler)
    sampler.set_epoch(1)
    assert order != list(sampler)


def test_two_ranks_see_the_batches_of_one_with_twice_the_size() -> None:
    one = list(LengthSampler(LENGTHS, 8, 3, num_replicas=1, rank=0))
    parts = [list(LengthSampler(LENGTHS, 4, 3, num_replicas=2, rank=rank)) for rank in (0, 1)]
    both = np.stack([np.reshape(part, (-1, 4)) for part in parts], 2).reshape(-1, 8)
    assert both.tolist() == np.reshape(one, (-1, 8)).tolist()
