"""Tests of image tables: each layout of files gives the same images, labels and captions."""

import io
import json
import pickle
import re
import shutil
import subprocess
import tarfile

import datasets
import pyarrow
import pytest
import torch
from pyarrow import parquet

from lit_efficient import ImageColumns, ImageData, ImageSplits, ImageView
from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files import tables
from tests.data.images.image_kit import encoded, number_of, picture, write, write_metadata

COUNT = 8
CAPTIONS = [f"picture {number}, \u00e9" for number in range(COUNT)]


def opened(train, **arguments):
    data = ImageData(train=str(train), view=ImageView(16), **{"val_fraction": 0.3, "batch_size": 3} | arguments)
    data.prepare_data()
    data.setup("fit")
    return data


def contents(data):
    """Return {number of the picture: (name of its class, caption)}."""
    found = {}
    for index in range(len(data.dataset)):
        item = data.dataset[(index, 0)]
        label = data.class_names[item["labels"]] if "labels" in item else None
        found[number_of(item["images"])] = (label, item.get("captions"))
    assert sorted(data.train_index + data.val_index) == list(range(len(data.dataset))) == list(range(len(found)))
    return found


def rows(image=lambda number: encoded(picture(number))):
    return {
        "image": [image(number) for number in range(COUNT)],
        "label": [number % 2 for number in range(COUNT)],
        "text": CAPTIONS,
    }


def table(**changes):
    return pyarrow.table({**rows(), **changes})


EXPECTED = {number: ("01"[number % 2], CAPTIONS[number]) for number in range(COUNT)}
NAMED = {number: (("cat", "dog")[number % 2], CAPTIONS[number]) for number in range(COUNT)}


def test_subfolders_are_classes(tmp_path):
    write(tmp_path, [f"{'dog' if n % 2 else 'cat'}/deep/{n}.png" for n in range(COUNT)])
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.png").write_bytes(b"")
    data = opened(tmp_path)
    assert contents(data) == {number: (name, None) for number, (name, _) in NAMED.items()}
    assert (data.num_classes, data.class_names) == (2, ["cat", "dog"])
    assert contents(opened(tmp_path, columns=ImageColumns(label=None))) == dict.fromkeys(range(COUNT), (None, None))


def test_subfolders_with_the_names_of_splits_are_no_classes(tmp_path):
    write(tmp_path, [f"train/{'dog' if n % 2 else 'cat'}/{n}_test.png" for n in range(COUNT)])
    write(tmp_path, ["val/cat/0.png"])
    assert contents(opened(tmp_path)) == {number: (name, None) for number, (name, _) in NAMED.items()}
    data = opened(tmp_path, val=str(tmp_path))
    assert (len(data.train_index), len(data.val_index), data.class_names) == (COUNT, 1, ["cat", "dog"])
    with pytest.raises(ConfigurationError, match="has train, val: not exactly one of them is the split 'test'"):
        opened(tmp_path, splits=ImageSplits("test"))


def test_classes_with_numbers_as_names_are_in_their_order(tmp_path):
    write(tmp_path, [f"{n + 4}/{n}.png" for n in range(COUNT)])
    assert opened(tmp_path).class_names == [str(n + 4) for n in range(COUNT)]


@pytest.mark.parametrize("folder", ["", "cat/"])
def test_captions_beside_the_images(tmp_path, folder):
    write(tmp_path, [f"{folder}{n}.png" for n in range(COUNT)], [f" {caption}\n" for caption in CAPTIONS])
    data = opened(tmp_path)
    assert contents(data) == {number: (None, caption) for number, (_, caption) in NAMED.items()}
    assert data.num_classes == 0
    batch = next(iter(data.train_dataloader()))
    assert batch["captions"] == [CAPTIONS[number_of(image)] for image in batch["images"]]
    assert "labels" not in batch


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_metadata_of_an_image_folder(tmp_path, kind):
    write(tmp_path, [f"a/{n}.png" for n in range(COUNT)] + ["a/more.png"])
    listed = [
        {"file_name": f"{'' if kind == 'csv' else 'a/'}{n}.png", "text": CAPTIONS[n], "label": ("cat", "dog")[n % 2]}
        for n in reversed(range(COUNT))
    ]
    write_metadata(tmp_path / "a" if kind == "csv" else tmp_path, listed, kind)
    assert contents(opened(tmp_path)) == NAMED


