"""Measure the steps that techniques need for an equal loss, relative to AdamW, on three small trainings.

    python -m benchmarks.quality --minutes 60          run what is missing, for at most an hour python -m
    benchmarks.quality --only TokenRouting   run the arms with one of these words in their names, and baselines python
    -m benchmarks.quality --show                print the table of the finished runs python -m benchmarks.quality
    --record              write the table into figures.json and docs/measured.md

An arm is a technique in one of three trainings:

- ``digits``: a diffusion transformer on latents of handwritten digits,
- ``photos``: a diffusion transformer on pixels of crops of two photographs,
- ``python``: a GPT on Python's standard library.

All are scored by validation loss, the first two also by the Fréchet distance of samples (not FID). The loss is that of
the task, even if a technique trains on another loss.

Each arm is first run at three learning rates with a tuning seed, then at the best rate with the other seeds. The
baseline is run with these seeds at all three rates. For each seed, the level is the worse of the two final values. The
result is the number of steps, and of CPU seconds of training, after which each run first reaches the level,
interpolated between evaluations. A ratio of 0.8 means a fifth fewer. The ratio and its interval refer to the baseline
at its best rate. The interval is Student's over the logarithms of the ratios.

The p value is the largest over all baseline rates that are not significantly worse than the best one, because a single
tuning seed chooses between close rates by chance (docs/negative_results.md). It is corrected by Holm's method over all
rows of the table. The verdict says where the evidence is insufficient. Each run takes at most half a minute and is a
line of ``benchmarks/records/quality.jsonl``, which is kept with the code. A run is identified by its settings, and runs
again when they change. Seconds depend on the machine: use an idle one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

import lit_efficient as le
from benchmarks import figures
from benchmarks.clock import use_one_thread
from lit_efficient.evidence.comparing.estimates import LEVEL, Estimate, holm, mean_of, ratio_of
from lit_efficient.losses.snr import RULES
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.optimizers.schedules import decay_factor, warmup_cosine, warmup_factor

RATES = (1e-3, 3e-3, 9e-3)
TUNING_SEED = 100
SEEDS = (1, 2, 3, 4, 5)
_IMAGES = ("val/frechet_distance", "val/loss")
METRICS = {"digits": _IMAGES, "photos": _IMAGES, "python": ("val/loss",)}  # the first one is tuned for
STEPS = {"digits": 320, "photos": 320, "python": 240}
EVALUATIONS = 8
BASELINE = "baseline"

Curve = list[tuple[int, float, float]]  # steps, seconds, metric
Schedule = Callable[[int, int, float], float]  # the factor on the rate at a step, of steps of warm-up and of all


@dataclass(frozen=True)
class Arm:
    """A technique in one training.

    Args:
        task: ``digits``, ``photos`` or ``python``.
        name: Name of the arm in the table.
        callbacks: Function that returns the callbacks of the trainer, the same on each call.
        optimizer: Function from module and learning rate to an optimizer that replaces AdamW.
        schedule: Learning-rate schedule.
        settings: Arguments of the module that differ from the baseline.
        steps: Number of steps, if it differs from the baseline because of a larger batch.
        batches: Size of a batch, in batches of the baseline.
    """

    task: str
    name: str
    callbacks: Callable[[], list[Any]] = list
    optimizer: Callable[[Any, float], torch.optim.Optimizer] | None = None
    schedule: Schedule = warmup_cosine
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    batches: int = 1

    @property
    def recipe(self) -> str:
        """Hash of the settings, in twelve hexadecimal digits."""
        made = [one.record() for one in self.callbacks()]
        code = [_code_of(f.__code__) for f in (self.optimizer, self.schedule) if f is not None]
        numbers = [self.steps or STEPS[self.task], EVALUATIONS, self.batches]
        text = json.dumps([made, repr(code), repr(self.settings), numbers], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _code_of(code: CodeType) -> list[Any]:
    return [*code.co_names, *(_code_of(one) if isinstance(one, CodeType) else one for one in code.co_consts)]


def constant(step: int, warmup: int, total: float) -> float:
    """A warm-up alone."""
    return warmup_factor(step, warmup)


def stable_decay(step: int, warmup: int, total: float) -> float:
    """`WarmupStableDecay`'s: the last fifth falls."""
    return warmup_factor(step, warmup) * decay_factor((step - 0.8 * total) / (0.2 * total))


