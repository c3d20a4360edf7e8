"""NoBiasBeforeNorm: same outputs, gradients and steps in training and evaluation; biases with an effect stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import ConfigurationError, NoBiasBeforeNorm
from lit_efficient.application import apply
from lit_efficient.application.ledger import reports_of
from lit_efficient.testing import Run
from tests.callbacks.test_initialise import Residual
from tests.contract.row import Row


def bias_is_gone(run: Run) -> None:
    """The bias is not a parameter. It is zero before the run, in the checkpoint and after the run."""
    name = "net.kernels.0.bias"
    assert name not in dict(run.module.named_parameters())
    assert not run.start[name].any()
    assert not run.steps[-1].weights[name].any()
    assert not run.checkpoint["state_dict"].get(name, torch.zeros(1)).any()  # beside adapters there is no base


ROW = Row(NoBiasBeforeNorm, bias_is_gone, instance_norm=True)


class Shared(nn.Module):
    """Network in which the convolution's output is used not only by the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return x + self.norm(x)


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...], set[str]]]:
    """Return networks, shapes of their inputs, and the layers whose bias has no effect."""
    return {
        "residual": (nn.Sequential(nn.Conv2d(3, 4, 1), Residual()), (5, 3, 6, 6), {"1.conv1", "1.conv2"}),
        "linear": (
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4)),
            (8, 3),
            {"0"},
        ),
        "instance": (
            nn.Sequential(
                nn.ConvTranspose1d(3, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.Conv1d(4, 4, 1), nn.GroupNorm(4, 4)
            ),
            (2, 3, 7),
            {"0", "2"},
        ),
        "tracked": (
            nn.Sequential(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4, track_running_stats=True)), (2, 3, 7), {"0"}
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", [*networks()])
def test_outputs_and_steps_are_equal(kind: str) -> None:
    torch.manual_seed(0)
    network, shape, wanted = networks()[kind]
    network.double()
    for _ in range(3):  # statistics that are not as they begin
        network(torch.randn(shape).double())
    twin = copy.deepcopy(network)
    apply(twin, [NoBiasBeforeNorm()])
    assert set(reports_of(twin)["NoBiasBeforeNorm"].modules) == wanted
    assert {n for n, _ in network.named_parameters()} - {n for n, _ in twin.named_parameters()} == {
        f"{name}.bias" for name in wanted
    }
    assert network.state_dict().keys() == twin.state_dict().keys()
    x = torch.randn(shape).double()
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (network, twin)]
    for _ in range(3):
        outputs = [one.eval()(x) for one in (network, twin)] + [one.train()(x) for one in (network, twin)]
        torch.testing.assert_close(outputs[0], outputs[1])
        torch.testing.assert_close(outputs[2], outputs[3])
        for optimizer, output in zip(optimizers, outputs[2:], strict=True):
            optimizer.zero_grad()
            output.square().sin().sum().backward()
            optimizer.step()
    later = copy.deepcopy(twin)
    later.load_state_dict(network.state_dict())  # weights with biases are read
    torch.testing.assert_close(later.eval()(x), network.eval()(x))
    network.load_state_dict(twin.state_dict())  # and zeros in their place
    torch.testing.assert_close(network.eval()(x), twin.eval()(x))


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)),
        nn.Sequential(nn.Linear(3, 3), nn.RMSNorm(3)),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)),
        nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)),
        nn.Sequential(nn.Linear(7, 7), nn.InstanceNorm1d(7)),
        Shared(),
    ],
    ids=["layer norm", "rms norm", "groups", "activation", "no bias", "linear before instance norm", "used twice"],
)
def test_what_does_not_cancel_stays(network: Any) -> None:
    with pytest.raises(
        ConfigurationError, match="has no convolution or linear layer with a bias whose output goes only into"
    ):
        apply(network, [NoBiasBeforeNorm()])


def test_a_batch_norm_over_another_dimension_is_refused_when_it_is_met() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    apply(network, [NoBiasBeforeNorm()])
    network(torch.randn(3, 4))
    with pytest.raises(
        ConfigurationError, match=r"a batch norm after a linear layer got an input of the shape \[3, 4, 4\]"
    ):
        network(torch.randn(3, 4, 4))
