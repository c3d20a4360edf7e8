import pytest
import torch
from torch import nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.models.libraries.folding import fold_labels, fold_statistics, fold_timesteps

MEAN, STD = torch.tensor([0.7, -1.3, 0.0, 2.0]), torch.tensor([0.5, 2.0, 1.0, 3.0])


def vae(**further):
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(4, 4), latent_channels=4, norm_num_groups=2, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, mid_block_add_attention=False, **further,
    ).eval()  # fmt: skip


@pytest.mark.parametrize("convolutions", [True, False])
@torch.no_grad()
def test_statistics_by_channel_are_folded_exactly(convolutions):
    plain = vae() if convolutions else vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1)
    folded = fold_statistics(plain, MEAN, STD)
    assert (folded.config.scaling_factor, folded.config.shift_factor) == (1.0, 0.0)
    shift, scale = MEAN.view(1, -1, 1, 1), STD.view(1, -1, 1, 1)
    z = torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(folded.decode(z).sample, plain.decode(z * scale + shift).sample, rtol=1e-4, atol=1e-5)
    images = torch.rand(2, 3, 8, 8)
    ours, theirs = folded.encode(images).latent_dist, plain.encode(images).latent_dist
    torch.testing.assert_close(ours.mean, (theirs.mean - shift) / scale, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.std, theirs.std / scale, rtol=1e-4, atol=1e-5)
    assert plain.config.scaling_factor == 0.18215  # the one that was given stays


def test_one_scale_for_all_channels_leaves_the_weights_alone():
    plain = vae()
    folded = fold_statistics(plain, torch.zeros(4), torch.full((4,), 1 / 0.18215))
    assert folded.config.scaling_factor == pytest.approx(0.18215, rel=1e-6)
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in folded.state_dict().items())


def test_an_autoencoder_without_such_convolutions_takes_one_scale_or_none():
    from diffusers import AutoencoderTiny

    tiny = AutoencoderTiny(encoder_block_out_channels=(4, 4), decoder_block_out_channels=(4, 4),
                           num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1))  # fmt: skip
    assert fold_statistics(tiny, torch.zeros(4), torch.full((4,), 2.0)).config.scaling_factor == 0.5
    with pytest.raises(ConfigurationError, match=r"AutoencoderTiny have a mean and a scale for each channel"):
        fold_statistics(tiny, torch.zeros(4), STD)


@pytest.mark.parametrize("flip", [True, False])
@torch.no_grad()
def test_a_timestep_is_taken_for_a_later_one(flip):
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=8, in_channels=2, out_channels=2, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2, flip_sin_to_cos=flip, freq_shift=1,
    ).eval()  # fmt: skip
    nn.init.normal_(model.time_embedding.linear_1.weight)
    x = torch.randn(2, 2, 8, 8)
    later = model(x, torch.tensor([4, 501])).sample
    before = model(x, torch.tensor([3, 500])).sample
    fold_timesteps(model, 1)
    torch.testing.assert_close(model(x, torch.tensor([3, 500])).sample, later, rtol=1e-4, atol=1e-4)
    assert (later - before).abs().max() > 0.01
    with pytest.raises(ConfigurationError, match="Linear has no sinusoidal embedding of the time"):
        fold_timesteps(nn.Linear(1, 1), 1)


@torch.no_grad()
def test_no_label_moves_to_where_the_pipeline_looks_for_it():
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=2, num_layers=2, sample_size=4, patch_size=2,
        num_embeds_ada_norm=3,
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    moved = fold_labels(model, 1000)
    x, t = torch.randn(4, 2, 4, 4), torch.tensor([5, 5, 5, 5])
    expected = model(x, t, torch.tensor([0, 1, 2, 3])).sample
    torch.testing.assert_close(moved(x, t, torch.tensor([0, 1, 2, 1000])).sample, expected)
    with pytest.raises(ConfigurationError, match="class 2 for no label, and the network has 3 classes"):
        fold_labels(model, 2)
