"""Consistency distillation and DMD2: losses by the formulas of the authors' code, exact resume, export."""

from dataclasses import replace

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lit_efficient import (
    EMA,
    ConsistencyDistillation,
    ConsistencyLoss,
    DiffusersModelConfig,
    DistributionMatching,
    DiTConfig,
    ExactResume,
    FewStepDiffusion,
    LatentDiffusion,
    LoRA,
    Samples,
    StochasticRounding,
)
from lit_efficient.data.digit_images import TensorDictDataset
from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.losses.noise_process import alphas_cumprod
from lit_efficient.models.networks.condition import Condition
from lit_efficient.tasks.loading import load_latent_diffusion
from tests import support
from tests.processes import run_ranks
from tests.support_cli import export
from tests.tasks.test_exact_resume_of_tasks import SaveEverywhere
from tests.tasks.test_text_training import data
from tests.tiny_pipelines import written

BACKBONE = DiTConfig(channels=2, size=4, width=16, depth=1, heads=2, num_classes=3)
PROCESSES = [("eps", "scaled_linear"), ("flow", "flow")]


def rows(count=8):
    generator = torch.Generator().manual_seed(5)
    return {"latents": torch.randn(count, 2, 4, 4, generator=generator), "labels": torch.arange(count) % 3}


def loader():
    return torch.utils.data.DataLoader(TensorDictDataset(rows()), batch_size=4)


@pytest.fixture
def teacher(tmp_path):
    def write(prediction="flow", schedule="flow", seed=0):
        module = LatentDiffusion(BACKBONE, prediction, schedule, samples=Samples(0))
        torch.manual_seed(seed)
        module.configure_model()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.15)
        checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
        module.on_save_checkpoint(checkpoint)
        path = tmp_path / f"teacher_{prediction}_{seed}.ckpt"
        torch.save(checkpoint, path)
        return str(path)

    return write


def fit(module, folder, steps, *callbacks, ckpt=None, **options):
    trainer = support.trainer(
        default_root_dir=folder,
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[*callbacks, ExactResume()],
        **options,
    )
    module.configure_optimizers = lambda: torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 1e-2)
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt)
    return trainer


