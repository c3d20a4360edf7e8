"""Tasks, interrupted after every optimizer step and resumed, end with the bits of the uninterrupted run.

Shuffling, dropout (of activations, of labels), accumulation, techniques, validation on the way, and the task's own
optimizer and schedule are all in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lit_efficient import (
    EMA,
    AutoencoderConfig,
    Autoencoding,
    CorpusFiles,
    DiffusersModelConfig,
    DigitImages,
    DiTConfig,
    EndToEnd,
    ExactResume,
    GPTConfig,
    HiddenAlignment,
    LanguageModeling,
    LatentAlignment,
    LatentDiffusion,
    LatentDigits,
    LowBitOptimizer,
    Perceptual,
    PythonCorpus,
    SafeCheckpointIO,
    Samples,
    SNRWeighting,
    StochasticDepth,
    TimestepSampling,
)
from tests.models.libraries.diffusers_autoencoders import KL
from tests.support import assert_equal

STEPS = 4  # of two batches, with validation after two steps and at the end


class SaveEverywhere(L.Callback):
    """A checkpoint after every optimizer step. Stateless, so that a run without it is no other run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > self.saved:
            self.saved = trainer.global_step
            trainer.save_checkpoint(self.folder / f"{self.saved}.ckpt", weights_only=False)


def language_modeling(folder: Path) -> tuple[Any, Any, list[Any]]:
    source = folder / "source"
    if not source.exists():
        source.mkdir()
        for i in range(12):
            (source / f"file{i}.py").write_text(f"def function_{i}(self):\n    return self.value + {i}\n\n\n" * 4)
    config = GPTConfig(dim=16, depth=2, num_heads=2, max_length=32, dropout=0.2)
    data = PythonCorpus(
        vocab_size=300,
        sequence_length=16,
        batch_size=2,
        val_fraction=0.2,
        files=CorpusFiles([str(source)]),
        cache_dir=str(folder),
    )
    module = LanguageModeling(config, learning_rate=1e-2, warmup_steps=2)
    return module, data, [StochasticDepth(0.5), LowBitOptimizer(min_size=0, keep_32bit=())]


def latent_diffusion(folder: Path) -> tuple[Any, Any, list[Any]]:
    backbone = DiTConfig(channels=2, size=4, patch_size=2, width=32, depth=2, heads=2)
    data = LatentDigits(
        image_size=16,
        autoencoder=AutoencoderConfig(latent_channels=2, width=8),
        autoencoder_steps=20,
        judge_steps=20,
        batch_size=16,
        cache_dir=str(folder),
    )
    module = LatentDiffusion(backbone=backbone, sampling_steps=2, samples=Samples(10), label_dropout=0.3)
    return module, data, [StochasticDepth(0.5, skip="sample"), SNRWeighting(gamma=1.0)]


def self_flow(folder: Path) -> tuple[Any, Any, list[Any]]:
    module, data, _ = latent_diffusion(folder)
    two_times = TimestepSampling("uniform", second_share=0.25)
    module = LatentDiffusion(backbone=module.backbone, timestep_sampling=two_times, samples=Samples(0))
    return module, data, [HiddenAlignment(1, "average.2", projection="mlp2"), EMA(decay=0.9, warmup=None)]


def autoencoding(folder: Path) -> tuple[Any, Any, list[Any]]:
    data = DigitImages(image_size=8, batch_size=8)
    two = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    spec = DiffusersModelConfig(config_fields={**KL, **two, "block_out_channels": [8, 8]})
    module = Autoencoding(spec, perceptual=Perceptual(weight=0.1), reconstruction="smooth")
    teacher = nn.Conv2d(1, 4, 4, stride=4).requires_grad_(False)
    nn.init.dirac_(teacher.weight)
    nn.init.zeros_(teacher.bias)
    return module, data, [LatentAlignment(teacher, weight=0.5), EMA(decay=0.9)]


def end_to_end(folder: Path) -> tuple[Any, Any, list[Any]]:
    teacher = nn.Conv2d(1, 4, 4, stride=4).requires_grad_(False)
    nn.init.dirac_(teacher.weight)
    nn.init.zeros_(teacher.bias)
    backbone = DiTConfig(channels=2, size=2, patch_size=1, width=16, depth=2, heads=2)
    loss = EndToEnd(backbone, block=1, hidden=8)
    data = DigitImages(image_size=8, batch_size=8)
    module = Autoencoding(AutoencoderConfig(latent_channels=2, width=8))
    return module, data, [LatentAlignment(teacher, weight=1.5, loss=loss)]


def run(
    make: Callable[[Path], Any], folder: Path, seed: int, *callbacks: Any, ckpt_path: Path | None = None
) -> dict[str, Any]:
    L.seed_everything(seed, verbose=False)  # another seed for each process must not matter after a resume
    module, data, techniques = make(folder)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        accumulate_grad_batches=2,
        val_check_interval=4,
        limit_val_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[*techniques, ExactResume(), *callbacks],
        plugins=[SafeCheckpointIO()],
    )
    if ckpt_path is None:  # the initial weights are drawn from the global generator
        L.seed_everything(0, verbose=False)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    assert trainer.global_step == STEPS
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return {"weights": weights, "optimizers": optimizers, "schedulers": [s["last_epoch"] for s in schedulers]}


@pytest.mark.turns(10)
@pytest.mark.parametrize("make", [language_modeling, latent_diffusion, self_flow, autoencoding, end_to_end])
def test_interrupted_at_any_step_equals_uninterrupted(make: Callable[[Path], Any], tmp_path: Path) -> None:
    whole = run(make, tmp_path, 0)
    assert_equal(whole, run(make, tmp_path, 0, SaveEverywhere(tmp_path)))
    for step in range(1, STEPS):
        resumed = run(make, tmp_path, 100 + step, ckpt_path=tmp_path / f"{step}.ckpt")
        assert_equal(whole, resumed)
    first = torch.load(tmp_path / "1.ckpt", weights_only=True)["state_dict"]
    assert not all(torch.equal(first[name], tensor) for name, tensor in whole["weights"].items())
