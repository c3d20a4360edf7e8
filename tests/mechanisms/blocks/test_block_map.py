"""The blocks of a network are found by what is declared, by lists, and outermost first."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient import (
    ActivationCheckpointing,
    ConfigurationError,
    GradualUnfreezing,
    LoRA,
    Report,
    StochasticDepth,
    Technique,
    mix_in,
)
from lit_efficient.application import apply
from lit_efficient.application.ledger import reports_of
from lit_efficient.mechanisms.blocks.block_map import BlockMap, find_blocks
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


class Stack(nn.Module):
    """A small network: stem, three blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(4) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WithCopy(LightningModule):
    """Distils a copy of the student that has no gradient into it.

    Args:
        copied: ``frozen``: the copy requires no gradient; ``momentum``: nor does it, and it follows the student;
            ``unused``: it requires one, and no loss depends on it.
        copy_first: Whether the copy is defined before the student.
        optimize_all: Whether the optimizer is given the copy's parameters, too, where they require a gradient.
    """

    def __init__(self, copied: str = "frozen", copy_first: bool = False, optimize_all: bool = False) -> None:
        super().__init__()
        self.copied, self.optimize_all = copied, optimize_all
        student, other = Stack(), Stack().requires_grad_(copied == "unused")
        if copy_first:
            self.teacher, self.student = other, student
        else:
            self.student, self.teacher = student, other

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0])
        return (self.student(batch[0]) - target).square().mean()

    def on_train_batch_end(self, *_: object) -> None:
        if self.copied == "momentum":
            with torch.no_grad():
                for name, p in self.teacher.named_parameters():
                    p.lerp_(self.student.get_parameter(name), 0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        held = self if self.optimize_all else self.student
        return torch.optim.SGD((p for p in held.parameters() if p.requires_grad), lr=0.1)


class Reports(Callback):
    """Keeps the reports of a fit, which a run takes off the module at its end."""

    found: dict[str, Report]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found = reports_of(pl_module)


def fit_with(technique: Technique, module: LightningModule) -> Report:
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    reports = Reports()
    trainer = Trainer(
        max_steps=4, accelerator="cpu", logger=False, callbacks=[technique, reports], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=2))
    return reports.found[type(technique).__name__]


COPIES = [(copied, first) for copied in ("frozen", "momentum") for first in (False, True)]


@pytest.mark.parametrize(("copied", "copy_first"), COPIES)
def test_a_network_that_does_not_train_is_no_depth(copied: str, copy_first: bool) -> None:
    module = WithCopy(copied, copy_first)
    block_map = BlockMap(module)
    assert block_map.frozen_networks() == ("teacher",)
    assert [name for name, _ in block_map.blocks()] == [f"student.blocks.{i}" for i in range(3)]
    assert len(block_map.every()) == 6
    dropping = fit_with(StochasticDepth(rate=0.3), WithCopy(copied, copy_first))
    assert dropping.modules == tuple(f"student.blocks.{i}" for i in range(3))
    assert dropping.details["rates"] == "0.1 0.2 0.3"
    assert len(fit_with(ActivationCheckpointing(), WithCopy(copied, copy_first)).modules) == 3
    thawing = fit_with(GradualUnfreezing(every_n_steps=1), WithCopy(copied, copy_first))
    assert thawing.modules == ("student.head", *(f"student.blocks.{i}" for i in (2, 1, 0)), "student.stem")


@pytest.mark.parametrize(("copied", "copy_first"), COPIES)
def test_adapters_go_to_the_network_that_trains(copied: str, copy_first: bool) -> None:
    module = WithCopy(copied, copy_first, optimize_all=True)
    adapted = fit_with(LoRA(rank=2), module).modules
    assert adapted
    assert all(name.startswith("student.") for name in adapted)
    still = [name for name, p in module.named_parameters() if name.endswith("lora_B") and not p.any()]
    assert still == []


@pytest.mark.parametrize("copy_first", [False, True])
@pytest.mark.parametrize("optimize_all", [False, True])
def test_a_copy_thaws_beside_its_network_or_not_at_all(optimize_all: bool, copy_first: bool) -> None:
    """If its head alone trained at first, the loss, which does not depend on the copy, would have no gradient."""
    module = WithCopy("unused", copy_first, optimize_all)
    groups = fit_with(GradualUnfreezing(every_n_steps=1), module).details["groups"]
    assert groups == 5
    optimized = {id(p) for p in module.student.parameters()}
    assert BlockMap(module, optimized).frozen_networks() == ("teacher",)


def test_copies_have_a_depth_of_their_own() -> None:
    pair = WithCopy("unused")
    assert BlockMap(pair).copies() == {"teacher": "student"}
    report = apply(pair, [StochasticDepth(rate=0.3)])["StochasticDepth"]
    assert report.details["rates"] == "0.1 0.2 0.3 0.1 0.2 0.3"


def test_adapters_do_not_hide_what_trained_before_them() -> None:
    """Activations of a frozen block are needed where adapters train before it."""
    module = WithCopy("frozen")
    apply(module, [LoRA(rank=2, targets=[r"student\.blocks\.0\.up"])])
    assert [name for name, _ in BlockMap(module).blocks()] == [f"student.blocks.{i}" for i in range(3)]


def test_a_frozen_network_with_a_new_head_is_the_one_that_counts() -> None:
    module = nn.Module()
    module.backbone, module.head = Stack().requires_grad_(False), nn.Linear(4, 2)
    assert len(BlockMap(module).blocks()) == 3
    half = Stack()
    half.blocks[0].requires_grad_(False)
    assert len(BlockMap(half).blocks()) == 3


def test_blocks_do_not_depend_on_weights() -> None:
    net = Stack()
    found = [name for name, _ in find_blocks(net, who="T")]
    zeros = Stack()
    with torch.no_grad():
        for p in zeros.parameters():
            p.zero_()
    assert [name for name, _ in find_blocks(zeros, who="T")] == found
