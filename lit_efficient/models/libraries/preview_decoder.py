"""Quick looks at latents: AutoencoderTiny (TAESD) in place of the autoencoder that it imitates.

    images = tiny.decode((latents std + mean - declared mean) / declared std)

A Tiny decodes the latents of its model *as diffusers' pipelines scale them*, that is by what the model's configuration
declares. The diffusion model here may learn them in other units (the codec's, measured ones): they are converted.

Saves: most of the decoder's compute and memory: 1.2 million parameters in place of Stable Diffusion's 49.5 million
Costs: fine detail; what is measured (validation's scores) goes through the real decoder
Source: https://github.com/madebyollin/taesd
"""

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.models.libraries.autoencoders import (
    DiffusersAutoencoder,
    build_autoencoder,
    check_kind,
    declared_statistics,
)
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.surgery import own_draws


class PreviewDecoder:
    """Decodes a codec's normalised latents by an AutoencoderTiny. No ``nn.Module``, for `LatentCodec`'s reasons.

    Args:
        codec: Whose latents they are.
        preview: The AutoencoderTiny that imitates the codec's autoencoder.

    Raises:
        ConfigurationError: If it is another kind of model, or of other channels or another size.
    """

    def __init__(self, codec: LatentCodec, preview: DiffusersModelConfig) -> None:
        if (kind := check_kind(preview)) != "AutoencoderTiny":
            raise refusal("preview", f"the _class_name of {preview.described!r}", "AutoencoderTiny", kind)
        with own_draws():  # previews leave the run's random numbers alone
            tiny = build_autoencoder(preview)
        assert isinstance(tiny, DiffusersAutoencoder)
        for name in ("image_channels", "latent_channels", "factor"):
            ours, theirs = getattr(tiny, name), getattr(codec, name)
            if ours != theirs:
                raise ConfigurationError(
                    f"preview: {preview.described!r} has {name} {ours}, and the autoencoder that it is to imitate "
                    f"{theirs}."
                )
        self.codec = codec
        # What the Tiny decodes is scaled already, so that it declares a factor of 1 itself.
        self._tiny = LatentCodec.declared(tiny)
        self._declared = declared_statistics(codec.autoencoder)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, c, h, w] to images [B, C, H, W], float32, clamped to [-1, 1]."""
        mean, std = (statistic.view(1, -1, 1, 1).to(latents.device) for statistic in self._declared)
        return self._tiny.decode((self.codec.denormalize(latents.float()) - mean) / std)
