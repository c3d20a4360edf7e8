"""Contents of a run's folder, read without torch. Missing and damaged files are listed and raise no error.

    config.yaml  environment.json  log.txt  events.jsonl  samples/step_0000500.png

``events.jsonl`` holds one object a line with ``time``, ``step`` and ``kind``: ``start``, ``techniques``, ``metrics``,
``checkpoint``, ``sample``, ``warning`` or ``end``. A run without it may have the table of a CSVLogger.
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
from typing import TypeAlias

import yaml

from lit_efficient.files.events import EVENTS

_MOST_STEPS = 2**53
_MOST_KEYS = 10_000  # of a config; aliases of YAML can multiply without limit
_LATEST = 2**36  # seconds since 1970
_TIME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?")
_FILES = (EVENTS, "config.yaml", "environment.json", "log.txt")
Event: TypeAlias = dict[str, object]
Score: TypeAlias = tuple[str, float, int]  # metric, value, step


class RunRecord:
    """A run, as far as its folder tells.

    Attributes:
        name: The config's name and the start time.
        metrics: Values by step for each metric; NaN stands for a value that was not finite.
        techniques: Name and report of each technique.
        checkpoints: Step, path, monitored metric and score of each checkpoint.
        warnings: Number of times that each warning was logged.
        next: Commands that the run suggested at its end.
        ended: Reason of the end; empty if no end was recorded.
        parent: Checkpoint that the run started from.
        starts: Number of starts, the first one included.
        seconds: Training time of all parts of the run.
        heard: Time of the last event, in seconds since 1970.
        missing: Sentences on missing and damaged files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = "/".join(folder.parts[-2:])
        self.metrics: dict[str, dict[int, float]] = {}
        self.techniques: list[tuple[str, str]] = []
        self.checkpoints: list[tuple[int, str, str, float]] = []
        self.warnings: Counter[str] = Counter()
        self.next: list[str] = []
        self.ended = ""
        self.parent = ""
        self.starts = 0
        self.step = 0
        self.seconds = 0.0
        self.heard = 0.0
        self.missing = [f"{name} is not there" for name in _FILES if not (folder / name).is_file()]
        self.config_text = _text(folder / "config.yaml")
        self.log = _text(folder / "log.txt")
        self.config: dict[str, str] = {}
        self.environment: dict[str, str] = {}
        try:
            self.config = flattened(yaml.safe_load(self.config_text), folder)
        except (yaml.YAMLError, RecursionError, ValueError, ArithmeticError):
            self.missing.append("config.yaml is no valid YAML: it is shown, but not compared")
        try:
            self.environment = flattened(json.loads(_text(folder / "environment.json") or "{}"), folder)
        except (ValueError, RecursionError):
            self.missing.append("environment.json cannot be read")
        for event in self._events():
            self._take(event)
        # Runs of other programs have no events.
        if not any(self.metrics.values()):
            self._read_table()
        self.metrics = {name: dict(sorted(points.items())) for name, points in self.metrics.items() if points}
        self.step = max([self.step, *(max(points) for points in self.metrics.values())])

    @property
    def samples(self) -> list[tuple[int, Path]]:
        """Step and path of each picture and text, without links that lead out of the folder."""
        inside = self.folder.resolve()
        found = []
        for path in self.folder.glob("samples/*"):
            step = re.search(r"(\d+)\.(png|txt)$", path.name)
            # A link could show any file of the machine in a report that is shared.
            if step and path.is_file() and path.resolve().is_relative_to(inside):
                found.append((int(step[1]), path))
        return sorted(found)

    @property
    def not_finite(self) -> tuple[str, list[int]] | None:
        """The first loss that was not finite, with the steps of all its values that were not; ``None`` if all were."""
        bad: dict[str, list[int]] = {}
        for name, points in self.metrics.items():
            steps = [step for step, value in points.items() if not math.isfinite(value)]
            if "loss" in name and steps:
                bad[name] = steps
        return min(bad.items(), key=lambda item: item[1][0], default=None)

    @property
    def ended_not_finite(self) -> bool:
        """True if the last value of the loss of :attr:`not_finite` was not finite."""
        return self.not_finite is not None and max(self.metrics[self.not_finite[0]]) == self.not_finite[1][-1]

    @property
    def best(self) -> Score | None:
        """Metric, best value and step: of the monitored metric of the checkpoints, else of the validation loss."""
        scored = [(monitor, score, step) for step, _, monitor, score in self.checkpoints if math.isfinite(score)]
        if scored:
            monitor = scored[-1][0]
        else:
            losses = [name for name in self.metrics if name.startswith("val") and name.endswith("loss")]
            monitor = min(losses, key=len, default="")
            values = self.metrics.get(monitor, {})
            scored = [(monitor, value, step) for step, value in values.items() if math.isfinite(value)]
        # The checkpoint callback tells whether its metric is minimised or maximised.
        savers = [key.removesuffix(".monitor") for key, value in self.config.items() if value == monitor]
        pick = min
        if "max" in [self.config.get(f"{saver}.mode") for saver in savers]:
            pick = max
        return pick([each for each in scored if each[0] == monitor], key=lambda each: each[1], default=None)

    def values(self, part: str) -> tuple[str, list[float]]:
        """Return the first metric with ``part`` in its name that has finite values, and these values."""
        for name, points in self.metrics.items():
            finite = [value for value in points.values() if math.isfinite(value)]
            if part in name and finite:
                return name, finite
        return "", []

    def _events(self) -> Iterator[Event]:
        damaged = 0
        for line in _text(self.folder / EVENTS).split("\n"):
            event = None
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
            if isinstance(event, dict):
                yield event
            elif line.strip():
                damaged += 1
        if damaged:
            lines = "line" if damaged == 1 else "lines"
            self.missing.append(f"{damaged} {lines} of events.jsonl cannot be read")

    def _take(self, event: Event) -> None:
        # An event without a valid step belongs to the last known one.
        step = event.get("step")
        if isinstance(step, int) and 0 <= step < _MOST_STEPS:
            self.step = step
        match event:
            case {"kind": "metrics", "values": dict(values)}:
                for name, value in values.items():
                    self.metrics.setdefault(name, {})[self.step] = _number(value)
            case {"kind": "start"}:
                self.starts += 1
                self.ended = ""
                self.next = []
                self.parent = str(event.get("parent") or self.parent)
                if event.get("resumed") and self.step:
                    # The steps after the checkpoint were trained again.
                    for name, points in self.metrics.items():
                        self.metrics[name] = {x: y for x, y in points.items() if x <= self.step}
            case {"kind": "techniques", "report": list(report)}:
                self.techniques = [
                    (str(each["name"]), str(each["text"]))
                    for each in report
                    if isinstance(each, dict) and each.keys() >= {"name", "text"}
                ]
            case {"kind": "checkpoint"}:
                monitor = str(event.get("monitor") or "")
                self.checkpoints.append((self.step, str(event.get("path")), monitor, _number(event.get("score"))))
            case {"kind": "warning"}:
                self.warnings[str(event.get("text"))] += 1
            case {"kind": "end"}:
                self.ended = str(event.get("reason") or "yes")
                commands = event.get("next")
                if isinstance(commands, list):
                    self.next = [str(command) for command in commands]
        # A damaged clock must not produce a training time of decades.
        time = _number(event.get("time"))
        if 0 <= time < _LATEST:
            # The pause before a new start is no training time.
            if self.heard and event.get("kind") != "start":
                self.seconds += max(0.0, time - self.heard)
            self.heard = time

    def _read_table(self) -> None:
        """Take the metrics from the newest table of a CSVLogger."""
        # A run in the folder of a logger has a table for each version.
        tables = [*self.folder.glob("metrics.csv"), *self.folder.glob("*/*/metrics.csv")]
        for path in sorted(tables, key=lambda table: table.stat().st_mtime)[-1:]:
            with contextlib.suppress(csv.Error):  # the rest of a damaged table
                for row in csv.DictReader(_text(path).replace("\0", "").splitlines()):
                    for name in row.keys() - {None, "step", "epoch"}:
                        with contextlib.suppress(TypeError, ValueError, KeyError):  # an empty cell, or no number
                            step = min(int(row["step"]), _MOST_STEPS)
                            self.metrics.setdefault(name, {})[step] = float(row[name])
        if not self.metrics:
            self.missing.append("no metrics: neither events.jsonl nor a metrics.csv holds any")


