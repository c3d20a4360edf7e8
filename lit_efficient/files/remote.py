"""Checkpoints on remote file systems (s3://, gs://, memory:// and others of fsspec), written whole or not at all.

    file:    local temporary file -> upload under a hidden name -> rename (an object store copies, atomically)
    folder:  local temporary folder -> upload under a new name -> pointer, a small file that names it, written as above

A pointer keeps its old folder until the new one is complete, which no rename of many objects could.
"""

import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lit_efficient.errors import CheckpointError
from lit_efficient.files.hidden_names import SUFFIX, is_stale, temporary_beside

_POINTER = b'{"folder": "'


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL, other than ``file://``."""
    return "://" in os.fspath(path) and not os.fspath(path).startswith("file://")


def upload(local: Path, url: str) -> None:
    """Write a local file to a URL; until it is complete, the URL keeps its previous content.

    Raises:
        CheckpointError: With the error of the file system.
    """
    with _errors(f"cannot write the checkpoint {url}", "the previous one is unchanged"):
        system, target = _system(url)
        parent, _, name = target.rpartition("/")
        system.makedirs(parent, exist_ok=True)
        for entry in _entries(system, parent):
            if entry.endswith(SUFFIX) and is_stale(Path(entry)):
                system.rm(entry)
        hidden = f"{parent}/{temporary_beside(Path(name)).name}"
        try:
            system.put_file(str(local), hidden)
            size = system.size(hidden)
            if size != local.stat().st_size:
                raise OSError(f"{size} bytes of {local.stat().st_size} have arrived")
            system.mv(hidden, target)
        except BaseException:
            with suppress(Exception):
                system.rm(hidden)
            raise


def new_folder(url: str) -> str:
    """Return the URL of a folder, not used before, for the files of the checkpoint ``url``."""
    return f"{url}.{secrets.token_hex(4)}"


def upload_files(local: Path, url: str) -> None:
    """Write the files of a local folder into a remote one.

    Raises:
        CheckpointError: With the error of the file system.
    """
    with _errors(f"cannot write the checkpoint {url}", "the previous one is unchanged"):
        system, target = _system(url)
        system.makedirs(target, exist_ok=True)
        for file in filter(Path.is_file, local.rglob("*")):
            system.put_file(str(file), f"{target}/{file.relative_to(local).as_posix()}")


def point(url: str, folder: str) -> None:
    """Make a complete folder the checkpoint ``url``, and remove the folders that were it, or did not become it."""
    with tempfile.TemporaryDirectory() as place:
        pointer = Path(place, "pointer")
        name = folder.rpartition("/")[2]
        pointer.write_text(json.dumps({"folder": name}))
        upload(pointer, url)
    _remove_folders(url, keep=name)


def remove(url: str) -> None:
    """Remove a checkpoint, if it exists: the file or pointer first, then the folder."""
    with _errors(f"cannot remove the checkpoint {url}", "try again"):
        system, target = _system(url)
        if system.exists(target):
            system.rm(target)
        _remove_folders(url)


@contextmanager
def downloaded(url: str) -> Iterator[Path]:
    """Yield a local copy of a checkpoint, a file or a folder, which is removed when the block ends.

    Raises:
        CheckpointError: If it does not exist or cannot be read. Errors of the block name the URL, too.
    """
    place = tempfile.mkdtemp()
    try:
        local = Path(place, url.rpartition("/")[2])
        with _errors(f"cannot read the checkpoint {url}", "nothing was loaded"):
            system, source = _system(url)
            if not system.isfile(source):
                raise CheckpointError(f"there is no file {url}")
            system.get_file(source, str(local))
            if local.stat().st_size < 1024 and local.read_bytes().startswith(_POINTER):
                name = str(json.loads(local.read_text())["folder"])
                if not re.fullmatch(rf"{re.escape(local.name)}\.[0-9a-f]{{8}}", name):
                    raise CheckpointError(f"{url} names a folder that is not its own: {name!r}")
                local.unlink()
                folder = f"{source.rpartition('/')[0]}/{name}"
                for file in system.find(folder):
                    inside = file.removeprefix(folder).lstrip("/")
                    if ".." in inside.split("/"):  # names in an object store are any text
                        raise CheckpointError(f"{url} has a file outside of its folder: {inside!r}")
                    to = local / inside
                    to.parent.mkdir(parents=True, exist_ok=True)
                    system.get_file(file, str(to))
        try:
            yield local
        except CheckpointError as error:
            raise type(error)(str(error).replace(str(local), url)) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _remove_folders(url: str, keep: str = "") -> None:
    system, target = _system(url)
    parent, _, name = target.rpartition("/")
    for entry in _entries(system, parent):
        found = entry.rstrip("/").rpartition("/")[2]
        if found != keep and re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]{{8}}", found):
            system.rm(entry, recursive=True)


def _entries(system: Any, folder: str) -> list[str]:
    """Return the paths in a folder; none if it does not exist, as an empty folder of an object store never does."""
    try:
        return list(system.ls(folder, detail=False))
    except FileNotFoundError:
        return []


def _system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there."""
    import fsspec

    if url.startswith(("http://", "https://")):
        raise CheckpointError(f"{url} is a page of the web, where no checkpoint can be written: download it first")
    system, path = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    return system, str(path)


@contextmanager
def _errors(what: str, then: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise CheckpointError(f"{what}: {str(error) or type(error).__name__}; {then}") from error
