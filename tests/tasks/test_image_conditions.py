"""Networks that see an image predict what diffusers' pipelines predict with it, and train on the same loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from lit_efficient import ConfigurationError, DiffusersModelConfig, ImageCondition, LatentDiffusion, Samples
from lit_efficient.models.libraries.latent_codec import LatentCodec, find_autoencoder
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig
from lit_efficient.tasks.image_inputs import random_masks
from lit_efficient.tasks.latent_sampling import guided
from tests import tiny_pipelines

CAPTION = "A Cat on a mat"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:A caption has")


def ours_from(folder: Path, kind: Any, **arguments: Any) -> LatentDiffusion:
    """Return a run whose config names the folder and the image condition."""
    torch.manual_seed(0)
    spec = DiffusersModelConfig(str(folder))
    module = LatentDiffusion(spec, samples=Samples(0), image_condition=ImageCondition(kind, **arguments))
    module.codec = LatentCodec.declared(find_autoencoder(spec))
    if (folder / "text_encoder").exists():
        module.text_encoder = TextEncoder.load(TextEncoderConfig(str(folder)))
    module.configure_model()
    return module.eval()


def shaken(network: nn.Module) -> None:
    """Give all weights values, because layers that start at zero would hide everything."""
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            draws = torch.Generator().manual_seed(number)
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws))


def batch_of(count: int = 1, **further: Any) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(5)
    images, condition = (torch.rand(2, count, 3, 64, 64, generator=draws) * 2 - 1).unbind()
    mask = (torch.rand(count, 1, 8, 8, generator=draws) < 0.5).float()
    captions = [CAPTION, "a dog", ""][:count]
    return {
        "images": images,
        "condition": condition,
        "mask": F.interpolate(mask, (64, 64)),
        "captions": captions,
        **further,
    }


def recorded(pipeline: Any, unpack: Any = lambda latents: latents, **arguments: Any) -> tiny_pipelines.Steps:
    """Run a pipeline, and return input, timestep and guided prediction of each step."""
    arguments |= {"output_type": "latent", "num_inference_steps": 3, "generator": torch.Generator().manual_seed(1)}
    return tiny_pipelines.recorded(pipeline, lambda: pipeline(**arguments), unpack)


def check_predictions(module: LatentDiffusion, steps: list[Any], batch: dict[str, Any], guidance: float) -> None:
    condition = module.conditioning.of_batch(batch, module.device)
    condition, _ = module.with_image(condition, batch, torch.Generator().manual_seed(0))
    predict = guided(module, condition, lambda: module.conditioning.null(module.device), guidance, module.sampler)
    tiny_pipelines.check_steps(module, predict, steps)
    for x, timestep, theirs in steps:
        with torch.no_grad():
            without = module(
                x, tiny_pipelines.time_of(module, timestep), replace(condition, image=-10 * condition.image)
            )
        assert (without - theirs).abs().max() > 1e-3  # the image counts


def check_inpainting(module: LatentDiffusion, pipeline: Any) -> None:
    """Compare the predictions of an inpainting network with those of each step of its pipeline."""
    batch = batch_of()
    assert module.codec is not None
    mean, _ = module.codec.encode(batch["images"] * (batch["mask"] < 0.5))
    module.codec.encode = lambda images: (mean, None)  # type: ignore[method-assign]  # the pipeline draws a sample
    pipeline._encode_vae_image = lambda image, generator: mean
    arguments = {"prompt": CAPTION, "image": batch["images"] / 2 + 0.5, "mask_image": batch["mask"], "strength": 1.0}
    steps = recorded(pipeline, **arguments, guidance_scale=5.0, height=64, width=64)
    check_predictions(module, steps, batch, 5.0)


def controlled(folder: Path, family: str, controlnet: Any) -> Any:
    name = "StableDiffusionXLControlNetPipeline" if family == "sdxl" else "StableDiffusionControlNetPipeline"
    base = tiny_pipelines.written(family, folder)
    further = {} if family == "sdxl" else tiny_pipelines.WITHOUT_CHECKER
    components = {key: part for key, part in base.components.items() if key != "image_encoder"} | further
    return getattr(diffusers, name)(**components, controlnet=controlnet)


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_controlnet_predicts_what_its_pipeline_does(family: str, tmp_path: Path) -> None:
    tiny_pipelines.written(family, tmp_path)
    module = ours_from(tmp_path, "controlnet")
    batch = batch_of()
    x, t = torch.randn(1, 4, 8, 8), torch.tensor([0.5])
    condition, _ = module.with_image(module.conditioning.of_batch(batch, module.device), batch, None)
    base = LatentDiffusion(DiffusersModelConfig(str(tmp_path)), samples=Samples(0))
    base.codec = module.codec
    base.configure_model()
    with torch.no_grad():  # zero convolutions: at first, the base alone
        assert torch.equal(module(x, t, condition), base(x, t, replace(condition, image=None)))
    network: Any = module.network
    copied = diffusers.ControlNetModel.from_unet(network.unet).state_dict()
    for name, tensor in network.controlnet.state_dict().items():
        if not name.startswith("controlnet_"):
            assert torch.equal(tensor, copied[name]), name
    shaken(network.controlnet)
    pipeline = controlled(tmp_path, family, network.controlnet)
    picture = batch["condition"] / 2 + 0.5
    steps = recorded(pipeline, prompt=CAPTION, image=picture, guidance_scale=5.0, height=64, width=64)
    check_predictions(module, steps, batch, 5.0)


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", ["sdxl", "sd15"])
def test_an_inpainting_network_predicts_what_its_pipeline_does(family: str, tmp_path: Path) -> None:
    base = tiny_pipelines.written(family, tmp_path)
    module = ours_from(tmp_path, "inpaint")
    network: Any = module.network
    assert network.config.in_channels == 9
    assert torch.equal(network.conv_in.weight[:, :4], base.unet.conv_in.weight)
    assert not network.conv_in.weight[:, 4:].any()
    shaken(network)
    name = "StableDiffusionXLInpaintPipeline" if family == "sdxl" else "StableDiffusionInpaintPipeline"
    further = {} if family == "sdxl" else tiny_pipelines.WITHOUT_CHECKER
    components = {key: part for key, part in base.components.items() if key != "image_encoder"} | further
    pipeline = getattr(diffusers, name)(**(components | {"unet": network}))
    check_inpainting(module, pipeline)


def kontext_steps(pipeline: Any, batch: dict[str, Any]) -> list[Any]:
    """Return the steps of Kontext's pipeline for the condition of a batch, which keeps its size."""
    return recorded(
        pipeline,
        lambda tokens: pipeline._unpack_latents(tokens, 64, 64, 8),
        prompt=CAPTION,
        image=batch["condition"] / 2 + 0.5,
        guidance_scale=3.5,
        height=64,
        width=64,
        max_area=64 * 64,
        _auto_resize=False,
    )


