"""Fabric instead of a Trainer, and one instance of a technique in several trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

import lit_efficient
from lit_efficient import Float8Precision, FusedAdamW, LoRA, apply
from lit_efficient.catalog import read_cards
from lit_efficient.errors import ConfigurationError
from tests.contract.table import CASES, NAMES, make_all, network_of
from tests.support import WIDTH, Net, Toy, assert_equal, data, trainer, weights

CARDS = [card for card in read_cards() if card.slot == "trainer.callbacks" and not card.is_block]


def _rows() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def _steps(net: Any, backward: Any) -> dict[str, torch.Tensor]:
    optimizer = FusedAdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        backward((net(_rows()) - _rows().flip(-1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


def _adapted() -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    apply(net, LoRA(rank=2))
    return net


def test_a_network_that_apply_has_changed_trains_in_fabric_as_in_a_plain_loop() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    net = _adapted()
    _steps(fabric.setup_module(net), fabric.backward)
    assert_equal(weights(net), _steps(_adapted(), torch.Tensor.backward))


@pytest.mark.parametrize("name", [card.name for card in CARDS])
def test_a_callback_in_fabric_is_refused_because_nothing_would_call_it(name: str) -> None:
    arguments = {"TaskEvaluation": {"tasks": ["a"]}, "SampleText": {"prompts": ["a"]}}
    made = CASES[name].make() if name in CASES else getattr(lit_efficient, name)(**arguments.get(name, {}))
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[made])
    with pytest.raises(ConfigurationError, match=rf"^{name} is a part of a Trainer, and would do nothing in Fabric"):
        fabric.setup(nn.Linear(2, 2))


def test_a_precision_in_fabric_is_refused() -> None:
    pytest.importorskip("torchao")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=Float8Precision(emulate=True))
    with pytest.raises(ConfigurationError, match=r"^Float8Precision is a part of a Trainer"):
        fabric.setup(nn.Linear(2, 2))


def _fit(name: str, callbacks: list[Any], folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = Toy(network=network_of(name))
    torch.manual_seed(0)
    trainer(callbacks, max_epochs=2, default_root_dir=folder, **CASES[name].trainer).fit(module, data(), data())
    return weights(module)


@pytest.mark.turns(20, always=["EMA", "LoRA"])
@pytest.mark.parametrize("name", NAMES)
def test_an_instance_serves_a_second_trainer_as_a_new_one_would(name: str, tmp_path: Path) -> None:
    fresh = _fit(name, make_all(name), tmp_path)
    made = make_all(name)
    _fit(name, made, tmp_path)
    assert_equal(_fit(name, made, tmp_path), fresh)
