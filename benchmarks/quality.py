"""Measure what techniques change in small trainings: steps to an equal loss, and samples in few steps.

    python -m benchmarks.quality --minutes 60      run what is missing, for at most an hour
    python -m benchmarks.quality --only DMD2 LCM   run arms with one of these words in their names, and baselines
    python -m benchmarks.quality --only optimizers     run a group of arms: variants of Muon, SOAP, AdamC
    python -m benchmarks.quality --show            print the tables of the finished runs
    python -m benchmarks.quality --record          write the tables into figures.json

An arm is a technique in one of eight trainings:

- ``digits``: a diffusion transformer on latents of handwritten digits,
- ``photos``: a diffusion transformer on pixels of crops of two photographs,
- ``python``: a GPT on Python's standard library,
- ``autoencoder``: an autoencoder of digits with the technique, frozen, then a diffusion transformer on its latents,
- ``adapters``: low-rank adapters of a GPT that ``python`` has trained for longer, on the reference of the language in
  English (``pydoc_data``); ``4-bit adapters``: the same on a base in NF4; both have a table and a correction of p of
  their own,
- ``few-step digits`` and ``few-step photos``: the first two, judged by samples in 1, 2, 4 and 50 steps.

Each arm is first run at three learning rates with a tuning seed, then at the best rate with the other seeds.

The first three trainings are scored by validation loss, two of them also by the Fréchet distance of samples (not FID).
The fourth is scored by the distance of decoded samples alone, because losses on different latents are not comparable.
Its rate is the best one of digits, its steps are the transformer's, and its seconds include the autoencoder's.
The loss is that of the task, even if a technique trains on another loss. The baseline is AdamW, run with all seeds at
all three rates. For each seed, the level is the worse of the two final values. The result is the number of steps, and
of CPU seconds of training, after which each run first reaches the level, interpolated between evaluations. A ratio of
0.8 means a fifth fewer. The ratio and its interval refer to the baseline at its best rate. The p value is the largest
over all baseline rates that are not significantly worse than the best one, because a single tuning seed chooses between
close rates by chance (docs/negative_results.md).

The few-step trainings have an average of the weights and no guidance. The result is the ratio of the Fréchet distance
of samples to that of the baseline, flow matching, in 50 steps, and to that of flow matching in as many steps. Arms are
tuned for 2 steps of sampling, or for the only number that they are trained for. The rate of the baseline is the best of
the first trainings. Distilled arms start from the baseline's weights of the same seed and train for as many steps
again, so that in as many steps they are compared with flow matching that is trained for twice the steps.

Intervals are Student's over the logarithms of the ratios. p is corrected by Holm's method over all rows of a table. The
verdict says where the evidence is insufficient. Each run takes at most half a minute and is a line of
``benchmarks/records/quality.jsonl``, which is kept with the code. A run is identified by its settings, and runs again
when they change. Seconds depend on the machine: use an idle one.
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
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from types import CodeType
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

import lit_efficient as le
from benchmarks import figures
from benchmarks.clock import use_one_thread
from lit_efficient.data import digit_images
from lit_efficient.data.latents import stage_one
from lit_efficient.data.text.arguments import CorpusFiles
from lit_efficient.evidence.comparing.estimates import LEVEL, Estimate, holm, mean_of, ratio_of
from lit_efficient.files.cache import cache_root
from lit_efficient.losses.snr import RULES
from lit_efficient.models.judges.conv_features import DigitFeatures
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.networks.autoencoder import sample_posterior
from lit_efficient.optimizers.schedules import decay_factor, warmup_cosine, warmup_factor

RATES = (1e-3, 3e-3, 9e-3)
TUNING_SEED = 100
SEEDS = (1, 2, 3, 4, 5)
FEW = (1, 2, 4)  # steps of sampling
MANY = 50
COUNT = 300  # samples that are judged
_IMAGES = ("val/frechet_distance", "val/loss")


def in_steps(steps: int) -> str:
    """Return the name of the distance of samples in some steps."""
    return f"{steps} step{'s' * (steps > 1)}"


_SAMPLED = tuple(map(in_steps, (2, 1, 4, MANY)))
METRICS = {  # the first one of a run is tuned for
    "digits": _IMAGES,
    "photos": _IMAGES,
    "python": ("val/loss",),
    "autoencoder": ("val/frechet_distance",),
    "adapters": ("val/loss",),
    "4-bit adapters": ("val/loss",),
    "few-step digits": _SAMPLED,
    "few-step photos": _SAMPLED,
}
STEPS = {
    "digits": 320,
    "photos": 320,
    "python": 240,
    "autoencoder": 320,
    "adapters": 64,
    "4-bit adapters": 64,
    "few-step digits": 320,
    "few-step photos": 320,
}
AUTOENCODER_STEPS = 300
BASE_STEPS = 960  # of the base of adapters
SAMPLED = ("few-step digits", "few-step photos")  # only judged by samples, after the last step
ADAPTED = ("adapters", "4-bit adapters")
EVALUATIONS = 8
BASELINE = "baseline"
LONGER = "flow matching, twice the steps"

OF_MANY = f"of {MANY} steps"  # rivals of samples in few steps
OF_AS_MANY = "of as many"

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "gradient_clip_val": 1.0,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

Curve = list[tuple[int, float, float]]  # steps, seconds, metric
Key = tuple[str, str, str, str]  # task, name of the arm, metric, and what is compared
Schedule = Callable[[int, int, float], float]  # the factor on the rate at a step, of steps of warm-up and of all


@dataclass(frozen=True)
class Arm:
    """A technique in one training.

    Args:
        task: Name of the training.
        name: Name of the arm in the table.
        callbacks: Function that returns the callbacks of the trainer, the same on each call; in the training
            ``autoencoder`` those of the autoencoder's trainer.
        optimizer: Function from module and learning rate to an optimizer that replaces AdamW.
        schedule: Learning-rate schedule.
        settings: Arguments of the module that differ from the baseline.
        steps: Number of steps, if it differs from the baseline because of a larger batch.
        batches: Size of a batch, in batches of the baseline.
        module: Name of the task's class, if it is not that of the baseline.
        rates: Learning rates, of which the tuning seed chooses.
        few: Steps of sampling that are measured in the few-step trainings.
        group: Word of ``--only`` that chooses all arms of a group.
    """

    task: str
    name: str
    callbacks: Callable[[], list[Any]] = list
    optimizer: Callable[[Any, float], torch.optim.Optimizer] | None = None
    schedule: Schedule = warmup_cosine
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    batches: int = 1
    module: str = "LatentDiffusion"
    rates: tuple[float, ...] = RATES
    few: tuple[int, ...] = FEW
    group: str = ""

    @property
    def recipe(self) -> str:
        """Hash of the settings, in twelve hexadecimal digits. Text and code of the library are no part of it."""
        made = [one.record() for one in self.callbacks()]
        code = [_named(f) for f in (self.optimizer, self.schedule) if f is not None]
        numbers = [self.steps or STEPS[self.task], EVALUATIONS, self.batches]
        parts = [made, repr(code), repr(self.settings), numbers]
        if self.task in SAMPLED:
            parts += [self.module, self.few, COUNT]
        if self.task == "autoencoder":
            parts += [AUTOENCODER_STEPS]
        if self.task in ADAPTED:
            parts += [BASE_STEPS]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _named(function: Callable[..., Any]) -> list[Any]:
    """Return the name of a function of the library, or what the code of a function of this file consists of."""
    if function.__module__ != __name__:
        return [f"{function.__module__}.{function.__qualname__}"]
    return _code_of(function.__code__, function.__doc__)


def _code_of(code: CodeType, text: str | None = None) -> list[Any]:
    parts = [_code_of(one) if isinstance(one, CodeType) else one for one in code.co_consts]
    return [*code.co_names, *(one for one in parts if one != text)]


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


def _self_flow(task: str) -> list[Arm]:
    """Return Self-Flow, and its parts alone: the average of the weights, and the second time of some tokens."""
    average = partial(le.EMA, 0.99, None)
    align = partial(le.HiddenAlignment, 1, "average.3", weight=0.8, projection="mlp2")
    settings = {"timestep_sampling": le.TimestepSampling("logit_normal", second_share=0.25)}
    return [
        Arm(task, "HiddenAlignment Self-Flow", lambda: [average(), align()], settings=settings),
        Arm(task, "EMA of Self-Flow alone", lambda: [average()]),
        Arm(task, "second time of Self-Flow alone", settings=settings),
    ]


_FLOW_RATE = 9e-3  # the best one of the baselines of digits and photos
_JOINT = le.DiTConfig(depth=4)


@cache
def _other_judge() -> torch.nn.Module:
    """Return a classifier of digits from other weights than those of the judge that scores samples."""
    images, labels = digit_images.load_digit_images(32)
    train, _, _ = digit_images.stratified_split(labels, digit_images.HELD_OUT, 0)
    return stage_one.fit_classifier(DigitFeatures, images[train], labels[train], 400, seed=1)


def _latents(**arguments: Any) -> list[Any]:
    return [le.LatentAlignment(_other_judge(), r"body\.5", **arguments)]


def _end_to_end() -> list[Any]:
    return _latents(weight=1.5, loss=le.EndToEnd(_JOINT, block=2, hidden=64))


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


def _muon(module: Any, rate: float, **variant: Any) -> torch.optim.Optimizer:
    return le.MuonAdamW(le.muon_groups(module), rate, **variant)


def _soap(module: Any, rate: float) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP

    return SOAP(module.parameters(), rate, weight_decay=0.05, max_precondition_dim=1000)  # type: ignore[no-any-return]


def _optimizers(task: str) -> list[Arm]:
    """Return variants of Muon at the best rate of :class:`MuonAdamW`, and others at rates around the baseline's."""
    muon = partial(Arm, task, rates=(9e-3,), group="optimizers")
    other = partial(Arm, task, group="optimizers")
    heads = {"query.weight": 16, "key.weight": 16, "value.weight": 16}
    split = partial(le.muon_groups, heads=heads)
    return [
        muon("MuonAdamW muon_eq", optimizer=lambda module, rate: _muon(module, rate, muon_eq="row")),
        muon("MuonAdamW muon_plus", optimizer=lambda module, rate: _muon(module, rate, muon_plus="column_row")),
        muon("MuonAdamW dion", optimizer=lambda module, rate: _muon(module, rate, dion=0.25)),
        muon("MuonAdamW heads", optimizer=lambda module, rate: le.MuonAdamW(split(module), rate)),
        other("SOAP", optimizer=_soap, rates=(3e-3, 9e-3)),
        other("OptimizerSchedule AdamC", lambda: [le.OptimizerSchedule(follow_rate=1.0)], rates=(3e-3,)),
        muon("MuonAdamW normuon", optimizer=lambda module, rate: _muon(module, rate, normuon=0.95)),
        muon("MuonAdamW polar_express", optimizer=lambda module, rate: _muon(module, rate, polar_express=True)),
    ]


