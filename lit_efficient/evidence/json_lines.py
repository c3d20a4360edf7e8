"""Files of JSON objects, one a line, to which results are appended as they come."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, which need not exist. A line that was cut off by a crash is skipped."""
    if not file.is_file():
        return
    for line in file.read_text("utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def append_record(file: Path, record: Mapping[str, object]) -> None:
    """Append an object and flush it to the disk. The folder is created if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record) + "\n"
    if file.is_file() and file.read_bytes()[-1:] not in (b"", b"\n"):
        line = "\n" + line  # the last line was cut off
    with file.open("a", encoding="utf-8") as stream:
        stream.write(line)
        stream.flush()
        os.fsync(stream.fileno())
