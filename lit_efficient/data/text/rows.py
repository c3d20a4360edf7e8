"""Rows of files, folders and Hugging Face data sets, one at a time, each with its place for messages.

A source can be read any number of times, and is never in memory as a whole. For a row that cannot be read (such as a
line that is no JSON) the reason is returned, so that the caller can count it. No code of a data set is run.
"""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from itertools import islice
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_efficient.data.text.arrow_rows import Content, rows_of
from lit_efficient.data.text.python_instructions import docstrings, instructions, judged, modules, preferences
from lit_efficient.data.text.text_files import EXCLUDE, find_files, read_texts, standard_library
from lit_efficient.errors import ConfigurationError, listed, refusal
from lit_efficient.files.cache import digest_of
from lit_efficient.files.file_hashes import hash_files
from lit_efficient.files.sums import check_sums, sha256_of
from lit_efficient.internals.hugging_face import fingerprint, load_saved

# Bytes; the hash of a larger file is kept for its size and time.
_LARGE = 2**26
STDLIB_INSTRUCTIONS = "stdlib-instructions"
STDLIB_PACKAGES = "stdlib-packages"
STDLIB_PREFERENCES = "stdlib-preferences"
STDLIB_JUDGED = "stdlib-judged"
STDLIB_MODULES = "stdlib-modules"
STDLIB_DOCSTRINGS = "stdlib-docstrings"
ROW_SUFFIXES = (".jsonl", ".jsonlines", ".ndjson", ".json", ".csv", ".tsv", ".tab", ".parquet")
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
_TABS = (".tsv", ".tab")
_COMPRESSED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".lzma": lzma.open}
READ = f"files that end with {', '.join(ROW_SUFFIXES + TEXT_SUFFIXES)}, compressed or not ({', '.join(_COMPRESSED)})"

Row = tuple[str, Content | str]
"""Place of a row ("data.jsonl:17"), and its keys and values, or the reason why it cannot be read."""


@dataclass(frozen=True)
class Source:
    """Rows that can be read again and again."""

    name: str  # name that the user gave, or name of the file
    rows: Callable[[], Iterable[Row]]  # begins to read; the order is always the same
    digest: str  # hash of the content; "" for a stream, whose content is not known before it is read
    count: Callable[[], int | None]  # estimates the number of rows; None if it is not known before they are read
    is_text: bool = False  # True if every row is the text of a file
    entry: int = 0  # number of the entry of ``train`` or ``val`` that the source belongs to
    hint: str = ""  # sentence about a likely mistake, for the error if no row has the keys of any format
    folder: Path | None = None  # folder of the files, to which the paths of images in the rows are relative


def open_sources(
    name: str, *, split: str = "train", subset: str | None = None, streaming: bool = False
) -> list[Source]:
    """Open the sources that a name in a config stands for. A folder of files is one source for each file.

    Args:
        name: File (.jsonl, .json, .csv, .tsv, .parquet, or a text; compressed with .gz, .bz2 or .xz), folder of such
            files, folder written by ``Dataset.save_to_disk``, ``stdlib-instructions``, ``stdlib-packages``,
            ``stdlib-preferences``, ``stdlib-judged``, ``stdlib-modules``, ``stdlib-docstrings``, name of a data set on
            the Hugging Face hub, or address of a file ("https://...", "s3://...", "file://...").
        split: Split of a Hugging Face data set. In a folder with files of rows for several splits, such as
            ``data/train-00000.parquet``, only its files are read.
        subset: Configuration of a Hugging Face data set.
        streaming: Read a data set of the hub while it is downloaded.

    Raises:
        ConfigurationError: If the source does not exist or is empty.
    """
    # Built-in names come first, so that a folder of the same name cannot replace them.
    if name == STDLIB_INSTRUCTIONS:
        return [_of_memory(name, instructions())]
    if name == STDLIB_PREFERENCES:
        return [_of_memory(name, preferences())]
    if name == STDLIB_JUDGED:
        return [_of_memory(name, judged())]
    if name == STDLIB_MODULES:
        return [_of_memory(name, modules())]
    if name == STDLIB_DOCSTRINGS:
        return [_of_memory(name, docstrings())]
    if name == STDLIB_PACKAGES:
        return [_stdlib_packages()]
    address = urlsplit(name)
    if address.scheme and "://" in name and address.scheme != "file":
        return [_remote(name, streaming)]
    if address.scheme == "file":
        name = unquote(address.path)
    if "*" in name:
        found = sorted(Path(file) for file in glob(name, recursive=True) if Path(file).is_file())
        if not found:
            raise ConfigurationError(f"{name}: no file matches.")
        return [_file(file, file.name) for file in found]
    path = Path(name).expanduser()
    if path.is_file():
        return [_file(path, path.name)]
    if path.is_dir():
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return [_saved(path, split)]
        return _folder(path, name, split)
    # A misspelt path must not be looked up on the hub.
    if _suffix(path) in ROW_SUFFIXES + TEXT_SUFFIXES or path.is_absolute() or name.startswith((".", "~")):
        raise ConfigurationError(f"{name}: no such file or folder (looked for {path.absolute()}).")
    return [_hub(name, split, subset, streaming)]


