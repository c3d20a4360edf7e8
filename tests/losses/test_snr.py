"""SNR weights: one weight for x0, converted; the same gradients whatever the network predicts."""

from __future__ import annotations

import math

import pytest
import torch

from lit_efficient import ConfigurationError, snr_weight
from lit_efficient.losses.snr import PREDICTIONS, RULES

SIGMA_DATA = 0.5

# The weight of x0 as in the papers, without logarithms.
OF_X0 = {
    "min_snr": lambda snr: snr.clamp(max=5),
    "soft_min_snr": lambda snr: 1 / (1 / snr + 1 / 4),
    "p2": lambda snr: snr / (1 + snr),
    "debiased": lambda snr: snr.sqrt(),
    "truncated": lambda snr: snr.clamp(min=1),
    "sigma_sqrt": lambda snr: (1 + snr.sqrt()) ** 4,
    "cosmap": lambda snr: 2 / math.pi * (1 + snr.sqrt()) ** 4 / (1 + snr),
}


def process(log_snr: torch.Tensor, prediction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha and sigma at a log-SNR: a straight line for flow, alpha 1 for edm, the unit circle for the others."""
    ratio = (log_snr / 2).exp()  # alpha / sigma
    if prediction == "edm":
        return torch.ones_like(ratio), 1 / ratio
    if prediction == "flow":
        return ratio / (1 + ratio), 1 / (1 + ratio)
    return ratio / (1 + ratio**2).sqrt(), 1 / (1 + ratio**2).sqrt()


def target_of(
    clean: torch.Tensor, x: torch.Tensor, alpha: torch.Tensor, sigma: torch.Tensor, prediction: str
) -> torch.Tensor:
    """What a network that guesses ``clean`` from the noisy ``x`` says in another target."""
    eps = (x - alpha * clean) / sigma
    edm = (sigma * clean / SIGMA_DATA - SIGMA_DATA * eps) / (sigma**2 + SIGMA_DATA**2).sqrt()
    return {"x0": clean, "eps": eps, "v": alpha * eps - sigma * clean, "flow": eps - clean, "edm": edm}[prediction]


@pytest.mark.parametrize("rule", RULES)
def test_training_gradients_are_the_same_for_every_target(rule: str) -> None:
    """One network guesses x0; its guess is converted to each target, and the error is measured and weighed there."""
    generator = torch.Generator().manual_seed(0)
    network = torch.nn.Linear(8, 8, dtype=torch.float64)
    with torch.no_grad():
        network.weight.copy_(torch.randn(8, 8, generator=generator, dtype=torch.float64))
    x0, noise = (torch.randn(64, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    log_snr = torch.linspace(-12, 12, 64, dtype=torch.float64)
    gradients = {}
    for prediction in PREDICTIONS:
        alpha, sigma = (part[:, None] for part in process(log_snr, prediction))
        scale = (alpha**2 + sigma**2).sqrt()  # the network sees one input, whatever the process scales it by
        x = alpha * x0 + sigma * noise
        guess, truth = (target_of(clean, x, alpha, sigma, prediction) for clean in (network(x / scale), x0))
        sample_loss = (guess - truth).square().mean(1)
        loss = (snr_weight(log_snr, rule, prediction=prediction, sigma_data=SIGMA_DATA) * sample_loss).mean()
        gradients[prediction] = torch.autograd.grad(loss, network.weight)[0]
    for prediction in PREDICTIONS:
        torch.testing.assert_close(gradients[prediction], gradients["x0"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_weights_of_x0_are_those_of_the_papers(rule: str) -> None:
    snr = torch.logspace(-8, 8, 100, dtype=torch.float64)
    torch.testing.assert_close(snr_weight(snr.log(), rule, prediction="x0"), OF_X0[rule](snr), rtol=1e-12, atol=0)


def test_p2_and_debiased_are_simple_powers_for_eps() -> None:
    snr = torch.logspace(-6, 6, 100, dtype=torch.float64)
    torch.testing.assert_close(snr_weight(snr.log(), "p2", 0.5), (1 + snr) ** -0.5, rtol=1e-12, atol=0)
    torch.testing.assert_close(snr_weight(snr.log(), "debiased"), snr**-0.5, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rule", ["sigma_sqrt", "cosmap"])
def test_the_weights_of_sd3_are_diffusers(rule: str) -> None:
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    sigmas = torch.linspace(0.001, 0.999, 500, dtype=torch.float64)
    weights = snr_weight(2 * ((1 - sigmas) / sigmas).log(), rule, prediction="flow")
    torch.testing.assert_close(weights, compute_loss_weighting_for_sd3(rule, sigmas).double(), rtol=1e-6, atol=0)


def test_equals_the_recipe_of_diffusers() -> None:
    """``compute_snr``, and around it what diffusers' training scripts document for eps and v."""
    from diffusers import DDPMScheduler
    from diffusers.training_utils import compute_snr

    timesteps = torch.arange(1000)
    for schedule in ("linear", "scaled_linear", "squaredcos_cap_v2"):
        scheduler = DDPMScheduler(1000, beta_schedule=schedule)
        snr = compute_snr(scheduler, timesteps)
        capped = torch.stack([snr, 5.0 * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
        log_snr = torch.logit(scheduler.alphas_cumprod.double())
        for prediction, expected in (("eps", capped / snr), ("v", capped / (snr + 1))):
            ours = snr_weight(log_snr, "min_snr", 5.0, prediction).float()
            torch.testing.assert_close(ours, expected, rtol=2e-6, atol=0)


def test_flow_is_the_weight_of_the_straight_line() -> None:
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    expected = torch.minimum((1 - t) ** 2, 5 * t**2)
    ours = snr_weight(2 * torch.log((1 - t) / t), gamma=5.0, prediction="flow")
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_numbers_at_the_ends_and_in_low_precision(rule: str, prediction: str) -> None:
    ends = torch.tensor([-math.inf, -60.0, 0.0, 60.0, math.inf])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = snr_weight(ends.to(dtype), rule, prediction=prediction)
        assert weight.dtype == torch.float32
        assert not weight.isnan().any()
        assert torch.isfinite(weight[: 3 if rule == "sigma_sqrt" else 4]).all()
        unbounded = rule == "sigma_sqrt" or (prediction == "x0" and rule in ("debiased", "truncated", "cosmap"))
        assert bool(torch.isinf(weight[4]) | (weight[4] > 1e30)) == unbounded


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_zero_snr_has_the_weight_one_or_is_refused(rule: str, prediction: str) -> None:
    log_snr = torch.tensor([0.0, -math.inf])
    assert float(snr_weight(log_snr, rule, prediction=prediction, zero_snr="unit")[1]) == 1.0
    with pytest.raises(ConfigurationError, match=r"zero_snr='error'.*samples at zero SNR.*use zero_snr='unit'"):
        snr_weight(log_snr, rule, prediction=prediction, zero_snr="error")
    near = torch.tensor([-20.0])
    assert torch.equal(
        *(snr_weight(near, rule, prediction=prediction, zero_snr=policy) for policy in ("unit", "error"))
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "max_snr"}, "rule must be one of min_snr, soft_min_snr, p2, .*, cosmap, got 'max_snr'"),
        ({"gamma": 0.0}, "gamma must be above 0 or null, got 0.0"),
        ({"gamma": math.nan}, "gamma must be above 0 or null, got nan"),
        ({"rule": "debiased", "gamma": 5.0}, "gamma must be unset .null in YAML. for rule 'debiased', got 5.0"),
        ({"prediction": "noise"}, "prediction must be one of eps, v, x0, flow, edm, got 'noise'"),
        ({"zero_snr": "skip"}, "zero_snr must be one of unit, error, got 'skip'"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"snr_weight: {message}"):
        snr_weight(torch.zeros(1), **arguments)
