"""Keys in batches of one shape: the same for any process that asks, wherever it begins, and on any number of ranks."""

from collections import Counter

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.data import DataLoader

from lit_efficient import AspectBuckets, DigitImages, ExactResume, ImageData, ImageView
from lit_efficient.data.images.image_source import ImageSource, collate_images
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.order.keyed_batch_sampler import KeyedBatchSampler, fill_batches, keyed_loader, variant_of
from lit_efficient.mechanisms.order.resumable_loader import examine, make_resumable
from tests.callbacks.resume_kit import Tiny, count_exact, fit
from tests.data.images.image_kit import write
from tests.processes import run_ranks
from tests.ranks.toys import everyones
from tests.support import trainer

SHAPES = [(4, 4), (2, 8), (8, 2)]
INDEX = [*range(3, 40), 50]


def bucket_of(index):
    return SHAPES[0 if index % 7 else 1 + index % 2]


class Shaped:
    """Items of three shapes that tell their key."""

    def __len__(self):
        return 60

    def __getitem__(self, key):
        index, variant = key
        return {"images": torch.full((1, *bucket_of(index)), index + variant / 8), "index": index, "variant": variant}


def sampler(**arguments):
    return KeyedBatchSampler(**{"index": INDEX, "batch_size": 4, "bucket_of": bucket_of, "variants": 3} | arguments)


def loader(workers=0, **arguments):
    return keyed_loader(Shaped(), sampler(**arguments), collate_images, num_workers=workers)


def epoch(of, number):
    of.set_epoch(number)
    return list(of)


def test_every_image_once_an_epoch_in_batches_of_one_shape():
    keys = sampler()
    batches = epoch(keys, 5)
    assert sorted(index for batch in batches for index, _ in batch) == INDEX
    assert all(len({bucket_of(index) for index, _ in batch}) == 1 for batch in batches)
    counts = Counter(map(bucket_of, INDEX))
    assert len(batches) == len(keys) == sum(-(-count // 4) for count in counts.values())
    assert sum(len(batch) < 4 for batch in batches) == sum(count % 4 > 0 for count in counts.values())


def test_an_epoch_is_a_pure_function_of_seed_and_epoch():
    keys = sampler(seed=2)
    first = epoch(keys, 0)
    assert epoch(keys, 1) != first
    assert epoch(keys, 0) == first
    assert epoch(sampler(seed=3), 0) != first
    pass_of_epoch_0 = iter(keys)
    begun = [next(pass_of_epoch_0)]
    keys.set_epoch(9)
    assert begun + list(pass_of_epoch_0) == first  # after set_epoch, a pass goes on with its own


def test_variants_are_of_the_epoch_and_the_image_and_equally_frequent():
    for batch in epoch(sampler(seed=4), 6):
        assert all(variant == variant_of(4, 6, index, 3) for index, variant in batch)
    drawn = Counter(variant_of(0, e, i, 4) for e in range(40) for i in range(100))
    assert all(abs(drawn[variant] - 1000) < 120 for variant in range(4))  # 4 standard deviations
    assert {variant_of(0, e, 7, 1) for e in range(9)} == {0}


def test_without_shuffling_images_stay_in_order_and_incomplete_batches_come_last():
    assert list(fill_batches(range(7), "aabbaab", 2, drop_last=False)) == [[0, 1], [2, 3], [4, 5], [6]]
    assert list(fill_batches(range(7), "abbaaba", 3, drop_last=False)) == [[0, 3, 4], [1, 2, 5], [6]]
    assert list(fill_batches(range(7), "abbaaba", 3, drop_last=True)) == [[0, 3, 4], [1, 2, 5]]
    plain = sampler(shuffle=False, bucket_of=None, variants=1)
    assert [index for batch in plain for index, _ in batch] == INDEX
    assert epoch(plain, 3) == epoch(plain, 0)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_together_are_one_process_with_a_larger_batch(ranks, drop_last):
    few = {"bucket_of": None} if drop_last else {}
    whole = epoch(sampler(batch_size=2 * ranks, drop_last=drop_last, **few), 1)
    parts = [sampler(batch_size=2, drop_last=drop_last, num_replicas=ranks, rank=rank, **few) for rank in range(ranks)]
    steps = list(zip(*(epoch(part, 1) for part in parts), strict=True))
    assert len(steps) == len(whole) == len(parts[0])
    for step, batch in zip(steps, whole):
        assert len({len(part) for part in step}) == 1
        # Those that fill up are of the same batch, and so of its bucket.
        assert {key for part in step for key in part} == set(batch)


def test_a_known_sampler_raises_no_doubt_and_follows_the_epoch():
    keyed = loader()
    assert examine(keyed) == (True, "")
    number = 0
    resumable = make_resumable(keyed, seed=1, rank=0, epoch=lambda: number)
    first, again = ([batch["index"].tolist() for batch in resumable] for _ in range(2))
    assert first != again  # a second round within the epoch
    assert sorted(index for batch in again for index in batch) == INDEX
    number = 1
    second = [batch["index"].tolist() for batch in resumable]
    assert second == [[index for index, _ in batch] for batch in epoch(sampler(), 1)]
    resumable.reseed(7)
    assert resumable.sampler.seed == 0  # the order is the data's, whatever the run's seed


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_after_any_batch(workers):
    def make():
        return make_resumable(loader(workers), seed=1, rank=0, epoch=lambda: 2)

    whole, states = [], []
    interrupted = make()
    for batch in interrupted:
        whole.append(batch)
        states.append(interrupted.state_dict())
    for cut in range(len(whole)) if workers == 0 else (0, 5):
        resumed = make()
        resumed.load_state_dict(states[cut])
        rest = list(resumed)
        assert len(rest) == len(whole) - cut - 1
        for ours, theirs in zip(rest, whole[cut + 1 :]):
            assert all(torch.equal(ours[name], theirs[name]) for name in ("images", "index", "variant"))


class Learner(Tiny):
    """Learns from batches of three shapes, which it takes from a keyed loader."""

    def __init__(self, workers=0):
        super().__init__()
        self.workers = workers
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch["images"].flatten(1) / 50 + torch.randn(16)

    def train_dataloader(self):
        return loader(self.workers)

    def val_dataloader(self):
        return loader(shuffle=False)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.net(batch).pow(2).mean())


@pytest.mark.turns(4, family="resumed")
def test_an_interrupted_run_is_resumed_exactly_from_every_batch(tmp_path):
    number, wrong = count_exact(tmp_path, Learner, max_epochs=2, limit_train_batches=7)  # a warning would be an error
    assert number == 14
    assert not wrong


def test_lightning_tells_the_epoch_without_exact_resume_too():
    module, seen = Learner(), []
    module.on_after_batch_transfer = lambda batch, _: seen.append(batch["index"].tolist()) or batch["images"].flatten(1)
    fit(module, [], max_epochs=2, limit_val_batches=0)
    assert seen == [[index for index, _ in batch] for number in (0, 1) for batch in epoch(sampler(), number)]


@pytest.mark.turns(6, family="ranks")
def test_two_processes_under_lightning(tmp_path):
    write(tmp_path / "images", [f"{number}.png" for number in range(20)])
    run_ranks(_train_in_two_processes, tmp_path)


class Seer(L.LightningModule):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen, self.shapes = nn.Parameter(torch.ones(())), [], []

    def training_step(self, batch, batch_idx):
        self.seen.append(list(zip(batch["index"].tolist(), batch["variant"].tolist())))
        self.shapes.append(batch["images"].shape)
        return self.weight * batch["images"].mean()

    def predict_step(self, batch, batch_idx):
        return batch["index"].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return loader(batch_size=2)

    def predict_dataloader(self):
        return loader(batch_size=2, shuffle=False)


class Sharing(Seer):
    """Two processes that train on the same rows."""

    def configure_model(self):
        if not isinstance(self.weight, DTensor):
            mesh = self.device_mesh["tensor_parallel"]
            self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh, [Replicate()]))

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        return self.weight.to_local() * batch["images"].mean()


