"""WebDataset's tars, read by offset: a sample is the files of one name, a field each suffix.

00017.latents.npy  00017.cls  00017.txt  00017.json  ->  {"latents.npy", "cls", "txt", "json"}; "json.label" is in json
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_efficient.data.latents.encoded_rows import UNSAFE, Value, refusal
from lit_efficient.errors import ConfigurationError

_TEXTS = ("txt", "text", "caption", "transcript")
_NUMBERS = ("cls", "cls2", "id", "index", "label")


class TarShards:
    """Samples of uncompressed tars, found by where their bytes lie.

    Args:
        files: The tars, in order.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [str(path) for path in files]
        self._samples: list[tuple[int, dict[str, tuple[int, int]]]] = []  # file; offset and size by suffix
        for number, path in enumerate(files):
            self._samples += [(number, members) for members in _index(path).values()]
        if not self._samples:
            raise ConfigurationError(f"EncodedData: {files[0]} and the other tars hold no files.")
        self._handles: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": {}}

    @property
    def fields(self) -> list[str]:
        """Suffixes of the first sample's files, and the keys of its json."""
        suffixes = list(self._samples[0][1])
        inside = [f"json.{key}" for key in self._json(0)] if "json" in suffixes else []
        return [*suffixes, *inside]

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, row: int, fields: Sequence[str]) -> dict[str, Value]:
        """Some fields of a sample."""
        found: dict[str, Value] = {}
        for field in fields:
            if field.startswith("json."):
                value = self._json(row).get(field.removeprefix("json."))
                if value is None:
                    raise ConfigurationError(f"EncodedData: sample {row} has no {field!r}.")
                found[field] = np.asarray(value) if isinstance(value, list) else value
            else:
                found[field] = decode(field, self._bytes(row, field))
        return found

    def _json(self, row: int) -> dict[str, Any]:
        return dict(json.loads(self._bytes(row, "json")))

    def _bytes(self, row: int, suffix: str) -> bytes:
        number, members = self._samples[row]
        if suffix not in members:
            raise ConfigurationError(f"EncodedData: sample {row}, in {self._files[number]}, has no file .{suffix}.")
        offset, size = members[suffix]
        if number not in self._handles:
            self._handles[number] = os.open(self._files[number], os.O_RDONLY)
        return os.pread(self._handles[number], size, offset)  # no position that forked workers would share


def decode(suffix: str, data: bytes) -> Value:
    """A file of a sample, by the last part of its suffix.

    Raises:
        ConfigurationError: For one that would have to be unpickled, and one that holds no numbers and no text.
    """
    kind = suffix.rpartition(".")[2].lower()
    if f".{kind}" in UNSAFE:
        raise ConfigurationError(refusal(f"a file .{suffix}"))
    if kind == "npy":
        return np.load(io.BytesIO(data), allow_pickle=False)
    if kind in _TEXTS:
        return data.decode("utf-8").strip()
    if kind in _NUMBERS:
        return int(data)
    raise ConfigurationError(
        f"EncodedData: a file .{suffix} cannot be read; known are .npy, .json and "
        f"{', '.join('.' + name for name in _TEXTS + _NUMBERS)}."
    )


def _index(path: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """Samples of a tar by name: offset and size of the file of each suffix."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                key, _, suffix = name.partition(".")
                if member.isreg() and key and suffix:
                    samples.setdefault(f"{folder}/{key}", {})[suffix] = (member.offset_data, member.size)
    except tarfile.TarError as error:
        raise ConfigurationError(
            f"EncodedData: {path} is no plain tar ({error}); a compressed one cannot be read row by row: unpack it "
            "once."
        ) from error
    return samples
