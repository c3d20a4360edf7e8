"""Pipelines that were exported sample, in a process that has nothing of ours, the images that the run samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lit_efficient import EMA, DiffusersModelConfig, DiTConfig, DiTVariant, LatentDiffusion, LoRA
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig
from lit_efficient.models.libraries.tiny_pipelines import tiny_clip as clip
from lit_efficient.models.libraries.tiny_pipelines import tiny_t5 as t5
from tests.models.libraries.diffusers_autoencoders import KL, small
from tests.models.libraries.test_text_encoder_of_pipelines import saved
from tests.processes import python
from tests.support import QUIET
from tests.support_cli import export

CHANNELS, SIDE, CLASSES, SEED = 3, 4, 4, 7
DIT = DiTConfig(
    channels=CHANNELS,
    size=SIDE,
    width=24,
    depth=1,
    heads=2,
    num_classes=CLASSES,
    variant=DiTVariant(time_embedding="diffusers"),
)
MEAN, STD = torch.tensor([0.5, -1.0, 0.2]), torch.tensor([1.5, 0.7, 2.0])


class Latents(L.LightningDataModule):
    """Random latents of an autoencoder of diffusers, with labels and captions."""

    num_classes = CLASSES
    latent_shape = (CHANNELS, SIDE, SIDE)

    def __init__(self, codec: LatentCodec, text_encoder: TextEncoder | None) -> None:
        super().__init__()
        self.codec = codec
        self.text_encoder = text_encoder

    def train_dataloader(self) -> Any:
        latents = torch.randn(8, *self.latent_shape, generator=torch.Generator().manual_seed(0))
        samples = [{"latents": x, "labels": i % CLASSES, "captions": f"photograph {i}"} for i, x in enumerate(latents)]
        return DataLoader(samples, 4)  # type: ignore[arg-type]

    val_dataloader = train_dataloader

    def score_samples(self, images: torch.Tensor, labels: torch.Tensor, captions: object) -> dict[str, float]:
        return {}


def made(text: dict[str, Any] | TextEncoderConfig | None = None, **arguments: Any) -> LatentDiffusion:
    """A module with weights of some size, and the encoders that a data module would give it."""
    module = LatentDiffusion(**{"backbone": DIT, "samples": {"count": 0}, "sampling_steps": 5, **arguments})
    module.codec, module.latent_size = LatentCodec(small(KL), MEAN, STD), (SIDE, SIDE)
    if isinstance(text, dict):
        text = TextEncoderConfig(config_fields=text, max_length=24)
    module.text_encoder = None if text is None else TextEncoder.load(text)
    L.seed_everything(0, verbose=False)
    module.configure_model()
    for parameter in module.network.parameters():
        nn.init.normal_(parameter, std=0.15)
    return module.eval()


def written(module: LatentDiffusion, path: Path) -> Path:
    """A checkpoint of a module that no trainer has touched."""
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, path)
    return path


def trained(path: Path, module: LatentDiffusion, *callbacks: Any, weights_only: bool = False) -> Path:
    """A checkpoint after four steps with some techniques."""
    run = L.Trainer(callbacks=list(callbacks), **QUIET, max_steps=4)
    module.learning_rate = 0.02
    run.fit(module.train(), Latents(module.codec, module.text_encoder))
    run.save_checkpoint(path, weights_only=weights_only)
    module.eval()
    return path


def images_of(module: LatentDiffusion, labels: list[int] | None = None, **arguments: Any) -> torch.Tensor:
    """What the run samples, in the range and layout of a pipeline."""
    given = None if labels is None else torch.tensor(labels)
    latents = module.sample(given, torch.Generator().manual_seed(SEED), **arguments)
    return module.codec.decode(latents).permute(0, 2, 3, 1) / 2 + 0.5


def exported(path: Path, name: str, *arguments: str) -> Path:
    folder = path.parent / name
    assert export([str(path), "--format", "diffusers", "--output", str(folder), "--no-check", *arguments]) == 0
    return folder


VP = DiffusionProcess("scaled_linear", zero_terminal_snr=True)


class Samples:
    """Exports of one case, sampled in one process that cannot import this package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, dict[str, Any]] = {}
        self.expected: dict[str, torch.Tensor] = {}

    def add(self, name: str, folder: Path, expected: torch.Tensor, lora: bool = False, **call: Any) -> None:
        self.jobs[name] = {"folder": str(folder), "lora": lora, "call": call}
        self.expected[name] = expected

    def sample(self) -> None:
        (self.folder / "jobs.json").write_text(json.dumps(self.jobs))
        (self.folder / "script.py").write_text(SCRIPT)
        result = python(self.folder / "script.py", self.folder, SEED, server="peers")
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