def _experts(name: str, **how: Any) -> Arm:
    """Return experts for the FLOPs of the dense network; ``MixtureOfExperts, equal FLOPs`` has the balancing loss."""
    return Arm("python", name, lambda: [le.MixtureOfExperts(4, 1, balance_loss=0.0, **how)], group="experts")


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
    *_self_flow("digits"),
    Arm("digits", "HiddenAlignment until half", partial(_repa, stop_at=160)),
    Arm("digits", "HiddenAlignment until conflict", partial(_repa, stop_at=le.GradientConflict(every=10))),
    *(Arm("digits", f"SNRWeighting {rule}", lambda rule=rule: [le.SNRWeighting(rule)]) for rule in RULES),
    *_everywhere("digits"),
    Arm("photos", BASELINE),
    *(Arm("photos", f"TokenRouting {said}", lambda how=how: [le.TokenRouting(0.5, **how)]) for said, how in _ROUTED),
    Arm("photos", "ContrastiveFlowMatching", lambda: [le.ContrastiveFlowMatching()]),
    Arm("photos", "HiddenAlignment LayerSync", _layersync),
    *_self_flow("photos"),
    Arm("photos", "ResolutionRamp", lambda: [le.ResolutionRamp(0.5, 0.3, multiple_of=2)]),
    Arm("python", BASELINE),
    *_everywhere("python"),
    *_optimizers("python"),
    Arm("python", "SequenceLengthRamp", lambda: [le.SequenceLengthRamp(32, 128, 0.3)]),
    Arm("python", "MixtureOfDepths", lambda: [le.MixtureOfDepths(0.5)]),
    Arm("python", "MultiTokenPrediction", lambda: [le.MultiTokenPrediction()]),
    _experts("MixtureOfExperts, balanced by the bias", bias_rate=0.001),
    _experts("MixtureOfExperts, not balanced"),
    Arm("python", "NEFTune", lambda: [le.NEFTune()]),
    Arm("python", "LabelSmoothing", lambda: [le.LabelSmoothing(0.1)]),
    Arm("autoencoder", BASELINE, rates=(_FLOW_RATE,)),
    Arm("autoencoder", "LatentAlignment REPA-E", _end_to_end, rates=(_FLOW_RATE,)),
    Arm("autoencoder", "LatentAlignment VF loss", _latents, rates=(_FLOW_RATE,)),
]


