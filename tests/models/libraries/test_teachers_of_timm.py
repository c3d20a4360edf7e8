"""Encoders of timm as teachers: their own size, statistics and tokens, as timm itself would feed them."""

import pytest
import torch
from torch import nn

from lit_efficient import AlignmentHead, ConfigurationError, HiddenAlignment, LatentAlignment
from lit_efficient.models.libraries.teachers import Teacher, find_teacher
from tests.callbacks import test_hidden_alignment as hidden
from tests.callbacks import test_latent_alignment as latent
from tests.timm_models import import_timm

SHAPE = {"embed_dim": 24, "depth": 1, "num_heads": 2, "img_size": 32}


def made(name: str, **arguments) -> nn.Module:
    timm = import_timm()
    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, num_classes=7, **arguments).eval()


@pytest.mark.parametrize(
    ("name", "arguments", "prefix"),
    [
        ("vit_small_patch14_reg4_dinov2", {**SHAPE, "img_size": 28}, 5),
        ("deit_tiny_distilled_patch16_224", SHAPE, 2),
        ("swin_tiny_patch4_window7_224", {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "img_size": 56}, 0),
        ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)}, 0),
    ],
)
def test_models_of_timm_get_what_they_were_trained_on_and_give_tokens(name, arguments, prefix):
    model = made(name, **arguments)
    side = arguments.get("img_size", 32)
    images = torch.rand(2, 3, side, side) * 2 - 1
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    assert not torch.equal(mean, torch.full_like(mean, 0.5))
    with torch.no_grad():
        expected = model.forward_features((images / 2 + 0.5 - mean) / std)
    if getattr(model, "output_fmt", None) == "NHWC":
        expected = expected.movedim(-1, 1)
    found = find_teacher(model, [""], who="test", tokens=True).of_images(images)[""]
    torch.testing.assert_close(found, expected[:, prefix:] if expected.ndim == 3 else expected)
    if expected.ndim == 3:
        every = Teacher(model, ["", "patch_embed"], who="test", skip_tokens=0, tokens=True).of_images(images)
        torch.testing.assert_close(every[""], expected)
        assert Teacher(model, ["patch_embed"], who="test").of_images(images)["patch_embed"].shape == found.shape


def test_a_gray_picture_of_another_size_fits():
    model = made("deit_tiny_distilled_patch16_224", **SHAPE)
    assert Teacher(model, ["blocks"], who="test").of_images(torch.rand(2, 1, 16, 16))["blocks"].shape == (2, 4, 24)


def test_the_default_layer_aligns_positions_and_one_vector_is_refused():
    model = made("deit_tiny_distilled_patch16_224", **SHAPE)
    seen = hidden.Gradients()
    hidden.fit(HiddenAlignment(1, model, hidden=8), hidden.batches(images=hidden.IMAGES), [seen], max_steps=1)
    assert -1.0 <= seen.value <= 1.0
    latent.fit(LatentAlignment(model), max_steps=1)
    for fit in (
        lambda: hidden.fit(HiddenAlignment(1, model, "head", hidden=8), hidden.batches(images=hidden.IMAGES)),
        lambda: latent.fit(LatentAlignment(model, "head")),
    ):
        with pytest.raises(ConfigurationError, match=r"one vector for each image, .* Name a layer of tokens or maps"):
            fit()


def test_wrong_widths_are_named():
    model = made("deit_tiny_distilled_patch16_224", **SHAPE)
    head = AlignmentHead(widths=[32, 20])
    with pytest.raises(ConfigurationError, match=r"teacher's layer has features of width 24, .* built for 20"):
        hidden.fit(HiddenAlignment(1, model, hidden=8, head=head), hidden.batches(images=hidden.IMAGES))
    with pytest.raises(ConfigurationError, match=r"teacher's layer has features of width 24, .* built for 20"):
        latent.fit(LatentAlignment(model, head=AlignmentHead(widths=[2, 20])))
    technique = HiddenAlignment(1, model, projection="none", head=AlignmentHead(widths=[24, 24]))
    with pytest.raises(
        ConfigurationError, match="width 32, and without a projection it is compared with features of width 24"
    ):
        hidden.fit(technique, hidden.batches(images=hidden.IMAGES))
    with pytest.raises(ConfigurationError, match="skip_tokens must be a whole number of at least 0"):
        AlignmentHead(skip_tokens=-1)
