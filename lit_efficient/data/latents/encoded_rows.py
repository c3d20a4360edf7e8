"""What the readers of encoded data share: values of rows, rows of several files, and what is not read."""

import bisect
import io
from collections.abc import Sequence

import numpy as np

from lit_efficient.errors import ConfigurationError

Value = np.ndarray | int | float | str | bytes
"""A field of a row: an array, a number, a text, or bytes whose meaning the files do not tell."""

UNSAFE = (".pt", ".pth", ".pkl", ".pickle", ".pyd", ".bin", ".ckpt")


def pickled(name: str) -> ConfigurationError:
    """The error of a file that is not read."""
    return ConfigurationError(
        f"EncodedData: {name} is pickled: reading it would run whatever code it names. Convert it once, where you "
        "trust it, to .npy or .safetensors."
    )


def locate(row: int, ends: Sequence[int]) -> tuple[int, int]:
    """Number of the file that a row is in, by where each ends in rows of all, and its row there."""
    number = bisect.bisect_right(ends, row)
    return number, row - (ends[number - 1] if number else 0)


def np_bytes(data: bytes) -> Value:
    """An array that was saved into bytes; other bytes as they are."""
    try:
        return np.load(io.BytesIO(data), allow_pickle=False) if data.startswith(b"\x93NUMPY") else data
    except (ValueError, MemoryError) as error:  # objects; a header that claims more than there is
        raise ConfigurationError(f"EncodedData: an array cannot be read: {error}.") from error