_ADAPTER: dict[str, Any] = {"rank": 4, "alpha": 8.0}
_STARTS = ("pissa", "olora", "eva", "corda", "lora_ga")
_ADAPTER_RATES = (9e-3, 27e-3)


def _adapters(variant: str, **arguments: Any) -> list[Any]:
    return [le.LoRA(**_ADAPTER, variant=variant, **arguments)]


def _on_nf4(variant: str, **arguments: Any) -> list[Any]:
    return [le.QuantizeBase("nf4", keep_source=variant == "loftq"), *_adapters(variant, **arguments)]


def _adapted(task: str, name: str, callbacks: Callable[[], list[Any]]) -> Arm:
    return Arm(task, name, callbacks, rates=_ADAPTER_RATES)


ARMS += [
    _adapted("adapters", BASELINE, partial(_adapters, "lora")),
    *(_adapted("adapters", f"LoRA {variant}", partial(_adapters, variant)) for variant in (*_STARTS, "lora_fa")),
    _adapted("4-bit adapters", BASELINE, partial(_on_nf4, "lora")),
    _adapted("4-bit adapters", "LoRA loftq", partial(_on_nf4, "loftq")),
    _adapted("4-bit adapters", "LoRA loftq, 5 rounds", partial(_on_nf4, "loftq", start_rounds=5)),
]