def _folder(path: Path, name: str, split: str) -> list[Source]:
    """Return the sources of a folder: its files of rows, or else its texts and .json files."""
    found = sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in found if _suffix(file) in ROW_SUFFIXES + TEXT_SUFFIXES]
    # A .json file may be a description of the data, as in many folders of the hub.
    rows = [file for file in files if _suffix(file) in ROW_SUFFIXES and _suffix(file) != ".json"]
    # With files of rows, texts such as a README are no data.
    files = _of_split(rows, path, split) or files
    if not files:
        raise ConfigurationError(f"{name}: the folder holds no data. Supported are {READ}.")
    taken = set(files)
    passed = [file.name for file in found if file not in taken and not file.name.startswith(".")]
    if passed:
        kind = "rows" if rows else "text"
        rank_zero_info(f"{name}: {len(files)} files of {kind}; passed over {listed(passed, 5)}")
    return [replace(_file(file, file.relative_to(path).as_posix()), folder=path) for file in files]


def _of_split(files: list[Path], folder: Path, split: str) -> list[Path]:
    """Return the files that are named after a split, if others are named after another split, as on the hub."""
    of = {}
    for file in files:
        words = re.split(r"[^a-z]+", file.relative_to(folder).as_posix().lower())
        of[file] = {name for name, others in _SPLITS.items() if others & {*words}}
    wanted = {name for name, others in _SPLITS.items() if split.lower() in others}
    own = [file for file in files if of[file] & wanted]
    if own and any(found - wanted for found in of.values()):
        return own
    return files


def _of_memory(name: str, rows: list[Content]) -> Source:
    """Return rows in memory as a source, with the places ``name:1``, ``name:2``, ..."""
    places = [(f"{name}:{number}", row) for number, row in enumerate(rows, 1)]
    return Source(name, partial(iter, places), digest_of(rows), partial(len, rows))


def _stdlib_packages() -> Source:
    """Return one text for each file in the packages of the standard library.

    The modules at the top of the library are left out, because `STDLIB_INSTRUCTIONS` asks about them.
    """
    files = find_files([standard_library()], [".py"], EXCLUDE)
    texts = read_texts((name, path) for name, path in files if "/" in name).files
    digest = digest_of([[text.path, text.digest] for text in texts])
    rows = [(f"{STDLIB_PACKAGES}:{text.path}", {"text": text.text}) for text in texts]
    return Source(STDLIB_PACKAGES, partial(iter, rows), digest, partial(len, rows), is_text=True)


def split_single_text(source: Source, held_out: float) -> tuple[Source, Source] | None:
    """Cut a source that is a single text in two, at the end of a line.

    Args:
        source: The source.
        held_out: Approximate share of the second part.

    Returns:
        The two parts, or None if the source is no single text with two parts.
    """
    if not source.is_text:
        return None
    rows = [row for _, row in islice(source.rows(), 2)]
    if len(rows) != 1 or isinstance(rows[0], str):
        return None
    text = rows[0]["text"]
    end = text.rfind("\n", 0, int((1 - held_out) * len(text))) + 1
    parts = [text[:end], text[end:]]
    if not all(part.strip() for part in parts):
        return None
    first, last = (_text_source(source.name, part) for part in parts)
    return first, last


def _text_source(name: str, text: str) -> Source:
    rows = [(f"{name}:1", {"text": text})]
    return Source(name, partial(iter, rows), digest_of([{"text": text}]), partial(len, rows), is_text=True)


# Files ---------------------------------------------------------------------------------------------------------------


def _suffix(path: Path) -> str:
    """Return the suffix of a file without that of its compression."""
    lower = Path(path.name.lower())
    return Path(lower.stem).suffix if lower.suffix in _COMPRESSED else lower.suffix


