"""Hidden names of unfinished files, which contain machine and process to recognise what a dead process left."""

import contextlib
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".partial"  # of a file that is being written or a folder that is being removed
_FOREIGN_IS_STALE_AFTER = 24 * 3600  # seconds; whether a process of another machine lives cannot be asked
in_use: set[Path] = set()  # hidden paths that this process is using


def temporary_beside(target: Path) -> Path:
    """Return a hidden path in the target's folder, and so on its file system, that names the writing process."""
    writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return target.with_name(f".{target.name[:40]}.{writer}{SUFFIX}")


@contextlib.contextmanager
def hidden_beside(target: Path) -> Iterator[Path]:
    """Yield such a path; when the block ends, remove the file, link or folder that is still there."""
    hidden = temporary_beside(target)
    in_use.add(hidden)
    try:
        yield hidden
    finally:
        if hidden.is_dir() and not hidden.is_symlink():
            shutil.rmtree(hidden, ignore_errors=True)
        else:
            hidden.unlink(missing_ok=True)
        in_use.discard(hidden)


def is_stale(entry: Path) -> bool:
    """Return whether the process that created a hidden file is gone."""
    if entry in in_use:
        return False
    parts = re.fullmatch(rf".*\.(?P<host>[^/]+)-(?P<pid>\d+)-[0-9a-f]{{8}}{re.escape(SUFFIX)}", entry.name)
    if parts is None:
        return False
    ours = entry.name.split(f"-{parts['pid']}-")[0].endswith(f".{socket.gethostname()}")
    if not ours or sys.platform == "win32":  # on Windows os.kill would end the process
        with contextlib.suppress(FileNotFoundError):
            return time.time() - entry.stat().st_mtime > _FOREIGN_IS_STALE_AFTER
        return False
    pid = int(parts["pid"])
    if pid == os.getpid():
        return True  # not in use here, so an earlier process had the same number, as in containers
    try:
        os.kill(pid, 0)  # sends no signal, only asks whether the process exists
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
