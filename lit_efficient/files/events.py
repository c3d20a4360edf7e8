"""Events of a run, one JSON object per line in ``events.jsonl`` of the run's folder.

    {"time": 1767225600.5, "step": 40, "kind": "metrics", "epoch": 0, "values": {"train/loss": 2.5, "lr": 0.001}}

``time`` is in seconds since 1970 and ``step`` is the number of optimizer steps. Each kind has further keys:

    start       parent (checkpoint of the start, as in run.json, or null), resumed (whether in this very folder)
    techniques  report: [{name, text}, ...]
    metrics     epoch, values: {name: number}
    checkpoint  path (relative to the folder); monitor and score if the checkpoint was saved for a metric
    sample      path (relative to the folder)
    warning     text
    end         reason ("done", "signal N", "diverged", "error"), next: [command, ...]

Numbers that are not finite are null. A killed process leaves at most an incomplete last line, which the next run
removes.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lit_efficient.files.atomic_file import not_through_links

EVENTS = "events.jsonl"


def open_events(folder: Path) -> None:
    """Create the file of events, or remove an incomplete last line from it."""
    with suppress(OSError), open(folder / EVENTS, "ab+", opener=not_through_links) as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def write_event(folder: Path, kind: str, step: int, **more: object) -> None:
    """Append an event if the folder has a file of events. Errors are ignored: a full disk must not end a run."""
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


def _plain(value: object) -> object:
    """Return a value that JSON can hold; other objects become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None  # float() also of numpy's subclass
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