DISTILLED = ("ConsistencyDistillation", "DistributionMatching")
FEW_BASELINES = {
    task: Arm(task, BASELINE, lambda: [le.EMA()], rates=(_FLOW_RATE,), few=(*FEW, MANY)) for task in SAMPLED
}


def _in_few_steps(task: str) -> list[Arm]:
    """Return the baseline and all ways to sample in few steps. Distilled networks start from the baseline's."""
    averaged = partial(Arm, task, callbacks=lambda: [le.EMA()])
    from_data = partial(averaged, module="FewStepDiffusion")
    matched = partial(averaged, module="DistributionMatching", rates=(3e-4, *RATES))
    return [
        FEW_BASELINES[task],
        from_data("Shortcut", settings={"objective": le.Shortcut()}),
        averaged("LCM", module="ConsistencyDistillation"),
        *(matched(f"DMD2 for {in_steps(n)}", settings={"sampling_steps": n}, few=(n,)) for n in (4, 1, 2)),
        from_data("MeanFlow, power 0", settings={"objective": le.MeanFlow(power=0.0)}),
        from_data("MeanFlow, power 1", settings={"objective": le.MeanFlow(power=1.0)}),
        from_data("Shortcut, finest 8", settings={"objective": le.Shortcut(finest=8)}),
        averaged(LONGER, rates=(_FLOW_RATE,), steps=2 * STEPS[task], few=(*FEW, MANY)),
    ]


ARMS_IN_FEW_STEPS = {task: _in_few_steps(task) for task in SAMPLED}
ARMS += [arm for arms in ARMS_IN_FEW_STEPS.values() for arm in arms]


# A piece ------------------------------------------------------------------------------------------------------------


def _diffusion(arm: Arm, rate: float, backbone: le.DiTConfig, samples: int, seed: int) -> Any:
    given: dict[str, Any] = {"learning_rate": rate, "samples": le.Samples(0)}
    if arm.task not in SAMPLED:
        given |= {"sampling_steps": 10, "samples": le.Samples(samples)}
    if arm.module in DISTILLED:
        given |= {"teacher": str(_teacher(arm.task, seed)), "teacher_guidance": 1.0}
    else:
        given |= {"backbone": backbone, "guidance_scale": 1.0}
    return getattr(le, arm.module)(**given | dict(arm.settings))


def make_digits(arm: Arm, rate: float, seed: int) -> tuple[Any, Any]:
    """The training of ``configs/tasks/latent_diffusion.yaml``, one block deeper and without guidance."""
    module = _diffusion(arm, rate, le.DiTConfig(depth=4), 128, seed)
    return module, le.LatentDigits(batch_size=64 * arm.batches)


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


def make_photos(arm: Arm, rate: float, seed: int) -> tuple[Any, Any]:
    """Diffusion on 64 tokens of two by two pixels each."""
    backbone = le.DiTConfig(channels=3, size=16, patch_size=2, depth=4, num_classes=6)
    return _diffusion(arm, rate, backbone, 96, seed), PhotoPixels(16 * arm.batches)


