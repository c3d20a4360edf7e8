"""What holds for every technique alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import lit_efficient
from lit_efficient import LoRA, Technique
from lit_efficient.declaration import Declaration, Hooks
from lit_efficient.testing import (
    CHECKS,
    Case,
    Run,
    check_cleans_up,
    check_deep_copy,
    check_loads_safely,
    check_standalone,
)
from tests.contract.effects import assert_base_is_frozen, moved
from tests.contract.table import NAMES, TOGETHER, case

# All hooks are tried with many techniques at once, in test_together.py.
HOOKS = ("on_before_backward", "on_validation_start", "on_train_end")
# test_together.py asserts the same of each weight that a technique of TOGETHER adds or changes.
AMONG_OTHERS = (check_cleans_up, check_deep_copy, check_loads_safely, check_standalone)


def test_every_public_technique_has_a_row_and_a_test_of_its_own() -> None:
    public = {name: getattr(lit_efficient, name) for name in lit_efficient.PUBLIC}
    kinds = {
        name: value for name, value in public.items() if isinstance(value, type) and issubclass(value, Declaration)
    }
    techniques = [name for name, kind in kinds.items() if kind is not Technique and Hooks not in kind.__bases__]
    assert sorted(techniques) == NAMES
    files = {name: "{}/test_{}.py".format(*lit_efficient.PUBLIC[name].split(".")) for name in NAMES}
    assert [file for file in files.values() if not (Path(__file__).parents[1] / file).is_file()] == []


def _rows() -> list[Any]:
    """Every check of every technique; nightly what is asserted of the technique among all others, too."""
    return [
        pytest.param(
            name,
            check,
            id=f"{name}-{check.__name__}",
            marks=[pytest.mark.nightly] if check in AMONG_OTHERS and name in TOGETHER else [],
        )
        for name in NAMES
        for check in CHECKS
    ]


def _trains_rows_and_adapters(run: Run) -> None:
    assert_base_is_frozen(run, r"\.(lora_[AB]|trained_rows)$")
    assert moved(run, r"\.trained_rows$")


class RowsNet(nn.Module):
    """A model of transformers: each of the WIDTH numbers of a row is one of eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=8,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
        )
        self.llama = LlamaForCausalLM(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.llama(input_ids=(2 * x + 4).long().clamp(0, 7), use_cache=False).logits[..., 0]


@pytest.mark.parametrize("check", CHECKS)
def test_trained_rows_of_an_embedding_keep_the_contract(check: Callable[[Case], None]) -> None:
    rows = Case(lambda: [LoRA(rank=2, trainable_token_indices=[1, 5])], _trains_rows_and_adapters, network=RowsNet)
    check(rows)


@pytest.mark.parametrize(("name", "check"), _rows())
def test_keeps_the_contract(name: str, check: Callable[[Case], None]) -> None:
    check_cleans_up(case(name), HOOKS) if check is check_cleans_up else check(case(name))
