"""Every network that latent diffusion trains, behind two functions: one that builds it and one that calls it.

    prediction [B, C, H, W] = call_backbone(network, x, t, condition)

    ours         DiT                      labels, text
    diffusers    UNet2DModel              labels
                 UNet2DConditionModel     text, labels, pooled text (Stable Diffusion, SDXL)
                 DiTTransformer2DModel    labels
                 PixArtTransformer2DModel, SanaTransformer2DModel      text
                 SD3Transformer2DModel, FluxTransformer2DModel         text and pooled text

The network is the model itself, with its own parameter names: checkpoints, adapters and exports are the model's.

Source: https://huggingface.co/docs/diffusers/main/en/api/models/overview.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from lit_efficient.distributed.weight_slices import built_empty
from lit_efficient.files.records import rebuild
from lit_efficient.losses.noise_process import DiffusionProcess, Schedule, as_process
from lit_efficient.models.libraries import diffusers_backbones
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig, build, build_empty
from lit_efficient.models.networks.backbone_shape import BackboneShape, Sides
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.networks.dit import DiT, DiTConfig

BackboneSpec = DiTConfig | DiffusersModelConfig


def build_backbone(spec: BackboneSpec, empty: bool = False) -> nn.Module:
    """The network that ``spec`` describes, in training mode. Random weights come from torch's global generator.

    ``empty`` leaves the weights, where that can be, to ``fill_waiting`` of
    :mod:`lit_efficient.distributed.weight_slices`.

    Raises:
        ConfigurationError: For a model that cannot be a backbone, or cannot be built or loaded.
    """
    if isinstance(spec, DiTConfig):
        return built_empty(lambda: DiT(spec)) if empty else DiT(spec)
    shape_of(spec)
    return diffusers_backbones.prepared((build_empty(spec) if empty else None) or build(spec), spec)


def call_backbone(
    network: nn.Module, x: Tensor, t: Tensor, condition: Condition, process: Schedule | DiffusionProcess = "flow"
) -> Tensor:
    """The prediction [B, C, H, W] of a network, without the channels of a learned variance.

    Args:
        network: What `build_backbone` has built.
        x: Noisy latents, [B, C, H, W], scaled as the network is to see them.
        t: Times, [B] in [0, 1]; the network gets what it expects: ours the process's ``network_time``, those of
            diffusers the ``timestep`` of its pipelines.
        condition: What it gets besides; just what its `shape_of` asks for.
        process: The process that it is trained on.
    """
    process = as_process(process)
    if isinstance(network, DiT):
        text = {} if condition.text is None else {"context": condition.text, "context_mask": condition.mask}
        return network(x, process.network_time(t), condition.labels, **text)
    return diffusers_backbones.call(network, x, process.timestep(t), condition)


def shape_of(spec: BackboneSpec) -> BackboneShape:
    """What a network takes, from its description alone: nothing is built.

    Raises:
        ConfigurationError: For a model that cannot be a backbone.
    """
    if isinstance(spec, DiTConfig):
        return BackboneShape(
            name="DiT",
            channels=spec.channels,
            size=(spec.size, spec.size),
            sides=Sides(spec.patch_size),
            num_classes=spec.num_classes,
            text_width=spec.context_width,
            class_token=spec.variant.class_token,
        )
    return diffusers_backbones.shape_of(spec)


def as_spec(stored: Mapping[str, Any]) -> BackboneSpec:
    """The description that a checkpoint holds as a dictionary."""
    return rebuild(DiffusersModelConfig, stored) if "config_fields" in stored else rebuild(DiTConfig, stored)


def self_contained(spec: BackboneSpec) -> dict[str, Any]:
    """The description as a dictionary that names no file: with it, a checkpoint with all weights is enough."""
    if isinstance(spec, DiTConfig):
        return asdict(spec)
    return asdict(diffusers_backbones.self_contained(spec))