def make_python(arm: Arm, rate: float, seed: int) -> tuple[Any, Any]:
    """The training of ``configs/tasks/language_model.yaml``, half as wide."""
    given = {"model": le.GPTConfig(dim=64, depth=4, num_heads=4, max_length=128), "learning_rate": rate}
    sizes = {"sequence_length": 128, "batch_size": 8 * arm.batches, "val_batch_size": 32}
    data = le.PythonCorpus(vocab_size=2048, val_fraction=0.005, **sizes)
    return le.LanguageModeling(**given | dict(arm.settings)), data


class Adapted(le.LanguageModeling):
    """A language model that starts from the weights of a file."""

    base = ""

    def configure_model(self) -> None:
        """Build the network, and load the weights before techniques change it."""
        new = self.network is None
        super().configure_model()
        if new:
            self.network.load_state_dict(torch.load(self.base, weights_only=True))


def base_of_adapters() -> Path:
    """Return the file with the weights of a GPT that the training ``python`` has made. It is trained once."""
    file = cache_root() / "quality" / f"base {BASE_STEPS}.pt"
    if not file.exists():
        arm = Arm("python", BASELINE, steps=BASE_STEPS)
        file.parent.mkdir(parents=True, exist_ok=True)
        train(arm, 3e-3, 0, lambda module: torch.save(module.network.state_dict(), file))
    return file


def make_adapters(arm: Arm, rate: float, seed: int) -> tuple[Any, Any]:
    """The GPT of ``make_python``, on English text with the tokens of its base."""
    module, corpus = make_python(arm, rate, seed)
    module = Adapted(model=module.model, learning_rate=rate)
    module.base = str(base_of_adapters())
    corpus.prepare_data()
    folder = cache_root() / "quality" / "topics"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in topics.items():
        (folder / f"{name}.txt").write_text(text, "utf-8")
    data = le.PythonCorpus(
        sequence_length=128,
        batch_size=8,
        val_batch_size=32,
        val_fraction=0.1,
        files=CorpusFiles([str(folder)], (".txt",)),
        tokenizer_file=str(corpus._folder / "tokenizer.json"),
    )
    return module, data


class OwnDigits(le.LatentDigits):
    """Digits as latents of a given autoencoder."""

    def __init__(self, autoencoder: Any, batch_size: int) -> None:
        super().__init__(batch_size=batch_size)
        self.trained = autoencoder

    def setup(self, stage: str) -> None:
        """Replace latents and codec of the parent, and keep its judge."""
        super().setup(stage)
        images, labels = digit_images.load_digit_images(self.image_size)
        with torch.no_grad():
            moments = [self.trained.encode(part) for part in images.split(256)]
        mean, logvar = (torch.cat(part) for part in zip(*moments, strict=True))
        train = self.train_index
        sampled = sample_posterior(mean[train], logvar[train], torch.Generator().manual_seed(self.seed))
        spread = sampled.std(dim=(0, 2, 3))
        self.codec = LatentCodec(self.trained, sampled.mean(dim=(0, 2, 3)), spread)
        mean, logvar = self.codec.normalize(mean, logvar)
        rows = {"mean": mean, "logvar": logvar, "labels": labels, "index": torch.arange(len(labels))}
        self.dataset = digit_images.TensorDictDataset(rows)


def autoencoder_of(arm: Arm, seed: int) -> tuple[Any, float]:
    """Return the arm's autoencoder of a seed, frozen, and the CPU seconds of its training. It is trained once."""
    file = cache_root() / "quality" / f"autoencoder {arm.recipe} {seed}.pt"
    module = le.Autoencoding()
    if not file.exists():
        callbacks = arm.callbacks()  # the teacher is trained here once, which no arm is charged for
        seed_everything(seed, verbose=False)
        watch = Watch(())
        trainer = Trainer(max_steps=AUTOENCODER_STEPS, callbacks=[*callbacks, watch], **QUIET)
        trainer.fit(module, datamodule=le.DigitImages())
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"seconds": watch.seconds, "weights": module.autoencoder.state_dict()}, file)
    kept = torch.load(file, weights_only=True)
    module = le.Autoencoding()
    module.configure_model()
    module.autoencoder.load_state_dict(kept["weights"])
    return module.autoencoder.eval().requires_grad_(False), kept["seconds"]