@pytest.mark.turns(2, family="edit models")
def test_kontext_predicts_what_its_pipeline_does(tmp_path: Path) -> None:
    base = tiny_pipelines.written("flux", tmp_path)
    module = ours_from(tmp_path, "sequence")
    pipeline = diffusers.FluxKontextPipeline(**base.components)
    batch = batch_of(condition=torch.rand(1, 3, 64, 32, generator=torch.Generator().manual_seed(2)) * 2 - 1)
    steps = kontext_steps(pipeline, batch)
    check_predictions(module, steps, batch, 1.0)


@pytest.mark.turns(2, family="edit models")
def test_qwen_image_edit_predicts_what_its_pipeline_does(tmp_path: Path) -> None:
    base = tiny_pipelines.written("qwen_image", tmp_path)
    module = ours_from(tmp_path, "sequence")
    pipeline = diffusers.QwenImageEditPipeline(**base.components, processor=None)
    index = json.loads((tmp_path / "model_index.json").read_text()) | {"_class_name": "QwenImageEditPipeline"}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match="reads captions together with the image to edit"):
        TextEncoder.load(TextEncoderConfig(str(tmp_path)))
    draws = torch.Generator().manual_seed(2)
    text = torch.randn(1, 5, 16, generator=draws)
    latents = torch.randn(1, 4, 128, 128, generator=draws)  # of a picture of the size to which the pipeline scales
    pipeline._encode_vae_image = lambda image, generator: latents.unsqueeze(2)
    embeds = {"prompt_embeds": text, "prompt_embeds_mask": torch.ones(1, 5, dtype=torch.int64)}
    steps = recorded(
        pipeline,
        lambda tokens: pipeline._unpack_latents(tokens, 64, 64, 8).squeeze(2),
        image=Image.new("RGB", (64, 64)),
        true_cfg_scale=1.0,
        height=64,
        width=64,
        **embeds,
    )
    batch = {"text": text, "text_mask": torch.ones(1, 5, dtype=torch.bool), "condition_latents": latents}
    check_predictions(module, steps, batch, 1.0)


