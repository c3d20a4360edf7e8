"""Tests of the latent cache: items, refusals, and resuming after a kill."""

import json
import os
import pickle
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from lit_efficient import (
    AutoencoderConfig,
    ConfigurationError,
    DiffusersModelConfig,
    EncodedData,
    ImageData,
    ImageView,
    LatentData,
    TeacherFeatures,
)
from lit_efficient.data.images.image_module import ImageModule
from lit_efficient.data.latents.latent_store import LatentStore
from lit_efficient.data.latents.latent_writer import Ranks, plan_shards
from lit_efficient.files.tensors import load_tensors, save_tensors
from lit_efficient.mechanisms import progress
from lit_efficient.mechanisms.progress import Progress
from lit_efficient.models.libraries import latent_codec, text_encoder
from lit_efficient.models.libraries.diffusers_model import build as build_diffusers
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.libraries.text_encoder import CaptionReading, TextEncoder, TextEncoderConfig
from lit_efficient.models.libraries.text_network import TextNetwork
from tests.data.images.image_kit import write
from tests.data.images.toy_images import ToyImages
from tests.support import SlowClock, assert_equal

OURS = AutoencoderConfig(1, 4, 8)
TINY = DiffusersModelConfig(
    config_fields={
        "_class_name": "AutoencoderTiny",
        "in_channels": 3,
        "out_channels": 3,
        "encoder_block_out_channels": [8, 8],
        "decoder_block_out_channels": [8, 8],
        "num_encoder_blocks": [1, 1],
        "num_decoder_blocks": [1, 1],
        "latent_channels": 2,
    }
)
WORDS = TextEncoderConfig(
    config_fields={
        "model_type": "clip_text_model",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 40,
    },
    max_length=40,
)


def made(
    folder: Path, images: ToyImages | None = None, autoencoder=OURS, shard_rows: int = 7, **arguments
) -> LatentData:
    """Write a cache and open it again."""
    data = LatentData(images or ToyImages(), autoencoder, folder=str(folder), **arguments)
    data.images.setup("fit")
    data.write_cache(shard_rows=shard_rows, batch_size=4)
    return opened(data)


def opened(data: LatentData) -> LatentData:
    data.prepare_data()
    data.setup("fit")
    return data


def live(data: LatentData) -> LatentData:
    """Return a module that encodes the same images in each step, with the same statistics."""
    other = LatentData(data.images, data.autoencoder, cached=False)
    other.setup("fit")
    other.codec.mean, other.codec.std = data.codec.mean, data.codec.std
    return other


def test_cached_batches_are_the_live_ones_encoded(tmp_path):
    """Equal up to rounding in float32: the sums of a convolution depend on the size of the batch."""
    data = made(tmp_path / "cache", ToyImages(variants=3, buckets=True, captions=True))
    other = live(data)
    seen = set()
    for part in ("train", "val", "test"):
        loaders = [getattr(source, f"{part}_dataloader")() for source in (data, other)]
        for epoch in range(4):
            for loader in loaders:
                loader.sampler.set_epoch(epoch)
            for cached, images in zip(*loaders, strict=True):
                for name, value in zip(("mean", "logvar"), other.codec.encode(images.pop("images"))):
                    torch.testing.assert_close(cached.pop(name), value, rtol=0, atol=1e-6)
                assert torch.equal(cached["labels"], cached["index"] % 10)
                assert cached.keys() == images.keys()
                for name, value in images.items():
                    assert (
                        torch.equal(cached[name], value) if isinstance(value, torch.Tensor) else cached[name] == value
                    )
                seen |= {(part, variant) for variant in cached["variant"].tolist()}
    assert seen == {("train", 0), ("train", 1), ("train", 2), ("val", 0), ("test", 0)}


def test_batches_of_one_size_are_equal_to_the_bit(tmp_path):
    images = ToyImages(variants=2, count=24)  # 16 to train on, in batches of 4: 32 keys are encoded by 4, too
    data = made(tmp_path / "cache", images, shard_rows=8)
    other = live(data)
    for cached, batch in zip(data.train_dataloader(), other.train_dataloader(), strict=True):
        mean, logvar = other.codec.encode(batch["images"])
        assert torch.equal(cached["mean"], mean)
        assert torch.equal(cached["logvar"], logvar)


