"""Rows of files, folders and Hugging Face data sets, one at a time, each with the place to find it again.

A source is read as often as needed and never whole into memory. What cannot be read as a row (a line that is no JSON)
comes as the reason, so that it can be counted with its line number. No code of a data set is ever run.
"""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_efficient.errors import ConfigurationError, listed, refusal
from lit_efficient.files.cache import digest_of
from lit_efficient.files.file_hashes import hash_files
from lit_efficient.files.sums import sha256_of
from lit_efficient.internals.hugging_face import fingerprint, load_saved

_LARGE = 2**26  # bytes; what is larger is hashed once for its size and time
STDLIB_INSTRUCTIONS = "stdlib-instructions"
STDLIB_PACKAGES = "stdlib-packages"
ROW_SUFFIXES = (".jsonl", ".jsonlines", ".ndjson", ".json", ".csv", ".tsv", ".tab", ".parquet")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
_COMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".lzma": lzma.open}
READ = f"files that end with {', '.join(ROW_SUFFIXES + TEXT_SUFFIXES)}, compressed or not ({', '.join(_COMPRESSED)})"

Row = tuple[str, dict[str, Any] | str]
"""Where it stands ("data.jsonl:17"), and its keys and values, or the reason why it has none."""


@dataclass(frozen=True)
class Source:
    """Rows that can be read again and again."""

    name: str  # what the user called it, or the file's name
    rows: Callable[[], Iterator[Row]]  # begins to read; the order is always the same
    digest: str  # hash of the content; "" for a stream, which is not known before it is read
    is_text: bool = False  # whether every row is a file's text, whatever it holds
    hint: str = ""  # what may be wrong if no row has the keys of any format


def open_sources(
    name: str, *, split: str = "train", subset: str | None = None, streaming: bool = False
) -> list[Source]:
    """Find what a name in a config stands for; a folder of files is one source a file.

    Args:
        name: a file (.jsonl, .json, .csv, .tsv, .parquet, or a text; .gz, .bz2 or .xz after it), a folder of such
            files, a folder written by ``Dataset.save_to_disk``, ``stdlib-instructions``, ``stdlib-packages``, or the
            name of a data set on the Hugging Face hub.
        split: which split of a Hugging Face data set.
        subset: which configuration of a Hugging Face data set.
        streaming: read a data set of the hub while it is being downloaded.

    Raises:
        ConfigurationError: If there is no such thing, or nothing in it.
    """
    if name == STDLIB_INSTRUCTIONS:
        from lit_efficient.data.text.python_instructions import instructions

        return [source_of_rows(name, instructions())]
    if name == STDLIB_PACKAGES:
        return [_stdlib_packages()]
    path = Path(name).expanduser()
    if path.is_file():
        return [_file(path, path.name)]
    if path.is_dir():
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return [_saved(path, split)]
        found = sorted(p for p in path.rglob("*") if p.is_file())
        files = [file for file in found if _suffix(file) in ROW_SUFFIXES + TEXT_SUFFIXES]
        rows_only = [file for file in files if _suffix(file) in ROW_SUFFIXES and _suffix(file) != ".json"]
        files = rows_only or files  # a README beside the data is no data
        if not files:
            raise ConfigurationError(f"{name}: the folder holds no data: {READ} are taken.")
        taken = set(files)
        if passed := [file.name for file in found if file not in taken and not file.name.startswith(".")]:
            kind = "rows" if rows_only else "text"
            rank_zero_info(f"{name}: {len(files)} files of {kind}; passed over {listed(passed, 5)}")
        return [_file(file, file.relative_to(path).as_posix()) for file in files]
    if _suffix(path) in ROW_SUFFIXES + TEXT_SUFFIXES or path.is_absolute() or name.startswith((".", "~")):
        raise ConfigurationError(f"{name}: no such file or folder (looked for {path.absolute()}).")
    return [_hub(name, split, subset, streaming)]


def source_of_rows(name: str, rows: list[dict[str, Any]]) -> Source:
    """Rows that are in memory, as a source; the first one is called ``name:1``."""
    return Source(name, partial(_enumerated, rows, name), digest_of(rows))


def _enumerated(rows: list[dict[str, Any]], name: str) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        yield f"{name}:{number}", row


def _stdlib_packages() -> Source:
    """A text a file. None of the modules at the top of the library, which `STDLIB_INSTRUCTIONS` asks about."""
    from lit_efficient.data.text.text_files import EXCLUDE, find_files, read_texts, standard_library

    files = find_files([standard_library()], [".py"], EXCLUDE)
    texts = read_texts((name, path) for name, path in files if "/" in name).files
    digest = digest_of([[text.path, text.digest] for text in texts])
    rows = [(f"{STDLIB_PACKAGES}:{text.path}", {"text": text.text}) for text in texts]
    return Source(STDLIB_PACKAGES, partial(iter, rows), digest, is_text=True)


def halves(source: Source, held_out: float) -> tuple[Source, Source] | None:
    """One text as two, cut at the end of a line, the second about ``held_out`` of it; None if there are not two."""
    rows = [row for _, row in islice(source.rows(), 2)] if source.is_text else []
    texts = [row["text"] for row in rows if isinstance(row, dict)]
    if len(rows) != 1 or not texts:
        return None
    end = texts[0].rfind("\n", 0, int((1 - held_out) * len(texts[0]))) + 1
    parts = texts[0][:end], texts[0][end:]
    if not all(part.strip() for part in parts):
        return None
    first, last = (replace(source_of_rows(source.name, [{"text": part}]), is_text=True) for part in parts)
    return first, last


def _suffix(path: Path) -> str:
    """What kind of file it is, compressed or not."""
    lower = Path(path.name.lower())
    return Path(lower.stem).suffix if lower.suffix in _COMPRESSED else lower.suffix


