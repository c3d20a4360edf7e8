"""Images that a diffusion network sees beside the noisy latents, made from batches.

    controlnet   condition [B, 3, H, W] in [-1, 1]  ->  pixels in [0, 1], as diffusers' ControlNet pipelines give them
    sequence     condition [B, 3, H, W], or condition_latents [B, c, h, w]  ->  normalised latents
    inpaint      images [B, C, H, W], optional mask [B, 1, H, W]  ->  [mask, latents of the images without masked part];
                 or from a cache: hole [B, 1, h, w] and condition_latents, with condition_logvar of a posterior

A mask is 1 where the network fills in the image. Without a mask, each sample gets a random rectangle or ellipse, which
masks cells of pixels as a whole.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.models.libraries.image_condition import ImageCondition
from lit_efficient.models.libraries.latent_codec import LatentCodec, hole_of
from lit_efficient.models.networks.autoencoder import sample_posterior
from lit_efficient.surgery import moved
from lit_efficient.tasks.latent_source import encode_images


def image_input(
    batch: dict[str, Any],
    spec: ImageCondition,
    codec: LatentCodec | None,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the image that the network sees, and the mask of the loss.

    Args:
        batch: The batch.
        spec: The image condition.
        codec: Autoencoder, for kinds that see latents.
        device: Device of the results.
        generator: Random generator of masks and posteriors. ``None`` takes torch's global generator.

    Returns:
        The image [B, C, H, W], and the mask of the loss as batches have it, or ``None``.
    """
    weights = batch.get("mask")
    if spec.kind == "controlnet":
        return (moved(_member(batch, "condition", spec), device).float() + 1.0) / 2.0, weights
    if spec.kind == "sequence":
        if "condition_latents" in batch:
            return moved(batch["condition_latents"], device).float(), weights
        picture = moved(_member(batch, "condition", spec), device)
        return encode_images(picture, _encoder(codec, spec))[0].float(), weights
    if "hole" in batch:
        stored = [
            moved(batch[name], device) for name in ("hole", "condition_latents", "condition_logvar") if name in batch
        ]
        hole, mean, *spread = stored
        masked = sample_posterior(mean.float(), spread[0].float() if spread else None, generator)
        return torch.cat([hole, masked], dim=1), weights if spec.masked_loss else None
    codec = _encoder(codec, spec)
    images = moved(_member(batch, "images", spec), device)
    size = (images.shape[2] // codec.factor, images.shape[3] // codec.factor)
    if weights is None:
        weights = F.interpolate(random_masks(len(images), size, generator, device), images.shape[2:])
    allowed = [len(images), 1, *images.shape[2:]]
    if list(weights.shape) != allowed:
        raise refusal("LatentDiffusion", "the shape of mask", f"{allowed}, as the images are", list(weights.shape))
    mask = hole_of(moved(weights, device))
    mean, logvar = encode_images(images * (1.0 - mask), codec)
    if logvar is not None:
        logvar = logvar.float()
    masked = sample_posterior(mean.float(), logvar, generator)
    seen = torch.cat([codec.sample_mask(mask), masked], dim=1)
    return seen, weights if spec.masked_loss else None


def random_masks(
    count: int, size: tuple[int, int], generator: torch.Generator | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Draw masks [count, 1, h, w] of 0 and 1: one rectangle or ellipse of any size and place in each.

    Args:
        count: Number of masks.
        size: Height and width.
        generator: Random generator. ``None`` takes torch's global generator.
        device: Device of the result.
    """
    source = device if generator is None else generator.device
    draws = moved(torch.rand(count, 5, generator=generator, device=source), device)
    distances = []  # of the centres of cells from the shape's centre; 1 is its border
    for axis, length in enumerate(size):
        extent = 1.0 + draws[:, axis] * (length - 1.0)
        centre = extent / 2.0 + draws[:, 2 + axis] * (length - extent)
        cells = torch.arange(length, device=device) + 0.5
        distances.append((cells - centre[:, None]).abs() / (extent[:, None] / 2.0))
    rows, columns = distances[0][:, :, None], distances[1][:, None, :]
    rectangle = torch.maximum(rows, columns) <= 1.0
    ellipse = rows.square() + columns.square() <= 1.0
    return torch.where(draws[:, 4, None, None] < 0.5, rectangle, ellipse)[:, None].float()


def _encoder(codec: LatentCodec | None, spec: ImageCondition) -> LatentCodec:
    if codec is None:
        raise ConfigurationError(
            f"LatentDiffusion: image_condition.kind {spec.kind} encodes images in each step, and there is no "
            "autoencoder: use a data module with one (LatentData)"
        )
    return codec


def _member(batch: dict[str, Any], name: str, spec: ImageCondition) -> Tensor:
    if name in batch:
        found: Tensor = batch[name]
        return found
    way_out = "add a set of condition images to the data"
    if name == "condition" and "condition_latents" in batch:
        way_out = "set condition: pixels in LatentData"
    if name == "images":
        way_out = (
            "set condition: masked in LatentData to cache images with masks, or cached: false to encode in each step"
        )
    raise ConfigurationError(
        f"LatentDiffusion: image_condition.kind {spec.kind} needs {name} in each batch (this one has "
        f"{', '.join(sorted(batch)) or 'nothing'}): {way_out}"
    )
