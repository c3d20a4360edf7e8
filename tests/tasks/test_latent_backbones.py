"""LatentDiffusion with every kind of network and condition: what it is given, hides, checks and carries along."""

import logging
import shutil
from functools import partial

import lightning.pytorch as L
import pytest
import torch

from lit_efficient import (
    CaptionReading,
    ConfigurationError,
    DiTConfig,
    LatentDiffusion,
    LoRA,
    SampleImages,
    Samples,
    SNRWeighting,
    StochasticDepth,
)
from lit_efficient.errors import CheckpointError
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.networks.condition import Condition
from tests import support
from tests.models.libraries.test_backbones import CONDITIONED, DIT, FLUX, PIXART, SANA, SD3, SDXL, UNET
from tests.support import assert_equal
from tests.tasks.captioned_latents import T5, CaptionedLatents, JudgedLatents, text_encoder
from tests.tasks.test_exact_resume_of_tasks import SaveEverywhere, run

TEXT_DIT = DiTConfig(channels=4, size=8, width=16, depth=1, heads=2, num_classes=3, context_width=16)
POOLED = {"pooled_projection_dim": 8}


def model(fields, **changed):
    return DiffusersModelConfig(config_fields={**fields, **changed})


def task(backbone=TEXT_DIT, **arguments) -> LatentDiffusion:
    return LatentDiffusion(backbone, **{"sampling_steps": 2, "samples": Samples(0), **arguments})


trainer = partial(support.trainer, max_epochs=-1, max_steps=3, num_sanity_val_steps=2, limit_val_batches=1.0)


def built(backbone=TEXT_DIT, encoder=None, **arguments) -> LatentDiffusion:
    torch.manual_seed(0)
    module = task(backbone, **arguments)
    module.configure_model()
    module.text_encoder = encoder
    module.log = lambda *_, **__: None
    for parameter in module.network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return module


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def fitted(tmp_path, data, backbone=TEXT_DIT, **arguments):
    L.seed_everything(0, verbose=False)
    module = task(backbone, learning_rate=1e-2, label_dropout=0.3, **arguments)
    trainer(default_root_dir=tmp_path, num_sanity_val_steps=0).fit(module, data)
    return module


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    ("fields", "sampler", "process"),
    [
        ({**UNET, "num_class_embeds": 4}, "ddim", {"schedule": "linear", "prediction": "eps"}),
        ({**CONDITIONED, "num_class_embeds": 4}, "dpmsolver++", {"schedule": "scaled_linear", "prediction": "v"}),
        ({**SDXL, "projection_class_embeddings_input_dim": 32}, "euler", {"schedule": "linear", "prediction": "v"}),
        ({**DIT, "num_embeds_ada_norm": 3}, "heun", {"schedule": "linear", "prediction": "eps"}),
        (PIXART, "heun", {}),
        (SANA, "euler", {}),
        ({**SD3, **POOLED}, "dpmsolver++", {}),
        ({**FLUX, **POOLED}, "euler", {}),
        ({**PIXART, "out_channels": 4}, "euler", {"schedule": "edm", "prediction": "edm"}),
    ],
    ids=lambda value: value.get("_class_name") if isinstance(value, dict) else value,
)
def test_every_backbone_trains_and_samples_under_guidance_with_rescale(tmp_path, fields, sampler, process):
    takes_text = fields["_class_name"] not in ("UNet2DModel", "DiTTransformer2DModel")
    data = JudgedLatents(text_encoder() if takes_text else None)
    module = task(
        model(fields), sampler=Sampler(sampler, guidance_rescale=0.7), sampling_steps=4, samples=Samples(2), **process
    )
    before = None
    runner = trainer(default_root_dir=tmp_path, num_sanity_val_steps=1)
    runner.fit(module, data)
    assert runner.callback_metrics["val/brightness"].isfinite()
    assert runner.callback_metrics["val/loss"] < 4
    before = torch.get_rng_state()
    guided, plain = (module.eval().sample_images(3, seed=0) for module.guidance_scale in (5.0, 1.0))
    assert guided.shape == (3, 1, 32, 32)
    assert not torch.equal(guided, plain)
    assert torch.equal(before, torch.get_rng_state())


