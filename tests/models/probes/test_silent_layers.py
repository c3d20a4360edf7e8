"""What is watched of a layer whose adapter waits changes no number, and nothing that stays."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from lit_efficient import ConfigurationError
from lit_efficient.models.probes.silent_layers import SilentLayers, unwatch
from tests.contract.test_trains import WIDTH, Fused


def watched() -> tuple[Fused, SilentLayers]:
    net = Fused().requires_grad_(False)
    adapter = nn.Parameter(torch.zeros(1))
    return net, SilentLayers("T", {"proj": [adapter]}, {"proj": net.proj})


def test_a_weight_is_heard_where_the_loss_depends_on_it_and_nowhere_else() -> None:
    net, layers = watched()
    x = torch.randn(2, WIDTH, requires_grad=True)
    with layers.observing():
        assert net.proj.weight.requires_grad
        assert torch.equal(net.proj.weight, net.proj.state_dict()["weight"])
        net.proj.weight.norm()  # which no loss has a part of
        net.proj(x).sum().backward()  # called, as with its adapter switched off
    layers.check()
    with layers.observing():
        loss = net(x).sum()
    loss.backward()
    with pytest.raises(ConfigurationError, match="T: 1 adapters cannot learn, first that of 'proj'"):
        layers.check()
    assert net.proj.weight.grad is None
    unwatch(net)
    assert type(net.proj) is nn.Linear
    assert net.proj.weight is dict(net.proj.named_parameters())["weight"]


def test_a_weight_that_stands_in_for_now_is_the_one_that_is_read() -> None:
    net, layers = watched()
    x = torch.randn(2, WIDTH)
    other = {"proj.weight": nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)}
    with layers.observing():
        assert torch.equal(functional_call(net, other, (x,)), x)
