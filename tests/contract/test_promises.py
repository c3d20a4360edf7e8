"""Shared code goes by what a class promises: techniques that it has never heard of are treated like ours."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch import Callback

from lit_efficient import GPTConfig, LanguageModeling, LoRA, LRFinder, Report, Technique, merge_adapters, to_low_bit
from lit_efficient.application import apply
from lit_efficient.application.ledger import ledger
from lit_efficient.declaration import Phase
from lit_efficient.traits import Trait
from tests.support import Net, Toy, data, trainer


class Counter(Callback):
    """Counts the batches that it sees."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1


class Writer(Counter):
    """Would write a file for each."""

    traits = frozenset({Trait.LEAVES_TRACES})


def test_what_leaves_traces_takes_no_part_in_steps_that_are_undone() -> None:
    counter, writer = Counter(), Writer()
    run = trainer([LRFinder(num_steps=12, early_stop_threshold=None, apply=False), counter, writer], max_steps=3)
    seen: list[int] = []
    counter.on_train_batch_end = lambda *_: seen.append(run.global_step)  # type: ignore[method-assign]
    run.fit(Toy("init"), data(), data())
    assert len(seen) > 3 + 2 * 12  # trials of twelve steps
    assert len(seen) % 12 == 3
    assert writer.seen == 3


@pytest.mark.parametrize("changes", [False, True])
def test_tokens_are_counted_where_something_changes_the_accumulation(changes: bool) -> None:
    class Accumulates(Callback):
        traits = frozenset({Trait.CHANGES_ACCUMULATION} if changes else ())

    module = LanguageModeling(GPTConfig(vocab_size=8, dim=8, depth=1, num_heads=1))
    module.trainer = L.Trainer(callbacks=[Accumulates()], accelerator="cpu", logger=False)
    assert [type(callback).__name__ for callback in module.configure_callbacks()] == (
        ["TokenWeightedAccumulation"] if changes else []
    )


class Marks(Technique):
    """A transform that merging cannot undo."""

    phase = Phase.FREEZE

    def transform(self, module: torch.nn.Module) -> Report:
        return Report("nothing")


def test_the_ledger_forgets_what_was_merged_and_nothing_else() -> None:
    net = Net()
    apply(net, [LoRA(rank=2), Marks()])
    assert [entry.record["name"] for entry in ledger(net)] == ["LoRA", "Marks"]
    merge_adapters(net)
    assert [entry.record["name"] for entry in ledger(net)] == ["Marks"]


def test_an_optimizer_may_say_what_its_low_bit_form_imitates() -> None:
    class Renamed(torch.optim.AdamW):
        low_bit_twin = ("AdamW", 2)

    optimizer = Renamed([torch.nn.Parameter(torch.zeros(64, 64))], lr=1e-3)
    assert to_low_bit(optimizer, min_size=0).low == 64 * 64
    assert type(optimizer).__name__ == "AdamW8bit"