def test_metadata_with_columns_of_other_names(tmp_path):
    write(tmp_path, [f"{n}.png" for n in range(COUNT)])
    listed = [{"file_name": f"{n}.png", "words": CAPTIONS[n], "kind": n % 2, "text": "no"} for n in range(COUNT)]
    write_metadata(tmp_path, listed)
    assert contents(opened(tmp_path, columns=ImageColumns(label="kind", caption="words"))) == EXPECTED


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path):
    folder = write(tmp_path / "data", [f"{'dog' if n % 2 else 'cat'}/{n}.png" for n in range(COUNT)])
    (folder / "dog").rename(tmp_path / "elsewhere")
    (folder / "dog").symlink_to(tmp_path / "elsewhere")
    (folder / "cat/again").symlink_to(folder)
    (folder / "cat/here").symlink_to(folder / "cat")
    (tmp_path / "link").symlink_to(folder)
    for name in ("data", "link"):
        assert contents(opened(tmp_path / name)) == {number: (name, None) for number, (name, _) in NAMED.items()}


def test_links_to_one_file_are_several_images(tmp_path):
    """Snapshots of the hub link to files that are named by their content."""
    write(tmp_path / "blobs", [f"{n}.png" for n in range(4)])
    (tmp_path / "data").mkdir()
    for number in range(COUNT):
        (tmp_path / f"data/{number}.png").symlink_to(tmp_path / f"blobs/{number % 4}.png")
    write_metadata(tmp_path / "data", [{"file_name": f"./{n}.png", "text": CAPTIONS[n]} for n in range(COUNT)])
    data = opened(tmp_path / "data")
    assert data.dataset.captions == [[caption] for caption in CAPTIONS]
    assert [number_of(data.dataset[(n, 0)]["images"]) for n in range(COUNT)] == [0, 1, 2, 3] * 2


def test_metadata_above_the_folders_of_splits(tmp_path):
    names = [f"{'validation' if n % 4 == 3 else 'train'}/{n}.png" for n in range(COUNT)]
    write(tmp_path, names)
    write_metadata(tmp_path, [{"file_name": names[n], "text": CAPTIONS[n]} for n in range(COUNT)])
    assert contents(opened(tmp_path)) == {n: (None, CAPTIONS[n]) for n in range(COUNT) if n % 4 != 3}
    assert sorted(opened(tmp_path, val=str(tmp_path)).dataset.captions) == [[caption] for caption in sorted(CAPTIONS)]
    write_metadata(tmp_path, [{"file_name": "train/99.png", "text": "?"}])
    with pytest.raises(ConfigurationError, match=r"metadata.jsonl, line 1: there is no image 'train/99.png'"):
        opened(tmp_path)
    write_metadata(tmp_path, [{"file_name": "validation/3.png", "text": "?"}])
    with pytest.raises(ConfigurationError, match=r"metadata.jsonl lists no image of .*train"):
        opened(tmp_path)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_any_character_may_be_in_a_caption(tmp_path, kind):
    captions = [f"a\u2028b \x85 \x0c \x1c {n}" + (", \r\n c\n" if kind == "csv" else "") for n in range(COUNT)]
    write(tmp_path, [f"{n}.png" for n in range(COUNT)])
    rows = [{"file_name": f"{n}.png", "text": captions[n]} for n in range(COUNT)]
    if kind == "csv":
        write_metadata(tmp_path, rows, kind)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (tmp_path / "metadata.jsonl").write_bytes("\r\n".join(lines).encode())
    assert contents(opened(tmp_path)) == {n: (None, captions[n]) for n in range(COUNT)}


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("kind", ["images", "bytes", "dicts"])
def test_data_sets_saved_to_disk(tmp_path, kind):
    given = rows({"images": picture, "bytes": lambda n: encoded(picture(n))}.get(kind, as_dict))
    features = datasets.Dataset.from_dict(given).features.copy()
    features["label"] = datasets.ClassLabel(names=["cat", "dog"])
    if kind == "images":
        features["image"] = datasets.Image()
    saved = datasets.Dataset.from_dict(given, features=features)
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    assert contents(opened(tmp_path / "one")) == NAMED
    datasets.DatasetDict({"train": saved, "other": saved.select([0])}).save_to_disk(tmp_path / "both")
    assert contents(opened(tmp_path / "both")) == NAMED
    data = opened(tmp_path / "both", val=str(tmp_path / "both"), splits=ImageSplits(val="other"))
    assert (len(data.train_index), len(data.val_index)) == (COUNT, 1)
    assert number_of(data.dataset[(COUNT, 0)]["images"]) == 0
    with pytest.raises(ConfigurationError, match=r"has no split 'validation'. It has train, other"):
        opened(tmp_path / "both", val=str(tmp_path / "both"))
    arrows = sorted((tmp_path / "one").glob("*.arrow"))
    (tmp_path / "arrows").mkdir()
    for arrow in arrows:
        (tmp_path / "arrows" / arrow.name).write_bytes(arrow.read_bytes())
    assert contents(opened(tmp_path / "arrows")) == NAMED


