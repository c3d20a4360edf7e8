"""One interface over ours and diffusers' autoencoders: their own numbers, true shapes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_efficient import AutoencoderConfig, ConfigurationError, DiffusersModelConfig
from lit_efficient.errors import CheckpointError
from lit_efficient.models.libraries.autoencoders import (
    DiffusersAutoencoder,
    ImageAutoencoder,
    build_autoencoder,
    declared_statistics,
    is_deterministic,
    whole_config,
)
from lit_efficient.models.libraries.diffusers_model import from_fields
from lit_efficient.models.networks.autoencoder import Autoencoder
from tests.models.libraries.diffusers_autoencoders import DC, KINDS, KL, TINY, images, small

FACTORS = {"AutoencoderKL": 4, "AutoencoderTiny": 4, "AutoencoderDC": 4}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_numbers_are_diffusers_own(kind: str) -> None:
    ours, x = small(KINDS[kind]), images()
    encoded = ours.network.encode(x)
    mean, logvar = ours.encode(x)
    if kind == "AutoencoderKL":
        assert logvar is not None
        assert torch.equal(mean, encoded.latent_dist.mean)
        assert torch.equal(logvar, encoded.latent_dist.logvar)
    else:
        assert logvar is None
        assert torch.equal(mean, encoded.latents if kind == "AutoencoderTiny" else encoded.latent)
    assert torch.equal(ours.decode(mean), ours.network.decode(mean).sample)
    reconstruction, forward_mean, _ = ours(x, torch.Generator().manual_seed(0))
    assert torch.equal(forward_mean, mean)
    assert torch.equal(reconstruction, ours.decode(mean)) is (logvar is None)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_shapes_said_are_the_shapes_made(kind: str) -> None:
    ours = small(KINDS[kind])
    mean, _ = ours.encode(images())
    assert (ours.image_channels, ours.factor) == (1, FACTORS[kind])
    assert mean.shape == (2, ours.latent_channels, 16 // ours.factor, 24 // ours.factor)
    assert ours.decode(mean).shape == images().shape
    assert isinstance(ours, ImageAutoencoder)


@pytest.mark.parametrize("stages", [[1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 0, 1]])
def test_a_stage_of_dc_without_layers_does_not_halve(stages: list[int]) -> None:
    plain = {
        "encoder_block_types": "ResBlock",
        "decoder_block_types": "ResBlock",
        "encoder_block_out_channels": [8] * 3,
    }
    fields = {**DC, **plain, "decoder_block_out_channels": [8] * 3}
    with torch.device("meta"):
        ours = DiffusersAutoencoder(
            from_fields({**fields, "encoder_layers_per_block": stages, "decoder_layers_per_block": stages})
        )
        mean = ours.network.encode(torch.empty(1, 1, 32, 32)).latent
        assert 32 // mean.shape[-1] == ours.factor
        assert ours.decode(mean).shape == (1, 1, 32, 32)


def test_real_configurations_have_their_real_shapes() -> None:
    stable_diffusion = {
        "_class_name": "AutoencoderKL",
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 2,
        "sample_size": 512,
    }
    shapes = []
    for fields in (stable_diffusion, {"_class_name": "AutoencoderTiny"}, {"_class_name": "AutoencoderDC"}):
        with torch.device("meta"):
            model = DiffusersAutoencoder(from_fields(fields))
        shapes.append((model.image_channels, model.latent_channels, model.factor))
    assert shapes == [(3, 4, 8), (3, 4, 8), (3, 32, 32)]


def test_parameters_keep_diffusers_names() -> None:
    ours = small(KL)
    assert set(ours.state_dict()) == {f"network.{name}" for name in ours.network.state_dict()}


def test_what_techniques_mix_in_changes_nothing_of_this() -> None:
    ours = small(TINY)
    config = whole_config(ours.network)
    mixin = type("FSDPModule", (), {})
    ours.network.__class__ = type("FSDPAutoencoderTiny", (mixin, type(ours.network)), {})
    assert whole_config(ours.network) == config
    assert ours.deterministic


def test_declared_statistics_by_hand() -> None:
    x = torch.randn(1, 3, 2, 2)

    def normalised(**changed: Any) -> torch.Tensor:
        mean, std = declared_statistics(small(KL, **changed))
        return (x - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)

    torch.testing.assert_close(normalised(), (x - 0.25) * 0.5)
    torch.testing.assert_close(normalised(shift_factor=None), x * 0.5)
    m, s = [0.1, 0.2, 0.3], [2.0, 3.0, 4.0]
    by_hand = (x - torch.tensor(m).view(1, 3, 1, 1)) * 0.5 / torch.tensor(s).view(1, 3, 1, 1)
    torch.testing.assert_close(normalised(latents_mean=m, latents_std=s, shift_factor=None), by_hand)
    assert declared_statistics(small(DC))[1].tolist() == pytest.approx([2.5] * 4)
    ours = declared_statistics(Autoencoder(AutoencoderConfig(width=8)))
    assert [t.tolist() for t in ours] == [[0.0] * 4, [1.0] * 4]


def test_weights_in_bfloat16_compute_in_it() -> None:
    ours = small(KL).bfloat16()
    mean, _ = ours.encode(images())
    assert mean.dtype == ours.decode(mean.float()).dtype == torch.bfloat16


@pytest.mark.parametrize("fields", [KL, TINY, DC])
def test_images_that_do_not_fit_are_refused(fields: dict[str, Any]) -> None:
    ours = small(fields)
    for wrong in (torch.zeros(2, 1, 18, 16), torch.zeros(2, 1, 16, 18), torch.zeros(2, 3, 16, 16), torch.zeros(1, 16)):
        with pytest.raises(ConfigurationError, match=r"must be \[B, 1, H, W\] with height and width multiples of 4"):
            ours.encode(wrong)


def test_a_tiny_encoder_that_checkpoints_itself_is_refused_as_it_computes_something_else() -> None:
    ours, x = small(TINY), images()
    expected = ours.encode(x)[0]
    ours.network.enable_gradient_checkpointing()
    assert not torch.allclose(ours.network.encode(x).latents, expected)  # the reason; if it holds no longer: remove
    with pytest.raises(ConfigurationError, match="is not for training its encoder"):
        ours.encode(x)
    with torch.no_grad():
        assert torch.equal(ours.encode(x)[0], expected)


def test_what_is_no_image_autoencoder_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'UNet2DModel' must be one of AutoencoderKL.*got 'UNet2DModel'"):
        build_autoencoder(DiffusersModelConfig(config_fields={"_class_name": "UNet2DModel"}))
    with pytest.raises(ConfigurationError, match=r"the model must be one of .*, got 'Linear'"):
        DiffusersAutoencoder(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match=r"must undo .* 4 times smaller; it gives 1, 2 times larger"):
        small(TINY, decoder_block_out_channels=[8, 8], num_decoder_blocks=[1, 1])
    with pytest.raises(ConfigurationError, match=r"takes 1 channels .* gives 3"):
        small(TINY, out_channels=3)
    with pytest.raises(CheckpointError, match="no file"):
        build_autoencoder("nowhere.ckpt")


def test_who_has_a_posterior_is_known_before_it_is_built() -> None:
    deterministic = {kind: is_deterministic(DiffusersModelConfig(config_fields=KINDS[kind])) for kind in KINDS}
    assert deterministic == {"AutoencoderKL": False, "AutoencoderTiny": True, "AutoencoderDC": True}
    assert not is_deterministic(AutoencoderConfig())
