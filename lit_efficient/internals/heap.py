"""Return of freed memory to the system: ``malloc_trim`` of glibc, whose heap keeps freed pages otherwise."""

import ctypes
import functools
from typing import Any


def give_back() -> None:
    """Return freed memory to the system. Other C libraries than glibc do nothing."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
