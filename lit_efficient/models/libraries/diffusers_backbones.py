"""diffusers' denoising networks as backbones: for each class what it takes, and how its own pipeline calls it.

A class has one row in ``_ADAPTERS``: a function of its configuration and one of its inputs. Whatever its pipeline gives
besides latents, time and text is given here as well: SDXL's and PixArt's sizes in pixels, those of the condition or
eight times the latents'; Flux's positions and its patches of two by two latents.

DiTTransformer2DModel hides labels by a draw of its own in each of its blocks, so that a block sees a label that the
next one does not. Those draws are switched off: one draw a sample, outside, is what guidance needs.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_efficient.errors import check_choice, refusal
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig, misfit, model_class, resolve
from lit_efficient.models.networks.backbone_shape import BackboneShape, Sides
from lit_efficient.models.networks.condition import Condition
from lit_efficient.surgery import moved

_PIXELS = 8  # of an image for each position of a latent, where the condition has no sizes

Fields = Mapping[str, Any]


class _Adapter(NamedTuple):
    """How one class is used: shape from its fields, and keyword arguments of its forward."""

    shape: Callable[[Fields], dict[str, Any]]
    arguments: Callable[[Any, Tensor, Tensor, Condition], dict[str, Any]]


def shape_of(spec: DiffusersModelConfig) -> BackboneShape:
    """What the network takes that ``spec`` describes.

    Raises:
        ConfigurationError: For a class that has no adapter, or a configuration that it does not serve.
    """
    fields = _fields(spec)
    name = fields["_class_name"]
    check_choice("backbone", f"the _class_name of {spec.described!r}", name, _ADAPTERS)
    size = fields.get("sample_size")
    try:
        return BackboneShape(
            **{
                "name": name,
                "channels": fields["in_channels"],
                "size": (size, size) if isinstance(size, int) else None if size is None else tuple(size),
                "learned_variance": (fields.get("out_channels") or fields["in_channels"]) == 2 * fields["in_channels"],
                **_ADAPTERS[name].shape(fields),
            }
        )
    except (TypeError, LookupError, ArithmeticError) as error:  # of null, a list or 0 where a number is meant
        raise misfit(fields, error) from error


def prepared(network: Any, spec: DiffusersModelConfig) -> nn.Module:
    """The network, with draws of its own switched off, and the guidance that it gets as an input beside it."""
    network.given_guidance = spec.guidance
    for module in network.modules():
        if type(module).__name__ == "LabelEmbedding":
            module.dropout_prob = 0.0
    return network


def call(network: Any, x: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
    """The prediction for noisy latents [B, C, H, W] at timesteps [B], as diffusers' pipelines pass them."""
    name = next(kind.__name__ for kind in type(network).__mro__ if kind.__name__ in _ADAPTERS)
    dtype = next(parameter.dtype for parameter in network.parameters() if parameter.is_floating_point())
    cast = condition.map(lambda part: part.to(dtype) if part.is_floating_point() else part)
    arguments = _ADAPTERS[name].arguments(network, x.to(dtype), timestep, cast)
    output: Tensor = network(**arguments, return_dict=False)[0]
    if name == "FluxTransformer2DModel":
        output = _unpacked(output, x.shape[2], x.shape[3])
    return output[:, : x.shape[1]]


def self_contained(spec: DiffusersModelConfig) -> DiffusersModelConfig:
    """The same network by its whole configuration."""
    return DiffusersModelConfig(config_fields=resolve(spec), dtype=spec.dtype, guidance=spec.guidance)


def _fields(spec: DiffusersModelConfig) -> dict[str, Any]:
    """The configuration with the class's defaults."""
    fields = resolve(spec)
    parameters = inspect.signature(model_class(fields["_class_name"]).__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | fields


def _classes(fields: Fields) -> int:
    """Classes of a UNet, whose embedding has a last row for "no label"."""
    name, rows = fields["_class_name"], fields.get("num_class_embeds")
    if fields.get("class_embed_type") is not None:
        allowed = "null, with num_class_embeds for labels"
        raise refusal("backbone", f"class_embed_type of {name}", allowed, fields["class_embed_type"])
    if rows is not None and rows < 2:
        raise refusal("backbone", f"num_class_embeds of {name}", "the number of classes and 1 more, for no label", rows)
    return 0 if rows is None else int(rows) - 1


def _unet_2d_shape(fields: Fields) -> dict[str, Any]:
    return {"num_classes": _classes(fields), "sides": Sides(2 ** (len(fields["down_block_types"]) - 1))}


def _unet_2d(network: Any, x: Tensor, timestep: Tensor, condition: Condition) -> dict[str, Any]:
    return {"sample": x, "timestep": timestep, "class_labels": condition.labels}


def _unet_condition_shape(fields: Fields) -> dict[str, Any]:
    name = fields["_class_name"]
    added, hidden = fields["addition_embed_type"], fields["encoder_hid_dim_type"]
    if added not in (None, "text_time"):
        raise refusal("backbone", f"addition_embed_type of {name}", "null or text_time", added)
    if hidden not in (None, "text_proj"):
        raise refusal("backbone", f"encoder_hid_dim_type of {name}", "null or text_proj", hidden)
    width = fields["encoder_hid_dim"] or fields["cross_attention_dim"]
    pooled = 0
    if added == "text_time":
        pooled = fields["projection_class_embeddings_input_dim"] - 6 * fields["addition_time_embed_dim"]
    text = width if isinstance(width, int) else width[0]
    return {"num_classes": _classes(fields), "text_width": text, "pooled_width": pooled}


def _unet_condition(network: Any, x: Tensor, timestep: Tensor, condition: Condition) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "sample": x,
        "timestep": timestep,
        "encoder_hidden_states": condition.text,
        "encoder_attention_mask": condition.mask,
        "class_labels": condition.labels,
    }
    if condition.pooled is not None:  # SDXL: size of the original, offset of the crop, size of the result
        arguments["added_cond_kwargs"] = {"text_embeds": condition.pooled, "time_ids": _sizes(x, condition)}
    return arguments


