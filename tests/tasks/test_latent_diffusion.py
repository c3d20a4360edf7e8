import logging
from dataclasses import replace
from functools import partial

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lit_efficient import (
    EMA,
    AutoencoderConfig,
    Autoencoding,
    DiTConfig,
    DiTVariant,
    ExactResume,
    LatentDiffusion,
    LatentDigits,
    SampleImages,
    Samples,
    SNRWeighting,
)
from lit_efficient.data.digit_images import TensorDictDataset
from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.losses.diffusion import alpha_sigma
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.losses.timesteps import TimestepSampling
from lit_efficient.tasks.latent_conditions import Prompts
from lit_efficient.tasks.loss_by_noise import NAMES, LossByNoise
from tests import support
from tests.processes import run_ranks

MEASURED = {"loss", "frechet_distance", "kernel_distance", "sample_accuracy"} | {f"loss_{name}" for name in NAMES}
BACKBONE = DiTConfig(channels=2, size=4, patch_size=2, width=32, depth=1, heads=2)


def digits(**arguments) -> LatentDigits:
    tiny = {"image_size": 16, "autoencoder": AutoencoderConfig(latent_channels=2, width=8), "autoencoder_steps": 150}
    return LatentDigits(**{**tiny, "judge_steps": 60, **arguments})


def task(**arguments) -> LatentDiffusion:
    return LatentDiffusion(**{"backbone": BACKBONE, "sampling_steps": 3, "samples": Samples(20), **arguments})


trainer = partial(support.trainer, max_epochs=-1, max_steps=4, num_sanity_val_steps=2, limit_val_batches=1.0)


def built(**arguments) -> LatentDiffusion:
    module = task(**arguments)
    module.configure_model()
    return module


@pytest.mark.turns(4, family="learns")
def test_it_learns_each_sample_far_better_than_the_trivial_predictor(tmp_path):
    L.seed_everything(0, verbose=False)
    module = task(learning_rate=1e-2, samples=Samples(0))
    run = trainer(default_root_dir=tmp_path, max_steps=90, num_sanity_val_steps=0, check_val_every_n_epoch=100)
    data = digits()
    run.fit(module, data)
    loss = run.validate(module, data, verbose=False)[0]["val/loss"]
    assert loss < 0.75 * 2.0  # predicting zero costs E|eps - x0|^2 = 2
    module.eval()
    labels = torch.arange(200) % 10
    images = data.codec.decode(module.sample(labels, torch.Generator().manual_seed(0), steps=10))
    assert data.score_samples(images, labels)["sample_accuracy"] > 0.2  # chance is 0.1


def test_validation_judges_samples_and_is_the_same_each_time(tmp_path):
    module, data = built(), digits()
    first, second = (trainer(default_root_dir=tmp_path).validate(module, data, verbose=False)[0] for _ in range(2))
    assert set(first) == {f"val/{name}" for name in MEASURED}
    assert first == second
    assert first["val/loss"] == pytest.approx(2.0, abs=0.1)  # an untrained network predicts zero
    test = trainer(default_root_dir=tmp_path).test(module, data, verbose=False)[0]
    assert set(test) == {f"test/{name}" for name in MEASURED}


def test_validating_does_not_change_training(tmp_path):
    def weights(**arguments):
        L.seed_everything(0, verbose=False)
        module = task()
        trainer(default_root_dir=tmp_path, max_steps=12, **arguments).fit(module, digits())
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    often = weights(val_check_interval=5)
    never = weights(limit_val_batches=0)
    assert torch.equal(often, never)


def test_training_step_follows_the_loss_protocol():
    module = built(schedule="cosine")
    batch = {"latents": torch.randn(5, 2, 4, 4), "labels": torch.arange(5)}
    module.log = lambda *_, **__: None
    output = module.training_step(batch, 0)
    assert output["sample_loss"].shape == output["timesteps"].shape == output["log_snr"].shape == (5,)
    torch.testing.assert_close(output["loss"], output["sample_loss"].mean())
    alpha, sigma = alpha_sigma(output["timesteps"], "cosine")
    torch.testing.assert_close(output["log_snr"].exp(), (alpha / sigma) ** 2, rtol=1e-3, atol=0)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_labels_are_dropped_once_per_sample_at_the_given_rate(rate):
    module = built(label_dropout=rate, guidance_scale=1.0)
    module.log = lambda *_, **__: None
    seen = []
    module.network.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[2]))
    labels = torch.arange(2000) % 10
    module.training_step({"latents": torch.zeros(2000, 2, 4, 4), "labels": labels}, 0)
    (given,) = seen
    dropped = given == 10
    assert dropped.float().mean().item() == pytest.approx(rate, abs=0.05)
    assert torch.equal(given[~dropped], labels[~dropped])


