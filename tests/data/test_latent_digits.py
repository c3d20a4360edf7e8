import os

import numpy as np
import pytest
import torch

from lit_efficient import AutoencoderConfig, LatentDigits
from lit_efficient.data.digit_images import DigitImages, load_digit_images, stratified_split
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import MANIFEST, read_manifest, write_json
from lit_efficient.files.sealed_folder import make_once, open_checked
from lit_efficient.models.judges.conv_features import DigitFeatures, judge_digits

TINY = {"image_size": 16, "autoencoder": AutoencoderConfig(latent_channels=2, width=8), "autoencoder_steps": 150}


def tiny(**arguments) -> LatentDigits:
    return LatentDigits(**{**TINY, "judge_steps": 60, **arguments})


@pytest.fixture
def ready() -> LatentDigits:
    data = tiny()
    data.prepare_data()
    data.setup("fit")
    return data


def test_digits_are_enlarged_and_keep_their_look():
    images, labels = load_digit_images(32)
    assert images.shape == (1797, 1, 32, 32)
    assert labels.bincount().min() > 170
    assert images.min() == -1
    assert images.max() == 1
    shrunk = torch.nn.functional.avg_pool2d(images, 4)
    from sklearn.datasets import load_digits

    original = torch.tensor(load_digits().images).float() / 8 - 1
    assert torch.nn.functional.mse_loss(shrunk[:, 0], original) < 0.05


def test_the_split_covers_everything_once_with_all_classes_in_each_part():
    labels = load_digit_images(8)[1]
    state = np.random.get_state()[1].tolist()
    parts = stratified_split(labels, 180, seed=0)
    assert np.random.get_state()[1].tolist() == state
    assert [len(part) for part in parts] == [1437, 180, 180]
    assert sorted([*parts[0], *parts[1], *parts[2]]) == list(range(1797))
    for part in parts[1:]:
        assert labels[part].bincount().min() >= 17
    assert parts == stratified_split(labels, 180, seed=0)
    assert parts != stratified_split(labels, 180, seed=1)


def test_stage_one_leaves_the_random_state_and_the_working_directory_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    data = tiny(cache_dir=str(tmp_path / "cache"), autoencoder_steps=2, judge_steps=2)
    data.prepare_data()
    data.setup("fit")
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    assert os.listdir(tmp_path) == ["cache"]


def test_rows_are_dataset_indices_and_latents_decode_to_the_image_of_their_row(ready):
    images, labels = load_digit_images(16)
    batch = next(iter(ready.train_dataloader()))
    assert batch["mean"].shape == batch["logvar"].shape == (64, *ready.latent_shape)
    assert torch.equal(batch["labels"], labels[batch["index"]])
    assert set(batch["index"].tolist()) <= set(ready.train_index)
    decoded = ready.codec.decode(batch["mean"])
    truth = images[batch["index"]]
    assert (decoded - truth).square().mean() < 0.5 * (decoded - truth.roll(1, dims=0)).square().mean()


def test_sampled_latents_have_mean_zero_and_variance_one_in_each_channel(ready):
    rows = ready.dataset.tensors
    noise = torch.randn(rows["mean"].shape, generator=torch.Generator().manual_seed(1))
    sample = (rows["mean"] + (0.5 * rows["logvar"]).exp() * noise)[ready.train_index]
    torch.testing.assert_close(sample.mean(dim=(0, 2, 3)), torch.zeros(2), atol=0.02, rtol=0)
    torch.testing.assert_close(sample.std(dim=(0, 2, 3)), torch.ones(2), atol=0.02, rtol=0)


def test_iterating_for_validation_does_not_touch_the_global_generator(ready):
    before = torch.get_rng_state()
    for loader in (ready.val_dataloader(), ready.test_dataloader(), ready.predict_dataloader()):
        assert sum(len(batch["labels"]) for batch in loader) == 180
    assert torch.equal(before, torch.get_rng_state())


def test_the_cache_is_reused_and_another_setting_gets_another_folder(ready, monkeypatch):
    def never(*_: object) -> None:
        raise AssertionError("stage one ran again")

    monkeypatch.setattr("lit_efficient.data.latents.stage_one.fit_autoencoder", never)
    again = tiny()
    again.prepare_data()
    again.setup("fit")
    assert again.codec.fingerprint() == ready.codec.fingerprint()
    with pytest.raises(AssertionError, match="ran again"):
        tiny(autoencoder_steps=2).prepare_data()
    with pytest.raises(ConfigurationError, match=r"manifest.json is missing or unreadable.* run again"):
        tiny(autoencoder_steps=2).setup("fit")  # and the failed attempt left nothing that looks finished


