"""Measure the Fréchet distance of samples in one, two and four steps, compared with 50 steps of flow matching.

    python -m benchmarks.few_steps --minutes 60     run what is missing, for at most an hour
    python -m benchmarks.few_steps --only MeanFlow  run arms with one of these words in their names, and the baseline
    python -m benchmarks.few_steps --show           print the table of the finished runs
    python -m benchmarks.few_steps --record         write the table into figures.json and docs/measured.md

The trainings are those of ``benchmarks.quality`` on digits and photos: a small diffusion transformer, the same number
of steps for each arm, an average of the weights, and no guidance. The learning rates are fixed: 3e-3, the best of the
baseline there, and 1e-3 for distilled arms. Distilled arms start from the baseline's weights of the same seed, so that
they train for twice as many steps in all.

The table has the ratio of the Fréchet distance (not FID) in the features of the task's small classifier to that of the
baseline with 50 steps: the geometric mean over seeds, with Student's interval over the logarithms. p is that of the
ratio 1, corrected by Holm's method over all rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

import lit_efficient as le
from benchmarks import figures
from benchmarks.clock import use_one_thread
from benchmarks.quality import PhotoPixels, records
from lit_efficient.evidence.comparing.estimates import Estimate, holm, ratio_of
from lit_efficient.files.cache import cache_root

TASKS = ("digits", "photos")
RATE = 3e-3  # the best of the baseline in benchmarks.quality
DISTILLATION_RATE = 1e-3
SEEDS = (1, 2, 3, 4, 5)
STEPS = 240  # of training
FEW = (1, 2, 4)  # steps of sampling
MANY = 50
COUNT = 300  # samples
BASELINE = "flow"

_BACKBONES = {
    "digits": le.DiTConfig(depth=4),
    "photos": le.DiTConfig(channels=3, size=16, patch_size=2, depth=4, num_classes=6),
}


@dataclass(frozen=True)
class Arm:
    """A task with its settings.

    Args:
        name: Name of the arm in the table.
        make: Function from the backbone and the checkpoint of the baseline to a task.
        few: Steps of sampling that are measured.
    """

    name: str
    make: Callable[[le.DiTConfig, Path], Any]
    few: tuple[int, ...] = FEW


def _plain(backbone: le.DiTConfig, teacher: Path, objective: Any = None) -> Any:
    given = {"guidance_scale": 1.0, "samples": le.Samples(0), "learning_rate": RATE}
    if objective is None:
        return le.LatentDiffusion(backbone, **given)
    return le.FewStepDiffusion(backbone, objective, **given)


def _consistency(backbone: le.DiTConfig, teacher: Path) -> Any:
    return le.ConsistencyDistillation(str(teacher), 1.0, learning_rate=DISTILLATION_RATE, samples=le.Samples(0))


def _matching(backbone: le.DiTConfig, teacher: Path, steps: int) -> Any:
    given = {"sampling_steps": steps, "learning_rate": DISTILLATION_RATE, "samples": le.Samples(0)}
    return le.DistributionMatching(str(teacher), 1.0, **given)


ARMS = [
    Arm(BASELINE, _plain, (*FEW, MANY)),
    Arm("MeanFlow, power 0", partial(_plain, objective=le.MeanFlow(power=0.0))),
    Arm("Shortcut", partial(_plain, objective="shortcut")),
    Arm("LCM", _consistency),
    *(Arm(f"DMD2, {steps} steps", partial(_matching, steps=steps), (steps,)) for steps in FEW),
    Arm("MeanFlow", partial(_plain, objective="mean_flow")),
]


class Judge(Callback):
    """Callback that measures the samples of a validation, whose weights are the average."""

    def __init__(self, few: Sequence[int]) -> None:
        self.few = few
        self.found: dict[str, float] = {}

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Sample with each number of steps from the same noise."""
        data = trainer.datamodule
        labels = torch.arange(COUNT) % pl_module.shape.num_classes
        for steps in self.few:
            latents = pl_module.sample(labels, torch.Generator().manual_seed(0), steps=steps)
            images = torch.cat([data.codec.decode(part) for part in latents.split(64)])
            self.found[str(steps)] = data.score_samples(images, labels)["frechet_distance"]


