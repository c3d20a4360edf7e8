from torch import distributed

from lit_efficient.internals.torch_fake_group import pretended
from tests.internals.leaning import leans_on


@leans_on("torch", "testing._internal.distributed.fake_pg.FakeStore", "torch_fake_group")
def test_one_process_can_be_any_of_many():
    for rank in (0, 3):
        with pretended(rank, 8):
            assert (distributed.get_rank(), distributed.get_world_size()) == (rank, 8)
    assert not distributed.is_initialized()
