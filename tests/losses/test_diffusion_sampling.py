import math
import sys

import pytest
import torch

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses import diffusion
from lit_efficient.losses.diffusers_sampling import sample_with_diffusers, scheduler_for
from lit_efficient.losses.diffusion_sampling import Sampler, ddim_sample, guide, sampling_times
from lit_efficient.losses.noise_process import DiffusionProcess

PROCESSES = [
    *(DiffusionProcess(name) for name in ("flow", "cosine", "squared_cosine", "linear", "scaled_linear", "edm")),
    *(DiffusionProcess(name, zero_terminal_snr=True) for name in ("squared_cosine", "linear", "scaled_linear")),
    DiffusionProcess("edm", sigma_data=0.5),
]
SAMPLERS = ("ddim", "euler", "heun", "dpmsolver++")
MEAN, STD = 1.5, 0.3


def best_predictor(process, prediction):
    """Data N(m, s^2): the best predictor is known in closed form."""

    def predict(x, t):
        x, t = x.double(), t.double()
        alpha, sigma = process.alpha_sigma(t[:1])
        variance = alpha**2 * STD**2 + sigma**2
        x0 = MEAN + alpha * STD**2 / variance * (x - alpha * MEAN)
        eps = sigma / variance * (x - alpha * MEAN)
        return diffusion.target(x0, eps, t, process, prediction)

    return predict


def expected_mean(process):
    """Without zero terminal SNR sampling starts beside the process's own end, and ends as much beside the data."""
    alpha, sigma = (a.item() for a in process.alpha_sigma(torch.ones(1, dtype=torch.float64)))
    return MEAN - STD * alpha * MEAN / math.hypot(alpha * STD, sigma)


def noise():
    """Two points of mean 0 and standard deviation 1: the way of a Gaussian is linear, so they tell all of it."""
    return torch.tensor([[-1.0], [1.0]], dtype=torch.float64) / math.sqrt(2)


def check(data, process, mean, std):
    assert data.isfinite().all()
    assert data.mean().item() == pytest.approx(expected_mean(process), abs=mean)
    assert data.std().item() == pytest.approx(STD, abs=std)


def builtin(process, prediction, steps):
    times = sampling_times(steps, prediction, process)
    return ddim_sample(best_predictor(process, prediction), noise(), times, process, prediction)


def test_the_builtin_sampler_recovers_a_gaussian_from_its_exact_predictor():
    for process in PROCESSES:
        check(builtin(process, "v", 300), process, mean=0.006, std=0.012)


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_the_builtin_sampler_takes_every_target(process):
    reference = builtin(process, "v", 25)
    for prediction in ("flow", "x0", "edm"):
        torch.testing.assert_close(builtin(process, prediction, 25), reference, atol=1e-5, rtol=0)
    check(builtin(process, "eps", 200), process, mean=0.03 if process.ends_in_noise else 0.006, std=0.02)


@pytest.mark.parametrize("process", PROCESSES, ids=str)
@pytest.mark.parametrize("name", SAMPLERS)
def test_diffusers_samplers_recover_the_gaussian_too(process, name):
    """First-order ones step for step like ours; second-order ones are right with fewer steps."""
    sampler = Sampler(name)
    if name == "heun" and (process.schedule in ("cosine", "edm") or process.zero_terminal_snr):
        with pytest.raises(ConfigurationError, match="name must be builtin, ddim, euler or dpmsolver"):
            sample_with_diffusers(best_predictor(process, "v"), noise(), 100, process, "v", sampler)
        return

    def sample(prediction, steps):
        return sample_with_diffusers(best_predictor(process, prediction), noise(), steps, process, prediction, sampler)

    data = sample("v", 100)
    if name in ("ddim", "euler"):
        # Euler's first step starts from sigma, DDIM's from 1: the same only where no signal is left.
        torch.testing.assert_close(data.double(), builtin(process, "v", 100), atol=3e-3, rtol=0)
    else:
        check(data, process, mean=0.006, std=0.015)
    reference = sample("v", 10)
    for prediction in ("flow", "x0", "edm", "eps"):
        if prediction == "eps" and process.ends_in_noise:
            with pytest.raises(ConfigurationError, match="name must be builtin for prediction 'eps'"):
                sample("eps", 10)
        else:
            torch.testing.assert_close(sample(prediction, 10), reference, atol=2e-4, rtol=0)


