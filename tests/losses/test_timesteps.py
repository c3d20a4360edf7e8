import math

import pytest
import torch

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.noise_process import T_RANGE, DiffusionProcess
from lit_efficient.losses.timesteps import (
    ResolutionShift,
    TimestepSampling,
    on_latents,
    sample_timesteps,
    shift_times,
    token_times,
)

COUNT = 50_000


def drawn(sampling, process="flow"):
    return sample_timesteps(COUNT, sampling, torch.Generator().manual_seed(0), process=process)


def assert_follows(values, cdf):
    """Kolmogorov and Smirnov's distance; with 50,000 draws 0.0087 is exceeded once in a thousand times."""
    values = values.double().sort().values
    steps = torch.arange(1, COUNT + 1, dtype=torch.float64) / COUNT
    assert (cdf(values) - steps).abs().max() < 0.0087


def test_timesteps_follow_their_distribution_and_stay_inside():
    generator = torch.Generator().manual_seed(0)
    uniform = sample_timesteps(50_000, "uniform", generator)
    normal = sample_timesteps(50_000, "logit_normal", generator)
    for t in (uniform, normal):
        assert t.min() >= T_RANGE[0]
        assert t.max() <= T_RANGE[1]
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    torch.testing.assert_close(uniform.quantile(quantiles), quantiles, atol=0.01, rtol=0)
    expected = torch.distributions.Normal(0.0, 1.0).icdf(quantiles).sigmoid()
    torch.testing.assert_close(normal.quantile(quantiles), expected, atol=0.01, rtol=0)


def test_timesteps_with_a_generator_leave_the_global_one_alone():
    before = torch.get_rng_state()
    sample_timesteps(3, "logit_normal", torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())


def normal_cdf(x, location, scale):
    return torch.distributions.Normal(location, scale).cdf(x)


@pytest.mark.parametrize(("location", "scale"), [(0.0, 1.0), (-0.5, 1.3), (1.0, 0.5)])
def test_logit_normal_follows_its_cdf(location, scale):
    t = drawn(TimestepSampling("logit_normal", location, scale))
    inside = t.clamp(1.001e-3, 0.9989)  # what the ends collect is no density
    assert_follows(inside, lambda x: normal_cdf(x.logit(), location, scale))


@pytest.mark.parametrize("scale", [-0.7, 0.5, 1.29])
def test_mode_follows_the_papers_density(scale):
    """The density is |d/dt f^-1(t)| with f(u) = 1 - u - s (cos^2(pi u / 2) - 1 + u); f falls, so F(t) = 1 - f^-1(t)."""

    def f(u):
        return 1 - u - scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)

    def cdf(t):
        low, high = torch.zeros_like(t), torch.ones_like(t)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = torch.where(f(middle) > t, middle, low), torch.where(f(middle) > t, high, middle)
        return 1 - low

    t = drawn(TimestepSampling("mode", scale=scale))
    assert_follows(t, cdf)
    middle = ((t - 0.5).abs() < 0.02).float().mean().item() / 0.04
    assert middle == pytest.approx(1 / (1 - scale * (math.pi / 2 - 1)), rel=0.1)


def test_the_shift_divides_the_flows_signal_to_noise_ratio_by_its_square():
    t = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    flow = DiffusionProcess("flow")
    expected = flow.log_snr(t) - 2 * math.log(3.0)
    torch.testing.assert_close(flow.log_snr(shift_times(t, 3.0)), expected)
    shifted = drawn(TimestepSampling("uniform", shift=3.0))
    assert_follows(shifted, lambda x: x / (3 - 2 * x))


def test_edms_noise_levels_are_log_normal():
    process = DiffusionProcess("edm")
    sigma = process.alpha_sigma(drawn(TimestepSampling("log_normal"), process))[1]
    assert_follows(sigma.double().log(), lambda x: normal_cdf(x, -1.2, 1.2))


def test_a_table_is_trained_at_every_entry_and_at_the_last_one_as_often():
    t = drawn(TimestepSampling("uniform"), DiffusionProcess("scaled_linear", zero_terminal_snr=True))
    index = t.double() * 1000
    torch.testing.assert_close(index, index.round(), atol=1e-4, rtol=0)
    counts = torch.bincount(index.round().long(), minlength=1001)
    assert counts[0] == 0
    assert (counts[1:] > 0).all()
    assert counts[1000].item() == pytest.approx(50, abs=30)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"distribution": "beta"}, "distribution must be one of uniform, logit_normal, mode, log_normal, got 'beta'"),
        ({"distribution": "uniform", "location": 1.0}, "location must be unset for uniform, got 1.0"),
        ({"distribution": "uniform", "scale": 1.0}, "scale must be unset for uniform, got 1.0"),
        ({"scale": 0.0}, "scale must be above 0 or null, got 0.0"),
        ({"distribution": "mode", "scale": 2.0}, r"scale must be at least -1 and at most 1.7519\d* or null, got 2.0"),
        ({"location": math.inf}, "location must be a number or null, got inf"),
        ({"shift": 0.0}, "shift must be above 0 or null, got 0.0"),
        ({"second_share": 0.6}, "second_share must be at least 0 and at most 0.5, got 0.6"),
    ],
)
def test_a_distribution_is_checked_when_described(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        TimestepSampling(**wrong)


def test_log_normal_noise_levels_need_edm():
    with pytest.raises(ConfigurationError, match="schedule must be edm for log_normal noise levels, got 'flow'"):
        sample_timesteps(3, "log_normal")


def test_a_share_of_the_tokens_gets_a_second_time_and_each_keeps_the_distribution():
    torch.manual_seed(0)
    t, second = sample_timesteps(COUNT, "uniform"), sample_timesteps(COUNT, "logit_normal")
    times = token_times(t, second, 0.25, 3)
    replaced = times == second[:, None]
    assert torch.equal(times, torch.where(replaced, second[:, None], t[:, None]))
    assert replaced.float().mean(0).tolist() == pytest.approx([0.25] * 3, abs=0.01)
    both = (replaced[:, 0] & replaced[:, 1]).float().mean().item()
    assert both == pytest.approx(1 / 16, abs=0.005)  # independent of each other
    again = token_times(t, sample_timesteps(COUNT, "uniform"), 0.5, 1)
    assert_follows(again[:, 0], lambda x: x)


def test_times_of_tokens_lie_on_their_patches():
    times = torch.arange(12.0).view(2, 6)
    found = on_latents(times, (4, 6), 2)
    assert found.shape == (2, 1, 4, 6)
    for row in range(4):
        for column in range(6):
            assert torch.equal(found[:, 0, row, column], times[:, 3 * (row // 2) + column // 2])
    assert torch.equal(on_latents(times[:, 0], (4, 6), 2), times[:, 0])


def test_the_shift_of_flux_lies_on_a_line_of_the_number_of_tokens():
    for tokens, mu in ((256, 0.5), (2176, 0.825), (4096, 1.15)):
        assert ResolutionShift().at(tokens) == pytest.approx(math.exp(mu))
        assert ResolutionShift(kind="linear").at(tokens) == pytest.approx(mu)