def as_dict(number):
    return {"bytes": encoded(picture(number)), "path": None}


def test_rows_that_name_files_follow_their_content(tmp_path):
    def saved(*paths):
        features = datasets.Features({"image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}})
        rows = [{"bytes": None, "path": str(path)} for path in paths]
        datasets.Dataset.from_dict({"image": rows}, features=features).save_to_disk(tmp_path / "saved")
        return opened(tmp_path / "saved")

    write(tmp_path / "saved" / "files", [f"{n}.png" for n in range(COUNT)])
    places = [tmp_path / "saved" / "files", "files"]
    data = saved(*(f"{places[n % 2]}/{n}.png" for n in range(COUNT)))
    assert sorted(contents(data)) == list(range(COUNT))
    picture(20).save(tmp_path / "saved" / "files" / "3.png")
    assert opened(tmp_path / "saved").identity()["data"] != data.identity()["data"]
    for path in (tmp_path / "secret.png", "../secret.png", "files/../../secret.png"):
        with pytest.raises(ConfigurationError, match=r"saved names the image .*secret.png, which is not in .*saved"):
            saved(path)


@pytest.mark.parametrize("kind", ["bytes", "dicts"])
def test_parquet(tmp_path, kind):
    whole = pyarrow.table(rows(as_dict if kind == "dicts" else lambda n: encoded(picture(n))))
    parquet.write_table(whole, tmp_path / "one.parquet", row_group_size=3)
    assert contents(opened(tmp_path / "one.parquet")) == EXPECTED
    folder = tmp_path / "repo" / "data"
    folder.mkdir(parents=True)
    parquet.write_table(whole[:5], folder / "train-00000-of-00002.parquet")
    parquet.write_table(whole[5:], folder / "train-00001-of-00002.parquet")
    parquet.write_table(whole[:1], folder / "validation-00000-of-00001.parquet")
    data = opened(tmp_path / "repo", val=str(tmp_path / "repo"))
    assert (len(data.train_index), len(data.val_index)) == (8, 1)
    assert [number_of(data.dataset[(n, 0)]["images"]) for n in range(9)] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    with pytest.raises(ConfigurationError, match=r"no files of split 'test'. It has train, validation"):
        opened(tmp_path / "repo", splits=ImageSplits("test"))


def test_a_mapped_copy_that_was_damaged_is_refused_before_it_is_read(tmp_path, monkeypatch):
    parquet.write_table(pyarrow.table(rows(as_dict)), tmp_path / "one.parquet")
    monkeypatch.setattr(tables, "_checked", set())
    opened(tmp_path / "one.parquet", cache_dir=str(tmp_path / "cache"))
    (copy,) = (tmp_path / "cache" / "datasets").rglob("*.arrow")
    raw = copy.read_bytes()
    place = raw.index(b"picture 3")
    copy.write_bytes(raw[:place] + b"P" + raw[place + 1 :])
    tables._checked.clear()  # as in a new process
    with pytest.raises(CheckpointError, match=r"\.arrow is missing, or not what was written"):
        opened(tmp_path / "one.parquet", cache_dir=str(tmp_path / "cache"))


def test_parquet_as_data_sets_writes_it_knows_the_names_of_classes(tmp_path):
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "text": datasets.Value("string"),
        }
    )
    given = rows(picture)
    given["picture"] = given.pop("image")
    datasets.Dataset.from_dict(given, features=features).to_parquet(tmp_path / "x.parquet")
    assert contents(opened(tmp_path)) == NAMED


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_rows_are_read_by_workers(tmp_path, kind):
    if kind == "parquet":
        parquet.write_table(table(), tmp_path / "x.parquet", row_group_size=2)
    else:
        datasets.Dataset.from_dict(rows()).save_to_disk(tmp_path)
    data = opened(tmp_path, num_workers=2)
    dataset = pickle.loads(pickle.dumps(data.dataset))  # as spawned workers are given it
    assert torch.equal(dataset[(5, 0)]["images"], data.dataset[(5, 0)]["images"])
    alone, helped = (list(opened(tmp_path, num_workers=n).train_dataloader()) for n in (0, 2))
    for ours, theirs in zip(alone, helped, strict=True):
        assert torch.equal(ours["images"], theirs["images"])
        assert ours["captions"] == theirs["captions"]


