"""Tests of EncodedData: every reader, on files in the formats of published data sets."""

import io
import json
import os
import pickle
import sys
import tarfile
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file

from lit_efficient import (
    AutoencoderConfig,
    ChannelScaling,
    ConfigurationError,
    DiffusersModelConfig,
    EncodedData,
    EncodedFields,
    EncodedNumbers,
)
from lit_efficient.data.latents.encoded_sources import open_encoded
from lit_efficient.mechanisms.order.resumable_loader import make_resumable
from tests.data.latents.mds_kit import write_mds

ROWS, SHAPE = 23, (4, 3, 2)
LATENTS = np.random.default_rng(0).normal(2.0, 3.0, (ROWS, *SHAPE)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 7, ROWS)
LABELS[3] = 6
CAPTIONS = [f"ein Bild, Nr. {i}: gräßlich" for i in range(ROWS)]
PARTS = [slice(0, 9), slice(9, 10), slice(10, ROWS)]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def safetensors(folder):
    for number, part in enumerate(PARTS):
        save_file({"latents": LATENTS[part], "labels": LABELS[part]}, folder / f"part-{number}.safetensors")
    return EncodedFields()


def safetensors_bfloat16(folder):
    from safetensors.torch import save_file as save

    save(
        {"latents": torch.from_numpy(LATENTS).bfloat16(), "labels": torch.from_numpy(LABELS)}, folder / "a.safetensors"
    )
    return EncodedFields()


def mds(folder):
    columns = {"cap": ("str", None), "z": ("ndarray:float32", None), "y": ("int", 8)}
    rows = {"cap": [c.encode() for c in CAPTIONS], "y": [np.int64(y).tobytes() for y in LABELS]}
    lengths = bytes([len(SHAPE) << 2, *SHAPE])  # three axes, lengths in a byte each
    rows["z"] = [lengths + z.tobytes() for z in LATENTS]
    write_mds(folder, columns, rows, PARTS)
    return EncodedFields("z", label="y", caption="cap")


def mds_of_any_array(folder):
    columns = {"z": ("ndarray", None), "fixed": ("ndarray:float32:4,3,2", LATENTS[0].nbytes), "y": ("str", None)}
    rows = {"y": [str(y).encode() for y in LABELS], "fixed": [z.tobytes() for z in LATENTS]}
    lengths = bytes([(len(SHAPE) << 2) | 1]) + np.array(SHAPE, np.uint16).tobytes()
    rows["z"] = [bytes([34]) + lengths + z.tobytes() for z in LATENTS]
    write_mds(folder, columns, rows, PARTS)
    for name in ("z", "fixed"):
        assert np.array_equal(open_encoded(folder).read(11, [name])[name], LATENTS[11])
    return EncodedFields("z", label="y")


def webdataset(folder):
    for number, part in enumerate(PARTS):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as archive:
            for row in range(ROWS)[part]:
                about = json.dumps({"label": int(LABELS[row])}).encode()
                files = {"latents.npy": npy(LATENTS[row]), "json": about, "txt": f"{CAPTIONS[row]}\n".encode()}
                for suffix, data in files.items():
                    member = tarfile.TarInfo(f"train/{row:06d}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return EncodedFields("latents.npy", label="json.label", caption="txt")


def parquet(folder):
    for number, part in enumerate(PARTS):
        columns = {
            "z": LATENTS[part].tolist(),
            "y": LABELS[part],
            "cap": CAPTIONS[part],
            "raw": [b"?"] * len(LABELS[part]),
        }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=4)
    return EncodedFields("z", label="y", caption="cap")


def parquet_flat(folder):
    flat = pa.FixedSizeListArray.from_arrays(pa.array(LATENTS.reshape(-1)), LATENTS[0].size)
    pq.write_table(pa.table({"z": flat, "y": LABELS}), folder / "a.parquet")
    return EncodedFields("z", label="y"), EncodedNumbers(shape=list(SHAPE))


def parquet_bytes(folder):
    pq.write_table(pa.table({"z": [z.tobytes() for z in LATENTS], "y": LABELS}), folder / "a.parquet")
    return EncodedFields("z", label="y"), EncodedNumbers(shape=list(SHAPE), raw="float32")


