"""Min-SNR weights: one weight for x0, converted; the same gradients whatever the network predicts."""

from __future__ import annotations

import math

import pytest
import torch

from lit_efficient import ConfigurationError
from lit_efficient.losses.snr import PREDICTIONS, min_snr_weight


def process(log_snr: torch.Tensor, prediction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha and sigma at a log-SNR: a straight line for flow, the unit circle for the others."""
    ratio = (log_snr / 2).exp()  # alpha / sigma
    if prediction == "flow":
        return ratio / (1 + ratio), 1 / (1 + ratio)
    return ratio / (1 + ratio**2).sqrt(), 1 / (1 + ratio**2).sqrt()


def error_in(
    prediction: str, x0: torch.Tensor, guess: torch.Tensor, x: torch.Tensor, log_snr: torch.Tensor
) -> torch.Tensor:
    """Squared error of the target that corresponds to the guess of x0, at the noisy sample x."""
    alpha, sigma = process(log_snr, prediction)

    def target(clean: torch.Tensor) -> torch.Tensor:
        eps = (x - alpha * clean) / sigma
        return {"x0": clean, "eps": eps, "v": alpha * eps - sigma * clean, "flow": eps - clean}[prediction]

    return (target(guess) - target(x0)).square()


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_gradients_are_the_same_for_every_target(prediction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x0, noise, guess = (torch.randn(64, dtype=torch.float64, generator=generator) for _ in range(3))
    log_snr = torch.linspace(-12, 12, 64, dtype=torch.float64)
    alpha, sigma = process(log_snr, prediction)
    x = alpha * x0 + sigma * noise
    guess.requires_grad_()
    loss = (min_snr_weight(log_snr, 5.0, prediction) * error_in(prediction, x0, guess, x, log_snr)).sum()
    expected = 2 * log_snr.exp().clamp(max=5) * (guess - x0).detach()
    torch.testing.assert_close(torch.autograd.grad(loss, guess)[0], expected, rtol=1e-6, atol=1e-12)


def test_equals_the_recipe_of_the_paper() -> None:
    """Equation by equation with the SNR itself, as diffusers' training scripts write it."""
    alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    snr = alphas_cumprod / (1 - alphas_cumprod)
    capped = torch.stack([snr, 5 * torch.ones_like(snr)]).min(0).values
    for prediction, expected in (("eps", capped / snr), ("v", capped / (snr + 1)), ("x0", capped)):
        torch.testing.assert_close(min_snr_weight(snr.log(), 5.0, prediction), expected, rtol=1e-12, atol=0)
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    expected = torch.minimum((1 - t) ** 2, 5 * t**2)
    torch.testing.assert_close(min_snr_weight(2 * torch.log((1 - t) / t), 5.0, "flow"), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_finite_at_both_ends_and_in_low_precision(prediction: str) -> None:
    ends = torch.tensor([-math.inf, -200.0, 0.0, 200.0, math.inf])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = min_snr_weight(ends.to(dtype), 5.0, prediction)
        assert weight.dtype == torch.float32
        assert torch.isfinite(weight).all()
    assert float(weight[0]) == {"eps": 1.0, "v": 1.0, "x0": 0.0, "flow": 0.0}[prediction]


def test_zero_snr_can_be_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"zero_snr='error'.*zero SNR"):
        min_snr_weight(torch.tensor([0.0, -math.inf]), zero_snr="error")
    assert float(min_snr_weight(torch.tensor([0.0]), zero_snr="error")) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": 0.0}, "gamma must be above 0, got 0.0"),
        ({"gamma": math.nan}, "gamma must be above 0, got nan"),
        ({"prediction": "noise"}, "prediction must be one of eps, v, x0, flow; got 'noise'"),
        ({"zero_snr": "skip"}, "zero_snr must be unit or error, got 'skip'"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        min_snr_weight(torch.zeros(1), **arguments)
