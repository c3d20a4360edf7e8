"""LoRA in image networks: load_lora_weights of diffusers loads what was trained, or the export is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_efficient import LoRA
from lit_efficient.errors import CheckpointError
from lit_efficient.export.check import check_lora
from lit_efficient.export.diffusers_lora_check import updates_of
from tests.export.test_pipelines import CLIP, CONDITIONED, FREE, THEIR_DIT, made, of
from tests.export.test_pipelines import trained as trained_latents
from tests.mechanisms.adapters.test_architectures import MODELS
from tests.support import QUIET
from tests.support_cli import export

IDS = torch.arange(8).view(1, 8)


def clip(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, projection_dim=8, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def unet() -> Any:
    torch.manual_seed(0)
    return MODELS["unet"][0]()


class Painter(L.LightningModule):
    """A module of one's own with a UNet and text encoders, in any order and under any names."""

    def __init__(self, parts: dict[str, Any]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        losses = []
        for part in self.children():
            own = MODELS["unet"][1](part) if "UNet" in type(part).__name__ else part(input_ids=IDS)[0]
            losses.append(own.square().mean())
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(IDS, 1)


def trained(folder: Path, parts: dict[str, Any], **options: Any) -> Painter:
    torch.manual_seed(0)
    targets = ["to_q", "conv1"]
    if any("CLIP" in type(part).__name__ for part in parts.values()):
        targets += ["q_proj", "fc1"]
    run = L.Trainer(callbacks=[LoRA(rank=2, alpha=6.0, targets=targets, **options)], **QUIET, max_epochs=3)
    run.fit(module := Painter(parts))
    run.save_checkpoint(folder / "a.ckpt")
    return module.eval()


def exported(folder: Path) -> int:
    return export([str(folder / "a.ckpt"), "--format", "peft", "--output", str(folder / "out")])


@pytest.mark.turns(6, family="slow")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("encoders", [["CLIPTextModel"], ["CLIPTextModelWithProjection", "CLIPTextModel"]])
def test_adapters_of_several_networks_load_into_a_pipeline(
    encoders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import diffusers

    parts = {"paint": unet(), **{f"words{i}": clip(kind) for i, kind in enumerate(encoders)}}
    module: Any = trained(tmp_path, parts, variant="dora" if len(encoders) == 1 else "rslora")
    assert exported(tmp_path) == 0
    name = "StableDiffusionPipeline" if len(encoders) == 1 else "StableDiffusionXLPipeline"
    assert f"load_lora_weights of {name} loads the" in capsys.readouterr().err
    own: dict[str, Any] = {"vae": None, "tokenizer": None, "scheduler": diffusers.DDIMScheduler(), "unet": unet()}
    if len(encoders) == 1:
        own |= {"text_encoder": clip("CLIPTextModel"), "safety_checker": None, "feature_extractor": None}
        own["requires_safety_checker"] = False
    else:
        own |= {"text_encoder": clip("CLIPTextModel"), "tokenizer_2": None}
        own["text_encoder_2"] = clip("CLIPTextModelWithProjection")
    pipeline = getattr(diffusers, name)(**own)
    pipeline.load_lora_weights(tmp_path / "out")
    pairs = [(module.paint, pipeline.unet, MODELS["unet"][1])]
    for i, kind in enumerate(encoders):
        place = "text_encoder_2" if kind.endswith("WithProjection") else "text_encoder"
        pairs.append((getattr(module, f"words{i}"), getattr(pipeline, place), lambda part: part(input_ids=IDS)[0]))
    fresh = [unet(), *map(clip, encoders)]
    for (ours, theirs, output), base in zip(pairs, fresh):
        with torch.no_grad():
            expected = output(ours)
            torch.testing.assert_close(output(theirs.eval()), expected, rtol=1e-4, atol=1e-4)
            assert (output(base.eval()) - expected).abs().max() > 1e-2


@pytest.mark.turns(6, family="slow")
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_diffusers_reads_otherwise_fails_the_check(tmp_path: Path) -> None:
    trained(tmp_path, {"unet": unet(), "text_encoder": clip("CLIPTextModel")})
    assert exported(tmp_path) == 0
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    where = checkpoint["lit_efficient"]["adapters"]
    (record,) = checkpoint["lit_efficient"]["transforms"]
    expected = updates_of(checkpoint["state_dict"], where, record["arguments"])
    file = tmp_path / "out" / "pytorch_lora_weights.safetensors"
    tensors = load_file(file)
    save_file({key: tensor for key, tensor in tensors.items() if key.startswith("unet.")}, file)
    with pytest.raises(
        CheckpointError, match=r"loads other adapters than were trained: \d+ of \d+ updates differ or are"
    ):
        check_lora(tmp_path / "out", where["networks"], expected)


def test_networks_that_no_pipeline_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, {"one": unet(), "two": unet()})
    assert exported(tmp_path) == 2
    assert "adapters of one denoiser and its text encoders" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.turns(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fields", "targets", "loader"),
    [
        (CONDITIONED, ["to_q", "conv1"], "load_lora_weights of StableDiffusionPipeline"),
        (FREE, ["conv1"], "peft"),
        (THEIR_DIT, ["to_q"], "peft"),
    ],
    ids=["pipeline", "unconditional", "dit"],
)
def test_adapters_of_latent_diffusion_are_checked(
    fields: dict[str, Any], targets: list[str], loader: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"guidance_scale": 1.0} if fields is FREE else {}
    module = made(CLIP if fields is CONDITIONED else None, backbone=of(fields), **options)
    trained_latents(tmp_path / "a.ckpt", module, LoRA(rank=2, targets=targets))
    assert exported(tmp_path) == 0
    said = capsys.readouterr().err
    assert f"{loader} loads the" in said
    assert "not checked" not in said
