"""Tune a fit, and what came of it: a table of the best, one of all, and the overlay that makes the best of it."""

import csv
import datetime
import io
import math
import platform
import statistics
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lit_efficient import __version__
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.evidence.candidates import Space
from lit_efficient.evidence.fits import Change, FitSource
from lit_efficient.evidence.measured_run import WARM_UP, Measured, measured
from lit_efficient.evidence.tuning import STEPS, Ledger, Measure, Predict, Row, Search
from lit_efficient.files.atomic_file import replacing
from lit_efficient.mechanisms.trials.memory import (
    accelerator_limit,
    available_cpu_memory,
    format_bytes,
    parse_bytes,
)

MINUTES = 20.0
_SHOWN = 10


def tune(
    source: FitSource,
    device_memory: int | str | None = None,
    *,
    allow_changes: bool | Collection[str] = False,
    only: Collection[str] | None = None,
    batch: str = "auto",
    minutes: float = MINUTES,
    steps: int = STEPS,
    folder: str | Path | None = None,
    key: str = "",
    sketch: FitSource | None = None,
    predict: Predict | None = None,
    measure: Measure | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> "Tuned":
    """Search the fastest way to run a fit within a memory, at the same effective batch.

    Args:
        source: Makes the fit: ``LiveFit(trainer, module, data)``, or of a config.
        device_memory: Bytes that a step may take, or a text such as ``24GiB``; ``None``: what is free.
        allow_changes: Names of options to try although they change what is computed; ``True``: fewer bits and other
            batches, no other training.
        only: Names of the options to try, ``batch_size`` among them; ``None``: all.
        batch: The setting that holds the batch size, as in ``data.batch_size``.
        minutes: After which nothing new begins.
        steps: Timed steps of a candidate's first run.
        folder: Where results are kept, so that a search that was stopped goes on; ``None``: nowhere.
        key: What tells this search from others in the same folder.
        sketch: Makes the same fit with weights that take no memory, to be planned.
        predict: Plans a change; ``None``: :func:`~.plan.plan`.
        measure: Runs a change; ``None``: :func:`~.measured_run.measured`, in a process of its own.
        say: Told now and then how far it is.

    Raises:
        ConfigurationError: If an argument is wrong, or the fit itself is refused.
    """
    check_number("tune", "minutes", minutes, above=0)
    fit = (sketch or source).make()
    if fit.trainer.world_size > 1:
        raise ConfigurationError(
            f"tune: {fit.trainer.world_size} processes train, and one is measured: set trainer.devices to 1"
        )
    device = fit.trainer.strategy.root_device
    limit = _free(device) if device_memory is None else parse_bytes(device_memory, "tune", "device_memory")
    space = Space(fit, allow_changes, only, batch)
    file = None if folder is None else Path(folder, "rows.jsonl")
    log = None if folder is None else Path(folder, "log.txt")
    key = f"{key} {limit} {batch} {_machine(device)}"
    search = Search(
        space,
        predict or _planned(sketch or source),
        measure or partial(_measured, source, limit, log),
        limit,
        steps=steps,
        seconds=60 * minutes,
        ledger=Ledger(file, key),
        say=say,
    )
    found = Tuned(search, device)
    try:
        search.run()
    finally:
        if folder is not None:
            found.write_csv(Path(folder, "table.csv"))
    found.check()
    return found


class Tuned:
    """What a search has found.

    Args:
        search: The search, which may have been stopped.
        device: Where it ran.
    """

    def __init__(self, search: Search, device: torch.device) -> None:
        self.search, self.space, self.device = search, search.space, device

    @property
    def best(self) -> Row | None:
        """The fastest that fits; ``None``: nothing does."""
        return self.search.best

    @property
    def change(self) -> Change:
        """The best as a change of the fit."""
        assert self.best is not None
        return self.space.change(self.best.candidate)

    @property
    def gain(self) -> float:
        """How many times as fast as the fit as it is; NaN where that does not fit."""
        row = self.search.rows.get(self.space.asked)
        return self.best.rate / row.rate if self.best and row and row.rate else math.nan

    def check(self) -> None:
        """Raise why nothing ran, if it was not the memory."""
        rows = self.search.rows.values()
        asked = self.search.rows.get(self.space.asked)
        if self.best or any(row.state == "too large" for row in rows):
            return
        if asked is None or not asked.state:
            raise ConfigurationError("tune: no run ended in time: give more minutes")
        raise ConfigurationError(f"tune: the fit as it is was {asked.state}: {asked.reason}")

    def lines(self) -> list[str]:
        """The table of the best, and what was left out."""
        search, best = self.search, self.best
        rows = [("", "step", "rate", "of the best", "peak", "planned", "")]
        for row in search.ran[:_SHOWN]:
            mark = "*" if row is best else " "
            mark += " as it is" if row.candidate == self.space.asked else ""
            assert best is not None
            rows.append(
                (
                    row.candidate.name,
                    f"{statistics.median(row.seconds):.3g} s",
                    f"{row.rate:.4g} {row.unit}/s",
                    f"{row.rate / best.rate:.2f}",
                    format_bytes(row.peak) if row.peak else "-",
                    format_bytes(row.planned) if row.planned else "-",
                    mark,
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            f"{row[0]:<{widths[0]}}  "
            + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:]))
            + f" {row[-1]}"
            for row in rows
        ]
        lines = [line.rstrip() for line in lines] if search.ran else []
        lines += [self._summary()]
        return [*lines, *(f"not tried: {name}: {reason}" for name, reason in self.space.left_out.items())]

    def _summary(self) -> str:
        search = self.search
        rows = [row for row in search.rows.values() if row.state == "too large"]
        text = f"{len(search.tried)} of {len(search.every)} candidates ran, {len(rows)} did not fit into "
        text += f"{format_bytes(search.limit)}; effective batch {self.space.effective or 'as it is'}"
        if not search.complete:
            text += "; stopped before the end: the same command goes on"
        if self.best is None and rows:
            least = min((row for row in rows), key=lambda row: row.planned or row.peak or math.inf)
            text += f". Nothing fits: {least.candidate.name} takes least, {format_bytes(least.planned or least.peak)}"
        return text

    def write_csv(self, path: Path) -> None:
        """Write all candidates."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(
            [
                "candidate",
                "batch",
                "accumulation",
                "options",
                "state",
                "reason",
                "planned_bytes",
                "peak_bytes",
                "flops",
                "step_seconds",
                "relative_error",
                "amount",
                "unit",
                "rate",
            ]
        )
        rows = self.search.rows
        for one in dict.fromkeys([*(row.candidate for row in self.search.ran), *rows, *self.search.every]):
            row = rows.get(one, Row(one))
            state, reason = row.state or "not run", row.reason or ("" if row.state else "another may be faster")
            seconds = statistics.median(row.seconds) if row.seconds else ""
            error = row.error if row.seconds else ""
            planned = (row.planned or "", row.peak or "", row.flops or "")
            last = (seconds, error, row.amount or "", row.unit, row.rate or "")
            writer.writerow(
                [one.name, one.batch, one.accumulation, " ".join(one.options), state, reason, *planned, *last]
            )
        with replacing(path) as file:
            file.write(text.getvalue().encode())

    def overlay(self, command: str = "", use: str = "") -> str:
        """The best as YAML to lay over the config, with how it was found as comments.

        Args:
            command: That found it.
            use: That trains with it.
        """
        row = self.best
        assert row is not None
        times = "" if math.isnan(self.gain) else f", {self.gain:.2f} times that of the config as it is"
        peak = f"; peak {format_bytes(row.peak)}" if row.peak else ""
        peak += f"{', ' if row.peak else '; peak '}{format_bytes(row.planned)} planned" if row.planned else ""
        comments = [
            f"Overlay: {row.candidate.name}, the fastest that was found within {format_bytes(self.search.limit)}",
            *([f"  {command}"] if command else []),
            f"{row.rate:.4g} {row.unit} a second (+-{200 * row.error:.1f} %){times}{peak}.",
            f"{self._summary()}.",
            f"{datetime.datetime.now().date()}, {_machine(self.device)}",
            *(["Use it:", f"  {use}"] if use else []),
        ]
        return "".join(f"# {' '.join(line.split()) if line[:1] != ' ' else line}\n" for line in comments) + (
            self.space.overlay(row.candidate)
        )


def _planned(source: FitSource) -> Predict:
    from lit_efficient.evidence.plan import plan

    return partial(plan, source)


def _free(device: torch.device) -> int:
    free = available_cpu_memory() if device.type == "cpu" else int(torch.accelerator.get_memory_info(device)[0])
    if free is None:
        raise ConfigurationError("tune: how much memory is free is not known here: give device_memory")
    return free


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = ", ".join(f"{one} {version(one)}" for one in ("torch", "lightning"))
    return f"lit_efficient {__version__}, {versions}, {name} ({torch.get_num_threads()} threads)"


class _Within(Callback):
    """Holds an accelerator's allocator to a limit, for as long as the process lives."""

    leaves_traces = True

    def __init__(self, limit: int) -> None:
        self.limit, self._held = limit, ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        device = trainer.strategy.root_device
        if device.type != "cpu":
            self._held.enter_context(accelerator_limit(device, self.limit))


def _with_limit(change: Change, limit: int) -> list[Any]:
    return [_Within(limit), *change.callbacks()]


def _measured(source: FitSource, limit: int, log: Path | None, change: Change, steps: int) -> Measured:
    change = replace(change, callbacks=partial(_with_limit, change, limit))
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    return measured(source, change, steps=WARM_UP + steps, log=log)