def make_autoencoder(arm: Arm, rate: float, seed: int) -> tuple[Any, Any]:
    """The training of digits, on the latents of the arm's own autoencoder."""
    data = OwnDigits(autoencoder_of(arm, seed)[0], batch_size=64)
    return make_digits(arm, rate, seed)[0], data


MAKE = {
    "autoencoder": make_autoencoder,
    "digits": make_digits,
    "photos": make_photos,
    "python": make_python,
    "adapters": make_adapters,
    "4-bit adapters": make_adapters,
    "few-step digits": make_digits,
    "few-step photos": make_photos,
}


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


class Judge(Watch):
    """Callback that judges samples in few steps at each evaluation, from the same noise."""

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Sample while the module has the averaged weights."""
        data = trainer.datamodule
        labels = torch.arange(COUNT) % pl_module.shape.num_classes
        for metric, curve in self.curves.items():
            generator = torch.Generator().manual_seed(0)
            latents = pl_module.sample(labels, generator, steps=int(metric.split()[0]))
            images = torch.cat([data.codec.decode(part) for part in latents.split(64)])
            distance = data.score_samples(images, labels)["frechet_distance"]
            curve.append((trainer.global_step, round(self.seconds, 3), float(distance)))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The losses of the tasks are not comparable."""


def _file_of(arm: Arm, rate: float, seed: int) -> Path:
    return cache_root() / "quality" / f"{arm.task} {arm.recipe} {rate:g} {seed}.ckpt"


def _teacher(task: str, seed: int) -> Path:
    """Return the checkpoint of the baseline of a seed, which is trained unless it is there."""
    arm = FEW_BASELINES[task]
    (rate,) = arm.rates
    file = _file_of(arm, rate, seed)
    if not file.exists():
        train(arm, rate, seed)
    return file


