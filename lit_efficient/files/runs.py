"""Folders of runs. Each run has a folder ``ROOT/TIME`` of its own; ``ROOT/latest`` links to the newest.

    runs/language_model/2026-01-31_12-00-00/    config.yaml  run.json  metrics.csv  best.ckpt  last.ckpt  samples/
                                                events.jsonl  environment.json  log.txt
    runs/language_model/latest -> 2026-01-31_12-00-00

On a file system without links ``latest`` is a file that contains the folder's name; :func:`through_latest` follows it.
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
    """Create ``root/TIME``, with a number added if another process created that folder in the same second."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    root.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = root / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def hold(folder: Path) -> int | None:
    """Lock a run's folder for this process.

    Returns:
        A file descriptor that holds the lock until it is closed, -1 where folders cannot be locked, or None if another
        process holds the lock.
    """
    try:
        import fcntl

        number = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # Windows
        return -1
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        return None
    except OSError:  # a file system without locks
        pass
    return number


def point_latest(folder: Path) -> None:
    """Point ``latest`` beside a run's folder to that folder, in one step."""
    latest = folder.parent / LATEST
    try:
        replace_link(latest, folder.name)
    except OSError:  # links are not supported or not permitted
        with replacing(latest) as file:
            file.write(folder.name.encode())


def through_latest(path: Path) -> Path:
    """Return ``path`` with a ``latest`` that is a file replaced by the folder that it names."""
    for latest in [path, *path.parents]:
        if latest.name == LATEST and latest.is_file() and not latest.is_symlink():
            return latest.parent / latest.read_text("utf-8").strip() / path.relative_to(latest)
    return path


def real(path: Path) -> Path:
    """Return ``path`` without links, relative if it lies below the working directory: ``latest`` may soon change."""
    absolute = os.path.realpath(through_latest(path))
    relative = os.path.relpath(absolute)
    return Path(absolute if relative.startswith("..") else relative)


def newest_runs(root: Path, most: int = 3) -> list[Path]:
    """Return the folders below ``root`` that have the newest checkpoints, newest first."""
    written: dict[Path, float] = {}
    for checkpoint in root.glob("**/*.ckpt"):
        time = checkpoint.stat().st_mtime
        written[checkpoint.parent] = max(time, written.get(checkpoint.parent, time))
    return sorted(written, key=lambda folder: -written[folder])[:most]


def write_record(folder: Path, record: Mapping[str, object]) -> None:
    """Write facts about a run that later runs need: its parent, and its loggers' names."""
    with replacing(folder / _RECORD) as file:
        file.write(json.dumps(record, indent=1).encode())


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record that :func:`write_record` wrote, or None if ``folder`` is no run's folder."""
    try:
        record = json.loads((folder / _RECORD).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if isinstance(record, dict):
        return record
    return None


def samples_file(step: int, suffix: str, root: str, log_dir: str | None, folder: str | None = None) -> Path:
    """Return the path of a sample, ``FOLDER/samples/step_0000500.png``; names sort by step.

    Args:
        step: Optimizer steps.
        suffix: Suffix of the file, with its dot.
        root: The trainer's ``default_root_dir``, used if it is a run's folder or there is no ``log_dir``.
        log_dir: The logger's folder.
        folder: Folder of the user's choice, which takes precedence.
    """
    place = folder or (root if read_record(Path(root)) is not None else log_dir) or root
    return Path(place, "samples", f"step_{step:07d}{suffix}")
