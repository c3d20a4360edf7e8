"""``python -m lit_efficient sweep -c X --grid model.learning_rate=1e-3,3e-4``: a fit for each point of a grid.

    runs/sweep/X/learning_rate=1e-3-0f3a9c/2026-01-31_12-00-00     a point, and its run: as of any fit
    runs/sweep/X/sweep.csv  report.html                            all points

Each fit is a process of its own: on GPUs one on each, else one after the other. The name of a point ends with a hash of
its whole config, so the same command skips finished runs and resumes interrupted ones, and a changed config runs anew.
"""

import argparse
import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lit_efficient.errors import check_installed, check_number, refusal

_RANGE = re.compile(r"([^,\[\]{}]+?)\.\.([^,\[\]{}:]+)(:log)?")
_COMMA = re.compile(r",(?![^\[{(]*[\]})])")  # outside of brackets
_OURS = ("trainer.default_root_dir", "ckpt_path", "c", "config", "without")
_ENDED = ("done", "diverged")  # ends that another run of the same config would reach again
_POLL_S = 0.2
Values: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class Range:
    """Values from ``low`` to ``high``, uniform on a linear or a logarithmic scale."""

    low: float
    high: float
    log: bool = False


@dataclass
class Point:
    """Values of the settings, the folder of their runs, and the number that a sampler has for them."""

    values: Values
    folder: Path
    number: int = 0
    failed: str = ""

    @property
    def name(self) -> str:
        return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items())

    def record(self) -> Any:
        """Return the record of the newest run, or None before the first."""
        from lit_efficient.evidence.reporting.run_record import RunRecord
        from lit_efficient.files.runs import LATEST, real

        run = real(self.folder / LATEST)
        return RunRecord(run) if run.is_dir() else None

    @property
    def ended(self) -> bool:
        """True if no run is left to do."""
        record = self.record()
        return record is not None and record.ended in _ENDED


def run(argv: Sequence[str]) -> int:
    """Run ``sweep`` and return its exit code."""
    options, rest = _parser().parse_known_args(argv)
    grid = read_grid(options.grid)
    ranges = [key for key, values in grid.items() if isinstance(values, Range)]
    if options.trials is None and ranges:
        raise refusal("sweep", "--grid", "a list of values, or a range with --trials", f"{ranges[0]}=LOW..HIGH")
    if options.trials is not None:
        check_number("sweep", "--trials", options.trials, least=1)
        check_installed("sweep --trials", "optuna")
    from lit_efficient.cli import explained
    from lit_efficient.cli.signals import ends_on_sigterm
    from lit_efficient.commands.tune import _name

    with explained(rest), ends_on_sigterm():
        sweep = Sweep(rest, grid, options, options.folder or Path("runs", "sweep", _name(rest)))
        return sweep.run(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lit_efficient sweep",
        description="Train a config with each combination of values, one after the other or one on each GPU, and print "
        "a table of the results. Takes the options of fit: -c CONFIG, --trainer.max_steps 100, ...",
        epilog="The same command skips finished runs and resumes interrupted ones. exit codes: 0 done, 1 some runs "
        "failed, 2 user error, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--grid",
        metavar="KEY=VALUE,VALUE",
        action="append",
        required=True,
        help="values of a setting, as in model.learning_rate=1e-3,3e-4; with --trials also a range, as in "
        "model.learning_rate=1e-4..1e-2:log",
    )
    parser.add_argument(
        "--trials", type=int, help="let Optuna choose so many points (default: each combination; needs optuna)"
    )
    parser.add_argument("--metric", help="metric to compare (default: that of the checkpoints, else validation loss)")
    parser.add_argument("--mode", choices=("min", "max"), help="best value (default: that of the checkpoints, or min)")
    parser.add_argument("--folder", type=Path, help="folder of the runs (default: runs/sweep/CONFIG)")
    return parser