def _averaged(samples: Samples, folder: Path) -> None:
    ema = EMA(decay=0.9, warmup=None)
    module = made(prediction="v", schedule=VP, sampler="ddim")
    path = trained(folder / "run.ckpt", module, ema)
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
    module = made(prediction="v", schedule="cosine", sampler="dpmsolver++")
    path = written(module, folder / "run.ckpt")
    call = {"class_labels": [1, 2], "guidance_scale": 2.0, "num_inference_steps": 5}
    samples.add("cosine", exported(path, "cosine"), images_of(module, [1, 2]), **call)


def _x0(samples: Samples, folder: Path) -> None:
    module = made(prediction="x0", schedule="linear", sampler="dpmsolver++")
    path = written(module, folder / "run.ckpt")
    call = {"class_labels": [1, 2], "guidance_scale": 2.0, "num_inference_steps": 5}
    samples.add("x0", exported(path, "x0"), images_of(module, [1, 2]), **call)


def _flow(samples: Samples, folder: Path) -> None:
    """The scheduler cuts timesteps to integers: so does the network that is compared with."""
    module = made(sampler=Sampler("dpmsolver++", shift=2.0))
    path = written(module, folder / "run.ckpt")
    whole = lambda _, inputs: (inputs[0], (inputs[1] * 1000 + 1e-3).floor() / 1000, *inputs[2:])  # noqa: E731
    module.network.register_forward_pre_hook(whole)
    call = {"class_labels": [1, 2], "guidance_scale": 2.0, "num_inference_steps": 5}
    samples.add("flow", exported(path, "flow"), images_of(module, [1, 2]), **call)


UNET = {
    "in_channels": CHANNELS, "out_channels": CHANNELS, "block_out_channels": [8, 16], "layers_per_block": 1,
    "norm_num_groups": 4, "mid_block_scale_factor": 1,
}  # fmt: skip
CONDITIONED = {
    "_class_name": "UNet2DConditionModel", "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "cross_attention_dim": 16, "attention_head_dim": 4, **UNET,
}  # fmt: skip
FREE = {
    "_class_name": "UNet2DModel", "down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2, **UNET,
}  # fmt: skip
HEADS = {
    "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "in_channels": CHANNELS, "sample_size": SIDE,
    "patch_size": 2, "norm_num_groups": 4,
}  # fmt: skip
THEIR_DIT = {"_class_name": "DiTTransformer2DModel", **HEADS, "num_embeds_ada_norm": CLASSES}
PIXART = {
    "_class_name": "PixArtTransformer2DModel", **HEADS, "cross_attention_dim": 16, "caption_channels": 16,
    "out_channels": 2 * CHANNELS,
}  # fmt: skip
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP = {"model_type": "clip_text_model", "max_position_embeddings": 24, "projection_dim": 8, **SMALL}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}


def of(fields: dict[str, Any]) -> DiffusersModelConfig:
    return DiffusersModelConfig(config_fields=fields)


