"""Names of the layers of diffusers' networks in their authors' implementations, which LoRA files of other programs use.

    Stable Diffusion, SDXL    input_blocks.4.1.transformer_blocks.0.attn1.to_q       (kohya's SDXL files)
    SD3                       joint_blocks.0.x_block.attn.qkv                        one layer for three of diffusers'
    Flux                      double_blocks.0.img_attn.qkv, single_blocks.0.linear1
    Flux by XLabs             double_blocks.0.processor.qkv_lora1, single_blocks.0.processor.proj_lora

An original layer may stack the outputs of several layers of diffusers, and may have its halves swapped (scale and shift
of the last norm).

Source: https://github.com/Stability-AI/generative-models, https://github.com/Stability-AI/sd3.5,
    https://github.com/black-forest-labs/flux.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class OriginalLayer:
    """A layer of the authors' implementation.

    Args:
        name: Its dotted name.
        parts: Names in diffusers of the layers whose outputs it stacks; most have one.
        swapped: Whether the second half of its outputs is the first half of diffusers'.
    """

    name: str
    parts: tuple[str, ...]
    swapped: bool = False


# Names of original layers, and of the layers of diffusers that they stack. # is the number of a block.
_Table = dict[str, tuple[str, ...]]
_RESNET = {"conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "conv2": "out_layers.3"}
_RESNET |= {"conv_shortcut": "skip_connection"}
_UNET_ENDS = {"conv_in": "input_blocks.0.0", "conv_out": "out.2"}
_UNET_ENDS |= {f"time_embedding.linear_{i}": f"time_embed.{2 * i - 2}" for i in (1, 2)}
_UNET_ENDS |= {f"add_embedding.linear_{i}": f"label_emb.0.{2 * i - 2}" for i in (1, 2)}
_FLUX: _Table = {
    "double_blocks.#.img_attn.qkv": tuple(f"transformer_blocks.#.attn.to_{one}" for one in "qkv"),
    "double_blocks.#.txt_attn.qkv": tuple(f"transformer_blocks.#.attn.add_{one}_proj" for one in "qkv"),
    "double_blocks.#.img_attn.proj": ("transformer_blocks.#.attn.to_out.0",),
    "double_blocks.#.txt_attn.proj": ("transformer_blocks.#.attn.to_add_out",),
    "double_blocks.#.img_mlp.0": ("transformer_blocks.#.ff.net.0.proj",),
    "double_blocks.#.img_mlp.2": ("transformer_blocks.#.ff.net.2",),
    "double_blocks.#.txt_mlp.0": ("transformer_blocks.#.ff_context.net.0.proj",),
    "double_blocks.#.txt_mlp.2": ("transformer_blocks.#.ff_context.net.2",),
    "double_blocks.#.img_mod.lin": ("transformer_blocks.#.norm1.linear",),
    "double_blocks.#.txt_mod.lin": ("transformer_blocks.#.norm1_context.linear",),
    "single_blocks.#.linear1": tuple(
        f"single_transformer_blocks.#.{one}" for one in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    ),
    "single_blocks.#.linear2": ("single_transformer_blocks.#.proj_out",),
    "single_blocks.#.modulation.lin": ("single_transformer_blocks.#.norm.linear",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    "final_layer.linear": ("proj_out",),
}
# XLabs' files name the processors of attention, without ".processor" here and, in single blocks, without "_lora".
_XLABS: _Table = {
    "double_blocks.#.qkv_lora1": tuple(f"transformer_blocks.#.attn.to_{one}" for one in "qkv"),
    "double_blocks.#.qkv_lora2": tuple(f"transformer_blocks.#.attn.add_{one}_proj" for one in "qkv"),
    "double_blocks.#.proj_lora1": ("transformer_blocks.#.attn.to_out.0",),
    "double_blocks.#.proj_lora2": ("transformer_blocks.#.attn.to_add_out",),
    "single_blocks.#.qkv": tuple(f"single_transformer_blocks.#.attn.to_{one}" for one in "qkv"),
    "single_blocks.#.proj": ("single_transformer_blocks.#.proj_out",),
}
_SD3: _Table = {
    "joint_blocks.#.x_block.attn.qkv": tuple(f"transformer_blocks.#.attn.to_{one}" for one in "qkv"),
    "joint_blocks.#.x_block.attn2.qkv": tuple(f"transformer_blocks.#.attn2.to_{one}" for one in "qkv"),
    "joint_blocks.#.context_block.attn.qkv": tuple(f"transformer_blocks.#.attn.add_{one}_proj" for one in "qkv"),
    "joint_blocks.#.x_block.attn.proj": ("transformer_blocks.#.attn.to_out.0",),
    "joint_blocks.#.x_block.attn2.proj": ("transformer_blocks.#.attn2.to_out.0",),
    "joint_blocks.#.context_block.attn.proj": ("transformer_blocks.#.attn.to_add_out",),
    "joint_blocks.#.x_block.mlp.fc1": ("transformer_blocks.#.ff.net.0.proj",),
    "joint_blocks.#.x_block.mlp.fc2": ("transformer_blocks.#.ff.net.2",),
    "joint_blocks.#.context_block.mlp.fc1": ("transformer_blocks.#.ff_context.net.0.proj",),
    "joint_blocks.#.context_block.mlp.fc2": ("transformer_blocks.#.ff_context.net.2",),
    "joint_blocks.#.x_block.adaLN_modulation.1": ("transformer_blocks.#.norm1.linear",),
    "joint_blocks.#.context_block.adaLN_modulation.1": ("transformer_blocks.#.norm1_context.linear",),
    "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
    "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
    "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
    "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
    "x_embedder.proj": ("pos_embed.proj",),
    "context_embedder": ("context_embedder",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    "final_layer.linear": ("proj_out",),
}
_LAST_NORM = "AdaLayerNormContinuous"  # computes scale and shift in the other order


def original_layers(network: nn.Module) -> list[OriginalLayer]:
    """Return the layers of the authors' implementation for a network of diffusers.

    The list is empty for networks whose files use the names of diffusers, and for other modules.
    """
    kinds = {kind.__name__ for kind in type(network).__mro__}
    layers = [name for name, part in network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]
    if "UNet2DConditionModel" in kinds:
        prefixes = dict(_unet_prefixes(network))
        return [OriginalLayer(original, (name,)) for name in layers if (original := _in_unet(name, prefixes))]
    if "FluxTransformer2DModel" in kinds:
        return list(_stacked(network, set(layers), _FLUX))
    if "SD3Transformer2DModel" in kinds:
        return list(_stacked(network, set(layers), _SD3))
    return []


def xlabs_layers(network: nn.Module) -> list[OriginalLayer]:
    """Return the layers of Flux as XLabs' LoRA files name them; nothing for other networks."""
    if "FluxTransformer2DModel" not in {kind.__name__ for kind in type(network).__mro__}:
        return []
    layers = {name for name, part in network.named_modules() if isinstance(part, nn.Linear)}
    return list(_stacked(network, layers, _XLABS))