def test_each_step_samples_the_posterior_anew():
    module = built()
    module.log = lambda *_, **__: None
    seen = []
    module.network.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[0]))
    batch = {"mean": torch.zeros(2, 2, 4, 4), "logvar": torch.zeros(2, 2, 4, 4), "labels": torch.arange(2)}
    for _ in range(2):
        module.training_step(batch, 0)
    assert not torch.equal(*seen)


def test_sampling_is_a_function_of_its_generator_and_leaves_the_global_one_alone():
    module = built().eval()
    torch.nn.init.normal_(module.network.patch_out.weight)
    labels, before = torch.arange(4), torch.get_rng_state()
    one, same, other = (module.sample(labels, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_guidance_of_one_is_the_conditional_prediction_alone():
    module = built().eval()
    torch.nn.init.normal_(module.network.patch_out.weight)
    sizes = []
    module.network.register_forward_pre_hook(lambda _module, arguments: sizes.append(len(arguments[0])))
    module.sample(torch.arange(4), torch.Generator(), guidance_scale=1.0, steps=2)
    module.sample(torch.arange(4), torch.Generator(), guidance_scale=2.0, steps=1)
    assert sizes == [4, 4, 8]


def test_a_checkpoint_alone_rebuilds_the_network_and_samples_images(tmp_path):
    module, data = task(), digits()
    data.class_names = ["0", "1", "2", "drei", *"456789"]
    run = trainer(default_root_dir=tmp_path)
    run.fit(module, data)
    run.save_checkpoint(tmp_path / "a.ckpt")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert set(stored["state_dict"]) == {name for name, _ in module.named_parameters()}  # what trains, nothing else
    assert stored["hyper_parameters"]["backbone"]["width"] == 32
    loaded = LatentDiffusion.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).eval()
    images = loaded.sample_images(12, seed=3)
    assert images.dtype == torch.uint8
    assert images.shape == (12, 1, 16, 16)
    assert torch.equal(images, module.eval().sample_images(12, seed=3))
    assert loaded.image_captions(12) == ["0", "1", "2", "3 drei", *"456789", "0", "1"]


def test_a_checkpoint_of_another_latent_space_is_refused_but_may_predict(tmp_path):
    run = trainer(default_root_dir=tmp_path)
    run.fit(task(), digits())
    run.save_checkpoint(tmp_path / "a.ckpt")
    other = digits(autoencoder_steps=3)
    with pytest.raises(CheckpointError, match="latents of another autoencoder"):
        trainer(default_root_dir=tmp_path, max_steps=8).fit(
            task(), other, ckpt_path=tmp_path / "a.ckpt", weights_only=True
        )
    images = trainer(default_root_dir=tmp_path).predict(task(), other, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert sum(len(part) for part in images) == 180
    assert images[0].dtype == torch.uint8


@pytest.mark.turns(4, family="resumed")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # both legs write to one folder
def test_resumed_at_an_epochs_end_equals_uninterrupted(tmp_path):
    """All of the module's state is in the checkpoint; the random generator is set by hand here."""

    class Reseed(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            torch.manual_seed(trainer.current_epoch)

    def weights_after(ckpt=None):
        L.seed_everything(0 if ckpt is None else 1, verbose=False)
        module = task(samples=Samples(0), label_dropout=0.3)
        callbacks = [Reseed(), ModelCheckpoint(tmp_path, "{step}", save_top_k=-1)]
        settings = {"max_steps": 6, "limit_train_batches": 3, "num_sanity_val_steps": 0}
        run = trainer(default_root_dir=tmp_path, callbacks=callbacks, enable_checkpointing=True, **settings)
        run.fit(module, digits(), ckpt_path=ckpt, weights_only=True if ckpt else None)
        assert run.global_step == 6
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    whole = weights_after()
    assert torch.equal(weights_after(tmp_path / "step=3.ckpt"), whole)


def test_without_a_data_module_it_trains_on_plain_latents_and_says_what_pictures_need(tmp_path):
    data = TensorDictDataset({"latents": torch.randn(20, 2, 4, 4), "labels": torch.arange(20) % 10})
    loader = DataLoader(data, batch_size=5)
    module = task()
    trainer(default_root_dir=tmp_path).fit(module, loader, loader)
    assert module.sample(torch.arange(3)).shape == (3, 2, 4, 4)
    with pytest.raises(ConfigurationError, match="no autoencoder to decode images"):
        module.sample_images(4, seed=0)


def test_shapes_and_classes_must_be_the_datas(tmp_path):
    wrong_shape = task(backbone=DiTConfig(channels=4, size=4, width=16, heads=2, depth=1))
    with pytest.raises(ConfigurationError, match=r"latents \(4, 4, 4\); the data's are \(2, 4, 4\)"):
        trainer(default_root_dir=tmp_path).fit(wrong_shape, digits())
    wrong_classes = task(backbone=DiTConfig(channels=2, size=4, width=16, heads=2, depth=1, num_classes=3))
    with pytest.raises(ConfigurationError, match="num_classes must be 10, as the data has, got 3"):
        trainer(default_root_dir=tmp_path).fit(wrong_classes, digits())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prediction": "epsilon"}, "prediction must be one of flow, eps, v, x0, edm, got 'epsilon'"),
        (
            {"schedule": "exp"},
            "schedule must be one of flow, cosine, .*, scaled_linear, edm, got 'exp'",
        ),
        ({"timestep_sampling": "beta"}, "timestep_sampling must be one of uniform, logit_normal, mode, .*, got 'beta'"),
        ({"timestep_sampling": "log_normal"}, "schedule must be edm for log_normal noise levels, got 'flow'"),
        ({"sampler": "plms"}, "sampler: Sampler: name must be one of builtin, ddim, .*, got 'plms'"),
        ({"sampler": "ddim", "schedule": "linear", "sampling_steps": 3}, "sampling_steps must be a divisor of 1000"),
        ({"sampler": "ddim", "prediction": "eps"}, "name must be builtin for prediction 'eps' on 'flow'"),
        (
            {"schedule": DiffusionProcess("linear", zero_terminal_snr=True), "prediction": "eps"},
            "prediction must be v, flow, x0 or edm with zero_terminal_snr .*, got 'eps'",
        ),
        ({"label_dropout": 1.0}, "label_dropout must be at least 0 and below 1, got 1.0"),
        ({"label_dropout": 0.0}, "guidance_scale must be 1 when label_dropout is 0"),
        ({"guidance_scale": float("nan")}, "guidance_scale must be at least 0, got nan"),
        ({"sampling_steps": 0}, "sampling_steps must be a whole number of at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
        ({"samples": {"count": 1}}, "samples.count must be 0 or >= 2, got 1"),
    ],
)
def test_arguments_are_checked_when_built(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        LatentDiffusion(**wrong)


def test_the_schedule_ends_with_the_run_and_the_optimizer_sees_only_what_trains(tmp_path):
    module = task()
    run = trainer(default_root_dir=tmp_path, max_steps=12)
    run.fit(module, digits())
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-8)
    held = {id(p) for group in run.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for p in module.network.parameters()}


@pytest.mark.turns(4)
@pytest.mark.parametrize("prediction", ["flow", "eps", "v", "x0"])
@pytest.mark.parametrize("schedule", ["flow", "cosine"])
def test_every_target_and_schedule_trains_and_samples(tmp_path, prediction, schedule):
    module = task(prediction=prediction, schedule=schedule)
    run = trainer(default_root_dir=tmp_path, max_steps=2, limit_val_batches=1)
    run.fit(module, digits())
    assert module.prediction == prediction
    assert module.eval().sample(torch.arange(4), torch.Generator().manual_seed(0)).isfinite().all()


def plain(count=24):
    draws = torch.Generator().manual_seed(0)
    latents = torch.randn(count, 2, 4, 4, generator=draws)
    return DataLoader(TensorDictDataset({"latents": latents, "labels": torch.arange(count) % 10}), batch_size=8)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "arguments",
    [
        {"schedule": DiffusionProcess("edm", sigma_data=0.5), "prediction": "edm", "timestep_sampling": "log_normal"},
        {"schedule": DiffusionProcess("scaled_linear", zero_terminal_snr=True), "prediction": "v", "sampler": "ddim"},
        {"schedule": "linear", "prediction": "eps", "sampler": "heun"},
        {"timestep_sampling": TimestepSampling("mode", shift=2.0), "sampler": Sampler("dpmsolver++", 0.7, 2.0)},
        {"schedule": DiffusionProcess(offset_noise=0.1, input_perturbation=0.1), "sampler": "euler"},
    ],
    ids=str,
)
def test_every_kind_of_process_trains_samples_and_comes_back_from_its_checkpoint(tmp_path, arguments):
    module = task(**arguments, sampling_steps=4)
    run = trainer(default_root_dir=tmp_path, max_steps=2)
    run.fit(module, plain(), plain())
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    loaded = LatentDiffusion.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).eval()
    for name in ("process", "timestep_sampling", "sampler"):
        assert getattr(loaded, name) == getattr(module, name)
    before = torch.get_rng_state()
    latents = loaded.sample(torch.arange(4), torch.Generator().manual_seed(0))
    assert latents.isfinite().all()
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(latents, module.eval().sample(torch.arange(4), torch.Generator().manual_seed(0)))