def linear(step: int, warmup: int, total: float) -> float:
    """`WarmupLinear`'s."""
    return warmup_factor(step, warmup) * decay_factor((step - warmup) / (total - warmup))


def _seesaw(task: str) -> Arm:
    """Half a cosine in two doublings of the batch, on as many rows; see `seesaw_milestones`."""
    steps = STEPS[task]
    milestones = le.seesaw_milestones(steps, 2)
    last = milestones[-1] + round((1 - math.acos(-0.5) / math.pi) * steps / 4)

    def schedule(step: int, warmup: int, total: float) -> float:
        return warmup_factor(step, warmup) * 2 ** (-0.5 * sum(step >= one for one in milestones))

    ramp = partial(le.BatchRamp, milestones)
    return Arm(task, "BatchRamp Seesaw", lambda: [ramp()], schedule=schedule, steps=last, batches=4)


def _repa(**arguments: Any) -> list[Any]:
    return [le.HiddenAlignment(2, "data.judge", r"body\.5", hidden=64, **arguments)]


def _layersync() -> list[Any]:
    return [le.HiddenAlignment(1, 3, weight=0.2, projection="none")]


def _everywhere(task: str) -> list[Arm]:
    """What is for any training."""
    return [
        Arm(task, "MuonAdamW", optimizer=lambda module, rate: le.MuonAdamW(le.muon_groups(module), rate)),
        Arm(task, "Lion", optimizer=lambda module, rate: le.Lion(module.parameters(), rate / 10, weight_decay=0.5)),
        Arm(task, "ScheduleFreeAdamW", lambda: [le.ScheduleFree()], _schedule_free, constant),
        Arm(task, "WarmupStableDecay", schedule=stable_decay),
        Arm(task, "WarmupLinear", schedule=linear),
        Arm(task, "EMA", lambda: [le.EMA()]),
        Arm(task, "EMA, constant rate", lambda: [le.EMA()], schedule=constant),
        Arm(task, "CheckpointAverage, constant rate", lambda: [le.CheckpointAverage(5, 10)], schedule=constant),
        Arm(task, "BatchRamp", lambda: [le.BatchRamp([0.5])]),
        _seesaw(task),
        Arm(task, "Initialise normal", lambda: [le.Initialise()]),
        Arm(task, "Initialise orthogonal", lambda: [le.Initialise("orthogonal", residual="zero")]),
        Arm(task, "StochasticDepth", lambda: [le.StochasticDepth(0.2)]),
        Arm(task, "MixtureOfExperts, equal FLOPs", lambda: [le.MixtureOfExperts(4, 1)]),
        Arm(task, "SelectiveBackprop", lambda: [le.SelectiveBackprop(0.5)]),
        Arm(task, "LossCurriculum", lambda: [le.LossCurriculum()]),
    ]


def _schedule_free(module: Any, rate: float) -> torch.optim.Optimizer:
    return le.ScheduleFreeAdamW(module.parameters(), rate, (0.9, 0.99), weight_decay=0.05)


_IREPA = {"projection": "conv", "head": le.AlignmentHead(spatial_norm=1.0)}
_REG = {"backbone": le.DiTConfig(depth=4, variant=le.DiTVariant(class_token=le.ClassToken(32)))}
_ROUTED = [("tread", {}), ("tread, whole at the end", {"stop_at": 270}), ("sprint", {"mode": "sprint", "stop_at": 270})]

ARMS = [
    Arm("digits", BASELINE),
    *(Arm("digits", f"TokenRouting {said}", lambda how=how: [le.TokenRouting(0.5, **how)]) for said, how in _ROUTED),
    Arm("digits", "ContrastiveFlowMatching", lambda: [le.ContrastiveFlowMatching()]),
    Arm("digits", "HiddenAlignment REPA", _repa),
    Arm("digits", "HiddenAlignment iREPA", partial(_repa, **_IREPA)),
    Arm("digits", "HiddenAlignment REG", partial(_repa, head=le.AlignmentHead(class_layer="")), settings=_REG),
    Arm("digits", "HiddenAlignment LayerSync", _layersync),
    Arm("digits", "HiddenAlignment until half", partial(_repa, stop_at=160)),
    Arm("digits", "HiddenAlignment until conflict", partial(_repa, stop_at=le.GradientConflict(every=10))),
    *(Arm("digits", f"SNRWeighting {rule}", lambda rule=rule: [le.SNRWeighting(rule)]) for rule in RULES),
    *_everywhere("digits"),
    Arm("photos", BASELINE),
    *(Arm("photos", f"TokenRouting {said}", lambda how=how: [le.TokenRouting(0.5, **how)]) for said, how in _ROUTED),
    Arm("photos", "ContrastiveFlowMatching", lambda: [le.ContrastiveFlowMatching()]),
    Arm("photos", "HiddenAlignment LayerSync", _layersync),
    Arm("photos", "ResolutionRamp", lambda: [le.ResolutionRamp(0.5, 0.3, multiple_of=2)]),
    Arm("python", BASELINE),
    *_everywhere("python"),
    Arm("python", "SequenceLengthRamp", lambda: [le.SequenceLengthRamp(32, 128, 0.3)]),
    Arm("python", "MixtureOfDepths", lambda: [le.MixtureOfDepths(0.5)]),
    Arm("python", "NEFTune", lambda: [le.NEFTune()]),
    Arm("python", "LabelSmoothing", lambda: [le.LabelSmoothing(0.1)]),
]


