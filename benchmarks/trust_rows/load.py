"""Row 12: a long run and a folder that is reused must not accumulate memory, handles, threads or files."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml

from benchmarks.trust_rows import Piece
from benchmarks.trust_rows.kills import RUN, different, files, last_of
from tests import processes

EVERY = 50  # steps between two saves, and between two looks
WARM = 4  # looks until what is made once is there
# A step that leaves an object behind leaves a block and more; a tensor's memory does not count among Python's blocks.
BLOCKS = 0.5  # of Python's allocator, a step
BYTES = 4096  # of resident memory, a step: the allocator of C keeps what it has, in leaps

_MODEL = {"class_path": "tests.support_cli.ToyModel", "init_args": {"noise": 0.1}}
_ALLOW = ("--allow-import", "tests", "--allow-import", "benchmarks")


class Look(pl.Callback):
    """Callback that records the resources of the process and its run at regular steps."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []  # bytes, blocks, handles, threads, files
        self._step = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % EVERY == 0 and trainer.global_step != self._step:
            self._step = trainer.global_step
            gc.collect()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            handles = len(os.listdir("/proc/self/fd"))
            written = sum(len(names) for _, _, names in os.walk(trainer.default_root_dir))
            self.seen.append((resident, sys.getallocatedblocks(), handles, threading.active_count(), written))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        Path("seen.json").write_text(json.dumps(self.seen))


def slope(values: Sequence[float]) -> float:
    """Return the median slope of all pairs of values (Theil-Sen estimator), which ignores a few jumps."""
    pairs = [(values[j] - values[i]) / (j - i) for i in range(len(values)) for j in range(i + 1, len(values))]
    return sorted(pairs)[len(pairs) // 2]


def _command(words: Sequence[str], kill: int | None = None) -> None:
    import torch

    from lit_efficient.__main__ import main

    torch.set_num_threads(1)
    if kill is not None:
        _kill_at(kill)
    sys.exit(main(["fit", *_ALLOW, "-c", "base.yaml", *words]))


def _kill_at(step: int) -> None:
    """Kill this process when a given step is saved."""
    own = pl.Trainer.save_checkpoint

    def save(trainer: Any, *arguments: Any, **options: Any) -> None:
        own(trainer, *arguments, **options)
        if trainer.global_step >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    pl.Trainer.save_checkpoint = save  # type: ignore[method-assign]


def _config(rows: int, every: int, more: Sequence[Any], **trainer: Any) -> None:
    saver = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": every, "save_last": True}}
    callbacks = [{"class_path": "ExactResume"}, {"class_path": "EMA"}, *more, saver]
    own = {"accumulate_grad_batches": 1, "limit_val_batches": 2, "log_every_n_steps": 10, "callbacks": callbacks}
    data = {"class_path": "tests.support_cli.ToyData", "init_args": {"rows": rows}}
    config = {"model": _MODEL, "data": data, "trainer": {**RUN["trainer"], **own, **trainer}}
    Path("base.yaml").write_text(yaml.safe_dump(config))


def long_run(case: str, folder: Path) -> str:
    """Train for many steps. Return the resources that grow."""
    steps, seed = (int(word) for word in case.split("-")[1::2])
    _config(400, EVERY, [{"class_path": "benchmarks.trust_rows.load.Look"}], max_epochs=-1, max_steps=steps)
    if processes.run(_command, [f"--seed_everything={seed}"], log=Path("log").resolve()):
        return f"it does not run: {Path('log').read_text()[-300:]}"
    seen = json.loads(Path("seen.json").read_text())[WARM:]
    assert len(seen) >= 5, seen
    resident, blocks, *counts = zip(*seen)
    wrong = []
    for name, values, bound in (("bytes", resident, BYTES), ("blocks", blocks, BLOCKS)):
        grown = slope(values) / EVERY
        if grown > bound:
            wrong.append(f"{grown:.3g} {name} more a step")
    for name, values in zip(("handles", "threads", "files"), counts):
        if slope(values) > 0 or values[-1] > max(values[: len(values) // 2]):
            wrong.append(f"{values[-1]} {name} where there were {values[0]}")
    return ", ".join(wrong)


SEARCHES = {
    "rate": {"class_path": "LRFinder", "init_args": {"num_steps": 40, "max_lr": 1.0}},
    "batch": {"class_path": "MaxBatchSize", "init_args": {"max_size": 4}},
}
TWICE = 2
STEPS = 4  # of a run whose batches are of two rows


def _prepare(search: str) -> None:
    _config(4 * STEPS, 1, [SEARCHES[search]], max_epochs=1 if search == "rate" else 2)


@cache
def _whole(search: str) -> tuple[Any, set[str]]:
    """The end of a run that nobody killed, and its files. In the working directory, which it leaves empty."""
    here = Path.cwd()
    _prepare(search)
    assert processes.run(_command, [], log=Path("log").resolve()) == 0, Path("log").read_text()[-3000:]
    Path("log").unlink()
    result = last_of(here), files(here)
    for path in sorted(here.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    return result


def again(case: str, folder: Path) -> str:
    """Run a search, kill it and resume it, twice in the same folder."""
    search = case.partition("-")[0]
    result, whole = _whole(search)
    _prepare(search)
    draw = random.Random(case)
    for time in range(TWICE):
        code = processes.run(_command, [], draw.randint(1, STEPS), log=Path("log").resolve())
        if code != -signal.SIGKILL:
            return f"exit code {code} where it is killed: {Path('log').read_text()[-250:]}"
        if processes.run(_command, ["--ckpt_path", "last"], log=Path("log").resolve()):
            return f"it does not go on: {Path('log').read_text()[-250:]}"
        Path("log").unlink()
        wrong = [name for name in different(last_of(folder), result) if not name.endswith("_bytes")]  # of memory
        if wrong:
            return f"time {time + 1} ends with another result: {', '.join(wrong)}"[:250]
        runs = sorted(path for path in (folder / "runs/base").iterdir() if path.is_dir() and not path.is_symlink())
        if len(runs) != time + 1:
            return f"time {time + 1}: {len(runs)} runs"
        names = {name for name in files(folder) if "RUN" in name or "base/2" not in name}  # RUN is the first
        own = {f"runs/base/RUN/{path.relative_to(runs[-1])}" for path in runs[-1].rglob("*") if path.is_file()}
        stays = [name for name in sorted(names | own) if name not in whole and not name.endswith("environment_1.json")]
        if stays:
            return f"time {time + 1}: {', '.join(stays)} stays"
    return ""


PIECES = (
    Piece(
        12,
        "load-steps",
        "500 steps (5,000 in one case) of a small fit with the defaults of the command line, saved every 50: resident "
        f"memory grows by less than {BYTES:,} bytes a step, Python's blocks by less than {BLOCKS}, and open handles, "
        "threads and files in the folder do not",
        lambda: ["steps-5000-seed-0", *(f"steps-500-seed-{seed}" for seed in range(1, 11))],
        long_run,
        in_ci=0,
    ),
    Piece(
        12,
        "load-again",
        "A search (learning rate, batch size) in a fit that is killed and resumed, and all of it again in the same "
        "folder: each ends as a run that nobody killed, bit for bit, and leaves no more files",
        lambda: [f"{search}-{number:02d}" for search in SEARCHES for number in range(13)],
        again,
    ),
)
