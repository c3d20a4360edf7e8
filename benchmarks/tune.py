"""Compare the settings that `tune` finds with a run of every candidate, on a small GPT and on a third-party ResNet.

    python -m benchmarks.tune                    both problems, in a few minutes; can be interrupted and resumed
    python -m benchmarks.tune --problem ResNet

First, all candidates of a problem run, each in a separate process. `tune` should find the fastest candidate whose bytes
are within the limit. Then `tune` searches without these results. Its answer and the fastest candidates run again, in
alternation, and are compared. Times are CPU seconds of the process, so that other load slows all candidates alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader

from benchmarks.clock import use_one_thread
from benchmarks.technique_runs import Classifier, Digits
from lit_efficient import GPTConfig, LanguageModeling, PythonCorpus
from lit_efficient.declaration import format_bytes
from lit_efficient.evidence.fits import Change, LiveFit
from lit_efficient.evidence.measured_run import WARM_UP, Measured, measured
from lit_efficient.evidence.tuning.candidates import Space
from lit_efficient.evidence.tuning.tuned import tune
from lit_efficient.evidence.tuning.tuning import Ledger

FOLDER = Path("runs/benchmark_tune")
STEPS = 8  # timed ones of each candidate
AGAIN = 3  # times that the answer and the fastest run at the end


def _trainer(accumulated: int) -> L.Trainer:
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = {**dict.fromkeys(silent, False), "limit_val_batches": 0}
    return L.Trainer(accelerator="cpu", devices=1, max_steps=1000, accumulate_grad_batches=accumulated, **quiet)


def _gpt() -> LiveFit:
    shape = GPTConfig(dim=128, depth=4, num_heads=4, max_length=512)
    data = PythonCorpus(vocab_size=2048, sequence_length=128, batch_size=4, val_batch_size=32)
    return LiveFit(_trainer(2), LanguageModeling(shape, learning_rate=2e-3, warmup_steps=0), data)


def _resnet() -> LiveFit:
    data = Digits()
    data.setup("fit")
    return LiveFit(_trainer(2), Classifier(), DataLoader(data.train, 8, shuffle=True))


@dataclasses.dataclass(frozen=True)
class Problem:
    """A fit, its candidates, and the memory limit as a share of the bytes of the largest candidate."""

    make: Callable[[], LiveFit]
    only: tuple[str, ...]
    allow: tuple[str, ...]
    share: float


PROBLEMS = {
    "GPT": Problem(
        _gpt, ("batch_size", "ActivationCheckpointing", "ChunkedCrossEntropy", "MemoryEfficientLayers"), (), 0.6
    ),
    "ResNet": Problem(_resnet, ("batch_size", "ActivationCheckpointing", "ChannelsLast"), ("batch_size",), 0.8),
}


def run(source: LiveFit, change: Change, steps: int) -> Measured:
    """Run a candidate, timed in CPU seconds of the process."""
    one = measured(source, change, steps=WARM_UP + steps)
    return dataclasses.replace(one, seconds=one.cpu_seconds)


def exhaustive(source: LiveFit, space: Space, ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Run every candidate. Return the seconds and bytes of a step."""

    def make(change: Change) -> dict[str, Any]:
        ran = run(source, change, STEPS)
        return {"seconds": statistics.median(ran.timed) if ran.timed else None, "peak": ran.peak, "failed": ran.failed}

    found = {}
    candidates = space.candidates()
    for one in candidates:
        found[str(one)] = ledger.result(str(one), partial(make, space.change(one)))
        print(f"\r{len(found)} of {len(candidates)} run", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def again(source: LiveFit, changes: list[Change], ledger: Ledger) -> dict[str, float]:
    """Return the seconds of a step of a few candidates that run in alternation."""

    def make(change: Change) -> dict[str, Any]:
        return {"seconds": run(source, change, 2 * STEPS).timed}

    seconds: dict[str, list[float]] = {change.name: [] for change in changes}
    for turn in range(AGAIN):
        for change in changes:
            result = ledger.result(f"{turn} {change.name}", partial(make, change))
            seconds[change.name] += result["seconds"]
    return {name: statistics.median(each) for name, each in seconds.items()}


def solve(name: str, folder: Path) -> dict[str, Any]:
    """Run one problem. Return its figures."""
    problem = PROBLEMS[name]
    source = problem.make()
    space = Space(source.make(), problem.allow, problem.only)
    ledger = Ledger(folder / f"{name}.jsonl", torch.__version__)
    every = exhaustive(source, space, ledger)
    limit = int(problem.share * max(one["peak"] for one in every.values()))
    fitting = {key: one["seconds"] for key, one in every.items() if one["seconds"] and one["peak"] <= limit}
    start = time.monotonic()
    found = tune(
        source,
        limit,
        only=problem.only,
        allow_changes=problem.allow,
        minutes=8,
        folder=folder / name,
        measure=lambda change, steps: run(source, change, steps),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    took = time.monotonic() - start
    assert found.best is not None
    answer = str(found.best.candidate)
    named = {str(one): space.change(one) for one in space.candidates()}
    nearest = sorted(fitting, key=lambda key: fitting[key])[:3]
    final = again(source, [named[key] for key in dict.fromkeys([answer, *nearest])], ledger)
    best = min(final, key=lambda key: final[key])
    return {
        "limit": format_bytes(limit),
        "answer": answer,
        "best": best,
        "times the best": round(final[answer] / final[best], 3),
        "ran": found.search.tried,
        "candidates": len(every),
        "do not fit": len(every) - len(fitting),
        "seconds of tune": round(took),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    use_one_thread()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    worst = 0.0
    for name in options.problem:
        figures = solve(name, options.folder)
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
        worst = max(worst, figures["times the best"])
    return 0 if worst <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