def read_grid(words: Sequence[str]) -> dict[str, list[str] | Range]:
    """Return the values of each key of a grid.

    Example:
        >>> read_grid(["model.lr=1e-3,3e-4", "data.shape=[8,8],[4,4]", "model.scale=1..8"])
        {'model.lr': ['1e-3', '3e-4'], 'data.shape': ['[8,8]', '[4,4]'], 'model.scale': Range(low=1, high=8, log=False)}
    """
    grid: dict[str, list[str] | Range] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        values = [value.strip() for value in _COMMA.split(text)]
        if not key or not equals or "" in values:
            raise refusal("sweep", "--grid", "KEY=VALUE,VALUE", word)
        if key in _OURS:
            raise refusal("sweep", "--grid", f"no key of {', '.join(_OURS)}", key)
        if key in grid or len(set(values)) < len(values):
            raise refusal("sweep", "--grid", "each key and each value once", word)
        grid[key] = values
        found = _RANGE.fullmatch(text.strip())
        if found:
            grid[key] = _range(found, word)
    return grid


def _range(found: re.Match[str], word: str) -> Range:
    try:
        low, high = (int(end) if re.fullmatch(r"\s*-?\d+\s*", end) else float(end) for end in found.group(1, 2))
    except ValueError:
        raise refusal("sweep", "--grid", "a range of numbers, LOW..HIGH or LOW..HIGH:log", word) from None
    if not low < high or (found[3] and low <= 0):
        raise refusal("sweep", "--grid", "LOW..HIGH with LOW below HIGH, and above 0 for :log", word)
    return Range(low, high, bool(found[3]))


