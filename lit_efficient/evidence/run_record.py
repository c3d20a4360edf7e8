"""What a run's folder tells of it, read without torch; what is missing or torn is named, and never an error.

    config.yaml  environment.json  log.txt  events.jsonl  samples/step_0000500.png  *.ckpt

``events.jsonl`` holds an object a line: ``time``, ``step`` and ``kind``, which is ``start``, ``techniques``,
``metrics``, ``checkpoint``, ``sample``, ``warning`` or ``end``. Runs from before it have CSVLogger's table.
"""

import contextlib
import csv
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_MOST_STEPS, _MOST_KEYS, _LATEST = 2**53, 10_000, 2**36  # the last in seconds since 1970
_TIME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?")
FILES = ("events.jsonl", "config.yaml", "environment.json", "log.txt")


@dataclass
class RunRecord:
    """A run, as far as its folder tells. ``metrics`` are values by step, by name; NaN is one that was not finite."""

    folder: Path
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)
    config_text: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    techniques: list[tuple[str, str]] = field(default_factory=list)
    checkpoints: list[tuple[int, str, str, float]] = field(default_factory=list)  # step, path, monitor, score
    samples: list[tuple[int, Path]] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)  # how often each was said
    next: list[str] = field(default_factory=list)
    ended: str = ""  # why; empty while nothing says that it has
    parent: str = ""
    starts: int = 0
    step: int = 0
    seconds: float = 0.0
    heard: float = 0.0  # time of the last event
    log: str = ""
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The last two parts of the folder: the config's name, and when it began."""
        return "/".join(self.folder.parts[-2:])

    @property
    def not_finite(self) -> tuple[str, list[int], bool] | None:
        """The loss that was not finite first, at which steps, and whether it ended so; ``None`` if all were finite."""
        bad = {
            name: [step for step, value in points.items() if not math.isfinite(value)]
            for name, points in self.metrics.items()
            if "loss" in name
        }
        name = min((name for name in bad if bad[name]), key=lambda name: bad[name][0], default="")
        return (name, bad[name], max(self.metrics[name]) == bad[name][-1]) if name else None

    @property
    def best(self) -> tuple[str, float, int] | None:
        """The monitored metric, its best value and the step of it, by checkpoints, else by the validation's loss."""
        scored = [(score, step, monitor) for step, _, monitor, score in self.checkpoints if math.isfinite(score)]
        if scored:
            monitor = scored[-1][2]
        else:
            losses = [name for name in self.metrics if name.endswith("loss") and name.startswith("val")]
            monitor = min(losses, key=len, default="")
            scored = [(y, x, monitor) for x, y in self.metrics.get(monitor, {}).items() if math.isfinite(y)]
        modes = [
            self.config.get(f"{key.removesuffix('.monitor')}.mode")
            for key, value in self.config.items()
            if key.endswith(".monitor") and value == monitor
        ]
        pick = max if "max" in modes else min
        found = pick((each for each in scored if each[2] == monitor), key=lambda each: each[0], default=None)
        return (monitor, found[0], found[1]) if found else None

    def values(self, part: str) -> tuple[str, list[float]]:
        """The first metric with ``part`` in its name that has finite values, and these."""
        for name, points in self.metrics.items():
            if part in name and (finite := [value for value in points.values() if math.isfinite(value)]):
                return name, finite
        return "", []


