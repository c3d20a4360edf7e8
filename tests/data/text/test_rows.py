import bz2
import csv
import gzip
import json
import logging
import lzma
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from lit_efficient import ConfigurationError, LanguageData
from lit_efficient.data.text.chat_formats import recognise
from lit_efficient.data.text.reading import PairReader, Reader
from lit_efficient.data.text.rows import open_sources
from lit_efficient.files import file_hashes

ROWS = [{"instruction": 'Say "two,\nthree"', "output": "Zwölf; ä"}, {"instruction": "x" * 200_000, "output": "long"}]


def read(path: Path) -> list[Any]:
    (source,) = open_sources(str(path))
    return [row for _, row in source.rows()]


def write_table(path: Path, sign: str, encoding: str = "utf-8") -> Path:
    with path.open("w", encoding=encoding, newline="") as file:
        table = csv.DictWriter(file, ["instruction", "output"], delimiter=sign)
        table.writeheader()
        table.writerows(ROWS)
    return path


@pytest.mark.parametrize(("name", "sign"), [("t.csv", ","), ("t.tsv", "\t"), ("semicolons.csv", ";"), ("T.CSV", ",")])
def test_tables_are_read_as_rows(tmp_path: Path, name: str, sign: str) -> None:
    path = write_table(tmp_path / name, sign, "utf-8-sig")
    assert read(path) == ROWS
    assert recognise(read(path), name)[0] == "alpaca"
    assert not open_sources(str(path))[0].is_text


def test_compressed_files_are_what_is_in_them(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(write_table(tmp_path / "b.csv", ",").read_bytes()))
    (tmp_path / "b.csv").unlink()
    (tmp_path / "README.md").write_text("# Of the data")
    sources = open_sources(str(tmp_path))
    assert [source.name for source in sources] == ["a.jsonl.gz", "b.csv.gz"]
    assert [[row for _, row in source.rows()] for source in sources] == [ROWS, ROWS]
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"a text"))
    assert read(tmp_path / "c.txt.gz") == [{"text": "a text"}]


@pytest.mark.parametrize("cut", [-20, 10])
def test_a_compressed_file_that_ends_early_is_refused(tmp_path: Path, cut: int) -> None:
    lines = "".join(json.dumps({"text": str(number)}) + "\n" for number in range(2000)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:cut])
    with pytest.raises(ConfigurationError, match="cannot be read to its end"):
        read(tmp_path / "a.jsonl.gz")