def test_a_folder_of_images_with_random_crops_and_flips(tmp_path):
    names = [f"{'cats' if i % 2 else 'dogs'}/{i}.png" for i in range(16)]
    write(tmp_path / "photos", names, [f"no. {i % 3}" for i in range(16)])
    images = ImageData(
        str(tmp_path / "photos"),
        view=ImageView(16, crop="random", horizontal_flip=True, variants=3),
        val_fraction=0.2,
        batch_size=4,
        cache_dir=str(tmp_path),
    )
    images.prepare_data()
    data = made(tmp_path / "cache", images, AutoencoderConfig(3, 4, 8))
    looks = set()
    for epoch in range(3):
        loaders = [data.train_dataloader(), images.train_dataloader()]
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        for cached, batch in zip(*loaders, strict=True):
            mean, _ = data.codec.encode(batch["images"])
            torch.testing.assert_close(cached["mean"], mean, rtol=0, atol=1e-6)
            assert cached["captions"] == batch["captions"]
            assert torch.equal(cached["labels"], batch["labels"])
            assert torch.equal(cached["sizes"], batch["sizes"])
            looks |= {(int(number), cached["mean"][row].sum().item()) for row, number in enumerate(cached["index"])}
    assert len(looks) > len(images.train_index)  # other crops in other epochs


def test_a_pair_is_never_torn_whatever_the_order(tmp_path):
    """Each latent must belong to the image of its index and label, in any order of reading."""
    images = ToyImages(variants=2)
    data = made(tmp_path / "cache", images, shard_rows=5)
    store = LatentStore(tmp_path / "cache")
    keys = [key for shard in plan_shards(images, 5) for key in shard]
    for i in torch.randperm(len(keys), generator=torch.Generator().manual_seed(3)).tolist():
        item, image = store[keys[i]], images.dataset[keys[i]]
        mean, _ = data.encoders().codec.moments(image["images"][None])
        assert (item["index"], item["variant"], item["labels"]) == (*keys[i], image["labels"])
        torch.testing.assert_close(item["mean"], mean[0], rtol=0, atol=1e-6)
    assert len(keys) == 16 * 2 + 8


def test_latents_are_normalised_as_measured_or_as_declared(tmp_path):
    data = made(tmp_path / "cache", ToyImages(count=48))
    mean = torch.stack([data._store[index, 0]["mean"] for index in data.images.train_index])
    logvar = torch.stack([data._store[index, 0]["logvar"] for index in data.images.train_index])
    torch.testing.assert_close(data.codec.mean, mean.mean((0, 2, 3)))
    torch.testing.assert_close(
        data.codec.std, (mean.var((0, 2, 3), correction=0) + logvar.exp().mean((0, 2, 3))).sqrt()
    )
    declared = opened(LatentData(data.images, OURS, folder=str(tmp_path / "cache"), statistics="declared"))
    assert declared.codec.std.tolist() == [1.0] * 4
    item = next(iter(declared.val_dataloader()))
    assert torch.equal(item["mean"][0], declared._store[data.images.val_index[0], 0]["mean"])
    # Encoding live measures alike where no cache is: of the same images, to four digits.
    alone = LatentData(data.images, OURS, cached=False, folder=str(tmp_path / "none"))
    alone.setup("fit")
    torch.testing.assert_close(alone.codec.std, data.codec.std, rtol=1e-3, atol=0)


def test_int8_takes_a_byte_a_number_and_is_off_by_half_a_step(tmp_path):
    exact, coarse = (made(tmp_path / format, ToyImages(size=32), format=format) for format in ("posterior", "int8"))
    assert next(iter(coarse.val_dataloader())).keys() == {"latents", "index", "variant", "labels"}
    worst = 0.0
    for number, keys in enumerate(plan_shards(coarse.images, 7)):
        scale = coarse._store._open(f"shards/{number:05d}.safetensors")["scale"].view(-1, 1, 1)
        for key in keys:
            error = (coarse._store[key]["latents"] - exact._store[key]["mean"]).abs() / scale
            worst = max(worst, error.max().item())
    assert 0.49 < worst < 0.501
    sizes = [(tmp_path / name / "shards/00000.safetensors").stat().st_size for name in ("posterior", "int8")]
    assert sizes[1] < 0.2 * sizes[0]