def broken(folder, kind):
    """Break ``folder`` in one way."""
    names = [f"{n}.png" for n in range(COUNT)]
    listed = [{"file_name": name, "text": "x", "label": 1} for name in names]
    if kind == "empty":
        folder.mkdir()
    elif kind in ("sidecar", "nothing said"):
        write(folder, names, [None if n == 4 and kind == "sidecar" else "x" for n in range(COUNT)])
    elif kind in ("plain", "mixed"):
        write(folder, names)
        if kind == "mixed":
            parquet.write_table(table(), folder / "x.parquet")
    elif kind in ("both", "file_name", "no image", "twice", "no json", "no label", "no caption", "unlisted"):
        write(folder, names)
        listed[2] |= {"no label": {"label": None}, "no caption": {"text": 3}}.get(kind, {})
        listed[2] |= {"no image": {"file_name": "20.png"}, "twice": {"file_name": "1.png"}}.get(kind, {})
        write_metadata(folder, [{"file": name} for name in names] if kind == "file_name" else listed)
        if kind == "both":
            write_metadata(folder, listed, "csv")
        if kind == "no json":
            (folder / "metadata.jsonl").write_text('{"file_name": "0.png"}\nnonsense\n')
    else:
        folder.mkdir()
        changed = {
            "numbers": {"image": list(range(COUNT))},
            "negative": {"label": [-1] * COUNT},
        }[kind]
        parquet.write_table(table(**changed), folder / "x.parquet")
    return folder


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        ("empty", {}, r"holds no image \(\.jpg, .*\), \.parquet, \.arrow or \.tar file"),
        ("mixed", {}, r"holds images and \.parquet\. Name one kind"),
        ("sidecar", {}, r"1 of 8 images have no caption beside them, the first is .*4\.png.*columns.caption: null"),
        ("plain", {"label": "kind"}, r"columns.label is 'kind', but .* holds no metadata\.jsonl"),
        ("both", {}, r"metadata\.jsonl and metadata\.csv\. Remove one"),
        ("file_name", {}, r"has no column file_name\. Its columns are file\."),
        ("no image", {}, r"metadata\.jsonl, line 3: there is no image '20\.png'"),
        ("twice", {}, r"line 3: the image '1\.png' is listed twice"),
        ("no json", {}, r"line 2 is no JSON"),
        ("no label", {}, r"line 3: the label in 'label' must be a number from 0 or a name, got None"),
        ("no caption", {}, r"line 3: the caption in 'text' must be a text, or a list of texts, got 3"),
        ("unlisted", {"caption": "words"}, r"columns.caption is 'words', but .* It has file_name, text, label"),
        ("negative", {}, r"row 1: the label in 'label' must be a number from 0 or a name, got -1"),
        ("numbers", {"image": "image"}, r"the column 'image' of .* must hold bytes or a struct .*, not int64"),
        ("numbers", {"image": "picture"}, r"columns.image is 'picture', but .* It has image, label, text"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, kind, columns, message):
    with pytest.raises(ConfigurationError, match=f"(?s)ImageData: .*{message}"):
        opened(broken(tmp_path / "x", kind), columns=ImageColumns(**columns))


