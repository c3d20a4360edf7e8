"""Tests of sets of images: roles, weights, masks and conditions, against sums written down in the test."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from lit_efficient import (
    AspectBuckets,
    AutoencoderConfig,
    DiTConfig,
    ImageData,
    ImageSet,
    ImageView,
    KeyedBatchSampler,
    LatentData,
    LatentDiffusion,
    Samples,
)
from lit_efficient.errors import ConfigurationError
from lit_efficient.tasks.autoencoding import Autoencoding
from tests import support
from tests.data.images.image_kit import number_of, write

VIEW = ImageView(32, buckets=AspectBuckets(8, 2.0), crop="random", horizontal_flip=True, variants=6)


def ready(train, view=None, **arguments):
    data = ImageData(train=train, view=view or ImageView(16), **{"batch_size": 4, "val_fraction": 0} | arguments)
    data.prepare_data()
    data.setup("fit")
    return data


def painted(folder, count=6, kind="RGB"):
    """Write noise whose red channel is its mask and whose green channel is its condition."""
    random = np.random.default_rng(0)
    for name in ("images", "masks", "conditions"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        height, width = [(40, 40), (48, 64), (64, 40)][number % 3]
        # Blocks, because kernels of images and masks differ at edges.
        blocks = random.integers(0, 2, (height // 8, width // 8, 3)).astype(np.uint8) * 255
        pixels = blocks.repeat(8, 0).repeat(8, 1)
        image = Image.fromarray(pixels)
        if kind == "RGBA":
            image.putalpha(Image.fromarray(pixels[..., 0]))
        image.save(folder / "images" / f"{number}.png")
        Image.fromarray(pixels[..., 0]).save(folder / "masks" / f"{number}.png")
        green = Image.fromarray(pixels[..., 1]).resize((width // 2, height // 2), Image.BOX)
        green.convert("RGB").save(folder / "conditions" / f"{number}.jpg", quality=100)
    return folder


@pytest.mark.parametrize("where", ["folders", "beside"])
def test_masks_and_conditions_have_the_crop_and_flip_of_their_image(tmp_path, where):
    painted(tmp_path)
    named = {"mask": str(tmp_path / "masks"), "condition": str(tmp_path / "conditions")}
    if where == "beside":
        for name, ending in (("masks", "masklabel"), ("conditions", "condlabel")):
            for file in (tmp_path / name).iterdir():
                file.rename(tmp_path / "images" / f"{file.stem}-{ending}{file.suffix}")
        named = {"mask": "masklabel", "condition": "condlabel"}
    data = ready([ImageSet(str(tmp_path / "images"), **named)], VIEW)
    seen = set()
    for epoch in range(4):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            assert batch["mask"].shape == (len(batch["index"]), 1, *batch["images"].shape[2:])
            assert batch["condition"].shape == batch["images"].shape
            seen |= set(zip(batch["index"].tolist(), batch["variant"].tolist()))
            for image, mask, condition in zip(batch["images"], batch["mask"], batch["condition"]):
                off_mask = (image[0] - (2 * mask[0] - 1)).abs()
                off_condition = (image[1] - condition[1]).abs()
                # Off by less than a pixel, at the edges of blocks alone.
                assert off_mask.mean() < 0.1
                assert off_condition.mean() < 0.2
    assert len(data.dataset) == 6
    assert len(seen) > 12


def test_opacity_is_a_mask_and_other_sets_have_none(tmp_path):
    painted(tmp_path, kind="RGBA")
    write(tmp_path / "plain", ["0.png", "1.png"])
    data = ready([ImageSet(str(tmp_path / "images"), mask="alpha"), str(tmp_path / "plain")])
    whole = ready([ImageSet(str(tmp_path / "images"), mask=str(tmp_path / "masks"))])
    for index in range(6):
        assert torch.equal(data.dataset[index, 0]["mask"], whole.dataset[index, 0]["mask"])
    assert torch.equal(data.dataset[7, 0]["mask"], torch.ones(1, 16, 16))
    with pytest.raises(ConfigurationError, match=r"mask is alpha, but no image of .* has transparent pixels"):
        ready([ImageSet(str(tmp_path / "plain"), mask="alpha")])


def test_class_images_have_the_weight_of_the_prior_and_are_not_held_out(tmp_path):
    write(tmp_path / "own", [f"{n}.png" for n in range(6)])
    write(tmp_path / "class", [f"{n}.png" for n in range(20)])
    sets = [
        ImageSet(str(tmp_path / "class"), role="prior", prompt="a dog", weight=0.4, repeats=2),
        ImageSet(str(tmp_path / "own"), prompt="a photo", trigger="sks", repeats=5),
    ]
    data = ready(sets, val_fraction=0.3, batch_size=7)
    held = len(data.val_index)
    assert held
    assert min(data.val_index) >= 20
    losses = torch.randn(26).square()
    own, prior, total = [], [], 0.0
    for batch in data.train_dataloader():
        for index, weight, caption in zip(batch["index"].tolist(), batch["loss_weight"].tolist(), batch["captions"]):
            total += weight * float(losses[index])
            (prior if index < 20 else own).append(float(losses[index]))
            assert caption == ("a dog" if index < 20 else "sks, a photo")
    assert (len(own), len(prior)) == (5 * (6 - held), 40)
    assert total / len(own + prior) == pytest.approx(np.mean(own) + 0.4 * np.mean(prior))
    assert "loss_weight" not in next(iter(data.val_dataloader()))


def test_repeats_show_further_variants(tmp_path):
    write(tmp_path, ["0.png"])
    view = ImageView(16, crop="random", variants=4)
    data = ready([ImageSet(str(tmp_path), repeats=8)], view, batch_size=8)
    for epoch in range(3):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        (batch,) = loader
        assert sorted(batch["variant"].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_set_has_its_own_view(tmp_path):
    write(tmp_path / "a", ["0.png", "1.png"])
    write(tmp_path / "b", ["2.png", "3.png"])
    turned = ImageView(24, horizontal_flip=True, variants=2)
    data = ready([str(tmp_path / "a"), ImageSet(str(tmp_path / "b"), view=turned)])
    still, flipped = ready(str(tmp_path / "a")), ready(str(tmp_path / "b"), turned)
    assert data.variants == 2
    for variant in range(2):
        assert torch.equal(data.dataset[1, variant]["images"], still.dataset[1, 0]["images"])
        assert torch.equal(data.dataset[3, variant]["images"], flipped.dataset[1, variant]["images"])
    assert data.bucket_of(0) == (16, 16)
    assert data.bucket_of(3) == (24, 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": "masks"}, "1 of 6 images have no mask in .*masks, the first is .*2.png"),
        ({"condition": "conditions"}, "has 32 x 20 pixels, which is another aspect ratio than that of its image"),
        ({"mask": "nothing"}, "mask is '.*nothing', which is no folder"),
        ({"captions": "texts"}, "6 of 6 images have no caption in .*texts"),
    ],
)
def test_what_does_not_fit_an_image_is_refused(tmp_path, change, message):
    painted(tmp_path)
    (tmp_path / "masks" / "2.png").unlink()
    shutil.copy(tmp_path / "conditions" / "2.jpg", tmp_path / "conditions" / "1.jpg")
    (tmp_path / "texts").mkdir()
    change = {name: str(tmp_path / value) for name, value in change.items()}
    with pytest.raises(ConfigurationError, match=message):
        ready([ImageSet(str(tmp_path / "images"), **change)])


def test_masks_beside_images_are_not_trained_on_as_images(tmp_path):
    write(tmp_path, ["0.png", "0-masklabel.png"])
    with pytest.raises(ConfigurationError, match=r"1 files like 0-masklabel.png, .* mask: masklabel}"):
        ready(str(tmp_path))


def test_captions_come_from_a_folder_or_the_prompt(tmp_path):
    write(tmp_path / "a", ["x/0.png", "x/1.png"])
    (tmp_path / "texts" / "x").mkdir(parents=True)
    (tmp_path / "texts" / "x" / "1.txt").write_text("one")
    data = ready([ImageSet(str(tmp_path / "a"), captions=str(tmp_path / "texts"), prompt="a thing", trigger="sks")])
    captions = {number_of(item["images"]): item["captions"] for item in (data.dataset[i, 0] for i in range(2))}
    assert captions == {0: "sks, a thing", 1: "sks, one"}


def test_a_task_that_would_ignore_a_role_refuses_it(tmp_path):
    painted(tmp_path / "own")
    data = ImageData([ImageSet(str(tmp_path / "own" / "images"), mask=str(tmp_path / "own" / "masks"))], val_fraction=0)
    run = support.trainer(default_root_dir=tmp_path, max_steps=1)
    with pytest.raises(ConfigurationError, match="batches have mask, which Autoencoding does not use"):
        run.fit(Autoencoding(AutoencoderConfig(latent_channels=2, width=8)), data)


def latents(tmp_path, **arguments):
    named = ImageSet(str(tmp_path / "images"), **arguments)
    images = ImageData([named], view=ImageView(16), batch_size=6, val_fraction=0)
    data = LatentData(images, AutoencoderConfig(image_channels=3, latent_channels=2, width=8), cached=False)
    data.prepare_data()
    data.setup("fit")
    return data


def step_of(module, batch):
    """Return what a training step gives, and its gradient."""
    torch.manual_seed(3)
    module.zero_grad()
    output = module.training_step(batch, 0)
    output["loss"].backward()
    return output, torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def task(codec=None):
    backbone = DiTConfig(channels=2, size=4, patch_size=2, width=16, depth=1, heads=2, num_classes=0)
    module = LatentDiffusion(backbone, samples=Samples(0), guidance_scale=1.0)
    module.configure_model()
    for parameter in module.parameters():  # an untrained network gives zeros
        torch.nn.init.normal_(parameter, std=0.1)
    module.log = lambda *_, **__: None
    module.codec = codec
    return module


def test_the_loss_is_weighted_at_the_positions_and_samples_as_the_formula_says(tmp_path):
    painted(tmp_path)
    data = latents(tmp_path, mask=str(tmp_path / "masks"), weight=3.0)
    (batch,) = data.train_dataloader()
    module = task(data.codec)
    output, _ = step_of(module, batch)
    assert batch["loss_weight"].tolist() == [3.0] * 6
    factor = data.codec.factor
    expected = []
    for row in range(6):
        error = (output["predicted"][row] - output["target"][row]).square()
        mask = batch["mask"][row, 0].reshape(16 // factor, factor, 16 // factor, factor).mean((1, 3))
        expected.append(3.0 * (mask * error).mean())
    torch.testing.assert_close(output["sample_loss"], torch.stack(expected))
    torch.testing.assert_close(output["loss"], torch.stack(expected).sum() / 6)
    wrong = {**batch, "mask": torch.ones(6, 1, 8, 16), "mean": torch.zeros(6, 2, 4, 4)}
    with pytest.raises(ConfigurationError, match="shape of mask must be"):
        module.training_step(wrong, 0)


def test_a_batch_of_images_and_class_images_has_the_loss_of_dreambooth():
    """As in train_dreambooth.py of diffusers: the batch is cut in two, and the means are added."""
    module = task()
    batch = {"latents": torch.randn(8, 2, 4, 4), "loss_weight": torch.tensor([2.0] * 4 + [2.0 * 0.7] * 4)}
    output, gradient = step_of(module, batch)
    torch.manual_seed(3)
    module.zero_grad()
    plain = module.training_step({"latents": batch["latents"]}, 0)
    own_predicted, prior_predicted = plain["predicted"].chunk(2)
    own_target, prior_target = plain["target"].chunk(2)
    loss = F.mse_loss(own_predicted, own_target) + 0.7 * F.mse_loss(prior_predicted, prior_target)
    loss.backward()
    torch.testing.assert_close(output["loss"], loss, rtol=1e-5, atol=0)
    expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_ranks_give_each_image_of_an_incomplete_batch_the_weight_of_a_full_one(tmp_path):
    write(tmp_path, [f"{n}.png" for n in range(13)])
    data = ready(str(tmp_path), VIEW)
    losses = torch.randn(13).square()
    for ranks in (1, 2, 3):
        total = 0.0
        loaders = [
            KeyedBatchSampler(data.train_index, 2, data.bucket_of, 6, num_replicas=ranks, rank=rank, weighted=True)
            for rank in range(ranks)
        ]
        for parts in zip(*loaders, strict=True):
            for part in parts:
                weighted = [weight * losses[index] for weight, (index, _) in zip(part.weights, part)]
                total += float(sum(weighted) / len(part) / ranks)  # mean over rows, then over processes
        assert total == pytest.approx(float(losses.sum()) / (2 * ranks), rel=1e-5)
