"""Files and folders that are written and removed atomically: other processes see all of them or nothing.

    temporary file beside the target -> flush, fsync -> os.replace -> fsync of the folder

The temporary file lies in the target's folder because ``os.replace`` is atomic within one file system only. Its hidden
name contains the machine and the process, so that the next writer can remove files of killed processes.
"""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from lit_efficient.errors import refusal
from lit_efficient.files.hidden_names import SUFFIX, hidden_beside, in_use, is_stale, temporary_beside
from lit_efficient.files.sums import write_sums


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """Yield a new binary file that replaces the target when the block ends without an exception.

    Missing folders are created. If writing fails, the target is unchanged and no temporary file remains.
    """
    with _new_beside(target) as temporary:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if (target / ".metadata").is_file():
            # The target is a sharded checkpoint of a run that now continues in one process.
            end_folder(temporary, target)
        else:
            os.replace(temporary, target)
        _sync_folder(target.parent)


def not_through_links(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file like ``os.open`` but refuse links, because a run's folder may come from somebody else."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def check_new_folder(folder: Path, who: str) -> None:
    """Raise an error in the name of ``who`` unless ``folder`` is new or empty.

    Raises:
        ConfigurationError: If ``folder`` is a file, a link or a folder with content.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise refusal(who, "output", "a new or empty folder", str(folder))


def write_folder(target: Path, write: Callable[[Path], object], sums: bool = True) -> Path:
    """Fill a temporary folder with ``write`` and rename it to ``target``.

    Args:
        target: Path of the folder; an existing folder there must be empty.
        write: Function that fills the temporary folder.
        sums: Write ``SHA256SUMS`` into the folder, for :func:`~lit_efficient.files.sums.check_sums`.

    Returns:
        ``target``.
    """
    with _new_beside(target) as temporary:
        temporary.mkdir()
        write(temporary)
        if sums:
            write_sums(temporary)
        if target.exists():
            target.rmdir()
        os.replace(temporary, target)
    return target


def begin_folder(target: Path) -> Path:
    """Create a hidden folder beside ``target`` that several processes fill; :func:`end_folder` renames it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(target.parent)
    temporary = temporary_beside(target)
    temporary.mkdir()
    in_use.add(temporary)
    return temporary


def end_folder(temporary: Path, target: Path) -> None:
    """Rename a filled folder to ``target`` and remove the file or folder that was there."""
    doomed = temporary_beside(target)
    in_use.add(doomed)
    try:
        if target.exists():
            os.rename(target, doomed)
        os.replace(temporary, target)
        _sync_folder(target.parent)
        if doomed.exists():
            remove_whole(doomed)
    finally:
        in_use.difference_update((temporary, doomed))


def link_again(source: Path, target: Path) -> bool:
    """Make ``target`` a hard link to ``source``; return False if the file system has no hard links."""
    with _new_beside(target) as temporary:
        try:
            os.link(source, temporary)
            os.replace(temporary, target)
        except OSError:
            return False
    _sync_folder(target.parent)
    return True


def replace_link(link: Path, name: str) -> None:
    """Point a symbolic link to ``name``, a folder beside the link, in one step.

    Raises:
        OSError: If links are not supported or not permitted.
    """
    remove_stale(link.parent)
    with hidden_beside(link) as temporary:
        os.symlink(name, temporary, target_is_directory=True)
        os.replace(temporary, link)


def remove_whole(target: Path) -> None:
    """Remove a file or folder, if it exists; no process ever sees a part of the folder under its name."""
    remove_stale(target.parent)
    if not target.is_dir() or target.is_symlink():
        target.unlink(missing_ok=True)
        return
    doomed = temporary_beside(target)
    in_use.add(doomed)
    try:
        os.rename(target, doomed)
        shutil.rmtree(doomed)
    finally:
        in_use.discard(doomed)


@contextlib.contextmanager
def _new_beside(target: Path) -> Iterator[Path]:
    """Yield an unused hidden path beside the target; create the folder and remove files of killed processes.

    An ``OSError`` without a file name gets the target's. Libraries in Rust (safetensors, tokenizers) report such errors
    only as text, ``... (os error 28)``, which becomes an ``OSError``.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(target.parent)
    try:
        with hidden_beside(target) as hidden:
            yield hidden
    except OSError as error:
        if error.errno:
            error.filename = error.filename or str(target)
        raise
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(target)) from error


def remove_stale(folder: Path) -> None:
    """Remove hidden files and folders of processes that are gone."""
    for entry in folder.glob(f".*{SUFFIX}"):
        if not is_stale(entry):
            continue
        with contextlib.suppress(OSError):  # another process may remove the entry at the same time
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _sync_folder(folder: Path) -> None:
    """Flush a folder, so that a rename survives a power failure. Windows cannot open folders."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
