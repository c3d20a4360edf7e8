"""diffusers' denoising networks as backbones: the inputs of each class, and the call that its own pipeline makes.

Each class has one row in ``_ADAPTERS``, with a function of its configuration and one of its inputs. The calls include
all that the pipeline passes besides latents, time and text: sizes in pixels of SDXL and PixArt, which are those of the
condition or eight times the latents', and the positions and patches of two by two latents of Flux and Qwen-Image.

DiTTransformer2DModel drops labels by a draw in each of its blocks, so that one block sees a label and the next one does
not. These draws are switched off: guidance needs one draw per sample, outside of the network.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lit_efficient.errors import check_choice, refusal
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig, fields_error, model_class, resolve
from lit_efficient.models.libraries.image_condition import ControlledUNet
from lit_efficient.models.networks.backbone_shape import BackboneShape, Sides
from lit_efficient.models.networks.condition import Condition
from lit_efficient.surgery import moved

_PIXELS = 8  # pixels of an image per position of a latent, if the condition has no sizes

Fields: TypeAlias = Mapping[str, Any]  # a configuration of diffusers
Network: TypeAlias = Any  # a model of diffusers
Arguments: TypeAlias = dict[str, Any]  # keyword arguments of a network, or of a `BackboneShape`


class _Adapter(NamedTuple):
    """Use of one class: sizes of the inputs from its fields, and keyword arguments of its forward."""

    shape: Callable[[Fields], Arguments]
    arguments: Callable[[Network, Tensor, Tensor, Condition], Arguments]
    latents: Callable[[Any, int, int], Tensor] | None = None  # from its output, height and width; None: the output


def shape_of(spec: DiffusersModelConfig) -> BackboneShape:
    """Return the inputs of the network that ``spec`` describes.

    Raises:
        ConfigurationError: For a class without an adapter, or a configuration that its adapter does not support.
    """
    fields = _fields(spec)
    name = fields["_class_name"]
    check_choice("backbone", f"the _class_name of {spec.described!r}", name, _ADAPTERS)
    size = fields.get("sample_size")
    try:
        channels = fields["in_channels"]
        if size is not None:
            size = (size, size) if isinstance(size, int) else tuple(size)
        variance = (fields.get("out_channels") or channels) == 2 * channels
        common = {"name": name, "channels": channels, "size": size, "learned_variance": variance}
        return BackboneShape(**(common | _ADAPTERS[name].shape(fields)))
    except (TypeError, LookupError, ArithmeticError) as error:  # null, a list or 0 in the place of a number
        raise fields_error(fields, error) from error


def prepared(network: Network, spec: DiffusersModelConfig) -> nn.Module:
    """Switch the network's own label dropout off, and note on it the guidance that a distilled network receives."""
    network.given_guidance = spec.guidance
    for module in network.modules():
        if type(module).__name__ == "LabelEmbedding":
            module.dropout_prob = 0.0
    return network


