"""The table of precisions in docs/gpus.md: bytes a parameter, counted in a run of each row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

import lit_efficient
from lit_efficient.testing import data, trainer
from tests.state_bytes import measure_state_bytes
from tests.support import Toy

PAGE = (Path(__file__).parents[1] / "docs" / "gpus.md").read_text("utf-8")
SECTION = PAGE.partition("## What each precision costs")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("| `")
]


class Wide(nn.Linear):
    """A matrix alone, so that no step counter is seen."""

    def __init__(self) -> None:
        super().__init__(16, 16, bias=False)


class Counted(L.Callback):
    """Bytes a parameter, after the backward pass of the last step."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        p = pl_module.net.weight
        self.bytes = [p.nbytes, p.grad.nbytes, measure_state_bytes(optimizer)]


@pytest.mark.filterwarnings("ignore:AdamW steps .* in 16 bits")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace("`", ""))
def test_bytes_a_parameter_are_as_the_table_says(row: list[str]) -> None:
    precision, *names = re.findall(r"`([\w-]+)`", row[0])
    if precision == "16-mixed":
        return  # a gradient scaler needs a GPU; its weights are those of bf16-mixed
    counted = Counted()
    techniques = [getattr(lit_efficient, name)() for name in names]
    run = trainer([counted, *techniques], precision=precision, max_steps=2, limit_val_batches=0)
    run.fit(Toy(network=Wide), data(8, 4), data())
    torch.testing.assert_close([n / 256 for n in counted.bytes], [float(cell) for cell in row[1:4]], rtol=0, atol=0)
    assert float(row[4]) == sum(float(cell) for cell in row[1:4])


def test_every_precision_of_the_page_is_lightning_s() -> None:
    assert len(ROWS) == 7
    assert {re.findall(r"`([\w-]+)`", row[0])[0] for row in ROWS} == {
        "32-true",
        "bf16-mixed",
        "16-mixed",
        "bf16-true",
        "16-true",
    }