def _stable_diffusion(samples: Samples, folder: Path) -> None:
    adapters = LoRA(rank=2, alpha=8, targets=["to_q", "to_v", "conv1"], save_base=True)
    sampler = Sampler("dpmsolver++", guidance_rescale=0.5)
    arguments: dict[str, Any] = {"prediction": "v", "schedule": VP, "sampler": sampler}
    module = made(CLIP, backbone=of(CONDITIONED), **arguments)
    path = trained(folder / "run.ckpt", module, adapters)
    captions = ["photograph 1", "a cat"]
    expected = images_of(module, captions=captions)
    call = {"prompt": captions, "guidance_scale": 2.0, "num_inference_steps": 5, "guidance_rescale": 0.5}
    samples.add("UNet, LoRA merged", exported(path, "merged"), expected, **call)
    beside = exported(path, "beside", "--lora", "diffusers")
    samples.add("UNet, LoRA of diffusers", beside, expected, lora=True, **call)
    for part in module.modules():
        if hasattr(part, "lora_B"):
            nn.init.zeros_(part.lora_B)
    samples.add("UNet without LoRA", beside, images_of(module, captions=captions), **call)


def _lcm(samples: Samples, folder: Path) -> None:
    """The pipeline and our sampler draw the noise between the steps from the generator in the same order."""
    distilled = {"prediction": "eps", "schedule": "scaled_linear", "sampler": "lcm", "guidance_scale": 1.0}
    module = made(CLIP, backbone=of(CONDITIONED), **distilled, sampling_steps=3)
    pipeline = exported(written(module, folder / "run.ckpt"), "lcm")
    assert json.loads((pipeline / "model_index.json").read_text())["scheduler"] == ["diffusers", "LCMScheduler"]
    prompts = ["a cat", "a small dog"]
    call = {"prompt": prompts, "guidance_scale": 1.0, "num_inference_steps": 3}
    samples.add("lcm", pipeline, images_of(module, captions=prompts), **call)


def _unconditional(samples: Samples, folder: Path) -> None:
    arguments: dict[str, Any] = {"prediction": "v", "schedule": "cosine", "sampler": "euler", "guidance_scale": 1.0}
    module = made(backbone=of(FREE), **arguments)
    path = written(module, folder / "run.ckpt")
    call = {"batch_size": 2, "num_inference_steps": 5}
    samples.add("UNet of nothing", exported(path, "free"), images_of(module, count=2), **call)


def _edm(samples: Samples, folder: Path) -> None:
    arguments: dict[str, Any] = {"prediction": "edm", "schedule": "edm", "sampler": "euler", "guidance_scale": 1.0}
    sampling = {"timestep_sampling": "log_normal"}
    module = made(backbone=of(FREE), **arguments, **sampling)
    path = written(module, folder / "run.ckpt")
    call = {"batch_size": 2, "num_inference_steps": 5}
    samples.add("UNet of EDM", exported(path, "edm"), images_of(module, count=2), **call)


def _their_dit(samples: Samples, folder: Path) -> None:
    module = made(prediction="v", schedule=VP, sampler="ddim", backbone=of(THEIR_DIT))
    path = written(module, folder / "run.ckpt")
    call = {"class_labels": [0, 3], "guidance_scale": 2.0, "num_inference_steps": 5}
    samples.add("their DiT", exported(path, "dit"), images_of(module, [0, 3]), **call)


def _pixart(samples: Samples, folder: Path) -> None:
    module = made(T5, prediction="v", schedule=VP, sampler="ddim", backbone=of(PIXART))
    path = written(module, folder / "run.ckpt")
    call = {"prompt": ["photograph 1", "cat"], "guidance_scale": 2.0, "num_inference_steps": 5}
    fixed = {"clean_caption": False, "use_resolution_binning": False, "max_sequence_length": 24}
    expected = images_of(module, captions=["photograph 1", "cat"])
    samples.add("PixArt", exported(path, "pixart"), expected, height=16, width=16, **call, **fixed)
    assert "height" not in (folder / "pixart" / "README.md").read_text()
    module.latent_size = (2 * SIDE, 2 * SIDE)  # its configuration goes on naming the size that positions are scaled by
    larger = exported(written(module, folder / "larger.ckpt"), "larger")
    assert "height=32, width=32" in (larger / "README.md").read_text()
    expected = images_of(module, captions=["photograph 1", "cat"])
    samples.add("PixArt of another size", larger, expected, height=32, width=32, **call, **fixed)


