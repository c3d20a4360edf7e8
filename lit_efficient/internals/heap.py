"""The heap of the C library, which keeps pages that have been freed between others: ``malloc_trim`` of glibc."""

import ctypes
import functools
from typing import Any


def give_back() -> None:
    """Give freed memory back to the system; where the C library is another one, nothing happens."""
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
