"""What ``techniques --matrix`` shows of techniques and optimizers is what happens."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lit_efficient
from lit_efficient import PUBLIC, ConflictError, Technique
from lit_efficient.catalog import pairs, read_cards
from lit_efficient.data.text.arguments import LanguageStream
from lit_efficient.declaration import check_conflicts
from tests.contract.table import CASES, make_all, network_of
from tests.support import Toy, data, trainer

CARDS = {card.name: card for card in read_cards()}
OPTIMIZERS = sorted(name for name, card in CARDS.items() if card.slot == "optimizer")
PAIRS = pairs(CARDS.values())
STREAMED = {"train": ["train.txt"], "val": ["val.txt"], "tokenizer": "some_folder"}
SWITCHES = {"ScheduleFreeAdamW": "ScheduleFree"}  # the callback that an optimizer cannot do without


def _between(a: str, b: str) -> str:
    return PAIRS.get((a, b), PAIRS.get((b, a), ""))


class _Stepped(Toy):
    """The toy, stepped by one of our optimizers."""

    optimizer = "FusedAdamW"

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return getattr(lit_efficient, self.optimizer)(trained, lr=1e-3, weight_decay=0.01)


@pytest.mark.turns(8)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_technique_and_an_optimizer_run_unless_the_matrix_says_otherwise(
    name: str, optimizer: str, tmp_path: Path
) -> None:
    shown = _between(name, optimizer)
    beside = SWITCHES.get(optimizer, "")
    names = [name, *([beside] if beside and beside != name and not shown else [])]
    module = _Stepped("configure_model", network=network_of(name))
    module.optimizer = optimizer
    torch.manual_seed(0)
    run = trainer(make_all(*names), max_steps=2, default_root_dir=tmp_path, **CASES[name].trainer)
    refused = shown.startswith("conflicts:") or (shown and _set_so(make_all(name)[0], shown))
    if refused:
        with pytest.raises(ConflictError, match=r"cannot be combined with"):
            run.fit(module, data(), data())
        assert run.global_step == 0
    else:
        run.fit(module, data(), data())
        assert run.global_step == 2


def _set_so(technique: Technique, shown: str) -> bool:
    """Whether the technique of the table has the setting that a conflict is about."""
    found = re.match(r"conflicts if (\w+)\((\w+)=", shown)
    assert found is not None
    return type(technique).__name__ == found[1] and getattr(technique, found[2]) is not None


def test_conditions_name_arguments_that_there_are() -> None:
    """A conflict with a setting that is spelt wrong would never be one."""
    conditions = [
        key.partition("(")
        for card in CARDS.values()
        for key in card.conflicts
        if isinstance(key, str) and "(" in key and key.partition("(")[0] in PUBLIC
    ]
    assert len(conditions) >= 6
    for name, _, setting in conditions:
        argument, *fields = setting.partition("=")[0].split(".")
        value = inspect.signature(getattr(lit_efficient, name)).parameters[argument].default
        for field in fields:
            value = getattr(value, field)


@pytest.mark.parametrize(
    ("technique", "other", "excluded", "free"),
    [
        ("StochasticDepth", "Compile", {"modules": "network"}, {"modules": "blocks"}),
        ("MaxBatchSize", "ActivationCheckpointing", {"memory_budget": 0.0}, {"every": 2}),
        ("PowerEMA", "EMA", {"switch_every": 2}, {}),
        ("ScheduleFree", "LoRA", {"lr_ratio": 2.0}, {}),
        ("MaxBatchSize", "LanguageData", {"stream": LanguageStream(enabled=True), **STREAMED}, STREAMED),
    ],
)
def test_a_conflict_may_depend_on_an_argument(technique: str, other: str, excluded: Any, free: Any) -> None:
    make = getattr(lit_efficient, other)
    with pytest.raises(
        ConflictError, match=rf"{technique} cannot be combined with {other}\({next(iter(excluded))}[.=]"
    ):
        check_conflicts([make(**excluded), *make_all(technique)])
    check_conflicts([make(**free), *make_all(technique)])
    assert _between(technique, other).startswith(f"conflicts if {other}(")
