"""MeanFlow and shortcut models as a task: the loss of a step by the papers' formulas, guidance, resume, checkpoints."""

from dataclasses import replace

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lit_efficient import (
    DiTConfig,
    ExactResume,
    FewStepDiffusion,
    HiddenAlignment,
    LatentDiffusion,
    MeanFlow,
    Samples,
    Shortcut,
    StochasticDepth,
)
from lit_efficient.data.digit_images import TensorDictDataset
from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.diffusion import add_noise
from lit_efficient.losses.timesteps import TimestepSampling, sample_timesteps
from lit_efficient.models.networks.condition import Condition
from lit_efficient.tasks.loading import load_latent_diffusion
from tests import support

BACKBONE = DiTConfig(channels=2, size=4, width=16, depth=1, heads=2, num_classes=3)


def built(objective, **arguments):
    torch.manual_seed(0)
    module = FewStepDiffusion(BACKBONE, objective, **{"samples": Samples(0), **arguments})
    module.configure_model()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    module.log = lambda *args, **kwargs: None
    return module


def batch(count=8):
    generator = torch.Generator().manual_seed(5)
    return {"latents": torch.randn(count, 2, 4, 4, generator=generator), "labels": torch.arange(count) % 3}


def velocity(module, x, t, h, labels):
    return module(x, t, Condition(labels=labels, interval=h))


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_a_step_of_mean_flow_is_that_of_the_authors(scale, mix):
    module = built(MeanFlow(guidance_mix=mix, interval_share=0.5), guidance_scale=scale, label_dropout=0.4)
    data = batch()
    torch.manual_seed(3)
    output = module.training_step(data, 0)

    # The random numbers of the step.
    torch.manual_seed(3)
    hidden = torch.rand(8) < 0.4
    assert 0 < hidden.sum() < 8
    draws = [sample_timesteps(8, TimestepSampling("logit_normal", -0.4)) for _ in range(2)]
    eps = torch.randn(8, 2, 4, 4)
    t, r = torch.maximum(*draws), torch.minimum(*draws)
    r = torch.where(torch.arange(8) < 4, t, r)
    y = torch.where(hidden, 3, data["labels"])
    x0 = data["latents"]
    x = add_noise(x0, eps, t, "flow")
    v = eps - x0
    with torch.no_grad():
        zero = torch.zeros(8)
        u_null = velocity(module, x, t, zero, torch.full((8,), 3))
        u_cond = velocity(module, x, t, zero, data["labels"])
        omega = scale * (1 - mix)
        guided = omega * v + (1 - omega - mix) * u_null + mix * u_cond if scale != 1 else v
        guided = torch.where(hidden.view(-1, 1, 1, 1), v, guided)
    u, derivative = torch.func.jvp(
        lambda a, b, c: velocity_math(module, a, b, b - c, y), (x, t, r), (guided, torch.ones(8), torch.zeros(8))
    )
    target = (guided - (t - r).view(-1, 1, 1, 1) * derivative).detach()
    error = (u - target).square().sum(dim=(1, 2, 3))
    loss = (error / (error.detach() + 0.01)).mean()
    torch.testing.assert_close(output["target"], target, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output["loss"], loss, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(output["loss"], list(module.parameters()))
    theirs = torch.autograd.grad(loss, list(module.parameters()))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def velocity_math(module, x, t, h, labels):
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return velocity(module, x, t, h, labels)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_step_of_shortcuts_is_that_of_the_authors(scale):
    module = built(Shortcut(bootstrap_share=0.5, finest=8), guidance_scale=scale, label_dropout=0.4)
    data = batch()
    torch.manual_seed(3)
    output = module.training_step(data, 0)
    torch.manual_seed(3)
    hidden = torch.rand(8) < 0.4
    t = sample_timesteps(8, "uniform")
    sections = 2.0 ** torch.randint(3, (4,))
    ends = ((torch.rand(4) * sections).floor() + 1) / sections
    t = torch.cat([(t[:4] * 8).ceil() / 8, ends])
    h = torch.cat([torch.full((4,), 1 / 8), 1 / sections])
    eps = torch.randn(8, 2, 4, 4)
    x = add_noise(data["latents"], eps, t, "flow")
    target = eps - data["latents"]
    for i in range(4, 8):  # one row after another
        row, label, half = x[i : i + 1], data["labels"][i : i + 1], h[i : i + 1] / 2

        def step(x, t, half=half, label=label):
            u = velocity(module, x, t, half, label)
            if half > 1 / 8:
                return u
            null = velocity(module, x, t, half, torch.tensor([3]))
            return null + scale * (u - null)

        first = step(row, t[i : i + 1])
        second = step(row - half * first, t[i : i + 1] - half)
        target[i] = ((first + second) / 2).detach()[0]
    y = torch.where(hidden & (torch.arange(8) < 4), 3, data["labels"])
    loss = (velocity(module, x, t, h, y) - target).square().mean()
    torch.testing.assert_close(output["target"], target, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output["loss"], loss, rtol=1e-5, atol=1e-6)


def test_samples_take_one_evaluation_a_step_and_reload_as_they_were(tmp_path):
    trainer = support.trainer(default_root_dir=tmp_path, max_steps=3, limit_val_batches=0)
    module = FewStepDiffusion(BACKBONE, Shortcut(finest=8), guidance_scale=2.0, samples=Samples(0), sampling_steps=2)
    loader = torch.utils.data.DataLoader(TensorDictDataset(batch()), batch_size=4)
    trainer.fit(module, loader, loader)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    module.eval()
    calls = []
    handle = module.network.register_forward_hook(lambda *args: calls.append(1))
    labels = torch.arange(3)
    drawn = module.sample(labels, torch.Generator().manual_seed(0))
    handle.remove()
    assert len(calls) == 2
    again, _ = load_latent_diffusion(str(tmp_path / "one.ckpt"))
    assert isinstance(again, FewStepDiffusion)
    assert again.objective == Shortcut(finest=8)
    assert torch.equal(again.sample(labels, torch.Generator().manual_seed(0)), drawn)


def test_resumed_training_is_bit_equal(tmp_path):
    def fit(steps, ckpt=None):
        L.seed_everything(0, verbose=False)
        module = FewStepDiffusion(BACKBONE, "mean_flow", samples=Samples(0))
        loader = torch.utils.data.DataLoader(TensorDictDataset(batch(16)), batch_size=4)
        trainer = support.trainer(
            default_root_dir=tmp_path, max_steps=steps, max_epochs=-1, limit_val_batches=0, callbacks=[ExactResume()]
        )
        module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), 1e-2)
        trainer.fit(module, loader, loader, ckpt_path=ckpt)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    whole = fit(6)
    fit(3)
    assert torch.equal(fit(6, str(tmp_path / "3.ckpt")), whole)


