"""Tests of ImageData: pure items, exact resume, splits and identities by content, and damaged images."""

import hashlib
import json
import os
import pickle
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from PIL import Image
from torch import nn

from lit_efficient import AspectBuckets, ExactResume, ImageColumns, ImageData, ImageScores, ImageView
from lit_efficient.data.images import image_store
from lit_efficient.data.images.image_module import hold_out
from lit_efficient.data.images.image_source import ImageSource, collate_images
from lit_efficient.errors import ConfigurationError
from lit_efficient.files import file_hashes
from lit_efficient.files.file_hashes import altered_file, hash_files
from lit_efficient.mechanisms.order.resumable_loader import examine, make_resumable
from tests.callbacks.resume_kit import Tiny, count_exact
from tests.data.images.image_kit import SIZES, number_of, picture, write
from tests.support import trainer

COUNT = 20
BUCKETED = {"buckets": AspectBuckets(8, 2.0), "crop": "random", "horizontal_flip": True, "variants": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("images"), [f"{'ab'[n % 2]}/{n}.png" for n in range(COUNT)], ["x"] * COUNT)


def opened(train, view=None, prepare=True, **arguments):
    view = ImageView(**{"resolution": 32} | (view or {}))
    data = ImageData(train=str(train), view=view, **{"batch_size": 3} | arguments)
    if prepare:
        data.prepare_data()
    data.setup("fit")
    return data


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(v, other[k]) if isinstance(v, torch.Tensor) else v == other[k] for k, v in one.items())


def test_batches_have_one_shape_and_belong_together(folder):
    data = opened(folder, BUCKETED)
    assert isinstance(ImageData(train="not yet looked for"), ImageSource)
    shapes = AspectBuckets(8, 2.0).shapes(32)
    seen = []
    for batch in data.train_dataloader():
        assert batch["images"].shape[2:] == data.bucket_of(int(batch["index"][0]))
        assert batch["images"].dtype == torch.float32
        for image, index, variant, label in zip(*(batch[n] for n in ("images", "index", "variant", "labels"))):
            assert torch.equal(image, data.dataset[(int(index), int(variant))]["images"])
            assert label == number_of(image) % 2
            height, width = SIZES[number_of(image) % len(SIZES)]
            nearest = min(shapes, key=lambda shape: abs(np.log(width / height) - np.log(shape[1] / shape[0])))
            assert data.bucket_of(int(index)) == nearest
        assert batch["captions"] == ["x"] * len(batch["index"])
        seen += batch["index"].tolist()
    assert sorted(seen) == data.train_index
    assert len({data.bucket_of(index) for index in seen}) == len(shapes) == 3
    assert all(int(variant) == 0 for batch in data.val_dataloader() for variant in batch["variant"])


def test_an_item_is_a_pure_function_of_its_key(folder):
    data, again = opened(folder, BUCKETED), opened(folder, BUCKETED)
    state = torch.get_rng_state()
    for key in ((0, 0), (3, 4), (7, 1)):
        first = data.dataset[key]
        np.random.rand()
        assert equal(first, data.dataset[key])
        assert equal(first, again.dataset[key])
        assert (first["index"], first["variant"]) == key
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(data.dataset[(4, 0)]["images"], opened(folder, BUCKETED, seed=9).dataset[(4, 0)]["images"])
    wide = next(index for index in range(COUNT) if number_of(data.dataset[(index, 0)]["images"]) % 5 == 1)  # has room
    other = opened(folder, BUCKETED, seed=9).dataset[(wide, 2)]["images"]
    assert not torch.equal(data.dataset[(wide, 2)]["images"], other)
    for wrong in ((0, 5), (0, -1)):
        with pytest.raises(ConfigurationError, match="variant must be at least 0 and below 5"):
            data.dataset[wrong]
    with pytest.raises(IndexError):
        data.dataset[(COUNT, 0)]
    with pytest.raises(ConfigurationError, match="no images yet: call prepare_data"):
        ImageData(train="x").dataset[(0, 0)]


