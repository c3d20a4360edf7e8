"""Fake process group: a single process that acts as one of several. Checked with torch 2.13."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed


@contextmanager
def pretended(rank: int, world_size: int) -> Iterator[None]:
    """Context in which this process is one of several, and collectives return their input.

    The backend ``fake``, and ``torch.testing._internal.distributed.fake_pg.FakeStore``.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()
