"""Tests of PhotoCrops: parts share no pixel, items depend on the key alone, and the judge tells images apart."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lit_efficient import PhotoCrops
from lit_efficient.data.images.image_source import ImageSource
from lit_efficient.data.photo_crops import block_of, photo_crops
from lit_efficient.errors import ConfigurationError

JUDGED = {"resolution": 32, "crops": 12, "judge_steps": 80}


@pytest.fixture(scope="module")
def ready(shared_cache) -> PhotoCrops:
    data = PhotoCrops(**JUDGED, cache_dir=str(shared_cache))
    data.prepare_data()
    data.setup("fit")
    return data


def plain(**arguments) -> PhotoCrops:
    data = PhotoCrops(**{"judge_steps": 0, "crops": 6} | arguments)
    data.setup("fit")
    return data


@pytest.mark.parametrize("resolution", [32, 64])
@pytest.mark.parametrize("seed", [0, 7])
def test_no_pixel_is_seen_in_two_parts(resolution, seed):
    data = plain(resolution=resolution, seed=seed)
    crops = photo_crops(resolution, data.scales, 6, seed)
    parts = (data.train_index, data.val_index, data.test_index)
    assert sorted(index for part in parts for index in part) == list(range(180))
    assert [len(part) for part in parts] == [108, 36, 36]
    seen = np.zeros((3, 2, 427, 640), dtype=bool)
    for number, part in enumerate(parts):
        for crop in (crops[index] for index in part):
            seen[number, crop.photo, crop.top : crop.top + crop.side, crop.left : crop.left + crop.side] = True
        assert seen[number].any(axis=(1, 2)).all()  # both photographs
    assert (seen.sum(axis=0) <= 1).all()
    assert {crop.side for crop in crops} == {round(resolution * scale) for scale in data.scales}
    covered = np.zeros((427, 640), dtype=int)
    for row in range(3):
        for column in range(5):
            top, left, height, width = block_of(row, column)
            covered[top : top + height, left : left + width] += 1
    assert (covered == 1).all()


def test_an_item_is_cut_from_the_photograph_and_depends_on_its_key_alone():
    from sklearn.datasets import load_sample_image

    data = plain(scales=(1.0,), horizontal_flip=True)
    photos = [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]
    state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    for index in (0, 91, 179):
        crop = photo_crops(32, (1.0,), 6, 0)[index]
        item = data.dataset[(index, 0)]
        cut = photos[crop.photo][crop.top : crop.top + 32, crop.left : crop.left + 32]
        np.testing.assert_allclose(item["images"].permute(1, 2, 0), cut / 127.5 - 1, atol=1e-6)
        assert torch.equal(data.dataset[(index, 1)]["images"], item["images"].flip(-1))
        assert (item["index"], item["variant"], item["labels"]) == (index, 0, crop.photo)
        assert ("temple" in item["captions"], "dahlia" in item["captions"]) == (crop.photo == 0, crop.photo == 1)
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == np.random.get_state()[1].tolist()
    with pytest.raises(ConfigurationError, match=r"variant must be at least 0 and below 2, got 2"):
        data.dataset[(0, 2)]


def test_batches_and_classes():
    data = plain(classes="band", batch_size=50, horizontal_flip=True)
    assert isinstance(PhotoCrops(), ImageSource)
    batches = list(data.train_dataloader())
    assert sorted(index for batch in batches for index in batch["index"].tolist()) == data.train_index
    assert {variant for batch in batches for variant in batch["variant"].tolist()} == {0, 1}
    assert batches[0]["images"].shape == (50, 3, 32, 32)
    assert batches[0]["images"].dtype == torch.float32
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        held_out = [(label, caption) for batch in loader for label, caption in zip(batch["labels"], batch["captions"])]
        assert {int(label) for label, _ in held_out} == set(range(6))
        assert all(("temple" in caption) == (label < 3) for label, caption in held_out)
    assert data.num_classes == len(data.class_names) == 6
    assert plain().class_names == ["temple", "flower"]
    assert data.score_samples(batches[0]["images"], batches[0]["labels"]) == {}  # no judge


def test_the_identity_names_what_changed():
    def changed(**arguments):
        return {name for name, value in plain(**arguments).identity().items() if plain().identity()[name] != value}

    assert changed() == set()
    assert changed(resolution=64) == {"resolution"}
    assert changed(horizontal_flip=True) == {"variants"}
    assert changed(scales=(1.0,)) == {"transform"}
    assert changed(seed=1) == {"seed", "split"}
    assert changed(classes="band") == {"labels"}


def test_the_judge_tells_crops_from_noise_and_one_photograph_from_the_other(ready):
    def crops(index):
        items = [ready.dataset[(i, 0)] for i in index]
        return torch.stack([item["images"] for item in items]), torch.tensor([item["labels"] for item in items])

    images, labels = crops(ready.test_index)
    real, noise = ready.score_samples(images, labels), ready.score_samples(torch.rand_like(images) * 2 - 1)
    assert real["sample_accuracy"] > 0.85
    assert ready.score_samples(images, 1 - labels)["sample_accuracy"] == pytest.approx(
        1 - real["sample_accuracy"], abs=1e-6
    )
    assert "sample_accuracy" not in noise
    assert real["frechet_distance"] < 0.2 * noise["frechet_distance"]
    same = ready.score_samples(crops(ready.train_index)[0])
    assert same["frechet_distance"] == pytest.approx(0, abs=1e-3)
    assert max(same["kernel_distance"], real["kernel_distance"]) < 0.2 * noise["kernel_distance"]
    larger = ready.score_samples(F.interpolate(images, scale_factor=2, mode="nearest"))
    assert larger == {name: pytest.approx(real[name], rel=1e-2) for name in larger}


def test_the_judge_is_trained_once_and_leaves_the_random_state_alone(ready, shared_cache, monkeypatch):
    def never(*_):
        raise AssertionError("trained again")

    monkeypatch.setattr("lit_efficient.data.latents.stage_one.fit_classifier", never)
    before = torch.get_rng_state()
    again = PhotoCrops(**JUDGED, cache_dir=str(shared_cache), classes="band", horizontal_flip=True)
    again.prepare_data()
    again.setup("fit")
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(again.judge.head[1].weight, ready.judge.head[1].weight)
    with pytest.raises(AssertionError, match="trained again"):
        PhotoCrops(**JUDGED | {"judge_steps": 81}, cache_dir=str(shared_cache)).prepare_data()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"resolution": 36}, "resolution must be a multiple of 8, got 36"),
        ({"resolution": 4}, "resolution must be a whole number of at least 8, got 4"),
        ({"scales": (1.0, 5.0)}, "scales for a resolution of 32 must be at least 1 and at most 4, got 5.0"),
        ({"scales": ()}, r"scales for a resolution of 32 must be at least 1 and at most 4, got \(\)"),
        ({"crops": 1}, "crops must be a whole number of at least 2, got 1"),
        ({"judge_steps": -1}, "judge_steps must be a whole number of at least 0, got -1"),
        ({"classes": "petals"}, "classes must be one of photograph, band, got 'petals'"),
        ({"batch_size": 0}, "PhotoCrops: batch_size must be a whole number of at least 1, got 0"),
    ],
)
def test_arguments_are_checked_when_built(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        PhotoCrops(**wrong)
