"""Networks that see an image beside the noisy latents: a control branch, further channels, or further tokens.

    controlnet   unet(x, residuals of controlnet(x, picture)): a copy of the UNet's encoder, whose outputs begin at 0
    inpaint      unet([x, mask, latents of the picture without the masked part]): weights of new channels begin at 0
    sequence     transformer([tokens of x, tokens of the picture]): only the first tokens are denoised

With ``controlnet`` the UNet is frozen and the branch trains.

Costs: controlnet: about half of the UNet's forward pass and its memory. inpaint: one more encoding of images. sequence:
as many more tokens as the picture has.
Source: Zhang et al. (2023), https://arxiv.org/abs/2302.05543; Rombach et al. (2022), https://arxiv.org/abs/2112.10752;
    FLUX.1 Kontext (2025), https://arxiv.org/abs/2506.15742.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lit_efficient.errors import check_choice, checks_types, refusal
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig, build, resolve
from lit_efficient.models.networks.backbone_shape import BackboneShape, ImageKind

_OWNER = "ImageCondition"


@checks_types
@dataclass(frozen=True)
class ImageCondition:
    """Image that the network of a diffusion model receives beside the noisy latents.

    Args:
        kind: ``controlnet``: a ControlNet for the picture ``condition`` of a batch, on a frozen UNet.
            ``inpaint``: a mask and the latents of the image without its masked part, as 5 further channels of a UNet.
            The masks are those of the data (``mask``), or random rectangles and ellipses. A UNet without these
            channels gets them with weights of 0. ``sequence``: the latents of ``condition``, as further tokens of Flux
            (Kontext) or Qwen-Image (Edit).
        controlnet: ControlNet from which training starts. null copies the encoder of the UNet.
        masked_loss: Let only the masked part of an image contribute to the loss (for ``inpaint``).
    """

    kind: ImageKind
    controlnet: DiffusersModelConfig | None = None
    masked_loss: bool = False

    def __post_init__(self) -> None:
        check_choice(_OWNER, "kind", self.kind, get_args(ImageKind))
        if isinstance(self.controlnet, Mapping):  # from a checkpoint
            object.__setattr__(self, "controlnet", DiffusersModelConfig(**self.controlnet))
        if self.controlnet is not None and self.kind != "controlnet":
            raise refusal(_OWNER, "controlnet", f"null for kind {self.kind}", self.controlnet.described)
        if self.masked_loss and self.kind != "inpaint":
            raise refusal(_OWNER, "masked_loss", f"false for kind {self.kind}", True)


class ControlledUNet(nn.Module):
    """A frozen UNet with a ControlNet: the residuals of the ControlNet are added to the UNet's skip connections."""

    def __init__(self, unet: nn.Module, controlnet: nn.Module) -> None:
        super().__init__()
        self.unet = unet.requires_grad_(False)
        self.controlnet = controlnet

    @property
    def config(self) -> Any:
        """Configuration of the UNet."""
        return self.unet.config

    def forward(
        self, sample: Tensor, timestep: Tensor, controlnet_cond: Tensor, return_dict: bool = False, **conditions: Any
    ) -> tuple[Tensor]:
        """Return the UNet's output for noisy latents [B, c, h, w], timesteps [B] and pictures [B, C, H, W]."""
        dtype = next(self.controlnet.parameters()).dtype
        given = {name: value for name, value in conditions.items() if name != "encoder_attention_mask"}
        down, middle = self.controlnet(
            _cast(sample, dtype),
            timestep,
            controlnet_cond=_cast(controlnet_cond, dtype),
            return_dict=False,
            **_cast(given, dtype),
        )
        found: tuple[Tensor] = self.unet(
            sample,
            timestep,
            down_block_additional_residuals=[_cast(part, sample.dtype) for part in down],
            mid_block_additional_residual=_cast(middle, sample.dtype),
            return_dict=False,
            **conditions,
        )
        return found


def shape_with(shape: BackboneShape, image: ImageCondition | None, owner: str) -> BackboneShape:
    """Return the inputs of a network that sees an image.

    Args:
        shape: Inputs of the network as it is described.
        image: The image condition. ``None``: none.
        owner: Name of the caller, for errors.

    Raises:
        ConfigurationError: If the network cannot see such an image, or sees another one.
    """
    held = shape.image_channels
    if image is None:
        if held:
            allowed = f"inpaint for this {shape.name}, whose input has {held} channels more than the latents"
            raise refusal(owner, "image_condition.kind", allowed, None)
        return shape
    if image.kind not in shape.images:
        allowed = f"one of {', '.join(shape.images)} for {shape.name}"
        if not shape.images:
            allowed = f"left out for {shape.name}, which takes no image"
        raise refusal(owner, "image_condition.kind", allowed, image.kind)
    wanted = shape.channels + 1 if image.kind == "inpaint" else 0
    if held not in (0, wanted):
        allowed = f"{shape.channels} or {shape.channels + wanted} for image_condition.kind {image.kind}"
        raise refusal(owner, f"in_channels of {shape.name}", allowed, shape.channels + held)
    masks_text = shape.masks_text and image.kind != "controlnet"  # diffusers' ControlNet takes no mask
    return replace(shape, image_channels=wanted, masks_text=masks_text)


def seeing(network: nn.Module, image: ImageCondition | None) -> nn.Module:
    """Return a network that sees an image. The network is changed in place, or becomes a part of the result."""
    if image is None or image.kind == "sequence":
        return network
    unet: Any = network
    if image.kind == "inpaint":
        if unet.config.in_channels == unet.config.out_channels:
            _widen(unet, 2 * unet.config.in_channels + 1)
        return network
    if image.controlnet is not None:
        branch: Any = build(image.controlnet)
        return ControlledUNet(network, branch)
    from diffusers import ControlNetModel

    return ControlledUNet(network, ControlNetModel.from_unet(unet).train())


def without_paths(
    backbone: dict[str, Any], image: ImageCondition, shape: BackboneShape
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return descriptions of a network and its image condition that need no files, for a checkpoint with all weights.

    Args:
        backbone: Description of the network without paths, before :func:`seeing`.
        image: The image condition.
        shape: Result of :func:`shape_with`.
    """
    if image.kind == "inpaint":
        fields = {**backbone["config_fields"], "in_channels": shape.channels + shape.image_channels}
        backbone = {**backbone, "config_fields": fields}
    if image.controlnet is not None:
        branch = DiffusersModelConfig(config_fields=resolve(image.controlnet), dtype=image.controlnet.dtype)
        image = replace(image, controlnet=branch)
    return backbone, asdict(image)


def _widen(unet: Any, channels: int) -> None:
    """Let the first layer of a UNet take further channels, which it ignores at first."""
    layer = unet.conv_in
    weight = layer.weight.detach()
    added = weight.new_zeros(len(weight), channels - weight.shape[1], *weight.shape[2:])
    layer.weight = nn.Parameter(torch.cat([weight, added], dim=1))
    layer.in_channels = channels
    unet.register_to_config(in_channels=channels)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return tensors of floating-point numbers in another format; everything else is unchanged."""
    if isinstance(value, Mapping):
        return {name: _cast(part, dtype) for name, part in value.items()}
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value
