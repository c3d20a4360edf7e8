"""Where a run lies: ``ROOT/TIME``, a folder that no other run gets, with all that it writes; ``ROOT/latest`` names it.

    runs/language_model/2026-01-31_12-00-00/    config.yaml  run.json  metrics.csv  best.ckpt  last.ckpt  samples/
                                                events.jsonl  environment.json  log.txt
    runs/language_model/latest -> 2026-01-31_12-00-00

Where the file system has no links, ``latest`` is a file that holds the name, and :func:`through_latest` follows it.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_efficient.files.atomic_file import replace_link, replacing

LATEST = "latest"
_RECORD = "run.json"


def new_folder(root: Path) -> Path:
    """Make ``root/TIME``; of processes that ask in the same second each gets one of its own."""
    stamp, number = time.strftime("%Y-%m-%d_%H-%M-%S"), 1
    root.mkdir(parents=True, exist_ok=True)
    while True:
        folder = root / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def hold(folder: Path) -> int | None:
    """Keep a run's folder for this process, until it closes the number returned or ends; ``None``: another one does."""
    try:
        import fcntl

        number = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # where folders cannot be held
        return -1
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        return None
    except OSError:  # of a file system without locks
        pass
    return number


def point_latest(folder: Path) -> None:
    """Let ``latest`` beside a run's folder name it, in one step."""
    latest = folder.parent / LATEST
    try:
        replace_link(latest, folder.name)
    except OSError:  # no links here, or none that may be made
        with replacing(latest) as file:
            file.write(folder.name.encode())


def through_latest(path: Path) -> Path:
    """``path`` with the name in the place of each ``latest`` that is a file."""
    for latest in [path, *path.parents]:
        if latest.name == LATEST and latest.is_file() and not latest.is_symlink():
            return latest.parent / latest.read_text("utf-8").strip() / path.relative_to(latest)
    return path


def real(path: Path) -> Path:
    """Where a path leads now, relative to here if it lies below: ``latest`` may soon name another run."""
    absolute = os.path.realpath(through_latest(path))
    relative = os.path.relpath(absolute)
    return Path(absolute if relative.startswith("..") else relative)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Note in a run's folder what a later run must know: its parent, its loggers' names for it."""
    with replacing(folder / _RECORD) as file:
        file.write(json.dumps(record, indent=1).encode())


def samples_file(step: int, suffix: str, root: str, log_dir: str | None, folder: str | None = None) -> Path:
    """Where what a model draws or writes at a step is kept: ``FOLDER/samples/step_0000500.png``; names sort by the
    step.

    ``folder`` is that of the user's choice; else a run of the command line has the trainer's ``root`` for itself, and
    other runs have a ``log_dir``.
    """
    place = folder or (root if read_record(Path(root)) is not None else log_dir) or root
    return Path(place, "samples", f"step_{step:07d}{suffix}")


def read_record(folder: Path) -> dict[str, Any] | None:
    """What :func:`write_record` noted; ``None`` for a folder that is no run's."""
    try:
        record = json.loads((folder / _RECORD).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
