"""A network from a pipeline's folder is noised, trained and guided as in its pipeline, without settings in a config."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lit_efficient import ConfigurationError, DiffusersModelConfig, LatentDiffusion, Samples
from lit_efficient.losses import diffusion
from lit_efficient.losses.timesteps import sample_timesteps, shift_times
from lit_efficient.models.libraries.autoencoders import build_autoencoder
from lit_efficient.models.libraries.latent_codec import LatentCodec, find_autoencoder
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig
from lit_efficient.tasks.latent_sampling import guided
from tests import tiny_pipelines

CAPTION = "A Cat on a mat"
UNGUIDED = ("flux", "qwen_image")  # without a negative prompt
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:A caption has")


def ours_from(folder: Path) -> LatentDiffusion:
    """Return a run whose config names the folder alone."""
    module = LatentDiffusion(DiffusersModelConfig(str(folder)), samples=Samples(0))
    module.text_encoder = TextEncoder.load(TextEncoderConfig(str(folder)))
    module.configure_model()
    return module.eval()


def called(pipeline: Any, guidance: float, negative: str | None, steps: int, kind: str) -> Any:
    """Call a pipeline for one image, and return it, or its latents."""
    name = type(pipeline).__name__
    arguments: dict[str, Any] = {"guidance_scale": guidance}
    if name == "FluxPipeline":
        arguments = {"guidance_scale": 3.5, "true_cfg_scale": guidance}
    if name == "QwenImagePipeline":
        arguments = {"true_cfg_scale": guidance}
    if name == "ZImagePipeline":  # its scale is that of the difference alone
        arguments = {"guidance_scale": guidance - 1}
    if name.startswith(("PixArt", "Sana")):
        arguments |= {"use_resolution_binning": False, "negative_prompt": ""}
    if negative is not None:
        arguments["negative_prompt"] = negative
    size = 32 if name.startswith("Sana") else 64
    generator = torch.Generator().manual_seed(1)
    size_and_steps = {"height": size, "width": size, "num_inference_steps": steps}
    return pipeline(CAPTION, output_type=kind, generator=generator, **size_and_steps, **arguments).images


def theirs_at_each_step(pipeline: Any, guidance: float, negative: str | None) -> tiny_pipelines.Steps:
    """Run the pipeline, and return input, timestep and guided prediction of each step."""
    from_tokens = getattr(pipeline, "_unpack_latents", lambda latents, *_: latents)  # of Flux

    def unpack(tokens: Any) -> Any:
        latents = from_tokens(tokens, 64, 64, 8)
        return latents.squeeze(2) if type(pipeline).__name__ == "QwenImagePipeline" else latents

    return tiny_pipelines.recorded(pipeline, lambda: called(pipeline, guidance, negative, 3, "latent"), unpack)


def check_predictions(module: LatentDiffusion, pipeline: Any, guidance: float, negative: str | None) -> None:
    condition = module.conditioning.of_batch({"captions": [CAPTION]}, module.device)
    predict = guided(
        module,
        condition,
        lambda: module.conditioning.null(module.device, negative),
        guidance,
        module.sampler,
        module.norm_side,
    )
    tiny_pipelines.check_steps(module, predict, theirs_at_each_step(pipeline, guidance, negative))


@pytest.mark.parametrize("family", tiny_pipelines.FAMILIES)
def test_a_guided_prediction_is_the_pipelines(family: str, tmp_path: Path) -> None:
    pipeline = tiny_pipelines.written(family, tmp_path)
    module = ours_from(tmp_path)
    check_predictions(module, pipeline, 5.0, "Blurry" if family in UNGUIDED else None)


@pytest.mark.turns(6)
@pytest.mark.parametrize("negative", [None, "", "Blurry, LOW quality"], ids=["none", "empty", "prompt"])
@pytest.mark.parametrize("guidance", [1.0, 5.0, 7.5])
@pytest.mark.parametrize("family", tiny_pipelines.FAMILIES)
def test_any_guidance_and_negative_prompt(family: str, guidance: float, negative: str | None, tmp_path: Path) -> None:
    if family in UNGUIDED and negative is None and guidance > 1:
        pytest.skip("the pipeline guides only with a negative prompt")
    pipeline = tiny_pipelines.written(family, tmp_path)
    check_predictions(ours_from(tmp_path), pipeline, guidance, negative)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd15 of v": ("sd15", {"prediction_type": "v_prediction"}),
    "sdxl with the empty prompt encoded": ("sdxl", {"zeros": False}),
    "sdxl of v with zero terminal SNR": ("sdxl", {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}),
    "sdxl between the entries of its table": ("sdxl", {"timestep_spacing": "linspace"}),
    "sd3 without shift": ("sd3", {"shift": 1.0}),
    "sd3 without T5": ("sd3", {"third": False}),
    "flux schnell": ("flux", {"distilled": False, "use_dynamic_shifting": False, "shift": 1.0}),
    "pixart with other betas": ("pixart", {"beta_start": 0.0002, "beta_end": 0.03}),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_a_family(name: str, tmp_path: Path) -> None:
    family, changed = VARIANTS[name]
    pipeline = tiny_pipelines.written(family, tmp_path, **changed)
    check_predictions(ours_from(tmp_path), pipeline, 5.0, "Blurry" if family in UNGUIDED else None)


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", tiny_pipelines.FAMILIES)
def test_latents_are_decoded_as_by_the_pipeline_and_encoding_undoes_its_scaling(family: str, tmp_path: Path) -> None:
    pipeline = tiny_pipelines.written(family, tmp_path)
    module = LatentDiffusion(DiffusersModelConfig(str(tmp_path)), samples=Samples(0))
    assert module.latent_scaling is not None
    mean, std = (torch.tensor(values) for values in module.latent_scaling)
    codec = LatentCodec(find_autoencoder(DiffusersModelConfig(str(tmp_path))), mean, std)
    latents, images = (called(pipeline, 1.0, None, 2, kind) for kind in ("latent", "pt"))
    if latents.ndim == 3:
        latents = pipeline._unpack_latents(latents, 64, 64, 8)
    latents = latents.flatten(2).unflatten(2, latents.shape[-2:])  # one frame of Qwen-Image
    torch.testing.assert_close(codec.decode(latents) / 2 + 0.5, images, rtol=1e-5, atol=1e-5)
    raw, _ = codec.moments(images * 2 - 1)
    torch.testing.assert_close(codec.denormalize(codec.encode(images * 2 - 1)[0]), raw, rtol=1e-5, atol=1e-5)
    assert module.settings.meaning is not None
    assert module.settings.meaning.channels == module.shape.channels == codec.latent_channels


@pytest.mark.parametrize("family", tiny_pipelines.FAMILIES)
def test_noised_latents_and_targets_are_those_of_the_scheduler(family: str, tmp_path: Path) -> None:
    import diffusers

    scheduler = tiny_pipelines.FAMILIES[family]().scheduler
    scheduler.save_pretrained(tmp_path / "scheduler")
    (tmp_path / "unet").mkdir()
    module = LatentDiffusion(DiffusersModelConfig(str(tmp_path), subfolder="unet"), samples=Samples(0))
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 4, 4, 8, 8, generator=generator).unbind()
    if module.process.schedule == "flow":
        times = torch.tensor([0.001, 0.25, 0.5, 1.0])
        matching = diffusers.FlowMatchEulerDiscreteScheduler()
        noised = matching.scale_noise(x0, 1000 * times, noise)
        target = noise - x0
    else:
        entries = torch.tensor([0, 10, 500, 999])
        times = (entries + 1) / 1000
        table = diffusers.DDPMScheduler.from_config(scheduler.config)
        noised = table.add_noise(x0, noise, entries)
        targets = {"epsilon": noise, "v_prediction": table.get_velocity(x0, noise, entries), "sample": x0}
        target = targets[scheduler.config.prediction_type]
    torch.testing.assert_close(diffusion.add_noise(x0, noise, times, module.process), noised, rtol=1e-5, atol=1e-5)
    ours = diffusion.target(x0, noise, times, module.process, module.prediction)
    torch.testing.assert_close(ours, target, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize("size", [(16, 16), (64, 96), (128, 128)])
def test_the_shift_by_resolution_is_that_of_flux(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    scheduler = tiny_pipelines.flux(time_shift_type=kind).scheduler
    scheduler.save_pretrained(tmp_path / "scheduler")
    (tmp_path / "transformer").mkdir()
    network = tiny_pipelines.FLUX | {"_class_name": "FluxTransformer2DModel"}
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(network))
    module = LatentDiffusion(DiffusersModelConfig(str(tmp_path), subfolder="transformer"), samples=Samples(0))
    tokens = module.tokens(size)
    assert tokens == size[0] * size[1] // 4
    even = [1.0, 0.7, 0.4, 0.1]
    scheduler.set_timesteps(sigmas=even, mu=calculate_shift(tokens))
    shift = module.sampler_at(size).shift
    assert isinstance(shift, float)
    torch.testing.assert_close(shift_times(torch.tensor(even), shift), scheduler.sigmas[:-1])
    uniform = replace(module.timestep_sampling, distribution="uniform")
    drawn = sample_timesteps(64, uniform, torch.Generator().manual_seed(0), tokens=tokens)
    u = torch.empty(64).uniform_(generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn, shift_times(u, shift).clamp(0.001, 0.999))


def test_a_fixed_shift_gives_the_times_of_the_training_script_of_sd3(tmp_path: Path) -> None:
    scheduler = tiny_pipelines.sd3().scheduler
    scheduler.save_pretrained(tmp_path / "scheduler")
    (tmp_path / "transformer").mkdir()
    module = LatentDiffusion(DiffusersModelConfig(str(tmp_path / "transformer")), samples=Samples(0))
    u = torch.tensor([0.0, 0.25, 0.5, 0.999])  # the script takes entry 1000 u of shifted times, which start at noise
    theirs = scheduler.timesteps[(1000 * u).long()] / 1000
    assert module.timestep_sampling.distribution == "logit_normal"
    assert module.timestep_sampling.shift == module.sampler.shift == 3.0
    torch.testing.assert_close(shift_times(1 - u, 3.0), theirs)


@pytest.mark.parametrize("family", ["sdxl"])
def test_a_folder_with_the_variant_fp16_alone(family: str, tmp_path: Path) -> None:
    pipeline = tiny_pipelines.written(family, tmp_path / "float32").to(torch.float16)
    pipeline.save_pretrained(tmp_path / "fp16", variant="fp16")
    assert not list((tmp_path / "fp16").rglob("model.safetensors"))
    check_predictions(ours_from(tmp_path / "fp16"), pipeline.to(torch.float32), 5.0, None)


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_checkpoint_in_one_file_with_the_configurations_of_a_folder(family: str, tmp_path: Path) -> None:
    pipeline = tiny_pipelines.written(family, tmp_path / "folder", prediction_type="v_prediction")
    save_file(one_file(pipeline), tmp_path / "civitai.safetensors")
    configs = tmp_path / "configs"
    shutil.copytree(tmp_path / "folder", configs, ignore=shutil.ignore_patterns("*.safetensors"))
    named = (str(tmp_path / "civitai.safetensors"), str(configs))
    module = LatentDiffusion(DiffusersModelConfig(named[0], config=named[1]), samples=Samples(0))
    module.text_encoder = TextEncoder.load(TextEncoderConfig(named[0], config=named[1]))
    module.configure_model()
    assert module.prediction == "v"
    check_predictions(module.eval(), pipeline, 5.0, "Blurry")
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    codec = LatentCodec.declared(find_autoencoder(DiffusersModelConfig(named[0], config=named[1])))  # type: ignore[arg-type]
    theirs = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor).sample.clamp(-1, 1)
    torch.testing.assert_close(codec.decode(latents), theirs)


def test_what_a_file_lacks_is_refused(tmp_path: Path) -> None:
    pipeline = tiny_pipelines.written("sd15", tmp_path / "folder")
    file = str(tmp_path / "some.safetensors")
    with pytest.raises(ConfigurationError, match=r"name_or_path must be an existing .safetensors file with config"):
        DiffusersModelConfig(file, config=str(tmp_path / "folder"))
    whole = one_file(pipeline)
    save_file({name: tensor for name, tensor in whole.items() if not name.startswith("first_stage")}, file)
    spec = DiffusersModelConfig(file, config=str(tmp_path / "folder"))
    with pytest.raises(ConfigurationError, match=r"some.safetensors has no AutoencoderKL of .*/vae"):
        build_autoencoder(spec)
    with pytest.raises(ConfigurationError, match=r"some.safetensors is a checkpoint in one file. Set config to"):
        build_autoencoder(DiffusersModelConfig(file))
    save_file({name: tensor for name, tensor in whole.items() if "output_blocks.3" not in name}, file)
    with pytest.raises(ConfigurationError, match=r"UNet2DConditionModel"):
        LatentDiffusion(spec, samples=Samples(0)).configure_model()


def one_file(pipeline: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a Stable Diffusion with two blocks a side in the layout of its authors."""
    names = {"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2"}
    names |= {f"add_embedding.linear_{i}": f"label_emb.0.{2 * i - 2}" for i in (1, 2)}  # of SDXL
    names |= {"conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2"}
    names |= {"mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1"}
    names |= {"mid_block.resnets.1": "middle_block.2", "down_blocks.0.downsamplers.0.conv": "input_blocks.2.0.op"}
    names |= {"down_blocks.0.resnets.0": "input_blocks.1.0", "down_blocks.0.attentions.0": "input_blocks.1.1"}
    names |= {"down_blocks.1.resnets.0": "input_blocks.3.0", "up_blocks.0.upsamplers.0.conv": "output_blocks.1.1.conv"}
    for layer in range(2):
        names[f"up_blocks.0.resnets.{layer}"] = f"output_blocks.{layer}.0"
        names[f"up_blocks.1.resnets.{layer}"] = f"output_blocks.{2 + layer}.0"
        names[f"up_blocks.1.attentions.{layer}"] = f"output_blocks.{2 + layer}.1"
    unet = renamed(pipeline.unet, names, RESNET)
    vae = original_vae(pipeline.vae)
    found = {f"model.diffusion_model.{name}": tensor for name, tensor in unet.items()}
    found |= {f"first_stage_model.{name}": tensor for name, tensor in vae.items()}
    first = "cond_stage_model.transformer"
    if hasattr(pipeline, "text_encoder_2"):
        first = "conditioner.embedders.0.transformer"
        found |= open_clip(pipeline.text_encoder_2, "conditioner.embedders.1.model.")
    for name, tensor in pipeline.text_encoder.state_dict().items():
        found[f"{first}.text_model.{name.removeprefix('text_model.')}"] = tensor
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