def train(arm: Arm, rate: float, seed: int, keep: Callable[[Any], None] | None = None) -> dict[str, Curve]:
    """Train one run. Return its curves by metric, and give the module to ``keep`` at the end.

    A baseline of the few-step trainings is kept as a teacher.
    """
    steps = arm.steps or STEPS[arm.task]
    sampled = arm.task in SAMPLED
    evaluations = 1 if sampled else EVALUATIONS
    if arm.module in DISTILLED:
        _teacher(arm.task, seed)
    if arm.task in ADAPTED:
        base_of_adapters()
    before = 0.0  # seconds of an autoencoder's training
    if arm.task == "autoencoder":
        _, before = autoencoder_of(arm, seed)
    seed_everything(seed, verbose=False)
    module, data = MAKE[arm.task](arm, rate, seed)
    if sampled:
        watch: Watch = Judge([metric for metric in METRICS[arm.task] if int(metric.split()[0]) in arm.few])
    else:
        watch = Watch(METRICS[arm.task])
    watch.seconds = before

    def configure_optimizers() -> Any:
        trainable = [p for p in module.parameters() if p.requires_grad]
        optimizer: Any = le.FusedAdamW(trainable, rate, betas=(0.9, 0.99), weight_decay=0.05)
        if arm.optimizer is not None:
            optimizer = arm.optimizer(module, rate)
        factor = partial(arm.schedule, warmup=STEPS[arm.task] // 10, total=float(steps))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module.configure_optimizers = configure_optimizers
    callbacks = [] if arm.task == "autoencoder" else arm.callbacks()
    for one in callbacks:
        if isinstance(one, le.LoRA):
            one.seed = seed
    trainer = Trainer(
        max_steps=steps,
        val_check_interval=steps // evaluations,
        check_val_every_n_epoch=None,
        callbacks=[*callbacks, watch],
        **QUIET,
    )
    trainer.fit(module, datamodule=data)
    if keep is not None:
        keep(module)
    if sampled and arm.name == BASELINE:
        module.codec = None  # that of photos cannot be saved, and distillation has it from the data
        file = _file_of(arm, rate, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(file)
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
    """Return the arm's rate with the lowest final value of the tuning seed, ``None`` until all have run."""
    if len(arm.rates) == 1:
        return arm.rates[0]
    runs = runs_of(arm, rows)
    tuned = {rate: runs[rate, TUNING_SEED] for rate in arm.rates if (rate, TUNING_SEED) in runs}
    ends = {}
    for rate, run in tuned.items():
        metric = next((one for one in METRICS[arm.task] if one in run["curves"]), None)
        end = run["curves"][metric][-1][2] if metric else math.inf
        # A run that diverged to NaN ranks last: min() gives no defined order with NaN.
        ends[rate] = end if math.isfinite(end) else math.inf
    if len(ends) < len(arm.rates):
        return None
    return min(ends, key=ends.__getitem__)


def left(arm: Arm, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int] = SEEDS) -> Iterator[tuple[float, int]]:
    """Yield the rates and seeds that an arm still needs, in order."""
    runs = runs_of(arm, rows)
    best = best_rate(arm, rows)
    rates = arm.rates if arm.name == BASELINE else [best]
    wanted = [(rate, seed) for rate in rates for seed in seeds]
    if best is None:
        wanted = [(rate, TUNING_SEED) for rate in arm.rates]
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


def table(arms: Sequence[Arm], rows: Sequence[Mapping[str, Any]]) -> dict[Key, Estimate]:
    """Return ratios to the baseline by task, arm, metric and unit (steps, seconds), with Holm's correction of p."""
    found: dict[Key, Estimate] = {}
    baselines = {arm.task: arm for arm in arms if arm.name == BASELINE and arm.task not in SAMPLED}
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
    return _corrected(found)


def few_step_table(arms: Sequence[Arm], rows: Sequence[Mapping[str, Any]]) -> dict[Key, Estimate]:
    """Return ratios of Fréchet distances by task, arm, steps of sampling and rival, with Holm's correction of p.

    The rivals are :data:`MANY` steps of the baseline, and as many steps of flow matching that is trained for as many
    steps: for distilled arms this includes the training of the teacher.
    """
    found: dict[Key, Estimate] = {}
    flows = {(arm.task, arm.name): arm for arm in arms if arm.task in SAMPLED and arm.name in (BASELINE, LONGER)}
    for arm in arms:
        rate = best_rate(arm, rows)
        if arm.task not in SAMPLED or rate is None:
            continue
        ours = _of_seeds(arm, rows)[rate]
        equal = LONGER if arm.module in DISTILLED else BASELINE
        for metric in map(in_steps, arm.few):
            for what, name, rival_metric in ((OF_MANY, BASELINE, in_steps(MANY)), (OF_AS_MANY, equal, metric)):
                rival = flows[arm.task, name]
                theirs = _of_seeds(rival, rows)[rival.rates[0]]
                seeds = sorted(ours.keys() & theirs.keys())
                if not seeds or (arm is rival and metric == rival_metric):
                    continue
                pairs = [(_end(ours[seed][metric]), _end(theirs[seed][rival_metric])) for seed in seeds]
                found[arm.task, arm.name, metric, what] = ratio_of([a for a, _ in pairs], [b for _, b in pairs])
    return _corrected(found)


def _corrected(found: Mapping[Key, Estimate]) -> dict[Key, Estimate]:
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
    found: dict[float, dict[int, Mapping[str, Curve]]] = {rate: {} for rate in arm.rates}
    for (rate, seed), one in runs_of(arm, rows).items():
        if seed != TUNING_SEED:
            found[rate][seed] = one["curves"]
    return found


def _end(curve: Curve) -> float:
    return curve[-1][2] if curve else math.inf


def verdict(estimate: Estimate, less: str = "fewer", more: str = "more") -> str:
    """Return the conclusion that an estimate of a ratio supports."""
    if estimate.n < len(SEEDS):
        return f"{estimate.n} of {len(SEEDS)} seeds: unknown"
    if not estimate.evidence:
        return "no evidence"
    return less if estimate.value < 1 else more


def lines(found: Mapping[Key, Estimate]) -> Iterator[str]:
    """Yield the lines of a table."""
    head = f"{'training':15} {'arm':38} {'metric':21} {'ratio of':11} {'':>6} {'95 % interval':>15}"
    yield f"{head} {'p':>7}  n  evidence"
    for (task, name, metric, what), one in found.items():
        interval = f"{one.low:.2f} to {one.high:.2f}"
        start = f"{task:15} {name:38} {metric:21} {what:11} {one.value:6.2f} {interval:>15}"
        yield f"{start} {_shown_p(one):>7}  {one.n}  {verdict(one, 'lower', 'higher')}"
    yield f"p is Holm's over all rows of the table; evidence is p of at most {LEVEL:g}."


# Where it is kept ---------------------------------------------------------------------------------------------------

COMMAND = "python -m benchmarks.quality"
_STEPS = ["Training", "Technique", "Until equal", "Steps", "CPU seconds", "p of steps, seconds", "Steps are"]
_COLUMNS = {
    "quality": _STEPS,
    "adapter_starts": _STEPS,
    "few_steps": [
        "Training",
        "Task",
        "Sampled in",
        "Fréchet distance",
        f"Ratio to {MANY} steps of flow",
        "Ratio to as many steps of flow",
        "p of both",
        "Distances are",
    ],
}


def _shown(one: Estimate | None) -> str:
    if one is None:
        return "-"
    return f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})"


