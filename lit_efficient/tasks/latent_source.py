"""Interface between latent diffusion and its data: batches, the data module, and frozen encoders in checkpoints.

    batch:  normalised latents [B, c, h, w]; or mean and optional logvar of a posterior; or images [B, C, H, W]
            optional labels [B]; optional captions (B strings), or text [B, L, D], text_mask [B, L] and pooled [B, P]
            optional sizes [B, 6] in pixels, for SDXL and PixArt: height and width of the original, top and left of the
            crop, height and width of the encoded image; the default is an uncropped image
            optional loss_weight [B], and mask [B, 1, h, w] in [0, 1], which weights the loss of each position of the
            latents; with images it is [B, 1, H, W], and a position gets the mean of its pixels

Images are encoded in the step that uses them. Encoding draws no random numbers, so training on cached posteriors uses
the same random numbers as training on images.
"""

from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from lit_efficient.errors import CheckpointError, ConfigurationError, refusal
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.libraries.text_encoder import TextEncoder
from lit_efficient.models.networks.autoencoder import sample_posterior
from lit_efficient.surgery import moved

_IMAGES_AT_ONCE = 32
_Frozen = TypeVar("_Frozen", LatentCodec, TextEncoder)


@runtime_checkable
class LatentSource(Protocol):
    """Attributes of a data module whose samples can be decoded, such as ``LatentDigits`` and ``LatentData``.

    Optional attributes:

    - ``text_encoder``: `TextEncoder` of the captions.
    - ``score_samples(images, labels, captions) -> dict[str, float]``: metrics of images [M, C, H, W] in [-1, 1] that
      were sampled for ``labels`` [M] or None, and M captions or None.
    - ``judges_samples``: False if there is no ``score_samples`` for this data, so that no samples are drawn for it.

    If ``codec`` is None, the task keeps its own.
    """

    codec: LatentCodec | None
    num_classes: int

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a latent. If sizes differ, the most frequent size."""


def batch_size(batch: dict[str, Any]) -> int:
    """Return the number of samples in a batch."""
    for name in ("latents", "mean", "images", "labels", "captions"):
        if name in batch:
            return len(batch[name])
    raise ConfigurationError(f"LatentDiffusion: a batch must have images or latents; this one has {sorted(batch)}")


def latent_size(batch: dict[str, Any], codec: LatentCodec | None) -> tuple[int, int] | None:
    """Return the height and width of the latents of a batch, or ``None`` if it has neither latents nor images."""
    for name in ("latents", "mean", "images"):
        if name in batch:
            height, width = batch[name].shape[-2:]
            factor = codec.factor if name == "images" and codec is not None else 1
            return height // factor, width // factor
    return None


def with_posterior(batch: dict[str, Any], codec: LatentCodec | None) -> dict[str, Any]:
    """Encode the images of a batch, and add the posterior to it. Return batches with latents unchanged.

    A mask of pixels becomes one of latents.
    """
    if "images" not in batch or "latents" in batch or "mean" in batch:
        return batch
    if codec is None:
        raise ConfigurationError(
            "LatentDiffusion: the batch has images, but there is no autoencoder to encode them: use a data module with "
            "one (LatentData), or set codec to a LatentCodec"
        )
    mean, logvar = encode_images(batch["images"], codec)
    codec.note_finite(mean, logvar)
    encoded = {**batch, "mean": mean}
    if logvar is not None:
        encoded["logvar"] = logvar
    if "mask" in batch:
        encoded["mask"] = codec.shrink_mask(batch["mask"])
    return encoded


@torch.no_grad()
def encode_images(images: Tensor, codec: LatentCodec) -> tuple[Tensor, Tensor | None]:
    """Return mean and log variance of the normalised latents of images [B, C, H, W], in parts to bound the memory."""
    # Parts of equal size, because kernels for a single image differ in the last bits of the latents.
    count = -(-len(images) // _IMAGES_AT_ONCE)
    parts = [codec.encode(part) for part in images.tensor_split(count)]
    logvars = [part[1] for part in parts if part[1] is not None]
    return torch.cat([part[0] for part in parts]), torch.cat(logvars) if logvars else None


def draw_latents(batch: dict[str, Any], generator: torch.Generator | None) -> Tensor:
    """Return the latents [B, c, h, w] of an encoded batch in float32. A posterior is sampled."""
    if "latents" in batch:
        return batch["latents"].float()
    if "mean" not in batch:
        raise ConfigurationError(
            f"LatentDiffusion: a batch must have images, latents, or mean (and logvar); this one has {sorted(batch)}"
        )
    logvar = batch.get("logvar")
    if logvar is not None:
        logvar = logvar.float()
    return sample_posterior(batch["mean"].float(), logvar, generator)


def mask_of(batch: dict[str, Any], latents: Tensor) -> Tensor:
    """Return the mask [B, 1, h, w] of an encoded batch for latents [B, c, h, w], with their type and device."""
    mask: Tensor = batch["mask"]
    allowed = [len(latents), 1, *latents.shape[2:]]
    if list(mask.shape) != allowed:
        raise refusal("LatentDiffusion", "the shape of mask", f"{allowed}, as the latents are", list(mask.shape))
    return moved(mask, latents.device).to(latents.dtype)


def weights_of(batch: dict[str, Any], latents: Tensor) -> Tensor:
    """Return the weights [B] of the samples of a batch, with the type and device of the latents [B, c, h, w]."""
    weights: Tensor = batch["loss_weight"]
    if list(weights.shape) != [len(latents)]:
        raise refusal("LatentDiffusion", "the shape of loss_weight", f"[{len(latents)}]", list(weights.shape))
    return moved(weights, latents.device).to(latents.dtype)


def restored(
    kind: type[_Frozen], saved: dict[str, Any], ours: _Frozen | None, must_agree: bool, what: str, way_out: str
) -> _Frozen:
    """Return a frozen encoder from a checkpoint, or that of the data if both are the same.

    Args:
        kind: Class of the encoder.
        saved: State of the encoder in the checkpoint.
        ours: Encoder of the data module, if it has one.
        must_agree: Raise an error if both differ.
        what: Noun for the error message: "trained on {what}".
        way_out: Sentence at the end of the error message.

    Raises:
        CheckpointError: If both differ and ``must_agree``.
    """
    if ours is not None and saved.get("fingerprint") == ours.fingerprint():
        return ours
    theirs = kind.from_state_dict(saved)
    if must_agree and ours is not None and theirs.fingerprint() != ours.fingerprint():
        raise CheckpointError(
            f"The checkpoint was trained on {what} ({theirs.fingerprint()[:12]}) than that of the data module "
            f"({ours.fingerprint()[:12]}). {way_out}"
        )
    return theirs