def _together(batches):
    """What both ranks see in each step."""
    return [set(a) | set(b) for a, b in zip(*everyones(batches))]


def _train_in_two_processes():
    for callbacks in ([], [ExactResume(seed=3)]):
        module, given = Seer(), Seer()
        run = trainer(callbacks, devices=2, strategy="ddp", max_epochs=2)
        run.fit(module)
        rank = run.global_rank
        mine = [batch for number in (0, 1) for batch in epoch(sampler(batch_size=2, num_replicas=2, rank=rank), number)]
        assert module.seen == mine
        whole = [set(batch) for number in (0, 1) for batch in epoch(sampler(num_replicas=1, rank=0), number)]
        assert _together(module.seen) == whole
        trainer(callbacks, devices=2, strategy="ddp", max_epochs=2).fit(given, module.train_dataloader())
        assert given.seen == mine  # a loader from outside of Lightning's hooks
    predicted = trainer(devices=2, strategy="ddp").predict(module)
    assert predicted == [[i for i, _ in batch] for batch in sampler(batch_size=2, shuffle=False)]

    view = ImageView(32, buckets=AspectBuckets(8), crop="random", variants=4)
    data, module = ImageData("images", view=view, batch_size=2), Seer()
    trainer([ExactResume(seed=3)], devices=2, strategy="ddp", max_epochs=2).fit(module, datamodule=data)
    one = KeyedBatchSampler(data.train_index, 4, data.bucket_of, 4, num_replicas=1, rank=0)
    assert _together(module.seen) == [set(batch) for number in (0, 1) for batch in epoch(one, number)]
    first, second = everyones(module.shapes)
    assert first == second
    assert len(set(first)) > 2

    module, strategy = Sharing(), ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    trainer(devices=2, strategy=strategy, max_epochs=1).fit(module, datamodule=data)
    first, second = everyones(module.seen)
    one = KeyedBatchSampler(data.train_index, 2, data.bucket_of, 4, num_replicas=1, rank=0)
    assert first == second == epoch(one, 0)