def test_a_checkpoint_whose_sampler_is_refused_today_is_sampled_by_builtin():
    arguments = dict(built(schedule="squared_cosine", prediction="v").hparams)
    arguments["sampler"] = {**arguments["sampler"], "name": "heun", "guidance_rescale": 0.5}
    with pytest.warns(UserWarning, match="name must be builtin.* replaced by builtin"):
        assert LatentDiffusion(**arguments).sampler == Sampler(guidance_rescale=0.5)


@pytest.mark.parametrize("kind", ["compact", "diffusers"])
def test_a_network_that_cannot_become_a_pipeline_says_so_before_it_trains(tmp_path, caplog, kind):
    module = task(backbone=replace(BACKBONE, variant=DiTVariant(time_embedding=kind)))
    with caplog.at_level(logging.INFO):
        trainer(default_root_dir=tmp_path, max_steps=1).fit(module, plain(), plain())
    said = [r.getMessage() for r in caplog.records if "`export --format diffusers` does not support" in r.getMessage()]
    assert len(said) == (kind == "compact")
    assert all("train with variant.time_embedding='diffusers'" in line for line in said)


def test_images_without_an_autoencoder_are_refused_before_the_first_step(tmp_path):
    module = task(samples=Samples(0))
    run = trainer(default_root_dir=tmp_path, callbacks=[SampleImages(columns=2, rows=1)], num_sanity_val_steps=0)
    with pytest.raises(ConfigurationError, match="has no autoencoder to decode images"):
        run.fit(module, plain(), plain())
    assert run.global_step == 0