def _shown_p(one: Estimate | None) -> str:
    if one is None or one.p is None:
        return "-"
    return f"{one.p:.3f}" if one.p >= 0.001 else "< 0.001"


def _record(
    name: str, key: Sequence[str], cells: Sequence[str], values: Mapping[str, str], unit: str
) -> dict[str, Any]:
    return {
        "id": "/".join((name, *key)),
        "table": name,
        "command": COMMAND,
        "unit": unit,
        "figures": values,
        "cells": [*cells, *(f"{{{field}}}" for field in values)],
        "date": figures.here()["date"],
        "threads": 1,
        "environment": name,
    }


def kept(found: Mapping[Key, Estimate], name_of_table: str = "quality") -> list[dict[str, Any]]:
    """Return the records for figures.json of all rows for which every seed has run."""
    records = []
    for (task, name, metric, what), steps in found.items():
        if what != "steps" or steps.n < len(SEEDS):
            continue
        seconds = found[task, name, metric, "seconds"]
        ps = ", ".join(map(_shown_p, (steps, seconds)))
        values = {"steps": _shown(steps), "seconds": _shown(seconds), "p": ps, "verdict": verdict(steps)}
        cells = [task, name, metric.removeprefix("val/").replace("_", " ")]
        unit = "with it / without it, geometric mean over seeds, 95 % interval"
        records.append(_record(name_of_table, (task, name, metric), cells, values, unit))
    return records


def kept_few(
    found: Mapping[Key, Estimate], arms: Sequence[Arm], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the records for figures.json of all samples in few steps for which every seed has run."""
    records = []
    for arm in arms:
        rate = best_rate(arm, rows)
        runs = _of_seeds(arm, rows)[rate] if arm.task in SAMPLED and rate is not None else {}
        if len(runs) < len(SEEDS):
            continue
        for metric in map(in_steps, arm.few):
            pair = [found.get((arm.task, arm.name, metric, rival)) for rival in (OF_MANY, OF_AS_MANY)]
            mean = sum(_end(run[metric]) for run in runs.values()) / len(runs)
            values = {"distance": f"{mean:.2f}", "many": _shown(pair[0]), "as_many": _shown(pair[1])}
            values["p"] = ", ".join(map(_shown_p, pair))
            values["verdict"] = ", ".join("-" if one is None else verdict(one, "smaller", "larger") for one in pair)
            name = "flow matching" if arm.name == BASELINE else arm.name
            cells = [arm.task.removeprefix("few-step "), name, metric]
            unit = "Fréchet distance; ratio of distances, geometric mean over seeds, 95 % interval"
            records.append(_record("few_steps", (arm.task, arm.name, metric), cells, values, unit))
    return records


def _words(arm: Arm) -> str:
    return f"{arm.task} {arm.name} {arm.group}"


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
    chosen = [arm for arm in ARMS if not given.only or any(word in _words(arm) for word in given.only)]
    tasks = {arm.task for arm in chosen}
    arms = [arm for arm in ARMS if arm in chosen or (arm.name == BASELINE and arm.task in tasks)]
    file = given.file or Path(__file__).parent / "records" / "quality.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not (given.show or given.record):
        seeds = range(1, given.seeds + 1)
        count = run(arms, file, time.monotonic() + 60 * given.minutes, seeds)
        print(f"{count} pieces are known to be left" if count else "all has been run", flush=True)
    rows = records(file)
    # p is corrected over all arms that have run, also if --only shows a part of them.
    found = table([arm for arm in ARMS if arm.task not in ADAPTED], rows)
    adapted = table([arm for arm in ARMS if arm.task in ADAPTED], rows)
    few = few_step_table(ARMS, rows)
    shown = {(arm.task, arm.name) for arm in arms}
    for one in (found, adapted, few):
        print("\n".join(lines({key: estimate for key, estimate in one.items() if key[:2] in shown})))
    if given.record:
        figures.record_table("quality", _COLUMNS["quality"], kept(found))
        figures.record_table("adapter_starts", _COLUMNS["adapter_starts"], kept(adapted, "adapter_starts"))
        figures.record_table("few_steps", _COLUMNS["few_steps"], kept_few(few, ARMS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
