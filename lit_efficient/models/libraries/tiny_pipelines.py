"""Tiny pipelines of diffusers with random weights, one a family: a config runs offline and in seconds before it gets
real weights.

    name_or_path: tiny:sdxl  ->  a folder in the cache, written by the first run that needs it

Their schedulers, their autoencoders' scaling and the classes of their parts are those of the real pipelines, so that
the same config takes a real folder in place of the name. They draw nothing useful.

Costs: 1 MB in the cache for each family
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from lit_efficient.errors import check_choice, check_installed
from lit_efficient.files.cache import cache_folder, prepared_folder
from lit_efficient.internals.hugging_face import bars_on_terminals
from lit_efficient.models.libraries.caption_tokens import load_tokenizer
from lit_efficient.surgery import own_draws

_PREFIX = "tiny:"
_OWNER = "name_or_path"
_VERSION = 1  # changes with the pipelines' shapes
_LENGTH = 77  # tokens of a caption, one for each byte
_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
_UNET = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
_BLOCKS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "joint_attention_dim": 48}


def local_name(name: str | None) -> str | None:
    """Return the folder of the tiny pipeline that ``name`` stands for (``tiny:sdxl``), or any other name unchanged.

    Raises:
        ConfigurationError: For a family that is unknown here.
    """
    if name is None or not name.startswith(_PREFIX):
        return name
    family = name.removeprefix(_PREFIX)
    check_choice(_OWNER, f"the family of {name!r}", family, TINY_PIPELINES)
    check_installed(f"{_OWNER}: {name}", "diffusers", "transformers")
    import diffusers

    folder = cache_folder(None, f"tiny/{family}", [_VERSION, diffusers.__version__])
    return str(prepared_folder(folder, lambda place: _write(family, place), lambda place: None))


def _write(family: str, folder: Path) -> None:
    with own_draws(0), bars_on_terminals(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers remarks on the missing safety checker
        TINY_PIPELINES[family]().save_pretrained(folder)


def tiny_vae(**fields: Any) -> Any:
    """Return an AutoencoderKL that makes images 8 times smaller."""
    import diffusers

    return diffusers.AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=2,
        **fields,
    )


def tiny_tokenizer() -> Any:
    """Return a tokenizer with a token for each byte, for which no file is needed."""
    import transformers
    from tokenizers import Tokenizer

    json = load_tokenizer("bytes", "", None, _LENGTH, "right").json
    special = {"pad_token": "<pad>", "eos_token": "<end>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json), model_max_length=_LENGTH, **special
    )


def tiny_clip(width: int, kind: str = "CLIPTextModelWithProjection", **fields: Any) -> Any:
    """Return a text encoder of CLIP. ``fields`` replace fields of its config."""
    import transformers

    ids = {"vocab_size": 258, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    sizes = {"intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 6}
    config = transformers.CLIPTextConfig(**(ids | sizes | {"hidden_size": width} | fields))
    return getattr(transformers, kind)(config).eval()


def tiny_t5() -> Any:
    """Return an encoder of T5."""
    import transformers

    config = transformers.T5Config(vocab_size=258, d_model=48, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    return transformers.T5EncoderModel(config).eval()


def tiny_encoders(*networks: Any) -> dict[str, Any]:
    """Return the text encoders of a pipeline and their tokenizers by their names in it."""
    parts: dict[str, Any] = {}
    for number, one in enumerate(networks, start=1):
        suffix = "" if number == 1 else f"_{number}"
        parts |= {f"text_encoder{suffix}": one, f"tokenizer{suffix}": tiny_tokenizer()}
    return parts


def _drawn(network: Any) -> Any:
    """Draw all weights again: layers that start at zero would hide what precedes them."""
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    return network.eval()


def _sd15() -> Any:
    import diffusers

    return diffusers.StableDiffusionPipeline(
        vae=tiny_vae(),
        unet=_drawn(diffusers.UNet2DConditionModel(**_UNET)),
        scheduler=diffusers.PNDMScheduler(**_BETAS, skip_prk_steps=True),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **tiny_encoders(tiny_clip(16, "CLIPTextModel")),
    )


def _sdxl() -> Any:
    import diffusers

    sizes = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4}
    sizes |= {"projection_class_embeddings_input_dim": 6 * 4 + 6, "cross_attention_dim": 48}
    return diffusers.StableDiffusionXLPipeline(
        vae=tiny_vae(scaling_factor=0.13025, force_upcast=True),
        unet=_drawn(diffusers.UNet2DConditionModel(**(_UNET | sizes))),
        scheduler=diffusers.EulerDiscreteScheduler(**_BETAS),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
        **tiny_encoders(tiny_clip(16, "CLIPTextModel"), tiny_clip(32)),
    )


def _sd3() -> Any:
    import diffusers

    sizes = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8}
    sizes |= {"caption_projection_dim": 16, "pooled_projection_dim": 12}
    return diffusers.StableDiffusion3Pipeline(
        vae=tiny_vae(scaling_factor=1.5305, shift_factor=0.0609),
        transformer=_drawn(diffusers.SD3Transformer2DModel(**_BLOCKS, **sizes)),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        **tiny_encoders(tiny_clip(16), tiny_clip(24), tiny_t5()),
    )


def _flux() -> Any:
    import diffusers

    shift = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0}
    sizes = {"in_channels": 16, "num_single_layers": 2, "axes_dims_rope": (2, 2, 4), "pooled_projection_dim": 16}
    return diffusers.FluxPipeline(
        vae=tiny_vae(scaling_factor=0.3611, shift_factor=0.1159),
        transformer=_drawn(diffusers.FluxTransformer2DModel(**_BLOCKS, **sizes, guidance_embeds=True)),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**shift),
        **tiny_encoders(tiny_clip(16, "CLIPTextModel"), tiny_t5()),
    )


TINY_PIPELINES: dict[str, Callable[[], Any]] = {"sd15": _sd15, "sdxl": _sdxl, "sd3": _sd3, "flux": _flux}