def test_the_network_gets_edms_scaled_input_and_noise_level():
    module = built(schedule="edm", prediction="edm")
    seen = []
    module.network.register_forward_pre_hook(lambda _module, arguments: seen.extend(arguments))
    t = torch.tensor([0.3, 0.9])
    sigma = module.process.alpha_sigma(t)[1]
    x = torch.randn(2, 2, 4, 4)
    module(x, t, torch.arange(2))
    torch.testing.assert_close(seen[0], x / (sigma**2 + 1).sqrt()[:, None, None, None])
    torch.testing.assert_close(seen[1], sigma.log() / 4)


def test_the_perturbed_input_is_trained_on_and_not_validated_on(tmp_path):
    def losses(**process):
        torch.manual_seed(0)
        module = built(schedule=DiffusionProcess(**process))
        torch.nn.init.normal_(module.network.patch_out.weight)
        found = trainer(default_root_dir=tmp_path).validate(module, plain(), verbose=False)[0]["val/loss"]
        module.log = lambda *_, **__: None
        torch.manual_seed(0)
        return found, module.training_step({"latents": torch.ones(4, 2, 4, 4), "labels": torch.arange(4)}, 0)["loss"]

    plainly, perturbed = losses(), losses(input_perturbation=0.5)
    assert plainly[0] == perturbed[0]
    assert plainly[1] != perturbed[1]


def test_losses_are_told_apart_by_log_snr():
    buckets = LossByNoise()
    buckets.add(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([-torch.inf, -3.0, 5.0]))
    buckets.add(torch.tensor([6.0, 8.0]), torch.tensor([-0.1, 3.0]))
    expected = {"snr_lowest": 1.0, "snr_low": 4.0, "snr_highest": 6.0}  # nothing in between 0 and 3
    assert {name: value.item() for name, value in buckets.averages(lambda totals: totals).items()} == expected
    assert {n: v.item() for n, v in buckets.averages(lambda totals: 2 * totals).items()} == expected
    buckets.reset()
    assert buckets.averages(lambda totals: totals) == {}


