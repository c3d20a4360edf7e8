"""What happened in a run, as one JSON object a line: ``events.jsonl`` in its folder.

    {"time": 1767225600.5, "step": 40, "kind": "metrics", "epoch": 0, "values": {"train/loss": 2.5, "lr": 0.001}}

``time`` is in seconds since 1970, ``step`` the optimizer steps that were done. The kinds and what they have beside it:

    start       parent (the checkpoint that it began from, as in run.json, or null), resumed (in this very folder)
    techniques  report: [{name, text}, ...]
    metrics     epoch, values: {name: number}
    checkpoint  path (from the folder), and monitor and score where it was saved for one
    sample      path (from the folder)
    warning     text
    end         reason ("done", "signal N", "diverged", "error"), next: [command, ...]

What is not finite is null. A process that is killed leaves at most its last line torn, which the next run removes.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lit_efficient.files.atomic_file import not_through_links

EVENTS = "events.jsonl"


def open_events(folder: Path) -> None:
    """Let a run have events: make the file, or remove the line that the process before left torn."""
    with suppress(OSError), open(folder / EVENTS, "ab+", opener=not_through_links) as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def write_event(folder: Path, kind: str, step: int, **more: Any) -> None:
    """Add an event, if the folder is that of a run which has some. A disk that is full ends no run."""
    event = {"time": round(time.time(), 3), "step": step, "kind": kind, **more}
    line = (json.dumps(_plain(event), ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")
    with suppress(OSError):
        file = not_through_links(folder / EVENTS, os.O_WRONLY | os.O_APPEND)
        try:
            whole = os.fstat(file).st_size
            if os.write(file, line) < len(line):
                os.ftruncate(file, whole)
        finally:
            os.close(file)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