def test_json_may_hold_its_rows_in_an_object(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": "1", "tags": ["x"], "data": ROWS}))
    assert read(path) == ROWS
    turns = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text(json.dumps(turns))
    assert read(path) == [turns]
    path.write_text("3")
    with pytest.raises(ConfigurationError, match="must hold a list of objects, got a int"):
        read(path)


def test_a_row_of_another_length_is_malformed_and_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,b\nc\nd,e,f\n")
    assert read(path) == [{"text": "a", "label": "b"}, "1 cells of 2", "3 cells of 2"]
    path.write_bytes("text\nä\n".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"a.csv is no table of UTF-8 text"):
        read(path)
    path.write_text('text\n"a')
    with pytest.raises(ConfigurationError, match=r"a.csv is no table"):
        read(path)


def test_the_end_of_a_single_text_is_held_out(tmp_path: Path) -> None:
    lines = [f"line {number} of a text\n" for number in range(200)]
    (tmp_path / "a.txt").write_text("".join(lines))
    arguments: Any = {"max_length": 8192, "batch_size": 1, "cache_dir": str(tmp_path), "val_fraction": 0.1}
    data = LanguageData(train=str(tmp_path / "a.txt"), **arguments)
    data.prepare_data()
    data.setup()
    assert data.train_rows is not None
    assert data.val_rows is not None
    texts = [data.tokenizer.decode(rows[0][0][0].tolist()) for rows in (data.train_rows, data.val_rows)]
    assert "".join(texts) == "".join(lines)
    assert texts[1].startswith("line 1")
    assert 0.08 < len(texts[1]) / len("".join(texts)) < 0.12
    (tmp_path / "a.txt").write_text("one line")
    with pytest.raises(ConfigurationError, match=r"cannot be split into training and validation\. Set val"):
        LanguageData(train=str(tmp_path / "a.txt"), **arguments).prepare_data()


def test_other_names_of_the_same_kinds_are_no_raw_text(tmp_path) -> None:
    (tmp_path / "a.jsonlines").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    (tmp_path / "b.tab").write_text("text\tlabel\na, b\tc\n")
    (tmp_path / "C.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (tmp_path / "d.txt").write_text("a text", "utf-8-sig")
    assert read(tmp_path / "a.jsonlines") == read(tmp_path / "C.JSONL.GZ") == [{"text": "a"}]
    assert read(tmp_path / "b.tab") == [{"text": "a, b", "label": "c"}]
    assert read(tmp_path / "d.txt") == [{"text": "a text"}]


@pytest.mark.parametrize(("suffix", "pack"), [(".bz2", bz2.compress), (".xz", lzma.compress), (".lzma", lzma.compress)])
def test_what_python_unpacks_is_read_as_what_is_in_it(tmp_path: Path, suffix: str, pack: Any) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    table = write_table(tmp_path / "a.csv", ",").read_bytes()
    for name, content, rows in (("a.jsonl", lines, ROWS), ("a.csv", table, ROWS), ("a.txt", b"a", [{"text": "a"}])):
        (tmp_path / f"{name}{suffix}").write_bytes(pack(content))
        assert read(tmp_path / f"{name}{suffix}") == rows
    (tmp_path / f"b.jsonl{suffix}").write_bytes(pack(lines * 20)[:-20])
    with pytest.raises(ConfigurationError, match="cannot be read to its end"):
        read(tmp_path / f"b.jsonl{suffix}")
    damaged = bytearray(pack(lines * 20))
    damaged[len(damaged) // 2] ^= 255
    (tmp_path / f"b.jsonl{suffix}").write_bytes(damaged)
    with pytest.raises(ConfigurationError, match="cannot be read to its end"):
        read(tmp_path / f"b.jsonl{suffix}")


@pytest.mark.parametrize("name", ["a.yaml", "a.toml", "a.XML", "a.html", "a.jsonl.zst", "a.zip", "a.tar.gz", "a.arrow"])
def test_files_of_other_kinds_are_no_text_by_themselves(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_text("- {text: a}\n")
    with pytest.raises(
        ConfigurationError, match=rf"{name} has an unsupported suffix. Supported are .*\.jsonl, .*\.txt, .*\.xz"
    ):
        open_sources(str(tmp_path / name))
    with pytest.raises(ConfigurationError, match=r"holds no data. Supported are files that end with \.jsonl"):
        open_sources(str(tmp_path))
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "book").write_text("a text")  # as data sets of text are called, without any suffix
    with caplog.at_level(logging.INFO):
        assert [source.name for source in open_sources(str(tmp_path))] == ["a.jsonl"]
    assert f"1 files of rows; passed over {', '.join(sorted([name, 'book']))}" in caplog.text
    assert read(tmp_path / "book") == [{"text": "a text"}]


@pytest.mark.parametrize("reader", [Reader, PairReader, partial(Reader, kind="alpaca")])
def test_a_table_without_names_is_told_how_to_get_them(tmp_path: Path, reader: Any) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"How much is two and two?,{'Four. ' * 99}\nAnd three and three?,Six.\n")
    with pytest.raises(
        ConfigurationError, match=r"'How much is two and two\?', 'Four. .*first row.*names above it"
    ) as error:
        reader(open_sources(str(path)))
    assert len(str(error.value)) < 500
    path.write_text("instruction,output,output\na,b,c\n")
    with pytest.raises(ConfigurationError, match="two columns have the name 'output'"):
        read(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_a_bomb_is_refused(name, tmp_path):
    (tmp_path / name).write_bytes(gzip.compress(bytes(1 << 26)) * 5)
    (source,) = open_sources(str(tmp_path / name))
    with pytest.raises(ConfigurationError, match="unpacks to 200 times its size"):
        list(source.rows())


def test_a_large_source_is_hashed_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("lit_efficient.data.text.rows._LARGE", 10)
    hashed: list[Path] = []
    kept = file_hashes.sha256_of
    monkeypatch.setattr(file_hashes, "sha256_of", lambda path: hashed.append(path) or kept(path))
    source = tmp_path / "a.txt"
    source.write_text("a text of more bytes than ten")
    os.utime(source, (1, 1))
    first, again = (open_sources(str(source))[0].digest for _ in range(2))
    assert (first, len(hashed)) == (again, 1)
    source.write_text("another text of as many bytes")
    assert open_sources(str(source))[0].digest != first


def test_of_a_folder_with_splits_only_one_is_read(tmp_path: Path) -> None:
    """As by load_dataset: the rows of a test split would be learned silently."""
    folder = tmp_path / "rows"
    (folder / "data").mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001", "validation-00000-of-00001"):
        (folder / f"data/{name}.jsonl").write_text(json.dumps({"text": name}))
    for split in ("train", "validation", "test"):
        found = [row for source in open_sources(str(folder), split=split) for _, row in source.rows()]
        theirs = load_dataset(str(folder), split=split, cache_dir=str(tmp_path / "cache"))
        assert [row["text"] for row in found] == list(theirs["text"])