def flattened(value: object, folder: Path) -> dict[str, str]:
    """Return nested data as text by dotted keys. List items that have a class go by its name instead of their index.

    Example:
        >>> flattened({"callbacks": [{"class_path": "x.EMA", "init_args": {"decay": 0.9}}], "seed": 1}, Path())
        {'callbacks.EMA': 'x.EMA', 'callbacks.EMA.decay': '0.9', 'seed': '1'}
    """
    if not isinstance(value, dict):
        return {}
    found = dict(itertools.islice(_leaves(value, ""), _MOST_KEYS))
    if _TIME.fullmatch(folder.name):
        # Every run has another start time, which is no difference between configs.
        return {key: text.replace(folder.name, "TIME") for key, text in found.items()}
    return found


def _leaves(value: object, name: str) -> Iterator[tuple[str, str]]:
    parts: list[tuple[object, object]] = []
    if isinstance(value, dict):
        parts = [*value.items()]
        arguments = value.get("init_args")
        if "class_path" in value and isinstance(arguments, dict | None):
            parts = [("", value["class_path"]), *(arguments or {}).items()]
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        names = [_class_name(item) or str(place) for place, item in enumerate(value)]
        for i, key in enumerate(names):
            # Two items of one class are distinguished by their index.
            if names.count(key) > 1:
                key = f"{key}#{i}"  # noqa: PLW2901
            parts.append((key, value[i]))
    # Empty mappings and lists are values, too.
    if parts:
        for part, item in parts:
            yield from _leaves(item, f"{name}.{part}".strip("."))
    else:
        yield name, _leaf(value, name)


def _class_name(item: object) -> str:
    if isinstance(item, dict):
        return str(item.get("class_path", "")).rpartition(".")[2]
    return ""


def _leaf(value: object, name: str) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        words = [str(item) for item in value]
        if name.endswith("command"):
            return shlex.join(words)
        return ", ".join(words)
    return str(value)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _number(value: object) -> float:
    """Return a value as a float; NaN if it is no number."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