def test_raw_and_averaged_weights_are_validated_side_by_side_at_the_same_draws(tmp_path):
    ema = EMA(decay=0.9, warmup=None)
    module = task(learning_rate=1e-2)
    run = trainer(default_root_dir=tmp_path, max_steps=9, callbacks=[ema], check_val_every_n_epoch=3)
    run.fit(module, plain(), plain())
    logged = {name: value.item() for name, value in run.callback_metrics.items()}
    raw = trainer(default_root_dir=tmp_path).validate(module, plain(), verbose=False)[
        0
    ]  # after the fit the module is raw
    with ema.averaged(module):
        averaged = trainer(default_root_dir=tmp_path).validate(module, plain(), verbose=False)[0]
    assert logged["val/loss_raw"] == pytest.approx(raw["val/loss"], rel=1e-6)
    assert logged["val/loss"] == pytest.approx(averaged["val/loss"], rel=1e-6)
    assert logged["val/loss"] != pytest.approx(logged["val/loss_raw"], rel=1e-4)
    assert "val/loss_raw" not in raw


def test_min_snr_weighs_the_new_processes(tmp_path):
    """With zero terminal SNR the last entry of the table has no signal at all; its weight is finite."""
    process = DiffusionProcess("scaled_linear", zero_terminal_snr=True)
    module = task(schedule=process, prediction="v", timestep_sampling=TimestepSampling("uniform", shift=500.0))
    weighting = SNRWeighting()
    run = trainer(default_root_dir=tmp_path, max_steps=3, callbacks=[weighting], num_sanity_val_steps=0)
    run.fit(module, plain(), plain())
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    output = module._losses(next(iter(plain())), torch.arange(8), process, torch.Generator().manual_seed(0))
    assert torch.isneginf(output["log_snr"]).any()
    assert weighting.sample_weights(output, module).isfinite().all()


def test_a_config_may_name_a_schedule_or_describe_the_process():
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(LatentDiffusion, "model")

    def parsed(**model):
        return parser.instantiate(parser.parse_object({"model": model})).model

    assert parsed(schedule="cosine").process == DiffusionProcess("cosine")
    described = parsed(
        schedule={"schedule": "scaled_linear", "zero_terminal_snr": True},
        timestep_sampling={"distribution": "mode", "scale": 1.0},
        sampler={"name": "ddim", "guidance_rescale": 0.7},
    )
    assert described.process == DiffusionProcess("scaled_linear", zero_terminal_snr=True)
    assert described.timestep_sampling == TimestepSampling("mode", scale=1.0)
    assert described.sampler == Sampler("ddim", guidance_rescale=0.7)


class Drawn(L.Callback):
    """Record a random number before each training step, and the times that the step drew."""

    def __init__(self):
        self.numbers = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.numbers.append(torch.rand(()).item())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.numbers += outputs["timesteps"].tolist() if "timesteps" in outputs else []


def drawn(kind, resumes, **options):
    """Train two steps as the command line does, and return what was drawn."""
    L.seed_everything(3)
    watch = Drawn()
    ours = AutoencoderConfig(latent_channels=2, width=8)
    module = task(samples=Samples(0)) if kind == "diffusion" else Autoencoding(ours)
    rows = {"latents": torch.zeros(8, 2, 4, 4), "labels": torch.zeros(8).long(), "images": torch.zeros(8, 1, 8, 8)}
    loader = DataLoader(TensorDictDataset(rows), batch_size=2)
    callbacks = [watch, ExactResume()] if resumes else [watch]
    run = trainer(max_steps=2, limit_val_batches=0, callbacks=callbacks, default_root_dir=".", **options)
    run.fit(module, loader, loader)
    return watch.numbers


def _draw_on_two(kind, resumes):
    every = [None, None]
    numbers = drawn(kind, resumes, devices=2, strategy="ddp_find_unused_parameters_true")
    torch.distributed.all_gather_object(every, numbers)
    assert len(numbers) == (6 if kind == "diffusion" else 2)
    assert not {*every[0]} & {*every[1]}
    rank = torch.distributed.get_rank()
    if rank == 0:
        torch.save(numbers, f"{kind}.pt")
    prompts = Prompts(None)
    rows = [f"photo {row}" for row in range(7)]
    prompts.gather({"captions": rows[rank::2], "labels": torch.arange(7)[rank::2]})
    prompts.settle(rank, final=True)
    assert prompts.captions == rows
    assert prompts.labels == [*range(7)]


@pytest.mark.turns(4, family="ranks")
@pytest.mark.parametrize(("kind", "resumes"), [("diffusion", False), ("diffusion", True), ("autoencoder", False)])
def test_processes_draw_noise_of_their_own_and_share_captions(kind, resumes, tmp_path, monkeypatch):
    """Lightning seeds them alike; the first one draws what a process alone does. Samples are those of one process."""
    run_ranks(_draw_on_two, tmp_path, kind, resumes)
    monkeypatch.chdir(tmp_path)
    assert torch.load(f"{kind}.pt") == drawn(kind, resumes)