WRITERS = [
    safetensors,
    safetensors_bfloat16,
    mds,
    mds_of_any_array,
    webdataset,
    parquet,
    parquet_flat,
    parquet_bytes,
]


@pytest.mark.parametrize("writer", WRITERS)
def test_each_layout_gives_each_row_with_its_own_label(tmp_path, writer):
    fields = writer(tmp_path)
    fields, numbers = fields if isinstance(fields, tuple) else (fields, EncodedNumbers())
    data = EncodedData(str(tmp_path), fields=fields, numbers=numbers, statistics="none", held_out=5, batch_size=4)
    data.setup("fit")
    assert data.latent_shape == SHAPE
    assert data.num_classes == 7
    copy = pickle.loads(pickle.dumps(data.dataset))  # as a worker that was spawned gets it
    rounding = 2**-8 if writer is safetensors_bfloat16 else 0.0
    seen = []
    for loader in (data.train_dataloader(), data.val_dataloader()):
        for batch in loader:
            index = batch["index"].tolist()
            torch.testing.assert_close(batch["latents"], torch.from_numpy(LATENTS[index]), rtol=rounding, atol=0)
            assert batch["labels"].tolist() == LABELS[index].tolist()
            assert batch.get("captions", CAPTIONS) == ([CAPTIONS[i] for i in index] if fields.caption else CAPTIONS)
            assert torch.equal(copy[index[0], 0]["latents"], batch["latents"][0])
            seen += index
    assert sorted(seen) == list(range(ROWS))


def test_conditions_and_features_come_with_their_row(tmp_path):
    generator = np.random.default_rng(2)
    shapes = {"text": (5, 3), "pooled": (6,), "features": (4, 2)}
    more = {name: generator.normal(size=(ROWS, *shape)).astype(np.float32) for name, shape in shapes.items()}
    more["text_mask"] = generator.integers(0, 2, (ROWS, 5)).astype(np.uint8)
    stored = {f"its_{name}": array for name, array in more.items()}
    save_file({"latents": LATENTS, "labels": LABELS, **stored}, tmp_path / "a.safetensors")
    fields = EncodedFields(**{name: f"its_{name}" for name in more})
    data = EncodedData(str(tmp_path), fields=fields, statistics="none", held_out=5, batch_size=4)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["text_mask"].dtype == torch.bool
    for name, array in more.items():
        assert torch.equal(batch[name], torch.from_numpy(array[batch["index"].numpy()]).to(batch[name].dtype)), name


@pytest.mark.parametrize("writer", [parquet, webdataset])
def test_tables_are_mapped_and_copied_once(tmp_path, shared_cache, writer, monkeypatch):
    fields = writer(tmp_path)
    source = open_encoded(tmp_path)
    row = source.read(11, [fields.latents])
    copy = pickle.dumps(source)
    assert len(copy) < 5000
    assert np.array_equal(pickle.loads(copy).read(11, [fields.latents])[fields.latents], row[fields.latents])

    def never(*_, **__):
        raise AssertionError("copied again")

    monkeypatch.setattr("datasets.arrow_writer.ArrowWriter.__init__", never)
    assert np.array_equal(open_encoded(tmp_path).read(11, [fields.latents])[fields.latents], LATENTS[11])
    for path in tmp_path.iterdir():
        os.utime(path, (1e9, 1e9))
    with pytest.raises(ConfigurationError, match="copied again"):
        open_encoded(tmp_path)


def test_reading_local_tables_connects_to_no_server(tmp_path, monkeypatch):
    """The package datasets reports each table that it reads to Hugging Face, local ones too."""
    parquet(tmp_path)
    connections = []
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.load.get_session", lambda: connections.append("a session") or Mock())
    assert len(open_encoded(tmp_path)) == ROWS
    assert connections == []


def test_tables_say_what_to_install(tmp_path, monkeypatch):
    parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigurationError, match=r"parquet needs datasets: pip install 'lit-efficient\[llm\]'"):
        open_encoded(tmp_path)


def test_names_of_tables_are_no_patterns(tmp_path):
    folder = tmp_path / "a[1]*"
    folder.mkdir()
    parquet(folder)
    assert len(open_encoded(folder)) == ROWS