def _sizes(x: Tensor, condition: Condition) -> Tensor:
    """Those of the condition, [B, 6], or of images that were neither scaled nor cropped."""
    if condition.sizes is not None:
        return moved(condition.sizes, x.device, x.dtype)
    height, width = (_PIXELS * side for side in x.shape[2:])
    sizes = torch.tensor([height, width, 0, 0, height, width], dtype=x.dtype)
    return moved(sizes, x.device).expand(len(x), -1)


def _patches(fields: Fields, **limits: Any) -> dict[str, Any]:
    return {"sides": Sides(fields["patch_size"], **limits)}


def _dit_shape(fields: Fields) -> dict[str, Any]:
    return {**_patches(fields, square=True), "num_classes": fields["num_embeds_ada_norm"]}


def _dit(network: Any, x: Tensor, timestep: Tensor, condition: Condition) -> dict[str, Any]:
    return {"hidden_states": x, "timestep": timestep, "class_labels": condition.labels}


def _pixart_shape(fields: Fields) -> dict[str, Any]:
    return {**_patches(fields), "text_width": fields["caption_channels"] or fields["cross_attention_dim"]}


def _pixart(network: Any, x: Tensor, timestep: Tensor, condition: Condition) -> dict[str, Any]:
    sizes: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
    if network.use_additional_conditions:
        sizes["resolution"] = _sizes(x, condition)[:, 4:]
        sizes["aspect_ratio"] = sizes["resolution"][:, :1] / sizes["resolution"][:, 1:]
    return {**_cross_attention(network, x, timestep, condition), "added_cond_kwargs": sizes}


def _cross_attention(network: Any, x: Tensor, timestep: Tensor, condition: Condition) -> dict[str, Any]:
    return {
        "hidden_states": x,
        "timestep": timestep,
        "encoder_hidden_states": condition.text,
        "encoder_attention_mask": condition.mask,
    }


def _sana_shape(fields: Fields) -> dict[str, Any]:
    return {**_patches(fields), "text_width": fields["caption_channels"]}


def _sana(network: Any, x: Tensor, timestep: Tensor, condition: Condition) -> dict[str, Any]:
    scaled = timestep * network.config.timestep_scale
    return {**_cross_attention(network, x, scaled, condition), **_guidance(network, x)}


def _sd3_shape(fields: Fields) -> dict[str, Any]:
    return {
        **_patches(fields, largest=fields["pos_embed_max_size"] * fields["patch_size"]),
        "text_width": fields["joint_attention_dim"],
        "pooled_width": fields["pooled_projection_dim"],
        "masks_text": False,
    }


def _sd3(network: Any, x: Tensor, timestep: Tensor, condition: Condition) -> dict[str, Any]:
    return {
        "hidden_states": x,
        "timestep": timestep,
        "encoder_hidden_states": condition.text,
        "pooled_projections": condition.pooled,
    }


def _flux_shape(fields: Fields) -> dict[str, Any]:
    return {
        "channels": fields["in_channels"] // 4,
        "size": None,
        "sides": Sides(2),
        "text_width": fields["joint_attention_dim"],
        "pooled_width": fields["pooled_projection_dim"],
        "masks_text": False,
    }


def _flux(network: Any, x: Tensor, timestep: Tensor, condition: Condition) -> dict[str, Any]:
    assert condition.text is not None
    height, width = x.shape[2] // 2, x.shape[3] // 2
    rows = torch.arange(height, device=x.device, dtype=x.dtype)[:, None].expand(height, width)
    columns = torch.arange(width, device=x.device, dtype=x.dtype).expand(height, width)
    positions = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(height * width, 3)
    patches = x.unflatten(3, (width, 2)).unflatten(2, (height, 2))  # [B, c, h, 2, w, 2]
    return {
        "hidden_states": patches.permute(0, 2, 4, 1, 3, 5).reshape(len(x), height * width, -1),
        "timestep": timestep / 1000.0,
        "encoder_hidden_states": condition.text,
        "pooled_projections": condition.pooled,
        "img_ids": positions,
        "txt_ids": positions.new_zeros(condition.text.shape[1], 3),
        **_guidance(network, x),
    }


def _unpacked(tokens: Tensor, height: int, width: int) -> Tensor:
    """Flux's tokens [B, h w / 4, 4 c] to [B, c, h, w]."""
    patches = tokens.reshape(len(tokens), height // 2, width // 2, -1, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, height, width)


def _guidance(network: Any, x: Tensor) -> dict[str, Tensor]:
    """The guidance that a distilled network gets as an input, as its pipeline scales it: Flux does so itself."""
    if not network.config.guidance_embeds:
        return {}
    scale = getattr(network.config, "guidance_embeds_scale", 1.0)
    return {"guidance": torch.full((len(x),), network.given_guidance * scale, dtype=torch.float32, device=x.device)}


_ADAPTERS = {
    "UNet2DModel": _Adapter(_unet_2d_shape, _unet_2d),
    "UNet2DConditionModel": _Adapter(_unet_condition_shape, _unet_condition),
    "DiTTransformer2DModel": _Adapter(_dit_shape, _dit),
    "PixArtTransformer2DModel": _Adapter(_pixart_shape, _pixart),
    "SanaTransformer2DModel": _Adapter(_sana_shape, _sana),
    "SD3Transformer2DModel": _Adapter(_sd3_shape, _sd3),
    "FluxTransformer2DModel": _Adapter(_flux_shape, _flux),
}