def test_float16_halves_and_rounds_by_2_to_the_minus_11(tmp_path):
    exact, half = (made(tmp_path / dtype, dtype=dtype)._store[3, 0] for dtype in ("float32", "float16"))
    for name in ("mean", "logvar"):
        error = ((exact[name] - half[name]) / exact[name]).abs()
        assert 0 < error.max() <= 2**-11


def test_a_deterministic_encoder_gives_latents(tmp_path):
    data = made(tmp_path / "cache", ToyImages(channels=3), TINY)
    cached, images = (next(iter(source.val_dataloader())) for source in (data, live(data)))
    assert "mean" not in cached
    assert torch.equal(cached["latents"], data.codec.encode(images["images"])[0])
    assert data.latent_shape == (2, 4, 4)


def test_captions_are_embedded_once_each_and_come_with_their_images(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "time", SlowClock())
    data = made(tmp_path / "cache", ToyImages(captions=True, variants=2), text_encoder=WORDS, shard_rows=6)
    assert data._store.manifest["texts"] == 6  # "" and five others
    for batch in data.train_dataloader():
        hidden, mask, pooled = data.text_encoder.encode(batch["captions"])
        assert torch.equal(batch["text"], hidden)
        assert torch.equal(batch["text_mask"], mask)
        assert torch.equal(batch["pooled"], pooled)
        assert len(hidden.unique(dim=0)) == len(set(batch["captions"]))
    with pytest.raises(ConfigurationError, match="needs images with captions"):
        made(tmp_path / "other", ToyImages(), text_encoder=WORDS)
    assert capsys.readouterr().err == ""
    data.write_cache(overwrite=True, batch_size=4, progress=partial(Progress, "encoding", "images"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == [f"encoding: {done} of 6 captions, about {left} s left" for done, left in ((3, 30), (6, 0))]


def test_what_a_cache_replaces_is_not_loaded_again(tmp_path, monkeypatch):
    """Nor are its weights hashed: large encoders are recognised by their files."""
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path / "facts"))
    for module in (latent_codec, text_encoder):
        monkeypatch.setattr(module, "EMBEDDED_BYTES", 100)
    build_diffusers(TINY).save_pretrained(tmp_path / "tiny")
    drawn = TextEncoder.load(WORDS)
    drawn.network.save_pretrained(tmp_path / "words")
    words = TextEncoderConfig(str(tmp_path / "words"), captions=CaptionReading(tokenizer="bytes"), max_length=40)
    given = {"autoencoder": DiffusersModelConfig(str(tmp_path / "tiny")), "text_encoder": words}
    images = ToyImages(captions=True, channels=3)
    first = made(tmp_path / "cache", images, **given)
    nothing, text = first.text_encoder.encode([""]), first.text_encoder.state_dict()
    loaded = []
    for owner, name in ((latent_codec, "build_autoencoder"), (TextNetwork, "load")):
        kept = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, kept=kept: loaded.append(args) or kept(*args))
    again = opened(LatentData(images, folder=str(tmp_path / "cache"), **given))
    batch = next(iter(again.train_dataloader()))
    assert torch.equal(batch["text"], first.text_encoder.encode(batch["captions"]).hidden)
    assert all(
        map(torch.equal, again.text_encoder.encode(["", ""]), (part.expand(2, *part.shape[1:]) for part in nothing))
    )
    assert (again.text_encoder.width, again.text_encoder.pooled_width, again.latent_shape) == (8, 8, first.latent_shape)
    assert again.text_encoder.hides_padding == first.text_encoder.hides_padding
    assert again.text_encoder.state_dict() == text
    codec = again.codec.state_dict()  # with the fingerprint, which the cache's writer found out
    assert not loaded
    assert_equal(codec, first.codec.state_dict())
    assert LatentCodec.from_state_dict(codec).fingerprint() == first.codec.fingerprint()
    assert not loaded
    latents = torch.randn(1, 2, 4, 4)
    assert torch.equal(again.codec.decode(latents), first.codec.decode(latents))
    caption = ["a new one"]
    assert torch.equal(again.text_encoder.encode(caption).hidden, drawn.encode(caption).hidden)
    assert len(loaded) == 2
    torch.manual_seed(1)
    build_diffusers(TINY).save_pretrained(tmp_path / "tiny")  # others, in the same place
    with pytest.raises(ConfigurationError, match="autoencoder: the cache has"):
        opened(LatentData(images, folder=str(tmp_path / "cache"), **given))


