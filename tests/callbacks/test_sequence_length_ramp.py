"""SequenceLengthRamp: lengths by step, nothing lost by folding, positions from 0, counts of what is left, resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_efficient import ConfigurationError, LanguageModeling, SequenceLengthRamp, ThroughputMeter
from lit_efficient.callbacks.sequence_length_ramp import shorten
from lit_efficient.testing import Run
from tests.contract.effects import in_order_of_steps
from tests.contract.row import Row
from tests.support import PaddedNet, trainer


def rows_grow(run: Run) -> None:
    """The first step's rows are shorter, those of later ones whole."""
    lengths = [step.seen["rows"].shape[1] for step in in_order_of_steps(run)]
    assert lengths[0] in (4, 8)
    assert set(lengths[1:]) == {16}


ROW = Row(
    lambda: SequenceLengthRamp(8, 16, steps=1, of="0"),
    rows_grow,
    network=PaddedNet,
    beside={"LatentAlignment": lambda: SequenceLengthRamp(4, 16, steps=1, of="0")},  # as latents they fill a square
)


def packed(rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Rows of two documents, the second one from position 5 on."""
    ids = torch.arange(rows * length).reshape(rows, length)
    positions = torch.cat([torch.arange(5), torch.arange(length - 5)]).expand(rows, length).clone()
    return {"input_ids": ids, "position_ids": positions, "shift_labels": ids + 1, "weight": torch.arange(rows)}


def test_cutting_keeps_the_first_positions_of_everything() -> None:
    batch = packed()
    mask = torch.ones(2, 1, 12, 12)
    shorter = shorten({**batch, "attention_mask": mask, "name": "a"}, batch["input_ids"], 4)
    assert shorter["input_ids"].tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert shorter["shift_labels"].tolist() == [[1, 2, 3, 4], [13, 14, 15, 16]]
    assert shorter["attention_mask"].shape == (2, 1, 4, 4)
    assert shorten({"embeds": torch.ones(2, 12, 12)}, batch["input_ids"], 4)["embeds"].shape == (2, 4, 12)
    assert shorten({"mask": torch.ones(2, 12, 12).bool()}, batch["input_ids"], 4)["mask"].shape == (2, 4, 4)
    assert shorter["weight"].tolist() == [0, 1]
    assert shorter["name"] == "a"
    assert batch["input_ids"].shape == (2, 12)


def test_folding_loses_no_token_and_begins_positions_anew() -> None:
    batch = packed()
    folded = shorten(batch, batch["input_ids"], 4, fold=True)
    assert folded["input_ids"].flatten().tolist() == [*range(24)]
    assert folded["shift_labels"].flatten().tolist() == [*range(1, 25)]
    assert folded["weight"].tolist() == [0, 0, 0, 1, 1, 1]
    assert folded["position_ids"][:3].tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 3]]
    assert batch["position_ids"][0, 4] == 4  # the loader's own is as it was


def test_pieces_of_padding_alone_are_left_out() -> None:
    ids = torch.arange(16).reshape(2, 8)
    mask = torch.tensor([[1] * 8, [1] * 3 + [0] * 5])
    folded = shorten({"input_ids": ids, "attention_mask": mask}, ids, 4, fold=True)
    assert folded["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert folded["attention_mask"].tolist() == [[1] * 4, [1] * 4, [1, 1, 1, 0]]


def test_lengths_by_step() -> None:
    ramp = SequenceLengthRamp(60, 256, steps=100, multiple_of=8)
    ramp._steps = 100
    lengths = [ramp.length_at(step) for step in range(101)]
    assert lengths[0] == 60
    assert lengths[-1] is None
    assert lengths[50] == 152
    inner = [length for length in lengths[1:-1] if length]
    assert inner == sorted(inner)
    assert all(length % 8 == 0 for length in inner if length > 60)


class Watched(LanguageModeling):
    """Shapes and tokens of what it trains on and evaluates."""

    def __init__(self) -> None:
        super().__init__({"dim": 16, "depth": 1, "num_heads": 2, "hidden_dim": 32, "vocab_size": 32, "max_length": 16})
        self.trained: list[tuple[int, ...]] = []
        self.validated: list[tuple[int, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(tuple(batch["input_ids"].shape))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(tuple(batch["input_ids"].shape))
        super().validation_step(batch, batch_idx)


def tokens(count: int = 6) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 32, (2, 17), generator=generator, device="cpu") for _ in range(count)]
    made = [{"input_ids": ids[:, :-1].clone(), "shift_labels": ids[:, 1:].clone()} for ids in batches]
    return DataLoader(made, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "shapes"),
    [
        ("cut", [(2, 4), (2, 8), (2, 12), (2, 16), (2, 16), (2, 16)]),
        ("fold", [(8, 4), (4, 8), (2, 12), (2, 16), (2, 16), (2, 16)]),
    ],
)
def test_it_trains_on_short_rows_counts_them_and_validates_on_whole_ones(mode: str, shapes: list[Any]) -> None:
    module, meter = Watched(), ThroughputMeter(count_flops=False)
    ramp = SequenceLengthRamp(4, 16, steps=3, mode=mode, multiple_of=4)
    run = trainer([ramp, meter], max_epochs=1, log_every_n_steps=1)
    counted: list[int] = []
    inner = meter.on_train_batch_start

    def count(trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        counted.append(batch["input_ids"].numel())
        inner(trainer, pl_module, batch, batch_idx)

    meter.on_train_batch_start = count  # type: ignore[method-assign]
    run.fit(module, tokens(), tokens(2))
    assert module.trained == shapes
    assert set(module.validated) == {(2, 16)}
    assert counted == [rows * length for rows, length in shapes]


def test_what_would_teach_nothing_stays_whole() -> None:
    ramp = SequenceLengthRamp(4, 16, steps=10)
    ramp._steps = 10
    labels = torch.full((2, 16), -100)
    labels[:, 9:] = 1
    batch = {"input_ids": torch.zeros(2, 16, dtype=torch.int64), "labels": labels}
    assert ramp.change(batch, 0)["input_ids"].shape == (2, 16)
    assert ramp.change({**batch, "labels": torch.ones_like(labels)}, 0)["input_ids"].shape == (2, 4)


def test_what_cannot_be_cut_is_refused() -> None:
    ramp = SequenceLengthRamp(4, 16, steps=10, mode="fold")
    ramp._steps = 10
    ids = torch.zeros(1, 16, dtype=torch.int64)
    left = torch.tensor([[0] * 3 + [1] * 13])
    with pytest.raises(ConfigurationError, match="rows are padded on the left"):
        ramp.change({"input_ids": ids, "attention_mask": left}, 0)
    with pytest.raises(ConfigurationError, match=r"mode='fold' cannot split an attention mask"):
        ramp.change({"input_ids": ids, "attention_mask": torch.ones(1, 1, 16, 16)}, 0)
    for batch in ({"chosen_input_ids": ids}, [ids], {"input_ids": ids[0]}):
        with pytest.raises(ConfigurationError, match=r"of='input_ids' is no tensor \[B, T\] of a batch with"):
            ramp.change(batch, 0)
    with pytest.raises(ConfigurationError, match=r"steps=0.1 is a fraction of Trainer\(max_steps=...\)"):
        trainer([SequenceLengthRamp(4, 16)]).fit(Watched(), tokens(), tokens(2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"start": 0}, "start must be a whole number of at least 1 and below 1024, got 0"),
        ({"start": 64, "end": 64}, "start must be a whole number of at least 1 and below 64, got 64"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"steps": 1.5}, "steps must be above 0 and below 1, got 1.5"),
        ({"mode": "drop"}, "mode must be"),
        ({"of": ""}, "of must be a key or a position in the batch"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        SequenceLengthRamp(**arguments)


def test_pairs_are_cut_on_both_sides_and_stay_whole_where_one_would_teach_nothing() -> None:
    lengths, answers = {"chosen": 8, "rejected": 11}, {"chosen": 3, "rejected": 2}

    def pairs(answer_at: int) -> dict[str, torch.Tensor]:
        batch = {}
        for side, length in lengths.items():
            labels = torch.full((2, length), -100)
            labels[:, answer_at : answer_at + answers[side]] = 7
            mask = torch.ones(2, length)
            batch |= {f"{side}_input_ids": labels.abs(), f"{side}_labels": labels, f"{side}_attention_mask": mask}
        return batch

    ramp = SequenceLengthRamp(6, 16, steps=10, multiple_of=1, of="chosen_input_ids")
    ramp._steps = 10
    assert {tuple(t.shape) for t in ramp.change(pairs(4), 0).values()} == {(2, 6)}
    late = pairs(4)
    late["chosen_labels"][:, :7] = -100  # its answer begins behind the cut, the other one's before it
    late["chosen_labels"][:, 7] = 7
    assert ramp.change(late, 0) is late
    left = pairs(4) | {"rejected_attention_mask": (torch.arange(11) > 1).float().expand(2, -1)}
    with pytest.raises(ConfigurationError, match="padded on the left"):
        ramp.change(left, 0)
    fold = SequenceLengthRamp(6, 16, steps=10, mode="fold", of="chosen_input_ids")
    fold._steps = 10
    with pytest.raises(ConfigurationError, match="2 texts per row"):
        fold.change(pairs(4), 0)