def test_sizes_say_which_part_of_the_original_an_item_is(tmp_path):
    rows, columns = np.mgrid[:60, :120].astype(np.uint8)
    Image.fromarray(np.stack([2 * columns, 2 * rows, 0 * rows], axis=-1)).save(tmp_path / "a.png")
    for name in "bcd":
        Image.fromarray(np.full((60, 120, 3), ord(name), np.uint8)).save(tmp_path / f"{name}.png")
    data = opened(tmp_path, {"crop": "random", "horizontal_flip": True, "variants": 6})
    stored = [data.dataset[(index, 0)] for index in range(4)]
    index = next(item["index"] for item in stored if item["images"][0].std() > 0.1)
    lefts = set()
    for variant in range(6):
        item = data.dataset[(index, variant)]
        height, width, top, left, *shape = item["sizes"].tolist()
        assert [height, width, top, *shape] == [60, 120, 0, 32, 32]
        # Where SDXL's own training script crops: the whole image resized, flipped, cut at top and left.
        whole = torch.from_numpy(np.array(Image.open(tmp_path / "a.png").resize((64, 32), Image.LANCZOS)))
        whole = whole.flip(1) if variant % 2 else whole
        cut = whole[top : top + 32, left : left + 32].permute(2, 0, 1) / 127.5 - 1
        assert (cut - item["images"]).abs()[0].max() < 3 / 127.5  # less than a pixel of the resized image
        lefts.add(left)
    assert len(lefts) > 3
    batch = collate_images([data.dataset[(0, 0)], data.dataset[(1, 0)]])
    assert batch["sizes"].shape == (2, 6)


def test_workers_give_the_same_and_resume_exactly(folder):
    def loader(workers):
        made = opened(folder, BUCKETED, num_workers=workers).train_dataloader()
        assert examine(made) == (True, "")
        return make_resumable(made, seed=1, rank=0, epoch=lambda: 3)

    whole, states = [], []
    alone = loader(0)
    for batch in alone:
        whole.append(batch)
        states.append(alone.state_dict())
    resumed = loader(2)
    resumed.load_state_dict(states[2])
    rest = list(resumed)
    assert len(rest) == len(whole) - 3
    assert all(map(equal, rest, whole[3:]))


def test_what_spawned_workers_are_given_arrives(folder):
    loader = opened(folder, BUCKETED).train_dataloader()
    dataset, collate = pickle.loads(pickle.dumps((loader.dataset, loader.collate_fn)))
    keys = next(iter(loader.sampler))
    assert equal(collate(dataset[keys]), loader.collate_fn(loader.dataset[keys]))


class Learner(Tiny):
    """Module that learns the red of images of any shape."""

    def __init__(self, data):
        super().__init__()
        self.images = data
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Dropout(0.5), nn.Conv2d(4, 1, 1))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch["images"]

    def train_dataloader(self):
        return self.images.train_dataloader()

    def val_dataloader(self):
        return self.images.val_dataloader()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.net(batch).pow(2).mean(), batch_size=len(batch))


def test_a_run_with_buckets_is_resumed_exactly_from_every_batch(tmp_path, folder):
    data = opened(folder, BUCKETED)
    number, wrong = count_exact(tmp_path, lambda: Learner(data), max_epochs=2, limit_train_batches=3)
    assert number == 6
    assert not wrong


def test_the_identity_follows_every_byte_and_names_what_changed(tmp_path):
    write(tmp_path, [f"{n}.png" for n in range(COUNT)], ["x"] * COUNT)
    first = opened(tmp_path).identity()

    def changed(view=None, **arguments):
        return {name for name, value in opened(tmp_path, view, **arguments).identity().items() if first[name] != value}

    assert changed() == set()
    assert changed({"resolution": 40}) == {"resolution"}
    assert changed({"buckets": AspectBuckets(8)}) == {"buckets"}
    assert changed({"horizontal_flip": True, "variants": 2}) == {"transform", "variants"}
    assert changed({"channels": "grey"}) == changed({"resample": "bicubic"}) == {"transform"}
    assert changed(seed=1) == changed(test_fraction=0.3) == {"split"}
    assert changed({"crop": "random", "variants": 2}, seed=1) == {"split", "seed", "transform", "variants"}
    assert changed(columns=ImageColumns(caption=None)) == {"annotations"}
    (tmp_path / "3.txt").write_text("another caption")
    assert changed() == {"annotations"}
    (tmp_path / "3.txt").write_text("x")
    assert changed() == set()
    path = tmp_path / "7.png"
    content, stat = bytearray(path.read_bytes()), path.stat()
    picture(19, (60, 30)).save(path)
    assert "data" in changed()
    path.write_bytes(content + b"\0")  # one more byte that changes no pixel
    assert "data" in changed()
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert changed() == set()
    (tmp_path / "4.png").rename(tmp_path / "4b.png")
    (tmp_path / "4.txt").rename(tmp_path / "4b.txt")
    assert changed() == set()  # neither the content nor its order has changed
    (tmp_path / "4b.png").unlink()
    assert {"data", "annotations"} <= changed()