def train(task: str, arm: Arm, seed: int, teacher: Path) -> dict[str, float]:
    """Train one run. Return the Fréchet distance by steps of sampling. The baseline is saved as ``teacher``."""
    seed_everything(seed, verbose=False)
    module = arm.make(_BACKBONES[task], teacher)
    data = le.LatentDigits(batch_size=64) if task == "digits" else PhotoPixels(16)
    judge = Judge(arm.few)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        val_check_interval=STEPS,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[le.EMA(), judge],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    if arm.name == BASELINE:
        module.codec = None  # that of photos cannot be saved, and distillation has it from the data
        trainer.save_checkpoint(teacher)
    return judge.found


# What has been run, and what is left --------------------------------------------------------------------------------


def runs_of(task: str, arm: Arm, rows: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, float]]:
    """Return the distances of the runs of an arm by seed."""
    return {r["seed"]: r["found"] for r in rows if (r["task"], r["name"]) == (task, arm.name)}


def left(rows: Sequence[Mapping[str, Any]], arms: Sequence[Arm]) -> Iterator[tuple[str, Arm, int]]:
    """Yield the runs that are missing, arm by arm."""
    for task in TASKS:
        for arm in arms:
            yield from ((task, arm, seed) for seed in SEEDS if seed not in runs_of(task, arm, rows))


def run(arms: Sequence[Arm], file: Path, folder: Path, end: float) -> int:
    """Run what is missing until the time limit. Return the number of known missing runs."""
    while True:
        rows = records(file)
        missing = list(left(rows, arms))
        if not missing or time.monotonic() > end:
            return len(missing)
        task, arm, seed = missing[0]
        start = time.monotonic()
        found = train(task, arm, seed, folder / f"{task}_{seed}.ckpt")
        row = {"task": task, "name": arm.name, "seed": seed, "found": found}
        row["seconds"] = round(time.monotonic() - start, 1)
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


# What it is evidence of ---------------------------------------------------------------------------------------------


def table(arms: Sequence[Arm], rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, int], tuple[float, Estimate]]:
    """Return the mean distance and the ratio to the baseline with 50 steps, by task, arm and steps of sampling."""
    means = {}
    ratios = {}
    for task in TASKS:
        base = runs_of(task, ARMS[0], rows)
        for arm in arms:
            runs = runs_of(task, arm, rows)
            seeds = sorted(runs.keys() & base.keys())
            if len(seeds) < 2:
                continue
            against = [base[seed][str(MANY)] for seed in seeds]
            for steps in arm.few:
                ours = [runs[seed][str(steps)] for seed in seeds]
                means[task, arm.name, steps] = sum(ours) / len(ours)
                if (arm.name, steps) != (BASELINE, MANY):
                    ratios[task, arm.name, steps] = ratio_of(ours, against)
    corrected = holm({"\0".join(map(str, key)): one for key, one in ratios.items()})
    return {key: (mean, corrected.get("\0".join(map(str, key)))) for key, mean in means.items()}


def verdict(estimate: Estimate | None) -> str:
    """Return the conclusion that an estimate of a ratio supports."""
    if estimate is None:
        return "baseline"
    if estimate.n < len(SEEDS):
        return f"{estimate.n} of {len(SEEDS)} seeds: unknown"
    if not estimate.evidence:
        return "no evidence of a difference"
    return "closer" if estimate.value < 1 else "farther"


def _shown(estimate: Estimate | None) -> tuple[str, str]:
    if estimate is None:
        return "1", "-"
    p = "-"
    if estimate.p is not None:
        p = f"{estimate.p:.3f}" if estimate.p >= 0.001 else "< 0.001"
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})", p