def test_imagenet_int8_as_it_is_published(tmp_path):
    """Latents are flat bytes with the encoding uint8, labels are texts, and the values are (x / 255 - 1/2) * 24."""
    codes = np.random.default_rng(2).integers(0, 256, (ROWS, 4 * 8 * 8), dtype=np.uint8)
    columns = {"label": ("str", None), "label_as_text": ("str", None), "vae_output": ("uint8", None)}
    rows = {"label": [str(y).encode() for y in LABELS], "label_as_text": [c.encode() for c in CAPTIONS]}
    write_mds(tmp_path, columns, {**rows, "vae_output": [c.tobytes() for c in codes]}, PARTS)
    data = EncodedData(
        str(tmp_path),
        fields=EncodedFields("vae_output", label="label", caption="label_as_text"),
        numbers=EncodedNumbers(scale=24 / 255, zero=-12.0, shape=[4, 8, 8]),
        statistics="none",
        num_classes=7,
    )
    data.held_out = 5
    data.setup("fit")
    for row in range(ROWS):
        expected = (codes[row].astype(np.float32) / 255.0 - 0.5) * 24.0
        np.testing.assert_allclose(data.dataset[row, 0]["latents"].numpy().reshape(-1), expected, atol=2e-6)
        assert data.dataset[row, 0]["captions"] == CAPTIONS[row]


def test_cosmos_imagenet_as_it_is_published(tmp_path):
    """It has one file of int8 codes for training and one for validation, with the values x * 16 / 255."""
    codes = np.random.default_rng(3).integers(-128, 128, (ROWS, 16, 2, 2)).astype(np.int8)
    save_file({"latents": codes, "labels": LABELS}, tmp_path / "imagenet_ci8x8.safetensors")
    save_file({"latents": codes[:4], "labels": LABELS[:4]}, tmp_path / "imagenet_ci8x8_val.safetensors")
    save_file({"indices": codes}, tmp_path / "imagenet_di8x8.safetensors")
    data = EncodedData(
        str(tmp_path),
        files="imagenet_ci8x8.safetensors",
        val_files="imagenet_ci8x8_val.safetensors",
        numbers=EncodedNumbers(scale=16 / 255),
    )
    data.setup("fit")
    assert data.train_index == list(range(ROWS))
    assert data.val_index == list(range(ROWS, ROWS + 4))
    batch = next(iter(data.val_dataloader()))
    values = torch.from_numpy(codes.astype(np.float32)) * 16 / 255
    mean, std = values.mean((0, 2, 3)), values.std((0, 2, 3), correction=0)
    torch.testing.assert_close(batch["latents"], (values[:4] - mean.view(-1, 1, 1)) / std.view(-1, 1, 1))
    assert batch["labels"].tolist() == LABELS[:4].tolist()


def held_in_files(folder, **arguments):
    """Return the labels of the training rows and of the validation rows."""
    data = EncodedData(str(folder), statistics="none", **{"num_classes": 7, **arguments})
    data.setup("fit")
    return [data.dataset.labels(index) for index in (data.train_index, data.val_index)]


def in_tars(folder):
    return {"fields": webdataset(folder), "val_files": "00001.tar"}


def in_shards(folder):
    return {"fields": mds(folder), "val_files": "shard.00001.mds"}


def in_safetensors(folder):
    return {"fields": safetensors(folder), "val_files": "part-1.safetensors"}


def in_a_folder(folder):
    fields = safetensors(folder)
    (folder / "val").mkdir()
    (folder / "part-1.safetensors").rename(folder / "val/a.safetensors")
    (folder / "val/read.parquet").write_bytes(b"another layout")
    return {"fields": fields, "val_files": "val", "layout": "safetensors"}


@pytest.mark.parametrize("writer", [in_tars, in_shards, in_safetensors, in_a_folder])
def test_what_is_for_validation_is_not_trained_on(tmp_path, writer):
    trained, held = held_in_files(tmp_path, **writer(tmp_path))
    assert held == LABELS[9:10].tolist()
    assert trained == LABELS[:9].tolist() + LABELS[10:].tolist()