CHANGES = {
    "autoencoder": {"autoencoder": AutoencoderConfig(1, 4, 16)},
    "text_encoder": {"text_encoder": WORDS},
    "features.weights": {"features": TeacherFeatures("data.judge")},
    "format": {"format": "int8"},
    "dtype": {"dtype": "float16"},
    "images.data": {"images": ToyImages(content=1)},
    "images.resolution": {"images": ToyImages(size=16)},
    "images.seed": {"images": ToyImages(seed=1)},
    "images.variants": {"images": ToyImages(variants=2)},
    "split": {"images": ToyImages(count=36)},
}


@pytest.mark.parametrize("entry", CHANGES)
def test_whatever_differs_is_refused_by_its_name(tmp_path, entry):
    made(tmp_path / "cache")
    arguments = {"images": ToyImages(), "autoencoder": OURS, "folder": str(tmp_path / "cache"), **CHANGES[entry]}
    arguments["images"].judge = torch.nn.Linear(1, 1)
    data = LatentData(**arguments)
    with pytest.raises(ConfigurationError) as caught:
        opened(data)
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith(f"  {entry}: the cache has ")]
    found, asked = LatentStore(tmp_path / "cache").manifest["identity"].get(entry), data.identity()[entry]
    assert asked[:12] in line
    assert (found or "no such entry")[:12] in line
    assert "cache-latents --config CONFIG --overwrite" in str(caught.value)
    with pytest.raises(ConfigurationError, match=f"  {entry}: the cache has"):  # and it is not written over
        data.write_cache()
    assert LatentStore(tmp_path / "cache", thorough=True).manifest["identity"]["version"] == "1"


def test_split_and_variants_are_said_once(tmp_path):
    write(tmp_path, [f"{n}.png" for n in range(8)])
    images = ImageData(str(tmp_path), view=ImageView(8, horizontal_flip=True, variants=2), val_fraction=0.3)
    images.prepare_data()
    said = {}
    for source in (images, ToyImages(variants=2)):
        source.setup("fit")
        said[source] = LatentData(source, AutoencoderConfig(source.dataset[0, 0]["images"].shape[0], 4, 8)).identity()
        assert [name for name in said[source] if "split" in name] == ["split"]
        assert said[source]["images.variants"] == "2"
    assert {f"images.{name}" for name in images.identity()} - said[images].keys() == {"images.split"}


def test_a_cache_is_made_when_it_is_asked_for_only(tmp_path):
    data = LatentData(ToyImages(), OURS, folder=str(tmp_path / "cache"))
    with pytest.raises(ConfigurationError, match=r"There is no latent cache in .*cache-latents --config"):
        data.prepare_data()
    assert not list(tmp_path.iterdir())
    building = opened(LatentData(ToyImages(), OURS, folder=str(tmp_path / "cache"), build=True))
    assert len(building._store) == 24


def test_a_default_folder_is_named_by_what_it_is_made_from(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path))
    first = opened(LatentData(ToyImages(), OURS, build=True))
    second = LatentData(ToyImages(content=1), OURS)
    with pytest.raises(ConfigurationError, match="There is no latent cache"):
        second.prepare_data()
    assert first.cache_folder().parent == second.cache_folder().parent == tmp_path / "latents"


