"""SNRWeighting on modules that know nothing of it: they call add_noise and F.mse_loss, and return what they like."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from diffusers import DDPMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from torch import nn
from torch.nn import functional as F

from lit_efficient import ConfigurationError, SNRWeighting, snr_weight
from lit_efficient.losses.mse_adapter import weigh_mse_loss
from tests.support import Net, data, trainer, weights


class Unchanged(L.LightningModule):
    """What a training script of diffusers does, as a module."""

    def __init__(self, prediction_type: str = "epsilon") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Net()
        self.scheduler = DDPMScheduler(1000, prediction_type=prediction_type)

    def noised(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Timesteps, the network's output and its target."""
        noise = torch.randn_like(x)
        timesteps = torch.randint(0, 1000, (len(x),))
        output = self.net(self.scheduler.add_noise(x, noise, timesteps))
        kind = self.scheduler.config.prediction_type
        return timesteps, output, noise if kind == "epsilon" else self.scheduler.get_velocity(x, noise, timesteps)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _, output, target = self.noised(batch[0])
        return F.mse_loss(output, target)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Protocol(Unchanged):
    """The same module after somebody has taught it the protocol."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        timesteps, output, target = self.noised(batch[0])
        sample_loss = (output - target).square().mean(1)
        log_snr = torch.logit(self.scheduler.alphas_cumprod[timesteps].double()).float()
        return {"loss": sample_loss.mean(), "sample_loss": sample_loss, "log_snr": log_snr}


def trained(module: L.LightningModule, *callbacks: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    trainer([*callbacks]).fit(module, data(32))
    return weights(module)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_trains_as_the_protocol_does(prediction_type: str) -> None:
    adapted = trained(Unchanged(prediction_type), SNRWeighting("min_snr", adapter="mse_loss"))
    prediction = {"epsilon": "eps", "v_prediction": "v"}[prediction_type]
    taught = trained(Protocol(prediction_type), SNRWeighting("min_snr", prediction=prediction))
    for name, tensor in taught.items():
        torch.testing.assert_close(adapted[name], tensor, rtol=1e-6, atol=1e-7)
    plain = trained(Unchanged(prediction_type))
    assert not torch.allclose(adapted["net.head.weight"], plain["net.head.weight"], atol=1e-4)


def test_a_neutral_rule_is_plain_lightning_and_the_scheduler_is_itself_again() -> None:
    module = Unchanged()
    adapted = trained(module, SNRWeighting(gamma=1e30, adapter="mse_loss"))
    for name, tensor in trained(Unchanged()).items():
        torch.testing.assert_close(adapted[name], tensor, rtol=1e-5, atol=1e-6)
    assert "add_noise" not in vars(module.scheduler)


def one_step(step: Any, scheduler: Any, rule: str, prediction: str) -> Any:
    torch.manual_seed(0)
    with weigh_mse_loss(scheduler, lambda levels: snr_weight(levels, rule, prediction=prediction)):
        return step()


@pytest.mark.parametrize("shape", [(4,), (4, 2, 3)], ids=["numbers", "images"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_reduction_is_weighted_and_what_is_added_is_left_alone(reduction: str, shape: tuple[int, ...]) -> None:
    scheduler, x, noise = DDPMScheduler(1000), torch.randn(shape), torch.randn(shape)
    timesteps = torch.tensor([0, 10, 500, 999])

    def step() -> torch.Tensor:
        noisy = scheduler.add_noise(x, noise, timesteps)
        return 0.5 * F.mse_loss(noisy, noise, reduction=reduction) + 3.0

    loss = one_step(step, scheduler, "min_snr", "eps")
    weight = (
        snr_weight(torch.logit(scheduler.alphas_cumprod[timesteps].double())).float().view(4, *[1] * (len(shape) - 1))
    )
    errors = weight * (scheduler.add_noise(x, noise, timesteps) - noise).square()
    expected = {"mean": errors.mean(), "sum": errors.sum(), "none": errors}[reduction]
    torch.testing.assert_close(loss, 0.5 * expected + 3.0)


@pytest.mark.parametrize("kind", [EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler])
def test_noise_levels_are_asked_of_any_scheduler(kind: Any) -> None:
    scheduler = kind(num_train_timesteps=100)
    steps = scheduler.timesteps[[10, 50, 90]]
    seen: list[torch.Tensor] = []

    def weigh(levels: torch.Tensor) -> torch.Tensor:
        seen.append(levels)
        return torch.ones_like(levels)

    x = torch.ones(3, 2)
    with weigh_mse_loss(scheduler, weigh):
        if kind is EulerDiscreteScheduler:
            nn.MSELoss()(scheduler.add_noise(x, noise=x, timesteps=steps), x)
        else:
            nn.MSELoss()(scheduler.scale_noise(x, steps, x), x)
    sigma = scheduler.sigmas[[10, 50, 90]].double()
    alpha = torch.ones(3) if kind is EulerDiscreteScheduler else 1 - sigma
    torch.testing.assert_close(seen[0], 2 * (alpha / sigma).log(), rtol=1e-9, atol=1e-9)


def test_flow_matching_is_told_by_its_scheduler() -> None:
    module = Unchanged()
    module.scheduler = FlowMatchEulerDiscreteScheduler()
    technique = SNRWeighting("truncated", adapter="mse_loss")
    assert technique.describe(module).summary == "truncated for a network that predicts flow, in the call of F.mse_loss"
    module.scheduler = DDPMScheduler(prediction_type="v_prediction")
    assert (
        "min_snr with gamma 5 for a network that predicts v"
        in SNRWeighting(adapter="mse_loss").describe(module).summary
    )


class Silent(Unchanged):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _, output, target = self.noised(batch[0])
        return (output - target).square().mean()


class Twice(Unchanged):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _, output, target = self.noised(batch[0])
        return F.mse_loss(output, target) + F.mse_loss(output, batch[0])


class ByHand(Unchanged):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.net(batch[0] + torch.randn_like(batch[0])), batch[0])


class Bare(Unchanged):
    def __init__(self) -> None:
        super().__init__()
        del self.scheduler


class Double(Unchanged):
    def __init__(self) -> None:
        super().__init__()
        self.net.second = DDPMScheduler()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Silent, "SNRWeighting: the step did not call F.mse_loss"),
        (Twice, "SNRWeighting: F.mse_loss was called a second time"),
        (ByHand, r"SNRWeighting: DDPMScheduler.add_noise was called 0 times before F.mse_loss, not once"),
        (Bare, "Bare must hold exactly one object with add_noise or scale_noise .* it holds none"),
        (Double, "it holds scheduler, net.second. Name one of them by scheduler"),
    ],
)
def test_what_it_cannot_hear_is_an_error(kind: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trained(kind(), SNRWeighting(adapter="mse_loss"))


def test_of_several_schedulers_the_named_one_is_heard() -> None:
    alone = trained(Unchanged(), SNRWeighting(adapter="mse_loss"))
    named = trained(Double(), SNRWeighting(adapter="mse_loss", scheduler="scheduler"))
    for name, tensor in alone.items():
        assert torch.equal(named[name], tensor)
    with pytest.raises(ConfigurationError, match=r"add_noise was called 0 times"):
        trained(Double(), SNRWeighting(adapter="mse_loss", scheduler="second"))
    with pytest.raises(
        ConfigurationError, match=r"scheduler must be the end of exactly one .*: scheduler, net.second, got 'third'"
    ):
        trained(Double(), SNRWeighting(adapter="mse_loss", scheduler="third"))
    with pytest.raises(ConfigurationError, match="scheduler must be None without adapter='mse_loss', got 'second'"):
        SNRWeighting(scheduler="second")


def test_an_error_of_the_step_passes_and_leaves_nothing_behind() -> None:
    scheduler = DDPMScheduler()
    with pytest.raises(ZeroDivisionError):
        one_step(lambda: 1 / 0, scheduler, "min_snr", "eps")
    assert "add_noise" not in vars(scheduler)
    x = torch.ones(2, 3)
    assert F.mse_loss(x, 3 * x) == 4


def test_rows_must_be_those_that_noise_was_added_to() -> None:
    scheduler, x = DDPMScheduler(), torch.ones(2, 3)

    def step() -> torch.Tensor:
        return F.mse_loss(scheduler.add_noise(x, x, torch.tensor([1, 2])).repeat(2, 1), torch.ones(4, 3))

    with pytest.raises(ConfigurationError, match="got 4 samples, but noise was added to 2"):
        one_step(step, scheduler, "min_snr", "eps")
