import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient.internals import torch_loaders
from tests.internals.leaning import leans_on

ROWS = TensorDataset(torch.arange(6))


class Backwards(torch_loaders.PlannedLoader):
    def plan(self, indices):
        return reversed([*indices])


class AtOnce(TensorDataset):
    def __getitems__(self, indices):
        return [(self.tensors[0][index] * 10,) for index in indices]


@leans_on("torch", "DataLoader._iterator", "torch_loaders")
def test_workers_that_run_stay_with_the_original():
    loader = DataLoader(ROWS, 2, num_workers=1, persistent_workers=True)
    workers = iter(loader)
    assert iter(loader) is workers  # kept from one pass to the next
    other = torch_loaders.copied(loader)
    assert other.batch_sampler is loader.batch_sampler
    assert iter(other) is not workers
    assert iter(loader) is workers


@leans_on("torch", "torch.utils.data._utils.fetch._MapDatasetFetcher", "torch_loaders")
def test_a_batch_is_read_as_a_loader_reads_it():
    assert torch_loaders.fetcher(DataLoader(ROWS)).fetch([4, 1])[0].tolist() == [4, 1]
    assert torch_loaders.fetcher(DataLoader(AtOnce(torch.arange(6)))).fetch([4, 1])[0].tolist() == [40, 10]
    assert torch_loaders.fetcher(DataLoader(ROWS, collate_fn=len)).fetch([4, 1, 2]) == 3


class Unreadable:
    """A batch that breaks off in the process that takes it, as one does whose worker is killed meanwhile."""

    def __init__(self, rows):
        pass

    def __reduce__(self):
        return broken, ()


def broken():
    raise ConnectionResetError(104, "Connection reset by peer")


@leans_on("torch", "_MultiProcessingDataLoaderIter._try_get_data", "torch_loaders")
def test_a_batch_that_breaks_off_is_known_from_other_errors():
    with pytest.raises(ConnectionResetError) as caught:
        next(iter(DataLoader(ROWS, num_workers=1, collate_fn=Unreadable)))
    assert torch_loaders.broke_off(caught.value)
    with pytest.raises(ConnectionResetError) as caught:
        broken()
    assert not torch_loaders.broke_off(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
@leans_on("torch", "DataLoader._index_sampler", "torch_loaders")
def test_a_loader_fetches_what_its_plan_says(workers):
    batches = Backwards(ROWS, 2, num_workers=workers)
    assert [batch[0].tolist() for batch in batches] == [[4, 5], [2, 3], [0, 1]]
    rows = Backwards(ROWS, batch_size=None, num_workers=workers)
    assert [int(row[0]) for row in rows] == [5, 4, 3, 2, 1, 0]