@pytest.mark.parametrize("name", ["shards/00001.safetensors", "index.safetensors"])
def test_damage_is_found(tmp_path, name):
    data = made(tmp_path / "cache")
    path = tmp_path / "cache" / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ConfigurationError, match=f"{name} is not what was written"):
        data.prepare_data()
    path.write_bytes(whole[:-1])
    with pytest.raises(ConfigurationError, match=f"{name} has {len(whole) - 1} bytes"):
        LatentStore(tmp_path / "cache")
    path.unlink()
    with pytest.raises(ConfigurationError, match=f"{name} is missing"):
        LatentStore(tmp_path / "cache")


def test_a_row_that_is_another_images_is_refused_when_it_is_read(tmp_path):
    made(tmp_path / "cache")
    index = load_tensors(tmp_path / "cache/index.safetensors")
    index["places"][[3, 4]] = index["places"][[4, 3]]
    save_tensors(tmp_path / "cache/index.safetensors", index)
    with pytest.raises(ConfigurationError, match=r"belongs to \[4, 0\], not to \[3, 0\]"):
        LatentStore(tmp_path / "cache")[3, 0]
    with pytest.raises(ConfigurationError, match=r"has no image \(index 3, variant 1\)"):
        LatentStore(tmp_path / "cache")[3, 1]


def test_numbers_that_are_not_finite_are_not_kept(tmp_path):
    images = ToyImages(count=24)
    data = LatentData(images, OURS, folder=str(tmp_path / "cache"))
    data.encoders().codec.autoencoder.encoder[0].weight.data.fill_(float("nan"))
    with pytest.raises(ConfigurationError, match=r"the mean of image \[0, 0\] .* is not finite"):
        data.write_cache()
    assert not (tmp_path / "cache").exists()