# A piece ------------------------------------------------------------------------------------------------------------


def make_digits(rate: float, settings: Mapping[str, Any], batches: int = 1) -> tuple[Any, Any]:
    """The training of ``configs/tasks/latent_diffusion.yaml``, one block deeper and without guidance."""
    backbone = le.DiTConfig(depth=4)
    given = {"backbone": backbone, "guidance_scale": 1.0, "sampling_steps": 10, "samples": le.Samples(128)}
    return le.LatentDiffusion(**{**given, "learning_rate": rate, **settings}), le.LatentDigits(batch_size=64 * batches)


class Pixels(torch.nn.Module):
    """An autoencoder that leaves images as they are."""

    image_channels = 3
    latent_channels = 3
    factor = 1

    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Their values."""
        return images, None

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The same."""
        return latents


class PhotoPixels(le.PhotoCrops):
    """Crops of the photographs, kept in memory, whose latents are their pixels."""

    preload = True
    latent_shape = (3, 16, 16)

    def __init__(self, batch_size: int) -> None:
        super().__init__(16, crops=40, batch_size=batch_size, classes="band")
        self.codec = LatentCodec(Pixels(), torch.zeros(3), torch.full((3,), 0.5))  # type: ignore[arg-type]


def make_photos(rate: float, settings: Mapping[str, Any], batches: int = 1) -> tuple[Any, Any]:
    """Diffusion on 64 tokens of two by two pixels each."""
    backbone = le.DiTConfig(channels=3, size=16, patch_size=2, depth=4, num_classes=6)
    given = {"backbone": backbone, "guidance_scale": 1.0, "sampling_steps": 10, "samples": le.Samples(96)}
    return le.LatentDiffusion(**{**given, "learning_rate": rate, **settings}), PhotoPixels(16 * batches)


def make_python(rate: float, settings: Mapping[str, Any], batches: int = 1) -> tuple[Any, Any]:
    """The training of ``configs/tasks/language_model.yaml``, half as wide."""
    given = {"model": le.GPTConfig(dim=64, depth=4, num_heads=4, max_length=128)}
    sizes = {"sequence_length": 128, "batch_size": 8 * batches, "val_batch_size": 32}
    data = le.PythonCorpus(vocab_size=2048, val_fraction=0.005, **sizes)
    return le.LanguageModeling(**{**given, "learning_rate": rate, **settings}), data


MAKE = {"digits": make_digits, "photos": make_photos, "python": make_python}


class Watch(Callback):
    """Callback that records each evaluation with the CPU seconds of training so far."""

    def __init__(self, metrics: Sequence[str]) -> None:
        self.metrics = metrics
        self.seconds = 0.0
        self.began = 0.0
        self.curves: dict[str, Curve] = {metric: [] for metric in metrics}

    def on_train_batch_start(self, *_: Any) -> None:
        """The clock runs."""
        self.began = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """The clock stands."""
        self.seconds += time.process_time() - self.began

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """A point."""
        for metric, curve in self.curves.items():
            curve.append((trainer.global_step, round(self.seconds, 3), float(trainer.callback_metrics[metric])))