def test_as_a_batch_sampler_it_works_on_one_process_and_is_refused_by_lightnings_rebuilding():
    as_batches = DataLoader(Shaped(), batch_sampler=sampler(), collate_fn=collate_images)
    assert [batch["index"].tolist() for batch in as_batches] == [[i for i, _ in batch] for batch in sampler()]
    with pytest.raises(ConfigurationError, match=r"index must be .*keyed_loader\(\)\), got 'SequentialSampler'"):
        KeyedBatchSampler(as_batches.sampler, batch_size=4, drop_last=False)


def test_overfit_batches_is_refused_in_words():
    with (
        pytest.warns(match="turning off the .* dataloader shuffling"),
        pytest.raises(ConfigurationError, match=r"got 0\..*limit_train_batches"),
    ):
        fit(Learner(), [], max_epochs=1, overfit_batches=2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"variants": 0}, "variants must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"num_replicas": 2, "rank": 2}, "rank must be a whole number of at least 0 and below 2, got 2"),
        ({"index": []}, "at least one image"),
        ({"drop_last": True}, r"drop_last would leave out .* \(\(2, 8\): 2, \(8, 2\): 3\)"),
    ],
)
def test_bad_arguments(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        sampler(**wrong)


def test_digits_are_an_image_source():
    data = DigitImages(16)
    assert isinstance(data, ImageSource)
    data.setup("fit")
    item = data.dataset[(5, 0)]
    assert item["images"].shape == (1, *data.bucket_of(5))
    assert (item["index"], item["variant"], item["labels"]) == (5, 0, data.dataset[5]["labels"])
    assert torch.equal(item["images"], data.dataset[5]["images"])
    with pytest.raises(ConfigurationError, match="variant must be 0"):
        data.dataset[(5, 1)]
    other = DigitImages(20, seed=1)
    other.setup("fit")
    changed = {name for name, value in data.identity().items() if other.identity()[name] != value}
    assert changed == {"data", "split", "resolution"}
    keys = KeyedBatchSampler(data.train_index, 64, data.bucket_of, data.variants)
    batch = next(iter(keyed_loader(data.dataset, keys, collate_images)))
    assert torch.equal(batch["images"], data.dataset.tensors["images"][batch["index"]])
    assert batch["labels"].dtype == torch.int64


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_largest_batch_shows_images_of_every_bucket(ranks):
    counts = Counter(map(bucket_of, INDEX)).values()
    for drop_last, most in ((True, min(counts) // ranks), (False, -(-max(counts) // ranks))):
        arguments = {"drop_last": drop_last, "num_replicas": ranks, "rank": 0}
        found = sampler(batch_size=1, **arguments).largest_batch()
        assert found == most
        assert max(map(len, sampler(batch_size=found, **arguments))) == most
    with pytest.raises(ConfigurationError, match="drop_last would leave out all images"):
        sampler(batch_size=min(counts) // ranks + 1, drop_last=True, num_replicas=ranks, rank=0)


def test_each_variant_has_its_turn():
    for variants in (1, 2, 3):
        assert {variant_of(0, epoch, 5, variants) for epoch in range(30)} == {*range(variants)}


def test_keys_of_one_batch_are_of_the_first_ones_bucket():
    keys = [(4, 1), (7, 0), (5, 2), (14, 1), (6, 0)]  # 7 and 14 lie on the other shapes
    assert sampler().alike(keys) == [(4, 1), (5, 2), (6, 0)]
    assert sampler().alike(keys[1:]) == [(7, 0)]


def test_many_images_of_one_shape_are_ordered_where_they_are_read():
    many = range(2**20 + 1)
    alike = KeyedBatchSampler(many, 512, bucket_of=lambda _: SHAPES[0])
    assert alike.computes_order
    assert next(iter(alike)) == next(iter(KeyedBatchSampler(many, 512)))


def test_of_many_images_each_is_in_one_batch_of_its_shape():
    size = 2**17
    many = KeyedBatchSampler(range(2**20 + 3), size, bucket_of=lambda image: SHAPES[image % 3 == 0])
    assert many.computes_order
    images = [np.array([key[0] for key in batch]) for batch in many]
    assert np.array_equal(np.sort(np.concatenate(images)), np.arange(2**20 + 3))
    assert all(len({*(batch % 3 == 0)}) == 1 for batch in images)
    assert sorted(map(len, images)) == sorted([349_527 % size, 699_052 % size, *[size] * 7])