def test_a_second_start_reads_no_image(tmp_path, monkeypatch):
    write(tmp_path, [f"{n}.png" for n in range(6)])
    for path in tmp_path.iterdir():
        os.utime(path, (1e9, 1e9))  # long ago: a file that was just written is hashed twice
    first = opened(tmp_path)

    def never(*_, **__):
        raise AssertionError("read again")

    monkeypatch.setattr(image_store, "_examine", never)
    read = file_hashes.sha256_of
    monkeypatch.setattr(file_hashes, "sha256_of", lambda path: never() if path.suffix == ".png" else read(path))
    assert opened(tmp_path, prepare=False).identity() == first.identity()
    os.utime(tmp_path / "2.png", (2e9, 2e9))
    with pytest.raises(AssertionError, match="read again"):
        opened(tmp_path)


def test_a_file_that_has_just_been_written_is_hashed_again(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"one")
    stat = path.stat()
    first = hash_files(tmp_path, [path])
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # within one tick of the file system's clock
    assert hash_files(tmp_path, [path]) != first
    with pytest.raises(ConfigurationError, match="gone cannot be read"):
        hash_files(tmp_path, [tmp_path / "gone"])


def test_a_large_folder_is_compared_once_for_each_size_and_time_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_efficient.files.file_hashes._LARGE", 5)
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path / "cache"))
    recorded = {name: (3, hashlib.sha256(name.encode() * 3).hexdigest()) for name in "ab"}

    def faults(content, then):
        for name in recorded:
            (tmp_path / name).write_bytes(content * 3)
            os.utime(tmp_path / name, (then, then))
            content = b"b" if content == b"a" else content
        return [altered_file(tmp_path, dict(list(recorded.items())[:count]), True) for count in (2, 1)]  # large, small

    assert faults(b"a", 1e9) == [None, None]
    wrong = "a is not what was written (its SHA-256 differs)."
    assert faults(b"x", 1e9) == [None, wrong]  # not read again
    assert faults(b"x", 1.1e9) == [wrong, wrong]
    assert faults(b"a", 1.2e9) == [None, None]
    monkeypatch.setattr("lit_efficient.files.file_hashes.hash_files", None)
    assert altered_file(tmp_path, recorded, thorough=False) is None


def test_a_damaged_listing_or_cache_is_not_believed(tmp_path):
    cache = tmp_path / "cache"
    write(tmp_path / "images", [f"{n}.png" for n in range(6)])
    first = opened(tmp_path / "images", cache_dir=str(cache)).identity()
    (listing,) = (cache / "file_hashes").glob("*.json")
    listing.write_text(listing.read_text()[:30])
    assert opened(tmp_path / "images", cache_dir=str(cache)).identity() == first
    (sizes,) = cache.glob("images/*/sizes.npy")
    sizes.write_bytes(sizes.read_bytes()[:-1] + b"\7")
    with pytest.raises(ConfigurationError, match=r"is damaged: sizes.npy is not what was .* Delete the folder"):
        opened(tmp_path / "images", cache_dir=str(cache))


def test_images_that_cannot_be_read_are_named_or_left_out_and_counted(tmp_path):
    write(tmp_path, [f"{n}.png" for n in range(8)], [str(n) for n in range(8)])
    (tmp_path / "2.png").write_bytes(b"nonsense")
    (tmp_path / "5.png").write_bytes((tmp_path / "5.png").read_bytes()[:-40])
    with pytest.raises(ConfigurationError, match=r"(?s)2 of 8 images .*2\.png: cannot identify.*5\.png: .*skip_unread"):
        opened(tmp_path)
    with pytest.warns(match=r"left out 2 of 8 images that cannot be read:\n.*2\.png: cannot identify image file"):
        data = opened(tmp_path, skip_unreadable=True)
    assert len(data.dataset) == 6
    items = [data.dataset[(index, 0)] for index in range(6)]
    assert [item["captions"] for item in items] == [str(number_of(item["images"])) for item in items]
    assert sorted(number_of(item["images"]) for item in items) == [0, 1, 3, 4, 6, 7]
    for path in tmp_path.glob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(ConfigurationError, match="no image is left: 8 of 8 images"):
        opened(tmp_path, skip_unreadable=True)