def original_vae(vae: Any) -> dict[str, torch.Tensor]:
    """Return the weights of an autoencoder of four blocks a side under the names of its authors."""
    of_vae = {"quant_conv": "quant_conv", "post_quant_conv": "post_quant_conv"}
    for side in ("encoder", "decoder"):
        of_vae |= {f"{side}.{name}": f"{side}.{name}" for name in ("conv_in", "conv_out")}
        of_vae |= {f"{side}.conv_norm_out": f"{side}.norm_out", f"{side}.mid_block.attentions.0": f"{side}.mid.attn_1"}
        of_vae |= {f"{side}.mid_block.resnets.{i}": f"{side}.mid.block_{i + 1}" for i in range(2)}
    for block in range(4):
        of_vae[f"encoder.down_blocks.{block}.downsamplers.0"] = f"encoder.down.{block}.downsample"
        of_vae[f"decoder.up_blocks.{block}.upsamplers.0"] = f"decoder.up.{3 - block}.upsample"
        for layer in range(2):
            of_vae[f"encoder.down_blocks.{block}.resnets.{layer}"] = f"encoder.down.{block}.block.{layer}"
            of_vae[f"decoder.up_blocks.{block}.resnets.{layer}"] = f"decoder.up.{3 - block}.block.{layer}"
    attention = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
    return renamed(vae, of_vae, {"conv_shortcut": "nin_shortcut"} | attention)


