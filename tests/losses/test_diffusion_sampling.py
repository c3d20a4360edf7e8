import sys

import pytest
import torch

from lit_efficient import LatentDiffusion
from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.diffusers_sampling import sample_with_diffusers, scheduler_for
from lit_efficient.losses.diffusion_sampling import Sampler, ddim_sample, guide, sampling_times
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.tasks.latent_sampling import sample_latents
from tests.losses.mixture import COVARIANCE, NOISE, best_predictor, check_counts, moments

PROCESSES = [
    *(DiffusionProcess(name) for name in ("flow", "cosine", "squared_cosine", "linear", "scaled_linear", "edm")),
    *(DiffusionProcess(name, zero_terminal_snr=True) for name in ("squared_cosine", "linear", "scaled_linear")),
    DiffusionProcess("edm", sigma_data=0.5),
    DiffusionProcess("linear", beta_end=0.03),  # sigma ends at 2,000
    DiffusionProcess("linear", beta_end=0.05),  # at 340,000
]
SAMPLERS = ("builtin", "ddim", "euler", "heun", "dpmsolver++")
COUNTS = (1, 2, 5, 10, 20, 50)


def refused(process, name, prediction):
    """What no sampler of diffusers can do: start without any signal from eps, or by Heun's steps in sigma."""
    if name == "builtin" or process.schedule == "flow":
        return name != "builtin" and prediction == "eps"
    steep = process.beta_end == 0.05
    no_signal = steep or process.zero_terminal_snr or process.schedule in ("cosine", "squared_cosine")
    return (prediction == "eps" and no_signal) or (name == "heun" and (no_signal or process.schedule == "edm"))


@pytest.mark.turns(3)
@pytest.mark.parametrize("process", PROCESSES, ids=str)
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_of_every_target_draws_the_mixture_or_is_refused(process, name):
    """Of a mixture of Gaussians the best predictor is known: what is drawn with it comes to the mixture's moments."""
    sampler = Sampler(name)

    def sample(prediction, steps):
        return sample_latents(best_predictor(process, prediction), NOISE, steps, process, prediction, sampler)

    if refused(process, name, "v"):
        with pytest.raises(ConfigurationError, match="name must be builtin, ddim, euler or dpmsolver"):
            LatentDiffusion(prediction="v", schedule=process, sampler=sampler)
        return
    references = {steps: sample("v", steps) for steps in COUNTS}
    check_counts(references)
    for prediction in ("flow", "x0", "edm", "eps"):
        if refused(process, name, prediction):
            with pytest.raises(ConfigurationError, match=r"(name|prediction) must be .*eps"):
                LatentDiffusion(prediction=prediction, schedule=process, sampler=sampler)
        elif prediction == "eps" and process.ends_in_noise:  # it starts a little later
            check_counts({steps: sample("eps", steps) for steps in COUNTS})
        else:
            torch.testing.assert_close(sample(prediction, 5), references[5], atol=1e-3, rtol=0)


def test_first_order_samplers_of_diffusers_step_as_ours_does():
    for process in PROCESSES:
        ours = sample_latents(best_predictor(process, "v"), NOISE, 20, process, "v", Sampler())
        # Euler's first step starts from sigma, DDIM's from 1: the same only where no signal is left.
        for name in ("ddim", "euler") if process.ends_in_noise else ("ddim",):
            theirs = sample_latents(best_predictor(process, "v"), NOISE, 20, process, "v", Sampler(name))
            close = (theirs - ours).abs() < 3e-3  # but for points between two centres, which rounding sends apart
            assert close.double().mean() > 0.995, (process, name)


def test_a_table_of_noise_alone_is_refused():
    with pytest.raises(ConfigurationError, match=r"beta_end must be smaller: .* got 0.1"):
        DiffusionProcess("linear", beta_end=0.1)


def test_the_network_sees_what_it_was_trained_on():
    """What the samplers hand to the network has the covariance of the time that they name."""
    for process in (DiffusionProcess("flow"), DiffusionProcess("linear"), DiffusionProcess("edm")):
        predict = best_predictor(process, "v")
        for name in ("euler", "dpmsolver++"):
            seen = []

            def spy(x, t, predict=predict, seen=seen):
                seen.append((x.double(), t[0].double()))
                return predict(x, t)

            sample_with_diffusers(spy, NOISE, 50, process, "v", Sampler(name))
            for x, t in seen:
                alpha, sigma = process.alpha_sigma(t)
                wanted = alpha**2 * COVARIANCE + sigma**2 * torch.eye(2)
                assert moments(x)[1].trace().item() == pytest.approx(wanted.trace().item(), rel=0.1)


def test_the_steps_trail_and_are_shifted():
    times = sampling_times(4, "flow", shift=3.0)
    torch.testing.assert_close(times, torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0]))
    seen = []

    def spy(x, t):
        seen.append(t[0].item())
        return torch.zeros_like(x)

    sample_with_diffusers(spy, NOISE, 4, "flow", "flow", Sampler("euler", shift=3.0))
    assert seen == pytest.approx([1.0, 0.9, 0.75, 0.5])
    seen.clear()
    process = DiffusionProcess("scaled_linear", zero_terminal_snr=True)
    sample_with_diffusers(spy, NOISE, 4, process, "v", Sampler("ddim"))
    assert seen == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_a_scheduler_says_what_the_process_is():
    process = DiffusionProcess("scaled_linear", beta_end=0.014, zero_terminal_snr=True)
    config = scheduler_for(process, "ddim", "x0").config
    named = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.014, "prediction_type": "sample"}
    named |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "clip_sample": False}
    assert {name: config[name] for name in named} == named
    assert scheduler_for("flow", "euler", shift=3.0).config.shift == 3.0
    assert scheduler_for(DiffusionProcess("edm", sigma_data=0.5), "euler").config.sigma_data == 0.5
    with pytest.raises(ConfigurationError, match="do not support prediction 'v'; train with 'flow'"):
        scheduler_for("flow", "euler", "v")
    with pytest.raises(ConfigurationError, match="do not support prediction 'flow'; train with 'v'"):
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
        sample_with_diffusers(lambda x, t: x, NOISE, steps, process, "v", sampler)


def test_without_diffusers_the_builtin_sampler_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigurationError, match="name must be builtin without diffusers"):
        scheduler_for("flow", "euler")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "plms"}, "name must be one of builtin, ddim, euler, heun, dpmsolver.*, got 'plms'"),
        ({"guidance_rescale": 1.5}, "guidance_rescale must be at least 0 and at most 1, got 1.5"),
        ({"shift": 0.0}, "shift must be above 0 or null, got 0.0"),
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
