"""Codecs over any autoencoder: statistics, states, fingerprints, and number formats."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_efficient import AutoencoderConfig, ConfigurationError, DiffusersModelConfig, LatentCodec, build_autoencoder
from lit_efficient.errors import CheckpointError
from lit_efficient.models.libraries import latent_codec
from lit_efficient.models.libraries.latent_codec import ChannelStatistics
from lit_efficient.models.networks.autoencoder import Autoencoder, sample_posterior
from tests.models.libraries.diffusers_autoencoders import DC, KINDS, KL, TINY, images, small


def reload(state: dict[str, Any], folder: Path) -> LatentCodec:
    torch.save(state, folder / "codec.pt")
    return LatentCodec.from_state_dict(torch.load(folder / "codec.pt", weights_only=True))


def named(folder: Path, fields: dict[str, Any] = KL, seed: int = 0, **arguments: Any) -> DiffusersModelConfig:
    small(fields, seed).network.save_pretrained(folder / "vae")
    return DiffusersModelConfig(str(folder), subfolder="vae", **arguments)


def ours() -> LatentCodec:
    torch.manual_seed(0)
    network = Autoencoder(AutoencoderConfig(latent_channels=2, width=8))
    return LatentCodec(network, torch.tensor([1.0, -1.0]), torch.tensor([2.0, 0.5]))


# Statistics


def test_statistics_in_pieces_are_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, 4, 4, generator=generator) * torch.tensor([1.0, 10.0, 0.1]).view(3, 1, 1) + 1000
    statistics = ChannelStatistics(3)
    for piece in x.split([1, 19, 0, 30]):
        statistics.update(piece)
    whole = x.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(statistics.mean, whole.mean(1), rtol=1e-13, atol=0)
    torch.testing.assert_close(statistics.std, whole.std(1), rtol=1e-11, atol=0)
    assert statistics.count == 800


@pytest.mark.parametrize("fields", [KL, DC])
def test_measured_statistics_make_samples_standard(fields: dict[str, Any]) -> None:
    autoencoder = small(fields)
    batches = [images(4), images(3, 16, 16, seed=1)]  # of two sizes
    codec = LatentCodec.measured(autoencoder, batches, seed=5)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        drawn = [sample_posterior(*autoencoder.encode(batch), generator) for batch in batches]
    rows = torch.cat([z.transpose(0, 1).flatten(1) for z in drawn], dim=1).double()
    torch.testing.assert_close(codec.mean, rows.mean(1).float())
    torch.testing.assert_close(codec.std, rows.std(1).float())
    before = torch.get_rng_state()
    again = LatentCodec.measured(autoencoder, batches, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert again.fingerprint() == codec.fingerprint()


def test_declared_statistics_are_the_pipelines_own() -> None:
    codec, latents = LatentCodec.declared(small(KL)), torch.randn(1, 3, 4, 4)
    mean, logvar = codec.encode(images())
    raw_mean, raw_logvar = codec.moments(images())
    assert logvar is not None
    assert raw_logvar is not None
    torch.testing.assert_close(mean, (raw_mean - 0.25) * 0.5)  # StableDiffusion3Img2ImgPipeline.prepare_latents
    torch.testing.assert_close((0.5 * logvar).exp(), (0.5 * raw_logvar).exp() * 0.5)
    by_hand = codec.autoencoder.network.decode(latents / 0.5 + 0.25).sample  # StableDiffusion3Pipeline.__call__
    torch.testing.assert_close(codec.decode(latents), by_hand.clamp(-1, 1))


def test_what_never_varies_or_was_never_seen_is_refused() -> None:
    dead = small(TINY)
    dead.network.encoder.layers[-1].weight.data.zero_()  # the bias stays: constants that float64 rounds in the mean
    with pytest.raises(ConfigurationError, match=r"channels \[0, 1, 2\] are constant"):
        LatentCodec.measured(dead, [images(3)])
    with pytest.raises(ConfigurationError, match="at least two elements per channel are needed, got 0"):
        LatentCodec.measured(small(TINY), [])
    with pytest.raises(ConfigurationError, match=r"must be 3 values each.* got \(\[0.0\], \[1.0\]\)"):
        LatentCodec(small(TINY), torch.zeros(1), torch.ones(1))
    with pytest.raises(ConfigurationError, match="and std above 0, got"):
        LatentCodec(small(TINY), torch.zeros(3), torch.zeros(3))


# Encoding and decoding


def test_without_a_posterior_there_is_nothing_to_draw() -> None:
    codec = LatentCodec(small(TINY), torch.ones(3), torch.full((3,), 2.0))
    mean, logvar = codec.encode(images())
    assert logvar is None
    before = torch.get_rng_state()
    assert torch.equal(sample_posterior(mean, logvar), mean)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(mean, (codec.moments(images())[0] - 1) / 2)
    torch.testing.assert_close(codec.denormalize(mean), codec.moments(images())[0])


def test_autocast_around_it_changes_no_bit_and_no_gradient_is_kept() -> None:
    codec = LatentCodec.declared(small(KL))
    plain, _ = codec.encode(images())
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = codec.encode(images())
        decoded = codec.decode(inside)
    assert torch.equal(plain, inside)
    assert torch.equal(decoded, codec.decode(plain))
    assert decoded.dtype == plain.dtype == torch.float32
    assert not plain.requires_grad


@pytest.mark.parametrize(
    ("dtype", "force_upcast", "computes_in"),
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.float16, False, torch.float16),
        (torch.float16, True, torch.float32),
    ],
)
def test_the_format_of_the_weights_is_kept_unless_it_overflows(
    dtype: torch.dtype, force_upcast: bool, computes_in: torch.dtype
) -> None:
    autoencoder = small(KL, force_upcast=force_upcast).to(dtype)
    codec = LatentCodec.declared(autoencoder)
    assert {p.dtype for p in codec.autoencoder.parameters()} == {computes_in}
    with torch.no_grad():
        expected, _ = autoencoder.encode(images())
    mean, _ = codec.moments(images())
    assert mean.dtype == torch.float32
    assert torch.equal(mean, expected.float())


def test_images_are_checked_for_ours_too() -> None:
    with pytest.raises(ConfigurationError, match=r"LatentCodec: images must be \[B, 1, H, W\].*got \(1, 3, 16, 16\)"):
        ours().encode(torch.zeros(1, 3, 16, 16))


# States and fingerprints


@pytest.mark.parametrize("kind", [*KINDS, "ours"])
def test_a_state_gives_the_same_codec_and_draws_nothing(kind: str, tmp_path: Path) -> None:
    codec = ours() if kind == "ours" else LatentCodec.declared(small(KINDS[kind]))
    before = torch.get_rng_state()
    other = reload(codec.state_dict(), tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert other.fingerprint() == codec.fingerprint()
    mean, _ = codec.encode(images())
    assert torch.equal(other.encode(images())[0], mean)
    assert torch.equal(other.decode(mean), codec.decode(mean))
    assert not any(p.requires_grad or p.is_meta for p in other.autoencoder.parameters())
    shape = (other.image_channels, other.latent_channels, other.factor)
    assert shape == (codec.image_channels, codec.latent_channels, codec.factor)


def test_states_and_fingerprints_of_ours_are_what_they_were() -> None:
    codec = ours()
    state = codec.state_dict()
    assert set(state) == {"config", "weights", "mean", "std"}
    assert state["config"] == asdict(codec.autoencoder.config)
    digest = hashlib.sha256()
    for name, tensor in sorted({**codec.autoencoder.state_dict(), "mean": codec.mean, "std": codec.std}.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    assert codec.fingerprint() == digest.hexdigest()


def test_a_fingerprint_knows_weights_statistics_and_what_the_configuration_computes() -> None:
    def codec(**changed: Any) -> LatentCodec:
        return LatentCodec(small(KL, **changed), torch.zeros(3), torch.ones(3))

    base = codec().fingerprint()
    assert codec().fingerprint() == base
    assert codec(scaling_factor=0.1, sample_size=64, force_upcast=False).fingerprint() == base  # usage, not function
    assert codec(act_fn="silu").fingerprint() == base  # the default, said
    assert codec(norm_num_groups=2).fingerprint() != base  # the same weights compute something else
    moved = codec()
    moved.autoencoder.network.decoder.conv_out.bias.data[0] += 1e-6
    assert moved.fingerprint() != base
    shifted = codec()
    shifted.std = shifted.std * 1.001
    assert shifted.fingerprint() != base
    assert LatentCodec(small(KL).bfloat16(), torch.zeros(3), torch.ones(3)).fingerprint() != base


def test_a_named_one_is_found_again_and_recognised(tmp_path: Path) -> None:
    spec = named(tmp_path, dtype="bfloat16", config_fields={"shift_factor": 0.5})
    codec = LatentCodec.declared(build_autoencoder(spec))
    state = codec.state_dict(embed=False)
    assert set(state) == {"source", "fingerprint", "mean", "std"}
    before = torch.get_rng_state()
    other = reload(state, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(other.encode(images())[0], codec.encode(images())[0])
    assert other.state_dict(embed=False)["source"] == state["source"]
    named(tmp_path, seed=1)
    with pytest.raises(CheckpointError, match=r"is not the one that has encoded the latents .*revision"):
        reload(state, tmp_path)


def test_large_weights_are_named_and_small_ones_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = LatentCodec.declared(build_autoencoder(named(tmp_path)))
    size = sum(p.numel() * 4 for p in codec.autoencoder.parameters())
    monkeypatch.setattr(latent_codec, "EMBEDDED_BYTES", size)
    assert "weights" in codec.state_dict()
    monkeypatch.setattr(latent_codec, "EMBEDDED_BYTES", size - 1)
    assert "weights" not in codec.state_dict()
    assert "weights" in codec.state_dict(embed=True)
    unnamed = LatentCodec.declared(small(KL))
    assert "weights" in unnamed.state_dict()
    with pytest.raises(ConfigurationError, match="embed must be true"):
        unnamed.state_dict(embed=False)


def test_a_folder_without_the_model_is_a_sentence(tmp_path: Path) -> None:
    state = LatentCodec.declared(build_autoencoder(named(tmp_path))).state_dict(embed=False)
    (tmp_path / "vae").rename(tmp_path / "gone")
    with pytest.raises(ConfigurationError, match=r"no config\.json that can be read"):
        LatentCodec.from_state_dict(state)


def test_random_weights_have_no_source() -> None:
    assert build_autoencoder(DiffusersModelConfig(config_fields=TINY)).source is None
