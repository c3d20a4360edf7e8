"""Tune a fit, and the results: a table of the best candidates, a file with all of them, and the overlay of the best."""

import contextlib
import csv
import datetime
import io
import logging
import math
import platform
import statistics
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_efficient import __version__
from lit_efficient.declaration import format_bytes
from lit_efficient.errors import ConfigurationError, check_number, parse_bytes
from lit_efficient.evidence.fits import Change, FitSource
from lit_efficient.evidence.measured_run import WARM_UP, Measured, measured
from lit_efficient.evidence.own_process import TaskFailed, forks, own_process, plan_seconds
from lit_efficient.evidence.planning.plan import plan
from lit_efficient.evidence.reporting.text_table import text_table
from lit_efficient.evidence.tuning.candidates import Candidate, Space
from lit_efficient.evidence.tuning.tuning import STEPS, Ledger, Measure, Row, Search
from lit_efficient.files.atomic_file import replacing
from lit_efficient.mechanisms.trials.memory import accelerator_limit, available_cpu_memory
from lit_efficient.mechanisms.trials.steps import quiet
from lit_efficient.traits import Trait

_SHOWN = 10  # rows of the table
# torch logs the exceptions that fake tensors raise.
_silence = partial(quiet, logging.ERROR, warns=False)


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
    """Search for the fastest way to run a fit within a memory limit, with the same effective batch.

    Args:
        source: Makes the fit: ``LiveFit(trainer, module, data)``, or a source for a config.
        device_memory: Bytes that a step may need, or a text such as ``24GiB``; ``None`` takes the free memory.
        allow_changes: Names of options to try although they change the results; ``True`` allows lower precision and
            other batches, but no other training.
        only: Names of the only options to try, among them ``batch_size``; ``None`` tries all.
        batch: Setting of the batch size, such as ``data.batch_size``.
        minutes: Time after which nothing new begins.
        steps: Timed steps of the first run of a candidate.
        folder: Folder for results, from which a search that was stopped continues; ``None`` keeps nothing.
        key: Text that distinguishes this search from others in the same folder.
        sketch: Makes the same fit for planning, with weights that take no memory.
        measure: Function that runs a change for a number of timed steps; ``None`` runs it in a separate process.
        say: Function that receives lines of progress.

    Raises:
        ConfigurationError: If an argument is wrong, or the fit itself is refused.
    """
    check_number("tune", "minutes", minutes, above=0)
    limit = 0
    if device_memory is not None:
        limit = parse_bytes(device_memory, "tune", "device_memory")
    if folder is not None:
        folder = Path(folder)
    sketch = sketch or source
    # The parts of the fit may print.
    with _silence(prints=sys.stderr):
        fit = sketch.make()
    processes = fit.trainer.world_size
    if processes > 1:
        raise ConfigurationError(
            f"tune: the fit has {processes} processes, but only one can be measured: set trainer.devices to 1"
        )
    device = fit.trainer.strategy.root_device
    limit = limit or _free(device)
    # Results of other code, limits or machines must not be used again.
    ledger = Ledger(folder and folder / "rows.jsonl", f"{key} {source.code()} {limit} {batch} {_machine(device)}")
    search = Search(
        Space(fit, allow_changes, only, batch),
        partial(_planned, sketch, plan_seconds(minutes)),
        measure or partial(_measured, source, limit, folder, 60 * minutes),
        limit,
        steps=steps,
        seconds=60 * minutes,
        ledger=ledger,
        say=say,
    )
    found = Tuned(search, device)
    # The file is written after an interruption as well.
    try:
        search.run()
    finally:
        if folder is not None:
            found.write_csv(folder / "table.csv")
    found.check()
    return found


