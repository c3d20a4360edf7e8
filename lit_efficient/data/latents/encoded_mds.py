"""Reader of MosaicML's MDS files. It reads the files that `MDSWriter` writes, at known offsets.

    shard:   uint32 n | uint32 offsets[n + 1] | header (JSON) | samples
    sample:  uint32 size of each column whose size varies | the bytes of the columns, one after the other

``index.json`` lists the shards with the names, encodings and fixed sizes (or null) of their columns. The package
``mosaicml-streaming`` is not used because its decoder unpickles columns with the encoding ``pkl``.

Source: https://github.com/mosaicml/streaming (docs: preparing_datasets/dataset_format).
"""

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from lit_efficient.data.latents.encoded_files import Value, array_of_bytes, locate, pickled
from lit_efficient.errors import ConfigurationError, refusal

# Codes of the dtypes of an ndarray, in `streaming.base.format.mds.encodings`.
_DTYPES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4", 64: "u8", 65: "i8", 66: "f8"}
_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class MosaicShards:
    """Rows of a folder with an ``index.json``.

    Args:
        folder: The folder.
        belongs: Return whether the shard with this path is read.
        owner: Class that reads the shards, for errors.

    Raises:
        ConfigurationError: If a shard is missing, compressed, incomplete, of another format or outside the folder.
    """

    def __init__(self, folder: Path, belongs: Callable[[Path], bool], owner: str = "EncodedData") -> None:
        self._owner = owner
        self._folder = folder
        index = folder / "index.json"
        shards = _listed_shards(folder, owner)
        self.fields = list(shards[0]["column_names"])
        self._shards: list[dict[str, Any]] = [s for s in shards if belongs(folder / s["raw_data"]["basename"])]
        if not self._shards:
            raise ConfigurationError(
                f"{owner}: {index} lists no shards that are asked for. Give a pattern that matches their names, or a "
                "folder with its own index.json."
            )
        for shard in self._shards:
            if shard["format"] != "mds" or shard["column_names"] != self.fields:
                given = shard["format"], shard["column_names"]
                raise refusal(self._owner, f"the shards of {folder}", f"MDS with the columns {self.fields}", given)
            self._check_file(shard)
        self._ends = list(accumulate(int(shard["samples"]) for shard in self._shards))
        self._mapped: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict[str, object]:
        # A memory map belongs to one process.
        return {**self.__dict__, "_mapped": {}}

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def encodings(self) -> dict[str, str]:
        """Encoding of each field."""
        return dict(zip(self.fields, self._shards[0]["column_encodings"]))

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        """Return the values of some fields of a row."""
        found = {}
        for name, (encoding, data) in self._stored(row, fields).items():
            try:
                found[name] = decode(encoding, data)
            except (ValueError, LookupError, TypeError, MemoryError) as error:
                raise ConfigurationError(f"{self._owner}: {name} of row {row} cannot be read: {error}.") from error
        return found

    def read_bytes(self, row: int, field: str) -> bytes:
        """Return a field of a row as it is stored."""
        return self._stored(row, [field])[field][1]

    def _stored(self, row: int, fields: Sequence[str]) -> dict[str, tuple[str, bytes]]:
        """Return the encodings and the bytes of some fields of a row."""
        number, inside = locate(row, self._ends)
        shard = self._shards[number]
        data = self._bytes(number)
        # The offsets of a sample are two of the uint32 numbers behind the number of samples.
        begin, end = data[4 * (1 + inside) : 4 * (3 + inside)].view("<u4").tolist()
        sample = data[begin:end].tobytes()
        position = 0
        sizes = []
        for fixed in shard["column_sizes"]:
            if fixed:
                sizes.append(fixed)
            else:
                sizes.append(int.from_bytes(sample[position : position + 4], "little"))
                position += 4
        found = {}
        for name, encoding, size in zip(shard["column_names"], shard["column_encodings"], sizes):
            if name in fields:
                found[name] = (encoding, sample[position : position + size])
            position += size
        return found

    def _check_file(self, shard: dict[str, Any]) -> None:
        name = shard["raw_data"]["basename"]
        path = self._folder / name
        # An index from somebody else could name any file of this machine.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigurationError(
                f"{self._owner}: {self._folder / 'index.json'} lists {name!r}, which is not in it."
            )
        if not path.is_file():
            hint = ""
            if shard["zip_data"]:
                hint = "; unpack the compressed shards first (zstd -d *.zstd)"
            raise ConfigurationError(f"{self._owner}: the shard {path} is missing{hint}.")
        # The reader finds samples by offsets, so a file that was cut off would give wrong rows instead of an error.
        if path.stat().st_size != shard["raw_data"]["bytes"]:
            raise ConfigurationError(
                f"{self._owner}: {path} is incomplete: its size is not the size in index.json. Download it again."
            )

    def _bytes(self, number: int) -> np.ndarray:
        """Return all bytes of a shard, memory-mapped [n] uint8."""
        if number not in self._mapped:
            path = self._folder / self._shards[number]["raw_data"]["basename"]
            self._mapped[number] = np.memmap(path, np.uint8, "r")
        return self._mapped[number]


def mosaic_files(folder: Path, owner: str) -> list[str]:
    """Return the names of the shards that the index of a folder lists."""
    return [str(shard["raw_data"]["basename"]) for shard in _listed_shards(folder, owner)]


def _listed_shards(folder: Path, owner: str) -> list[dict[str, Any]]:
    index = folder / "index.json"
    try:
        shards = json.loads(index.read_text("utf-8"))["shards"]
        for shard in shards:
            _ = shard["column_names"], shard["raw_data"]["basename"]
        _ = shards[0]
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{owner}: {index} is not an index of MDS shards ({error!r}).") from error
    return list(shards)


def decode(encoding: str, data: bytes) -> Value:
    """Return the value of a column.

    A column of a number format that holds several numbers is an array: imagenet.int8 stores its latents as ``uint8``.

    Raises:
        ConfigurationError: If the encoding holds pickles or pictures.
    """
    kind, _, details = encoding.partition(":")
    if kind == "pkl":
        raise pickled("a column encoded as pkl")
    if kind == "ndarray":
        return _array(data, details)
    if kind in ("str", "json"):
        return data.decode()
    if kind == "int":
        return int.from_bytes(data, "little", signed=True)
    if kind == "str_int":
        return int(data)
    if kind == "str_float":
        return float(data)
    if kind == "bytes":
        return array_of_bytes(data)
    if kind in _SCALARS:
        values = np.frombuffer(data, kind)
        return values.item() if len(values) == 1 else values
    raise ConfigurationError(
        f"EncodedData: a column encoded as {encoding!r} cannot hold latents, labels or captions. Name another column "
        "in `fields`."
    )


def _array(data: bytes, details: str) -> np.ndarray:
    """Return an ndarray. The encoding states its dtype and shape, or they precede the numbers."""
    dtype, _, sizes = details.partition(":")
    position = 0
    if not dtype:
        dtype = _DTYPES[data[0]]
        position = 1
    if sizes:
        shape = [int(size) for size in sizes.split(",")]
    else:
        # One byte: the number of axes in the upper bits, and the bytes of each length (as a power of 2) in the lower 2.
        axes = data[position] >> 2
        width = 1 << (data[position] & 3)
        end = position + 1 + axes * width
        shape = np.frombuffer(data[position + 1 : end], f"<u{width}").tolist()
        position = end
    return np.frombuffer(data[position:], dtype).reshape(shape)