# Kills ---------------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def forked(target, *arguments, **options) -> int:
    """Start ``target`` in a copy of this process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            target(*arguments, **options)
            code = 0
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_before(step: int) -> None:
    """Kill this process before its n-th step of writing: a flush to the disk, a rename, the removal of the settings."""
    left = [step]

    def dying(original):
        def call(*arguments, **options):
            if original is not os_unlink or str(arguments[0]).endswith("building.json"):
                left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call

    os_unlink = os.unlink
    os.fsync, os.replace, os.unlink = dying(os.fsync), dying(os.replace), dying(os_unlink)


def killed_build(data: LatentData, before: int, **options) -> bool:
    """Build in a process that is killed before its n-th step. Return whether the process finished."""

    def build() -> None:
        die_before(before)
        data.write_cache(**options)

    code = exit_code(forked(build))
    assert code in (0, -signal.SIGKILL)
    return code == 0


@pytest.mark.turns(4, family="killed")
def test_a_build_that_is_killed_between_any_two_writes_ends_as_one_that_was_not(tmp_path):
    options = {"shard_rows": 24, "batch_size": 4}
    images = ToyImages(variants=2, captions=True)
    whole = LatentData(images, OURS, text_encoder=WORDS, folder=str(tmp_path / "whole"))
    whole.write_cache(**options)
    expected = contents(tmp_path / "whole")
    kills, alive = 0, False
    while not alive:
        folder = tmp_path / f"killed-{kills}"
        data = LatentData(images, OURS, text_encoder=WORDS, folder=str(folder))
        data._encoders = whole.encoders()
        alive = killed_build(data, kills, **options)
        kills += 1
        if not alive:
            assert not folder.exists() or LatentStore(folder, thorough=True).manifest["rows"] == 40  # whole or absent
            data.write_cache(**options)
        assert contents(folder) == expected
        assert not list(tmp_path.glob(".killed*"))
    assert kills > 3 * (2 + 1 + 1)  # shards, texts, index: each a file, its name and its folder


def test_one_cache_is_killed_again_and_again_and_no_finished_shard_is_made_twice(tmp_path):
    data = LatentData(ToyImages(variants=2), OURS, folder=str(tmp_path / "cache"))
    data.encoders()
    options, made_at = {"shard_rows": 9, "batch_size": 4}, {}
    building = tmp_path / ".cache.building/shards"
    for _ in range(40):
        if killed_build(data, 14, **options):
            break
        for path in building.glob("[0-9]*.safetensors"):  # not the hidden files that a kill leaves
            made_at.setdefault(path.name, path.stat().st_mtime_ns)
            assert path.stat().st_mtime_ns == made_at[path.name]
    assert len(made_at) >= 4
    assert {name: (tmp_path / "cache/shards" / name).stat().st_mtime_ns for name in made_at} == made_at


def test_what_was_half_built_is_verified_and_belongs_to_its_settings(tmp_path):
    data = LatentData(ToyImages(), OURS, folder=str(tmp_path / "cache"))
    data.encoders()
    assert not killed_build(data, 12, shard_rows=6)
    first = tmp_path / ".cache.building/shards/00000.safetensors"
    first.write_bytes(b"x" + first.read_bytes()[1:])  # as long as before
    other = LatentData(ToyImages(), OURS, folder=str(tmp_path / "cache"), dtype="float16")
    with pytest.raises(ConfigurationError, match=r"dtype: the cache has 'float32'(?s:.*)Finish that cache"):
        other.write_cache(shard_rows=6)
    with pytest.raises(ConfigurationError, match="shard_rows: the cache has '6', this run asks for '7'"):
        data.write_cache(shard_rows=7)
    settings = first.parent.parent / "building.json"
    written = settings.read_text()
    settings.write_text(written.replace("float32", "float16", 1))
    with pytest.raises(ConfigurationError, match=r"building\.json of an unfinished latent cache is damaged"):
        data.write_cache(shard_rows=6)
    settings.write_text(written)
    second = first.with_name("00001.safetensors")
    second.write_bytes(first.with_name("00002.safetensors").read_bytes())  # whole, but the rows of another shard
    data.write_cache(shard_rows=6)
    whole = LatentData(ToyImages(), OURS, folder=str(tmp_path / "whole"))
    whole.write_cache(shard_rows=6)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


def test_two_processes_share_the_shards_and_write_the_cache_of_one(tmp_path):
    """Two threads act as processes, and one of them fails in the middle; then one process resumes the build."""

    def source(folder: str) -> LatentData:
        data = LatentData(ToyImages(captions=True, variants=2), OURS, text_encoder=WORDS, folder=str(tmp_path / folder))
        data.images.setup("fit")
        data.identity()
        return data

    source("alone").write_cache(shard_rows=5, batch_size=4)

    def shared(folder: str, dies: bool = False) -> None:
        barrier, data = threading.Barrier(2), [source(folder), source(folder)]

        def work(rank: int) -> None:
            if rank and dies:
                data[1].images.dataset = Breaking(data[1].images.dataset)
            try:
                data[rank].write_cache(shard_rows=5, batch_size=4, ranks=Ranks(rank, 2, barrier.wait))
            except (KeyError, threading.BrokenBarrierError):
                barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    shared("both")
    assert contents(tmp_path / "both") == contents(tmp_path / "alone")
    shared("both")  # it is there
    shared("broken", dies=True)
    begun = tmp_path / ".broken.building"
    assert {file.name for file in begun.iterdir()} >= {"building.json", "shards"}
    done = {file: file.stat().st_mtime_ns for file in begun.glob("shards/*")}
    assert done  # how many depends on how far the other thread had come
    source("broken").write_cache(shard_rows=5, batch_size=4)
    assert contents(tmp_path / "broken") == contents(tmp_path / "alone")
    assert all((tmp_path / "broken" / "shards" / file.name).stat().st_mtime_ns == time for file, time in done.items())


class Breaking:
    """Data set in which some images cannot be read."""

    def __init__(self, dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key):
        if key[0] > 10:
            raise KeyError(key)
        return self.dataset[key]


def test_overwriting_replaces_a_cache_and_nothing_else(tmp_path):
    made(tmp_path / "cache")
    half = LatentData(ToyImages(), OURS, folder=str(tmp_path / "cache"), dtype="float16")
    half.write_cache(overwrite=True)
    assert opened(half)._store.manifest["identity"]["dtype"] == "float16"
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "me.txt").write_text("precious")
    with pytest.raises(ConfigurationError, match="is no latent cache and not empty"):
        LatentData(ToyImages(), OURS, folder=str(photos)).write_cache(overwrite=True)
    assert (photos / "me.txt").read_text() == "precious"
    (photos / "manifest.json").write_text("{}")  # of whatever else
    with pytest.raises(ConfigurationError, match="is no latent cache and not empty"):
        LatentData(ToyImages(), OURS, folder=str(photos)).write_cache(overwrite=True)
    assert (photos / "me.txt").read_text() == "precious"
    (tmp_path / "cache/manifest.json").write_text("{}")  # a cache of ours that is damaged
    with pytest.raises(ConfigurationError, match="cannot be read"):
        half.write_cache()
    half.write_cache(overwrite=True)
    assert opened(half)._store.manifest["identity"]["dtype"] == "float16"


# Processes -----------------------------------------------------------------------------------------------------------


def test_workers_read_what_the_process_itself_reads(tmp_path):
    data = made(tmp_path / "cache", ToyImages(variants=2, captions=True), text_encoder=WORDS)
    alone = list(data.train_dataloader())  # opens the files before workers are forked
    data.images.num_workers = 2
    for ours, theirs in zip(alone, data.train_dataloader(), strict=True):
        assert ours["captions"] == theirs["captions"]
        assert all(torch.equal(ours[name], theirs[name]) for name in ("mean", "logvar", "index", "labels", "text"))


def test_a_store_is_pickled_without_its_maps(tmp_path):
    store = made(tmp_path / "cache", shard_rows=100)._store
    before = store[3, 0]
    copy = pickle.loads(pickle.dumps(store))
    assert len(pickle.dumps(store)) < 4000
    assert torch.equal(copy[3, 0]["mean"], before["mean"])


def rank_batches(rank: int, folder: Path) -> None:
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    data = opened(LatentData(ToyImages(buckets=True), OURS, folder=str(folder / "cache")))  # both at once
    index = [batch["index"].tolist() for batch in data.train_dataloader()]
    (folder / f"rank-{rank}.json").write_text(json.dumps(index))


def test_ranks_share_an_epoch_between_them(tmp_path):
    data = made(tmp_path / "cache", ToyImages(buckets=True))
    children = [forked(rank_batches, rank, tmp_path) for rank in range(2)]
    assert [exit_code(child) for child in children] == [0, 0]
    parts = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [len(batch) for batch in parts[0]] == [len(batch) for batch in parts[1]]
    assert sorted({i for part in parts for batch in part for i in batch}) == data.images.train_index
    assert not {i for batch in parts[0] for i in batch} & {i for batch in parts[1] for i in batch}


class Trainer:
    """Stand-in with the attributes of a Trainer that tell a DataModule the part of its process."""

    distributed_sampler_kwargs = {"num_replicas": 3, "rank": 2}  # noqa: RUF012
    strategy = SimpleNamespace(root_device=torch.device("cpu"))


class Images(ImageModule):
    """DataModule of images that needs no files."""

    def setup(self, stage: str) -> None:
        self.train_index = self.val_index = list(range(9))

    def bucket_of(self, index: int) -> tuple[int, int]:
        return 8, 8


@pytest.mark.parametrize("kind", ["images", "latents", "encoded"])
def test_a_strategy_tells_the_part_of_a_process_and_workers_stay_for_training(tmp_path, kind):
    latents = torch.randn(30, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    save_tensors(tmp_path / "a.safetensors", {"latents": latents, "labels": torch.arange(30) % 3})
    data = {
        "images": lambda: Images(4, num_workers=1, seed=0, variants=1),
        "latents": lambda: LatentData(ToyImages(num_workers=1), OURS, cached=False),
        "encoded": lambda: EncodedData(str(tmp_path), held_out=5, num_workers=1),
    }[kind]()
    data.prepare_data()
    data.setup("fit")
    data.trainer = Trainer()
    for loader, training in ((data.train_dataloader(), True), (data.val_dataloader(), False)):
        assert (loader.sampler.num_replicas, loader.sampler.rank, loader.sampler.shuffle) == (3, 2, training)
        assert loader.persistent_workers is training