def call(network: Network, x: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
    """Return the prediction for noisy latents [B, C, H, W] at timesteps [B], called as in diffusers' pipelines."""
    core = network.unet if isinstance(network, ControlledUNet) else network
    name = next(kind.__name__ for kind in type(core).__mro__ if kind.__name__ in _ADAPTERS)
    dtype = next(parameter.dtype for parameter in network.parameters() if parameter.is_floating_point())
    cast = condition.map(lambda part: part.to(dtype) if part.is_floating_point() else part)
    arguments = _ADAPTERS[name].arguments(network, x.to(dtype), timestep, cast)
    output = network(**arguments, return_dict=False)[0]
    latents = _ADAPTERS[name].latents
    if latents is not None:
        output = latents(output, x.shape[2], x.shape[3])
    return output[:, : x.shape[1]]


def self_contained(spec: DiffusersModelConfig) -> DiffusersModelConfig:
    """Return a description of the same network by its whole configuration."""
    return DiffusersModelConfig(config_fields=resolve(spec), dtype=spec.dtype, guidance=spec.guidance)


def _fields(spec: DiffusersModelConfig) -> Arguments:
    """Return the configuration, with the class's defaults filled in."""
    fields = resolve(spec)
    parameters = inspect.signature(model_class(fields["_class_name"]).__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | fields


def _classes(fields: Fields) -> int:
    """Return the number of classes of a UNet. The last row of its embedding means "no label"."""
    name = fields["_class_name"]
    rows = fields.get("num_class_embeds")
    if fields.get("class_embed_type") is not None:
        allowed = "null (num_class_embeds is supported for labels)"
        raise refusal("backbone", f"class_embed_type of {name}", allowed, fields["class_embed_type"])
    if rows is not None and rows < 2:
        raise refusal(
            "backbone", f"num_class_embeds of {name}", "at least 2: the number of classes, and 1 for no label", rows
        )
    return 0 if rows is None else int(rows) - 1


def _unet_2d_shape(fields: Fields) -> Arguments:
    return {"num_classes": _classes(fields), "sides": Sides(2 ** (len(fields["down_block_types"]) - 1))}


def _unet_2d(network: Network, x: Tensor, timestep: Tensor, condition: Condition) -> Arguments:
    return {"sample": x, "timestep": timestep, "class_labels": condition.labels}


def _unet_condition_shape(fields: Fields) -> Arguments:
    name = fields["_class_name"]
    added = fields["addition_embed_type"]
    hidden = fields["encoder_hid_dim_type"]
    if added not in (None, "text_time"):
        raise refusal("backbone", f"addition_embed_type of {name}", "null or text_time", added)
    if hidden not in (None, "text_proj"):
        raise refusal("backbone", f"encoder_hid_dim_type of {name}", "null or text_proj", hidden)
    width = fields["encoder_hid_dim"] or fields["cross_attention_dim"]
    pooled = 0
    if added == "text_time":
        pooled = fields["projection_class_embeddings_input_dim"] - 6 * fields["addition_time_embed_dim"]
    text = width if isinstance(width, int) else width[0]
    seen = fields["in_channels"] - (fields["out_channels"] or fields["in_channels"])
    found: Arguments = {"num_classes": _classes(fields), "text_width": text, "pooled_width": pooled}
    if seen > 0:  # channels of the noisy latents, then those of an image
        found |= {"channels": fields["out_channels"], "image_channels": seen}
    return found | {"images": ("controlnet", "inpaint")}


def _unet_condition(network: Network, x: Tensor, timestep: Tensor, condition: Condition) -> Arguments:
    arguments: Arguments = {
        "sample": x,
        "timestep": timestep,
        "encoder_hidden_states": condition.text,
        "encoder_attention_mask": condition.mask,
        "class_labels": condition.labels,
    }
    if isinstance(network, ControlledUNet):
        arguments["controlnet_cond"] = condition.image
    elif condition.image is not None:
        arguments["sample"] = torch.cat([x, condition.image], dim=1)
    if condition.pooled is not None:  # SDXL
        arguments["added_cond_kwargs"] = {"text_embeds": condition.pooled, "time_ids": _sizes(x, condition)}
    return arguments


def _sizes(x: Tensor, condition: Condition) -> Tensor:
    """Return the sizes of the condition, [B, 6], or those of images that were neither scaled nor cropped."""
    if condition.sizes is not None:
        return moved(condition.sizes, x.device, x.dtype)
    height, width = (_PIXELS * side for side in x.shape[2:])
    sizes = torch.tensor([height, width, 0, 0, height, width], dtype=x.dtype)
    return moved(sizes, x.device).expand(len(x), -1)


def _patches(fields: Fields, **limits: Any) -> Arguments:
    return {"sides": Sides(fields["patch_size"], **limits)}


def _dit_shape(fields: Fields) -> Arguments:
    return {**_patches(fields, square=True), "num_classes": fields["num_embeds_ada_norm"]}


def _dit(network: Network, x: Tensor, timestep: Tensor, condition: Condition) -> Arguments:
    return {"hidden_states": x, "timestep": timestep, "class_labels": condition.labels}


def _pixart_shape(fields: Fields) -> Arguments:
    return {**_patches(fields), "text_width": fields["caption_channels"] or fields["cross_attention_dim"]}


def _pixart(network: Network, x: Tensor, timestep: Tensor, condition: Condition) -> Arguments:
    sizes: Arguments = {"resolution": None, "aspect_ratio": None}
    if network.use_additional_conditions:
        sizes["resolution"] = _sizes(x, condition)[:, 4:]
        sizes["aspect_ratio"] = sizes["resolution"][:, :1] / sizes["resolution"][:, 1:]
    return {**_cross_attention(network, x, timestep, condition), "added_cond_kwargs": sizes}


def _cross_attention(network: Network, x: Tensor, timestep: Tensor, condition: Condition) -> Arguments:
    return {
        "hidden_states": x,
        "timestep": timestep,
        "encoder_hidden_states": condition.text,
        "encoder_attention_mask": condition.mask,
    }


def _sana_shape(fields: Fields) -> Arguments:
    return {**_patches(fields), "text_width": fields["caption_channels"]}


def _sana(network: Network, x: Tensor, timestep: Tensor, condition: Condition) -> Arguments:
    scaled = timestep * network.config.timestep_scale
    return {**_cross_attention(network, x, scaled, condition), **_guidance(network, x)}


def _sd3_shape(fields: Fields) -> Arguments:
    return {
        **_patches(fields, largest=fields["pos_embed_max_size"] * fields["patch_size"]),
        "text_width": fields["joint_attention_dim"],
        "pooled_width": fields["pooled_projection_dim"],
        "masks_text": False,
    }


def _sd3(network: Network, x: Tensor, timestep: Tensor, condition: Condition) -> Arguments:
    return {
        "hidden_states": x,
        "timestep": timestep,
        "encoder_hidden_states": condition.text,
        "pooled_projections": condition.pooled,
    }


def _flux_shape(fields: Fields) -> Arguments:
    return {
        "channels": fields["in_channels"] // 4,
        "size": None,
        "sides": Sides(2),
        "text_width": fields["joint_attention_dim"],
        "pooled_width": fields["pooled_projection_dim"],
        "masks_text": False,
        "images": ("sequence",),
    }


def _flux(network: Network, x: Tensor, timestep: Tensor, condition: Condition) -> Arguments:
    assert condition.text is not None
    tokens = _packed(x)
    positions = _positions(x, 0)
    if condition.image is not None:  # Kontext
        tokens = torch.cat([tokens, _packed(condition.image)], dim=1)
        positions = torch.cat([positions, _positions(condition.image, 1)])
    return {
        "hidden_states": tokens,
        "timestep": timestep / 1000.0,
        "encoder_hidden_states": condition.text,
        "pooled_projections": condition.pooled,
        "img_ids": positions,
        "txt_ids": positions.new_zeros(condition.text.shape[1], 3),
        **_guidance(network, x),
    }


def _positions(x: Tensor, image: int) -> Tensor:
    """Return the positions of the tokens of latents [B, c, h, w]: number of the image, row and column, [h w / 4, 3]."""
    height = x.shape[2] // 2
    width = x.shape[3] // 2
    rows = torch.arange(height, device=x.device, dtype=x.dtype)[:, None].expand(height, width)
    columns = torch.arange(width, device=x.device, dtype=x.dtype).expand(height, width)
    return torch.stack([torch.full_like(rows, image), rows, columns], dim=-1).reshape(height * width, 3)


def _packed(x: Tensor) -> Tensor:
    """Map latents [B, c, h, w] to tokens of two by two positions, [B, h w / 4, 4 c]."""
    height = x.shape[2] // 2
    width = x.shape[3] // 2
    patches = x.unflatten(3, (width, 2)).unflatten(2, (height, 2))  # [B, c, h, 2, w, 2]
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(len(x), height * width, -1)


def _unpacked(tokens: Tensor, height: int, width: int) -> Tensor:
    """Map the first h w / 4 of Flux's tokens [B, N, 4 c] to [B, c, h, w]. The others are those of a condition."""
    tokens = tokens[:, : height * width // 4]
    patches = tokens.reshape(len(tokens), height // 2, width // 2, -1, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, height, width)


def _qwen_shape(fields: Fields) -> Arguments:
    return {
        "channels": fields["in_channels"] // 4,
        "size": None,
        "sides": Sides(2),
        "text_width": fields["joint_attention_dim"],
        "keeps_norms": True,
        "images": ("sequence",),
    }


def _qwen(network: Network, x: Tensor, timestep: Tensor, condition: Condition) -> Arguments:
    images = [x] if condition.image is None else [x, condition.image]
    return {
        "hidden_states": torch.cat([_packed(image) for image in images], dim=1),
        "timestep": timestep / 1000.0,
        "encoder_hidden_states": condition.text,
        "encoder_hidden_states_mask": condition.mask,
        "img_shapes": [[(1, image.shape[2] // 2, image.shape[3] // 2) for image in images]] * len(x),
        **_guidance(network, x),
    }


def _z_image_shape(fields: Fields) -> Arguments:
    patch = fields["all_patch_size"][0]
    return {"size": None, "sides": Sides(patch), "text_width": fields["cap_feat_dim"]}


def _z_image(network: Network, x: Tensor, timestep: Tensor, condition: Condition) -> Arguments:
    assert condition.text is not None
    texts = list(condition.text.unbind())
    if condition.mask is not None:
        texts = [text[mask] for text, mask in zip(texts, condition.mask)]
    return {"x": list(x.unsqueeze(2).unbind()), "t": (1000.0 - timestep) / 1000.0, "cap_feats": texts}


def _z_image_latents(output: list[Tensor], height: int, width: int) -> Tensor:
    """Return the velocity from data to noise. The network predicts the opposite."""
    return -torch.stack(output).squeeze(2)


def _guidance(network: Network, x: Tensor) -> dict[str, Tensor]:
    """Return the guidance input of a distilled network, scaled as in its pipeline. Flux scales it itself."""
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
    "FluxTransformer2DModel": _Adapter(_flux_shape, _flux, _unpacked),
    "QwenImageTransformer2DModel": _Adapter(_qwen_shape, _qwen, _unpacked),
    "ZImageTransformer2DModel": _Adapter(_z_image_shape, _z_image, _z_image_latents),
}
