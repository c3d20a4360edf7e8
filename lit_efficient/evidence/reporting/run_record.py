"""What a run's folder tells of it, read without torch; what is missing or torn is named, and never an error.

    config.yaml  environment.json  log.txt  events.jsonl  samples/step_0000500.png

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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lit_efficient.files.events import EVENTS

_MOST_STEPS, _MOST_KEYS, _LATEST = 2**53, 10_000, 2**36  # the last in seconds since 1970
_TIME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?")
_FILES = (EVENTS, "config.yaml", "environment.json", "log.txt")


class RunRecord:
    """A run, as far as its folder tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = "/".join(folder.parts[-2:])  # the config's name, and when it began
        self.metrics: dict[str, dict[int, float]] = {}  # by name the values by step; NaN was not finite
        self.techniques: list[tuple[str, str]] = []
        self.checkpoints: list[tuple[int, str, str, float]] = []  # step, path, monitor, score
        self.warnings: Counter[str] = Counter()
        self.next: list[str] = []
        self.ended = self.parent = ""  # why; empty while nothing says that it has
        self.starts = self.step = 0
        self.seconds = self.heard = 0.0  # of all its parts; the time of the last event
        self.missing = [f"{name} is not there" for name in _FILES if not (folder / name).is_file()]
        self.config_text, self.log = _text(folder / "config.yaml"), _text(folder / "log.txt")
        self.config: dict[str, str] = {}
        self.environment: dict[str, str] = {}
        try:
            self.config = flattened(yaml.safe_load(self.config_text), folder)
        except (yaml.YAMLError, RecursionError, ValueError, ArithmeticError):
            self.missing.append("config.yaml is no YAML: it is shown, and not compared")
        try:
            self.environment = flattened(json.loads(_text(folder / "environment.json") or "{}"), folder)
        except (ValueError, RecursionError):
            self.missing.append("environment.json cannot be read")
        for event in self._events():
            self._take(event)
        if not any(self.metrics.values()):
            self._read_table()
        self.metrics = {name: dict(sorted(points.items())) for name, points in self.metrics.items() if points}
        self.step = max([self.step, *(max(points) for points in self.metrics.values())])

    @property
    def samples(self) -> list[tuple[int, Path]]:
        """Pictures and texts by step; none that lie elsewhere."""
        inside, found = self.folder.resolve(), []
        for path in self.folder.glob("samples/*"):
            step = re.search(r"(\d+)\.(png|txt)$", path.name)
            if step and path.is_file() and path.resolve().is_relative_to(inside):
                found.append((int(step[1]), path))
        return sorted(found)

    @property
    def not_finite(self) -> tuple[str, list[int], bool] | None:
        """The loss that was not finite first, at which steps, and whether it ended so; ``None`` if all were finite."""
        losses = {name: points for name, points in self.metrics.items() if "loss" in name}
        bad = {name: [x for x, y in points.items() if not math.isfinite(y)] for name, points in losses.items()}
        name = min((name for name in bad if bad[name]), key=lambda name: bad[name][0], default="")
        return (name, bad[name], max(losses[name]) == bad[name][-1]) if name else None

    @property
    def best(self) -> tuple[str, float, int] | None:
        """The monitored metric, its best value and the step of it, by checkpoints, else by the validation's loss."""
        scored = [(monitor, score, step) for step, _, monitor, score in self.checkpoints if math.isfinite(score)]
        losses = [name for name in self.metrics if name.startswith("val") and name.endswith("loss")]
        monitor = scored[-1][0] if scored else min(losses, key=len, default="")
        if not scored:
            scored = [(monitor, y, x) for x, y in self.metrics.get(monitor, {}).items() if math.isfinite(y)]
        savers = [key.removesuffix(".monitor") for key, value in self.config.items() if value == monitor]
        pick = max if "max" in [self.config.get(f"{saver}.mode") for saver in savers] else min
        return pick((each for each in scored if each[0] == monitor), key=lambda each: each[1], default=None)

    def values(self, part: str) -> tuple[str, list[float]]:
        """The first metric with ``part`` in its name that has finite values, and these."""
        finite = {name: list(filter(math.isfinite, points.values())) for name, points in self.metrics.items()}
        return next(((name, values) for name, values in finite.items() if part in name and values), ("", []))

    def _events(self) -> Iterator[dict[str, Any]]:
        torn = 0
        for line in _text(self.folder / EVENTS).split("\n"):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            if isinstance(event, dict):
                yield event
            torn += not isinstance(event, dict) and bool(line.strip())
        if torn:
            self.missing.append(f"{torn} {'line' if torn == 1 else 'lines'} of events.jsonl cannot be read")

    def _take(self, event: dict[str, Any]) -> None:
        kind, at, step = event.get("kind"), _number(event.get("time")), event.get("step")
        self.step = step = step if isinstance(step, int) and 0 <= step < _MOST_STEPS else self.step
        match event:
            case {"kind": "metrics", "values": dict(values)}:
                for name, value in values.items():
                    self.metrics.setdefault(name, {})[step] = _number(value)
            case {"kind": "start"}:
                self.starts += 1
                self.ended, self.next = "", []
                self.parent = str(event.get("parent") or self.parent)
                if event.get("resumed") and step:  # what came after it was done anew
                    for name, points in self.metrics.items():
                        self.metrics[name] = {x: y for x, y in points.items() if x <= step}
            case {"kind": "techniques", "report": list(report)}:
                self.techniques = [(str(each["name"]), str(each["text"])) for each in report if _is_report(each)]
            case {"kind": "checkpoint"}:
                path, monitor = str(event.get("path")), str(event.get("monitor") or "")
                self.checkpoints.append((step, path, monitor, _number(event.get("score"))))
            case {"kind": "warning"}:
                self.warnings[str(event.get("text"))] += 1
            case {"kind": "end"}:
                self.ended, commands = str(event.get("reason") or "yes"), event.get("next")
                self.next = list(map(str, commands)) if isinstance(commands, list) else []
        if 0 <= at < _LATEST:
            self.seconds += max(0.0, at - self.heard) if kind != "start" and self.heard else 0.0
            self.heard = at

    def _read_table(self) -> None:
        """Take the metrics from the newest table of CSVLogger."""
        tables = [*self.folder.glob("metrics.csv"), *self.folder.glob("*/*/metrics.csv")]
        for path in sorted(tables, key=lambda table: table.stat().st_mtime)[-1:]:
            with contextlib.suppress(csv.Error):  # of the rest, where it is torn
                for row in csv.DictReader(_text(path).replace("\0", "").splitlines()):
                    for name in row.keys() - {None, "step", "epoch"}:
                        with contextlib.suppress(TypeError, ValueError, KeyError):  # of what is empty, or no number
                            step, value = min(int(row["step"]), _MOST_STEPS), float(row[name])
                            self.metrics.setdefault(name, {})[step] = value
        if not self.metrics:
            self.missing.append("no metrics: neither events.jsonl nor a metrics.csv holds some")


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
        parts, arguments = [*value.items()], value.get("init_args")
        if "class_path" in value and isinstance(arguments, dict | None):
            parts = [("", value["class_path"]), *(arguments or {}).items()]
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        classes = [str(item.get("class_path", "")) if isinstance(item, dict) else "" for item in value]
        names = [path.rpartition(".")[2] or str(place) for place, path in enumerate(classes)]
        parts = [(key if names.count(key) == 1 else f"{key}#{i}", value[i]) for i, key in enumerate(names)]
    elif isinstance(value, list):
        words = list(map(str, value))
        value = shlex.join(words) if name.endswith("command") else ", ".join(words)
    elif value is None or isinstance(value, bool):
        value = json.dumps(value)
    if not parts:
        yield name, str(value)
    for key, item in parts:
        yield from _leaves(item, f"{name}.{key}".strip("."))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _is_report(value: object) -> bool:
    return isinstance(value, dict) and value.keys() >= {"name", "text"}


def _number(value: object) -> float:
    """A value as a float; NaN for what is none."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