class Sweep:
    """A grid, or a search, and its runs.

    Args:
        words: Words of the fit.
        grid: Values of each key.
        options: Options of the command.
        folder: Folder of the points.

    Raises:
        ConfigurationError: If a combination of values is no valid config. All are read, and nothing runs before.
    """

    def __init__(
        self, words: list[str], grid: dict[str, list[str] | Range], options: argparse.Namespace, folder: Path
    ) -> None:
        self.words = words
        self.folder = folder
        listed = {key: values if isinstance(values, list) else _ends(values) for key, values in grid.items()}
        combinations = [dict(zip(listed, values)) for values in itertools.product(*listed.values())]
        if options.trials is not None:  # each value once; all combinations may be too many
            first = combinations[0]
            combinations = [first | {key: value} for key, values in listed.items() for value in values]
        self.metric: str = options.metric or ""
        self.mode: str = options.mode or ""
        self.devices = [""]
        self.points = [self.point(values) for values in combinations]
        self.waiting = [point for point in self.points if not point.ended]
        self.search: Search | None = None
        if options.trials is not None:
            self.points = []
            self.search = Search(self, grid, options.trials)

    def point(self, values: Values) -> Point:
        """Check the config with some values, and return its point."""
        from lit_efficient.cli import check_names
        from lit_efficient.cli.fits import FitParts
        from lit_efficient.mechanisms.trials.steps import quiet

        words = [*self.words, *_settings(values)]
        check_names(["fit", *words])
        with quiet():
            parts = FitParts(words, None, "meta")
        for saver in parts.trainer.checkpoint_callbacks:
            monitor = getattr(saver, "monitor", None)
            if monitor and self.metric in ("", monitor):
                self.metric = monitor
                self.mode = self.mode or str(getattr(saver, "mode", ""))
        self.mode = self.mode or "min"
        self.devices = _devices(parts.config_dump["trainer"])
        config = hashlib.sha256(json.dumps(parts.config_dump, sort_keys=True, default=str).encode()).hexdigest()
        short = "+".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
        name = re.sub(r"[^\w.=+-]+", "_", short)[:80]
        return Point(values, self.folder / f"{name}-{config[:6]}")

    def run(self, argv: Sequence[str]) -> int:
        """Run what is left, then write and print the table."""
        where = f"one on each of {len(self.devices)} GPUs" if len(self.devices) > 1 else "one after the other"
        runs = f"{len(self.points)} runs, of which {len(self.points) - len(self.waiting)} have ended"
        if self.search:
            runs = f"{self.search.trials} runs, of which {len(self.points)} have ended"
        _say(f"sweep: {runs}; {where}, in {self.folder}")
        going: dict[str, tuple[Point, subprocess.Popen[bytes]]] = {}
        free = list(self.devices)
        code = 0
        try:
            while True:
                while free:
                    point = self._next()
                    if point is None:
                        break
                    device = free.pop(0)
                    going[device] = (point, self._start(point, device))
                if not going:
                    break
                time.sleep(_POLL_S)
                for device, (point, process) in list(going.items()):
                    if process.poll() is not None:
                        del going[device]
                        free.append(device)
                        self._end(point, process.returncode)
        except KeyboardInterrupt:
            code = 130
            _say("\ninterrupted: runs save a checkpoint, and the same command continues")
        finally:
            for _, process in going.values():
                process.terminate()
            for _, process in going.values():
                process.wait()
        self._finish(argv)
        return code or int(any(point.failed for point in self.points))

    def _next(self) -> Point | None:
        if self.search:
            return self.search.ask()
        return self.waiting.pop(0) if self.waiting else None

    def _start(self, point: Point, device: str) -> "subprocess.Popen[bytes]":
        """Start the fit of a point. A run that has begun continues from its last checkpoint."""
        environment = {"WANDB_RUN_GROUP": self.folder.name, "WANDB_NAME": point.name, **os.environ}
        if device:
            environment["CUDA_VISIBLE_DEVICES"] = device
        point.folder.mkdir(parents=True, exist_ok=True)
        place = [f"--trainer.default_root_dir={point.folder}", "--ckpt_path=last"]
        words = [*self.words, *_settings(point.values), *place]
        _say(f"{point.name}: {'continues' if point.record() else 'starts'}; its output is in {_output(point)}")
        with _output(point).open("ab") as output:
            return subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "lit_efficient", "fit", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others by SIGTERM
            )

    def _end(self, point: Point, code: int) -> None:
        if code and not point.ended and code != 6:  # 6: nothing was left to do
            point.failed = f"failed with code {code}"
        if self.search:
            self.search.tell(point)
        _say(f"{point.name}: {point.failed or self._result(point)}")
        if point.failed:
            errors = [line for line in _output(point).read_text("utf-8", "replace").splitlines() if "error: " in line]
            _say("\n".join(errors[-1:]))

    def value(self, point: Point) -> float:
        """Return the last value of the metric; NaN without any."""
        record = point.record()
        if record is None or not record.metrics:
            return math.nan
        if not self.metric and record.best:
            self.metric = record.best[0]
        values: list[float] = list(record.metrics.get(self.metric, {}).values())
        return values[-1] if values else math.nan

    def _result(self, point: Point) -> str:
        value = self.value(point)  # which may find the metric
        return f"{self.metric or 'no metric'} {value:.6g}"

    def _finish(self, argv: Sequence[str]) -> None:
        """Write the table and the report of all runs, and print the table."""
        from lit_efficient.cli.next_steps import COMMAND
        from lit_efficient.cli.secrets import redacted
        from lit_efficient.commands.report import write_report
        from lit_efficient.evidence.reporting.text_table import text_table
        from lit_efficient.files.atomic_file import replacing

        begun = [(point, record) for point in self.points if (record := point.record())]
        if not begun:
            return
        scores = [self.value(point) for point, _ in begun]
        finite = [score for score in scores if math.isfinite(score)]
        if not finite:
            known = ", ".join(sorted({name for _, record in begun for name in record.metrics}))
            _say(f"sweep: no run has a finite {self.metric or 'validation loss'}; --metric may be one of: {known}")
        columns: dict[str, list[str]] = {key: [point.values[key] for point, _ in begun] for key in begun[0][0].values}
        columns[self.metric or "metric"] = [f"{score:.6g}" for score in scores]
        columns["seconds"] = [f"{record.seconds:.1f}" for _, record in begun]
        peaks = [record.values("peak_memory")[1] for _, record in begun]
        columns["peak memory, GiB"] = [f"{max(peak):.3g}" if peak else "-" for peak in peaks]
        columns["ended"] = [point.failed or record.ended or "not yet" for point, record in begun]
        best = scores.index({"min": min, "max": max}[self.mode](finite)) if finite else -1
        columns["best"] = ["best" if place == best else "" for place in range(len(begun))]
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow([*columns, "run"])
        writer.writerows([*row, record.folder] for *row, (_, record) in zip(*columns.values(), begun))
        with replacing(self.folder / "sweep.csv") as file:
            file.write(text.getvalue().encode())
        report = self.folder / "report.html"
        write_report([record for _, record in begun], report)
        names = [str(place + 1) for place in range(len(begun))]
        print("\n".join(text_table(names, columns, shutil.get_terminal_size().columns)))
        print(f"\nWrote {self.folder / 'sweep.csv'} and {report}")
        if best >= 0:
            words = shlex.join(redacted([*self.words, *_settings(begun[best][0].values)]))
            print(f"The best run is {begun[best][1].folder}. Its config:\n  {COMMAND} fit {words}")