def test_one_draw_hides_a_samples_label_and_text_together_and_nothing_is_the_empty_caption():
    encoder = text_encoder()
    module, seen = built(encoder=encoder, label_dropout=0.5), []
    module.network.register_forward_pre_hook(
        lambda _, arguments, kwargs: seen.append((arguments[2], kwargs["context"])), with_kwargs=True
    )
    count = 200
    labels = torch.arange(count) % 3
    batch = {"latents": torch.zeros(count, 4, 8, 8), "labels": labels, "captions": ["a cat"] * count}
    module.training_step(batch, 0)
    (told, text), (empty, cat) = seen[0], encoder.encode(["", "a cat"]).hidden
    hidden = told == 3
    assert hidden.float().mean().item() == pytest.approx(0.5, abs=0.1)
    assert torch.equal(told[~hidden], labels[~hidden])
    for row, gone in zip(text, hidden, strict=True):
        assert torch.equal(row, empty if gone else cat)


def test_guidance_moves_away_from_the_empty_caption():
    encoder = text_encoder(T5)
    module = built(model(CONDITIONED), encoder=encoder).eval()
    start = {"generator": torch.Generator().manual_seed(0), "steps": 1}
    cat, nothing = (module.sample(captions=[c], guidance_scale=1.0, **start) for c in ("a cat", ""))
    seen = []
    module.network.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs), with_kwargs=True)
    module.sample(captions=["a cat"], guidance_scale=3.0, **start)
    wanted = encoder.encode(["a cat", ""])
    assert torch.equal(seen[0]["encoder_hidden_states"], wanted.hidden)
    assert torch.equal(seen[0]["encoder_attention_mask"], wanted.mask)
    assert not torch.equal(cat, nothing)


@pytest.mark.turns(3, family="from a cache")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fields", [None, T5], ids=["clip", "t5"])
def test_training_on_caches_is_training_on_images_and_captions(tmp_path, deterministic, fields):
    ends = []
    for cached in ((), ("latents",), ("latents", "text")):
        data = CaptionedLatents(text_encoder(fields), cached, deterministic)
        assert ("images" in data.items[0]) == (not cached)
        ends.append(weights(fitted(tmp_path, data)))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    assert not torch.equal(ends[0], weights(fitted(tmp_path, CaptionedLatents(text_encoder(), (), not deterministic))))


@pytest.mark.turns(4, family="resumed")
def test_interrupted_training_on_images_and_captions_resumes_exactly(tmp_path):
    def make(folder):
        backbone = DiTConfig(channels=4, size=8, width=16, depth=2, heads=2, num_classes=3, context_width=16)
        module = task(backbone, label_dropout=0.3, samples=Samples(3))
        return (
            module,
            JudgedLatents(text_encoder(), count=20),
            [StochasticDepth(0.5, skip="sample"), SNRWeighting(gamma=1.0)],
        )

    whole = run(make, tmp_path, 0, SaveEverywhere(tmp_path))
    for step in (1, 4):
        assert_equal(whole, run(make, tmp_path, 100 + step, ckpt_path=tmp_path / f"{step}.ckpt"))


def test_gradients_reach_no_encoder(tmp_path):
    data = CaptionedLatents(text_encoder())
    module = fitted(tmp_path, data)
    frozen = [*data.text_encoder.network.parameters(), *data.codec.autoencoder.parameters()]
    assert all(p.grad is None and not p.requires_grad for p in frozen)
    assert not {id(p) for p in frozen} & {id(p) for p in module.parameters()}


def test_unconditional_models_need_guidance_of_one(tmp_path):
    plain = DiTConfig(channels=4, size=8, width=16, depth=1, heads=2, num_classes=0)
    with pytest.raises(ConfigurationError, match="guidance_scale must be 1 for a backbone that takes no conditions"):
        trainer(default_root_dir=tmp_path).fit(task(plain), CaptionedLatents())
    module = task(plain, guidance_scale=1.0, samples=Samples(2))
    data = JudgedLatents()  # its labels are no business of this network, nor of its judgement
    trainer(default_root_dir=tmp_path).fit(module, data)
    assert data.judged[-1] == (2, None)
    assert module.eval().sample_images(3, seed=0).shape == (3, 1, 32, 32)
    predicted = trainer(default_root_dir=tmp_path).predict(module, data)
    assert sum(len(part) for part in predicted) == 12
    with pytest.raises(
        ConfigurationError, match=r"the number of samples must be the same in labels, captions and count, got \[\]"
    ):
        module.sample()


