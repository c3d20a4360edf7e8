"""MosaicML's MDS files, read by offset: what `MDSWriter` writes, without the package, which unpickles columns.

    shard:   uint32 n | uint32 offsets[n + 1] | header (JSON) | samples
    sample:  uint32 size of each column whose size varies | the columns' bytes, one after the other

``index.json`` lists the shards with the names, encodings and fixed sizes (or null) of their columns.
Source: https://github.com/mosaicml/streaming (docs: preparing_datasets/dataset_format).
"""

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from lit_efficient.data.latents.encoded_rows import Value, locate, np_bytes, pickled
from lit_efficient.errors import ConfigurationError, refusal

_VALUES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4", 64: "u8", 65: "i8", 66: "f8"}
_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class MosaicShards:
    """A folder with an ``index.json``; which of its shards count ``belongs`` says by their paths there.

    Raises:
        ConfigurationError: If a shard is missing, compressed, not whole, of another format or not in the folder.
    """

    def __init__(self, folder: Path, belongs: Callable[[Path], bool]) -> None:
        self._folder = folder
        try:
            self._shards: list[dict[str, Any]] = json.loads((folder / "index.json").read_text("utf-8"))["shards"]
            self._names = list(self._shards[0]["column_names"])
        except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise ConfigurationError(
                f"EncodedData: {folder / 'index.json'} is no index of MDS shards ({error!r})."
            ) from error
        self._shards = [shard for shard in self._shards if belongs(folder / shard["raw_data"]["basename"])]
        if not self._shards:
            raise ConfigurationError(
                f"EncodedData: {folder / 'index.json'} lists no shards that are asked for: give a pattern of their "
                "names, or a folder with an index.json of its own."
            )
        for shard in self._shards:
            if shard["format"] != "mds" or shard["column_names"] != self._names:
                given = shard["format"], shard["column_names"]
                raise refusal("EncodedData", f"the shards of {folder}", f"MDS with the columns {self._names}", given)
            self._check(shard)
        self._ends = list(accumulate(int(shard["samples"]) for shard in self._shards))
        self._opened: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}

    @property
    def fields(self) -> list[str]:
        """Names of the columns."""
        return self._names

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        """Some columns of a sample."""
        number, inside = locate(row, self._ends)
        shard, data = self._shards[number], self._bytes(number)
        begin, end = data[4 * (1 + inside) : 4 * (3 + inside)].view("<u4").tolist()
        sample = data[begin:end].tobytes()
        position, sizes = 0, []
        for size in shard["column_sizes"]:
            if not size:
                size = int.from_bytes(sample[position : position + 4], "little")  # noqa: PLW2901
                position += 4
            sizes.append(size)
        found = {}
        for name, encoding, size in zip(shard["column_names"], shard["column_encodings"], sizes):
            if name in fields:
                try:
                    found[name] = decode(encoding, sample[position : position + size])
                except (ValueError, LookupError, TypeError, MemoryError) as error:
                    raise ConfigurationError(f"EncodedData: {name} of row {row} cannot be read: {error}.") from error
            position += size
        return found

    def _check(self, shard: dict[str, Any]) -> None:
        name = shard["raw_data"]["basename"]
        raw = self._folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigurationError(f"EncodedData: {self._folder / 'index.json'} lists {name!r}, which is not in it.")
        if not raw.is_file():
            packed = "; unpack the compressed ones first (zstd -d *.zstd)" if shard["zip_data"] else ""
            raise ConfigurationError(f"EncodedData: the shard {raw} is missing{packed}.")
        if raw.stat().st_size != shard["raw_data"]["bytes"]:
            raise ConfigurationError(f"EncodedData: {raw} is not whole: its size is not the index's.")

    def _bytes(self, number: int) -> np.ndarray:
        """All bytes of a shard [n] uint8, mapped."""
        if number not in self._opened:
            raw = self._folder / self._shards[number]["raw_data"]["basename"]
            self._opened[number] = np.memmap(raw, np.uint8, "r")
        return self._opened[number]


def decode(encoding: str, data: bytes) -> Value:
    """A column's value.

    Numbers that are longer than one number are taken for arrays: imagenet.int8 stores its latents as ``uint8``.

    Raises:
        ConfigurationError: For encodings that hold code (``pkl``) or pictures.
    """
    kind, _, details = encoding.partition(":")
    if kind == "pkl":
        raise pickled("a column encoded as pkl")
    if kind == "ndarray":
        return _array(data, details)
    if kind in ("str", "json"):
        return data.decode()
    if kind in ("int", "str_int"):
        return int.from_bytes(data, "little", signed=True) if kind == "int" else int(data)
    if kind == "str_float":
        return float(data)
    if kind == "bytes":
        return np_bytes(data)
    if kind in _SCALARS:
        values = np.frombuffer(data, kind)
        return values.item() if len(values) == 1 else values
    raise ConfigurationError(f"EncodedData: a column encoded as {encoding!r} holds no latents, labels or captions.")


def _array(data: bytes, details: str) -> np.ndarray:
    """An ndarray, whose dtype and shape stand in the encoding or before the values."""
    dtype, _, sizes = details.partition(":")
    position = 0
    if not dtype:
        dtype, position = _VALUES[data[0]], 1
    if sizes:
        shape = [int(size) for size in sizes.split(",")]
    else:
        axes, width = data[position] >> 2, 1 << (data[position] & 3)  # number of axes, bytes of each length
        end = position + 1 + axes * width
        shape = np.frombuffer(data[position + 1 : end], f"<u{width}").tolist()
        position = end
    return np.frombuffer(data[position:], dtype).reshape(shape)