def test_damage_that_only_decoding_shows_is_named_when_it_is_met(tmp_path):
    write(tmp_path, [f"{n}.png" for n in range(4)])
    picture(1).save(tmp_path / "1.jpg")
    rotten = bytearray((tmp_path / "1.jpg").read_bytes())
    table = rotten.index(b"\xff\xc4")
    rotten[table + 5 : table + 21] = b"\xff" * 16  # codes that cannot be: size and end look right
    (tmp_path / "1.png").unlink()
    (tmp_path / "1.jpg").write_bytes(rotten)
    with pytest.raises(ConfigurationError, match=r"1\.jpg cannot be read: .*skip_unreadable: true"):
        opened(tmp_path).dataset[(1, 0)]
    with pytest.warns(match=r"left out 1 of 4"):
        assert len(opened(tmp_path, skip_unreadable=True).dataset) == 3


def test_images_that_change_or_vanish_while_training_are_seen(tmp_path):
    write(tmp_path, [f"{n}.png" for n in range(4)])
    data = opened(tmp_path)
    picture(7).save(tmp_path / "1.png")
    with pytest.raises(ConfigurationError, match=r"1\.png has changed since the data was opened"):
        data.dataset[(1, 0)]
    (tmp_path / "2.png").unlink()
    with pytest.raises(ConfigurationError, match=r"2\.png cannot be read"):
        data.dataset[(2, 0)]


def test_the_split_is_by_content(tmp_path):
    write(tmp_path, [f"{n:02}.png" for n in range(COUNT)])
    before = opened(tmp_path, val_fraction=0.4, test_fraction=0.2)
    parts = (before.train_index, before.val_index, before.test_index)
    assert sorted(index for part in parts for index in part) == list(range(COUNT))
    assert all(parts)
    of = {number: part for part, index in enumerate(parts) for number in index}
    for number in range(COUNT):  # a copy of each
        (tmp_path / f"copy{number:02}.png").write_bytes((tmp_path / f"{number:02}.png").read_bytes())
    after = opened(tmp_path, val_fraction=0.4, test_fraction=0.2)
    for part, index in enumerate((after.train_index, after.val_index, after.test_index)):
        assert {of[number % COUNT] for number in index} == {part}
    assert opened(tmp_path, val_fraction=0.4, test_fraction=0.2, seed=1).val_index != after.val_index
    assert opened(tmp_path).test_index == opened(tmp_path).val_index


def test_fractions_are_met_and_few_images_suffice():
    digests = [number.to_bytes(32) for number in np.random.default_rng(0).permutation(10000).tolist()]
    sizes = [len(part) for part in hold_out([bytes(reversed(d)) for d in digests], 0, [0.1, 0.05])]
    assert sum(sizes) == 10000
    assert sizes == pytest.approx([1000, 500, 8500], abs=130)
    for count in range(3, 8):
        assert all(hold_out([bytes([n]) * 32 for n in range(count)], 0, [0.01, 0.01]))
    same = hold_out([b"x" * 32] * 5, 0, [0.5, 0.0])
    assert sorted(len(part) for part in same) == [0, 0, 5]


def test_too_few_images_to_hold_some_out(tmp_path):
    write(tmp_path, ["0.png"])
    with pytest.raises(ConfigurationError, match=r"no image is left to .* on: 1 images, of which 1 differ"):
        opened(tmp_path)


def test_separate_folders(tmp_path):
    write(tmp_path / "train", [f"{n}.png" for n in range(4)])
    write(tmp_path / "val", [f"{n}.png" for n in range(2)])
    write(tmp_path / "test", [f"{n}.png" for n in range(3)])
    data = opened(tmp_path / "train", val=str(tmp_path / "val"), test=str(tmp_path / "test"))
    assert (data.train_index, data.val_index, data.test_index) == ([0, 1, 2, 3], [4, 5], [6, 7, 8])
    assert [number_of(data.dataset[(index, 0)]["images"]) for index in range(9)] == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert next(iter(data.test_dataloader()))["index"].tolist() == [6, 7, 8]


def test_grey_images(folder):
    data = opened(folder, {"channels": "grey"})
    assert data.dataset[(0, 0)]["images"].shape == (1, 32, 32)