def test_latents_of_other_sides_and_of_several_sizes(tmp_path):
    module = task(model(CONDITIONED))
    trainer(default_root_dir=tmp_path, num_sanity_val_steps=0).fit(
        module, CaptionedLatents(text_encoder(), size=(32, 16), labelled=False)
    )
    assert module.latent_size == (8, 4)
    assert module.eval().sample(captions=["a cat"], steps=1).shape == (1, 4, 8, 4)
    assert module.sample(captions=["a cat"], steps=1, size=(4, 4)).shape == (1, 4, 4, 4)
    ours = built(encoder=text_encoder())
    for size in ((8, 8), (4, 12)):
        batch = {"latents": torch.randn(2, 4, *size), "labels": torch.arange(2), "captions": ["a", "b"]}
        assert ours.training_step(batch, 0)["sample_loss"].isfinite().all()


def test_samples_are_made_for_the_validations_captions_or_for_given_ones(tmp_path):
    data = JudgedLatents(text_encoder())
    module = task(samples=Samples(5))
    runner = trainer(default_root_dir=tmp_path, callbacks=[SampleImages(rows=1, columns=4)])
    runner.fit(module, data)
    assert data.judged == [(3, [0, 1, 2]), (5, [0, 1, 2, 0, 1])]
    asked = []
    encode = module.text_encoder.encode
    module.text_encoder.encode = lambda captions, *where: asked.append(captions) or encode(captions, *where)
    module.eval().sample_images(3, seed=0)
    assert asked[0] == ["one 0", "two 1", "three 2"]
    assert module.image_captions(2) == ["0: one 0", "1: two 1"]
    assert (tmp_path / "samples" / "step_0000003.png").is_file()
    fixed = task(model(CONDITIONED), samples=Samples(0, prompts=["a", "b"]))
    fixed.text_encoder, asked[:] = module.text_encoder, []
    fixed.configure_model()
    fixed.codec = module.codec
    fixed.eval().sample_images(3, seed=0)
    assert asked[0] == ["a", "b", "a"]
    assert fixed.image_captions(3) == ["a", "b", "a"]


def test_without_a_judge_there_are_no_scores_and_it_is_said_once(tmp_path, caplog):
    module = task(samples=Samples(5))
    with caplog.at_level(logging.INFO):
        runner = trainer(default_root_dir=tmp_path, max_steps=6)
        runner.fit(module, CaptionedLatents(text_encoder()))
    said = [record for record in caplog.records if "cannot score samples" in record.getMessage()]
    assert len(said) == 1
    assert {name for name in runner.callback_metrics if name.startswith("val/")} >= {"val/loss"}


def test_a_checkpoint_alone_samples_from_a_prompt(tmp_path):
    network = built(model(CONDITIONED)).network
    network.save_pretrained(tmp_path / "base" / "unet")
    named = DiffusersModelConfig(str(tmp_path / "base"), subfolder="unet")
    data = CaptionedLatents(text_encoder(), labelled=False)
    module = task(named)
    runner = trainer(default_root_dir=tmp_path)
    runner.fit(module, data)
    runner.save_checkpoint(tmp_path / "a.ckpt")
    shutil.rmtree(tmp_path / "base")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert set(stored["state_dict"]) == {f"network.{name}" for name in network.state_dict()}
    loaded = LatentDiffusion.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).eval()
    for count in (2, 3):
        assert torch.equal(loaded.sample_images(count, seed=1), module.eval().sample_images(count, seed=1))
    before = torch.get_rng_state()
    one, other = (loaded.sample(captions=[c], generator=torch.Generator().manual_seed(0)) for c in ("a cat", "two"))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(one, other)