def train(arm: Arm, rate: float, seed: int) -> dict[str, Curve]:
    """Train one run. Return its curves by metric."""
    seed_everything(seed, verbose=False)
    module, data = MAKE[arm.task](rate, arm.settings, arm.batches)
    steps = arm.steps or STEPS[arm.task]
    watch = Watch(METRICS[arm.task])

    def configure_optimizers() -> Any:
        trainable = [p for p in module.parameters() if p.requires_grad]
        optimizer: Any = le.FusedAdamW(trainable, rate, betas=(0.9, 0.99), weight_decay=0.05)
        if arm.optimizer is not None:
            optimizer = arm.optimizer(module, rate)
        factor = partial(arm.schedule, warmup=STEPS[arm.task] // 10, total=float(steps))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module.configure_optimizers = configure_optimizers
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        gradient_clip_val=1.0,
        val_check_interval=steps // EVALUATIONS,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[*arm.callbacks(), watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return watch.curves


# What has been run, and what is left --------------------------------------------------------------------------------


def records(file: Path) -> list[dict[str, Any]]:
    """Return the runs recorded in a file. A truncated last line, left by a killed process, is ignored."""
    found = []
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def runs_of(arm: Arm, rows: Iterable[Mapping[str, Any]]) -> dict[tuple[float, int], Mapping[str, Any]]:
    """Return the runs of an arm with its current settings, by rate and seed."""
    key = (arm.task, arm.name, arm.recipe)
    return {(r["rate"], r["seed"]): r for r in rows if (r["task"], r["name"], r["recipe"]) == key}


def best_rate(arm: Arm, rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the rate of :data:`RATES` with the lowest final value of the tuning seed, ``None`` until all have run."""
    runs = runs_of(arm, rows)
    metric = METRICS[arm.task][0]
    tuned = {rate: runs[rate, TUNING_SEED] for rate in RATES if (rate, TUNING_SEED) in runs}
    ends = {}
    for rate, run in tuned.items():
        end = run["curves"][metric][-1][2] if run["curves"] else math.inf
        # A run that diverged to NaN ranks last: min() gives no defined order with NaN.
        ends[rate] = end if math.isfinite(end) else math.inf
    if len(ends) < len(RATES):
        return None
    return min(ends, key=ends.__getitem__)


def left(arm: Arm, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int] = SEEDS) -> Iterator[tuple[float, int]]:
    """Yield the rates and seeds that an arm still needs, in order."""
    runs = runs_of(arm, rows)
    best = best_rate(arm, rows)
    rates = RATES if arm.name == BASELINE else [best]
    wanted = [(rate, TUNING_SEED) for rate in RATES] if best is None else [(r, seed) for r in rates for seed in seeds]
    yield from (one for one in wanted if one not in runs)


def run(arms: Sequence[Arm], file: Path, end: float, seeds: Sequence[int] = SEEDS, attempt: Any = train) -> int:
    """Run what is missing until the time limit. Return the number of known missing runs."""
    while True:
        rows = records(file)
        open_arms = [(arm, piece) for arm in arms for piece in left(arm, rows, seeds)]
        if not open_arms or time.monotonic() > end:
            return len(open_arms)
        arm, (rate, seed) = open_arms[0]
        start = time.monotonic()
        curves = {}
        try:
            curves = attempt(arm, rate, seed)
            said = ", ".join(f"{metric} {curve[-1][2]:.4g}" for metric, curve in curves.items())
        except le.ConfigurationError:
            raise
        except Exception as error:  # a rate at which training breaks is a result
            said = f"{type(error).__name__}: {error}"
        row = {"task": arm.task, "name": arm.name, "recipe": arm.recipe, "rate": rate, "seed": seed, "curves": curves}
        torn = file.exists() and not file.read_bytes().endswith(b"\n")
        with file.open("a", encoding="utf-8") as opened:
            opened.write("\n" * torn + json.dumps(row) + "\n")
        print(
            f"{arm.task:7} {arm.name:38} rate {rate:g} seed {seed}: {said}; {time.monotonic() - start:.0f} s",
            flush=True,
        )


# What it is evidence of ---------------------------------------------------------------------------------------------


def reached(curve: Sequence[Sequence[float]], level: float, axis: int) -> float:
    """Return the interpolated steps (axis 0) or seconds (axis 1) at which a curve first reaches a level, or NaN."""
    before: Sequence[float] | None = None
    for point in curve:
        if point[2] <= level:
            share = 1.0 if before is None else (before[2] - level) / (before[2] - point[2])
            from_ = 0.0 if before is None else before[axis]
            return from_ + (point[axis] - from_) * share
        before = point
    return math.nan


def pair_ratio(curve: Curve, baseline: Curve, axis: int) -> tuple[float, float]:
    """Return what each of two runs of one seed needs to reach the worse final value. NaN if a run diverges."""
    level = max(curve[-1][2], baseline[-1][2]) if curve and baseline else math.nan
    return reached(curve, level, axis), reached(baseline, level, axis)


def against(pairs: Mapping[float, Sequence[tuple[float, float]]], best: float) -> Estimate:
    """Return the ratio to the baseline at its best rate, with the largest p over all given rates.

    Args:
        pairs: Steps or seconds of the arm and the baseline with each seed, by the baseline's rate.
        best: The baseline's best rate, a key of ``pairs``.
    """
    ratios = {rate: ratio_of([a for a, _ in two], [b for _, b in two]) for rate, two in pairs.items()}
    shown = ratios[best]
    # An estimate without p has the same ratio for every seed, so it is not compared with the others.
    known = [one for one in ratios.values() if one.p is not None]
    sides = {one.value > 1 for one in known}
    p = None
    if shown.p is not None and len(sides) > 1:
        p = 1.0
    elif shown.p is not None:
        p = max(one.p for one in known if one.p is not None)
    return replace(shown, p=p, n=min(one.n for one in ratios.values()))


def table(arms: Sequence[Arm], rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str, str], Estimate]:
    """Return ratios to the baseline by task, arm, metric and unit (steps, seconds), with Holm's correction of p."""
    found: dict[tuple[str, str, str, str], Estimate] = {}
    baselines = {arm.task: arm for arm in arms if arm.name == BASELINE}
    for arm in arms:
        base = baselines.get(arm.task)
        rate = best_rate(arm, rows)
        if base is None or arm is base or rate is None or best_rate(base, rows) is None:
            continue
        ours = _of_seeds(arm, rows)[rate]
        theirs = _of_seeds(base, rows)
        for metric in METRICS[arm.task]:
            ends = {r: [_end(runs[s].get(metric, [])) for s in runs if s in ours] for r, runs in theirs.items()}
            means = {r: sum(values) / len(values) for r, values in ends.items() if values}
            held = {r: mean for r, mean in means.items() if math.isfinite(mean)}  # where it breaks it is no rival
            if not held:
                continue
            best = min(held, key=lambda r: held[r])
            for axis, what in enumerate(("steps", "seconds")):
                pairs = {
                    r: [
                        pair_ratio(ours[s].get(metric, []), theirs[r][s].get(metric, []), axis)
                        for s in sorted(ours.keys() & theirs[r].keys())
                    ]
                    for r in _rivals(theirs, metric, best)
                }
                found[arm.task, arm.name, metric, what] = against(pairs, best)
    adjusted = holm({"\0".join(key): estimate for key, estimate in found.items()})
    return {key: adjusted["\0".join(key)] for key in found}


def _rivals(runs: Mapping[float, Mapping[int, Mapping[str, Curve]]], metric: str, best: float) -> list[float]:
    """Return the rates that are not significantly worse than the best rate, including the best rate."""
    found = []
    for rate, of_seeds in runs.items():
        seeds = sorted(of_seeds.keys() & runs[best].keys())
        ends, least = ([_end(runs[one][s].get(metric, [])) for s in seeds] for one in (rate, best))
        if ends and all(map(math.isfinite, ends)):  # where it breaks it is no rival
            gap = mean_of([a - b for a, b in zip(ends, least, strict=True)])
            worse = gap.value > 0 and (gap.p is None or gap.p <= LEVEL)  # no p: the same gap with each seed
            found += [] if worse else [rate]
    return found


def _of_seeds(arm: Arm, rows: Iterable[Mapping[str, Any]]) -> dict[float, dict[int, Mapping[str, Curve]]]:
    """Return an arm's curves by rate and seed, without the tuning seed."""
    found: dict[float, dict[int, Mapping[str, Curve]]] = {rate: {} for rate in RATES}
    for (rate, seed), one in runs_of(arm, rows).items():
        if seed != TUNING_SEED:
            found[rate][seed] = one["curves"]
    return found


def _end(curve: Curve) -> float:
    return curve[-1][2] if curve else math.inf


def verdict(estimate: Estimate) -> str:
    """Return the conclusion that an estimate of a ratio supports."""
    if estimate.n < len(SEEDS):
        return f"{estimate.n} of {len(SEEDS)} seeds: unknown"
    if not estimate.evidence:
        return "no evidence"
    return "fewer" if estimate.value < 1 else "more"


def lines(found: Mapping[tuple[str, str, str, str], Estimate]) -> Iterator[str]:
    """Yield the lines of the table."""
    head = f"{'task':7} {'arm':38} {'until equal':21} {'counted':8} {'ratio':>6} {'95 % interval':>15}"
    yield f"{head} {'p':>7}  n  verdict"
    for (task, name, metric, what), one in found.items():
        interval = f"{one.low:.2f} to {one.high:.2f}"
        p = ""
        if one.p is not None:
            p = f"{one.p:.3f}" if one.p >= 0.001 else "< 0.001"
        yield f"{task:7} {name:38} {metric:21} {what:8} {one.value:6.2f} {interval:>15} {p:>7}  {one.n}  {verdict(one)}"
    yield f"p is Holm's over the {len(found)} rows; evidence is p of at most {LEVEL:g}."


# Where it is kept ---------------------------------------------------------------------------------------------------

COMMAND = "python -m benchmarks.quality"
_COLUMNS = ["Training", "Technique", "Until equal", "Steps", "CPU seconds", "p of steps, seconds", "Steps are"]
_PLACE = "`benchmarks/gpu.sh` runs on a GPU"  # of docs/measured.md, in front of which the table stands
_SECTION = f"""## Steps to an equal loss

Three small trainings: a diffusion transformer on digits and on pixels of photographs, and a GPT on Python code. The
ratios compare each technique with AdamW under a cosine schedule, until both reach the worse of their final losses;
below 1 is less. They are means over {len(SEEDS)} seeds with Student's confidence intervals. Learning rates of both
sides are tuned over the same {len(RATES)} values, and p is corrected over the whole table (Holm). Arms of the
benchmark that are not in the table were not run. Seconds were measured on a busy machine.

<!-- figures: quality -->
<!-- /figures -->

"""


def _shown(one: Estimate) -> str:
    return f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})"