def test_the_judge_tells_digits_from_noise_and_right_labels_from_wrong(ready):
    images, labels = load_digit_images(16)
    images, labels = images[ready.val_index], labels[ready.val_index]
    real = ready.score_samples(images, labels)
    noise = ready.score_samples(torch.rand_like(images) * 2 - 1, labels)
    assert real["sample_accuracy"] > 0.8
    assert ready.score_samples(images, (labels + 1) % 10)["sample_accuracy"] < 0.1
    assert real["frechet_distance"] < 0.1 * noise["frechet_distance"]


def test_frechet_distance_equals_scipys():
    from scipy.linalg import sqrtm

    torch.manual_seed(0)
    judge = DigitFeatures().eval()
    a, b = torch.rand(300, 1, 16, 16), torch.rand(300, 1, 16, 16) * 0.5
    ours = judge_digits(judge, a, b, torch.zeros(300, dtype=torch.long))["frechet_distance"]
    with torch.no_grad():
        fa, fb = judge(a).double().numpy(), judge(b).double().numpy()
    ca, cb = np.cov(fa.T), np.cov(fb.T)
    expected = ((fa.mean(0) - fb.mean(0)) ** 2).sum() + np.trace(ca + cb - 2 * sqrtm(ca @ cb).real)
    assert ours == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"num_workers": -1}, "num_workers must be a whole number of at least 0, got -1"),
        ({"image_size": 30}, "image_size must be a multiple of 4"),
        ({"autoencoder_steps": 0}, "autoencoder_steps must be a whole number of at least 1, got 0"),
        ({"autoencoder": AutoencoderConfig(image_channels=3)}, r"image_channels must be 1 \(grey\), got 3"),
    ],
)
def test_arguments_are_checked_when_built(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        LatentDigits(**wrong)


def test_digit_images_hold_the_images():
    data = DigitImages(image_size=16, batch_size=10)
    data.setup("fit")
    batch = next(iter(data.val_dataloader()))
    assert torch.equal(batch["images"], load_digit_images(16)[0][batch["index"]])


# The sealed folder


def contents():
    return {"a.safetensors": {"x": torch.arange(100.0)}}, {"note": 1}


def test_a_sealed_folder_is_made_once(tmp_path):
    folder = tmp_path / "deep" / "folder"
    calls = []
    for _ in range(2):
        make_once(folder, "key", lambda: (calls.append(1), contents())[1])
    assert len(calls) == 1
    files, manifest = open_checked(folder, "key")
    assert torch.equal(files["a.safetensors"]["x"], torch.arange(100.0))
    assert manifest["note"] == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: _flip(f / "a.safetensors"), r"a\.safetensors is not what was written"),
        (lambda f: os.truncate(f / "a.safetensors", 50), r"a\.safetensors has 50 bytes"),
        (lambda f: (f / "a.safetensors").unlink(), r"a\.safetensors is missing"),
        (lambda f: (f / MANIFEST).write_text("{"), r"manifest\.json is missing or unreadable"),
        (lambda f: (f / MANIFEST).write_text("[]"), r"manifest\.json is missing or unreadable"),
        (lambda f: write_json(f / MANIFEST, read_manifest(f) | {"key": "other"}), r"other data or settings"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_way_out(tmp_path, damage, message):
    make_once(tmp_path / "folder", "key", contents)
    damage(tmp_path / "folder")
    with pytest.raises(ConfigurationError, match=f"{message}.*Delete the folder"):
        open_checked(tmp_path / "folder", "key")


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


def test_a_failure_or_a_kill_leaves_nothing_that_looks_finished(tmp_path):
    def fail():
        raise RuntimeError("killed")

    (tmp_path / "folder.unfinished").mkdir()  # what a killed process leaves
    with pytest.raises(RuntimeError, match="killed"):
        make_once(tmp_path / "folder", "key", fail)
    assert not (tmp_path / "folder").exists()
    make_once(tmp_path / "folder", "key", contents)
    open_checked(tmp_path / "folder", "key")


def test_an_unwritable_place_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot be written: .*Set cache_dir or LIT_EFFICIENT_CACHE"):
        make_once(tmp_path / "file" / "folder", "key", contents)
