import pytest
import torch

from lit_efficient.errors import ConfigurationError
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.networks.autoencoder import (
    Autoencoder,
    AutoencoderConfig,
    autoencoder_loss,
    kl_divergence,
    sample_posterior,
)

TINY = AutoencoderConfig(latent_channels=2, width=8)


@pytest.mark.parametrize("wrong", [{"width": 12}, {"width": 0}, {"latent_channels": 1.5}, {"image_channels": True}])
def test_config_names_the_argument_and_the_value(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigurationError, match=rf"AutoencoderConfig: {name}.*{value}"):
        AutoencoderConfig(**wrong)


@pytest.mark.parametrize("channels", [1, 3])
def test_latents_are_four_times_smaller_and_decode_to_the_image_size(channels):
    model = Autoencoder(AutoencoderConfig(image_channels=channels, latent_channels=2, width=8))
    images = torch.rand(3, channels, 16, 24)
    mean, logvar = model.encode(images)
    assert mean.shape == logvar.shape == (3, 2, 4, 6)
    assert model.decode(mean).shape == images.shape


def test_sides_that_are_no_multiple_of_four_are_refused():
    with pytest.raises(ConfigurationError, match="multiples of 4"):
        Autoencoder(TINY).encode(torch.rand(1, 1, 30, 32))


def test_kl_equals_torch_distributions():
    mean, logvar = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    ours = torch.distributions.Normal(mean, (0.5 * logvar).exp())
    expected = torch.distributions.kl_divergence(ours, torch.distributions.Normal(0.0, 1.0)).mean()
    torch.testing.assert_close(kl_divergence(mean, logvar), expected)
    assert kl_divergence(torch.zeros(5), torch.zeros(5)) == 0


def test_posterior_samples_have_the_moments_asked_for():
    mean, logvar = torch.full((100_000,), 2.0), torch.full((100_000,), 2.0).log() * 2
    sample = sample_posterior(mean, logvar, torch.Generator().manual_seed(0))
    assert sample.mean().item() == pytest.approx(2.0, abs=0.03)
    assert sample.std().item() == pytest.approx(2.0, abs=0.03)


def test_a_generator_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    first = sample_posterior(torch.zeros(4), torch.zeros(4), torch.Generator().manual_seed(1))
    again = sample_posterior(torch.zeros(4), torch.zeros(4), torch.Generator().manual_seed(1))
    assert torch.equal(first, again)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(0)
    drawn = sample_posterior(torch.zeros(4), torch.zeros(4))
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.randn(4))


def test_loss_is_error_plus_weighted_kl():
    model, images = Autoencoder(TINY), torch.rand(2, 1, 8, 8)
    loss, error, kl = autoencoder_loss(model, images, 0.5, torch.Generator().manual_seed(0))
    torch.testing.assert_close(loss, error + 0.5 * kl)
    assert kl > 0


def codec() -> LatentCodec:
    return LatentCodec(Autoencoder(TINY), mean=torch.tensor([1.0, -1.0]), std=torch.tensor([2.0, 0.5]))


def test_codec_normalises_moments_so_that_samples_normalise_too():
    mean, logvar = torch.randn(2, 2, 4, 4), torch.randn(2, 2, 4, 4)
    sample = sample_posterior(mean, logvar, torch.Generator().manual_seed(0))
    normalised = sample_posterior(*codec().normalize(mean, logvar), torch.Generator().manual_seed(0))
    shift, scale = torch.tensor([1.0, -1.0]).view(2, 1, 1), torch.tensor([2.0, 0.5]).view(2, 1, 1)
    torch.testing.assert_close(normalised, (sample - shift) / scale)


def test_codec_survives_a_safe_round_trip(tmp_path):
    ours, latents = codec(), torch.randn(2, 2, 4, 4)
    torch.save(ours.state_dict(), tmp_path / "codec.pt")
    before = torch.get_rng_state()
    other = LatentCodec.from_state_dict(torch.load(tmp_path / "codec.pt", weights_only=True))
    assert torch.equal(before, torch.get_rng_state())
    assert other.fingerprint() == ours.fingerprint()
    assert torch.equal(other.decode(latents), ours.decode(latents))
    assert not any(p.requires_grad for p in other.autoencoder.parameters())
    other.mean += 1
    assert other.fingerprint() != ours.fingerprint()
