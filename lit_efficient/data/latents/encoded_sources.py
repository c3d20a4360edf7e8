"""Local folders of latents that somebody else has encoded, opened as rows with named fields.

    source.read(row, ["latents", "labels"]) -> {"latents": array, "labels": 402}

    safetensors   tensors of equal length (cosmos-imagenet)
    mds           MosaicML streaming: index.json and .mds files (imagenet.int8)
    webdataset    .tar files: a sample is the files with one name, a field is a suffix
    parquet       columns of numbers, lists or bytes

Nothing is unpickled. Safetensors and MDS files are memory-mapped. `datasets` (Hugging Face) reads tar and parquet.

Costs: opening reads headers; tar and parquet files are copied once, see `files.tables`
Source: https://huggingface.co/datasets/fal/cosmos-imagenet, https://github.com/cloneofsimo/imagenet.int8,
    https://github.com/webdataset/webdataset.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from lit_efficient.data.latents.encoded_files import UNSAFE, SafetensorsRows, TableRows, Value, pickled
from lit_efficient.data.latents.encoded_mds import MosaicShards
from lit_efficient.errors import ConfigurationError

Layout = Literal["auto", "safetensors", "mds", "webdataset", "parquet"]

_SUFFIXES = {"safetensors": ".safetensors", "mds": ".mds", "webdataset": ".tar", "parquet": ".parquet"}


class EncodedSource(Protocol):
    """Rows with named fields. A source can be pickled, so that workers of a loader can read it."""

    @property
    def fields(self) -> list[str]:
        """Names of the fields."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        """Return some fields of a row, 0 <= row < len(self)."""


def open_encoded(
    folder: str | Path, layout: Layout = "auto", files: str = "*", without: str | None = None
) -> EncodedSource:
    """Open a folder of encoded data.

    Args:
        folder: Path of the folder.
        layout: File layout. ``auto`` detects it by the names of the files.
        files: Pattern of the names of the files to read, such as ``imagenet_ci8x8.*``; with ``mds``, of the shards.
        without: Pattern of the names of files to leave out, or a folder to leave out, relative to ``folder``.

    Raises:
        ConfigurationError: If the folder holds no such files, or they cannot be read safely row by row.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigurationError(f"EncodedData: there is no folder {root}.")
    # One selection for all layouts: the shards of an MDS folder are chosen by their names, too.
    belongs = _selection(root, files, without)
    found = [path for path in root.rglob("*") if path.is_file() and belongs(path)]
    found.sort(key=natural_order)
    chosen = f"match {files!r}"
    if without is not None:
        chosen += f" and do not belong to {without!r}"
    by_layout = {name: [path for path in found if path.suffix == suffix] for name, suffix in _SUFFIXES.items()}
    if not any(by_layout.values()):
        _refuse_other_formats(found)
    if layout == "auto":
        layout = _detected(root, by_layout, chosen)
    if layout == "mds":
        return MosaicShards(root, belongs)
    if not by_layout[layout]:
        raise ConfigurationError(
            f"EncodedData: {root} has no {_SUFFIXES[layout]} files (layout {layout}) that {chosen}."
        )
    if layout == "safetensors":
        return SafetensorsRows(by_layout[layout])
    assert layout != "auto"
    return TableRows(layout, by_layout[layout])


def _refuse_other_formats(found: Sequence[Path]) -> None:
    """Raise an error if the files are pickles or NumPy's; its message says how to convert them."""
    for path in found:
        if path.suffix in UNSAFE:
            raise pickled(path.name)
        if path.suffix in (".npy", ".npz"):
            raise ConfigurationError(
                f"EncodedData: {path.name} is a NumPy file, which is not read. Join the arrays once into a safetensors "
                'file with rows along the first axis: safetensors.numpy.save_file({"latents": latents, "labels": '
                'labels}, "all.safetensors").'
            )


def _detected(root: Path, by_layout: Mapping[str, Sequence[Path]], chosen: str) -> Layout:
    if (root / "index.json").is_file():
        return "mds"
    layouts = [name for name, paths in by_layout.items() if paths and name != "mds"]
    if len(layouts) != 1:
        raise ConfigurationError(
            f"EncodedData: {root} has files of {' and '.join(layouts) or 'no known layout'} (among the files that "
            f"{chosen}). Set layout ({', '.join(_SUFFIXES)}) or another pattern for files."
        )
    return layouts[0]  # type: ignore[return-value]


def _selection(root: Path, files: str, without: str | None) -> Callable[[Path], bool]:
    """Return a function that says whether a path below ``root`` is read: it matches ``files`` and is not left out."""
    if without is None:
        return lambda path: path.match(files)
    # abspath and not resolve: a link inside the folder may lead to a file elsewhere, and still belongs to it.
    other = Path(os.path.abspath(root / Path(without).expanduser()))
    if other.is_dir():
        return lambda path: path.match(files) and not Path(os.path.abspath(path)).is_relative_to(other)
    return lambda path: path.match(files) and not path.match(without)


def natural_order(path: Path) -> list[tuple[int, int, str]]:
    """Return a sort key that places 9.tar before 10.tar, folder by folder."""
    key = []
    for part in re.split(r"(\d+)", path.as_posix()):
        if part.isdigit():
            key.append((1, int(part), part))
        elif part:
            key.append((0, 0, part))
    return key


def check_fields(source: EncodedSource, named: Mapping[str, str], where: Path) -> None:
    """Raise an error if a source lacks a field. ``named`` maps arguments of `EncodedFields` to names of fields."""
    for argument, field in named.items():
        if field not in source.fields:
            raise ConfigurationError(
                f"EncodedData: fields.{argument} is {field!r}, but {where} has {', '.join(map(repr, source.fields))}."
            )