def _stacked(network: nn.Module, layers: set[str], table: _Table) -> Iterator[OriginalLayer]:
    numbers = [int(number) for name in layers for number in re.findall(r"blocks\.(\d+)", name)]
    for original, described in table.items():
        blocks = sorted(set(numbers)) if "#" in original else [0]
        for block in blocks:
            parts = tuple(part.replace("#", str(block)) for part in described)
            if layers >= set(parts):
                owner = network.get_submodule(parts[0].rpartition(".")[0])
                yield OriginalLayer(original.replace("#", str(block)), parts, type(owner).__name__ == _LAST_NORM)


def _unet_prefixes(network: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of resnets, attentions and samplers in diffusers and in the original."""
    number = 1  # input block 0 is conv_in
    for i, block in enumerate(network.down_blocks):
        for j in range(len(block.resnets)):
            yield f"down_blocks.{i}.resnets.{j}", f"input_blocks.{number}.0"
            yield f"down_blocks.{i}.attentions.{j}", f"input_blocks.{number}.1"
            number += 1
        if block.downsamplers is not None:
            yield f"down_blocks.{i}.downsamplers.0.conv", f"input_blocks.{number}.0.op"
            number += 1
    yield from (("mid_block.resnets.0", "middle_block.0"), ("mid_block.attentions.0", "middle_block.1"))
    yield "mid_block.resnets.1", "middle_block.2"
    number = 0
    for i, block in enumerate(network.up_blocks):
        attends = bool(getattr(block, "attentions", None))
        for j in range(len(block.resnets)):
            yield f"up_blocks.{i}.resnets.{j}", f"output_blocks.{number}.0"
            yield f"up_blocks.{i}.attentions.{j}", f"output_blocks.{number}.1"
            number += 1
        yield f"up_blocks.{i}.upsamplers.0.conv", f"output_blocks.{number - 1}.{2 if attends else 1}.conv"


def _in_unet(name: str, prefixes: dict[str, str]) -> str | None:
    """Return the original name of a UNet's layer."""
    if name in _UNET_ENDS:
        return _UNET_ENDS[name]
    for prefix, original in prefixes.items():
        if name == prefix:
            return original
        if name.startswith(f"{prefix}."):
            rest = name.removeprefix(f"{prefix}.")
            if ".resnets." in prefix:
                rest = _RESNET.get(rest, rest)
            return f"{original}.{rest}"
    return None
