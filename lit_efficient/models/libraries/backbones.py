"""Networks for latent diffusion behind two functions: one builds a network, the other calls it.

    prediction [B, C, H, W] = call_backbone(network, x, t, condition)

    ours         DiT                      labels, text
    diffusers    UNet2DModel              labels
                 UNet2DConditionModel     text, labels, pooled text (Stable Diffusion, SDXL)
                 DiTTransformer2DModel    labels
                 PixArtTransformer2DModel, SanaTransformer2DModel      text
                 QwenImageTransformer2DModel, ZImageTransformer2DModel text
                 SD3Transformer2DModel, FluxTransformer2DModel         text and pooled text

The network is the model itself, without a wrapper: checkpoints, adapters and exports have the model's parameter names.

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
from lit_efficient.models.libraries.image_condition import ImageCondition, seeing, shape_with
from lit_efficient.models.networks.backbone_shape import BackboneShape, Sides
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.networks.dit import DiT, DiTConfig

BackboneSpec = DiTConfig | DiffusersModelConfig


def build_backbone(spec: BackboneSpec, empty: bool = False, image: ImageCondition | None = None) -> nn.Module:
    """Build the network that ``spec`` describes, in training mode. Random weights come from torch's global generator.

    Args:
        spec: Description of the network.
        empty: Whether to leave the weights to ``fill_waiting`` of :mod:`lit_efficient.distributed.weight_slices`, where
            the network supports that.
        image: Image that the network sees beside the noisy latents.

    Raises:
        ConfigurationError: For a model that cannot be a backbone, or cannot be built or loaded.
    """
    shape_with(shape_of(spec), image, "LatentDiffusion")  # refuses models that cannot be a backbone
    if isinstance(spec, DiTConfig):
        if empty:
            return built_empty(lambda: DiT(spec))
        return DiT(spec)
    whole = image is None or image.kind == "sequence"  # other networks are built from the weights
    network = build_empty(spec) if empty and whole else None
    return seeing(diffusers_backbones.prepared(network or build(spec), spec), image)


def call_backbone(
    network: nn.Module, x: Tensor, t: Tensor, condition: Condition, process: Schedule | DiffusionProcess = "flow"
) -> Tensor:
    """Return the prediction [B, C, H, W] of a network, without the channels of a learned variance.

    Args:
        network: Result of `build_backbone`.
        x: Noisy latents, [B, C, H, W], scaled for the network.
        t: Times, [B] in [0, 1], or [B, N] for a network that takes ``token_times``. Our network receives the process's
            ``network_time``, networks of diffusers the ``timestep`` of their pipelines.
        condition: Conditions; exactly the parts that the network's `shape_of` names.
        process: Diffusion process on which the network is trained.
    """
    process = as_process(process)
    if isinstance(network, DiT):
        time = process.network_time(t)
        texts = {"context": condition.text, "context_mask": condition.mask}
        return network(x, time, condition.labels, **texts, interval=condition.interval)
    return diffusers_backbones.call(network, x, process.timestep(t), condition)


def shape_of(spec: BackboneSpec) -> BackboneShape:
    """Return a network's inputs from its description, without building it.

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
            token_times=not spec.variant.interval and not spec.variant.class_token.features,
        )
    return diffusers_backbones.shape_of(spec)


def as_spec(stored: Mapping[str, Any]) -> BackboneSpec:
    """Return the description that a checkpoint holds as a dictionary."""
    if "config_fields" in stored:
        return rebuild(DiffusersModelConfig, stored)
    return rebuild(DiTConfig, stored)


def self_contained(spec: BackboneSpec) -> dict[str, Any]:
    """Return the description as a dictionary without paths, which together with all weights is enough to rebuild the
    network.
    """
    if isinstance(spec, DiTConfig):
        return asdict(spec)
    return asdict(diffusers_backbones.self_contained(spec))
