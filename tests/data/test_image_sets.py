"""Tests of sets of images: roles, weights, masks and conditions, against sums written down in the test."""

import io
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from lit_efficient import (
    AspectBuckets,
    AutoencoderConfig,
    CaptionRules,
    DiTConfig,
    ImageColumns,
    ImageCondition,
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
from lit_efficient.tasks.image_inputs import image_input
from lit_efficient.tasks.latent_source import with_posterior
from tests import support
from tests.data.images.image_kit import number_of, write, write_metadata
from tests.data.test_latent_cache import WORDS

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


@pytest.mark.parametrize("kind", ["parquet", "saved", "tar"])
def test_masks_and_conditions_are_columns_of_a_table(tmp_path, kind):
    painted(tmp_path / "files")
    names = {"image": "images", "conditioning_image": "conditions", "mask": "masks"}
    rows = {name: [] for name in names}
    for number in range(6):
        for name, folder in names.items():
            (file,) = (tmp_path / "files" / folder).glob(f"{number}.*")
            rows[name].append(file.read_bytes())
    columns = {"mask": "mask", "condition": "conditioning_image"}
    if kind == "tar":
        with tarfile.open(tmp_path / "table.tar", "w") as archive:
            for number in range(6):
                for name, suffix in (("image", "png"), ("conditioning_image", "condition.jpg"), ("mask", "mask.png")):
                    entry = tarfile.TarInfo(f"{number:02d}.{suffix}")
                    entry.size = len(rows[name][number])
                    archive.addfile(entry, io.BytesIO(rows[name][number]))
        columns = {"mask": "mask.png", "condition": "condition.jpg"}
        table = tmp_path / "table.tar"
    else:
        datasets = pytest.importorskip("datasets")
        made = datasets.Dataset.from_dict(rows)
        for name in names:
            made = made.cast_column(name, datasets.Image())
        table = tmp_path / ("table.parquet" if kind == "parquet" else "table")
        (made.to_parquet if kind == "parquet" else made.save_to_disk)(str(table))
    found = ready([ImageSet(str(table), **columns)], VIEW)
    named = {"mask": str(tmp_path / "files" / "masks"), "condition": str(tmp_path / "files" / "conditions")}
    wanted = ready([ImageSet(str(tmp_path / "files" / "images"), **named)], VIEW)
    for index in range(6):
        for variant in (0, 3):
            one, other = found.dataset[index, variant], wanted.dataset[index, variant]
            for name in ("images", "mask", "condition"):
                assert torch.equal(one[name], other[name])


@pytest.mark.parametrize("kind", ["metadata", "parquet", "tar"])
def test_weights_are_a_column(tmp_path, kind):
    write(tmp_path / "own", [f"{n}.png" for n in range(4)])
    rows = [{"image": (tmp_path / "own" / f"{n}.png").read_bytes(), "weight": n / 2} for n in range(4)]
    named, column = tmp_path / "own", "weight"
    if kind == "metadata":
        write_metadata(named, [{"file_name": f"{n}.png", "weight": n / 2} for n in range(4)], "csv")
    elif kind == "parquet":
        named = tmp_path / "own.parquet"
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(str(named))
    else:
        named, column = tmp_path / "own.tar", "json.weight"
        with tarfile.open(named, "w") as archive:
            for number, row in enumerate(rows):
                for suffix, content in (("png", row["image"]), ("json", b'{"weight": %f}' % row["weight"])):
                    entry = tarfile.TarInfo(f"{number}.{suffix}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    columns = ImageColumns(image="image" if kind == "parquet" else "auto", weight=column)
    data = ready([ImageSet(str(named), weight=3.0)], columns=columns, val=str(tmp_path / "own"))
    assert data.roles == ("loss_weight",)
    for batch in data.train_dataloader():
        for image, weight in zip(batch["images"], batch["loss_weight"].tolist()):
            assert weight == pytest.approx(3.0 * number_of(image) / 2)
    with pytest.raises(ConfigurationError, match=r"columns.weight is .other."):
        ready(str(named), columns=ImageColumns(weight="other"))


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
    write(tmp_path / "class", [f"{n}.png" for n in range(26)])
    for number in range(6):
        (tmp_path / "class" / f"{number}.png").unlink()
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


def test_an_image_of_several_sets_is_held_out_of_all_of_them(tmp_path):
    write(tmp_path / "a", [f"{n}.png" for n in range(8)])
    write(tmp_path / "b", [f"other {n}.png" for n in range(8)])
    write(tmp_path / "class", [f"{n}.png" for n in range(12)])
    sets = [
        ImageSet(str(tmp_path / "class"), role="prior", weight=0.5),
        ImageSet(str(tmp_path / "a"), repeats=2),
        ImageSet(str(tmp_path / "b")),
    ]
    for seed in range(4):
        data = ready(sets, val_fraction=0.3, test_fraction=0.2, seed=seed)
        numbers = [number_of(data.dataset[index, 0]["images"]) for index in range(len(data.dataset))]
        parts = [{numbers[index] for index in part} for part in (data.train_index, data.val_index, data.test_index)]
        assert set.union(*parts) == set(range(12))
        assert sum(map(len, parts)) == 12
        assert min(*data.val_index, *data.test_index) >= 12
        losses = torch.arange(28.0)
        own, prior, total = [], [], 0.0
        for batch in data.train_dataloader():
            total += float((batch["loss_weight"] * losses[batch["index"]]).sum())
            for index in batch["index"].tolist():
                (prior if index < 12 else own).append(float(losses[index]))
        assert total / len(own + prior) == pytest.approx(np.mean(own) + 0.5 * np.mean(prior))


def test_repeats_show_further_variants(tmp_path):
    write(tmp_path, ["0.png"])
    view = ImageView(16, crop="random", variants=4)
    data = ready([ImageSet(str(tmp_path), repeats=8)], view, batch_size=8)
    for epoch in range(3):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        (batch,) = loader
        assert sorted(batch["variant"].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("given", [{"role": "prior"}, {"repeats": 2}, {"weight": 0.5}])
def test_sets_for_validation_have_nothing_that_is_for_training(given):
    with pytest.raises(ConfigurationError, match="a set of val must be without role, repeats and weight"):
        ImageData("x", val=[ImageSet("y", **given)])


def test_workers_pass_weights_on(tmp_path):
    write(tmp_path, [f"{n}.png" for n in range(7)])
    alone, helped = (ready(str(tmp_path), VIEW, num_workers=workers).train_dataloader() for workers in (0, 1))
    weights = [batch["loss_weight"].tolist() for batch in alone]
    assert weights == [batch["loss_weight"].tolist() for batch in helped]
    assert min(map(min, weights)) < 1.0


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


def test_masks_are_found_behind_links_to_folders(tmp_path):
    painted(tmp_path / "real", 2)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dog").symlink_to(tmp_path / "real" / name)
    found = [
        ready([ImageSet(str(folder / "images"), mask=str(folder / "masks"))], VIEW).dataset[1, 0]["mask"]
        for folder in (tmp_path, tmp_path / "real")
    ]
    assert torch.equal(*found)


def test_a_mask_of_zeros_and_ones_is_refused(tmp_path):
    painted(tmp_path, 1)
    mask = tmp_path / "masks" / "0.png"
    Image.fromarray((np.asarray(Image.open(mask)) > 0).astype(np.uint8)).save(mask)
    data = ready([ImageSet(str(tmp_path / "images"), mask=str(tmp_path / "masks"))])
    with pytest.raises(ConfigurationError, match=r"masks/0.png cannot be read: its brightest pixels are 1"):
        next(iter(data.train_dataloader()))


@pytest.mark.parametrize("damage", ["mask", "mask of 0 and 1", "condition", "all"])
def test_images_whose_mask_or_condition_is_damaged_are_left_out(tmp_path, damage):
    painted(tmp_path)
    for number in range(6):
        (tmp_path / "images" / f"{number}.txt").write_text(f"number {number}")
    named = {"mask": str(tmp_path / "masks"), "condition": str(tmp_path / "conditions")}
    whole = ready([ImageSet(str(tmp_path / "images"), **named)], VIEW)
    file = tmp_path / ("conditions/1.jpg" if damage == "condition" else "masks/1.png")
    if damage == "mask of 0 and 1":
        Image.fromarray((np.asarray(Image.open(file)) > 0).astype(np.uint8)).save(file)
    else:
        file.write_bytes(file.read_bytes()[:60])
        with pytest.raises(ConfigurationError, match=rf"{file.name}.*\n.*leave them out with skip_unreadable: true"):
            ready([ImageSet(str(tmp_path / "images"), **named)], VIEW)
    kept = [0, 2, 3, 4, 5]
    if damage == "all":
        (tmp_path / "images" / "4.png").write_bytes(b"no image")
        (tmp_path / "conditions" / "5.jpg").write_bytes(b"no image")
        kept = [0, 2, 3]
    with pytest.warns(UserWarning, match="left out 1 of 6 images that cannot be read"):
        data = ready([ImageSet(str(tmp_path / "images"), **named)], VIEW, skip_unreadable=True)
    assert len(data.dataset) == len(kept)
    for index, number in enumerate(kept):
        found, wanted = data.dataset[index, 0], whole.dataset[number, 0]
        assert found["captions"] == f"number {number}"
        for name in ("images", "mask", "condition", "sizes"):
            assert torch.equal(found[name], wanted[name])


@pytest.mark.parametrize("relative", [True, False])
def test_masks_in_a_folder_of_the_images_are_not_trained_on(tmp_path, monkeypatch, relative):
    painted(tmp_path)
    shutil.move(tmp_path / "masks", tmp_path / "images" / "masks")
    monkeypatch.chdir(tmp_path)
    data = ready(
        [ImageSet("images" if relative else str(tmp_path / "images"), mask=str(tmp_path / "images" / "masks"))]
    )
    assert len(data.dataset) == 6


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


RULES = CaptionRules(variants=4, shuffle=True, keep=1, dropout=0.25)


def of_all_roles(tmp_path, cached=True, seed=0, val_fraction=0.2, **changed):
    """Return latents of a set with everything, and of class images."""
    given = {"mask": str(tmp_path / "masks"), "condition": str(tmp_path / "conditions"), "trigger": "sks"}
    given |= {"captions": str(tmp_path / "texts"), "caption_rules": RULES, "repeats": 4}
    given |= {"view": ImageView(16, horizontal_flip=True, variants=2)}
    prior = ImageSet(
        str(tmp_path / "class"), role="prior", prompt="a thing", condition=str(tmp_path / "class"), weight=0.5
    )
    sets = [ImageSet(**{"images": str(tmp_path / "images")} | given | changed), prior]
    images = ImageData(sets, view=ImageView(16), batch_size=5, val_fraction=val_fraction, seed=seed)
    autoencoder = AutoencoderConfig(image_channels=3, latent_channels=2, width=8)
    data = LatentData(images, autoencoder, WORDS, folder=str(tmp_path / "cache"), cached=cached)
    data.images.prepare_data()
    data.images.setup("fit")
    return data


def files_of_all_roles(tmp_path):
    painted(tmp_path)
    write(tmp_path / "class", ["7.png", "8.png"])
    (tmp_path / "texts").mkdir()
    for number in range(6):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"a {number}, blue, red, round")
    return tmp_path


def test_a_cache_holds_masks_conditions_and_the_variants_of_captions(tmp_path):
    files_of_all_roles(tmp_path)
    data = of_all_roles(tmp_path)
    data.write_cache(shard_rows=3, batch_size=2)
    data.prepare_data()
    data.setup("fit")
    live = of_all_roles(tmp_path, cached=False)
    live.setup("fit")
    live.codec.mean, live.codec.std = data.codec.mean, data.codec.std
    assert data.variants == 8
    captions = set()
    for epoch in range(12):
        loaders = [data.train_dataloader(), live.train_dataloader()]
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        for cached, images in zip(*loaders, strict=True):
            encoded = with_posterior(images, live.codec)
            assert cached["captions"] == images["captions"]
            captions |= set(cached["captions"])
            for name in ("mean", "logvar"):
                torch.testing.assert_close(cached[name], encoded[name], rtol=0, atol=1e-6)
            for name in ("mask", "condition", "loss_weight", "index", "variant", "sizes"):
                assert torch.equal(cached[name], encoded[name])
            text, mask, _ = live.text_encoder.encode(cached["captions"])
            torch.testing.assert_close(cached["text"], text)
            assert torch.equal(cached["text_mask"], mask)
    assert "" in captions
    assert len(captions) > 10


def test_a_cache_holds_conditions_as_latents_for_editing_models(tmp_path):
    painted(tmp_path)
    named = ImageSet(str(tmp_path / "images"), condition=str(tmp_path / "conditions"))
    images = ImageData([named], view=ImageView(16), batch_size=6, val_fraction=0)
    images.prepare_data()
    images.setup("fit")
    autoencoder = AutoencoderConfig(image_channels=3, latent_channels=2, width=8)
    data = LatentData(images, autoencoder, folder=str(tmp_path / "cache"), condition="latents")
    data.write_cache(batch_size=6)
    data.prepare_data()
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert "condition" not in batch
    pixels = torch.stack([images.dataset[index, 0]["condition"] for index in batch["index"].tolist()])
    spec = ImageCondition("sequence")
    wanted, _ = image_input({"condition": pixels}, spec, data.codec, torch.device("cpu"))
    found, _ = image_input(batch, spec, data.codec, torch.device("cpu"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    other = LatentData(images, autoencoder, folder=str(tmp_path / "cache"))
    with pytest.raises(ConfigurationError, match="  condition: the cache has 'latents'"):
        other.prepare_data()


@pytest.mark.parametrize("cached", [True, False])
def test_four_photographs_train_without_validation(tmp_path, cached):
    write(tmp_path / "images", [f"{n}.png" for n in range(4)])
    images = ImageData(str(tmp_path / "images"), view=ImageView(16), batch_size=2, val_fraction=0)
    autoencoder = AutoencoderConfig(image_channels=3, latent_channels=2, width=8)
    data = LatentData(images, autoencoder, folder=str(tmp_path / "cache"), cached=cached, build=cached)
    backbone = DiTConfig(channels=2, size=4, patch_size=2, width=16, depth=1, heads=2, num_classes=0)
    module = LatentDiffusion(backbone, samples=Samples(0), guidance_scale=1.0)
    run = support.trainer(default_root_dir=tmp_path, max_epochs=2, max_steps=-1, num_sanity_val_steps=2)
    run.fit(module, data)
    assert run.global_step == 4


def test_every_variant_of_captions_resumes_exactly(tmp_path):
    """Workers, and a loader that begins in the middle of an epoch, give what an uninterrupted one gives."""
    files_of_all_roles(tmp_path)
    data = of_all_roles(tmp_path).images
    whole = data.train_dataloader()
    whole.sampler.set_epoch(3)
    expected = list(whole)
    data.num_workers = 1
    resumed = data.train_dataloader()
    resumed.sampler.set_epoch(3)
    resumed.sampler.first = 2
    rest = list(resumed)
    assert len(rest) == len(expected) - 2
    for found, wanted in zip(rest, expected[2:]):
        assert found["captions"] == wanted["captions"]
        for name in ("images", "mask", "condition", "loss_weight", "variant"):
            assert torch.equal(found[name], wanted[name])
    # Two processes see together what one with twice the batch sees.
    keys = [list(KeyedBatchSampler(data.train_index, 5, None, 8, num_replicas=2, rank=rank)) for rank in range(2)]
    alone = list(KeyedBatchSampler(data.train_index, 10, None, 8))
    for first, second, both in zip(*keys, alone):
        assert set(first + second) == set(both)


STALE = {
    "images.masks": [{"mask": None}, "masks/1.png"],
    "images.conditions": ["conditions/1.jpg"],
    "images.data": ["images/1.png"],
    "images.annotations": [
        "texts/1.txt",
        {"trigger": "other"},
        {"caption_rules": CaptionRules(variants=4, shuffle=True, keep=2, dropout=0.25)},
        {"caption_rules": CaptionRules(variants=3, shuffle=True, keep=1, dropout=0.25)},
        {"caption_rules": CaptionRules(variants=4, shuffle=True, keep=1)},
        {"seed": 5},  # of the tags' order
    ],
    "images.views": [{"view": ImageView(16, crop="random", variants=2)}, {"view": None}],
    "images.variants": [{"view": ImageView(16)}],
    "split": [{"val_fraction": 0.5}],
}


@pytest.mark.turns(4, family="stale")
@pytest.mark.parametrize(("entry", "change"), [(entry, change) for entry in STALE for change in STALE[entry]])
def test_a_cache_of_other_settings_or_files_is_refused(tmp_path, entry, change):
    files_of_all_roles(tmp_path)
    of_all_roles(tmp_path).write_cache()
    if isinstance(change, dict):
        data = of_all_roles(tmp_path, **change)
    else:
        file = tmp_path / change
        if file.suffix == ".txt":
            file.write_text("another")
        else:
            Image.open(file).transpose(Image.Transpose.ROTATE_180).save(file)
        data = of_all_roles(tmp_path)
    with pytest.raises(ConfigurationError, match=f"  {entry}: the cache has"):
        data.prepare_data()


def test_weights_and_repeats_need_no_other_cache(tmp_path):
    files_of_all_roles(tmp_path)
    of_all_roles(tmp_path).write_cache()
    data = of_all_roles(tmp_path, weight=3.0, repeats=2)
    data.prepare_data()
    data.setup("fit")
    batches = list(data.train_dataloader())
    own = [w for b in batches for w, i in zip(b["loss_weight"].tolist(), b["index"].tolist()) if i < 6]
    prior = [w for b in batches for w, i in zip(b["loss_weight"].tolist(), b["index"].tolist()) if i >= 6]
    rows = len(own) + len(prior)
    assert own == pytest.approx([3.0 * rows / len(own)] * len(own))
    assert prior == pytest.approx([0.5 * rows / len(prior)] * len(prior))
    assert len(own) == 2 * (6 - len(data.images.val_index))


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


def test_variants_of_captions_shuffle_tags_after_those_that_are_kept():
    rules = CaptionRules(variants=40, shuffle=True, keep=1, dropout=0.2)
    captions = [rules.caption(["one, two,three, four"], "sks", 7, number, 0) for number in range(40)]
    assert captions[0] == "sks, one, two,three, four"
    assert captions.count("") in (8, 9)
    shown = {caption for caption in captions[1:] if caption}
    assert len(shown) == 6  # all orders of three tags
    for caption in shown:
        first, second, *rest = caption.split(", ")
        assert (first, second, sorted(rest)) == ("sks", "one", ["four", "three", "two"])
    again = [rules.caption(["one, two,three, four"], "sks", 7, number, 0) for number in range(40)]
    assert again == captions
    empty = [
        [rules.caption(["x"], None, index, number, seed) for number in range(40)].count("")
        for index in range(100)
        for seed in range(2)
    ]
    assert np.mean(empty) == pytest.approx(8.0, abs=0.1)


def test_several_captions_of_an_image_are_lines_or_a_list(tmp_path):
    write(tmp_path, ["0.png", "1.png"], ["one\ntwo\n\nthr\u2028ee\n", "alone"])
    data = ready(str(tmp_path), caption_rules=CaptionRules(variants=3, lines="choose"))
    found = {tuple(data.captions_of(index)) for index in range(2)}
    assert found == {("one", "two", "thr ee"), ("alone", "alone", "alone")}
    joined = ready(str(tmp_path))
    assert {joined.dataset[index, 0]["captions"] for index in range(2)} == {"one two thr ee", "alone"}
    rows = [{"file_name": f"{n}.png", "text": ["a", "b"] if n else "c"} for n in range(2)]
    write_metadata(tmp_path, rows)
    with pytest.raises(ConfigurationError, match=r"up to 2 captions.*Set caption_rules.variants to at least 2"):
        ready(str(tmp_path))
    listed = ready(str(tmp_path), caption_rules=CaptionRules(variants=2))
    assert {tuple(listed.captions_of(index)) for index in range(2)} == {("a", "b"), ("c", "c")}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shuffle": True}, "variants must be at least 2 for shuffle"),
        ({"variants": 4, "dropout": 0.9}, "dropout must be at most 0.75 with 4 variants"),
        ({"keep": 1}, "keep must be 0 without shuffle"),
        ({"separator": ""}, "separator must be a text that is not empty"),
    ],
)
def test_rules_that_change_nothing_are_refused(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        CaptionRules(**wrong)
