"""Training on a cache is training on the images: the same draws, the same weights."""

from dataclasses import replace

import diffusers
import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import save_file

from lit_efficient import (
    AlignmentHead,
    AutoencoderConfig,
    ChannelScaling,
    DiffusersModelConfig,
    DigitImages,
    DiTConfig,
    EncodedData,
    EncodedFields,
    EncodedNumbers,
    ExactResume,
    HiddenAlignment,
    LatentData,
    LatentDiffusion,
    LoRA,
    NonFiniteGuard,
    PhotoCrops,
    Samples,
    TeacherFeatures,
)
from lit_efficient.errors import ConfigurationError, DivergedError
from lit_efficient.models.libraries.latent_codec import LatentCodec, find_autoencoder
from tests.data.images.toy_images import ToyImages
from tests.data.test_latent_cache import WORDS

KL = DiffusersModelConfig(
    config_fields={
        "_class_name": "AutoencoderKL",
        "block_out_channels": [8, 8],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
    }
)
UNET = DiffusersModelConfig(
    config_fields={
        "_class_name": "UNet2DConditionModel",
        "sample_size": 4,
        "block_out_channels": [8, 8],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "layers_per_block": 1,
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
    }
)
NETWORK = DiTConfig(channels=4, size=4, patch_size=2, width=16, depth=2, heads=2, num_classes=10)


def fitted(
    data, steps: int = 6, callbacks=(), network: DiTConfig | DiffusersModelConfig = NETWORK, ckpt_path=None, **trainer
) -> LatentDiffusion:
    L.seed_everything(3, verbose=False)
    model = LatentDiffusion(network, samples=Samples(0))
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
    )
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return model


