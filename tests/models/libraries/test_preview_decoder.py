"""Previews: latents in the units that an AutoencoderTiny was trained for, and only where nothing is measured."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lit_efficient import ConfigurationError, DiffusersModelConfig, DiTConfig, LatentCodec, LatentDiffusion, Samples
from lit_efficient.data.digit_images import TensorDictDataset
from lit_efficient.models.libraries.latent_codec import PreviewDecoder
from tests.models.libraries.diffusers_autoencoders import DC, KL, TINY, small
from tests.support import QUIET


def measured(**changed: Any) -> LatentCodec:
    """A codec whose units are not those that its autoencoder declares."""
    return LatentCodec(small(KL, **changed), torch.tensor([0.5, -1.0, 2.0]), torch.tensor([2.0, 0.5, 3.0]))


@pytest.fixture
def preview(tmp_path: Any) -> DiffusersModelConfig:
    small(TINY, seed=3).network.save_pretrained(tmp_path / "taesd")
    return DiffusersModelConfig(str(tmp_path / "taesd"))


def test_latents_reach_the_tiny_as_pipelines_scale_them(preview: DiffusersModelConfig) -> None:
    codec, latents = measured(), torch.randn(2, 3, 4, 6)
    raw = latents * codec.std.view(1, 3, 1, 1) + codec.mean.view(1, 3, 1, 1)
    scaled = (raw - 0.25) * 0.5  # as StableDiffusion3Img2ImgPipeline scales what its VAE encodes
    expected = small(TINY, seed=3).network.decode(scaled).sample.clamp(-1, 1)
    before = torch.get_rng_state()
    decoder = PreviewDecoder(codec, preview)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(decoder.decode(latents), expected)
    assert decoder.decode(latents).shape == codec.decode(latents).shape
    m, s = [0.1, 0.2, 0.3], [2.0, 3.0, 4.0]
    whole = measured(latents_mean=m, latents_std=s, shift_factor=None)
    scaled = (raw - torch.tensor(m).view(1, 3, 1, 1)) * 0.5 / torch.tensor(s).view(1, 3, 1, 1)
    expected = small(TINY, seed=3).network.decode(scaled).sample.clamp(-1, 1)
    torch.testing.assert_close(PreviewDecoder(whole, preview).decode(latents), expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (KL, "_class_name of 'AutoencoderKL' must be AutoencoderTiny, got 'AutoencoderKL'"),
        ({**TINY, "latent_channels": 4}, "has latent_channels 4, and the autoencoder that it is to imitate 3"),
        (
            {**TINY, "encoder_block_out_channels": [8] * 4, "num_encoder_blocks": [1] * 4}
            | {"decoder_block_out_channels": [8] * 4, "num_decoder_blocks": [1] * 4},
            "has factor 8, and the autoencoder that it is to imitate 4",
        ),
        (DC, "must be AutoencoderTiny, got"),
    ],
)
def test_what_imitates_no_such_autoencoder_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PreviewDecoder(measured(), DiffusersModelConfig(config_fields=fields))


class Latents(L.LightningDataModule):
    """What the task asks of a data module, over a handful of random latents."""

    num_classes = 10
    latent_shape = (3, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.codec = measured()
        self.judged: list[torch.Tensor] = []

    def train_dataloader(self) -> Any:
        rows = {"latents": torch.zeros(4, 3, 4, 4), "labels": torch.zeros(4, dtype=torch.long)}
        return DataLoader(TensorDictDataset(rows), batch_size=2)

    val_dataloader = train_dataloader

    def score_samples(self, images: torch.Tensor, labels: torch.Tensor, captions: object) -> dict[str, float]:
        self.judged.append(images)
        return {"score": 0.0}


class Grids(L.Callback):
    """Keeps the grids that a fit would write, and the same latents through both decoders."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen = pl_module.sample_images(2, seed=7)
        self.latents = pl_module.sample(torch.arange(2), torch.Generator().manual_seed(7))


def test_grids_of_a_fit_are_previews_and_everything_else_is_real(preview: DiffusersModelConfig) -> None:
    from lit_efficient.tasks.latent_diffusion import to_uint8

    backbone = DiTConfig(channels=3, size=4, patch_size=2, width=32, depth=1, heads=2)
    data, grids = Latents(), Grids()
    module = LatentDiffusion(backbone=backbone, sampling_steps=2, samples=Samples(2, preview=preview))
    L.Trainer(**{**QUIET, "max_epochs": 1, "callbacks": [grids]}).fit(module, data)
    decoder = PreviewDecoder(data.codec, preview)
    assert torch.equal(grids.seen, to_uint8(decoder.decode(grids.latents)))
    assert not torch.equal(grids.seen, to_uint8(data.codec.decode(grids.latents)))
    judged = module.sample(torch.arange(2), torch.Generator().manual_seed(1_000_003))
    assert torch.equal(data.judged[-1], data.codec.decode(judged))
    L.Trainer(**{**QUIET, "callbacks": [grids]}).validate(module, data, verbose=False)
    assert torch.equal(grids.seen, to_uint8(data.codec.decode(grids.latents)))
    assert module.hparams["samples"]["preview"]["name_or_path"] == preview.name_or_path
    assert LatentDiffusion(**module.hparams).samples.preview == preview
