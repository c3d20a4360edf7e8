"""Training autoencoders: ours and diffusers', what they lose, what is logged, and what a checkpoint is enough for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lit_efficient import (
    EMA,
    AutoencoderConfig,
    Autoencoding,
    ConfigurationError,
    DiffusersModelConfig,
    DigitImages,
    LatentCodec,
    Perceptual,
    SampleImages,
    build_autoencoder,
)
from lit_efficient.data.digit_images import TensorDictDataset
from lit_efficient.errors import CheckpointError
from lit_efficient.files.pictures import draw_grid
from lit_efficient.models.networks.autoencoder import autoencoder_loss, kl_divergence, sample_posterior
from tests import support
from tests.models.libraries.diffusers_autoencoders import DC, KINDS, KL, TINY, images, small
from tests.support import QUIET, assert_equal

OURS = AutoencoderConfig(latent_channels=2, width=8)
SMOOTH = F.interpolate(images(8, 2, 2), (16, 16), mode="bilinear")  # noise could not be compressed


trainer = partial(support.trainer, max_epochs=-1, num_sanity_val_steps=2, limit_val_batches=1.0)


def fit(module: Autoencoding, callbacks: list[Any] | None = None, data: Any = None, **arguments: Any) -> Any:
    loader = DataLoader(TensorDictDataset({"images": SMOOTH}), batch_size=4)
    torch.manual_seed(0)
    run = L.Trainer(callbacks=callbacks or [], **{**QUIET, "max_epochs": 1, **arguments})
    run.fit(module, datamodule=data) if data else run.fit(module, loader, loader)
    return run


def diffusers(fields: dict[str, Any], **arguments: Any) -> Autoencoding:
    return Autoencoding(DiffusersModelConfig(config_fields=fields), learning_rate=1e-2, **arguments)


@pytest.mark.turns(4, family="learns")
def test_it_learns_to_reconstruct_and_loads_from_its_checkpoint(tmp_path):
    L.seed_everything(0, verbose=False)
    module, data = Autoencoding(AutoencoderConfig(latent_channels=2, width=8)), DigitImages(image_size=16)
    module.configure_model()
    (before,) = trainer(default_root_dir=tmp_path).validate(module, data, verbose=False)
    run = trainer(default_root_dir=tmp_path, max_steps=200, limit_val_batches=0)
    run.fit(module, data)
    (after,) = trainer(default_root_dir=tmp_path).validate(module, data, verbose=False)
    assert after["val/loss"] < 0.3 * before["val/loss"]  # 0.16 (0.06 over seeds); after 90 steps 0.31 (0.05)
    assert after["val/psnr_db"] > before["val/psnr_db"] + 5
    assert run.optimizers[0].param_groups[0]["lr"] < 1e-9

    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Autoencoding.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).eval()
    pixels = torch.rand(2, 1, 16, 16)
    assert torch.equal(loaded(pixels), module.eval()(pixels))


# What is lost


def test_the_default_loss_is_what_stage_one_trains_with() -> None:
    module, x = Autoencoding(OURS), images(4, 16, 16)
    module.configure_model()
    module.log = module.log_dict = lambda *_, **__: None  # type: ignore[method-assign]
    for seed in range(2):
        torch.manual_seed(seed)
        ours = module.training_step({"images": x}, 0)
        torch.manual_seed(seed)
        assert torch.equal(ours, autoencoder_loss(module.autoencoder, x, 1e-4)[0])


@pytest.mark.parametrize(
    ("kind", "distance"),
    [
        ("l1", lambda e: e.abs()),
        ("l2", lambda e: e.square()),
        ("smooth", lambda e: torch.where(e.abs() < 0.1, e.square() / 0.2, e.abs() - 0.05)),
    ],
)
def test_loss_by_hand(kind: Any, distance: Any) -> None:
    module = diffusers(KL, kl_weight=0.3, reconstruction=kind)
    run = fit(module, limit_val_batches=0, limit_train_batches=0)
    x = images(4, 16, 16)
    mean, logvar = module.autoencoder.encode(x)
    decoded = module.autoencoder.decode(mean)
    terms = module._losses(x, decoded, mean, logvar)
    expected = distance(decoded - x).mean() + 0.3 * kl_divergence(mean, logvar)
    torch.testing.assert_close(terms["loss"], expected)
    torch.testing.assert_close(terms["error"], distance(decoded - x).mean().detach())
    assert run.global_step == 0


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_autoencoders_learn_and_say_how_well(kind: str) -> None:
    module = diffusers(KINDS[kind])
    values: list[dict[str, float]] = []

    class Values(L.Callback):
        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            values.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    fit(module, [Values()], max_epochs=12)
    first, last = values[0], values[-1]
    assert last["val/loss"] < 0.9 * first["val/loss"]
    assert ("train/kl" in last) is (kind == "AutoencoderKL")
    module.eval()
    parts = SMOOTH.split(4)
    with torch.no_grad():
        errors = [(module(x) - x).square().mean() for x in parts]
    assert last["val/psnr_db"] == pytest.approx(sum(10 * float(torch.log10(4 / e)) for e in errors) / 2, rel=1e-5)
    if kind != "AutoencoderKL":
        assert last["val/loss"] == pytest.approx(sum(map(float, errors)) / 2, rel=1e-5)


@torch.no_grad()
def test_validation_samples_the_posterior_at_the_same_draws() -> None:
    module = diffusers(KL)
    loader = DataLoader(TensorDictDataset({"images": SMOOTH}), batch_size=4, generator=torch.Generator())
    before = torch.get_rng_state()
    module.configure_model()
    torch.set_rng_state(before)
    runs = [L.Trainer(**QUIET).validate(module, loader, verbose=False)[0] for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert runs[0] == runs[1]
    losses = []
    for i, x in enumerate(SMOOTH.split(4)):
        mean, logvar = module.autoencoder.encode(x)
        z = sample_posterior(mean, logvar, torch.Generator().manual_seed(1_000_003 + i))
        losses.append(float(F.mse_loss(module.autoencoder.decode(z), x) + 1e-4 * kl_divergence(mean, logvar)))
    assert runs[0]["val/loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_mixed_precision_computes_the_terms_in_float32() -> None:
    module = diffusers(KL, perceptual=Perceptual())
    run = fit(module, precision="bf16-mixed", max_epochs=1)
    assert all(p.dtype == torch.float32 for p in module.parameters())
    assert run.callback_metrics["train/error"].dtype == torch.float32
    x = images(4, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        mean, logvar = module.autoencoder.encode(x)
        decoded = module.autoencoder.decode(mean)
        terms = module._losses(x, decoded, mean, logvar)
    assert decoded.dtype == torch.bfloat16
    assert terms["loss"].dtype == torch.float32
    torch.testing.assert_close(terms["error"], (decoded.float() - x).square().mean())


# The perceptual term


def filters() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3, stride=2))


def test_the_perceptual_term_and_its_gradients_by_hand() -> None:
    network, weight = filters(), 0.7
    module = diffusers(TINY, perceptual=Perceptual(network, ["1", ""], weight))
    fit(module, limit_val_batches=0, limit_train_batches=0)
    assert not any("perceptual" in name or "features" in name for name, _ in module.named_modules())
    x = images(4, 16, 16)
    decoded = module(x).detach().requires_grad_()
    terms = module._losses(x, decoded, decoded, None)
    (gradient,) = torch.autograd.grad(terms["loss"], decoded)

    by_hand = decoded.detach().clone().requires_grad_()
    distances = []
    for cut in (2, 3):
        ours, theirs = (network[:cut](pixels).movedim(1, -1) for pixels in (by_hand, x))
        ours, theirs = (f / (f.square().sum(-1, keepdim=True) + 1e-6).sqrt() for f in (ours, theirs))
        distances.append((ours - theirs).square().sum(-1).mean())
    expected = F.mse_loss(by_hand, x) + weight * sum(distances) / 2
    torch.testing.assert_close(terms["loss"], expected)
    torch.testing.assert_close(terms["perceptual"], (sum(distances) / 2).detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, by_hand)[0])
    assert not any(p.requires_grad for p in network.parameters())


def test_a_weight_of_zero_measures_and_trains_as_without() -> None:
    plain, measured = diffusers(TINY), diffusers(TINY, perceptual=Perceptual(weight=0.0))
    fit(plain)
    run = fit(measured)
    assert_equal(dict(plain.state_dict()), dict(measured.state_dict()))
    assert run.callback_metrics["train/perceptual"] > 0
    assert run.callback_metrics["val/perceptual"] > 0
    other = diffusers(TINY, perceptual=Perceptual(weight=1.0))
    fit(other)
    assert not torch.equal(next(other.parameters()), next(plain.parameters()))


def test_random_filters_are_the_same_in_every_run_and_notice_what_pixels_average_out() -> None:
    from lit_efficient.models.judges.perceptual import find_network, perceptual_distance

    before = torch.get_rng_state()
    one, two = (find_network(Perceptual(), 1, None, "test") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal(dict(one.network.state_dict()), dict(two.network.state_dict()))
    edge = torch.full((1, 1, 16, 16), -1.0)
    edge[..., 8:] = 1.0
    noise = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    noise *= 0.3 / noise.square().mean().sqrt()
    darker = torch.full_like(noise, 0.3)  # the same squared error
    assert perceptual_distance(one, edge, edge) == 0
    assert perceptual_distance(one, edge + noise, edge) > 2 * perceptual_distance(one, edge - darker, edge)


def test_a_vision_model_of_transformers_sees_what_it_expects(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
    )
    torch.manual_seed(0)
    ViTModel(config).eval().save_pretrained(tmp_path)
    module = diffusers(TINY, perceptual=Perceptual(str(tmp_path), ["layers.0"]))
    fit(module, limit_val_batches=0, limit_train_batches=0)
    x = images(2, 16, 16)
    decoded = module(x)
    terms = module._losses(x, decoded, decoded, None)
    assert terms["perceptual"] > 0
    (gradient,) = torch.autograd.grad(terms["loss"] - terms["error"], decoded, allow_unused=True)
    assert gradient.abs().sum() > 0


class JudgedImages(DigitImages):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.judge = filters()


def test_the_data_modules_judge_may_look() -> None:
    module = Autoencoding(OURS, perceptual=Perceptual("data.judge", ["0"], 0.1))
    data = JudgedImages(image_size=16)
    run = fit(module, data=data, limit_train_batches=2, limit_val_batches=1)
    assert run.callback_metrics["val/perceptual"] > 0
    assert not any(p.requires_grad for p in data.judge.parameters())
    with pytest.raises(ConfigurationError, match=r"perceptual: network is 'data\.critic'.*it has judge"):
        fit(Autoencoding(OURS, perceptual=Perceptual("data.critic", ["0"])), data=data)


# Checkpoints


@pytest.mark.turns(3)
@pytest.mark.parametrize("spec", [OURS, *(DiffusersModelConfig(config_fields=KINDS[kind]) for kind in KINDS)])
def test_a_checkpoint_alone_gives_the_autoencoder(spec: Any, tmp_path: Path) -> None:
    module = Autoencoding(spec)
    fit(module, limit_val_batches=0).save_checkpoint(tmp_path / "x.ckpt")
    loaded = build_autoencoder(str(tmp_path / "x.ckpt"))
    x = images(2, 16, 16)
    module.eval()
    codec = LatentCodec.declared(loaded)
    assert torch.equal(codec.moments(x)[0], module.autoencoder.encode(x)[0])
    named = codec.state_dict(embed=False)
    assert named["source"] == str(tmp_path / "x.ckpt")
    assert LatentCodec.from_state_dict(named).fingerprint() == codec.fingerprint()
    again = Autoencoding.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).eval()
    assert torch.equal(again(x), module(x))


def test_a_fine_tuned_folder_may_be_gone_when_its_checkpoint_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "vae"
    small(KL).network.bfloat16().save_pretrained(folder)
    module = Autoencoding(DiffusersModelConfig(str(folder), {"scaling_factor": 0.3}, dtype="bfloat16"))
    run = fit(module, limit_val_batches=0)
    run.save_checkpoint(tmp_path / "x.ckpt")
    start = small(KL).network.bfloat16().state_dict()["encoder.conv_in.weight"]
    assert not torch.equal(module.autoencoder.network.encoder.conv_in.weight, start)
    folder.rename(tmp_path / "gone")
    again = Autoencoding.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True).eval()
    assert torch.equal(again(images()), module.eval()(images()))
    assert again.autoencoder.network.config.scaling_factor == 0.3
    assert module.autoencoder.source is None  # what has trained is not what the folder holds
    with pytest.raises(ConfigurationError, match="there is no folder"):
        fit(Autoencoding(DiffusersModelConfig(str(folder))))


def test_the_average_is_what_a_checkpoint_of_weights_alone_holds(tmp_path: Path) -> None:
    ema = EMA(decay=0.5)
    module = diffusers(KL)
    saver = ModelCheckpoint(tmp_path, "x", save_weights_only=True, every_n_train_steps=2)
    run = fit(module, [ema, saver], limit_val_batches=0, enable_checkpointing=True, max_epochs=2)
    loaded: Any = build_autoencoder(str(tmp_path / "x.ckpt"))
    average = dict(ema.average(module))
    assert run.global_step == 4
    name = "network.encoder.conv_in.weight"
    assert not torch.equal(loaded.state_dict()[name], module.autoencoder.state_dict()[name])
    assert torch.equal(loaded.state_dict()[name], average[f"autoencoder.{name}"])


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"network.weight": torch.zeros(1)}, "hyper_parameters": {}}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="not a checkpoint of Autoencoding"):
        build_autoencoder(str(tmp_path / "a.ckpt"))
    fit(diffusers(KL), limit_val_batches=0).save_checkpoint(tmp_path / "b.ckpt")
    other = diffusers({**KL, "norm_num_groups": 2})  # the same shapes
    with pytest.raises(CheckpointError, match=r"another autoencoder: .*AutoencoderKL"):
        _resume(other, tmp_path / "b.ckpt")
    checkpoint = torch.load(tmp_path / "b.ckpt", weights_only=True)
    checkpoint["state_dict"]["autoencoder.network.lora_A"] = torch.zeros(1)
    torch.save(checkpoint, tmp_path / "c.ckpt")
    with pytest.raises(CheckpointError, match=r"c\.ckpt does not fit its autoencoder \(adapters\? merge them first"):
        build_autoencoder(str(tmp_path / "c.ckpt"))


def _resume(module: Autoencoding, path: Path) -> None:
    loader = DataLoader(TensorDictDataset({"images": SMOOTH}), batch_size=4)
    L.Trainer(**{**QUIET, "max_epochs": 2}).fit(module, loader, loader, ckpt_path=path, weights_only=True)


# What is shown, and what is refused


def test_grids_show_originals_beside_reconstructions(tmp_path: Path) -> None:
    import numpy as np
    from PIL import Image

    module = diffusers(KL)
    fit(module, [SampleImages(columns=2, rows=3, zoom=1)], max_epochs=1, default_root_dir=tmp_path)
    shown = module.eval().sample_images(6, seed=0)
    x = SMOOTH[:3]
    assert torch.equal(shown[::2], x)
    torch.testing.assert_close(shown[1::2], module(x).detach().clamp(-1, 1))
    (picture,) = (tmp_path / "samples").iterdir()
    expected = np.asarray(draw_grid(shown, 2, heads=["original", "reconstruction"]))
    assert np.array_equal(np.asarray(Image.open(picture)), expected)
    with pytest.raises(ConfigurationError, match="validate first"):
        diffusers(KL).sample_images(2, 0)


@pytest.mark.parametrize("fields", [TINY, DC])
def test_a_kl_weight_without_a_distribution_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    reason = f"kl_weight must be 0 or null for {fields['_class_name']}, a deterministic encoder, .*, got 0.1"
    with pytest.raises(ConfigurationError, match=reason):
        diffusers(fields, kl_weight=0.1)
    diffusers(fields, kl_weight=0.0)
    small(fields).network.save_pretrained(tmp_path / "vae")
    named = Autoencoding(DiffusersModelConfig(str(tmp_path / "vae")), kl_weight=0.1)
    with pytest.raises(ConfigurationError, match="deterministic encoder"):
        fit(named)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kl_weight": -1.0}, "kl_weight must be at least 0 or null, got -1.0"),
        ({"learning_rate": 0.0}, r"learning_rate must be above 0, got 0\.0"),
        ({"reconstruction": "l3"}, "reconstruction must be one of l1, l2, smooth, got 'l3'"),
        ({"autoencoder": DiffusersModelConfig(config_fields={"_class_name": "UNet2DModel"})}, "must be one of Auto"),
    ],
)
def test_arguments_are_checked_when_built(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Autoencoding(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weight": -1.0}, "weight must be at least 0"),
        ({"image_size": 0}, "image_size must be a whole number of at least 1 or null, got 0"),
        ({"network": "data.judge"}, "layers must be names of the network's layers .*, got"),
    ],
)
def test_a_perceptual_term_is_checked_when_described(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Perceptual(**wrong)


def test_batches_without_images_are_a_sentence() -> None:
    module = Autoencoding(OURS)
    module.configure_model()
    with pytest.raises(ConfigurationError, match=r"dictionaries with 'images', got \['mean'\]"):
        module.training_step({"mean": torch.zeros(1)}, 0)