def kept(found: Mapping[tuple[str, str, str, str], Estimate]) -> list[dict[str, Any]]:
    """Return the records for figures.json of all rows for which every seed has run."""
    records = []
    now = figures.here()
    for (task, name, metric, what), steps in found.items():
        seconds = found[task, name, metric, "seconds"]
        if what != "steps" or steps.n < len(SEEDS):
            continue
        ps = ", ".join("-" if one.p is None else f"{one.p:.3f}" for one in (steps, seconds))
        values = {"steps": _shown(steps), "seconds": _shown(seconds), "p": ps, "verdict": verdict(steps)}
        records.append(
            {
                "id": f"quality/{task}/{name}/{metric}",
                "table": "quality",
                "command": COMMAND,
                "unit": "with it / without it, geometric mean over seeds, 95 % interval",
                "figures": values,
                "cells": [task, name, metric.removeprefix("val/").replace("_", " "), *(f"{{{key}}}" for key in values)],
                "date": now["date"],
                "threads": 1,
                "environment": "quality",
            }
        )
    return records


def record(found: Mapping[tuple[str, str, str, str], Estimate]) -> None:
    """Write the table into figures.json and docs/measured.md."""
    source = json.loads(figures.FILE.read_text("utf-8"))
    now = figures.here()
    records = kept(found)
    source["environments"]["quality"] = {key: now[key] for key in ("versions", "machine")}
    source["tables"]["quality"] = _COLUMNS
    source["records"] = [one for one in source["records"] if one.get("table") != "quality"] + records
    figures.FILE.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = figures.ROOT / "docs" / "measured.md"
    text = page.read_text("utf-8")
    if "<!-- figures: quality -->" not in text:
        page.write_text(text.replace(_PLACE, _SECTION + _PLACE, 1), encoding="utf-8")
    print("To update the documents, run: python -m benchmarks.figures --write")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=())
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--file", type=Path, default=None)
    given = parser.parse_args(arguments)
    use_one_thread()
    warnings.filterwarnings("ignore")
    chosen = [arm for arm in ARMS if not given.only or any(word in f"{arm.task} {arm.name}" for word in given.only)]
    tasks = {arm.task for arm in chosen}
    arms = [arm for arm in ARMS if arm in chosen or (arm.name == BASELINE and arm.task in tasks)]
    file = given.file or Path(__file__).parent / "records" / "quality.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not (given.show or given.record):
        seeds = range(1, given.seeds + 1)
        count = run(arms, file, time.monotonic() + 60 * given.minutes, seeds)
        print(f"{count} pieces are known to be left" if count else "all has been run", flush=True)
    found = table(arms, records(file))
    print("\n".join(lines(found)))
    if given.record:
        record(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
