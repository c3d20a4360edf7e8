"""The blocks of a network are found by what is declared, by lists, and outermost first."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from lit_efficient import ConfigurationError, LoRA, mix_in
from lit_efficient.application import apply
from lit_efficient.mechanisms.blocks.finding import find_blocks
from tests.support import Block, Net


def test_find_blocks_takes_the_outermost_repeated_blocks() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Block(4), Block(4)])

    nested = nn.Module()
    nested.layers = nn.ModuleList([Outer(), Outer()])
    assert [name for name, _ in find_blocks(nested, who="T")] == ["layers.0", "layers.1"]
    assert [name for name, _ in find_blocks(Net(), who="T")] == [f"blocks.{i}" for i in range(4)]
    assert [name for name, _ in find_blocks(Net(), r"blocks\.1", who="T")] == ["blocks.1"]
    shared = Net()
    shared.also = nn.Module()
    shared.also.blocks = shared.blocks
    assert [name for name, _ in find_blocks(shared, who="T")] == [f"blocks.{i}" for i in range(4)]
    with pytest.raises(ConfigurationError, match="T: found no repeated blocks in Sequential"):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), who="T")


def test_find_blocks_sees_through_a_mix_in_on_one_of_them() -> None:
    class Mixin(nn.Module):
        pass

    net = Net()
    mix_in(net.blocks[1], Mixin)
    assert [name for name, _ in find_blocks(net, who="test")] == [f"blocks.{i}" for i in range(4)]


def test_find_blocks_knows_what_libraries_declare() -> None:
    class GradientCheckpointingLayer(nn.Module):
        """Stands for transformers' class of this name."""

    class Layer(GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Block(4), Block(4)])

    class Diffuser(nn.Module):
        _repeated_blocks = ("Block",)

        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = Block(4), Block(4)

    wrapper = nn.Module()
    wrapper.encoder = nn.ModuleList([Layer(), Layer()])
    assert [name for name, _ in find_blocks(wrapper, who="T")] == ["encoder.0", "encoder.1"]
    assert [name for name, _ in find_blocks(Diffuser(), who="T")] == ["down", "up"]


class Switched(nn.Module):
    """Adds to its input, or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.adds = nn.Sequential(nn.Linear(4, 4)), True

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) if self.adds else self.layer(x)


def test_a_later_search_sees_what_has_changed() -> None:
    """What was found of a network is kept for the next technique that asks, as long as it is true."""
    net = nn.Module()
    net.one, net.other = Switched(), Switched()
    for _ in range(2):
        assert [name for name, _ in find_blocks(net, who="T")] == ["one", "other"]
    apply(net, [LoRA(targets=["0"])])
    assert [name for name, _ in find_blocks(net, who="T")] == ["one", "other"]
    net.one.adds = net.other.adds = False
    with pytest.raises(ConfigurationError, match="found no repeated blocks"):
        find_blocks(net, who="T")
