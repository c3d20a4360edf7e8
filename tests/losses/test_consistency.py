"""Consistency models against diffusers' LCMScheduler and the formulas of the authors' code; DMD2's gradient."""

import numpy as np
import pytest
import torch

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.consistency import (
    boundary_scalings,
    consistency_sample,
    consistency_times,
    ddim_step,
    distribution_matching_gradient,
    distribution_matching_loss,
    huber_loss,
)
from lit_efficient.losses.diffusers_sampling import check_sampler, scheduler_for
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.noise_process import DiffusionProcess, alphas_cumprod

TABLE = DiffusionProcess("scaled_linear")
ZERO = DiffusionProcess("scaled_linear", zero_terminal_snr=True)


def predict(x, t):
    return torch.tanh(x * (0.5 + t.view(-1, 1, 1, 1)))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8, 50])
@pytest.mark.parametrize(("process", "prediction"), [(TABLE, "eps"), (TABLE, "v"), (ZERO, "v"), (TABLE, "x0")])
def test_samples_are_those_of_the_lcm_scheduler(steps, process, prediction):
    noise = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    scheduler = scheduler_for(process, "lcm", prediction)
    scheduler.set_timesteps(steps)
    assert torch.equal(scheduler.timesteps, (consistency_times(steps) * 1000).round().long() - 1)
    generator = torch.Generator().manual_seed(1)
    x = noise
    for timestep in scheduler.timesteps:
        output = predict(x, (timestep.float() + 1).expand(2) / 1000)
        x = scheduler.step(output, timestep, x, generator=generator, return_dict=False)[0]
    generator = torch.Generator().manual_seed(1)

    def renoise():
        return torch.randn(noise.shape, generator=generator)

    ours = consistency_sample(predict, noise, steps, process, prediction, renoise)
    torch.testing.assert_close(ours, x, rtol=2e-4, atol=2e-4)


def test_the_scalings_are_those_of_the_scheduler():
    scheduler = scheduler_for(TABLE, "lcm", "eps")
    for timestep in (0, 19, 999):
        theirs = scheduler.get_scalings_for_boundary_condition_discrete(timestep)
        ours = boundary_scalings(torch.tensor([(timestep + 1) / 1000]), TABLE)
        assert [float(one) for one in ours] == pytest.approx([float(one) for one in theirs], rel=1e-4, abs=1e-9)
    skip, out = boundary_scalings(torch.zeros(1), DiffusionProcess("flow"))
    assert (skip.item(), out.item()) == (1.0, 0.0)


def test_a_step_of_the_teacher_is_that_of_the_authors_solver():
    alphas = alphas_cumprod(TABLE).numpy()
    grid = (np.arange(1, 51) * 20).astype(np.int64) - 1
    earlier = np.asarray([alphas[0], *alphas[grid[:-1]]])
    index = torch.tensor([0, 1, 20, 49])
    torch.manual_seed(0)
    x, eps = torch.randn(2, 4, 1, 2, 2, dtype=torch.float64)
    alpha, before = (torch.tensor(a)[index].view(-1, 1, 1, 1) for a in (alphas[grid], earlier))
    x0 = (x - (1 - alpha).sqrt() * eps) / alpha.sqrt()
    expected = before.sqrt() * x0 + (1 - before).sqrt() * eps
    t = (index + 1).double() / 50
    then = (index.double() / 50).clamp(min=TABLE.t_range[0])
    torch.testing.assert_close(ddim_step(eps, x, t, then, TABLE, "eps"), expected, rtol=1e-6, atol=1e-6)


def test_huber_loss_is_the_papers():
    found, target = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    for scale in (0.001, 1.0):
        expected = (((found - target) ** 2 + scale**2) ** 0.5 - scale).mean(dim=(1, 2))
        torch.testing.assert_close(huber_loss(found, target, scale), expected)
    torch.testing.assert_close(huber_loss(found, target, 0.0), (found - target).square().mean(dim=(1, 2)))


def test_the_gradient_of_distribution_matching_is_that_of_the_authors():
    torch.manual_seed(0)
    x0, real, fake = torch.randn(3, 4, 2, 3, 3, dtype=torch.float64)
    p_real, p_fake = x0 - real, x0 - fake
    expected = (p_real - p_fake) / p_real.abs().mean(dim=[1, 2, 3], keepdim=True)
    gradient = distribution_matching_gradient(x0, real, fake)
    torch.testing.assert_close(gradient, expected)
    x0.requires_grad_()
    theirs = 0.5 * torch.nn.functional.mse_loss(x0, (x0 - expected).detach())
    ours = distribution_matching_loss(x0, gradient).mean()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, x0)[0] for loss in (ours, theirs)))
    torch.testing.assert_close(
        torch.autograd.grad(distribution_matching_loss(x0, gradient).mean(), x0)[0] * x0.numel(), expected
    )
    assert torch.equal(distribution_matching_gradient(x0, x0, x0), torch.zeros_like(x0))


def test_samplers_without_lcm_are_named():
    with pytest.raises(ConfigurationError, match="on 'edm', without lcm"):
        check_sampler(DiffusionProcess("edm"), Sampler("lcm"), "edm")
    with pytest.raises(ConfigurationError, match="1 for lcm"):
        check_sampler(DiffusionProcess("flow"), Sampler("lcm", shift=3.0), "flow")
    with pytest.raises(ConfigurationError, match="no scheduler of lcm for flow"):
        scheduler_for("flow", "lcm")
