"""Content of the file of an offline run of W&B: records of protobuf in LevelDB's log format."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def _payloads(data: bytes) -> Iterator[bytes]:
    place = 7  # the file's own header
    whole = b""
    while place + 7 <= len(data):
        rest = _BLOCK - place % _BLOCK
        if rest < 7:  # a block ends with zeros
            place += rest
            continue
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        kind = data[place + 6]
        part = data[place + 7 : place + 7 + length]
        if len(part) < length:  # W&B is still writing it
            return
        place += 7 + length
        if kind == _FULL:
            yield part
        elif kind in (_FIRST, _MIDDLE, _LAST):
            whole = part if kind == _FIRST else whole + part
            if kind == _LAST:
                yield whole


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a file."""
    from wandb.proto.wandb_internal_pb2 import Record

    for payload in _payloads(path.read_bytes()):
        record = Record()
        record.ParseFromString(payload)
        yield record


def config_of(path: Path) -> dict[str, Any]:
    """Return the config that W&B shows for a run, without its own entries."""
    config: dict[str, Any] = {}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else ()
        for one in updates:
            *outer, last = one.nested_key or [one.key]
            place = config
            for key in outer:
                place = place.setdefault(key, {})
            place[last] = json.loads(one.value_json)
    return {key: value for key, value in config.items() if key != "_wandb"}


def ids_of(path: Path) -> list[str]:
    """Return the ids of the runs in a file."""
    return [one.run.run_id for one in records(path) if one.WhichOneof("record_type") == "run"]


def written(folder: Path) -> Path:
    """The file of a run, once the service of W&B has written it: it does so after `finish` has returned."""
    import wandb

    wandb.finish()
    for _ in range(300):
        files = list(folder.glob("run-*.wandb"))
        if files and any(one.WhichOneof("record_type") == "exit" for one in records(files[0])):
            return files[0]
        time.sleep(0.1)
    raise AssertionError(f"{folder} has no whole file")