def test_patterns_choose_among_shards_and_files(tmp_path):
    (tmp_path / "shards").mkdir()
    fields = mds(tmp_path / "shards")
    assert len(open_encoded(tmp_path / "shards", files="shard.00000.mds")) == 9
    with pytest.raises(ConfigurationError, match="asked for"):
        held_in_files(tmp_path / "shards", fields=fields, val_files="*")
    with pytest.raises(ConfigurationError, match=r"no known layout .*do not belong to '\*'"):
        held_in_files(tmp_path, val_files="*")


@pytest.mark.parametrize("content", ["mean_logvar", "mean_std"])
def test_a_posterior_in_one_field_or_in_two(tmp_path, content):
    logvar = np.random.default_rng(4).normal(-3.0, 1.0, LATENTS.shape).astype(np.float32)
    width = logvar if content == "mean_logvar" else np.exp(logvar / 2)
    moments = np.concatenate([LATENTS, width], axis=1)
    save_file({"moments": moments, "mean": LATENTS, "logvar": logvar}, tmp_path / "a.safetensors")
    scale = 0.18215
    read = []
    for fields, numbers in (
        (EncodedFields("moments", label=None), EncodedNumbers(scale, content=content)),
        (EncodedFields("mean", "logvar", label=None), EncodedNumbers(scale)),
    ):
        data = EncodedData(str(tmp_path), fields=fields, numbers=numbers, statistics="none", held_out=5)
        data.setup("fit")
        read.append(next(iter(data.val_dataloader())))
        assert data.num_classes == 0
        assert data.latent_shape == SHAPE
    assert read[0].keys() == {"mean", "logvar", "index", "variant"}
    index = read[0]["index"]
    for batch in read:
        torch.testing.assert_close(batch["mean"], torch.from_numpy(LATENTS)[index] * scale)
        deviation = torch.from_numpy(np.exp(logvar / 2))[index] * scale
        torch.testing.assert_close((batch["logvar"] / 2).exp(), deviation, rtol=1e-4, atol=0)


def test_statistics_are_measured_declared_or_given(tmp_path):
    safetensors(tmp_path)
    vae = DiffusersModelConfig(
        config_fields={"_class_name": "AutoencoderKL", "block_out_channels": [32], "scaling_factor": 0.5}
    )
    for statistics, mean, std in (
        ("measured", LATENTS.mean((0, 2, 3)), LATENTS.std((0, 2, 3))),
        ("declared", np.zeros(4), np.full(4, 2.0)),
        (ChannelScaling([1.0] * 4, [4.0] * 4), np.ones(4), np.full(4, 4.0)),
    ):
        autoencoder = vae if statistics == "declared" else AutoencoderConfig(1, 4, 8)
        data = EncodedData(str(tmp_path), statistics=statistics, autoencoder=autoencoder, held_out=1)
        data.setup("fit")
        np.testing.assert_allclose(data.codec.mean, mean, atol=0.5 if statistics == "measured" else 0)
        np.testing.assert_allclose(data.codec.std, std, rtol=0.1 if statistics == "measured" else 0)
        item = data.dataset[4, 0]["latents"]
        torch.testing.assert_close(data.codec.denormalize(item[None])[0], torch.from_numpy(LATENTS[4]))
    for statistics in (ChannelScaling([0.0] * 3, [1.0] * 3), ChannelScaling([0.0] * 4, [0.0] * 4)):
        with pytest.raises(ConfigurationError, match="statistics must be 4 means and 4 standard deviations above 0"):
            EncodedData(str(tmp_path), statistics=statistics, held_out=5).setup("fit")
    with pytest.raises(ConfigurationError, match=r"the latents have 4 channels, but the autoencoder has 8"):
        EncodedData(str(tmp_path), autoencoder=AutoencoderConfig(1, 8, 8), held_out=5).setup("fit")


def test_an_epoch_goes_on_where_it_stopped(tmp_path):
    data = EncodedData(str(tmp_path), fields=webdataset(tmp_path), held_out=5, batch_size=4, num_workers=2)
    data.setup("fit")
    whole = [batch["index"].tolist() for batch in make_resumable(data.train_dataloader(), seed=1)]
    first = make_resumable(data.train_dataloader(), seed=1)
    begun, iterator = [], iter(first)
    for _ in range(2):
        begun.append(next(iterator)["index"].tolist())
    second = make_resumable(data.train_dataloader(), seed=1)
    second.load_state_dict(first.state_dict())
    assert begun + [batch["index"].tolist() for batch in second] == whole
    assert sorted(i for batch in whole for i in batch) == data.train_index


