"""A process group of one process that believes to be one of many. Checked with torch 2.13."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed


@contextmanager
def pretended(rank: int, world_size: int) -> Iterator[None]:
    """Be one of several processes, whose collectives give back what they are given: the backend ``fake``,
    ``torch.testing._internal.distributed.fake_pg.FakeStore``.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()
