"""Where prepared data is kept, and how it gets there whole or not at all.

A prepared folder is written beside its final place and moved there in one step, under a lock, so a killed run leaves no
half-written cache and two runs that start together prepare it once.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from lit_efficient.errors import ConfigurationError


def cache_root() -> Path:
    """The folder for all caches: ``$LIT_EFFICIENT_CACHE``, else ``~/.cache/lit_efficient``. Creates nothing."""
    configured = os.environ.get("LIT_EFFICIENT_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "lit_efficient"


def prepared_folder(folder: Path, build: Callable[[Path], None], problem: Callable[[Path], str | None]) -> Path:
    """Return ``folder`` with its content built and checked; build it if it is not there.

    A damaged one is refused and not built anew: a disk that has lost bytes once is for its owner to look at.

    Args:
        folder: where the content shall lie.
        build: writes the content into the empty folder that it is given.
        problem: says in one sentence what is wrong with a folder's content, None if it is sound.

    Raises:
        ConfigurationError: the content is damaged, or the cache cannot be written.
    """
    from filelock import FileLock

    try:
        if not folder.exists():  # what exists is complete by construction; a cache on a read-only disk needs no lock
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(folder.name + ".lock")):
                if not folder.exists():
                    _build(folder, build)
    except OSError as error:
        raise ConfigurationError(
            f"The cache folder {folder.parent} cannot be written: {error}. Set cache_dir or LIT_EFFICIENT_CACHE to a "
            "folder that can."
        ) from error
    fault = problem(folder)
    if fault is not None:
        raise ConfigurationError(
            f"The cache {folder} is damaged: {fault} Delete the folder and run again: it is made anew."
        )
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(scratch)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
