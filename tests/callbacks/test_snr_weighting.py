"""SNRWeighting finds noise levels and prediction wherever a module keeps them, and weighs the training loss."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lit_efficient import ConfigurationError, SNRWeighting, snr_weight
from tests.support import Toy, data, trainer


def module_with(**attributes: object) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_the_training_loss_is_the_weighted_mean() -> None:
    seen: list[tuple[float, float]] = []

    class Watch(Toy):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            with torch.no_grad():
                output = Toy.training_step(self, self.batch, 0)
            weight = snr_weight(output["log_snr"], "min_snr", 2.0, "eps")
            seen.append((loss.item(), float((weight * output["sample_loss"]).mean())))

        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            self.batch = batch

        def log(self, *_: object, **__: object) -> None:
            """The toy logs in its training step, which is called once more above."""

    trainer([SNRWeighting(gamma=2.0)]).fit(Watch(), data(), data())
    assert len(seen) == 4
    assert all(loss == pytest.approx(expected, rel=1e-6) for loss, expected in seen)


def test_timesteps_are_looked_up_in_the_schedule() -> None:
    alphas_cumprod = torch.tensor([0.99, 0.5, 0.01])
    output = {"sample_loss": torch.ones(2), "timesteps": torch.tensor([2, 0])}
    expected = snr_weight(torch.logit(alphas_cumprod[[2, 0]]), "min_snr", 5.0, "v")
    for module in (
        module_with(prediction="v", alphas_cumprod=alphas_cumprod),
        module_with(
            noise_scheduler=SimpleNamespace(
                alphas_cumprod=alphas_cumprod, config=SimpleNamespace(prediction_type="v_prediction")
            )
        ),
    ):
        torch.testing.assert_close(SNRWeighting().sample_weights(output, module), expected)


def test_edm_is_weighed_with_the_deviation_of_its_data() -> None:
    output = {"sample_loss": torch.ones(2), "log_snr": torch.tensor([0.0, 2.0])}
    module = module_with(prediction="edm", process=SimpleNamespace(sigma_data=0.5))
    snr = output["log_snr"].exp()
    torch.testing.assert_close(SNRWeighting().sample_weights(output, module), snr.clamp(max=5) / (snr + 4))


def test_what_is_missing_is_named() -> None:
    output = {"sample_loss": torch.ones(2), "log_snr": torch.zeros(2)}
    with pytest.raises(ConfigurationError, match="Module has no attribute `prediction`"):
        SNRWeighting().sample_weights(output, torch.nn.Module())
    with pytest.raises(ConfigurationError, match=r"Module\.prediction_type is 'velocity'\. Allowed: eps, v, x0, flow"):
        SNRWeighting().sample_weights(output, module_with(prediction_type="velocity"))
    with pytest.raises(ConfigurationError, match=r"must return log_snr \[B\], or timesteps \[B\] with alphas_cumprod"):
        SNRWeighting(prediction="eps").sample_weights({"timesteps": torch.ones(2)}, torch.nn.Module())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "max_snr"}, "SNRWeighting: rule must be one of min_snr, .*, cosmap, got 'max_snr'"),
        ({"gamma": -1}, "SNRWeighting: gamma must be above 0 or null, got -1"),
        ({"rule": "truncated", "gamma": 5.0}, "gamma must be unset .* for rule 'truncated', got 5.0"),
        ({"prediction": "noise"}, "SNRWeighting: prediction must be one of auto, eps, v, x0, flow, edm, got 'noise'"),
        ({"zero_snr": 0}, "SNRWeighting: zero_snr must be one of unit, error, got 0"),
        ({"adapter": "l1_loss"}, "SNRWeighting: adapter must be one of none, mse_loss, got 'l1_loss'"),
    ],
)
def test_arguments_are_checked_when_it_is_built(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SNRWeighting(**arguments)