def open_clip(encoder: Any, prefix: str) -> dict[str, torch.Tensor]:
    """Return the weights of CLIP in the layout of OpenCLIP."""
    state = {name.removeprefix("text_model."): tensor for name, tensor in encoder.state_dict().items()}
    names = {"embeddings.token_embedding.weight": "token_embedding.weight"}
    names |= {"embeddings.position_embedding.weight": "positional_embedding"}
    names |= {f"final_layer_norm.{part}": f"ln_final.{part}" for part in ("weight", "bias")}
    found = {new: state[name] for name, new in names.items()}
    found["text_projection"] = state["text_projection.weight"].T
    blocks = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    blocks["self_attn.out_proj"] = "attn.out_proj"
    for layer in range(encoder.config.num_hidden_layers):
        own = f"encoder.layers.{layer}"
        block = f"transformer.resblocks.{layer}"
        for part in ("weight", "bias"):
            found |= {f"{block}.{new}.{part}": state[f"{own}.{name}.{part}"] for name, new in blocks.items()}
            whole = torch.cat([state[f"{own}.self_attn.{name}_proj.{part}"] for name in "qkv"])
            found[f"{block}.attn.in_proj_{part}"] = whole
    return {f"{prefix}{name}": tensor.clone().contiguous() for name, tensor in found.items()}


