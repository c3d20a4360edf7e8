"""Diffusion-DPO: the loss of diffusers' script, its reference, and runs that resume."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F

from lit_efficient import (
    ConfigurationError,
    DiffusersModelConfig,
    DiffusionPreference,
    ExactResume,
    ImageColumns,
    ImageData,
    ImageView,
    LatentData,
    LoRA,
    Samples,
)
from lit_efficient.data.images.image_set import ImageSet
from lit_efficient.errors import CheckpointError
from lit_efficient.models.libraries.latent_codec import LatentCodec, find_autoencoder
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig
from lit_efficient.tasks.latent_conditions import TextTraining
from lit_efficient.tasks.loading import load_latent_diffusion
from tests import tiny_pipelines
from tests.data.images.image_kit import write
from tests.support import QUIET, assert_equal
from tests.tasks.test_exact_resume_of_tasks import SaveEverywhere
from tests.tasks.test_image_condition_runs import Pictures
from tests.tasks.test_image_conditions import batch_of, noised, shaken, text_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:A caption has")


def made(folder: Path, **arguments: Any) -> DiffusionPreference:
    torch.manual_seed(0)
    spec = DiffusersModelConfig(str(folder))
    module = DiffusionPreference(spec, samples=Samples(0), label_dropout=0.0, guidance_scale=1.0, **arguments)
    module.codec = LatentCodec.declared(find_autoencoder(spec))
    module.text_encoder = TextEncoder.load(TextEncoderConfig(str(folder)))
    module.configure_model()
    module.log = lambda *_, **__: None  # type: ignore[assignment, method-assign]
    return module


@pytest.mark.turns(2)
@pytest.mark.parametrize("labelled", [True, False])
def test_the_loss_is_that_of_diffusers_script(labelled: bool, tmp_path: Path) -> None:
    """examples/research_projects/diffusion_dpo/train_diffusion_dpo_sdxl.py of diffusers, line by line."""
    base = tiny_pipelines.written("sdxl", tmp_path)
    module = made(tmp_path, beta=200.0, labelled=labelled)
    module.reference()
    shaken(module.network)  # type: ignore[arg-type]
    batch = batch_of(3)
    del batch["mask"]
    winners, losers = batch["images"], batch["condition"]
    if labelled:
        batch["labels"] = torch.tensor([0, 1, 0])
        first = torch.tensor([False, True, False]).view(3, 1, 1, 1)
        winners, losers = torch.where(first, winners, losers), torch.where(first, losers, winners)
    torch.manual_seed(7)
    output = module.training_step(batch, 0)
    output["loss"].backward()

    if labelled:  # the same batch with cached latents
        mean, logvar = module.codec.encode(batch.pop("images"))  # type: ignore[union-attr]
        torch.manual_seed(7)
        cached = module.training_step(batch | {"mean": mean, "logvar": logvar}, 0)["sample_loss"]
        torch.testing.assert_close(cached, output["sample_loss"], rtol=1e-5, atol=1e-6)
    torch.manual_seed(7)
    torch.rand(3)  # the draw of hidden captions
    mean, logvar = module.codec.encode(torch.cat([winners, losers]))  # type: ignore[union-attr]
    x0 = mean + (logvar / 2).exp() * torch.randn(mean.shape)  # type: ignore[operator]
    entries, noise, _, _ = noised(module, x0[:3], "sdxl")
    entries, noise = entries.repeat(2), noise.repeat(2, 1, 1, 1)
    table = tiny_pipelines.diffusers.DDPMScheduler.from_config(base.scheduler.config)
    noisy = table.add_noise(x0, noise, entries)
    hidden, pooled = text_of(module, batch["captions"])
    added = {"text_embeds": pooled.repeat(2, 1), "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 6)}

    def errors(unet: Any) -> torch.Tensor:
        found = unet(noisy, entries, hidden.repeat(2, 1, 1), added_cond_kwargs=added).sample
        return F.mse_loss(found, noise, reduction="none").mean(dim=[1, 2, 3])

    ours_w, ours_l = errors(module.network).chunk(2)
    with torch.no_grad():
        theirs_w, theirs_l = errors(base.unet).chunk(2)
    inside = -0.5 * 200.0 * ((ours_w - ours_l) - (theirs_w - theirs_l))
    expected = -F.logsigmoid(inside)
    torch.testing.assert_close(output["sample_loss"], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output["loss"], expected.mean(), rtol=1e-5, atol=1e-5)
    ours = [p.grad.clone() for p in module.network.parameters()]  # type: ignore[union-attr]
    module.zero_grad()
    expected.mean().backward()
    for one, parameter in zip(ours, module.network.parameters()):  # type: ignore[union-attr]
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.turns(2)
@pytest.mark.parametrize("hidden", [True, False])
def test_text_encoders_train_and_the_reference_reads_with_the_frozen_ones(hidden: bool, tmp_path: Path) -> None:
    base = tiny_pipelines.written("sd15", tmp_path)
    module = made(tmp_path, beta=200.0, text_training=TextTraining())
    module.label_dropout = 0.5 if hidden else 0.0
    module.reference()
    shaken(module.network)  # type: ignore[arg-type]
    shaken(module.text_networks)  # type: ignore[arg-type]
    module._text_trains = lambda: True  # type: ignore[method-assign]
    batch = batch_of(3)
    del batch["mask"]
    torch.manual_seed(7)
    output = module.training_step(batch, 0)
    output["loss"].backward()
    assert all(p.grad is not None for name, p in module.text_networks.named_parameters() if "position" in name)  # type: ignore[union-attr]

    torch.manual_seed(7)
    drops = torch.rand(3) < module.label_dropout
    captions = ["" if drop else caption for drop, caption in zip(drops, batch["captions"])]
    assert (captions != batch["captions"]) == hidden
    mean, logvar = module.codec.encode(torch.cat([batch["images"], batch["condition"]]))  # type: ignore[union-attr]
    x0 = mean + (logvar / 2).exp() * torch.randn(mean.shape)  # type: ignore[operator]
    entries, noise, _, _ = noised(module, x0[:3], "sd15")
    entries, noise = entries.repeat(2), noise.repeat(2, 1, 1, 1)
    table = tiny_pipelines.diffusers.DDPMScheduler.from_config(base.scheduler.config)
    noisy = table.add_noise(x0, noise, entries)
    ids = base.tokenizer(captions, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
    found = []
    for unet, encoder in ((module.network, module.text_networks["text_encoder"]), (base.unet, base.text_encoder)):  # type: ignore[index]
        with torch.no_grad():
            hidden_states = encoder(ids)[0].repeat(2, 1, 1)
            predicted = unet(noisy, entries, hidden_states).sample  # type: ignore[misc]
        found += F.mse_loss(predicted, noise, reduction="none").mean(dim=[1, 2, 3]).chunk(2)
    ours_w, ours_l, theirs_w, theirs_l = found
    expected = -F.logsigmoid(-0.5 * 200.0 * ((ours_w - ours_l) - (theirs_w - theirs_l)))
    torch.testing.assert_close(output["sample_loss"], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(
        ConfigurationError, match=r"text_training.tokens must be null, because the reference has no new"
    ):
        made(tmp_path, text_training=TextTraining(tokens={"<new>": "cat"}))


def fit(folder: Path, *callbacks: L.Callback, seed: int = 0, ckpt: Path | None = None) -> DiffusionPreference:
    L.seed_everything(seed, verbose=False)
    spec = DiffusersModelConfig(str(folder))
    module = DiffusionPreference(spec, samples=Samples(0), learning_rate=1e-3, guidance_scale=3.0)
    runner = L.Trainer(**QUIET | {"max_steps": 4, "max_epochs": -1, "val_check_interval": 4}, callbacks=[*callbacks])
    runner.fit(module, Pictures(folder), ckpt_path=ckpt)
    assert {"val/loss", "val/accuracy", "train/margin"} <= runner.callback_metrics.keys()
    return module


@pytest.mark.turns(2)
@pytest.mark.parametrize("adapters", [False, True])
def test_a_resumed_run_ends_with_the_same_bits_and_the_same_reference(adapters: bool, tmp_path: Path) -> None:
    base = tiny_pipelines.written("sd15", tmp_path / "base")
    techniques = lambda: [LoRA(rank=2)] if adapters else []  # noqa: E731
    whole = fit(tmp_path / "base", *techniques(), ExactResume(), SaveEverywhere(tmp_path))
    again = fit(tmp_path / "base", *techniques(), ExactResume(), seed=1, ckpt=tmp_path / "2.ckpt")
    assert_equal(whole.state_dict(), again.state_dict())
    for module in (whole, again):
        reference: Any = module.reference()
        network: Any = module.network
        x, t, text = torch.randn(1, 4, 8, 8), torch.tensor([500]), torch.randn(1, 5, 16)
        found = reference(network, functools.partial(prediction, network, x, t, text))
        with torch.no_grad():
            torch.testing.assert_close(found, base.unet(x, t, text).sample)
            assert not torch.equal(found, network(x, t, text).sample)
    loaded, _ = load_latent_diffusion(str(tmp_path / "4.ckpt"))
    assert_equal(loaded.state_dict(), whole.state_dict())
    if not adapters:
        tiny_pipelines.written("sd15", tmp_path / "other")
        unet = tmp_path / "other" / "unet"
        torch.manual_seed(9)
        shaken(base.unet)
        base.unet.save_pretrained(unet)
        with pytest.raises(CheckpointError, match="DiffusionPreference: the run of this checkpoint started from other"):
            fit(tmp_path / "other", ckpt=tmp_path / "2.ckpt")


def prediction(network: Any, *inputs: torch.Tensor) -> Any:
    return network(*inputs).sample


@pytest.mark.turns(3)
@pytest.mark.parametrize("labels", [[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
def test_a_table_of_pairs_with_labels(labels: list[int], tmp_path: Path) -> None:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    def encoded(value: int) -> bytes:
        held = io.BytesIO()
        Image.new("RGB", (64, 64), (value,) * 3).save(held, "PNG")
        return held.getvalue()

    rows = {
        "jpg_0": [encoded(10 + i) for i in range(4)],
        "jpg_1": [encoded(200 + i) for i in range(4)],
        "label_0": labels,
        "caption": [f"pair {i}" for i in range(4)],
    }
    pq.write_table(pa.table(rows), tmp_path / "pairs.parquet")
    data = ImageData(
        [ImageSet(str(tmp_path / "pairs.parquet"), condition="jpg_1")],
        view=ImageView(resolution=64),
        columns=ImageColumns(image="jpg_0", label="label_0", caption="caption"),
        batch_size=4,
        val_fraction=0,
        num_workers=0,
    )
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    tiny_pipelines.written("sd15", tmp_path / "base")
    module = made(tmp_path / "base", labelled=True)
    module.codec.encode = lambda images: (images, None)  # type: ignore[method-assign, union-attr]
    pairs = (127.5 * (module._pairs(batch)["mean"].mean(dim=(1, 2, 3)) + 1)).round()
    numbers = [int(caption.split()[1]) for caption in batch["captions"]]
    sides = [(10 + i, 200 + i) if labels[i] else (200 + i, 10 + i) for i in numbers]
    assert pairs.tolist() == [side[0] for side in sides] + [side[1] for side in sides]


def test_batches_without_pairs_are_refused(tmp_path: Path) -> None:
    tiny_pipelines.written("sd15", tmp_path)
    batch = batch_of(2)
    without = {name: value for name, value in batch.items() if name != "condition"}
    with pytest.raises(ConfigurationError, match="a batch must have a condition, the other image of each"):
        made(tmp_path).training_step(without, 0)
    for given in (
        without | {"condition_latents": torch.zeros(2, 4, 8, 8)},
        batch | {"latents": torch.zeros(2, 4, 8, 8)},
    ):
        with pytest.raises(ConfigurationError, match=r"and no (logvar|latents) of the other one.* condition: latents"):
            made(tmp_path).training_step(given, 0)
    for labels in (None, torch.tensor([0, 2])):
        given = batch if labels is None else batch | {"labels": labels}
        with pytest.raises(ConfigurationError, match="labels of a batch must be 0 or 1 with labelled, got"):
            made(tmp_path, labelled=True).training_step(given, 0)
    with pytest.raises(ConfigurationError, match="DiffusionPreference: beta must be"):
        made(tmp_path, beta=0.0)


@pytest.mark.turns(2)
@pytest.mark.parametrize(("format", "dtype"), [("int8", "float32"), ("posterior", "bfloat16")])
def test_a_cache_that_rounds_latents_rounds_both_images_of_a_pair(format: Any, dtype: Any, tmp_path: Path) -> None:
    """A pair of equal images has equal errors, and so a margin of 0, whatever the network has learned."""
    write(tmp_path / "images", [f"{n}.png" for n in range(4)])
    base = DiffusersModelConfig(str(tmp_path / "base"))
    tiny_pipelines.written("sd15", tmp_path / "base")

    def batches(condition: Any) -> LatentData:
        named = ImageSet(str(tmp_path / "images"), prompt="a photo", condition=str(tmp_path / "images"))
        images = ImageData([named], view=ImageView(64), batch_size=4, val_fraction=0)
        cache = {"folder": str(tmp_path / condition), "format": format, "dtype": dtype, "build": True}
        return LatentData(images, base, TextEncoderConfig(str(tmp_path / "base")), condition=condition, **cache)

    module = DiffusionPreference(base, samples=Samples(0), learning_rate=1e-2)
    runner = L.Trainer(**QUIET | {"max_steps": 3, "max_epochs": -1, "limit_val_batches": 0})
    with pytest.raises(
        ConfigurationError, match=r"condition of LatentData must be latents for a cache in (int8|bfloat16)"
    ):
        runner.fit(module, batches("pixels"))
    data = batches("latents")
    data.prepare_data()
    data.setup("fit")
    (batch,) = data.train_dataloader()
    mean = "latents" if format == "int8" else "mean"
    assert torch.equal(batch[mean], batch["condition_latents"])
    if format == "posterior":
        assert torch.equal(batch["logvar"], batch["condition_logvar"])
    exact = data.codec.encode(torch.stack([data.images.dataset[i, 0]["images"] for i in batch["index"].tolist()]))[0]
    assert 0 < (batch[mean] - exact).abs().max() < 0.05

    module.codec, module.text_encoder = data.codec, data.text_encoder
    module.configure_model()
    module.reference()
    shaken(module.network)  # type: ignore[arg-type]
    pairs = module._pairs(batch)
    if format == "posterior":
        pairs = {"latents": pairs["mean"]}  # each image draws its own latents
    module._pairs = lambda batch: pairs  # type: ignore[method-assign]
    done = module._compared(batch, None, module.process, None)
    assert done.chosen.abs().max() > 1.0
    assert torch.equal(done.chosen, done.rejected)
