"""Text encoders in training: adapters, live captions, own rates, exports that pipelines load."""

import copy
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from lit_efficient import DiffusersModelConfig, LatentDiffusion, LoRA
from lit_efficient.errors import ConfigurationError
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig
from lit_efficient.tasks.latent_conditions import TextTraining
from lit_efficient.tasks.latent_diffusion import Noised
from lit_efficient.tasks.latent_generator import Samples
from lit_efficient.tasks.loading import load_latent_diffusion
from tests.processes import run_ranks
from tests.support import QUIET
from tests.support_cli import export
from tests.tasks.captioned_latents import CaptionedLatents, collate
from tests.tiny_pipelines import written

CPU = torch.device("cpu")
# diffusers reads kohya's keys of an encoder only if its attention is adapted as a whole.
TARGETS = ["to_q", "to_v", "q_proj", "k_proj", "v_proj", "out_proj"]


def model(folder: Path, training: TextTraining | None, **arguments: Any) -> LatentDiffusion:
    settings = {"override": ["vae_scaling"], "samples": Samples(count=0), "learning_rate": 0.02} | arguments
    return LatentDiffusion(DiffusersModelConfig(str(folder)), text_training=training, **settings)


def data(folder: Path, cached: tuple[str, ...] = ("latents",)) -> CaptionedLatents:
    return CaptionedLatents(TextEncoder.load(TextEncoderConfig(str(folder))), cached, labelled=False)


def fitted(module: LatentDiffusion, source: Any, *callbacks: Any, steps: int = 3, **options: Any) -> L.Trainer:
    torch.manual_seed(0)
    trainer = L.Trainer(callbacks=list(callbacks), max_steps=steps, **QUIET | options)
    trainer.fit(module, source)
    return trainer


def embedded(module: LatentDiffusion, caption: str) -> Any:
    with torch.no_grad():
        return module.eval().conditioning.of_batch({"captions": [caption]}, CPU)


@pytest.mark.turns(6, family="slow")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_adapters_of_the_unet_and_its_encoders_reach_the_pipeline(family: str, tmp_path: Path) -> None:
    pipeline = written(family, tmp_path / "base")
    source = data(tmp_path / "base")
    frozen = source.text_encoder.encode(["one 1"])
    module = model(tmp_path / "base", TextTraining())
    fitted(module, source, LoRA(rank=2, alpha=6.0, targets=TARGETS)).save_checkpoint(tmp_path / "a.ckpt")
    ours = embedded(module, "one 1")
    assert (ours.text - frozen.hidden).abs().max() > 1e-3
    assert torch.equal(source.text_encoder.encode(["one 1"]).hidden, frozen.hidden)
    again, _ = load_latent_diffusion(str(tmp_path / "a.ckpt"))
    assert torch.equal(embedded(again, "one 1").text, ours.text)
    assert export([str(tmp_path / "a.ckpt"), "--format", "peft", "--output", str(tmp_path / "out")]) == 0
    count = {"sd15": 1, "sdxl": 2}[family]
    adapted = sum(".lora_A" in name for name in dict(module.named_parameters()))  # each has one factor A
    assert adapted == len([name for name, _ in module.named_modules() if name.endswith(tuple(TARGETS))])
    files = {"pytorch_lora_weights": "lora_A.weight", "kohya": "lora_down.weight"}
    for file, ending in files.items():
        keys = load_file(tmp_path / "out" / f"{file}.safetensors")
        assert sum(key.endswith(ending) for key in keys) == adapted
        if file == "kohya":
            te = ["lora_te_"] if count == 1 else ["lora_te1_", "lora_te2_"]
            assert all(f"{name}text_model_encoder_layers_0_self_attn_q_proj.alpha" in keys for name in te)
        fresh = written(family, tmp_path / file)
        if file == "kohya":
            fresh.load_lora_weights(tmp_path / "out", weight_name="kohya.safetensors")
        else:
            fresh.load_lora_weights(tmp_path / "out")
        parts = [fresh.unet, fresh.text_encoder, *([fresh.text_encoder_2] if count == 2 else [])]
        loaded = [name for part in parts for name, _ in part.named_parameters() if ".lora_A." in name]
        assert len(loaded) == adapted
        given = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False, "device": "cpu"}
        with torch.no_grad():
            found = fresh.encode_prompt("one 1", **given)
            torch.testing.assert_close(found[0], ours.text, rtol=1e-5, atol=1e-5)
            x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
            t = torch.tensor([300])
            more = {}
            if count == 2:
                torch.testing.assert_close(found[2], ours.pooled, rtol=1e-5, atol=1e-5)
                more = {"added_cond_kwargs": {"text_embeds": found[2], "time_ids": torch.zeros(1, 6)}}
            theirs = fresh.unet(x, t, found[0], **more).sample
            torch.testing.assert_close(module.network(x, t, found[0], **more).sample, theirs, rtol=1e-5, atol=1e-5)
            base = pipeline.unet(x, t, pipeline.encode_prompt("one 1", **given)[0], **more).sample
            assert (base - theirs).abs().max() > 1e-3