def distance(ours: LatentDiffusion, theirs: LatentDiffusion) -> float:
    pairs = zip(ours.network.state_dict().values(), theirs.network.state_dict().values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def pair(images, autoencoder, folder, **arguments) -> tuple[LatentData, LatentData]:
    """Cached and live."""
    cached = LatentData(images, autoencoder, folder=str(folder), build=True, **arguments)
    return cached, LatentData(images, autoencoder, folder=str(folder), cached=False, **arguments)


@pytest.mark.turns(3, family="from a cache")
@pytest.mark.parametrize("statistics", ["measured", "declared"])
def test_digits_from_the_cache_train_as_from_images_to_the_bit(tmp_path, statistics):
    images = DigitImages(image_size=16, batch_size=16)
    cached, live = pair(images, AutoencoderConfig(1, 4, 8), tmp_path / "cache", statistics=statistics)
    assert distance(fitted(cached), fitted(live)) == 0.0
    assert torch.equal(cached.codec.std, live.codec.std)
    assert cached.codec.fingerprint() == live.codec.fingerprint()
    if statistics == "measured":
        half = LatentData(
            images, AutoencoderConfig(1, 4, 8), folder=str(tmp_path / "half"), dtype="float16", build=True
        )
        assert 0 < distance(fitted(half), fitted(live)) < 0.02  # rounding, which Adam's first steps enlarge


def test_crops_of_two_flips_and_an_autoencoder_of_diffusers(tmp_path):
    """Two epochs and more, in which images come flipped or not; every batch is whole, so nothing rounds otherwise."""
    images = PhotoCrops(resolution=8, scales=[2.0], crops=4, horizontal_flip=True, batch_size=24, judge_steps=0)
    cached, live = pair(images, KL, tmp_path / "cache")
    network = replace(NETWORK, num_classes=2)
    assert distance(fitted(cached, 7, network=network), fitted(live, 7, network=network)) == 0.0
    assert cached.variants == 2


@pytest.mark.turns(3, family="from a cache")
def test_captions_in_the_cache_condition_as_those_that_are_encoded_live(tmp_path):
    images = ToyImages(count=30, size=16, channels=1, captions=True, labels=False, batch_size=5)
    arguments = {"text_encoder": WORDS, "statistics": "declared"}
    cached, live = pair(images, AutoencoderConfig(1, 4, 8), tmp_path / "cache", **arguments)
    ours, theirs = fitted(cached, 3, network=UNET), fitted(live, 3, network=UNET)
    assert distance(ours, theirs) == 0.0
    other = LatentData(ToyImages(count=30, size=16, captions=True, labels=False, batch_size=5), live.autoencoder, WORDS)
    other.cached, other.statistics = False, "declared"
    other.images.dataset.caption_of = lambda index: "always the same"
    assert distance(fitted(other, 3, network=UNET), ours) > 1e-4  # captions do matter


@pytest.mark.turns(3, family="from a cache")
def test_features_in_the_cache_align_as_those_of_the_teacher(tmp_path):
    images = DigitImages(image_size=16, batch_size=16)
    images.judge = torch.nn.Sequential(torch.nn.Conv2d(1, 6, 4, 4), torch.nn.Tanh()).requires_grad_(False)
    features = TeacherFeatures("data.judge", dtype="float32")
    cached, live = pair(images, AutoencoderConfig(1, 4, 8), tmp_path / "cache", features=features)
    arguments = {"projection": "mlp", "hidden": 8, "head": AlignmentHead(widths=[16, 6])}
    ours = fitted(cached, callbacks=[HiddenAlignment(1, None, **arguments)])
    theirs = fitted(live, callbacks=[HiddenAlignment(1, None, **arguments)])
    assert distance(ours, theirs) < 1e-6
    plain = LatentData(images, live.autoencoder, folder=live.folder, cached=False, features=None, statistics="declared")
    # The technique's own teacher, on the batch's images: declared statistics on both sides, as the caches differ.
    own = fitted(plain, callbacks=[HiddenAlignment(1, "data.judge", **arguments)])
    again = LatentData(images, live.autoencoder, folder=live.folder, features=features, statistics="declared")
    assert distance(fitted(again, callbacks=[HiddenAlignment(1, None, **arguments)]), own) < 1e-6
    assert distance(fitted(again), own) > 1e-4  # it does something


def test_a_run_on_a_cache_goes_on_in_the_middle_of_an_epoch(tmp_path):
    def data() -> LatentData:
        images = ToyImages(count=30, size=16, variants=3, batch_size=4)
        return LatentData(images, AutoencoderConfig(1, 4, 8), folder=str(tmp_path / "cache"), build=True)

    class Save(L.Callback):
        def on_train_batch_end(self, trainer, *rest) -> None:
            if trainer.global_step == 7:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    whole = fitted(data(), 9, [ExactResume(), Save()])
    resumed = fitted(data(), 9, [ExactResume()], ckpt_path=tmp_path / "half.ckpt")
    assert distance(whole, resumed) == 0.0
    assert 7 % len(data().images.train_dataloader()) != 0


@pytest.mark.turns(3, family="from a cache")
def test_latents_of_others_train_as_the_cache_that_they_were(tmp_path):
    """What a cache holds, published as one file: the same task, the same weights."""
    images = DigitImages(image_size=16, batch_size=16)
    data = LatentData(images, AutoencoderConfig(1, 4, 8), folder=str(tmp_path / "cache"), build=True)
    expected = fitted(data)
    rows = [data._store[index, 0] for index in range(len(data._store))]
    moments = torch.stack([torch.cat([row["mean"], row["logvar"]]) for row in rows])
    order = torch.tensor([*images.train_index, *images.val_index])
    (tmp_path / "published").mkdir()
    labels = torch.tensor([row["labels"] for row in rows])
    save_file({"z": moments[order], "labels": labels[order]}, tmp_path / "published/train.safetensors")
    save_file({"z": moments[:9], "labels": labels[:9]}, tmp_path / "published/val.safetensors")
    encoded = EncodedData(
        str(tmp_path / "published"),
        files="train*",
        val_files="val*",
        fields=EncodedFields("z"),
        numbers=EncodedNumbers(content="mean_logvar"),
        statistics=ChannelScaling(data.codec.mean.tolist(), data.codec.std.tolist()),
        batch_size=16,
    )
    encoded.setup("fit")
    encoded.train_index = [order.tolist().index(index) for index in images.train_index]
    assert distance(fitted(encoded), expected) == 0.0


def test_an_autoencoder_that_overflows_is_named_instead_of_the_gradients(tmp_path):
    vae = diffusers.AutoencoderKL(**{key: value for key, value in KL.config_fields.items() if key[0] != "_"})
    with torch.no_grad():
        for part in vae.encoder.modules():
            if isinstance(part, torch.nn.GroupNorm):
                part.weight.fill_(3e4)  # within float16, products are not
    vae.register_to_config(force_upcast=False)
    vae.save_pretrained(tmp_path / "vae")
    images = PhotoCrops(resolution=8, scales=[2.0], crops=4, batch_size=24, judge_steps=0)

    def fit(dtype: str) -> None:
        spec = DiffusersModelConfig(str(tmp_path / "vae"), dtype=dtype)
        data = LatentData(images, spec, cached=False, statistics="declared")
        callbacks = [LoRA(rank=2), NonFiniteGuard()]
        fitted(data, 2, callbacks, replace(NETWORK, num_classes=2))

    with pytest.raises(DivergedError, match="because the frozen autoencoder AutoencoderKL returned latents") as error:
        fit("float16")
    assert "float16 overflows in it, so set autoencoder.dtype to float32" in str(error.value)
    fit("float32")


def test_an_autoencoder_that_overflows_in_decoding_or_measuring_is_named(tmp_path):
    for side in ("encoder", "decoder"):
        vae = diffusers.AutoencoderKL(**{key: value for key, value in KL.config_fields.items() if key[0] != "_"})
        with torch.no_grad():
            for part in getattr(vae, side).modules():
                if isinstance(part, torch.nn.GroupNorm):
                    part.weight.fill_(3e4)  # within float16, products are not
        vae.register_to_config(force_upcast=False)
        vae.save_pretrained(tmp_path / side)
    images = PhotoCrops(resolution=8, scales=[2.0], crops=4, batch_size=24, judge_steps=0)
    spec = DiffusersModelConfig(str(tmp_path / "encoder"), dtype="float16")
    reason = (
        "AutoencoderKL returned {} that are not finite: float16 overflows in it, so set autoencoder.dtype to float32"
    )
    with pytest.raises(ConfigurationError, match="cannot be measured.*" + reason.format("latents")):
        fitted(LatentData(images, spec, cached=False), 1, [], replace(NETWORK, num_classes=2))
    for dtype in ("float16", "float32"):
        module = LatentDiffusion(replace(NETWORK, num_classes=2), sampling_steps=1, samples=Samples(0))
        module.configure_model()
        spec = DiffusersModelConfig(str(tmp_path / "decoder"), dtype=dtype)
        module.codec = LatentCodec.declared(find_autoencoder(spec))
        if dtype == "float32":
            assert module.eval().sample_images(2, 0).float().std() > 0
            continue
        with pytest.raises(ConfigurationError, match="cannot be shown or scored.*" + reason.format("images")):
            module.eval().sample_images(2, 0)