# Refusals ------------------------------------------------------------------------------------------------------------


class Trap:
    """Object that writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_nothing_is_unpickled(tmp_path):
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    (tmp_path / "pth").mkdir()
    (tmp_path / "pth/000.pth").write_bytes(trap)
    with pytest.raises(ConfigurationError, match=r"000.pth is pickled, and reading a pickle runs"):
        open_encoded(tmp_path / "pth")
    (tmp_path / "tar").mkdir()
    with tarfile.open(tmp_path / "tar/0.tar", "w") as archive:
        member = tarfile.TarInfo("0.latents.pyd")
        member.size = len(trap)
        archive.addfile(member, io.BytesIO(trap))
    with pytest.raises(ConfigurationError, match=r"the file .latents.pyd is pickled"):
        open_encoded(tmp_path / "tar").read(0, ["latents.pyd"])
    (tmp_path / "mds").mkdir()
    write_mds(tmp_path / "mds", {"z": ("pkl", None)}, {"z": [trap] * ROWS}, PARTS)
    with pytest.raises(ConfigurationError, match="a column encoded as pkl is pickled"):
        open_encoded(tmp_path / "mds").read(0, ["z"])
    (tmp_path / "npy").mkdir()
    objects = io.BytesIO()
    np.save(objects, np.array([Trap(tmp_path / "sprung")], dtype=object), allow_pickle=True)
    with tarfile.open(tmp_path / "npy/0.tar", "w") as archive:
        member = tarfile.TarInfo("0.latents.npy")
        member.size = len(objects.getvalue())
        archive.addfile(member, io.BytesIO(objects.getvalue()))
    with pytest.raises(ConfigurationError, match=r"cannot be read as webdataset: .*allow_pickle"):
        open_encoded(tmp_path / "npy").read(0, ["latents.npy"])
    assert not (tmp_path / "sprung").exists()


def test_files_that_cannot_be_read_are_refused_with_the_reason(tmp_path):
    np.save(tmp_path / "latents.npy", LATENTS)
    with pytest.raises(ConfigurationError, match=r"latents.npy is a NumPy file, .*safetensors.numpy.save_file"):
        open_encoded(tmp_path)
    for name, layout in (("0.tar", "webdataset"), ("0.parquet", "parquet")):
        folder = tmp_path / layout
        folder.mkdir()
        (folder / name).write_bytes(b"neither")
        with pytest.raises(
            ConfigurationError, match=f"{name}, or another of the 1 files, cannot be read as {layout}: "
        ):
            open_encoded(folder)
    (tmp_path / "gaps").mkdir()
    pq.write_table(pa.table({"z": [[1.0], None]}), tmp_path / "gaps/0.parquet")
    with pytest.raises(ConfigurationError, match="row 1 has no 'z'"):
        open_encoded(tmp_path / "gaps").read(1, ["z"])


def rewrite_index(folder, number, **changes):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    index["shards"][number] |= changes
    path.write_text(json.dumps(index))


def test_shards_that_cannot_be_read_say_why(tmp_path):
    (tmp_path / "mds").mkdir()
    write_mds(tmp_path / "mds", {"y": ("int", 8)}, {"y": [np.int64(0).tobytes()] * ROWS}, PARTS)
    (tmp_path / "mds/shard.00001.mds").rename(tmp_path / "outside.mds")
    with pytest.raises(ConfigurationError, match=r"shard.00001.mds is missing\."):
        open_encoded(tmp_path / "mds")
    rewrite_index(tmp_path / "mds", 1, compression="zstd:3", zip_data={"basename": "shard.00001.mds.zstd"})
    with pytest.raises(ConfigurationError, match=r"00001.mds is missing; unpack the compressed shards first .zstd -d"):
        open_encoded(tmp_path / "mds")
    size = (tmp_path / "outside.mds").stat().st_size
    for name in ("../outside.mds", str(tmp_path / "outside.mds")):
        rewrite_index(tmp_path / "mds", 1, raw_data={"basename": name, "bytes": size}, zip_data=None)
        with pytest.raises(ConfigurationError, match=f"index.json lists '{name}', which is not in it"):
            open_encoded(tmp_path / "mds")
    (tmp_path / "outside.mds").rename(tmp_path / "mds/shard.00001.mds")
    rewrite_index(tmp_path / "mds", 1, raw_data={"basename": "shard.00001.mds", "bytes": size + 1})
    with pytest.raises(ConfigurationError, match=r"shard.00001.mds is incomplete"):
        open_encoded(tmp_path / "mds")


def test_files_of_different_fields_or_lengths_are_refused(tmp_path):
    save_file({"latents": LATENTS, "labels": LABELS[:-1]}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigurationError, match=r"a.safetensors differ in length: .*'labels': 22"):
        open_encoded(tmp_path)
    save_file({"latents": LATENTS, "labels": LABELS}, tmp_path / "a.safetensors")
    save_file({"latents": LATENTS}, tmp_path / "b.safetensors")
    with pytest.raises(
        ConfigurationError, match=r"b.safetensors holds the fields latents, and .*a.safetensors holds labels, "
    ):
        open_encoded(tmp_path)
    assert len(open_encoded(tmp_path, files="a.*")) == ROWS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"fields": EncodedFields("vae")},
            r"fields.latents is 'vae', but .* has 'labels', 'latents'|'latents', 'labels'",
        ),
        ({"num_classes": 3}, r"the label of row \d+ is \d, num_classes 3"),
        ({"numbers": EncodedNumbers(shape=[24, 1, 1], content="mean_std"), "num_classes": 3}, "the label of row"),
        ({"held_out": ROWS}, f"held_out must be at least 1 and below {ROWS}, the number of rows, .*, got {ROWS}"),
        ({"layout": "parquet"}, r"no .parquet files \(layout parquet\)"),
        ({"files": "*.tar"}, "no known layout"),
        ({"folder": "/nowhere"}, "there is no folder /nowhere"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": "4"}, "batch_size must be a whole number of at least 1, got '4'"),
        ({"num_classes": "7"}, "num_classes must be a whole number of at least 0 or null, got '7'"),
        ({"layout": "zip"}, "layout must be one of auto, safetensors, .*, got 'zip'"),
        (
            {"numbers": EncodedNumbers([1.0, 2.0])},
            r"numbers.scale must be one number or 4, one for each channel, got \[1.0, 2",
        ),
        (
            {"numbers": EncodedNumbers(zero=[0.0] * 8)},
            r"numbers.zero must be one number or 4, one for each channel, got \[0",
        ),
        (
            {"numbers": EncodedNumbers(shape=[4, 4, 4])},
            r"numbers.shape must be a shape with as many numbers as a row, 24, got \[4, 4, 4\]",
        ),
        ({"statistics": "guessed"}, "statistics must be measured, declared, none, .*, got 'guessed'"),
        ({"statistics": "declared"}, "declared needs the autoencoder"),
    ],
)
def test_mistakes_are_told(tmp_path, arguments, message):
    safetensors(tmp_path)

    def use() -> None:
        data = EncodedData(**{"folder": str(tmp_path), "held_out": 5, "statistics": "none", **arguments})
        data.setup("fit")
        list(data.train_dataloader())

    with pytest.raises(ConfigurationError, match=message):
        use()
    with pytest.raises(ConfigurationError, match=r"EncodedData: numbers.scale must be above 0, got 0.0"):
        EncodedNumbers(scale=[1.0, 0.0])
    with pytest.raises(ConfigurationError, match=r"fields.logvar must be of the latents' shape, \[4, 3, 2\], got \[3"):
        EncodedNumbers().read(LATENTS[0], LATENTS[0, 0])
    with pytest.raises(ConfigurationError, match=r"numbers.scale must be above 0, got '2'"):
        EncodedNumbers(scale="2")
    with pytest.raises(ConfigurationError, match=r"numbers.zero must be a number, got nan"):
        EncodedNumbers(zero=float("nan"))
    with pytest.raises(ConfigurationError, match=r"shape must be \[c, h, w\], all at least 1, got 24"):
        EncodedNumbers(shape=24)
    with pytest.raises(ConfigurationError, match=r"numbers.raw must be one of uint8, .*, got 'float64'"):
        EncodedNumbers(raw="float64")