def test_any_vision_model_is_the_judge(tmp_path, folder):
    config = tmp_path / "vit.json"
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config.write_text(json.dumps({"model_type": "vit", "image_size": 16, "patch_size": 8, "num_channels": 3} | tiny))
    data = opened(folder, BUCKETED, scores=ImageScores(str(config), 12))
    images = torch.stack([data.dataset[(i, 0)]["images"] for i in data.train_index if data.bucket_of(i) == (32, 32)])
    real, noise = data.score_samples(images), data.score_samples(torch.rand(8, 3, 24, 40) * 2 - 1)
    assert set(real) == {"frechet_distance", "kernel_distance"}
    assert real["frechet_distance"] < 0.5 * noise["frechet_distance"]
    assert opened(folder).score_samples(images) == {}
    with pytest.raises(ConfigurationError, match=r"ImageData: scores.judge must be .* got '/nowhere'"):
        opened(folder, scores=ImageScores("/nowhere"))


def test_distances_need_two_images(tmp_path):
    config = tmp_path / "vit.json"
    config.write_text('{"model_type": "vit"}')
    write(tmp_path / "images", ["0.png", "1.png"])
    write(tmp_path / "val", ["2.png"])
    files = {"val": str(tmp_path / "val"), "batch_size": 1, "scores": ImageScores(str(config))}
    opened(tmp_path / "images", **files)
    (tmp_path / "images" / "1.png").unlink()
    with pytest.raises(ConfigurationError, match=r"scores.judge must be null for fewer than 2 different images"):
        opened(tmp_path / "images", **files)


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        (ImageView, {"resolution": 100}, "ImageData: view.resolution must be a multiple of 8, got 100"),
        (ImageView, {"resolution": 0}, "view.resolution must be a whole number of at least 8 and at most 65536, got 0"),
        (ImageView, {"crop": "top"}, "view.crop must be one of center, random, got 'top'"),
        (ImageView, {"channels": "cmyk"}, "view.channels must be one of rgb, grey, got 'cmyk'"),
        (ImageView, {"resample": "nearest"}, "view.resample must be one of lanczos, bicubic, got 'nearest'"),
        (ImageView, {"variants": 4}, "view.variants must be 1 for crop: center without horizontal_flip, got 4"),
        (ImageView, {"horizontal_flip": True}, "variants must be 2 for crop: center with horizontal_flip, got 1"),
        (ImageView, {"crop": "random"}, "variants must be at least 2 for crop: random without horizontal_flip, got 1"),
        (ImageView, {"resolution": 64, "buckets": True}, "give 1 shape for a resolution of 64"),
        (ImageScores, {"judge": "x", "images": 1}, "scores.images must be a whole number of at least 2, got 1"),
        (ImageData, {"batch_size": 0}, "ImageData: batch_size must be a whole number of at least 1, got 0"),
        (ImageData, {"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1, got 1.0"),
        (ImageData, {"test_fraction": 0.95}, r"val_fraction \+ test_fraction must be below 1, got 1.0"),
    ],
)
def test_arguments_are_checked_when_built(make, wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**({"train": "x"} if make is ImageData else {}) | wrong)


def test_what_was_found_is_said(tmp_path, caplog):
    write(tmp_path, [f"{'ab'[n % 2]}/{n}.png" for n in range(10)])
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        opened(tmp_path, {"resolution": 40}, val_fraction=0.2)
    text = caplog.text
    assert "reading the 10 images" in text
    assert "10 images, labels: its 2 subfolders" in text
    # 40x40, 30x60, 60x30, 40x50, 64x24, twice each: three of five have a side below 40; squares keep 0.635 of all.
    assert "in 1 shape; crops keep 63.5% of them; 6 are smaller than their shape, and enlarged; 2 classes" in text


@pytest.mark.parametrize(("field", "value"), [("horizontal_flip", 0.5), ("buckets", [[16, 16]])])
def test_a_view_says_what_it_may_be(field, value) -> None:
    with pytest.raises(ConfigurationError, match=rf"ImageData: view.{field} must be .*, got "):
        ImageView(**{field: value})


def test_all_images_train_without_a_validation_part(tmp_path):
    data = opened(write(tmp_path, [f"{n}.png" for n in range(4)]), val_fraction=0, batch_size=2)
    module = Learner(data)
    fitting = pl.Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False)
    fitting.fit(module, data.train_dataloader(), data.val_dataloader())
    assert fitting.global_step == 4
    assert sorted(number_of(data.dataset[(index, 0)]["images"]) for index in data.train_index) == [0, 1, 2, 3]
    data.trainer = fitting
    assert data.val_dataloader() == []
    fitting.state.fn = TrainerFn.TESTING
    with pytest.raises(ConfigurationError, match="nothing is held out to test on, because val_fraction is 0"):
        data.test_dataloader()


