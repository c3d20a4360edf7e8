"""Tests of the error of rounding, and of channel statistics against drawn samples."""

import pytest
import torch

from lit_efficient.data.latents.latent_format import (
    Moments,
    decode_row,
    dequantize,
    encode_rows,
    normalize_item,
    quantize,
)
from lit_efficient.models.libraries.autoencoders import build_autoencoder
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.networks.autoencoder import AutoencoderConfig, sample_posterior


def latents(rows: int = 5) -> torch.Tensor:
    values = torch.randn(rows, 3, 6, 4, generator=torch.Generator().manual_seed(0))
    return values * torch.tensor([0.01, 1.0, 30.0]).view(-1, 1, 1) + torch.tensor([0.0, -4.0, 100.0]).view(-1, 1, 1)


def test_a_byte_a_number_is_off_by_half_a_step_of_its_channel_at_most():
    values = latents()
    codes, scale, zero = quantize(values)
    span = values.amax((0, 2, 3)) - values.amin((0, 2, 3))
    assert codes.dtype == torch.uint8
    torch.testing.assert_close(scale, span / 255)
    error = (dequantize(codes, scale, zero) - values).abs().amax((0, 2, 3))
    assert (error <= 0.5 * scale * (1 + 1e-4)).all()
    assert (error > 0.4 * scale).all()  # and not by less: all codes are used
    assert codes.amin((0, 2, 3)).tolist() == [0, 0, 0]
    assert codes.amax((0, 2, 3)).tolist() == [255, 255, 255]


def test_a_constant_channel_is_kept_exactly():
    values = torch.full((2, 2, 3, 3), 0.3)
    values[:, 1] = torch.arange(9.0).view(3, 3)
    codes, scale, zero = quantize(values)
    assert torch.equal(dequantize(codes, scale, zero)[:, 0], values[:, 0])


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 2**-11), ("bfloat16", 2**-8), ("float32", 0.0)])
def test_floats_are_rounded_by_no_more_than_is_stated(dtype, bound):
    values = latents()
    stored = encode_rows(values, values.abs().log(), "posterior", dtype)
    assert stored["mean"].element_size() == {"float32": 4}.get(dtype, 2)
    read = decode_row(stored)
    normal = values.abs() > 2**-14  # float16 has no smaller ones with all its digits
    error = ((read["mean"] - values) / values)[normal].abs().max()
    assert bound / 2 < error <= bound if bound else torch.equal(read["mean"], values)


def test_what_is_stored_of_each_kind_of_encoder():
    values = latents()
    assert encode_rows(values, values, "posterior", "float32").keys() == {"mean", "logvar"}
    assert encode_rows(values, None, "posterior", "float32").keys() == {"latents"}
    assert encode_rows(values, values, "int8", "float32").keys() == {"latents", "scale", "zero"}


def test_moments_are_those_of_draws_and_of_any_cut():
    mean, logvar = latents(16), torch.zeros(16, 3, 6, 4) - 1.0
    generator = torch.Generator().manual_seed(1)
    draws = torch.cat([sample_posterior(mean, logvar, generator) for _ in range(200)])
    whole = Moments.of(mean, logvar)
    found, deviation = whole.mean_and_std()
    torch.testing.assert_close(torch.tensor(found), draws.mean((0, 2, 3)), rtol=0.01, atol=0.01)
    torch.testing.assert_close(torch.tensor(deviation), draws.std((0, 2, 3)), rtol=0.01, atol=0.0)
    parts = Moments.join([Moments.of(mean[:3], logvar[:3]), Moments.of(mean[3:], logvar[3:])])
    assert parts.count == whole.count == 16 * 24
    torch.testing.assert_close(parts.mean_and_std()[1], deviation, rtol=1e-12, atol=0.0)


def test_normalising_an_item_is_what_the_codec_does_to_a_batch():
    mean, logvar, statistics = (
        latents(),
        latents().neg(),
        (torch.tensor([0.1, -4.2, 90.0]), torch.tensor([0.3, 1.7, 31.0])),
    )
    codec = LatentCodec(build_autoencoder(AutoencoderConfig(1, 3, 8)), *statistics)
    expected = codec.normalize(mean, logvar)
    item = normalize_item({"mean": mean[2], "logvar": logvar[2], "labels": 7}, *statistics)
    assert torch.equal(item["mean"], expected[0][2])
    assert torch.equal(item["logvar"], expected[1][2])
    assert item["labels"] == 7