RESNET = {"norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0"}
RESNET |= {"conv2": "out_layers.3", "conv_shortcut": "skip_connection"}


def renamed(network: Any, names: dict[str, str], parts: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return weights under the names of their modules, and in resnets and attentions under those of ``parts``."""
    found = {}
    for name, tensor in network.state_dict().items():
        prefix = max((one for one in names if name.startswith(f"{one}.")), key=len)
        rest = name.removeprefix(prefix)[1:]
        if "resnets" in prefix or "mid.attn" in names[prefix]:
            part = next((one for one in parts if rest.startswith(f"{one}.")), None)
            if part is not None:
                rest = parts[part] + rest.removeprefix(part)
        found[f"{names[prefix]}.{rest}"] = tensor
    return found


def test_a_refiner_is_refused(tmp_path: Path) -> None:
    import diffusers

    base = tiny_pipelines.sdxl()
    kind: Any = diffusers.StableDiffusionXLImg2ImgPipeline
    unet = tiny_pipelines.network(
        tiny_pipelines.SDXL, cross_attention_dim=32, projection_class_embeddings_input_dim=5 * 4 + 6
    )
    second = {"text_encoder_2": base.text_encoder_2, "tokenizer_2": base.tokenizer_2}
    refiner = kind(
        base.vae, None, tokenizer=None, unet=unet, scheduler=base.scheduler, requires_aesthetics_score=True, **second
    )
    refiner.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"is a refiner of SDXL, .*: name the base pipeline"):
        LatentDiffusion(DiffusersModelConfig(str(tmp_path)), samples=Samples(0))


def test_encoders_stay_on_the_cpu_where_batches_have_embeddings(tmp_path: Path) -> None:
    """A T5 would fill a GPU for the empty caption alone."""
    tiny_pipelines.written("sdxl", tmp_path, zeros=False)
    module = ours_from(tmp_path)
    module.text_is_stored = True
    found = module.conditioning.null(torch.device("meta"))
    assert found.text is not None
    assert found.text.is_meta
    assert module.text_encoder is not None
    assert {p.device.type for part in module.text_encoder.parts for p in part.network.parameters()} == {"cpu"}


def test_a_pipeline_is_read_where_modules_are_built_without_memory(tmp_path: Path) -> None:
    """As `plan` builds them; tables that are computed there serve later runs."""
    from lit_efficient.losses import noise_process

    tiny_pipelines.written("sdxl", tmp_path)
    noise_process._angles.cache_clear()
    with torch.device("meta"):
        module = LatentDiffusion(DiffusersModelConfig(str(tmp_path)), samples=Samples(0))
        module.process.alpha_sigma(torch.rand(1, device="cpu"))
    assert module.process.betas_range == (0.00085, 0.012)
    assert module.process.alpha_sigma(torch.tensor([1.0]))[0].device.type == "cpu"