def _open(path: Path) -> IO[bytes]:
    opened: IO[bytes] = _COMPRESSED.get(path.suffix.lower(), open)(path, "rb")
    packed = path.suffix.lower() in _COMPRESSED
    return io.BufferedReader(_Unpacked(opened, path.stat().st_size)) if packed else opened


class _Unpacked(io.RawIOBase):
    """What a compressed file holds, to a limit: text packs to a tenth, a gigabyte of zeros to a megabyte or less."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left = file, max(1 << 28, 200 * size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, origin: int = 0) -> int:
        return self._file.seek(offset, origin)

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise OSError("it unpacks to 200 times its size and more")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _file(path: Path, name: str) -> Source:
    readers = dict.fromkeys((".jsonl", ".jsonlines", ".ndjson"), _json_lines) | {".json": _json_list}
    readers |= {".parquet": _parquet} | dict.fromkeys((".csv", ".tsv", ".tab"), _table)
    readers |= dict.fromkeys((*TEXT_SUFFIXES, ""), _whole_text)
    reader = readers.get(_suffix(path))
    if reader is None:
        raise ConfigurationError(
            f"{path} is no data that is read: {READ} are. A text that is to be learned ends in .txt."
        )
    try:
        large = path.stat().st_size > _LARGE
        digest = hash_files(path, [path])[0] if large else sha256_of(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error
    hint = " The first row of a table names its columns: if this one's is data, put names above it." * (
        reader is _table
    )
    return Source(name, partial(_readable, reader, path, name), digest, reader is _whole_text, hint)


def _readable(reader: Callable[[Path, str], Iterator[Row]], path: Path, name: str) -> Iterator[Row]:
    try:
        yield from reader(path, name)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigurationError(f"{path} cannot be read to its end: {error}.") from error


def _whole_text(path: Path, name: str) -> Iterator[Row]:
    try:
        with _open(path) as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield name, f"no UTF-8 text: {error.reason} at byte {error.start}"
        return
    yield name, {"text": text}


def _json_lines(path: Path, name: str) -> Iterator[Row]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{name}:{number}", _row_of(line)


def _row_of(line: bytes) -> dict[str, Any] | str:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        return f"no UTF-8 text: {error.reason}"
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"
    return row if isinstance(row, dict) else f"a JSON {type(row).__name__}, not an object"


def _json_list(path: Path, name: str) -> Iterator[Row]:
    try:
        with _open(path) as file:
            rows = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is no JSON: {error}. A file of one object a line is named .jsonl.") from error
    if isinstance(rows, dict):  # the one list of objects in it, or a row whose list is of turns
        lists = [value for value in rows.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        whole = len(lists) == 1 and not lists[0][0].keys() & {"role", "from"}
        rows = lists[0] if whole else [rows]
    if not isinstance(rows, list):
        raise ConfigurationError(f"{path} must hold a list of objects, got a {type(rows).__name__}.")
    for number, row in enumerate(rows, 1):
        kept = row if isinstance(row, dict) else f"a JSON {type(row).__name__}, not an object"
        yield f"{name}, entry {number}", kept


def _table(path: Path, name: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # texts are longer than its 128 KiB
    with _open(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        try:
            first = text.readline()
            tab = _suffix(path) in (".tsv", ".tab")
            sign = "\t" if tab else ";" if ";" in first and "," not in first else ","
            text.seek(0)
            reader = csv.DictReader(text, delimiter=sign, strict=True)
            names = [column for column in reader.fieldnames or () if column]
            if twice := {column for column in names if names.count(column) > 1}:
                raise ConfigurationError(f"{path}: two columns have the name {min(twice)!r}: one would hide the other.")
            for number, row in enumerate(reader, 1):
                cells = sum(value is not None for key, value in row.items() if key is not None) + len(row.get(None, ()))
                fits = cells == len(reader.fieldnames or ())
                yield f"{name}, row {number}", row if fits else f"{cells} cells of {len(reader.fieldnames or ())}"
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} is no table of UTF-8 text: {error}.") from error


def _parquet(path: Path, name: str) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ConfigurationError(f"{path} is no parquet file: {error}") from error
    number = 0
    with file:
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{name}, row {number}", row


def _saved(path: Path, split: str) -> Source:
    found = load_saved(path)
    if isinstance(found, dict):
        if split not in found:
            raise refusal(str(path), "split", f"one of {', '.join(found)}", split)
        path, found = path / split, found[split]
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        with file.open("rb") as content:
            digest.update(file.relative_to(path).as_posix().encode())
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return Source(path.name, partial(_numbered, found, path.name), digest.hexdigest())


def _hub(name: str, split: str, subset: str | None, streaming: bool) -> Source:
    import datasets

    try:
        found = datasets.load_dataset(name, subset, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:  # offline, not found, no such split or subset, code needed
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(
            f"{name}: neither a file or folder here, nor a data set that could be loaded from the hub: {reason}"
        ) from error
    if streaming:
        return Source(name, partial(streamed_rows, found, name), "")
    digest = hashlib.sha256(fingerprint(found).encode())
    for entry in found.cache_files:
        with open(entry["filename"], "rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return Source(name, partial(_numbered, found, name), digest.hexdigest())


def _numbered(found: Any, name: str) -> Iterator[Row]:
    for number, row in enumerate(found, 1):
        yield f"{name}, row {number}", row


def streamed_rows(found: Any, name: str) -> Iterator[Row]:
    """All rows of a streamed data set: its own loop would give each worker of a loader a part of them."""
    number = 0
    for batch in found.iter(batch_size=64):
        for values in zip(*batch.values()):
            number += 1
            yield f"{name}, row {number}", dict(zip(batch, values))