def read_run(folder: Path) -> RunRecord:
    """All that a run's folder tells."""
    run = RunRecord(folder)
    run.config_text = _text(folder / "config.yaml")
    run.log = _text(folder / "log.txt")
    try:
        run.config = flattened(yaml.safe_load(run.config_text), folder)
    except (yaml.YAMLError, RecursionError, ValueError, ArithmeticError):
        run.missing.append("config.yaml is no YAML: it is shown, and not compared")
    try:
        run.environment = flattened(json.loads(_text(folder / "environment.json") or "{}"), folder)
    except (ValueError, RecursionError):
        run.missing.append("environment.json cannot be read")
    _read_events(run, folder / "events.jsonl")
    if not run.metrics:
        _read_tables(run)
    run.missing += [f"{name} is not there" for name in FILES if not (folder / name).is_file()]
    run.step = max([run.step, *(max(points) for points in run.metrics.values())])
    inside = folder.resolve()
    for path in sorted(folder.glob("samples/*")):
        number = re.search(r"(\d+)$", path.stem)
        if number and path.suffix in (".png", ".txt") and path.is_file() and path.resolve().is_relative_to(inside):
            run.samples.append((int(number[1]), path))
    run.samples.sort()
    return run


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def flattened(value: object, folder: Path) -> dict[str, str]:
    """Nested data as text by dotted keys; items of lists that have a class go by its name, not by their place.

    Example:
        >>> flattened({"callbacks": [{"class_path": "x.EMA", "init_args": {"decay": 0.9}}], "seed": 1}, Path())
        {'callbacks.EMA': 'x.EMA', 'callbacks.EMA.decay': '0.9', 'seed': '1'}
    """
    found = dict(itertools.islice(_leaves(value, ""), _MOST_KEYS)) if isinstance(value, dict) else {}
    if _TIME.fullmatch(folder.name):  # which differs by itself
        return {key: text.replace(folder.name, "TIME") for key, text in found.items()}
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    parts: list[tuple[object, Any]] = []
    if isinstance(value, dict):
        arguments = value.get("init_args")
        parts = [*value.items()]
        if "class_path" in value and isinstance(arguments, dict | None):
            parts = [("", value["class_path"]), *(arguments or {}).items()]
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        classes = [str(item.get("class_path", "")) if isinstance(item, dict) else "" for item in value]
        names = [path.rpartition(".")[2] or str(place) for place, path in enumerate(classes)]
        parts = [
            (key if names.count(key) == 1 else f"{key}#{i}", item) for i, (key, item) in enumerate(zip(names, value))
        ]
    elif isinstance(value, list):
        words = list(map(str, value))
        value = shlex.join(words) if name.endswith("command") else ", ".join(words)
    elif value is None or isinstance(value, bool):
        value = json.dumps(value)
    if not parts:
        yield name, str(value)
    for key, item in parts:
        yield from _leaves(item, f"{name}.{key}".strip("."))


def _read_events(run: RunRecord, path: Path) -> None:
    for event in _events(run, path):
        kind, at = event.get("kind"), _number(event.get("time"))
        step = event.get("step")
        step = step if isinstance(step, int) and 0 <= step < _MOST_STEPS else run.step
        if kind == "start":
            run.starts += 1
            run.ended, run.next = "", []
            run.parent = str(event.get("parent") or run.parent)
            if event.get("resumed") and step:  # what came after it was done anew
                for points in run.metrics.values():
                    for later in [each for each in points if each > step]:
                        del points[later]
        elif kind == "metrics" and isinstance(values := event.get("values"), dict):
            for name, value in values.items():
                run.metrics.setdefault(name, {})[step] = _number(value)
        elif kind == "techniques" and isinstance(report := event.get("report"), list):
            entries = [entry for entry in report if isinstance(entry, dict)]
            run.techniques = [(str(entry.get("name")), str(entry.get("text", ""))) for entry in entries]
        elif kind == "checkpoint":
            score = _number(event.get("score"))
            run.checkpoints.append((step, str(event.get("path")), str(event.get("monitor") or ""), score))
        elif kind == "warning":
            text = str(event.get("text"))
            run.warnings[text] = run.warnings.get(text, 0) + 1
        elif kind == "end":
            run.ended = str(event.get("reason") or "ended")
            commands = event.get("next")
            run.next = list(map(str, commands)) if isinstance(commands, list) else []
        run.step = step
        if 0 <= at < _LATEST:
            run.seconds += max(0.0, at - run.heard) if kind != "start" and run.heard else 0.0
            run.heard = at
    run.metrics = {name: dict(sorted(points.items())) for name, points in run.metrics.items() if points}


def _events(run: RunRecord, path: Path) -> Iterator[dict[str, Any]]:
    torn = 0
    for line in _text(path).split("\n"):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            yield event
        else:
            torn += bool(line.strip())
    if torn:
        run.missing.append(f"{torn} {'line' if torn == 1 else 'lines'} of {path.name} cannot be read")


def _read_tables(run: RunRecord) -> None:
    """Take the metrics from the tables of CSVLogger."""
    tables = [*run.folder.glob("metrics.csv"), *run.folder.glob("*/*/metrics.csv")]
    for path in sorted(tables, key=lambda table: table.stat().st_mtime)[-1:]:
        rows = csv.DictReader(_text(path).replace("\0", "").splitlines())
        try:
            for row in rows:
                if not (row.get("step") or "").isdecimal():
                    continue
                for name in row.keys() - {None, "step", "epoch"}:
                    with contextlib.suppress(TypeError, ValueError):  # of what is empty, or no number
                        value = float(row[name])
                        run.metrics.setdefault(name, {})[min(int(row["step"]), _MOST_STEPS)] = value
        except csv.Error:
            run.missing.append(f"{path.name} is torn")
    if not run.metrics:
        run.missing.append("no metrics: neither events.jsonl nor a metrics.csv holds some")


def _number(value: object) -> float:
    """A value as a float; NaN for what is none."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