def test_an_interval_of_zero_is_flow_matching():
    ours = built("mean_flow")
    x, t = torch.randn(2, 2, 4, 4), torch.tensor([0.3, 0.8])
    labels = Condition(labels=torch.tensor([0, 1]))
    without = ours(x, t, labels)
    torch.testing.assert_close(ours(x, t, replace(labels, interval=torch.zeros(2))), without)
    assert not torch.allclose(ours(x, t, replace(labels, interval=torch.ones(2))), without)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"objective": "mean"}, "mean_flow"),
        ({"objective": "shortcut", "sampling_steps": 3}, "a power of 2"),
        ({"objective": Shortcut(finest=4), "sampling_steps": 4, "guidance_scale": 2.0}, "at most 2"),
    ],
)
def test_arguments_are_checked(arguments, named):
    with pytest.raises(ConfigurationError, match=named):
        FewStepDiffusion(BACKBONE, **arguments)


def test_guidance_cannot_change_after_training():
    module = built("mean_flow", guidance_scale=2.0)
    with pytest.raises(ConfigurationError, match="trained into the network"):
        module.sample(torch.arange(3), guidance_scale=3.0)
    module.guidance_scale = 3.0  # as `sample --guidance` does
    with pytest.raises(ConfigurationError, match="trained into the network"):
        module.sample(torch.arange(3))
    other = built("mean_flow")
    other.sampler = replace(other.sampler, name="ddim")  # as `sample --sampler` does
    with pytest.raises(ConfigurationError, match="must be builtin for FewStepDiffusion"):
        other.sample(torch.arange(3))


def test_it_is_a_latent_diffusion_whose_backbone_takes_intervals():
    module = FewStepDiffusion(BACKBONE)
    assert isinstance(module, LatentDiffusion)
    assert module.backbone.variant.interval
    assert module.hparams["backbone"]["variant"]["interval"]


def test_alignment_takes_the_pass_with_gradients(tmp_path):
    module = FewStepDiffusion(replace(BACKBONE, depth=2), guidance_scale=2.0, samples=Samples(0))
    technique = HiddenAlignment(1, 2, projection="none")
    trainer = support.trainer(default_root_dir=tmp_path, max_steps=2, limit_val_batches=0, callbacks=[technique])
    loader = torch.utils.data.DataLoader(TensorDictDataset(batch()), batch_size=4)
    trainer.fit(module, loader, loader)
    assert -1 <= float(trainer.callback_metrics["train/hidden_alignment"]) < 0


def test_blocks_may_be_dropped_where_the_target_is_a_derivative(tmp_path):
    module = FewStepDiffusion(replace(BACKBONE, depth=2), samples=Samples(0))
    loader = torch.utils.data.DataLoader(TensorDictDataset(batch()), batch_size=4)
    technique = StochasticDepth(rate=0.99, mode="uniform")
    trainer = support.trainer(default_root_dir=tmp_path, max_steps=2, limit_val_batches=0, callbacks=[technique])
    trainer.fit(module, loader, loader)
    assert trainer.callback_metrics["train/loss"].isfinite()
