"""What a module's code does with its input, known without a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lit_efficient.internals.torch_fx import adds_to_input, read_forward, runs_in_chain
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from tests.support import Block


class Moody(nn.Module):
    """Counts its calls, draws and asks before it adds to its input."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.linear, self.times, self.calls = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), times, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == 4
        self.calls += 1
        self.count += 1
        noise = torch.rand(())
        y = self.linear(x) * noise
        while x.sum() > self.times:
            y = y / 2
        return x + y if self.times else y


class Casts(Block):
    """Asks for autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return super().forward(x)


def test_looking_changes_nothing():
    moody, state = Moody(), torch.get_rng_state()
    adds_to_input(moody)
    assert (moody.calls, moody.count.item()) == (0, 0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("module", "own", "whole"),
    [
        (Block(4), True, True),
        (Casts(4), True, True),
        (GPT(GPTConfig(vocab_size=4, dim=8, depth=1, num_heads=2)).blocks[0], True, True),
        (nn.Sequential(Block(4), Block(4)), False, True),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), False, False),
        (nn.Sequential(Block(4), nn.Linear(4, 4)), False, False),
        (nn.TransformerEncoderLayer(4, 2, batch_first=True), True, True),
        (nn.LSTM(4, 4), None, None),
    ],
)
def test_blocks_add_to_their_input_and_stages_do_only_as_wholes(module, own, whole):
    assert adds_to_input(module) is own
    assert adds_to_input(module, whole=True) is whole


def test_experts_run_beside_each_other_and_blocks_one_after_the_other():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Block(4), Block(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[1](x) + self.parts[0](x)

    experts = Experts()
    assert runs_in_chain(experts, list(experts.parts)) is False
    assert read_forward(experts).calls == ("parts.1", "parts.0")
    stage = nn.Sequential(Block(4), Block(4))
    assert runs_in_chain(stage, list(stage)) is True


class _Watching(nn.Module):
    """A norm that counts by hand, as timm's do, in a part of a block that keeps what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.calls = 0
        self.outputs: list[Tensor] = []
        self.last: dict[str, list[Tensor]] = {"outputs": []}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.batches.add_(1)
        y = self.layer(x)
        self.outputs.append(y)
        self.last["outputs"].append(y)
        return x + y


@pytest.mark.parametrize("look", [lambda net: adds_to_input(net, whole=True), lambda net: runs_in_chain(net, [])])
def test_looking_leaves_parts_as_they_are(look: Callable[[nn.Module], object]) -> None:
    net = nn.Sequential(nn.Sequential(_Watching()), _Watching())
    look(net)
    look(net[1])
    for part in (net[0][0], net[1]):
        assert (int(part.batches), part.calls, part.outputs, part.last) == (0, 0, [], {"outputs": []})
