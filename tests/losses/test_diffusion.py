import math

import pytest
import torch

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses import diffusion
from lit_efficient.losses.diffusion_sampling import ddim_sample, guide, sampling_times

SCHEDULES = ("flow", "cosine")
PREDICTIONS = ("flow", "eps", "v", "x0")


def draw(count: int = 7):
    generator = torch.Generator().manual_seed(0)
    x0, eps = torch.randn(2, count, 2, 3, generator=generator, dtype=torch.float64)
    return x0, eps, torch.linspace(0.01, 0.99, count, dtype=torch.float64)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_every_target_converts_back_to_the_same_data_and_noise(schedule, prediction):
    x0, eps, t = draw()
    x_t = diffusion.add_noise(x0, eps, t, schedule)
    wanted = diffusion.target(x0, eps, t, schedule, prediction)
    got_x0, got_eps = diffusion.to_x0_eps(wanted, x_t, t, schedule, prediction)
    torch.testing.assert_close(got_x0, x0)
    torch.testing.assert_close(got_eps, eps)


def test_schedules_run_from_data_to_noise():
    ends = torch.tensor([0.0, 1.0])
    for schedule in SCHEDULES:
        alpha, sigma = diffusion.alpha_sigma(ends, schedule)
        torch.testing.assert_close(alpha, torch.tensor([1.0, 0.0]))
        torch.testing.assert_close(sigma, torch.tensor([0.0, 1.0]))
    t = torch.rand(100)
    alpha, sigma = diffusion.alpha_sigma(t, "cosine")
    torch.testing.assert_close(alpha**2 + sigma**2, torch.ones(100))  # variance-preserving
    torch.testing.assert_close(sum(diffusion.alpha_sigma(t, "flow")), torch.ones(100))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_log_snr_is_zero_in_the_middle_falls_and_is_finite_where_training_draws(schedule):
    t = torch.linspace(*diffusion.T_RANGE, 101)
    values = diffusion.log_snr(t, schedule)
    assert values.isfinite().all()
    assert (values.diff() < 0).all()
    assert values[50].item() == pytest.approx(0.0, abs=1e-5)
    alpha, sigma = diffusion.alpha_sigma(t, schedule)
    torch.testing.assert_close(values.exp(), (alpha / sigma) ** 2, rtol=1e-3, atol=0)


def test_the_flow_target_is_the_velocity_of_the_path():
    x0, eps, t = draw()
    h = 1e-6
    slope = (diffusion.add_noise(x0, eps, t + h, "flow") - diffusion.add_noise(x0, eps, t - h, "flow")) / (2 * h)
    torch.testing.assert_close(diffusion.target(x0, eps, t, "flow", "flow"), slope)


def test_v_is_the_velocity_in_angle_of_the_cosine_path():
    x0, eps, t = draw()
    h = 1e-6
    slope = (diffusion.add_noise(x0, eps, t + h, "cosine") - diffusion.add_noise(x0, eps, t - h, "cosine")) / (2 * h)
    torch.testing.assert_close(diffusion.target(x0, eps, t, "cosine", "v"), slope / (math.pi / 2))


def test_timesteps_follow_their_distribution_and_stay_inside():
    generator = torch.Generator().manual_seed(0)
    uniform = diffusion.sample_timesteps(50_000, "uniform", generator)
    normal = diffusion.sample_timesteps(50_000, "logit_normal", generator)
    for t in (uniform, normal):
        assert t.min() >= diffusion.T_RANGE[0]
        assert t.max() <= diffusion.T_RANGE[1]
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    torch.testing.assert_close(uniform.quantile(quantiles), quantiles, atol=0.01, rtol=0)
    expected = torch.distributions.Normal(0.0, 1.0).icdf(quantiles).sigmoid()
    torch.testing.assert_close(normal.quantile(quantiles), expected, atol=0.01, rtol=0)


def test_timesteps_with_a_generator_leave_the_global_one_alone():
    before = torch.get_rng_state()
    diffusion.sample_timesteps(3, "logit_normal", torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("call", ["target", "to_x0_eps", "alpha_sigma", "sample_timesteps"])
def test_unknown_names_are_refused_with_what_is_allowed(call):
    x0, eps, t = draw()
    arguments = {
        "target": (x0, eps, t, "flow", "epsilon"),
        "to_x0_eps": (x0, eps, t, "flow", "epsilon"),
        "alpha_sigma": (t, "linear"),
        "sample_timesteps": (3, "lognormal"),
    }[call]
    with pytest.raises(ConfigurationError, match=r"must be one of .*, not '(epsilon|linear|lognormal)'"):
        getattr(diffusion, call)(*arguments)


def test_guidance_extrapolates_from_the_unconditional_prediction():
    conditional, unconditional = torch.tensor([3.0]), torch.tensor([1.0])
    assert guide(conditional, unconditional, 1.0) == conditional
    assert guide(conditional, unconditional, 0.0) == unconditional
    assert guide(conditional, unconditional, 2.0) == 5.0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_sampler_recovers_a_gaussian_from_its_exact_predictor(schedule, prediction):
    """Data N(m, s^2): the best predictor is known in closed form, and the sampler must map noise to that Gaussian."""
    m, s = 1.5, 0.3

    def predict(x, t):
        alpha, sigma = diffusion.alpha_sigma(t[:1].double(), schedule)
        variance = alpha**2 * s**2 + sigma**2
        x0 = m + alpha * s**2 / variance * (x - alpha * m)
        eps = sigma / variance * (x - alpha * m)
        return diffusion.target(x0, eps, t.double(), schedule, prediction)

    noise = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = ddim_sample(predict, noise, sampling_times(200, prediction), schedule, prediction)
    assert data.isfinite().all()
    assert data.mean().item() == pytest.approx(m, abs=0.03)
    assert data.std().item() == pytest.approx(s, abs=0.02)


def test_a_step_of_the_flow_is_eulers():
    x, velocity = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    times = torch.tensor([0.8, 0.3], dtype=torch.float64)
    stepped = ddim_sample(lambda _x, _t: velocity, x, times, "flow", "flow")
    torch.testing.assert_close(stepped, x - 0.5 * velocity)
