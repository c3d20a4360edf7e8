"""Where prepared data is kept, and how it gets there whole or not at all.

A prepared folder is written beside its final place and moved there in one step, under a lock, so a killed run leaves no
half-written cache and two runs that start together prepare it once.
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from lit_efficient.errors import ConfigurationError


def cache_root() -> Path:
    """The folder for all caches: ``$LIT_EFFICIENT_CACHE``, else ``~/.cache/lit_efficient``. Creates nothing."""
    configured = os.environ.get("LIT_EFFICIENT_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "lit_efficient"


def prepared_folder(folder: Path, build: Callable[[Path], None], problem: Callable[[Path], str | None]) -> Path:
    """Return ``folder`` with its content built and checked; build it, or build it anew, if need be.

    Rebuilding is safe for a folder whose name holds the hash of all that it was made from.

    Args:
        folder: where the content shall lie.
        build: writes the content into the empty folder that it is given.
        problem: says in one sentence what is wrong with a folder's content, None if it is sound.

    Raises:
        ConfigurationError: the cache cannot be written.
    """
    from filelock import FileLock

    if folder.exists() and problem(folder) is None:  # a sound cache may lie on a read-only disk: no lock
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if folder.exists():
                fault = problem(folder)
                if fault is None:
                    return folder
                warnings.warn(f"The cache {folder} is damaged and is built anew: {fault}", stacklevel=2)
            _build(folder, build)
    except OSError as error:
        raise ConfigurationError(
            f"The cache folder {folder.parent} cannot be written: {error}. Set cache_dir or LIT_EFFICIENT_CACHE to a "
            "folder that can."
        ) from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(scratch)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
