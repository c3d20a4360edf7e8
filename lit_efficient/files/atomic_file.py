"""Files and folders that appear whole or not at all, and vanish whole.

    temporary file beside the target -> flush, fsync -> os.replace -> fsync of the folder

The temporary must lie in the same folder: ``os.replace`` is atomic within one file system only. Its hidden name tells
machine and process, so that the next writer can remove what killed processes left.
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
    """A new file to write in binary, which takes the target's place when the block ends without an exception.

    Missing folders are made. If it cannot be written, the target is as it was, and nothing is left behind.
    """
    with _new_beside(target) as temporary:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if (target / ".metadata").is_file():  # a checkpoint in shards, which a run of one process goes on from
            end_folder(temporary, target)
        else:
            os.replace(temporary, target)
        _sync_folder(target.parent)


def not_through_links(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file as ``os.open`` does, but none elsewhere: a run's folder may come from somebody else."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def check_new_folder(folder: Path, who: str) -> None:
    """Refuse, in the name of ``who``, to write over what is there.

    Raises:
        ConfigurationError: If ``folder`` is a file or a link, which no folder can replace, or holds something.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise refusal(who, "output", "a new or empty folder", str(folder))


def write_folder(target: Path, write: Callable[[Path], object], sums: bool = True) -> Path:
    """Let ``write`` fill a temporary folder beside ``target``, and move it there when it is whole.

    ``sums`` writes SHA256SUMS beside that, for :func:`~lit_efficient.files.sums.check_sums`.
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
    """A new hidden folder beside ``target``, for several processes to fill."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target.parent)
    temporary = temporary_beside(target)
    temporary.mkdir()
    in_use.add(temporary)
    return temporary


def end_folder(temporary: Path, target: Path) -> None:
    """Let a filled folder take the place of ``target``, be it a folder, a file or nothing."""
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
    """Give a file a second name, in the place of what has it; False where the file system knows one name a file."""
    with _new_beside(target) as temporary:
        try:
            os.link(source, temporary)
            os.replace(temporary, target)
        except OSError:
            return False
    _sync_folder(target.parent)
    return True


def replace_link(link: Path, name: str) -> None:
    """Let a link lead to a folder beside it, in one step.

    Raises:
        OSError: Where there are no links, or none may be made.
    """
    _remove_stale(link.parent)
    with hidden_beside(link) as temporary:
        os.symlink(name, temporary, target_is_directory=True)
        os.replace(temporary, link)


def remove_whole(target: Path) -> None:
    """Remove a file, or a folder such that nobody ever finds half of it; nothing if it is gone already."""
    _remove_stale(target.parent)
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
    """A hidden name beside a target, in a folder that is there and has nothing of killed processes in it.

    Errors of the system that name no file, as those of a write, name the target. So do those that a library in Rust
    (safetensors, tokenizers) has in words alone: ``... (os error 28)``.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target.parent)
    try:
        with hidden_beside(target) as hidden:
            yield hidden
    except OSError as error:
        if error.errno:
            error.filename = error.filename or str(target)
        raise
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(target)) from error
        raise


def _remove_stale(folder: Path) -> None:
    for entry in folder.glob(f".*{SUFFIX}"):
        if is_stale(entry):
            with contextlib.suppress(OSError):  # somebody else may be removing it, too
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power failure. Windows cannot open folders."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