def test_one_encoder_of_several_trains_for_a_part_of_the_steps_at_a_rate_of_its_own(tmp_path: Path) -> None:
    written("sdxl", tmp_path)

    class Watch(L.Callback):
        def __init__(self) -> None:
            self.seen: list[dict[str, torch.Tensor]] = []
            self.rates: list[list[float]] = []

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.seen.append({name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad})
            self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    lora = LoRA(rank=2, targets=TARGETS, rates={"text_networks": 0.25})
    module = model(tmp_path, TextTraining(["text_encoder_2"], until=0.5))
    fitted(module, data(tmp_path), lora, watch := Watch(), steps=6)
    assert list(module.text_networks) == ["text_encoder_2"]
    assert all(rates[1] == 0.25 * rates[0] for rates in watch.rates)
    assert len(watch.rates[0]) == 2
    for step in range(1, 6):
        for name, value in watch.seen[step].items():
            moved = not torch.equal(value, watch.seen[step - 1][name])
            own = "text_networks" in name
            if own and step >= 3:
                assert not moved, (step, name)
            elif not own or ".layers.0." in name:  # the last layer of SDXL's encoders is not used
                assert moved or "lora_A" in name, (step, name)


def test_live_captions_give_the_loss_of_the_frozen_encoder_before_the_first_step(tmp_path: Path) -> None:
    written("sdxl", tmp_path)
    batch = next(iter(data(tmp_path).val_dataloader()))
    losses = []
    for training in (None, TextTraining()):
        module = model(tmp_path, training, label_dropout=0.5)
        source = data(tmp_path)
        module.text_encoder, module.codec = source.text_encoder, source.codec
        module.configure_model()
        torch.manual_seed(1)
        module.log = lambda *_, **__: None  # without a trainer
        losses.append(module.training_step(batch, 0)["loss"])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)


def test_live_captions_of_sd3_without_t5_have_zeros_in_its_place(tmp_path: Path) -> None:
    written("sd3", tmp_path, third=False)
    frozen = TextEncoder.load(TextEncoderConfig(str(tmp_path)))
    module = LatentDiffusion(DiffusersModelConfig(str(tmp_path)), text_training=TextTraining())
    module.text_encoder = frozen
    module.configure_model()
    found = module.live_text.encode(["one", "two"])
    assert found.hidden.shape == (2, 77 + 256, 40)
    torch.testing.assert_close(found.hidden, frozen.encode(["one", "two"]).hidden)


def test_an_encoder_is_trained_in_full_and_averaged_copies_hold_their_own(tmp_path: Path) -> None:
    written("sd15", tmp_path)
    module = model(tmp_path, TextTraining())
    fitted(module, data(tmp_path))
    twin = copy.deepcopy(module)
    before = embedded(module, "one 1").text
    with torch.no_grad():
        for parameter in twin.text_networks.parameters():
            parameter.mul_(0.5)
    assert torch.equal(embedded(module, "one 1").text, before)
    assert not torch.equal(embedded(twin, "one 1").text, before)


@pytest.mark.parametrize(
    ("training", "cached", "said"),
    [
        (TextTraining(["text_encoder_2"]), ("latents",), "text_training.encoders must be a list of at least one of"),
        (TextTraining(), ("latents", "text"), "that the frozen encoder computed.*cached_text: false"),
    ],
)
def test_what_contradicts_training_is_refused(
    training: TextTraining, cached: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    written("sd15", tmp_path)
    with pytest.raises(ConfigurationError, match=said):
        fitted(model(tmp_path, training), data(tmp_path, cached))
    with pytest.raises(ConfigurationError, match=r"text_training.until must be above 0 and at most 1, got 0"):
        TextTraining(until=0.0)


class SameDraws(LatentDiffusion):
    """Draws the same noise and time for each sample, and steps by SGD, which rounding does not change much."""

    def _noised(self, x0: torch.Tensor, *given: Any) -> Noised:
        rows = []
        for row in x0.split(1):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                rows.append(super()._noised(row, *given))
        return Noised(*(torch.cat(parts) for parts in zip(*(row[:3] for row in rows))))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def trained_together(folder: Path, adapted: bool, rank: int | None, **options: Any) -> dict[str, torch.Tensor]:
    """Train two steps with batches of 4, or with a rank's 2 of them; return the trained parameters and check others."""
    source = data(folder)
    for item in source.items:
        item.pop("logvar", None)
    own = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    loader = DataLoader(source.items, batch_size=4, collate_fn=lambda rows: collate(rows[own]))  # type: ignore[arg-type]
    source.train_dataloader = lambda: loader  # type: ignore[method-assign]
    given: Any = {"override": ["vae_scaling"], "samples": Samples(count=0), "label_dropout": 0.0}
    given["guidance_scale"] = 1.0
    module = SameDraws(DiffusersModelConfig(str(folder)), text_training=TextTraining(), **given)
    callbacks = [LoRA(rank=2, targets=TARGETS)] if adapted else []
    fitted(module, source, *callbacks, steps=2, limit_val_batches=0, use_distributed_sampler=False, **options)
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def _train_on_two(folder: Path, adapted: bool) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    found = trained_together(folder, adapted, rank, devices=2, strategy="ddp")
    if rank == 0:
        torch.save(found, "two.pt")


@pytest.mark.turns(2, family="ranks")
@pytest.mark.parametrize("adapted", [True, False])
def test_two_processes_train_encoders_as_one_does(adapted: bool, tmp_path: Path) -> None:
    """DDP does not wait for the last layer of SDXL's first encoder, on which no output depends."""
    written("sdxl", tmp_path / "base")
    run_ranks(_train_on_two, tmp_path, tmp_path / "base", adapted)
    two = torch.load(tmp_path / "two.pt")
    one = trained_together(tmp_path / "base", adapted, None)
    assert two.keys() == one.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-5, msg=name)
    first = [name for name in one if "text_networks.text_encoder." in name]
    assert any(".layers.1." in name for name in first)