def test_another_text_encoder_than_the_checkpoints_is_refused(tmp_path):
    runner = trainer(default_root_dir=tmp_path)
    runner.fit(task(), CaptionedLatents(text_encoder()))
    runner.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="texts of another encoder"):
        trainer(default_root_dir=tmp_path).fit(
            task(), CaptionedLatents(text_encoder(T5)), ckpt_path=tmp_path / "a.ckpt", weights_only=True
        )
    same = CaptionedLatents(text_encoder())
    module = task()
    trainer(default_root_dir=tmp_path, max_steps=4).fit(module, same, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert module.text_encoder is same.text_encoder  # not held twice
    predicted = trainer(default_root_dir=tmp_path).predict(module, same)
    assert sum(len(part) for part in predicted) == 12


@pytest.mark.parametrize("fields", [CONDITIONED, {**SD3, **POOLED}], ids=lambda fields: fields["_class_name"])
def test_lora_trains_adapters_only_and_diffusers_loads_them(tmp_path, fields):
    from diffusers import SD3Transformer2DModel, UNet2DConditionModel

    from lit_efficient.export.adapters import export_checkpoint

    torch.manual_seed(0)
    data = CaptionedLatents(text_encoder(), labelled=False)
    module = task(model(fields), learning_rate=1e-2, guidance_scale=1.0)
    module.configure_model()
    base = {name: tensor.clone() for name, tensor in module.network.state_dict().items()}
    lora = LoRA(rank=2, targets=["to_q", "to_k", "to_v"])
    runner = trainer(default_root_dir=tmp_path, callbacks=[lora])
    runner.fit(module, data)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"lora_A", "lora_B"}
    frozen = {name: p for name, p in module.network.named_parameters() if name in base}
    assert len(frozen) > 10
    assert all(torch.equal(parameter, base[name]) for name, parameter in frozen.items())
    runner.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    export_checkpoint(tmp_path / "a.ckpt", tmp_path / "peft", "peft", check=False)
    kind = {"UNet2DConditionModel": UNet2DConditionModel, "SD3Transformer2DModel": SD3Transformer2DModel}
    theirs = kind[fields["_class_name"]](**{k: v for k, v in fields.items() if not k.startswith("_")})
    theirs.load_state_dict(base)
    theirs.load_lora_adapter(str(tmp_path / "peft"), prefix="base_model.model", weight_name="adapter_model.safetensors")
    x, t = torch.randn(2, 4, 8, 8), torch.tensor([0.3, 0.6])
    found = text_encoder().encode(["a cat", ""])
    condition = Condition(text=found.hidden, pooled=found.pooled if module.shape.pooled_width else None)
    ours = module.eval()(x, t, condition)
    module.network = theirs.eval()
    torch.testing.assert_close(module(x, t, condition), ours, atol=1e-5, rtol=1e-4)
    theirs.disable_lora()
    assert not torch.allclose(module(x, t, condition), ours, atol=1e-4)


@pytest.mark.parametrize(
    ("backbone", "data", "message"),
    [
        (model({**CONDITIONED, "cross_attention_dim": 24}), {}, "takes text of width 24; the text encoder's is 16"),
        (model({**SD3, "pooled_projection_dim": 9}), {}, "text of pooled_width 9; the text encoder's is 8"),
        (model({**UNET, "num_class_embeds": 4}), {}, "has a text encoder, but the backbone UNet2DModel takes no text"),
        (model(CONDITIONED), {"encoder": None}, "guidance_scale must be 1 without a text encoder"),
        (
            model({**CONDITIONED, "num_class_embeds": 3}),
            {},
            "num_classes must be 3, .*num_class_embeds has one row more.*, got 2",
        ),
        (
            model({**PIXART, "in_channels": 3, "out_channels": 3}),
            {},
            r"latents \(3, 8, 8\); the data's are \(4, 8, 8\)",
        ),
        (model({**PIXART, "patch_size": 3}), {}, "must be multiples of 3 for PixArtTransformer2DModel"),
        (DiTConfig(channels=4, size=16, num_classes=3, context_width=16), {}, "backbone.size must be 8, as the data"),
        (
            model({**SD3, **POOLED}),
            {"captions": CaptionReading(padding="hidden")},
            "SD3Transformer2DModel cannot mask tokens",
        ),
    ],
)
def test_what_does_not_agree_is_refused_before_training(tmp_path, backbone, data, message):
    encoder = data["encoder"] if "encoder" in data else text_encoder(**data)
    with pytest.raises(ConfigurationError, match=message):
        trainer(default_root_dir=tmp_path).fit(task(backbone), CaptionedLatents(encoder))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"labels"}, "labels are missing"),
        ({"captions"}, "captions are missing"),
        ({"latents"}, "a batch must have images, latents, or mean"),
    ],
)
def test_what_a_batch_lacks_is_named(missing, message):
    module = built(encoder=text_encoder())
    batch = {"latents": torch.zeros(1, 4, 8, 8), "labels": torch.zeros(1, dtype=torch.long), "captions": ["a"]}
    with pytest.raises(ConfigurationError, match=message):
        module.training_step({name: value for name, value in batch.items() if name not in missing}, 0)