def lines(found: Mapping[tuple[str, str, int], tuple[float, Estimate | None]]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"{'task':7} {'arm':24} {'steps':>5} {'distance':>9}  {'ratio':22} {'p':>7}  verdict"
    for (task, name, steps), (mean, one) in found.items():
        ratio, p = _shown(one)
        yield f"{task:7} {name:24} {steps:5} {mean:9.3f}  {ratio:22} {p:>7}  {verdict(one)}"


# Where it is kept ---------------------------------------------------------------------------------------------------

COMMAND = "python -m benchmarks.few_steps"
_COLUMNS = [
    "Training",
    "Task",
    "Steps of sampling",
    "Fréchet distance",
    "Ratio to 50 steps of flow",
    "p",
    "Samples are",
]
_END = "<!-- /figures -->\n"
_SECTION = f"""
## Samples in few steps

Fréchet distance (not FID) of {COUNT} samples in the features of the task's small classifier, for networks of equal size
after {STEPS} steps of training, with averaged weights and without guidance. Distilled networks begin with the weights
of flow matching and train for {STEPS} steps more. Learning rates are not tuned. The ratio compares with {MANY} steps of
flow matching. It is the mean over {len(SEEDS)} seeds with Student's confidence interval, and p is corrected over the
whole table (Holm). Arms of the benchmark that are not in the table were not run.

<!-- figures: few_steps -->
<!-- /figures -->
"""


def record(found: Mapping[tuple[str, str, int], tuple[float, Estimate | None]]) -> None:
    """Write the rows with all seeds into figures.json and docs/measured.md."""
    source = json.loads(figures.FILE.read_text("utf-8"))
    now = figures.here()
    kept = []
    for (task, name, steps), (mean, one) in found.items():
        if one is not None and one.n < len(SEEDS):
            continue
        ratio, p = _shown(one)
        values = {"distance": f"{mean:.2f}", "ratio": ratio, "p": p, "verdict": verdict(one)}
        kept.append(
            {
                "id": f"few_steps/{task}/{name}/{steps}",
                "table": "few_steps",
                "command": COMMAND,
                "unit": "Fréchet distance; ratio to the baseline, geometric mean over seeds, 95 % interval",
                "figures": values,
                "cells": [task, name, str(steps), *(f"{{{key}}}" for key in values)],
                "date": now["date"],
                "threads": 1,
                "environment": "few_steps",
            }
        )
    source["environments"]["few_steps"] = {key: now[key] for key in ("versions", "machine")}
    source["tables"]["few_steps"] = _COLUMNS
    source["records"] = [one for one in source["records"] if one.get("table") != "few_steps"] + kept
    figures.FILE.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = figures.ROOT / "docs" / "measured.md"
    text = page.read_text("utf-8")
    if "<!-- figures: few_steps -->" not in text:
        before, after = text.split("<!-- figures: quality -->", 1)
        table_above, after = after.split(_END, 1)
        text = f"{before}<!-- figures: quality -->{table_above}{_END}{_SECTION}{after}"
        page.write_text(text, encoding="utf-8")
    print("To update the documents, run: python -m benchmarks.figures --write")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=())
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="for the baseline's checkpoints")
    given = parser.parse_args(arguments)
    use_one_thread()
    warnings.filterwarnings("ignore")
    arms = [arm for arm in ARMS if arm.name == BASELINE or not given.only or any(w in arm.name for w in given.only)]
    file = Path(__file__).parent / "records" / "few_steps.jsonl"
    if not (given.show or given.record):
        folder = given.folder or cache_root() / "few_steps"
        folder.mkdir(parents=True, exist_ok=True)
        count = run(arms, file, folder, time.monotonic() + 60 * given.minutes)
        print(f"{count} pieces are known to be left" if count else "all has been run", flush=True)
    found = table(arms, records(file))
    print("\n".join(lines(found)))
    if given.record:
        record(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