class Search:
    """Points that Optuna chooses. Its file in the folder has all earlier points of the same search.

    Args:
        sweep: The sweep.
        grid: Values or range of each key.
        trials: Number of points.
    """

    def __init__(self, sweep: Sweep, grid: Mapping[str, list[str] | Range], trials: int) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        from lit_efficient.cli.fits import ConfigFit

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sweep = sweep
        self.trials = trials
        self.spaces: dict[str, Any] = {}
        for key, values in grid.items():
            if isinstance(values, list):
                self.spaces[key] = optuna.distributions.CategoricalDistribution(values)
            elif isinstance(values.low, int) and isinstance(values.high, int):
                self.spaces[key] = optuna.distributions.IntDistribution(values.low, values.high, log=values.log)
            else:
                self.spaces[key] = optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)
        sweep.folder.mkdir(parents=True, exist_ok=True)
        identity = f"{ConfigFit(sweep.words, sweep.folder).identity()} {grid} {sweep.metric} {sweep.mode}"
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(sweep.folder / "optuna.log"))),
            study_name=hashlib.sha256(identity.encode()).hexdigest()[:16],
            direction="maximize" if sweep.mode == "max" else "minimize",
            load_if_exists=True,
        )
        earlier = self.study.get_trials(deepcopy=False)
        # With the seed of the earlier call, the first points would be drawn again.
        self.study.sampler = optuna.samplers.TPESampler(seed=len(earlier))
        sweep.points = [self._point(trial) for trial in earlier if trial.state.is_finished()]
        self.interrupted = [trial for trial in earlier if not trial.state.is_finished()]

    def _point(self, trial: Any) -> Point:
        point = self.sweep.point({key: str(value) for key, value in trial.params.items()})
        point.number = trial.number
        return point

    def ask(self) -> Point | None:
        """Return the next point: first those that were interrupted. ``None`` at the end."""
        if self.interrupted:
            point = self._point(self.interrupted.pop(0))
        elif len(self.sweep.points) >= self.trials:
            return None
        else:
            point = self._point(self.study.ask(self.spaces))
        self.sweep.points.append(point)
        return point

    def tell(self, point: Point) -> None:
        """Give Optuna the result of a point."""
        import optuna

        value = self.sweep.value(point)
        if math.isfinite(value) and not point.failed:
            self.study.tell(point.number, value)
        else:
            self.study.tell(point.number, state=optuna.trial.TrialState.FAIL)


def _ends(values: Range) -> list[str]:
    return [str(values.low), str(values.high)]


def _settings(values: Values) -> list[str]:
    return [f"--{key}={value}" for key, value in values.items()]


def _devices(trainer: Mapping[str, Any]) -> list[str]:
    """Return the GPUs that runs of one device can use at once; one empty name if they run one after the other."""
    import torch

    on_gpu = trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if not on_gpu or trainer.get("devices", "auto") not in ("auto", 1, "1") or trainer.get("num_nodes", 1) != 1:
        return [""]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(place) for place in range(torch.cuda.device_count())]


def _output(point: Point) -> Path:
    return point.folder / "output.txt"


def _say(line: str) -> None:
    if line:
        print(line, file=sys.stderr, flush=True)
