"""Which slices of a row each process gets, and what they see (numbers: tests/strategies/test_sharded_strategy.py)."""

import pytest
import torch
from torch import distributed

from lit_efficient import ConfigurationError
from lit_efficient.distributed.row_slices import ROW_POSITIONS, own_positions, own_slices, share_rows
from lit_efficient.internals.torch_fake_group import pretended
from lit_efficient.models.networks.document_attention import document_starts, visible_blocks


def of_each(batch, processes):
    found = []
    for rank in range(processes):
        with pretended(rank, processes):
            share_rows(distributed.group.WORLD)
            found.append((own_slices(batch), own_positions(12, torch.device("cpu"))))
            share_rows(None)
    return found


def test_slices_of_all_processes_are_the_rows_once():
    ids = torch.arange(1, 23).view(2, 11)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    batch |= {"num_bytes": torch.tensor([5, 6]), "extra": ids[..., None].expand(-1, -1, 3), "name": "a"}
    found = of_each(batch, 3)
    assert [places.tolist() for _, places in found] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    whole = {key: torch.zeros(2, 12, dtype=torch.long) for key in ("input_ids", "shift_labels", "position_ids")}
    for own, places in found:
        assert own.keys() == {*whole, ROW_POSITIONS, "num_bytes", "extra", "name"}
        assert own["extra"].shape == (2, 4, 3)
        for key, row in whole.items():
            row[:, places] = own[key]
    assert torch.equal(whole["input_ids"][:, :11], ids)
    assert whole["shift_labels"].tolist() == [[*range(2, 12), -100, -100], [*range(13, 19), *[-100] * 6]]
    assert whole["position_ids"].tolist() == [[*range(11), 0], [*range(7), *[0] * 5]]
    assert all(torch.equal(own[ROW_POSITIONS], whole["position_ids"]) for own, _ in found)
    assert [own["num_bytes"].tolist() for own, _ in found] == [[5, 6], [0, 0], [0, 0]]
    for other in (ids, {"input_ids": ids}, {"labels": ids}):
        with pytest.raises(ConfigurationError, match=r"needs batches with input_ids and labels \[B, T\], got"):
            of_each(other, 2)


def test_the_blocks_of_slices_for_a_gpu_are_those_of_their_queries():
    """Of 600 tokens, of which pieces of 100 begin within blocks of 128."""
    positions = torch.stack([torch.arange(600), torch.cat((torch.arange(130), torch.arange(470)))])
    starts, index = document_starts(positions), torch.arange(600)
    for pieces in ((0, 5), (1, 4), (2, 3)):
        places = torch.cat([torch.arange(100 * piece, 100 * piece + 100) for piece in pieces])
        blocks = visible_blocks(starts, places)
        sees = (index <= places[:, None]) & (index >= starts[1, places][:, None])
        own = torch.arange(len(places))[:, None]
        assert torch.equal(blocks.mask_mod(torch.tensor(1), torch.tensor(0), own, index[None]), sees)
        needed = torch.nn.functional.pad(sees, (0, 40, 0, 56)).view(2, 128, 5, 128).any(3).any(1)
        assert (blocks.to_dense()[1, 0].bool() >= needed).all()
