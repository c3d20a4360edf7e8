"""The Python that a card prints runs, and says `restore` where nothing else reads a run's checkpoint, only there."""

from __future__ import annotations

import dataclasses
import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lit_efficient
from lit_efficient import ConfigurationError
from lit_efficient.application.ledger import ledger
from lit_efficient.catalog import Card, arguments_of, read_cards
from lit_efficient.commands.card import card_text
from lit_efficient.testing import WIDTH, Case, Net, Toy, data
from tests.contract.table import CASES, _teacher, case
from tests.support import AttentionNet

CARDS = read_cards()
NEEDED: dict[str, Any] = {  # arguments without a default
    "block": 2, "teacher": _teacher(), "student": "net", "layers": {r"blocks\.1": ""}, "num_outputs": 16,
    "init_tokens": [1, 5], "every_n_epochs": 1, "milestones": [1], "max_norm": 1.0, "bound": 1.0,
    "weight_decay": [0.04, 0.4], "optimizer": torch.optim.SGD([torch.zeros(1)]), "total_steps": 10,
    "end": 65, "steps": 2, "base_width": 8, "tasks": ["arc_easy"],
    "config": {"peft_type": "LORA", "r": 2, "target_modules": "all-linear"},
}  # fmt: skip

NEEDS_PACKAGE = {"ZeroStrategy": "deepspeed"}  # which the tests' environment may lack: then the card's line says so
OF_REAL_SIZE = {"Float8Precision", "GaLore", "APOLLO"}  # whose defaults refuse layers as small as the toy's


class TenOutputs(Net):
    """What a module has before another head takes the place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 10)


class HalfFrozen(Net):
    """What has something to swap."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)


class RootNorm(nn.Module):
    """A norm that keeps more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


class RootNorms(Net):
    """Blocks as in language models."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = RootNorm()


def _case(name: str) -> Case:
    """As the table says; other networks where that of the table is none that somebody would use it on."""
    networks: dict[str, dict[str, Any]] = {
        "IA3": {"network": AttentionNet, "make": lambda: [lit_efficient.IA3()]},
        "ReplaceHead": {"network": TenOutputs},
        "BlockSwap": {"network": HalfFrozen},
        "MemoryEfficientLayers": {"network": RootNorms},
    }
    return dataclasses.replace(case(name), **networks.get(name, {}))


def _lines(card: Card) -> list[str]:
    return [line.strip() for line in card_text(card).partition("In Python:\n")[2].partition("\n\n")[0].splitlines()]


def _loss(module: Any) -> float:
    with torch.no_grad():
        return float(torch.stack([module._sample_loss(batch).mean() for batch in data()]).mean())


def _loads(module: Toy, state: dict[str, Any], wanted: float, rel: float) -> bool:
    """Whether a fresh module has the weights of the validation as anybody would load them."""
    try:
        module.load_state_dict(state)
    except RuntimeError:
        return False
    return _loss(module.eval()) == pytest.approx(wanted, rel=rel)


def test_each_part_of_a_run_has_lines_of_python() -> None:
    silent = {card.slot for card in CARDS if not _lines(card)}
    assert silent == {"model", "data"}
    assert not silent & {card.slot for card in CARDS if _lines(card)}
    assert set(CASES) <= {card.name for card in CARDS if _lines(card)}


@pytest.mark.turns(3)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # as torch's inductor is imported
@pytest.mark.parametrize("card", [card for card in CARDS if _lines(card)], ids=lambda card: card.name)
def test_a_card_prints_python_that_runs(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if card.name in OF_REAL_SIZE:
        monkeypatch.setattr(lit_efficient, card.name, CASES[card.name].make, raising=False)
    *lines, last = _lines(card)
    lines, reads = (lines, last) if "restore(" in last else ([*lines, last], "")
    one = _case(card.name) if card.name in CASES else None
    names: dict[str, Any] = {**NEEDED, "module": one.toy("init") if one else nn.Linear(8, 8)}
    if (package := NEEDS_PACKAGE.get(card.name)) and find_spec(package) is None:
        with pytest.raises(ConfigurationError, match=rf"pip install 'lit-efficient\[{package}\]'"):
            exec("\n".join(lines), names)
        return
    exec("\n".join(lines), names)
    made = [entry.record["name"] for entry in ledger(names["module"])]
    if (trainer := names.get("trainer")) is not None:
        parts = (*trainer.callbacks, trainer.strategy, trainer.strategy.checkpoint_io)
        made += [type(part).__name__ for part in parts]
    if (optimizer := names.get("optimizer")) is not None:
        made.append(type(optimizer).__name__)
    if (scheduler := names.get("lr_scheduler")) is not None:
        made.append(type(scheduler).__name__)
    assert made.count(card.name) == 1
    if one is None:
        assert not reads
        return
    run = one.fit(one.make())
    validated = float(run.trainer.callback_metrics["val/loss"])
    rel = 1e-2 if card.slot == "trainer.plugins" else 1e-5  # validated with products in another number format
    assert _loads(one.toy("init"), run.checkpoint["state_dict"], validated, rel) is not bool(reads)
    if reads:
        torch.save(run.checkpoint, "best.ckpt")
        loaded: dict[str, Any] = {}
        exec(reads, names | {"new_module": one.toy()}, loaded)
        assert _loss(loaded["module"]) == pytest.approx(validated, rel=1e-5)


def test_a_card_has_the_arguments_of_the_constructor_also_if_it_is_inherited() -> None:
    inherited = set()
    for card in CARDS:
        kind = getattr(lit_efficient, card.name)
        if "__init__" not in vars(kind) and card.signature:
            inherited.add(card.name)
            assert [one["name"] for one in arguments_of(card)] == list(inspect.signature(kind).parameters)
    assert inherited >= {"WarmupCosine", "WarmupLinear"}