@pytest.mark.parametrize("reads", [True, False])
def test_shapes_that_do_not_fill_a_batch_are_weighted_or_reported(tmp_path, caplog, reads):
    write(tmp_path, [f"{n}.png" for n in range(11)])
    data = opened(tmp_path, {"buckets": AspectBuckets(8, 2.0)}, val_fraction=0, batch_size=6)
    module = nn.Module()
    module.reads = ("loss_weight",) if reads else ()
    data.trainer = SimpleNamespace(lightning_module=module, strategy=SimpleNamespace(root_device=torch.device("cpu")))
    caplog.set_level("INFO")
    loader = data.train_dataloader()
    # Each image of a batch of n counts 1/n times its weight, of a full batch 1/6.
    weights = {index: [] for index in data.train_index}
    for epoch in range(60):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            count = len(batch["index"])
            for index, weight in zip(batch["index"].tolist(), batch.get("loss_weight", torch.ones(count)).tolist()):
                weights[index].append(weight * 6 / count)
    of_shape = {}
    for index, found in weights.items():
        of_shape.setdefault(data.bucket_of(index), []).append(np.mean(found))
    means = {shape: np.mean(found) for shape, found in of_shape.items()}
    if reads:
        assert means == pytest.approx(dict.fromkeys(means, 1.0))
        assert "its loss is a mean" not in caplog.text
        return
    shape = max(means, key=means.get)
    heavy = sum(len(of_shape[each]) for each in means if means[each] > 1.499)
    assert f"{heavy} of 11 images count up to {means[shape]:.1f} times" in caplog.messages[-1]
    assert f"(such as {shape} with {len(of_shape[shape])})" in caplog.messages[-1]


class Counting(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["index"].tolist())
        return self.weight * batch["images"].mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveEveryStep(pl.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *args):
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def on_validation_end(self, trainer, *args):
        trainer.save_checkpoint(self.folder / f"validated{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer, *args):
        trainer.save_checkpoint(self.folder / f"epoch{trainer.global_step}.ckpt")


@pytest.mark.parametrize("change", ["added", "removed", "other", "shapes", "caption", "validation"])
def test_a_run_is_not_resumed_inside_an_epoch_of_other_images(tmp_path, change):
    write(tmp_path / "own", [f"{n}.png" for n in range(8)], [f"number {n}" for n in range(8)])
    write(tmp_path / "val", ["0.png", "1.png"], ["a", "b"])

    def run(*callbacks, ckpt=None, view=ImageView(32, buckets=AspectBuckets(8, 2.0))):  # noqa: B008 (frozen)
        data = ImageData(str(tmp_path / "own"), str(tmp_path / "val"), view=view, batch_size=2, columns=ImageColumns())
        module = Counting()
        made = trainer([ExactResume(seed=1), *callbacks], max_epochs=2, default_root_dir=tmp_path)
        made.fit(module, data, ckpt_path=ckpt)
        return module

    whole = run(SaveEveryStep(tmp_path))
    steps = len([*tmp_path.glob("[0-9]*.ckpt")]) // 2
    again = {}
    if change == "added":
        write(tmp_path / "more", [f"{n}.png" for n in range(12)], ["more"] * 12)
        for suffix in ("png", "txt"):
            (tmp_path / "more" / f"11.{suffix}").rename(tmp_path / "own" / f"9.{suffix}")
    elif change == "removed":
        (tmp_path / "own" / "7.png").unlink()
    elif change == "other":
        picture(9, SIZES[3]).save(tmp_path / "own" / "3.png")
    elif change == "shapes":
        again = {"view": ImageView(32)}
    elif change == "caption":
        (tmp_path / "own" / "3.txt").write_text("other")
    else:
        write(tmp_path / "val", ["2.png", "3.png"], ["c", "d"])
    if change in ("caption", "validation"):
        assert run(ckpt=tmp_path / "2.ckpt", **again).seen == whole.seen[2:]
        return
    with pytest.raises(ConfigurationError, match=r"images have changed since batch 2 of an epoch.* \(8 rows when"):
        run(ckpt=tmp_path / "2.ckpt", **again)
    count = {"added": 9, "removed": 7}.get(change, 8)
    for name in ("epoch", "validated"):
        batches = run(ckpt=tmp_path / f"{name}{steps}.ckpt", **again).seen
        assert sorted(index for batch in batches for index in batch) == list(range(count)), name