def _open(path: Path) -> IO[bytes]:
    decompress = _COMPRESSED.get(path.suffix.lower())
    if decompress is None:
        return path.open("rb")
    return io.BufferedReader(_Unpacked(decompress(path, "rb"), path.stat().st_size))


class _Unpacked(io.RawIOBase):
    """Content of a compressed file, up to a limit.

    Text is compressed to about a tenth of its size, but a gigabyte of zeros to less than a megabyte.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._left = max(1 << 28, 200 * size)

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
    reader = _READERS.get(_suffix(path))
    if reader is None:
        raise ConfigurationError(
            f"{path} has an unsupported suffix. Supported are {READ}. A text for training needs the suffix .txt."
        )
    try:
        large = path.stat().st_size > _LARGE
        if not large:
            check_sums(path)
        digest = hash_files(path, [path])[0] if large else sha256_of(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error
    hint = ""
    if reader is _table:
        hint = " The first row of a table names its columns: if this row is data, write names above it."
    rows = partial(_readable, reader, path, name)
    count = partial(_count, reader, path, name)
    return Source(name, rows, digest, count, reader is _whole_text, hint=hint, folder=path.parent)


def _readable(reader: Callable[[Path, str], Iterator[Row]], path: Path, name: str) -> Iterator[Row]:
    try:
        yield from reader(path, name)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigurationError(f"{path} cannot be read to its end: {error}.") from error


def _count(reader: Callable[[Path, str], Iterator[Row]], path: Path, name: str) -> int:
    """Return the number of rows of a file, estimated from its first part if the rows are lines of a large file."""
    if reader is _whole_text:
        return 1
    if reader is _parquet:
        from pyarrow import parquet

        return int(parquet.read_metadata(path).num_rows)
    if reader is _json_list:  # read as a whole in any case
        return sum(1 for _ in reader(path, name))
    with path.open("rb") as raw:
        decompress = _COMPRESSED.get(path.suffix.lower())
        file = raw if decompress is None else decompress(raw, "rb")
        lines = 0
        read = 0
        while read < _LARGE:
            chunk = file.read(1 << 20)
            if not chunk:
                return lines
            lines += chunk.count(b"\n")
            read += len(chunk)
        return lines * path.stat().st_size // raw.tell()


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
                yield f"{name}:{number}", _json_row(line)


def _json_row(line: bytes) -> Content | str:
    try:
        return _object(json.loads(line))
    except UnicodeDecodeError as error:
        return f"no UTF-8 text: {error.reason}"
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"


def _object(row: object) -> Content | str:
    return row if isinstance(row, dict) else f"a JSON {type(row).__name__}, not an object"


def _json_list(path: Path, name: str) -> Iterator[Row]:
    try:
        with _open(path) as file:
            rows = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is no JSON: {error}. If it holds one object in each line, name it .jsonl."
        ) from error
    if isinstance(rows, dict):
        # An object is a row, unless exactly one of its values is a list of objects that are no turns.
        lists = [value for value in rows.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        if len(lists) == 1 and not lists[0][0].keys() & {"role", "from"}:
            rows = lists[0]
        else:
            rows = [rows]
    if not isinstance(rows, list):
        raise ConfigurationError(f"{path} must hold a list of objects, got a {type(rows).__name__}.")
    for number, row in enumerate(rows, 1):
        yield f"{name}, entry {number}", _object(row)


def _table(path: Path, name: str) -> Iterator[Row]:
    # The default of 128 KiB is too small for texts.
    csv.field_size_limit(sys.maxsize)
    with _open(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        try:
            delimiter = _delimiter(path, text.readline())
            text.seek(0)
            reader = csv.DictReader(text, delimiter=delimiter, strict=True)
            columns = reader.fieldnames or ()
            for column in columns:
                if column and columns.count(column) > 1:
                    raise ConfigurationError(f"{path}: two columns have the name {column!r}. Rename one of them.")
            for number, row in enumerate(reader, 1):
                surplus = row.get(None, ())  # cells beyond the last column
                cells = sum(value is not None for key, value in row.items() if key is not None) + len(surplus)
                place = f"{name}, row {number}"
                if cells == len(columns):
                    yield place, row
                else:
                    yield place, f"{cells} cells of {len(columns)}"
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} is no table of UTF-8 text: {error}.") from error


def _delimiter(path: Path, first_line: str) -> str:
    if _suffix(path) in _TABS:
        return "\t"
    return ";" if ";" in first_line and "," not in first_line else ","


def _parquet(path: Path, name: str) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ConfigurationError(f"{path} is no parquet file: {error}") from error
    with file:
        rows = (row for batch in file.iter_batches(batch_size=1024) for row in rows_of(batch))
        yield from _numbered(rows, name)


_READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    **dict.fromkeys((".jsonl", ".jsonlines", ".ndjson"), _json_lines),
    **dict.fromkeys((".csv", *_TABS), _table),
    **dict.fromkeys((*TEXT_SUFFIXES, ""), _whole_text),
    ".json": _json_list,
    ".parquet": _parquet,
}


# Hugging Face's data sets --------------------------------------------------------------------------------------------


def _saved(path: Path, split: str) -> Source:
    found = load_saved(path)
    if isinstance(found, dict):
        if split not in found:
            raise refusal(str(path), "split", f"one of {', '.join(found)}", split)
        path = path / split
        found = found[split]
    digest = hashlib.sha256()
    # The names are part of the hash, because they decide the order of the rows.
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        digest.update(file.relative_to(path).as_posix().encode())
        digest.update(bytes.fromhex(sha256_of(file)))
    rows = partial(table_rows, found, path.name)
    return Source(path.name, rows, digest.hexdigest(), partial(len, found), folder=path)


def _hub(name: str, split: str, subset: str | None, streaming: bool) -> Source:
    return _of_datasets(name, split, streaming, {"path": name, "name": subset})


def _remote(name: str, streaming: bool) -> Source:
    """Return the rows of a file at an address that fsspec opens, read by the data sets of Hugging Face."""
    suffix = _suffix(Path(urlsplit(name).path))
    reader = _READERS.get(suffix)
    if reader is None or reader is _whole_text:
        raise ConfigurationError(
            f"{name} has an unsupported suffix. At an address, files of rows are read: {', '.join(ROW_SUFFIXES)}."
        )
    options: dict[str, Any] = {"data_files": name}
    if reader is _table:
        options |= {"path": "csv", "sep": "\t" if suffix in _TABS else ","}
    else:
        options["path"] = "parquet" if reader is _parquet else "json"
    return _of_datasets(name, "train", streaming, options)


def _of_datasets(name: str, split: str, streaming: bool, options: dict[str, Any]) -> Source:
    import datasets

    try:
        found = datasets.load_dataset(**options, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:  # offline, not found, no such split or subset, needs code
        reason = str(error).strip().split("\n")[0]
        if "data_files" in options:
            raise ConfigurationError(f"{name}: the address could not be read: {reason}") from error
        raise ConfigurationError(
            f"{name}: neither a file or folder here, nor a data set that could be loaded from the hub: {reason}"
        ) from error
    rows = partial(_read_to_end, found, name)
    if streaming:
        return Source(name, rows, "", partial(_told, found, split))
    digest = hashlib.sha256(fingerprint(found).encode())
    for entry in found.cache_files:
        digest.update(bytes.fromhex(sha256_of(Path(entry["filename"]))))
    return Source(name, rows, digest.hexdigest(), partial(len, found))


def _read_to_end(found: object, name: str) -> Iterator[Row]:
    from datasets.exceptions import DatasetGenerationError

    try:
        yield from table_rows(found, name)
    except (OSError, ValueError, DatasetGenerationError) as error:  # the connection, or rows that are no JSON
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(f"{name} cannot be read to its end: {reason}") from error


def _told(found: Any, split: str) -> int | None:
    """Return the number of rows that a streamed data set states, or None."""
    splits = found.info.splits or {}
    return splits[split].num_examples if split in splits else None


def _numbered(rows: Iterable[Content | str], name: str) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        yield f"{name}, row {number}", row


def table_rows(found: Any, name: str) -> Iterator[Row]:
    """Yield all rows of a data set of Hugging Face, streamed or not.

    Iterating over a streamed data set itself would give each worker of a loader only a part of the rows.
    """
    # As Arrow's tables, because the decoded rows do not tell which nulls Arrow added.
    batches = found.with_format("arrow").iter(batch_size=64)
    yield from _numbered((row for batch in batches for row in rows_of(batch)), name)


def beginning(text: str) -> str:
    """Return at most 60 characters of the first line of a text that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(iter(lines), "")[:60].strip()
