"""Runs of networks that see an image: what trains, what is kept and resumed, and the export in diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_efficient import (
    EMA,
    ActivationCheckpointing,
    ConfigurationError,
    DiffusersModelConfig,
    ExactResume,
    ImageCondition,
    LatentDiffusion,
    LoRA,
    Samples,
)
from lit_efficient.export.pipelines import export_pipeline
from lit_efficient.models.libraries.latent_codec import LatentCodec, find_autoencoder
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig
from lit_efficient.tasks.loading import load_latent_diffusion
from tests import tiny_pipelines
from tests.support import QUIET, assert_equal
from tests.support_cli import export
from tests.tasks.captioned_latents import collate
from tests.tasks.test_exact_resume_of_tasks import SaveEverywhere
from tests.tasks.test_image_conditions import (
    CAPTION,
    batch_of,
    check_inpainting,
    check_predictions,
    controlled,
    kontext_steps,
    recorded,
    shaken,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:A caption has")
NEW = ["controlnet_down_blocks", "controlnet_mid_block", "controlnet_cond_embedding"]  # layers that the UNet lacks


class Pictures(L.LightningDataModule):
    """Random images with conditions and captions, in batches of 2."""

    num_classes = 0
    latent_shape = (4, 8, 8)

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.codec = LatentCodec.declared(find_autoencoder(DiffusersModelConfig(str(folder))))
        self.text_encoder = TextEncoder.load(TextEncoderConfig(str(folder)))
        draws = torch.Generator().manual_seed(3)
        images = torch.rand(8, 2, 3, 64, 64, generator=draws) * 2 - 1
        self.items = [{"images": a, "condition": b, "captions": f"photo {i}"} for i, (a, b) in enumerate(images)]
        self.judged: list[tuple[int, ...]] = []

    def train_dataloader(self) -> Any:
        return DataLoader(self.items, batch_size=2, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(self.items[:4], batch_size=2, collate_fn=collate)  # type: ignore[arg-type]

    predict_dataloader = val_dataloader

    def score_samples(self, images: Tensor, labels: Tensor | None, captions: Any = None) -> dict[str, float]:
        self.judged.append(tuple(images.shape))
        return {"brightness": float(images.mean())}


def fit(
    folder: Path, kind: Any, *callbacks: L.Callback, seed: int = 0, ckpt: Path | None = None, **options: Any
) -> tuple[LatentDiffusion, L.Trainer]:
    L.seed_everything(seed, verbose=False)
    module = LatentDiffusion(
        DiffusersModelConfig(str(folder)),
        samples=Samples(2),
        sampling_steps=2,
        label_dropout=0.3,
        guidance_scale=3.0,
        image_condition=ImageCondition(kind, **options),
    )
    runner = L.Trainer(**QUIET | {"max_steps": 4, "max_epochs": -1, "val_check_interval": 4}, callbacks=[*callbacks])
    runner.fit(module, Pictures(folder), ckpt_path=ckpt)
    return module, runner


@pytest.mark.turns(4, family="runs with images")
@pytest.mark.parametrize("kind", ["controlnet", "inpaint"])
def test_a_resumed_run_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    tiny_pipelines.written("sd15", tmp_path / "base")
    whole, _ = fit(tmp_path / "base", kind, EMA(decay=0.5), ExactResume(), SaveEverywhere(tmp_path))
    for step in (1, 3):
        again, runner = fit(
            tmp_path / "base", kind, EMA(decay=0.5), ExactResume(), seed=step, ckpt=tmp_path / f"{step}.ckpt"
        )
        assert runner.global_step == 4
        assert_equal(whole.state_dict(), again.state_dict())


@pytest.mark.turns(4, family="runs with images")
def test_a_controlnet_trains_alone_and_its_pipeline_predicts_what_the_run_does(tmp_path: Path) -> None:
    base = tiny_pipelines.written("sdxl", tmp_path / "base")
    module, runner = fit(tmp_path / "base", "controlnet", EMA(decay=0.5))
    assert [judged[0] for judged in runner.datamodule.judged] == [2]  # type: ignore[attr-defined]
    network: Any = module.network
    assert_equal(network.unet.state_dict(), base.unet.state_dict())
    copied = diffusers.ControlNetModel.from_unet(base.unet).state_dict()
    moved = [name for name, tensor in network.controlnet.state_dict().items() if not torch.equal(tensor, copied[name])]
    assert any(name.startswith("down_blocks") for name in moved)
    runner.save_checkpoint(tmp_path / "run.ckpt")

    made = export_pipeline(tmp_path / "run.ckpt", tmp_path / "made", weights="raw")
    controlnet = diffusers.ControlNetModel.from_pretrained(made)
    assert_equal(controlnet.state_dict(), network.controlnet.state_dict())
    averaged = diffusers.ControlNetModel.from_pretrained(
        export_pipeline(tmp_path / "run.ckpt", tmp_path / "average", check=False)
    )
    assert not torch.equal(averaged.mid_block.resnets[0].conv1.weight, controlnet.mid_block.resnets[0].conv1.weight)
    for part in (controlnet, network.controlnet):  # the zero convolutions have hardly moved
        shaken(part)
    pipeline = controlled(tmp_path / "other", "sdxl", controlnet)
    batch = batch_of()
    steps = recorded(
        pipeline, prompt=CAPTION, image=batch["condition"] / 2 + 0.5, guidance_scale=5.0, height=64, width=64
    )
    check_predictions(module.eval(), steps, batch, 5.0)


@pytest.mark.turns(4, family="runs with images")
def test_a_checkpoint_needs_no_files_and_predicts_with_the_images_of_the_data(tmp_path: Path) -> None:
    tiny_pipelines.written("sd15", tmp_path / "base")
    data = Pictures(tmp_path / "base")
    start = tmp_path / "start"
    unet = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "base" / "unet")
    diffusers.ControlNetModel.from_unet(unet).save_pretrained(start)
    _, runner = fit(tmp_path / "base", "controlnet", controlnet=DiffusersModelConfig(str(start)))
    runner.save_checkpoint(tmp_path / "run.ckpt")
    (tmp_path / "base").rename(tmp_path / "gone")
    start.rename(tmp_path / "gone too")
    module = load_latent_diffusion(tmp_path / "run.ckpt")[0]
    found = L.Trainer(**QUIET).predict(module, data)
    assert found is not None
    images = torch.cat(found)  # type: ignore[arg-type]
    assert images.shape == (4, 3, 64, 64)
    for item in data.items:
        item["condition"] = -item["condition"]
    others = torch.cat(L.Trainer(**QUIET).predict(module, data))  # type: ignore[arg-type]
    assert not torch.equal(images, others)
    with pytest.raises(ConfigurationError, match="network sees images, and none are known to sample with"):
        module.sample_images(2, 0)
    with pytest.raises(ConfigurationError, match="image must be given for a network that sees an image"):
        module.eval().sample(captions=["a"])


@pytest.mark.turns(4, family="runs with images")
def test_low_rank_adapters_of_a_controlnet(tmp_path: Path) -> None:
    tiny_pipelines.written("sd15", tmp_path / "base")
    lora = LoRA(rank=2, modules_to_save=NEW)
    module, _ = fit(tmp_path / "base", "controlnet", lora, ExactResume(), SaveEverywhere(tmp_path))
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert all(name.startswith("network.controlnet.") for name in trained)
    assert {name.rpartition(".")[2] for name in trained} == {"lora_A", "lora_B", "weight", "bias"}
    assert all("lora_" in name or any(new in name for new in NEW) for name in trained)
    kept = torch.load(tmp_path / "4.ckpt", weights_only=True)["state_dict"]
    assert not any(name.startswith("network.unet") for name in kept)
    again, _ = fit(tmp_path / "base", "controlnet", LoRA(rank=2, modules_to_save=NEW), ExactResume(), seed=0,
                   ckpt=tmp_path / "2.ckpt")  # fmt: skip
    assert_equal(module.state_dict(), again.state_dict())
    made = export_pipeline(tmp_path / "4.ckpt", tmp_path / "made", check=False)
    controlnet = diffusers.ControlNetModel.from_pretrained(made)
    network: Any = module.network
    x, t, text = torch.randn(1, 4, 8, 8), torch.tensor([500]), torch.randn(1, 5, 16)
    picture = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        theirs, _ = controlnet(x, t, text, picture, return_dict=False)
        ours, _ = network.controlnet.eval()(x, t, text, picture, return_dict=False)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigurationError, match="lora must be merged for a ControlNet"):
        export_pipeline(tmp_path / "4.ckpt", tmp_path / "no", lora="diffusers")


@pytest.mark.turns(4, family="runs with images")
def test_an_inpainting_run_becomes_an_inpainting_pipeline(tmp_path: Path) -> None:
    tiny_pipelines.written("sdxl", tmp_path / "base")
    module, runner = fit(tmp_path / "base", "inpaint")
    runner.save_checkpoint(tmp_path / "run.ckpt")
    made = export_pipeline(tmp_path / "run.ckpt", tmp_path / "made")
    pipeline = diffusers.AutoPipelineForInpainting.from_pretrained(made)
    assert type(pipeline).__name__ == "StableDiffusionXLInpaintPipeline"
    check_inpainting(module.eval(), pipeline)
    assert "mask_image=mask, strength=1.0" in (made / "README.md").read_text()


@pytest.mark.turns(4, family="runs with images")
def test_recomputed_blocks_change_no_bit(tmp_path: Path) -> None:
    tiny_pipelines.written("sd15", tmp_path / "base")
    plain, _ = fit(tmp_path / "base", "controlnet")
    recomputed, _ = fit(tmp_path / "base", "controlnet", ActivationCheckpointing())
    assert_equal(plain.state_dict(), recomputed.state_dict())


@pytest.mark.turns(4, family="runs with images")
def test_adapters_of_kontext_load_into_its_pipeline(tmp_path: Path) -> None:
    base = tiny_pipelines.written("flux", tmp_path / "base")
    lora = LoRA(rank=2, targets=["to_q", "to_k", "to_v", "to_out.0"])
    module, runner = fit(tmp_path / "base", "sequence", lora)
    runner.save_checkpoint(tmp_path / "run.ckpt")
    arguments = [str(tmp_path / "run.ckpt"), "--format", "peft", "--output", str(tmp_path / "made")]
    assert export(arguments) == 0
    pipeline = diffusers.FluxKontextPipeline(**base.components)
    before = pipeline.transformer.proj_out.weight.clone()
    pipeline.load_lora_weights(tmp_path / "made")
    batch = batch_of()
    steps = kontext_steps(pipeline, batch)
    check_predictions(module.eval(), steps, batch, 1.0)
    assert torch.equal(before, pipeline.transformer.proj_out.weight)
    adapters = [p for name, p in pipeline.transformer.named_parameters() if "lora_B" in name]
    assert adapters
    assert all(p.any() for p in adapters)