@pytest.mark.parametrize(("prediction", "schedule"), PROCESSES)
def test_a_loss_of_consistency_distillation_is_that_of_the_authors(teacher, prediction, schedule):
    path = teacher(prediction, schedule)
    module = ConsistencyDistillation(path, teacher_guidance=3.0, samples=Samples(0))
    module.configure_model()
    source, _ = load_latent_diffusion(path)
    for ours, theirs in zip(module.network.parameters(), source.network.parameters()):
        assert torch.equal(ours, theirs)  # it begins as the teacher
    module.reference()
    module._target = {name: p.detach() * 0.9 for name, p in module.network.named_parameters()}
    with torch.no_grad():
        for parameter in module.network.parameters():
            parameter.mul_(1.1)
    data = rows()
    condition = Condition(labels=data["labels"])
    found = module._losses(data, condition, module.process, torch.Generator().manual_seed(2))

    generator = torch.Generator().manual_seed(2)
    index = torch.randint(1, 51, (8,), generator=generator)  # steps of 20 of the 1000
    noise = torch.randn(8, 2, 4, 4, generator=generator)
    if schedule == "flow":
        levels = torch.linspace(0, 1, 1001).double()
        alphas, sigmas = 1 - levels, levels  # by 1000 t
        start, end = index * 20, ((index - 1) * 20).clamp(min=1)
        steps = (start.double(), end.double())
    else:
        squared = torch.cat([torch.ones(1).double(), alphas_cumprod(module.process)])
        alphas, sigmas = squared.sqrt(), (1 - squared).sqrt()
        start, end = index * 20, ((index - 1) * 20).clamp(min=1)
        steps = (start.double() - 1, end.double() - 1)

    def of(values, at):
        return values[at].float().view(-1, 1, 1, 1)

    def clean(output, x, at):
        if prediction == "flow":
            return x - of(sigmas, at) * output
        return (x - of(sigmas, at) * output) / of(alphas, at)

    def boundary(x0, x, step):
        scaled = (step * 10).float().view(-1, 1, 1, 1)
        return 0.25 / (scaled**2 + 0.25) * x + scaled / (scaled**2 + 0.25) ** 0.5 * x0

    x = of(alphas, start) * data["latents"] + of(sigmas, start) * noise
    null = Condition(labels=torch.full((8,), 3))
    with torch.no_grad():
        one, other = (source(x, start / 1000, c) for c in (condition, null))
        w = 3.0 - 1.0  # the paper's guidance
        output = one + w * (one - other)
        x0 = clean(output, x, start)
        eps = (x - of(alphas, start) * x0) / of(sigmas, start)
        earlier = of(alphas, end) * x0 + of(sigmas, end) * eps
        target_network, _ = load_latent_diffusion(path)
        for parameter in target_network.network.parameters():
            parameter.mul_(0.9)
        target = boundary(clean(target_network(earlier, end / 1000, condition), earlier, end), earlier, steps[1])
    ours = boundary(clean(module(x, start / 1000, condition), x, start), x, steps[0])
    loss = (((ours - target) ** 2 + 0.001**2).sqrt() - 0.001).mean()
    torch.testing.assert_close(found["loss"], loss, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_average_follows_each_step(precision, teacher, tmp_path):
    L.seed_everything(0, verbose=False)
    module = ConsistencyDistillation(teacher(), loss=ConsistencyLoss(average=0.5), samples=Samples(0))
    seen = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append({name: p.detach().float().clone() for name, p in pl_module.network.named_parameters()})

    rounding = [StochasticRounding()] if precision == "bf16-true" else []
    fit(module, tmp_path, 3, Watch(), *rounding, precision=precision)
    seen.append({name: p.detach().float() for name, p in module.network.named_parameters()})
    for name, tensor in module._target.items():
        expected = seen[0][name]
        for weights in seen[1:]:
            expected = 0.5 * expected + 0.5 * weights[name]
        torch.testing.assert_close(tensor, expected)


MADE = {
    "consistency": lambda path: ConsistencyDistillation(path, samples=Samples(0), sampling_steps=2),
    "matching": lambda path: DistributionMatching(path, fake_steps=2, samples=Samples(0), sampling_steps=2),
}


@pytest.mark.parametrize("kind", MADE)
def test_resumed_training_is_bit_equal_and_samples_reload(kind, teacher, tmp_path):
    path = teacher()

    def run(steps, ckpt=None, folder=tmp_path):
        L.seed_everything(0, verbose=False)
        module = MADE[kind](path)
        trainer = fit(module, tmp_path, steps, EMA(decay=0.5), SaveEverywhere(folder), ckpt=ckpt)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        tensors = [*module.parameters(), *getattr(module, "_target", {}).values()]
        return module.eval(), torch.cat([p.detach().flatten() for p in tensors])

    within = tmp_path / "within"  # saved by a callback in the middle of the run, before the module's own last hook
    _, whole = run(6, folder=within)
    run(3)
    for folder in (within, tmp_path):
        module, again = run(6, str(folder / "3.ckpt"))
        assert torch.equal(again, whole)
    loaded, _ = load_latent_diffusion(str(tmp_path / "6.ckpt"), "raw")
    assert type(loaded) is LatentDiffusion
    assert loaded.sampler.name == "lcm"
    labels = torch.arange(3)
    drawn, other = (one.sample(labels, torch.Generator().manual_seed(0)) for one in (module, loaded))
    assert torch.equal(drawn, other)
    load_latent_diffusion(str(tmp_path / "6.ckpt"), "average")
    with pytest.raises(CheckpointError, match="another teacher"):
        fit(MADE[kind](teacher(seed=1)), tmp_path, 8, ckpt=str(tmp_path / "3.ckpt"))


def test_the_second_network_trains_in_each_step_and_the_first_in_some(teacher, tmp_path):
    module = DistributionMatching(teacher(), fake_steps=3, samples=Samples(0))
    changed = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.before = [[p.clone() for p in one.parameters()] for one in (pl_module.network, pl_module.fake)]

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pairs = zip((pl_module.network, pl_module.fake), self.before)
            changed.append([not all(map(torch.equal, one.parameters(), before)) for one, before in pairs])

    fit(module, tmp_path, 5, Watch())
    assert changed == [[i % 3 == 0, True] for i in range(5)]


@pytest.mark.turns(4, family="ranks")
def test_all_processes_take_equally_many_steps_of_sampling(teacher, tmp_path):
    """Otherwise they would wait for each other's sharded weights for ever."""
    run_ranks(_count_evaluations, tmp_path, teacher())


def _count_evaluations(path):
    module = DistributionMatching(path, fake_steps=2, samples=Samples(0), sampling_steps=8)
    counts = []

    class Watch(L.Callback):
        def on_train_start(self, trainer, pl_module):
            torch.manual_seed(trainer.global_rank)
            pl_module.network.register_forward_pre_hook(lambda *args: counts.append(trainer.global_step))

    fit(module, ".", 4, Watch(), devices=2, strategy="ddp_find_unused_parameters_true")
    every = [None, None]
    torch.distributed.all_gather_object(every, counts)
    assert every[0] == every[1]


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_teacher_whose_pipeline_shifts_its_times(family, tmp_path):
    written(family, tmp_path / "base")
    module = ConsistencyDistillation(
        DiffusersModelConfig(str(tmp_path / "base")), teacher_guidance=1.0, samples=Samples(0), override=["vae_scaling"]
    )
    callbacks = [LoRA(rank=2, targets=["to_q", "to_v"])]
    trainer = support.trainer(max_steps=2, limit_val_batches=0, callbacks=callbacks)
    trainer.fit(module, data(tmp_path / "base"))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded, _ = load_latent_diffusion(str(tmp_path / "a.ckpt"))
    drawn = [
        one.eval().sample(captions=["one 1"], generator=torch.Generator().manual_seed(0), size=(8, 8))
        for one in (module, loaded)
    ]
    assert torch.equal(*drawn)


@pytest.mark.turns(6, family="slow")
def test_adapters_of_matching_leave_the_second_network_and_the_base_out(tmp_path):
    written("sdxl", tmp_path / "base")
    spec = DiffusersModelConfig(str(tmp_path / "base"))

    def run(steps, ckpt=None):
        L.seed_everything(0, verbose=False)
        module = DistributionMatching(spec, fake_steps=2, samples=Samples(0), override=["vae_scaling"])
        module.configure_optimizers = lambda: torch.optim.AdamW(
            [p for p in module.parameters() if p.requires_grad], 1e-2
        )
        callbacks = [LoRA(rank=2, targets=["to_q", "to_v"]), ExactResume()]
        trainer = support.trainer(max_steps=steps, limit_val_batches=0, callbacks=callbacks)
        trainer.fit(module, data(tmp_path / "base"), ckpt_path=ckpt, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return module.eval()

    module = run(4)
    run(2)
    again = run(4, str(tmp_path / "2.ckpt"))
    support.assert_equal(module.state_dict(), again.state_dict())
    held = torch.load(tmp_path / "4.ckpt", weights_only=True)
    assert all(".lora_" in name for name in [*held["state_dict"], *held["lit_efficient"]["training_only"]])
    assert len(held["state_dict"]) == len(held["lit_efficient"]["training_only"])
    assert export([str(tmp_path / "4.ckpt"), "--format", "peft", "--output", str(tmp_path / "out")]) == 0
    fresh = written("sdxl", tmp_path / "fresh")
    fresh.load_lora_weights(tmp_path / "out")
    x, text, pooled = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 48), torch.randn(1, 6)
    given = {"added_cond_kwargs": {"text_embeds": pooled, "time_ids": torch.zeros(1, 6)}}
    with torch.no_grad():
        ours, theirs = (one(x, torch.tensor([300]), text, **given).sample for one in (module.network, fresh.unet))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_step_of_matching_is_that_of_the_authors(teacher):
    path = teacher()
    module = DistributionMatching(path, teacher_guidance=3.0, samples=Samples(0))
    module.configure_model()
    module.reference()
    with torch.no_grad():
        for parameter in module.fake.parameters():
            parameter.mul_(1.2)
    condition = Condition(labels=rows()["labels"])
    torch.manual_seed(4)
    x0 = module.generated(condition, (8, 2, 4, 4), True)
    found = module.matching_gradient(x0.detach(), condition)
    torch.manual_seed(4)
    assert int(torch.randint(1, (1,))) == 0
    noise = torch.randn(8, 2, 4, 4)
    one = torch.ones(8)
    scaled = torch.tensor(10_000.0)
    expected = scaled / (scaled**2 + 0.25) ** 0.5 * (noise - module(noise, one, condition)) + 0.25 / (scaled**2) * noise
    torch.testing.assert_close(x0, expected, rtol=1e-5, atol=1e-6)
    t = 0.02 + 0.96 * torch.rand(8)
    shaped = t.view(-1, 1, 1, 1)
    x = (1 - shaped) * x0.detach() + shaped * torch.randn(8, 2, 4, 4)
    source, _ = load_latent_diffusion(path)
    with torch.no_grad():
        with_label = source(x, t, condition)
        without = source(x, t, Condition(labels=torch.full((8,), 3)))
        real = x - shaped * (without + 3.0 * (with_label - without))
        fake = x - shaped * module.prediction_of(module.fake, x, t, condition)
        p_real, p_fake = x0 - real, x0 - fake
        theirs = (p_real - p_fake) / p_real.abs().mean(dim=(1, 2, 3), keepdim=True)
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)


