"""Pipelines that were exported sample, in a process that has nothing of ours, the images that the run samples."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lit_efficient import EMA, DiTConfig, LatentDiffusion, LoRA
from lit_efficient.commands.export import run as export
from lit_efficient.data.digits import TensorDictDataset
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.models.latent_codec import LatentCodec
from tests.models.diffusers_autoencoders import KL, small
from tests.support import QUIET

CHANNELS, SIDE, CLASSES, SEED = 3, 4, 4, 7
DIT = DiTConfig(
    channels=CHANNELS, size=SIDE, width=24, depth=1, heads=2, num_classes=CLASSES, time_embedding="diffusers"
)
MEAN, STD = torch.tensor([0.5, -1.0, 0.2]), torch.tensor([1.5, 0.7, 2.0])


class Latents(L.LightningDataModule):
    """Random latents of an autoencoder of diffusers."""

    num_classes = CLASSES
    latent_shape = (CHANNELS, SIDE, SIDE)

    def __init__(self, codec: LatentCodec) -> None:
        super().__init__()
        self.codec = codec

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(8, *self.latent_shape, generator=generator)
        return DataLoader(TensorDictDataset({"latents": latents, "labels": torch.arange(8) % CLASSES}), 4)

    val_dataloader = train_dataloader

    def score_samples(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        return {}


def codec() -> LatentCodec:
    return LatentCodec(small(KL), MEAN, STD)


def trained(
    folder: Path, *callbacks: Any, weights_only: bool = False, **arguments: Any
) -> tuple[LatentDiffusion, Path]:
    """A module with weights of some size, trained for four steps, and its checkpoint."""
    settings = {"backbone": DIT, "validation_samples": 0, "sampling_steps": 5, "learning_rate": 0.02}
    module = LatentDiffusion(**{**settings, **arguments})
    L.seed_everything(0, verbose=False)
    module.configure_model()
    for parameter in module.network.parameters():
        nn.init.normal_(parameter, std=0.15)
    run = L.Trainer(callbacks=list(callbacks), **QUIET, max_steps=4)
    run.fit(module, Latents(codec()))
    path = folder / "run.ckpt"
    run.save_checkpoint(path, weights_only=weights_only)
    return module.eval(), path


def images_of(module: LatentDiffusion, labels: list[int], **arguments: Any) -> torch.Tensor:
    """What the run samples, in the range and layout of a pipeline."""
    latents = module.sample(torch.tensor(labels), torch.Generator().manual_seed(SEED), **arguments)
    return module.codec.decode(latents).permute(0, 2, 3, 1) / 2 + 0.5


def exported(path: Path, name: str, *arguments: str) -> Path:
    folder = path.parent / name
    assert export([str(path), "--format", "diffusers", "--output", str(folder), *arguments]) == 0
    return folder


VP = DiffusionProcess("scaled_linear", zero_terminal_snr=True)


class Samples:
    """Exports of all cases, sampled in one process that cannot import this package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, dict[str, Any]] = {}
        self.expected: dict[str, torch.Tensor] = {}

    def add(self, name: str, folder: Path, expected: torch.Tensor, lora: bool = False, **call: Any) -> None:
        self.jobs[name] = {"folder": str(folder), "lora": lora, "call": call}
        self.expected[name] = expected

    def sample(self) -> None:
        (self.folder / "jobs.json").write_text(json.dumps(self.jobs))
        command = [sys.executable, "-I", "-c", SCRIPT, str(self.folder), str(SEED)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        self.found = torch.load(self.folder / "images.pt", weights_only=True)


SCRIPT = """
import json, sys, warnings
from pathlib import Path
sys.modules["lit_efficient"] = None
import torch
torch.set_num_threads(1)
from diffusers import DiffusionPipeline
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
images = {}
for name, job in json.loads((folder / "jobs.json").read_text()).items():
    pipeline = DiffusionPipeline.from_pretrained(job["folder"])
    pipeline.set_progress_bar_config(disable=True)
    if job["lora"]:
        pipeline.load_lora_weights(job["folder"])
    generator = torch.Generator().manual_seed(seed)
    images[name] = torch.as_tensor(pipeline(**job["call"], generator=generator, output_type="np").images)
torch.save(images, folder / "images.pt")
"""


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    root = tmp_path_factory.mktemp("pipelines")
    all_of_them = Samples(root)
    for name, case in CASES.items():
        folder = root / name
        folder.mkdir()
        case(all_of_them, folder)
    all_of_them.sample()
    return all_of_them


def _averaged(samples: Samples, folder: Path) -> None:
    ema = EMA(decay=0.9, warmup=None)
    module, path = trained(folder, ema, prediction="v", schedule=VP, sampler="ddim")
    call = {"class_labels": [0, 3], "guidance_scale": 2.0, "num_inference_steps": 5}
    samples.add("raw", exported(path, "raw", "--weights", "raw"), images_of(module, [0, 3]), **call)
    with ema.averaged(module):
        average = images_of(module, [0, 3])
        unguided = images_of(module, [1, 2, 3], guidance_scale=1.0)
    given, asked = exported(path, "average"), exported(path, "ema", "--weights", "ema")
    samples.add("ema", asked, average, **call)
    samples.add("ema by default", given, average, **call)
    alone = {**call, "class_labels": [1, 2, 3], "guidance_scale": 1.0}
    samples.add("without guidance", given, unguided, **alone)


def _cosine(samples: Samples, folder: Path) -> None:
    module, path = trained(folder, prediction="v", schedule="cosine", sampler="dpmsolver++")
    call = {"class_labels": [1, 2], "guidance_scale": 2.0, "num_inference_steps": 5}
    samples.add("cosine", exported(path, "cosine"), images_of(module, [1, 2]), **call)


def _x0(samples: Samples, folder: Path) -> None:
    module, path = trained(folder, prediction="x0", schedule="linear", sampler="dpmsolver++")
    call = {"class_labels": [1, 2], "guidance_scale": 2.0, "num_inference_steps": 5}
    samples.add("x0", exported(path, "x0"), images_of(module, [1, 2]), **call)


def _flow(samples: Samples, folder: Path) -> None:
    """The scheduler cuts timesteps to integers: so does the network that is compared with."""
    module, path = trained(folder, sampler=Sampler("dpmsolver++", shift=2.0))
    whole = lambda _, inputs: (inputs[0], (inputs[1] * 1000 + 1e-3).floor() / 1000, *inputs[2:])  # noqa: E731
    module.network.register_forward_pre_hook(whole)
    call = {"class_labels": [1, 2], "guidance_scale": 2.0, "num_inference_steps": 5}
    samples.add("flow", exported(path, "flow"), images_of(module, [1, 2]), **call)


def _merged_lora(samples: Samples, folder: Path) -> None:
    module, path = trained(folder, LoRA(rank=2, alpha=8, save_base=True), prediction="v", schedule=VP, sampler="ddim")
    call = {"class_labels": [0, 1], "guidance_scale": 2.0, "num_inference_steps": 5}
    samples.add("LoRA", exported(path, "merged"), images_of(module, [0, 1]), **call)


CASES: dict[str, Callable[[Samples, Path], None]] = {
    "averaged": _averaged,
    "cosine": _cosine,
    "x0": _x0,
    "flow": _flow,
    "lora": _merged_lora,
}
NAMES = ["raw", "ema", "ema by default", "without guidance", "cosine", "x0", "flow", "LoRA"]


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_samples_what_the_run_samples(samples: Samples, name: str) -> None:
    found, expected = samples.found[name], samples.expected[name]
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_every_case_is_compared(samples: Samples) -> None:
    assert set(samples.found) == set(NAMES)


def test_averaged_weights_are_other_ones(samples: Samples) -> None:
    assert (samples.found["raw"] - samples.found["ema"]).abs().max() > 0.01