def test_images_of_formats_that_are_not_read_are_named(tmp_path):
    (tmp_path / "phone").mkdir()
    (tmp_path / "phone" / "IMG_1.HEIC").write_bytes(b"ftypheic")
    with pytest.raises(ConfigurationError, match=r"no image .* 1 images, the first is IMG_1.HEIC, have formats"):
        opened(tmp_path / "phone")
    write(tmp_path / "phone", [f"{n}.png" for n in range(COUNT)])
    with pytest.warns(UserWarning, match=r"left out: 1 images, the first is IMG_1.HEIC, .* Convert them"):
        assert len(contents(opened(tmp_path / "phone"))) == COUNT


def test_paths_that_are_nothing(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"")
    (tmp_path / "b.parquet").write_bytes(b"no")
    for name, message in (
        ("there", "no such folder or file: .*there"),
        ("a.zip", r"is a file that is neither \.parquet, \.arrow nor \.tar\. Unpack it, and name the folder"),
        ("b.parquet", "b.parquet, or another of the 1 files, cannot be read as parquet"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            opened(tmp_path / name)


def test_one_of_several_sources_without_captions_is_an_error(tmp_path):
    write(tmp_path / "with", [f"{n}.png" for n in range(4)], ["x"] * 4)
    write(tmp_path / "without", [f"{n}.png" for n in range(4)])
    with pytest.raises(ConfigurationError, match=r"with has captions, without has none.*columns.caption: null"):
        opened(tmp_path / "with", val=str(tmp_path / "without"))
    both = ImageData(
        train=[str(tmp_path / "with"), str(tmp_path / "without")],
        columns=ImageColumns(caption=None),
        view=ImageView(16),
    )
    both.setup("fit")
    assert len(both.dataset) == 8


def test_a_class_that_is_not_trained_on_is_an_error(tmp_path):
    write(tmp_path / "train", ["cat/0.png", "dog/1.png"])
    write(tmp_path / "val", ["cat/0.png", "emu/1.png"])
    with pytest.raises(ConfigurationError, match=r"the label 'emu' is not among the 2 classes .* \(cat, dog\)"):
        opened(tmp_path / "train", val=str(tmp_path / "val"))


def test_folders_of_kohya_are_read_as_repeats_and_it_is_said(tmp_path, caplog):
    write(tmp_path, ["3_red cat/0.png", "3_red cat/1.png", "1_dog/2.png"], [None, "a cat, sitting", None])
    caplog.set_level("INFO")
    data = opened(tmp_path, val_fraction=0)
    assert "an epoch shows the images 1 times dog, 3 times red cat (columns.subfolders: classes reads" in caplog.text
    shown = [number_of(item["images"]) for item in map(data.dataset.__getitem__, [(i, 0) for i in data.train_index])]
    assert sorted(shown) == [0, 0, 0, 1, 1, 1, 2]
    assert data.num_classes == 0
    captions = {number_of(data.dataset[(i, 0)]["images"]): data.dataset[(i, 0)]["captions"] for i in range(3)}
    assert captions == {0: "red cat", 1: "a cat, sitting", 2: "dog"}
    in_batches = [index for batch in data.train_dataloader() for index in batch["index"].tolist()]
    assert sorted(in_batches) == sorted(data.train_index)
    (tmp_path / "1_dog" / "2.txt").write_text("a dog")
    (tmp_path / "3_red cat" / "0.txt").write_text("a cat")
    classes = opened(tmp_path, val_fraction=0, columns=ImageColumns(subfolders="classes"))
    assert classes.class_names == ["1_dog", "3_red cat"]
    assert len(classes.train_index) == 3
    write(tmp_path, ["cats/3.png"])
    with pytest.raises(ConfigurationError, match="cats is not named like 10_cat"):
        opened(tmp_path, val_fraction=0, columns=ImageColumns(subfolders="repeats"))


@pytest.mark.parametrize("names", [("0_cat", "1_dog"), ("01_cat", "02_dog"), ("2_cat", "dog")])
def test_numbers_of_classes_are_no_repeats(tmp_path, names):
    write(tmp_path, [f"{names[n % 2]}/{n}.png" for n in range(6)])
    assert opened(tmp_path).class_names == sorted(names)


def test_a_tar_of_images_is_read_as_webdataset(tmp_path):
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for number in range(COUNT):
            parts = {"png": encoded(picture(number)), "txt": f"{CAPTIONS[number]}\n".encode()}
            for suffix, content in {**parts, "cls": str(number % 2).encode()}.items():
                member = tarfile.TarInfo(f"{number:03}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    assert contents(opened(tmp_path / "shard.tar", cache_dir=str(tmp_path / "cache"))) == EXPECTED
    (tmp_path / "shards").mkdir()
    (tmp_path / "shard.tar").rename(tmp_path / "shards" / "shard.tar")
    assert contents(opened(tmp_path / "shards", cache_dir=str(tmp_path / "cache"))) == EXPECTED


def test_a_tar_of_folders_is_refused_with_the_line_that_unpacks_it(tmp_path, monkeypatch):
    write(tmp_path, [f"{'dog' if n % 2 else 'cat'}/{n}.png" for n in range(COUNT)])
    with tarfile.open(tmp_path / "pets.tar", "w") as archive:
        for name in ("cat", "dog"):
            archive.add(tmp_path / name, name)
            shutil.rmtree(tmp_path / name)
    with pytest.raises(ConfigurationError, match=r"whose names may be classes\. Unpack it") as refused:
        opened(tmp_path / "pets.tar")
    monkeypatch.chdir(tmp_path)
    command = re.search(r"\((mkdir .*)\)", str(refused.value))[1]
    subprocess.run(command, shell=True, check=True)
    assert contents(opened(tmp_path / "pets")) == {number: (name, None) for number, (name, _) in NAMED.items()}


def test_a_tar_of_photographs_of_several_types_is_refused_with_the_line_that_unpacks_it(tmp_path, monkeypatch):
    names = [f"{n:03}.{'bmp' if n % 2 else 'png'}" for n in range(COUNT)]
    write(tmp_path / "photos", names)
    with tarfile.open(tmp_path / "some.tar", "w") as archive:
        for name in names:
            archive.add(tmp_path / "photos" / name, name)
    with pytest.raises(ConfigurationError, match=r"rows of different types \(bmp; png\).*Unpack it") as refused:
        opened(tmp_path / "some.tar")
    monkeypatch.chdir(tmp_path)
    subprocess.run(re.search(r"\((mkdir .*)\)", str(refused.value))[1], shell=True, check=True)
    assert len(contents(opened(tmp_path / "some"))) == COUNT