def test_embeddings_without_an_encoder_train_only_where_nothing_is_hidden():
    text = {"text": torch.randn(2, 5, 16), "text_mask": torch.ones(2, 5, dtype=torch.bool)}
    batch = {"latents": torch.zeros(2, 4, 8, 8), "labels": torch.arange(2), **text}
    with pytest.raises(ConfigurationError, match="the embedding of the empty caption, but there is no text encoder"):
        built().training_step(batch, 0)
    assert built(label_dropout=0.0, guidance_scale=1.0).training_step(batch, 0)["loss"].isfinite()
    labelled = built(DiTConfig(channels=4, size=8, width=16, depth=1, heads=2, num_classes=3))
    with pytest.raises(ConfigurationError, match="captions must be null for DiT, which takes no text"):
        labelled.sample(torch.arange(1), captions=["a"])
    with pytest.raises(ConfigurationError, match="images, but there is no autoencoder to encode them"):
        built(encoder=text_encoder()).training_step(
            {"images": torch.zeros(1, 1, 32, 32), "labels": torch.arange(1), "captions": ["a"]}, 0
        )


SMALL_DIT = DiTConfig(channels=4, size=8, width=16, depth=1, heads=2, num_classes=3)


def test_data_without_an_autoencoder_or_a_text_encoder_leaves_the_modules_own(tmp_path):
    data = JudgedLatents(cached=("latents",))
    codec, data.codec = data.codec, None
    module = task(SMALL_DIT, samples=Samples(2))
    trainer(default_root_dir=tmp_path).fit(module, data)  # and no samples are made for a judge that could not see them
    assert not data.__dict__.get("judged")
    shown = Samples(0, preview=DiffusersModelConfig("madebyollin/taesd"))
    with pytest.raises(ConfigurationError, match="preview must be null for data without an autoencoder"):
        trainer(default_root_dir=tmp_path).fit(task(SMALL_DIT, samples=shown), data)
    module = task(SMALL_DIT, samples=Samples(2))
    module.codec = codec
    trainer(default_root_dir=tmp_path).fit(module, data)
    assert module.codec is codec
    assert data.judged

    data = JudgedLatents(text_encoder(), cached=("latents", "text"))
    encoder, data.text_encoder = data.text_encoder, None
    with pytest.raises(ConfigurationError, match="label_dropout must be 0 without a text encoder"):
        trainer(default_root_dir=tmp_path).fit(task(guidance_scale=1.0), data)
    module = task()
    module.text_encoder = encoder
    trainer(default_root_dir=tmp_path).fit(module, data)
    assert module.text_encoder is encoder


def test_pure_bf16_draws_its_times_in_float32(tmp_path):
    module = task(SMALL_DIT, schedule="linear", prediction="v", timestep_sampling="uniform")
    times = []

    class Seen(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, *_):
            times.append(outputs["timesteps"])

    runner = trainer(default_root_dir=tmp_path, precision="bf16-true", callbacks=[Seen()])
    runner.fit(module, JudgedLatents())
    assert runner.callback_metrics["val/loss"].isfinite()
    assert {time.dtype for time in times} == {torch.float32}
    assert any((time != time.bfloat16().float()).any() for time in times)


def test_prompts_are_of_a_whole_validation_not_of_the_sanity_check(tmp_path):
    kept = []
    for sanity in (0, 1):
        module = task(guidance_scale=1.0)
        trainer(default_root_dir=tmp_path, num_sanity_val_steps=sanity).fit(module, CaptionedLatents(text_encoder()))
        kept.append(module._prompts.state())
    assert kept[0] == kept[1]
    assert len(kept[0]["captions"]) == 12


def test_samples_in_parts_are_those_of_one_batch_and_requests_are_checked(monkeypatch):
    module = built(SMALL_DIT).eval()
    labels = torch.arange(5) % 3
    whole = module.sample(labels, torch.Generator().manual_seed(0))
    monkeypatch.setattr("lit_efficient.tasks.latent_generator._SAMPLED_AT_ONCE", 2)
    torch.testing.assert_close(module.sample(labels, torch.Generator().manual_seed(0)), whole)
    for arguments, message in (
        ({"steps": 0}, "steps must be a whole number of at least 1 or null, got 0"),
        ({"guidance_scale": float("nan")}, "guidance_scale must be at least 0 or null, got nan"),
        ({"labels": torch.tensor([7])}, r"labels must be in .0, 3., .* got .7."),
        ({"count": 2}, r"the number of samples must be the same .* got .2, 5."),
    ):
        with pytest.raises(ConfigurationError, match=message):
            module.sample(**{"labels": labels, **arguments})
