"""MeanFlow and shortcut models against slow formulas, and samplers against closed forms."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.diffusion_sampling import ddim_sample, sampling_times
from lit_efficient.losses.few_steps import (
    MeanFlow,
    Shortcut,
    average_velocity_sample,
    error_weight,
    mean_flow_target,
    mean_flow_times,
    shortcut_target,
    shortcut_times,
)
from lit_efficient.models.networks.dit import DiT, DiTConfig, DiTVariant


@pytest.fixture
def network():
    torch.manual_seed(0)
    config = DiTConfig(channels=2, size=4, width=16, depth=2, heads=2, variant=DiTVariant(interval=True))
    dit = DiT(config).double()
    for parameter in dit.parameters():
        nn.init.normal_(parameter, std=0.2)
    labels = torch.arange(3)
    return lambda x, t, h: dit(x, t, labels, interval=h)


def batch():
    torch.manual_seed(1)
    x, v = torch.randn(2, 3, 2, 4, 4, dtype=torch.float64)
    return x, torch.tensor([0.9, 0.5, 0.3]).double(), torch.tensor([0.6, 0.1, 0.0]).double(), v


def test_mean_flow_target_is_the_papers_with_a_derivative_by_differences(network):
    x, t, h, v = batch()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        step = 1e-2  # the embeddings are in float32, in which smaller steps are lost
        later = network(x + step * v, t + step, h + step)
        earlier = network(x - step * v, t - step, h - step)
    expected = v - h.view(-1, 1, 1, 1) * (later - earlier) / (2 * step)
    found = mean_flow_target(network, x, t, h, v)
    assert not found.requires_grad
    scale = (found - v).abs().max()
    assert scale > 0.05  # the derivative counts
    assert (found - expected).abs().max() < 1e-3 * scale
    assert torch.equal(found[2], v[2])


def test_mean_flow_is_solved_by_the_average_of_a_known_flow():
    # v(x, t) = x + t has paths with x_s + s + 1 = (x_t + t + 1) exp(s - t).
    def u(x, t, h):
        t, h = (a.view(-1, 1) for a in (t, h))
        moved = (x + t + 1) * torch.exp(-h) - (t - h) - 1
        return torch.where(h > 0, (x - moved) / h.clamp(min=1e-9), x + t)

    x = torch.randn(5, 3, dtype=torch.float64)
    t = torch.linspace(0.5, 1.0, 5).double()
    h = torch.linspace(0.1, 0.5, 5).double()
    v = x + t[:, None]
    torch.testing.assert_close(mean_flow_target(u, x, t, h, v), u(x, t, h), rtol=0, atol=1e-12)
    torch.testing.assert_close(shortcut_target(u, x, t, h), u(x, t, h), rtol=0, atol=1e-12)
    # Any number of steps ends at the solution of the equation, s = 0.
    for steps in (1, 2, 4):
        end = average_velocity_sample(u, x, sampling_times(steps, "flow").double())
        torch.testing.assert_close(end, (x + 2) * torch.exp(torch.tensor(-1.0)) - 1, rtol=0, atol=1e-6)


def test_shortcut_target_is_the_mean_of_two_steps(network):
    x, t, _, _ = batch()
    h = torch.tensor([0.5, 0.25, 0.125]).double()
    first = network(x, t, h / 2)
    second = network(x - (h / 2).view(-1, 1, 1, 1) * first, t - h / 2, h / 2)
    torch.testing.assert_close(shortcut_target(network, x, t, h), (first + second) / 2, rtol=0, atol=1e-12)


def test_times_of_mean_flow_have_intervals_in_the_last_rows():
    first, second = torch.rand(2, 40)
    t, h = mean_flow_times(first, second, 0.25)
    assert torch.equal(t, torch.maximum(first, second))
    assert torch.equal(h[:30], torch.zeros(30))
    torch.testing.assert_close((t - h)[30:], torch.minimum(first, second)[30:])
    assert mean_flow_times(first[:2], second[:2], 0.25)[1][1] > 0  # at least one row


def test_times_of_shortcuts_are_on_the_grids_of_all_lengths():
    torch.manual_seed(0)
    t, h = shortcut_times(torch.rand(4000), 0.5, 16)
    assert torch.equal(h[:2000], torch.full((2000,), 1 / 16))
    assert torch.equal(t * 16, (t * 16).round())
    assert set(h[2000:].tolist()) == {1.0, 0.5, 0.25, 0.125}
    for length in (1.0, 0.5, 0.25, 0.125):
        places = t[2000:][h[2000:] == length]
        assert 400 < len(places) < 600
        assert set(places.tolist()) == {length * i for i in range(1, round(1 / length) + 1)}


def test_a_constant_average_velocity_of_each_interval_is_ddim_of_flow():
    torch.manual_seed(0)
    noise = torch.randn(2, 3, dtype=torch.float64)
    times = sampling_times(4, "flow").double()
    ours = average_velocity_sample(lambda x, t, h: x * t[:, None], noise, times)
    theirs = ddim_sample(lambda x, t: x * t[:, None], noise, times, "flow", "flow")
    torch.testing.assert_close(ours, theirs)


def test_the_weight_makes_rows_equal():
    error = torch.tensor([0.5, 2.0], requires_grad=True)
    weight = error_weight(error, 1.0, 0.0)
    assert not weight.requires_grad
    torch.testing.assert_close(error * weight, torch.ones(2))
    torch.testing.assert_close(error_weight(error, 0.5, 0.01), (error.detach() + 0.01) ** -0.5)


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        (MeanFlow, {"interval_share": 0.0}, "interval_share"),
        (MeanFlow, {"guidance_mix": 1.0}, "guidance_mix"),
        (MeanFlow, {"offset": 0.0}, "offset"),
        (Shortcut, {"finest": 96}, "a power of 2"),
        (Shortcut, {"bootstrap_share": 1.5}, "bootstrap_share"),
    ],
)
def test_arguments_are_checked(kind, arguments, named):
    with pytest.raises(ConfigurationError, match=named):
        kind(**arguments)
