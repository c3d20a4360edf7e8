"""Data sets that somebody else has encoded, in local folders: rows with named fields, whatever the files are.

    source.read(row, ["latents", "labels"]) -> {"latents": array, "labels": 402}

    arrays        .safetensors with tensors of equal length; .npy, a field a folder or file name; .npz, not compressed
    dataset_json  a .npy file a row, listed with its label in dataset.json (EDM2, REPA)
    mds           MosaicML streaming: index.json and .mds files (imagenet.int8)
    webdataset    .tar files, a sample the files of one name, a field each suffix
    parquet       columns of numbers, lists or bytes

Nothing is unpickled. Arrays and MDS are read in place, mapped into memory; tars and parquet from a mapped copy.

Costs: opening reads headers; tars and parquet are copied once, see `files.tables`
Source: https://huggingface.co/datasets/fal/cosmos-imagenet, https://github.com/cloneofsimo/imagenet.int8,
    https://github.com/webdataset/webdataset.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from lit_efficient.data.latents.encoded_arrays import ArrayFiles
from lit_efficient.data.latents.encoded_mds import MosaicShards
from lit_efficient.data.latents.encoded_rows import UNSAFE, Value, pickled
from lit_efficient.data.latents.encoded_tables import TableRows
from lit_efficient.errors import ConfigurationError

Layout = Literal["auto", "arrays", "dataset_json", "mds", "webdataset", "parquet"]


class EncodedSource(Protocol):
    """Rows with named fields; can be pickled."""

    @property
    def fields(self) -> list[str]:
        """Names of the fields."""

    def __len__(self) -> int:
        """Number of rows."""

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        """Some fields of a row, 0 <= row < len(self)."""


def open_encoded(
    folder: str | Path, layout: Layout = "auto", files: str = "*", without: str | None = None
) -> EncodedSource:
    """Open a folder of encoded data.

    Args:
        folder: Where it is.
        layout: How it is stored; ``auto`` goes by the files' names.
        files: Pattern for the names of the files that belong to it, such as ``imagenet_ci8x8.*``; of dataset_json, for
            those that are listed, of mds, for shards.
        without: Pattern for names of those that do not, or a folder whose files do not, relative to ``folder``.

    Raises:
        ConfigurationError: If there is nothing of the kind, or it cannot be read safely row by row.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigurationError(f"EncodedData: there is no folder {root}.")
    belongs = _belonging(root, files, without)
    found = sorted((path for path in root.rglob("*") if path.is_file() and belongs(path)), key=natural_order)
    chosen = f"match {files!r}" + ("" if without is None else f" and are not those of {without!r}")
    kinds = {kind: [path for path in found if path.suffix in suffixes] for kind, suffixes in _SUFFIXES.items()}
    if not any(kinds.values()) and (unsafe := [path for path in found if path.suffix in UNSAFE]):
        raise pickled(unsafe[0].name)
    if layout == "auto":
        if (root / "index.json").is_file():
            layout = "mds"
        elif (root / "dataset.json").is_file():
            layout = "dataset_json"
        else:
            several = [kind for kind, paths in kinds.items() if paths and kind != "mds"]
            if len(several) != 1:
                raise ConfigurationError(
                    f"EncodedData: {root} has files of {' and '.join(several) or 'no known layout'} (of those that "
                    f"{chosen}): give layout ({', '.join(_SUFFIXES)}) or another pattern for files."
                )
            layout = several[0]  # type: ignore[assignment]
    if layout == "mds":
        return MosaicShards(root, belongs)
    if layout == "dataset_json":
        return ListedFiles(root, belongs)
    if not kinds[layout]:
        raise ConfigurationError(
            f"EncodedData: {root} has no files of the layout {layout} ({', '.join(_SUFFIXES[layout])}) that {chosen}."
        )
    if layout in ("webdataset", "parquet"):
        return TableRows(layout, kinds[layout])
    return ArrayFiles(root, kinds[layout])


def _belonging(root: Path, files: str, without: str | None) -> Callable[[Path], bool]:
    """Which paths below a folder match ``files``, and neither match ``without`` nor lie in it."""
    if without is None:
        return lambda path: path.match(files)
    other = Path(os.path.abspath(root / Path(without).expanduser()))
    if other.is_dir():
        return lambda path: path.match(files) and not Path(os.path.abspath(path)).is_relative_to(other)
    return lambda path: path.match(files) and not path.match(without)


_SUFFIXES: dict[str, tuple[str, ...]] = {
    "arrays": (".safetensors", ".npy", ".npz"),
    "mds": (".mds",),
    "webdataset": (".tar",),
    "parquet": (".parquet",),
}


def natural_order(path: Path) -> list[tuple[int, int, str]]:
    """Sorts 9.npy before 10.npy, folder by folder."""
    return [(int(p.isdigit()), int(p) if p.isdigit() else 0, p) for p in re.split(r"(\d+)", path.as_posix()) if p]


class ListedFiles:
    """Arrays of one row a file, as ``dataset.json`` lists them: {"labels": [["00000/img00000000.npy", 402], ...]}."""

    def __init__(self, root: Path, belongs: Callable[[Path], bool]) -> None:
        self._root, index = root, root / "dataset.json"
        try:
            self._listed = [(str(name), label) for name, label in json.loads(index.read_text("utf-8"))["labels"]]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigurationError(f"EncodedData: {index} lists no files with labels ({error!r}).") from error
        for name, _ in self._listed:
            if not name.endswith(".npy") or name.startswith("/") or ".." in name.split("/"):
                raise ConfigurationError(f"EncodedData: {index} lists {name!r}, which is no .npy file in it.")
        self._listed = [row for row in self._listed if belongs(root / row[0])]
        if not self._listed:
            raise ConfigurationError(f"EncodedData: {index} lists none of the files that are asked for.")

    @property
    def fields(self) -> list[str]:
        """``latents`` and ``labels``."""
        return ["latents", "labels"]

    def __len__(self) -> int:
        return len(self._listed)

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        """A file's array, and its label."""
        name, label = self._listed[row]
        found: dict[str, Value] = {"labels": label}
        if "latents" in fields:
            try:
                found["latents"] = np.array(np.load(self._root / name, mmap_mode="r", allow_pickle=False))
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"EncodedData: {self._root / name} cannot be read: {error}.") from error
        return {field: found[field] for field in fields}


def check_fields(source: EncodedSource, asked: Mapping[str, str], where: Path) -> None:
    """Refuse fields, by the arguments that name them, that a source has not."""
    for argument, field in asked.items():
        if field not in source.fields:
            raise ConfigurationError(
                f"EncodedData: fields.{argument} is {field!r}, but {where} has {', '.join(map(repr, source.fields))}."
            )
