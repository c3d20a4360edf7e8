"""Hidden names of what is being written, which tell machine and process: so others know when it was left behind."""

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

SUFFIX = ".partial"  # a file being written, or a folder being removed
_FOREIGN_IS_STALE_AFTER = 24 * 3600  # seconds; another machine's process cannot be asked whether it lives
in_use: set[Path] = set()  # temporaries of this process


def temporary_beside(target: Path) -> Path:
    """A hidden name in the same folder, thus on the same file system, that tells who is writing."""
    writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return target.with_name(f".{target.name[:40]}.{writer}{SUFFIX}")


@contextlib.contextmanager
def hidden_beside(target: Path) -> Iterator[Path]:
    """Such a name while the block runs; what is left under it then goes, be it a file, a link or a folder."""
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
    """Whether the process that made a temporary is gone."""
    if entry in in_use:
        return False
    parts = re.fullmatch(rf".*\.(?P<host>[^/]+)-(?P<pid>\d+)-[0-9a-f]{{8}}{re.escape(SUFFIX)}", entry.name)
    if parts is None:
        return False
    ours = entry.name.split(f"-{parts['pid']}-")[0].endswith(f".{socket.gethostname()}")
    if not ours or sys.platform == "win32":  # where asking a process by a signal would end it
        with contextlib.suppress(FileNotFoundError):
            return time.time() - entry.stat().st_mtime > _FOREIGN_IS_STALE_AFTER
        return False
    pid = int(parts["pid"])
    if pid == os.getpid():
        return True  # not in use, so an earlier process's with the same number, as in containers
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
