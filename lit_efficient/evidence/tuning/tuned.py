"""Tune a fit, and what came of it: a table of the best, one of all, and the overlay that makes the best of a config."""

import contextlib
import csv
import datetime
import io
import logging
import math
import platform
import statistics
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lit_efficient import __version__
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.evidence.fits import Change, FitSource
from lit_efficient.evidence.measured_run import WARM_UP, Measured, measured
from lit_efficient.evidence.own_process import TaskFailed, forks, own_process, plan_seconds
from lit_efficient.evidence.planning.plan import plan
from lit_efficient.evidence.tuning.candidates import Space
from lit_efficient.evidence.tuning.tuning import STEPS, Ledger, Measure, Row, Search
from lit_efficient.files.atomic_file import replacing
from lit_efficient.mechanisms.trials.memory import accelerator_limit, available_cpu_memory, format_bytes, parse_bytes
from lit_efficient.mechanisms.trials.steps import quiet
from lit_efficient.traits import Trait

_SHOWN = 10


def tune(
    source: FitSource,
    device_memory: int | str | None = None,
    *,
    allow_changes: bool | Collection[str] = False,
    only: Collection[str] | None = None,
    batch: str = "auto",
    minutes: float = 20.0,
    steps: int = STEPS,
    folder: str | Path | None = None,
    key: str = "",
    sketch: FitSource | None = None,
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
        measure: Runs a change for a number of timed steps; ``None``: in a process of its own.
        say: Hears now and then how far it is.

    Raises:
        ConfigurationError: If an argument is wrong, or the fit itself is refused.
    """
    check_number("tune", "minutes", minutes, above=0)
    limit = None if device_memory is None else parse_bytes(device_memory, "tune", "device_memory")
    sketch, folder = sketch or source, None if folder is None else Path(folder)
    with quiet(logging.ERROR, warns=False, prints=sys.stderr):  # torch logs what raises among fake tensors
        fit = sketch.make()
    if (processes := fit.trainer.world_size) > 1:
        raise ConfigurationError(f"tune: {processes} processes train, and one is measured: set trainer.devices to 1")
    device = fit.trainer.strategy.root_device
    limit = limit or _free(device)
    search = Search(
        Space(fit, allow_changes, only, batch),
        partial(_planned, sketch, plan_seconds(minutes)),
        measure or partial(_measured, source, limit, folder, 60 * minutes),
        limit,
        steps=steps,
        seconds=60 * minutes,
        ledger=Ledger(folder and folder / "rows.jsonl", f"{key} {source.code()} {limit} {batch} {_machine(device)}"),
        say=say,
    )
    found = Tuned(search, device)
    try:
        search.run()
    finally:
        if folder is not None:
            found.write_csv(folder / "table.csv")
    found.check()
    return found


class Tuned:
    """What a search has found, which may have been stopped."""

    def __init__(self, search: Search, device: torch.device) -> None:
        self.search, self.space, self.device = search, search.space, device

    @property
    def best(self) -> Row | None:
        """The fastest that fits; ``None``: nothing does."""
        return self.search.best

    @property
    def change(self) -> Change | None:
        """The best as a change of the fit."""
        return self.space.change(self.best.candidate) if self.best else None

    @property
    def gain(self) -> float:
        """How many times as fast as the fit as it is; NaN where that does not fit."""
        row = self.search.rows.get(self.space.asked)
        return self.best.rate / row.rate if self.best and row and row.rate else math.nan

    def check(self) -> None:
        """Raise why nothing ran, if it was not the memory."""
        rows = self.search.rows
        if self.best or any(row.state == "too large" for row in rows.values()):
            return
        asked = rows.get(self.space.asked)
        if asked is None or not asked.state:
            raise ConfigurationError("tune: no run ended in time: give more minutes")
        raise ConfigurationError(f"tune: the fit as it is was {asked.state}: {asked.reason}")

    def lines(self) -> list[str]:
        """The table of the best, and what was left out."""
        cells: list[tuple[str, ...]] = [("", "step", "rate", "of the best", "peak", "planned", "")]
        for row in self.search.ran[:_SHOWN]:
            time, rate = f"{statistics.median(row.seconds):.3g} s", f"{row.rate:.4g} {row.unit}/s"
            share = f"{row.rate / self.search.ran[0].rate:.2f}"
            bytes_ = [format_bytes(size) if size else "-" for size in (row.peak, row.planned)]
            marks = f"{'*' if row is self.best else ' '}{' as it is' if row.candidate == self.space.asked else ''}"
            cells.append((str(row.candidate), time, rate, share, *bytes_, marks))
        widths = [max(map(len, column)) for column in zip(*cells)]
        table = [
            "  ".join([f"{name:<{widths[0]}}", *map(str.rjust, row, widths[1:]), marks]).rstrip()
            for name, *row, marks in cells
        ]
        left_out = [f"not tried: {name}: {reason}" for name, reason in self.space.left_out.items()]
        return [*(table if self.best else []), self.summary(), *left_out]

    def summary(self) -> str:
        """How far the search came, in a sentence."""
        search = self.search
        large = [row for row in search.rows.values() if row.state == "too large"]
        text = f"{search.tried} of {len(search.every)} candidates ran, {len(large)} do not fit into "
        text += f"{format_bytes(search.limit)}; effective batch {self.space.effective or 'as it is'}"
        text += "" if search.complete else "; time was over before the end: the same command goes on"
        if self.best is None:
            least = min(large, key=lambda row: row.planned or row.peak or math.inf)
            text += f". Nothing fits: {least.candidate} takes {format_bytes(least.planned or least.peak)}"
        return text

    def write_csv(self, path: Path) -> None:
        """Write all candidates, the fastest first, then those that did not run."""
        rows, text = self.search.rows, io.StringIO(newline="")
        records = []
        for one in dict.fromkeys([*(row.candidate for row in self.search.ran), *rows, *self.search.every]):
            row = rows.get(one, Row(one))
            seconds = statistics.median(row.seconds) if row.seconds else 0
            state = row.state or "not run"
            reason = row.reason or ("" if row.state else "another is faster, or time was over")
            record = asdict(row) | {"candidate": str(one), "options": " ".join(one.options), "rate": row.rate}
            record |= {"state": state, "reason": reason, "seconds": seconds, "error": row.error if seconds else 0}
            records.append({"batch": one.batch, "accumulation": one.accumulation} | record)
        writer = csv.DictWriter(text, list(records[0]))
        writer.writeheader()
        writer.writerows({name: "" if value == 0 else value for name, value in record.items()} for record in records)
        with replacing(path) as file:
            file.write(text.getvalue().encode())

    def overlay(self, command: str = "", use: str = "") -> str:
        """The best as YAML to lay over the config, with how it was found, and what trains with it, as comments."""
        assert self.best is not None
        row, candidate = self.best, self.best.candidate
        times = "" if math.isnan(self.gain) else f", {self.gain:.2f} times that of the fit as it is"
        peak = f", {format_bytes(row.peak)} at its peak" if row.peak else ""
        peak += f", {format_bytes(row.planned)} planned" if row.planned else ""
        comments = [
            f"Overlay: {candidate}, the fastest that was found within {format_bytes(self.search.limit)}. By:",
            f"  {command}",
            f"{row.rate:.4g} {row.unit} a second (+-{200 * row.error:.1f} %){times}{peak}.",
            f"{self.summary()}.",
            f"{datetime.datetime.now().date()}, {_machine(self.device)}. Use it:",
            f"  {use}",
        ]
        return "".join(f"# {line}\n" for text in comments for line in text.splitlines()) + self.space.overlay(candidate)


def _free(device: torch.device) -> int:
    free = available_cpu_memory() if device.type == "cpu" else int(torch.accelerator.get_memory_info(device)[0])
    if not free:
        raise ConfigurationError("tune: how much memory is free is not known here: give device_memory")
    return free


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = ", ".join(f"{one} {version(one)}" for one in ("torch", "lightning"))
    return f"lit_efficient {__version__}, {versions}, {name} ({torch.get_num_threads()} threads)"


def _planned(sketch: FitSource, most_seconds: float, change: Change) -> tuple[int, float]:
    """Bytes at the peak, and operations of a step; in a process of its own, which may hang and be ended."""
    if not forks():  # a new one would import all anew for each
        return _plan(sketch, change)
    try:
        peak, flops = own_process(_plan, sketch, change, most_seconds=most_seconds)
    except TaskFailed as error:
        raise (ConfigurationError if error.refused else RuntimeError)(error.reason) from error
    return peak, flops


def _plan(sketch: FitSource, change: Change, tell: Callable[[int], None] | None = None) -> tuple[int, float]:
    with quiet(logging.ERROR, warns=False, prints=sys.stderr):  # torch logs what raises among fake tensors
        found = plan(sketch, change)
    return int(found.peak), float(found.flops)


class _Within(Callback):
    """Holds an accelerator's allocator to a limit, for as long as the process lives."""

    traits = frozenset({Trait.LEAVES_TRACES})

    def __init__(self, limit: int) -> None:
        self.limit, self._held = limit, contextlib.ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        device = trainer.strategy.root_device
        if device.type != "cpu":
            self._held.enter_context(accelerator_limit(device, self.limit))


def _within(limit: int, change: Change) -> list[Any]:
    return [_Within(limit), *change.callbacks()]


def _measured(
    source: FitSource, limit: int, folder: Path | None, most_seconds: float, change: Change, steps: int
) -> Measured:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    change = replace(change, callbacks=partial(_within, limit, change))
    return measured(source, change, steps=WARM_UP + steps, log=folder and folder / "log.txt", most_seconds=most_seconds)