class Tuned:
    """Results of a search, which may have been stopped."""

    def __init__(self, search: Search, device: torch.device) -> None:
        self.search = search
        self.space = search.space
        self.device = device

    @property
    def best(self) -> Row | None:
        """The fastest candidate that fits; ``None`` if none does."""
        return self.search.best

    @property
    def change(self) -> Change | None:
        """The best candidate as a change of the fit."""
        if self.best:
            return self.space.change(self.best.candidate)
        return None

    @property
    def gain(self) -> float:
        """Rate of the best candidate relative to the unchanged fit; NaN if that did not run."""
        row = self.search.rows.get(self.space.asked)
        if self.best is None or row is None or not row.rate:
            return math.nan
        return self.best.rate / row.rate

    def check(self) -> None:
        """Raise an error if nothing ran for another reason than the memory.

        Raises:
            ConfigurationError: With the reason.
        """
        rows = self.search.rows
        if self.best or any(row.state == "too large" for row in rows.values()):
            return
        asked = rows.get(self.space.asked)
        if asked is None or not asked.state:
            raise ConfigurationError("tune: no run ended in time: give more minutes")
        raise ConfigurationError(f"tune: the unchanged fit was {asked.state}: {asked.reason}")

    def lines(self) -> list[str]:
        """Return the table of the best candidates, the summary, and the options that were left out."""
        lines: list[str] = []
        ran = self.search.ran[:_SHOWN]
        if ran:
            columns: dict[str, list[str]] = {
                "step": [f"{statistics.median(row.seconds):.3g} s" for row in ran],
                "rate": [f"{row.rate:.4g} {row.unit}/s" for row in ran],
                "of the best": [f"{row.rate / ran[0].rate:.2f}" for row in ran],
                "peak": [_bytes(row.peak) for row in ran],
                "planned": [_bytes(row.planned) for row in ran],
                "": [self._marks(row) for row in ran],
            }
            lines += text_table([str(row.candidate) for row in ran], columns, 10**6)
        lines.append(self.summary())
        return [*lines, *(f"not tried: {name}: {reason}" for name, reason in self.space.left_out.items())]

    def _marks(self, row: Row) -> str:
        marks = []
        if row is self.best:
            marks.append("* best")
        if row.candidate == self.space.asked:
            marks.append("unchanged")
        return ", ".join(marks)

    def summary(self) -> str:
        """Return a sentence on the progress of the search."""
        search = self.search
        large = [row for row in search.rows.values() if row.state == "too large"]
        text = (
            f"{search.tried} of {len(search.every)} candidates ran, {len(large)} do not fit into "
            f"{format_bytes(search.limit)}; effective batch {self.space.effective or 'unchanged'}"
        )
        if not search.complete:
            text += "; the time ran out before the end: the same command continues"
        if self.best is None:
            least = min(large, key=lambda row: row.planned or row.peak or math.inf)
            text += f". Nothing fits: {least.candidate} takes {format_bytes(least.planned or least.peak)}"
        return text

    def write_csv(self, path: Path) -> None:
        """Write all candidates: the fastest first, then those that did not run."""
        every = [*(row.candidate for row in self.search.ran), *self.search.rows, *self.search.every]
        records = [self._record(candidate) for candidate in dict.fromkeys(every)]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(records[0]))
        writer.writeheader()
        writer.writerows({name: "" if value == 0 else value for name, value in record.items()} for record in records)
        with replacing(path) as file:
            file.write(text.getvalue().encode())

    def _record(self, candidate: Candidate) -> Mapping[str, object]:
        row = self.search.rows.get(candidate, Row(candidate))
        record = {
            "batch": candidate.batch,
            "accumulation": candidate.accumulation,
            **vars(row),
            "candidate": str(candidate),
            "seconds": 0,
            "options": " ".join(candidate.options),
            "rate": row.rate,
            "error": 0,
        }
        if row.seconds:
            record["seconds"] = statistics.median(row.seconds)
            record["error"] = row.error
        if not row.state:
            record["state"] = "not run"
            record["reason"] = row.reason or "another candidate is faster, or the time ran out"
        return record

    def overlay(self, command: str = "", use: str = "") -> str:
        """Return the best candidate as YAML to lay over the config.

        Args:
            command: Command of the search, for the comments.
            use: Command that trains with the overlay, for the comments.
        """
        row = self.best
        assert row is not None
        figures = f"{row.rate:.4g} {row.unit} a second (+-{200 * row.error:.1f} %)"
        if not math.isnan(self.gain):
            figures += f", {self.gain:.2f} times the rate of the unchanged fit"
        if row.peak:
            figures += f", peak {format_bytes(row.peak)}"
        if row.planned:
            figures += f", planned {format_bytes(row.planned)}"
        comments = [
            f"Overlay: {row.candidate}, the fastest candidate within {format_bytes(self.search.limit)}. Found by:",
            f"  {command}",
            f"{figures}.",
            f"{self.summary()}.",
            f"{datetime.datetime.now().date()}, {_machine(self.device)}. Use it:",
            f"  {use}",
        ]
        lines = [f"# {line}\n" for text in comments for line in text.splitlines()]
        return "".join(lines) + self.space.overlay(row.candidate)


def _bytes(size: int) -> str:
    return format_bytes(size) if size else "-"


def _free(device: torch.device) -> int:
    if device.type == "cpu":
        free = available_cpu_memory()
    else:
        free = int(torch.accelerator.get_memory_info(device)[0])
    if not free:
        raise ConfigurationError("tune: the amount of free memory is unknown here: give device_memory")
    return free


def _machine(device: torch.device) -> str:
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    versions = ", ".join(f"{one} {version(one)}" for one in ("torch", "lightning"))
    return f"lit_efficient {__version__}, {versions}, {name} ({torch.get_num_threads()} threads)"


def _planned(sketch: FitSource, most_seconds: float, change: Change) -> tuple[int, float]:
    """Return the peak in bytes and the operations of a step, from a process that can be killed if it hangs."""
    if not forks():
        # A new process would import everything again for each plan.
        return _plan(sketch, change)
    try:
        peak, flops = own_process(_plan, sketch, change, most_seconds=most_seconds)
    except TaskFailed as error:
        kind = ConfigurationError if error.refused else RuntimeError
        raise kind(error.reason) from error
    return peak, flops


def _plan(sketch: FitSource, change: Change, tell: Callable[[int], None] | None = None) -> tuple[int, float]:
    with _silence(prints=sys.stderr):
        found = plan(sketch, change)
    return int(found.peak), float(found.flops)


class _Within(Callback):
    """Limits the allocator of an accelerator, for as long as the process lives."""

    traits = frozenset({Trait.LEAVES_TRACES})

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = contextlib.ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device
        if device.type != "cpu":
            self._held.enter_context(accelerator_limit(device, self.limit))


def _within(limit: int, change: Change) -> list[Callback]:
    return [_Within(limit), *change.callbacks()]


def _measured(
    source: FitSource, limit: int, folder: Path | None, most_seconds: float, change: Change, steps: int
) -> Measured:
    log = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.txt"
    change = replace(change, callbacks=partial(_within, limit, change))
    return measured(source, change, steps=WARM_UP + steps, log=log, most_seconds=most_seconds)