def test_the_network_sees_what_it_was_trained_on():
    """What the samplers hand to the network has the variance of the time that they name."""
    for process in (DiffusionProcess("flow"), DiffusionProcess("linear"), DiffusionProcess("edm")):
        predict = best_predictor(process, "v")
        for name in ("euler", "dpmsolver++"):
            seen = []

            def spy(x, t, predict=predict, seen=seen):
                seen.append((x.double().std(), t[0].double()))
                return predict(x, t)

            sample_with_diffusers(spy, noise(), 50, process, "v", Sampler(name))
            for std, t in seen:
                alpha, sigma = process.alpha_sigma(t)
                assert std.item() == pytest.approx(math.hypot(alpha * STD, sigma), rel=0.1)


def test_the_steps_trail_and_are_shifted():
    times = sampling_times(4, "flow", shift=3.0)
    torch.testing.assert_close(times, torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0]))
    seen = []

    def spy(x, t):
        seen.append(t[0].item())
        return torch.zeros_like(x)

    sample_with_diffusers(spy, noise(), 4, "flow", "flow", Sampler("euler", shift=3.0))
    assert seen == pytest.approx([1.0, 0.9, 0.75, 0.5])
    seen.clear()
    process = DiffusionProcess("scaled_linear", zero_terminal_snr=True)
    sample_with_diffusers(spy, noise(), 4, process, "v", Sampler("ddim"))
    assert seen == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_a_scheduler_says_what_the_process_is():
    process = DiffusionProcess("scaled_linear", beta_end=0.014, zero_terminal_snr=True)
    config = scheduler_for(process, "ddim", "x0").config
    named = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.014, "prediction_type": "sample"}
    named |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "clip_sample": False}
    assert {name: config[name] for name in named} == named
    assert scheduler_for("flow", "euler", shift=3.0).config.shift == 3.0
    assert scheduler_for(DiffusionProcess("edm", sigma_data=0.5), "euler").config.sigma_data == 0.5
    with pytest.raises(ConfigurationError, match="cannot hold prediction 'v'; train with 'flow'"):
        scheduler_for("flow", "euler", "v")
    with pytest.raises(ConfigurationError, match="cannot hold prediction 'flow'; train with 'v'"):
        scheduler_for("linear", "ddim", "flow")


@pytest.mark.parametrize(
    ("process", "sampler", "steps", "message"),
    [
        ("linear", Sampler("ddim"), 400, "sampling_steps must be a divisor of 1000 for diffusers' ddim, got 400"),
        ("linear", Sampler("euler"), 1001, "sampling_steps must be 1 to 1000 for diffusers' euler, got 1001"),
        ("linear", Sampler("euler", shift=2.0), 10, "shift must be 1 for diffusers' euler on 'linear'"),
        (DiffusionProcess("linear", zero_terminal_snr=True), Sampler("euler"), 400, "must be smaller .*, got 400"),
    ],
)
def test_what_diffusers_would_do_wrong_is_refused(process, sampler, steps, message):
    with pytest.raises(ConfigurationError, match=message):
        sample_with_diffusers(lambda x, t: x, noise(), steps, process, "v", sampler)


def test_without_diffusers_the_builtin_sampler_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigurationError, match="name must be builtin without diffusers"):
        scheduler_for("flow", "euler")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "plms"}, "name must be one of builtin, ddim, euler, heun, dpmsolver.*, got 'plms'"),
        ({"guidance_rescale": 1.5}, "guidance_rescale must be at least 0 and at most 1, got 1.5"),
        ({"shift": 0.0}, "shift must be above 0, got 0.0"),
    ],
)
def test_a_sampler_is_checked_when_described(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        Sampler(**wrong)


def test_rescaled_guidance_is_diffusers():
    from diffusers.guiders.guider_utils import rescale_noise_cfg

    conditional, unconditional = torch.randn(2, 3, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    guided = guide(conditional, unconditional, 7.5)
    for share in (0.0, 0.7, 1.0):
        ours = guide(conditional, unconditional, 7.5, share)
        torch.testing.assert_close(ours, rescale_noise_cfg(guided, conditional, share))
    torch.testing.assert_close(ours.std(dim=(1, 2, 3)), conditional.std(dim=(1, 2, 3)))


def test_guidance_extrapolates_from_the_unconditional_prediction():
    conditional, unconditional = torch.tensor([3.0]), torch.tensor([1.0])
    assert guide(conditional, unconditional, 1.0) == conditional
    assert guide(conditional, unconditional, 0.0) == unconditional
    assert guide(conditional, unconditional, 2.0) == 5.0


def test_a_step_of_the_flow_is_eulers():
    x, velocity = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    times = torch.tensor([0.8, 0.3], dtype=torch.float64)
    stepped = ddim_sample(lambda _x, _t: velocity, x, times, "flow", "flow")
    torch.testing.assert_close(stepped, x - 0.5 * velocity)