SDXL = {
    **CONDITIONED, "cross_attention_dim": 16 + 32, "addition_embed_type": "text_time", "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 6 * 4 + 6,
}  # fmt: skip
SD3 = {
    "_class_name": "SD3Transformer2DModel", "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1,
    "in_channels": CHANNELS, "out_channels": CHANNELS, "sample_size": SIDE, "pos_embed_max_size": SIDE,
    "joint_attention_dim": 48, "caption_projection_dim": 16, "pooled_projection_dim": 12,
}  # fmt: skip


def _sdxl(samples: Samples, folder: Path) -> None:
    saved(folder, clip(16, "CLIPTextModel"), clip(32))
    text = TextEncoderConfig(str(folder), pipeline="sdxl")
    module = made(text, prediction="v", schedule=VP, sampler="euler", backbone=of(SDXL))
    path = trained(folder / "run.ckpt", module, LoRA(rank=2, alpha=8, targets=["to_q", "to_v"], save_base=True))
    call = {"prompt": "cat", "guidance_scale": 2.0, "num_inference_steps": 5}
    expected = images_of(module, captions=["cat"])
    beside = exported(path, "sdxl", "--lora", "diffusers")
    samples.add("SDXL", beside, expected, lora=True, **call)


def _sd3(samples: Samples, folder: Path) -> None:
    saved(folder, clip(16), clip(24), t5())
    text = TextEncoderConfig(str(folder), pipeline="sd3", max_length=20)
    module = made(text, sampler=Sampler("euler", shift=3.0), backbone=of(SD3))
    path = trained(folder / "run.ckpt", module, LoRA(rank=2, alpha=8, targets=["to_q", "to_v"], save_base=True))
    call = {"prompt": "cat", "guidance_scale": 2.0, "sigmas": [1 - i / 5 for i in range(5)], "max_sequence_length": 20}
    sizes = {"height": 16, "width": 16}
    expected = images_of(module, captions=["cat"])
    samples.add("SD3", exported(path, "sd3", "--lora", "diffusers"), expected, lora=True, **call, **sizes)
    kept = torch.load(path, weights_only=True)
    kept["latent_diffusion"]["latent_size"] = [2 * SIDE, 2 * SIDE]
    torch.save(kept, folder / "larger.ckpt")
    larger = exported(folder / "larger.ckpt", "larger")
    assert "height=32, width=32, sigmas=" in (larger / "README.md").read_text()
    expected = images_of(module, captions=["cat"], size=(2 * SIDE, 2 * SIDE))
    samples.add("SD3 of another size", larger, expected, **call, height=32, width=32)


def _merged_lora(samples: Samples, folder: Path) -> None:
    module = made(prediction="v", schedule=VP, sampler="ddim")
    path = trained(folder / "run.ckpt", module, LoRA(rank=2, alpha=8, save_base=True))
    call = {"class_labels": [0, 1], "guidance_scale": 2.0, "num_inference_steps": 5}
    samples.add("LoRA", exported(path, "merged"), images_of(module, [0, 1]), **call)


CASES: dict[str, Callable[[Samples, Path], None]] = {
    "averaged": _averaged,
    "cosine": _cosine,
    "x0": _x0,
    "lcm": _lcm,
    "flow": _flow,
    "lora": _merged_lora,
    "stable diffusion": _stable_diffusion,
    "unconditional": _unconditional,
    "edm": _edm,
    "their dit": _their_dit,
    "pixart": _pixart,
    "sdxl": _sdxl,
    "sd3": _sd3,
}
DIFFER = {"averaged": ("raw", "ema"), "stable diffusion": ("UNet, LoRA merged", "UNet without LoRA")}


@pytest.mark.turns(4, always=["averaged"])
@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_samples_what_the_run_samples(case: str, tmp_path: Path) -> None:
    samples = Samples(tmp_path)
    CASES[case](samples, tmp_path)
    samples.sample()
    for name, expected in samples.expected.items():
        assert expected.std() > 0.01
        torch.testing.assert_close(samples.found[name], expected, rtol=0, atol=1e-4, msg=lambda s, n=name: f"{n}: {s}")
    if case in DIFFER:
        one, other = (samples.found[name] for name in DIFFER[case])
        assert (one - other).abs().max() > 0.01
