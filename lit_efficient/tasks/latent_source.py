"""What latent diffusion needs from its data besides batches, and how the frozen parts of it travel in checkpoints.

    batch:  latents [B, c, h, w], or mean and logvar (or none) of a posterior, normalised, or images [B, C, H, W]
            and labels [B], and captions (B strings), or text [B, L, D], text_mask [B, L] and pooled [B, P]
            and sizes [B, 6] in pixels, which SDXL and PixArt take: height and width of the original, top and left of
            the crop, height and width of what was encoded; without them those of whole images

Images are encoded where they are used. Nothing is drawn for it, so training on cached posteriors makes the same draws
as training on images.
"""

from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.libraries.text_encoder import TextEncoder
from lit_efficient.models.networks.autoencoder import sample_posterior

_IMAGES_AT_ONCE = 32
_Frozen = TypeVar("_Frozen", LatentCodec, TextEncoder)


@runtime_checkable
class LatentSource(Protocol):
    """What a data module offers so that samples can be decoded. ``LatentDigits`` and ``LatentData`` do.

    It may have more: ``text_encoder``, a `TextEncoder` for its captions, and ``score_samples(images, labels) ->
    dict[str, float]``, metrics of images [M, C, H, W] in [-1, 1] that were meant to be ``labels`` [M] or None; with
    ``judges_samples`` false it has no judge, and no samples are made for it. Without ``codec`` the module's stays.
    """

    codec: LatentCodec | None
    num_classes: int

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a latent; of the most frequent ones if there are several."""


def batch_size(batch: dict[str, Any]) -> int:
    """B."""
    for name in ("latents", "mean", "images", "labels", "captions"):
        if name in batch:
            return len(batch[name])
    raise ConfigurationError(f"LatentDiffusion: a batch must have images or latents; this one has {sorted(batch)}.")


def latent_size(batch: dict[str, Any], codec: LatentCodec | None) -> tuple[int, int] | None:
    """Height and width of a batch's latents, where it tells."""
    for name in ("latents", "mean", "images"):
        if name in batch:
            height, width = batch[name].shape[-2:]
            factor = codec.factor if name == "images" and codec is not None else 1
            return height // factor, width // factor
    return None


def with_posterior(batch: dict[str, Any], codec: LatentCodec | None) -> dict[str, Any]:
    """A batch of images with its posterior; other batches as they are."""
    if "images" not in batch or "latents" in batch or "mean" in batch:
        return batch
    if codec is None:
        raise ConfigurationError(
            "LatentDiffusion: the batch has images and there is no autoencoder to encode them: use a data module that "
            "has one (LatentData), or set codec to a LatentCodec."
        )
    with torch.no_grad():
        # In even parts: one image alone takes other kernels than two, and the last bits of a latent with them.
        count = -(-len(batch["images"]) // _IMAGES_AT_ONCE)
        parts = [codec.encode(images) for images in batch["images"].tensor_split(count)]
    mean = torch.cat([part[0] for part in parts])
    logvars = [part[1] for part in parts if part[1] is not None]
    return {**batch, "mean": mean} | ({"logvar": torch.cat(logvars)} if logvars else {})


def draw_latents(batch: dict[str, Any], generator: torch.Generator | None) -> Tensor:
    """Latents [B, c, h, w] float32 of an encoded batch; a posterior is sampled."""
    if "latents" in batch:
        return batch["latents"].float()
    if "mean" not in batch:
        raise ConfigurationError(
            f"LatentDiffusion: a batch must have images, latents, or mean (and logvar); this one has {sorted(batch)}."
        )
    logvar = batch.get("logvar")
    return sample_posterior(batch["mean"].float(), None if logvar is None else logvar.float(), generator)


def restored(
    kind: type[_Frozen], saved: dict[str, Any], ours: _Frozen | None, must_agree: bool, what: str, way_out: str
) -> _Frozen:
    """The frozen part of a checkpoint; the data's own if it is the same, which spares loading it twice.

    Another one is refused where they ``must_agree``.
    """
    if ours is not None and saved.get("fingerprint") == ours.fingerprint():
        return ours
    theirs = kind.from_state_dict(saved)
    if must_agree and ours is not None and theirs.fingerprint() != ours.fingerprint():
        raise CheckpointError(
            f"The checkpoint was trained on {what} ({theirs.fingerprint()[:12]}) than the data module's "
            f"({ours.fingerprint()[:12]}). {way_out}"
        )
    return theirs