def noised(module: LatentDiffusion, x0: Tensor, family: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw as a training step does, and return noise, entries of diffusers' table, noisy latents and target."""
    from lit_efficient.losses.timesteps import sample_timesteps

    t = sample_timesteps(len(x0), module.timestep_sampling, None, x0.device, module.process, module.tokens((8, 8)))
    eps = torch.randn(x0.shape)
    if family == "flux":
        return t, eps, (1 - t.view(-1, 1, 1, 1)) * x0 + t.view(-1, 1, 1, 1) * eps, eps - x0
    entries = (1000 * t).round().long() - 1
    table = diffusers.DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    return entries, eps, table.add_noise(x0, eps, entries), eps


def text_of(module: LatentDiffusion, captions: list[str]) -> tuple[Tensor, Any]:
    assert module.text_encoder is not None
    found = module.text_encoder.encode(captions)
    return found.hidden, found.pooled


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", ["sdxl", "sd15"])
def test_the_loss_of_a_controlnet_is_that_of_diffusers_script(family: str, tmp_path: Path) -> None:
    tiny_pipelines.written(family, tmp_path)
    module = ours_from(tmp_path, "controlnet")
    module.label_dropout = 0.0
    network: Any = module.network
    shaken(network.controlnet)
    module.log = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    batch = batch_of(3)
    del batch["mask"]
    torch.manual_seed(7)
    loss = module.training_step(batch, 0)["loss"]
    loss.backward()
    assert all(p.grad is None for p in network.unet.parameters())
    assert all(p.grad is not None for p in network.controlnet.parameters())

    torch.manual_seed(7)
    torch.rand(3)  # the draw of dropped captions
    mean, logvar = module.codec.encode(batch["images"])  # type: ignore[union-attr]
    x0 = mean + (logvar / 2).exp() * torch.randn(mean.shape)  # type: ignore[operator]
    entries, _, noisy, target = noised(module, x0, family)
    hidden, pooled = text_of(module, batch["captions"])
    added = {}
    if pooled is not None and family == "sdxl":
        added = {"text_embeds": pooled, "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 3)}
    down, middle = network.controlnet(
        noisy, entries, hidden, batch["condition"] / 2 + 0.5, added_cond_kwargs=added, return_dict=False
    )
    theirs = network.unet(
        noisy,
        entries,
        hidden,
        added_cond_kwargs=added,
        down_block_additional_residuals=down,
        mid_block_additional_residual=middle,
        return_dict=False,
    )[0]
    torch.testing.assert_close(loss, F.mse_loss(theirs, target), rtol=1e-5, atol=1e-6)


def test_the_loss_of_inpainting_is_that_of_diffusers_script(tmp_path: Path) -> None:
    tiny_pipelines.written("sd15", tmp_path)
    module = ours_from(tmp_path, "inpaint")
    module.label_dropout = 0.0
    shaken(module.network)  # type: ignore[arg-type]
    module.log = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    batch = batch_of(3)
    torch.manual_seed(7)
    loss = module.training_step(batch, 0)["loss"]

    torch.manual_seed(7)
    torch.rand(3)
    mean, logvar = module.codec.encode(batch["images"] * (batch["mask"] < 0.5))  # type: ignore[union-attr]
    masked = mean + (logvar / 2).exp() * torch.randn(mean.shape)  # type: ignore[operator]
    mean, logvar = module.codec.encode(batch["images"])  # type: ignore[union-attr]
    x0 = mean + (logvar / 2).exp() * torch.randn(mean.shape)  # type: ignore[operator]
    entries, _, noisy, target = noised(module, x0, "sd15")
    seen = torch.cat([noisy, F.interpolate(batch["mask"], (8, 8)), masked], dim=1)
    theirs = module.network(seen, entries, text_of(module, batch["captions"])[0]).sample  # type: ignore[misc]
    torch.testing.assert_close(loss, F.mse_loss(theirs, target), rtol=1e-5, atol=1e-6)


def test_the_loss_of_kontext_is_that_of_diffusers_script(tmp_path: Path) -> None:
    tiny_pipelines.written("flux", tmp_path)
    module = ours_from(tmp_path, "sequence")
    module.label_dropout = 0.0
    module.log = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    batch = batch_of(3)
    del batch["mask"]
    torch.manual_seed(7)
    loss = module.training_step(batch, 0)["loss"]

    torch.manual_seed(7)
    torch.rand(3)
    kontext = diffusers.FluxKontextPipeline
    mean, logvar = module.codec.encode(batch["images"])  # type: ignore[union-attr]
    x0 = mean + (logvar / 2).exp() * torch.randn(mean.shape)  # type: ignore[operator]
    t, _, noisy, target = noised(module, x0, "flux")
    condition, _ = module.codec.encode(batch["condition"])  # type: ignore[union-attr]
    positions = kontext._prepare_latent_image_ids(3, 4, 4, "cpu", torch.float32)
    others = positions.clone()
    others[..., 0] = 1
    hidden, pooled = text_of(module, batch["captions"])
    tokens = torch.cat([kontext._pack_latents(one, 3, 4, 8, 8) for one in (noisy, condition)], dim=1)
    found = module.network(  # type: ignore[misc]
        hidden_states=tokens,
        timestep=t,
        guidance=torch.full((3,), 3.5),
        pooled_projections=pooled,
        encoder_hidden_states=hidden,
        txt_ids=torch.zeros(hidden.shape[1], 3),
        img_ids=torch.cat([positions, others]),
        return_dict=False,
    )[0]
    theirs = kontext._unpack_latents(found[:, :16], 64, 64, 8)
    torch.testing.assert_close(loss, F.mse_loss(theirs, target), rtol=1e-5, atol=1e-6)


def test_random_masks_are_rectangles_and_ellipses_of_all_sizes() -> None:
    masks = random_masks(400, (16, 24), torch.Generator().manual_seed(0))[:, 0]
    assert set(masks.unique().tolist()) == {0.0, 1.0}
    areas = masks.flatten(1).sum(dim=1)
    assert areas.min() >= 1
    assert areas.min() < 8
    assert areas.max() > 200
    assert masks.any(dim=0).all()  # each cell is masked in some samples
    rectangles = 0
    for mask in masks:
        rows, columns = mask.any(dim=1), mask.any(dim=0)
        box = torch.outer(rows, columns)
        rectangles += int(torch.equal(box, mask.bool()))
        assert mask.sum() >= 0.5 * box.sum()  # an ellipse has 0.785 of its box
    assert 150 < rectangles < 280  # half of them, and ellipses of few cells


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("flux", {"kind": "controlnet"}, "kind must be one of sequence for FluxTransformer2DModel, got 'controlnet'"),
        ("sd15", {"kind": "sequence"}, "kind must be one of controlnet, inpaint for UNet2DConditionModel"),
        ("sd3", {"kind": "inpaint"}, "kind must be left out for SD3Transformer2DModel, which takes no image"),
        ("sd15", {"wide": 9}, "inpaint for this UNet2DConditionModel"),
    ],
)
def test_images_that_a_network_does_not_take(
    family: str, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny_pipelines.written(family, tmp_path)
    given = dict(arguments)
    spec = DiffusersModelConfig(str(tmp_path))
    image = None
    if "wide" in given:
        spec = DiffusersModelConfig(config_fields={**tiny_pipelines.CONDITIONED, "in_channels": given["wide"]})
    else:
        image = ImageCondition(**given)
    with pytest.raises(ConfigurationError, match=message):
        LatentDiffusion(spec, samples=Samples(0), image_condition=image).configure_model()


def test_batches_without_the_images_are_refused(tmp_path: Path) -> None:
    tiny_pipelines.written("sd15", tmp_path)
    for kind, missing in (("controlnet", "condition"), ("inpaint", "images")):
        module = ours_from(tmp_path, kind)
        batch = batch_of()
        del batch[missing]
        with pytest.raises(ConfigurationError, match=f"kind {kind} needs {missing} in each batch"):
            module.training_step(batch, 0)
