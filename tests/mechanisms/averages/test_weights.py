"""The functions of averages: decays of the references, formats, profiles, and widths rebuilt afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lit_efficient import ConfigurationError
from lit_efficient.mechanisms.averages.weights import (
    averageable,
    check_unchanged,
    decay_at,
    fingerprint,
    gamma_of,
    position_weights,
    power_decay,
    synthesis_weights,
    update_,
    weighted_mean,
)
from lit_efficient.mechanisms.blocks.freezing import hold
from lit_efficient.mechanisms.trials.memory import AllocationMeter


@pytest.mark.parametrize("warmup", ["inverse_gamma", "tf"])
def test_averages_equal_those_of_diffusers(warmup: str) -> None:
    from diffusers.training_utils import EMAModel

    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, generator=generator)) for size in ((7, 5), (3,), ())]
    reference = EMAModel(weights, decay=0.97, use_ema_warmup=warmup == "inverse_gamma", power=0.75, update_after_step=3)
    ours = [w.detach().clone() for w in weights]
    for step in range(200):
        with torch.no_grad():
            for w in weights:
                w.add_(torch.randn(w.shape, generator=generator), alpha=0.1)
        reference.step(weights)
        update_(ours, weights, decay_at(step - 3, 0.97, warmup, 0.75))
    for a, b in zip(ours, reference.shadow_params):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("power", [2 / 3, 1.0])
def test_averages_equal_those_of_ema_pytorch(power: float) -> None:
    reference_package = pytest.importorskip("ema_pytorch", reason="it is in the extra `test`")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))
    generator = torch.Generator().manual_seed(0)
    reference = reference_package.EMA(net, beta=0.97, update_every=1, update_after_step=3, power=power)
    weights = list(net.parameters())
    ours = [w.detach().clone() for w in weights]
    for step in range(200):
        with torch.no_grad():
            for w in weights:
                w.add_(torch.randn(w.shape, generator=generator), alpha=0.1)
        reference.update()
        update_(ours, weights, decay_at(step - 3, 0.97, "inverse_gamma", power))
    for a, b in zip(ours, reference.ema_model.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=2e-6)  # its rounding; a step late is 80 times that
        assert not torch.equal(a, b)  # it takes its decays in float32: were they the same object, nothing was compared


def test_decay_equals_the_formula_of_ema_pytorch() -> None:
    """``EMA.get_current_decay`` of ema-pytorch 0.8: clamp(1 - (1 + epoch / inv_gamma) ** -power, min, beta)."""
    for step in range(0, 100_000, 997):
        expected = 0.0 if step <= 0 else min(max(1 - (1 + step / 1.0) ** -(2 / 3), 0.0), 0.9999)
        assert decay_at(step, 0.9999) == pytest.approx(expected, abs=1e-12)
    assert decay_at(1_000_000_000, 0.9999) == 0.9999
    assert [decay_at(n, 0.9, None) for n in (0, 1, 2)] == [0.0, 0.9, 0.9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_formats_are_averaged_in_float32(dtype: torch.dtype) -> None:
    weights = [torch.randn(n).to(dtype) for n in (4, 8, 3, 20, 1)] + [torch.randn(5)]
    weights.append(torch.randn(5, 3).to(dtype).T)  # not contiguous
    averages = [torch.randn(w.shape) for w in weights]
    expected = [0.9 * a + 0.1 * w.float() for a, w in zip(averages, weights)]
    update_(averages, weights, 0.9)
    torch.testing.assert_close(averages, expected)
    update_(averages, weights, 0.0)
    assert all(torch.equal(a, w.float()) for a, w in zip(averages, weights))


def test_no_whole_tensor_is_converted() -> None:
    average, weights = torch.zeros(2**10, 2**10), torch.randn(2**10, 2**10).bfloat16()
    with AllocationMeter() as meter:
        update_([average], [weights], 0.9)
    assert meter.peak <= average.nbytes + weights.nbytes + 2**21  # and rows of a quarter of a million, twice
    assert torch.equal(average, torch.zeros_like(average).lerp_(weights.float(), 1 - 0.9))


def test_tied_once_and_frozen_or_quantised_never() -> None:
    class Packed(nn.Parameter):
        """As quantised weights are: floating-point by name, packed in truth."""

    net = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3), "d": nn.Linear(3, 3)})
    net["b"].weight = net["a"].weight
    net["c"].requires_grad_(False)
    net["d"].weight = Packed(torch.ones(3), requires_grad=False)
    net["d"].bias = nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    assert list(averageable(net)) == ["a.weight", "a.bias", "b.bias"]
    net["c"].bias.requires_grad_(True)
    hold(net, ["c.bias"])
    assert list(averageable(net)) == ["a.weight", "a.bias", "b.bias", "c.bias"]
    assert list(averageable(net, False)) == ["a.weight", "a.bias", "b.bias", "c.weight", "c.bias"]


def test_weights_by_position() -> None:
    assert position_weights(4) == [0.25] * 4
    assert position_weights(3, "linear") == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert position_weights(3, "exponential") == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    assert sum(position_weights(2000, "exponential")) == pytest.approx(1.0)
    states = [[torch.full((2,), float(i), dtype=torch.bfloat16)] for i in range(3)]
    torch.testing.assert_close(weighted_mean(states, [0.25, 0.25, 0.5]), [torch.full((2,), 1.25)])
    (zeros,) = weighted_mean([[torch.tensor([-0.0, 0.0])]] * 2, [0.5, 0.5])
    assert zeros.signbit().tolist() == [True, False]


def test_widths_and_exponents_are_those_of_the_paper() -> None:
    assert [round(gamma_of(s), 2) for s in (0.05, 0.10, 0.15, 0.20)] == [16.97, 6.94, 3.56, 1.83]
    for sigma_rel in (0.01, 0.05, 0.25, 0.28):
        g = gamma_of(sigma_rel)
        assert (g + 1) ** 0.5 / ((g + 2) * (g + 3) ** 0.5) == pytest.approx(sigma_rel, rel=1e-9)
    for bad in (0, -0.1, 0.29):
        with pytest.raises(ConfigurationError, match=r"sigma_rel must be above 0 and below 0.2886751346, got"):
            gamma_of(bad)


WIDTHS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.10, 0.12, 0.15, 0.18, 0.20, 0.22, 0.25, 0.27, 0.28)


def solved_as_the_paper_does(steps: np.ndarray, widths: np.ndarray, end: int, width: float) -> np.ndarray:
    """Karras et al. (2024), appendix C: the float64 solution of A x = b, of inner products of profiles."""
    t, g = steps / end, np.array([gamma_of(w) for w in widths])

    def dot(t_a: Any, g_a: Any, t_b: Any, g_b: Any) -> Any:
        ratio = t_a / t_b
        power = np.where(t_a < t_b, g_b, -g_a)
        biggest = np.maximum(t_a, t_b)
        return (g_a + 1) * (g_b + 1) * ratio**power / ((g_a + g_b + 1) * biggest)

    matrix = dot(t[:, None], g[:, None], t[None], g[None])
    return np.linalg.solve(matrix, dot(t, g, 1.0, gamma_of(width)))


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("tracked", "every", "start"),
    [((0.05, 0.10), 100, 0.0), ((0.05, 0.10), 100, 45.0), ((0.05, 0.10), 500, 0.0), ((0.05,), 100, 0.0)],
)
def test_other_widths_are_rebuilt_at_least_as_well_as_by_the_papers_solution(
    tracked: tuple[float, ...], every: int, start: float
) -> None:
    """A random walk of 2,000 steps from ``start``: other widths come out as if they had been tracked."""
    walk = np.random.default_rng(0).standard_normal((2000, 256)).cumsum(0) + start
    averages = {width: np.zeros(256) for width in WIDTHS}
    steps, widths, snapshots = [], [], []
    for step, weights in enumerate(walk, 1):
        for width in WIDTHS:
            averages[width] += (1 - power_decay(step, gamma_of(width))) * (weights - averages[width])
        if step % every == 0:
            steps += [step] * len(tracked)
            widths += tracked
            snapshots += [averages[width].copy() for width in tracked]
    for target in WIDTHS:
        ours = np.array(synthesis_weights(steps, widths, 2000, target))
        paper = solved_as_the_paper_does(np.array(steps), np.array(widths), 2000, target)
        assert ours.sum() == pytest.approx(1.0)  # weights that stand still come out as they are
        found, reference = (np.linalg.norm(c @ np.array(snapshots) - averages[target]) for c in (ours, paper))
        scale = np.linalg.norm(walk[-1] - averages[target])
        assert found <= 1.15 * reference + 1e-6 * scale, (target, found / scale, reference / scale)
        if every == 100 and len(tracked) == 2 and target >= 0.05:
            assert found < 0.01 * scale, (target, found / scale)


def test_the_mean_of_one_is_itself() -> None:
    (mean,) = weighted_mean([[torch.arange(3)]], [1.0])
    assert torch.equal(mean, torch.arange(3.0))


def test_averages_of_two_devices_are_copied_where_they_are() -> None:
    here, there = torch.zeros(3), torch.zeros(3, device="meta")
    update_([here, there], [torch.ones(3), torch.ones(3, device="meta")], 0.0)
    assert here.tolist() == [1, 1, 1]


def test_packed_weights_are_no_part_of_a_fingerprint() -> None:
    packed, trained = torch.arange(4, dtype=torch.uint8), torch.tensor([3.0, 4.0])
    before = fingerprint([packed, trained])
    assert before == [5.0]
    check_unchanged("EMA", before, [packed, trained])
    with pytest.raises(ConfigurationError, match="EMA evaluates other weights"):
        check_unchanged("EMA", before, [packed, trained + 1])
