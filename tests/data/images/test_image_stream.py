"""Streams of images: every image of the files that other programs wrote, once a pass, and exact resume."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from lit_efficient import (
    AspectBuckets,
    AutoencoderConfig,
    CaptionRules,
    ConfigurationError,
    ExactResume,
    ImageData,
    ImageSet,
    LatentData,
)
from lit_efficient.data.images.image_columns import ImageColumns
from lit_efficient.data.images.image_pixels import to_tensor
from lit_efficient.data.images.image_stream import ImageStream
from lit_efficient.data.images.image_view import ImageView
from lit_efficient.data.images.streamed_rows import HubShard, shards_of
from lit_efficient.mechanisms.order import stream_loader
from lit_efficient.tasks.autoencoding import Autoencoding
from tests.data.latents.mds_kit import write_mds
from tests.support import trainer

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
COUNT = 23
SIDE = 16


def picture(number: int, size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def caption(number: int) -> str:
    return f"picture {number}"


def tars(folder: Path, sizes: tuple[tuple[int, int], ...] = ((SIDE, SIDE),)) -> None:
    """Write two tars as WebDataset: jpg or png, and txt or an entry of json, with a class."""
    for shard, numbers in enumerate((range(14), range(14, COUNT))):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as archive:
            for number in numbers:
                files = {"png": picture(number, sizes[number % len(sizes)]), "cls": str(number % 3).encode()}
                files["json"] = json.dumps({"caption": caption(number), "url": "none"}).encode()
                for suffix, content in files.items():
                    member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def mds(folder: Path) -> None:
    rows: dict[str, list[bytes]] = {"image": [picture(number) for number in range(COUNT)]}
    rows["label"] = [(number % 3).to_bytes(8, "little") for number in range(COUNT)]
    rows["caption"] = [caption(number).encode() for number in range(COUNT)]
    columns = {"image": ("png", None), "label": ("int", 8), "caption": ("str", None)}
    write_mds(folder, columns, rows, [slice(0, 14), slice(14, COUNT)])


def parquet(folder: Path) -> None:
    for shard, numbers in enumerate((range(14), range(14, COUNT))):
        images = [{"bytes": picture(number), "path": None} for number in numbers]
        columns = {"image": images, "text": [caption(n) for n in numbers], "label": [n % 3 for n in numbers]}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"part-{shard}.parquet", row_group_size=4)


WRITERS = {"tar": tars, "mds": mds, "parquet": parquet}


def streamed(folder: Path, **arguments: Any) -> ImageData:
    stream = {"enabled": True, "epoch_batches": 4, "buffer": 6, "classes": 3} | arguments.pop("stream", {})
    view = arguments.pop("view", ImageView(SIDE, horizontal_flip=True, variants=2))
    data = ImageData(
        arguments.pop("train", str(folder)),
        view=view,
        stream=ImageStream(**stream),
        val_fraction=0.0,
        batch_size=arguments.pop("batch_size", 4),
        cache_dir=str(folder / "cache"),
        **arguments,
    )
    data.prepare_data()
    data.setup("fit")
    return data


def taken(data: ImageData, count: int) -> list[dict[str, Any]]:
    """Return the first batches of a loader."""
    loader = data.train_dataloader()
    return list(islice(endless(loader), count))


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    def equal(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other

    return len(found) == len(expected) and all(
        one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
        for one, other in zip(found, expected)
    )


@pytest.mark.parametrize("kind", WRITERS)
def test_each_pass_shows_each_image_once_with_its_caption_and_class(kind: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path)
    data = streamed(tmp_path, batch_size=1)
    items = taken(data, 2 * COUNT)
    orders = []
    for start in (0, COUNT):
        seen = []
        for item in items[start : start + COUNT]:
            (text,) = item["captions"]
            number = int(text.split()[1])
            seen.append(number)
            assert item["labels"].tolist() == [number % 3]
            pixels = to_tensor(Image.open(io.BytesIO(picture(number))), flip=item["variant"].item() == 1)
            assert torch.equal(item["images"][0], pixels)
            assert item["sizes"].tolist() == [[SIDE, SIDE, 0, 0, SIDE, SIDE]]
        assert sorted(seen) == list(range(COUNT))
        orders.append(seen)
    assert orders[0] != orders[1] != list(range(COUNT))
    variants = {}
    for item in items:
        variants.setdefault(item["index"].item(), []).append(item["variant"].item())
    assert all(sorted(both) == [0, 1] for both in variants.values())
    assert taken(streamed(tmp_path, batch_size=1, seed=1), COUNT)[0]["captions"] != items[0]["captions"]


@pytest.mark.parametrize("kind", WRITERS)
def test_ranks_and_workers_share_a_pass(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS[kind](tmp_path)
    seen = []
    for rank in range(2):
        monkeypatch.setattr(stream_loader, "place_among_ranks", lambda rank=rank: (rank, 2))
        data = streamed(tmp_path, batch_size=1)
        data.prepare_data()
        part = len(range(rank, COUNT, 2))
        seen += [text for item in taken(data, part) for text in item["captions"]]
    assert sorted(seen) == sorted(map(caption, range(COUNT)))


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize(("workers", "buckets"), [(0, True), (2, True), (3, False)])
def test_a_stream_goes_on_where_it_stood(
    workers: int, buckets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars(tmp_path, ((64, 64), (32, 128), (128, 32)) if buckets else ((SIDE, SIDE),))
    view = ImageView(64, buckets=AspectBuckets(32, 4.0), crop="random", variants=3) if buckets else ImageView(SIDE)
    monkeypatch.setattr(stream_loader, "place_among_ranks", lambda: (1, 2))
    settings: dict[str, Any] = {"num_workers": workers, "batch_size": 2, "view": view}
    loader = streamed(tmp_path, **settings).train_dataloader()
    whole = []
    states = []
    for batch in islice(endless(loader), 11):
        whole.append(batch)
        states.append(loader.state_dict())
    if buckets:
        assert len({batch["images"].shape for batch in whole}) > 1
    for number in (0, 2, 5, 8):
        resumed = streamed(tmp_path, **settings).train_dataloader()
        resumed.load_state_dict(states[number])
        assert same(list(islice(endless(resumed), 10 - number)), whole[number + 1 :])
    other = streamed(tmp_path, **settings | {"num_workers": workers + 1}).train_dataloader()
    with pytest.raises(ConfigurationError, match="ImageData: a stream is resumed with the same num_workers"):
        other.load_state_dict(states[3])
    for change in ({"seed": 1}, {"stream": {"buffer": 5}}, {"train": [ImageSet(str(tmp_path), repeats=2)]}):
        other = streamed(tmp_path, **settings | change).train_dataloader()
        with pytest.raises(ConfigurationError, match=r"a stream is resumed with the same (seed|buffer|shards)"):
            other.load_state_dict(states[3])


def test_rows_before_a_resume_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tars(tmp_path)
    data = streamed(tmp_path)
    loader = data.train_dataloader()
    loader.load_state_dict(loader.state_dict() | {"batches": 20})
    read = []
    original = data.streamed._item  # type: ignore[union-attr]
    monkeypatch.setattr(data.streamed, "_item", lambda *given: read.append(1) or original(*given))
    next(iter(loader))
    assert len(read) == 4


class Watched(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((batch["captions"], batch["images"].sum().item()))
        return (self.weight - batch["images"].mean() - torch.rand(())).square()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_run_resumed_in_the_middle_of_an_epoch_ends_with_the_same_weights(tmp_path: Path) -> None:
    tars(tmp_path)

    class Saving(L.Callback):
        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            if trainer.global_step == 6:
                trainer.save_checkpoint(tmp_path / "six.ckpt")

    def run(*callbacks: Any, ckpt: Any = None) -> Watched:
        torch.manual_seed(0)
        module = Watched()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(
            max_steps=9, accelerator="cpu", callbacks=[ExactResume(), *callbacks], enable_checkpointing=False, **quiet
        )
        trainer.fit(module, datamodule=streamed(tmp_path, num_workers=2), ckpt_path=ckpt)
        return module

    whole = run(Saving())
    resumed = run(ckpt=tmp_path / "six.ckpt")
    assert resumed.seen == whole.seen[6:]
    assert torch.equal(resumed.weight, whole.weight)


@pytest.mark.turns(6, family="slow")
def test_latents_of_a_stream_are_encoded_live_with_validation_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    tars(tmp_path / "train")
    for number in range(5):
        (tmp_path / "val" / f"{number}.png").write_bytes(picture(100 + number))
        (tmp_path / "val" / f"{number}.txt").write_text(caption(100 + number))
    images = streamed(tmp_path / "train", val=str(tmp_path / "val"), stream={"classes": 0})
    with pytest.raises(ConfigurationError, match="cached must be false for streamed images"):
        LatentData(images, AutoencoderConfig(image_channels=3))
    data = LatentData(images, AutoencoderConfig(image_channels=3), cached=False)
    data.prepare_data()
    data.setup("fit")
    assert data.latent_shape[1:] == (SIDE // data.codec.factor,) * 2
    batch = next(iter(data.train_dataloader()))
    assert batch["images"].shape == (4, 3, SIDE, SIDE)
    assert "labels" not in batch
    assert next(iter(data.val_dataloader()))["captions"] == [caption(100 + number) for number in range(4)]


def test_a_data_set_that_datasets_streams(tmp_path: Path) -> None:
    parquet(tmp_path)
    shard = HubShard(str(tmp_path), "train", ImageColumns())
    rows = [row for row in shard.rows(1, 2) if row is not None]
    assert [row.number for row in rows] == list(range(1, COUNT, 2))
    assert [(row.read(), row.caption, row.label) for row in rows] == [
        (picture(number), caption(number), number % 3) for number in range(1, COUNT, 2)
    ]


def test_sets_with_repeats_and_triggers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tars(tmp_path / name)
    sets = [ImageSet(str(tmp_path / "a"), trigger="sks", repeats=2), ImageSet(str(tmp_path / "b"))]
    items = taken(streamed(tmp_path, train=sets, batch_size=1), 3 * COUNT)
    texts = sorted(text for item in items for text in item["captions"])
    assert texts == sorted([f"sks, {caption(n)}" for n in range(COUNT)] * 2 + [caption(n) for n in range(COUNT)])
    twice = [item["variant"].item() for item in items if item["captions"] == ["sks, picture 3"]]
    assert sorted(twice) == [0, 1]


def tar_of(folder: Path, *samples: dict[str, bytes]) -> str:
    with tarfile.open(folder / "own.tar", "w") as archive:
        for number, fields in enumerate(samples):
            for suffix, content in ({"png": picture(number)} | fields).items():
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return str(folder / "own.tar")


def test_captions_are_read_as_those_of_a_tar_that_is_not_streamed(tmp_path: Path) -> None:
    for fields, expected in (
        ({"txt": b"\xef\xbb\xbfa caf\xc3\xa9\r\n"}, ["a café"]),
        ({"json": b'{"caption": ["one", "two"]}'}, ["one", "two"]),
    ):
        named = tar_of(tmp_path, fields, fields)
        rules = CaptionRules(variants=len(expected))
        data = streamed(tmp_path, train=named, stream={"classes": 0}, batch_size=1, caption_rules=rules)
        assert {text for batch in taken(data, 16) for text in batch["captions"]} == set(expected)
        whole = ImageData(named, caption_rules=rules, val_fraction=0, cache_dir=str(tmp_path / "cache"))
        whole.prepare_data()
        whole.setup("fit")
        assert whole.captions_of(0) == expected


def roles(number: int) -> dict[str, bytes]:
    """Return an image of random blocks, its red channel as a mask, and its green channel, smaller, as a condition."""
    height, width = [(64, 64), (64, 128), (128, 64)][number % 3]
    blocks = np.random.default_rng(number).integers(0, 2, (height // 8, width // 8, 3)).astype(np.uint8) * 255
    pixels = blocks.repeat(8, 0).repeat(8, 1)
    parts = {"image": pixels, "mask": pixels[..., 0], "condition": pixels[::2, ::2, 1:2].repeat(3, 2)}
    found = {}
    for name, part in parts.items():
        stream = io.BytesIO()
        Image.fromarray(part).save(stream, "PNG")
        found[name] = stream.getvalue()
    return found


def write_roles(folder: Path, kind: str) -> dict[str, str]:
    """Write shards of images with masks, conditions and weights. Return the names of their columns."""
    rows = [roles(number) | {"weight": str(number / 4).encode()} for number in range(COUNT)]
    if kind == "tar":
        names = {"mask": "mask.png", "condition": "condition.png", "weight": "weight"}
        for shard, numbers in enumerate((range(14), range(14, COUNT))):
            with tarfile.open(folder / f"{shard}.tar", "w") as archive:
                for number in numbers:
                    files = {"txt": caption(number).encode(), "png": rows[number]["image"]}
                    files |= {names[name]: rows[number][name] for name in names}
                    for suffix, content in files.items():
                        member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
        return names
    table: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in ("image", "mask", "condition")}
    table["caption"] = [caption(number) for number in range(COUNT)]
    table["weight"] = [number / 4 for number in range(COUNT)]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(table), folder / "all.parquet", row_group_size=5)
    else:
        table["caption"] = [text.encode() for text in table["caption"]]
        table["weight"] = [np.float64(weight).tobytes() for weight in table["weight"]]
        columns: dict[str, Any] = dict.fromkeys(("image", "mask", "condition"), ("png", None))
        columns |= {"caption": ("str", None), "weight": ("float64", 8)}
        write_mds(folder, columns, table, [slice(0, 14), slice(14, COUNT)])
    return {"mask": "mask", "condition": "condition", "weight": "weight"}


@pytest.mark.parametrize("kind", WRITERS)
def test_masks_conditions_and_weights_are_columns(kind: str, tmp_path: Path) -> None:
    names = write_roles(tmp_path, kind)
    view = ImageView(32, buckets=AspectBuckets(8, 2.0), crop="random", horizontal_flip=True, variants=6)
    about = ImageSet(str(tmp_path), mask=names["mask"], condition=names["condition"], weight=0.5)
    settings: dict[str, Any] = {"train": [about], "view": view, "batch_size": 2, "stream": {"classes": 0}}
    settings["columns"] = ImageColumns(weight=names["weight"])
    data = streamed(tmp_path, **settings)
    assert set(data.roles) == {"loss_weight", "mask", "condition"}
    loader = data.train_dataloader()
    batches, states = [], []
    for batch in islice(endless(loader), COUNT):
        batches.append(batch)
        states.append(loader.state_dict())
        for row, text in enumerate(batch["captions"]):
            number = int(text.split()[1])
            files = roles(number)
            shape = batch["images"].shape[2:]
            key = (int(batch["index"][row]), int(batch["variant"][row]))
            assert torch.equal(batch["images"][row], view.look(files["image"], shape, key, 0))
            assert torch.equal(batch["mask"][row], view.look_mask(files["mask"], shape, key, 0))
            assert torch.equal(batch["condition"][row], view.look(files["condition"], shape, key, 0))
            assert batch["loss_weight"][row] == torch.tensor(number / 8)
    assert len({tuple(batch["mask"].shape) for batch in batches}) == 3
    resumed = streamed(tmp_path, **settings).train_dataloader()
    resumed.load_state_dict(states[6])
    assert same(list(islice(endless(resumed), 5)), batches[7:12])
    with pytest.raises(ConfigurationError, match=r"train.mask is 'none'|has no mask .train.mask: none"):
        taken(streamed(tmp_path, **settings | {"train": [ImageSet(str(tmp_path), mask="none")]}), 1)


def test_roles_of_a_stream_that_do_not_fit_are_refused_or_left_out(tmp_path: Path) -> None:
    files = roles(0)
    good = {"png": files["image"], "mask.png": files["mask"], "txt": b"good"}

    def of(*samples: dict[str, bytes], **arguments: Any) -> ImageData:
        named = tar_of(tmp_path, *samples)
        given = {"train": [ImageSet(named, mask="mask.png")], "stream": {"classes": 0}, "batch_size": 1}
        return streamed(tmp_path, **given | arguments)

    other = good | {"mask.png": roles(1)["mask"], "txt": b"other"}
    with pytest.raises(ConfigurationError, match=r"the mask of .*, 0 has 64 x 128 pixels, which is another aspect"):
        taken(of(other), 1)
    damaged = good | {"mask.png": files["mask"][:60], "txt": b"damaged"}
    with pytest.raises(ConfigurationError, match=r"the mask of .*, 0 cannot be read.*skip_unreadable: true"):
        taken(of(damaged), 1)
    with pytest.warns(UserWarning, match=r"left out .*, 1"):
        found = taken(of(good, damaged, skip_unreadable=True), 3)
    assert [batch["captions"] for batch in found] == [["good"]] * 3
    with pytest.raises(ConfigurationError, match=r"0 has no mask \(train.mask: mask.png\). Its files end in png, txt"):
        taken(of({name: good[name] for name in ("png", "txt")}), 1)
    weights = {"columns": ImageColumns(weight="weight")}
    with pytest.raises(ConfigurationError, match=r"the weight in 'weight' must be a number from 0, got '-1'"):
        taken(of(good | {"weight": b"-1"}, **weights), 1)
    run = trainer(default_root_dir=tmp_path, max_steps=1)
    with pytest.raises(ConfigurationError, match="batches have mask, which Autoencoding does not use"):
        run.fit(Autoencoding(AutoencoderConfig(latent_channels=2, width=8)), of(good))


def test_truth_values_are_no_classes(tmp_path: Path) -> None:
    columns = {"image": [{"bytes": picture(0), "path": None}], "label": [True]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "own.parquet")
    with pytest.raises(ConfigurationError, match="the label must be a number from 0 to 2"):
        taken(streamed(tmp_path, batch_size=1), 1)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"txt": b"caf\xe9"}], r"own\.tar, 0\.txt cannot be read as UTF-8 text"),
        ([{"json": b'{"caption": 5}'}], "the caption in 'caption' must be a text"),
        ([{"json": b'{"caption": ["a", "b"]}'}], "caption_rules.variants must be at least 2"),
        ([{"txt": b"a"}, {}], "caption, and rows before it have"),
    ],
)
def test_captions_that_cannot_be_meant_are_refused(
    samples: list[dict[str, bytes]], message: str, tmp_path: Path
) -> None:
    data = streamed(tmp_path, train=tar_of(tmp_path, *samples), stream={"classes": 0}, batch_size=1)
    with pytest.raises(ConfigurationError, match=message):
        taken(data, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")  # theirs
def test_webdataset_reads_the_same_images(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    (tmp_path / "theirs").mkdir()
    with webdataset.ShardWriter(str(tmp_path / "theirs" / "%d.tar"), maxcount=9, verbose=0) as writer:
        for number in range(COUNT):
            writer.write(
                {"__key__": f"{number:04d}", "png": picture(number), "txt": caption(number), "cls": number % 3}
            )
    files = sorted(map(str, (tmp_path / "theirs").glob("*.tar")))
    theirs = [(row["png"], row["txt"].decode()) for row in webdataset.WebDataset(files, shardshuffle=False)]
    ours = []
    for shard in shards_of(str(tmp_path / "theirs"), "train", ImageColumns()):
        ours += [(row.read(), row.caption) for row in shard.rows(0, 1) if row is not None]
    assert ours == theirs
    assert len(ours) == COUNT


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": "/nowhere"}, "no such folder or file: /nowhere"),
        ({"preload": True}, "preload must be false for a stream"),
        ({"test_fraction": 0.1}, "test_fraction must be 0 for a stream"),
        ({"columns": ImageColumns(caption="note")}, "columns.caption is 'note', but .* has no such column"),
        ({"stream": {"classes": 2}}, r"the label must be a number from 0 to 1 \(stream.classes is 2\), got 2"),
    ],
)
def test_what_cannot_be_streamed_is_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    tars(tmp_path)
    with pytest.raises(Exception, match=message):
        taken(streamed(tmp_path, **arguments), 30)
    with pytest.raises(ConfigurationError, match=r"train.role must be train for a stream, got 'prior'"):
        streamed(tmp_path, train=[ImageSet(str(tmp_path)), ImageSet(str(tmp_path), role="prior")])
    with pytest.raises(ConfigurationError, match="val_fraction must be 0 for a stream without val"):
        ImageData(str(tmp_path), stream=ImageStream(enabled=True))


def test_a_part_without_rows_is_refused(tmp_path: Path) -> None:
    tars(tmp_path)
    images = streamed(tmp_path).streamed
    assert images is not None
    images.place = (23, 30)
    with pytest.raises(ConfigurationError, match="stream of 23 images holds none for part 24 of 30"):
        next(iter(images))


def test_a_damaged_image_stops_the_stream_or_is_left_out(tmp_path: Path) -> None:
    tars(tmp_path)
    content = bytearray((tmp_path / "shard-1.tar").read_bytes())
    place = content.index(picture(20)[:200])
    content[place + 60 : place + 160] = bytes(100)
    (tmp_path / "shard-1.tar").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"shard-1.tar, 00020 cannot be read"):
        taken(streamed(tmp_path), 6)
    data = streamed(tmp_path, skip_unreadable=True, batch_size=1)
    with pytest.warns(UserWarning, match="left out .*00020"):
        seen = [text for item in taken(data, COUNT - 1) for text in item["captions"]]
    assert sorted(seen) == sorted(caption(number) for number in range(COUNT) if number != 20)