def test_with_adapters_the_teacher_is_the_base(teacher, tmp_path):
    module = ConsistencyDistillation(teacher(), loss=ConsistencyLoss(average=0.0), samples=Samples(0))
    fit(module, tmp_path, 2, LoRA(rank=2, targets="all-linear"))
    assert module.reference().adapted
    assert not module.reference().tensors
    x, t = torch.randn(2, 2, 4, 4), torch.tensor([0.3, 0.7])
    condition = Condition(labels=torch.tensor([0, 1]))
    source, _ = load_latent_diffusion(str(module.teacher))
    guided = [source(x, t, replace(condition, labels=labels)) for labels in (condition.labels, torch.full((2,), 3))]
    torch.testing.assert_close(module.taught(x, t, condition), 2 * guided[0] - guided[1])


def test_other_teachers_are_refused(teacher, tmp_path):
    few = FewStepDiffusion(BACKBONE, samples=Samples(0))
    few.configure_model()
    checkpoint = {"state_dict": few.state_dict(), "hyper_parameters": dict(few.hparams)}
    few.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, tmp_path / "few.ckpt")
    with pytest.raises(ConfigurationError, match="is not a checkpoint of LatentDiffusion"):
        ConsistencyDistillation(str(tmp_path / "few.ckpt"))
    with pytest.raises(ConfigurationError, match="trained weights"):
        DistributionMatching(DiffusersModelConfig(config_fields={"_class_name": "UNet2DModel"}))
    with pytest.raises(ConfigurationError, match="sampling_steps"):
        ConsistencyDistillation(teacher(), sampling_steps=51)
