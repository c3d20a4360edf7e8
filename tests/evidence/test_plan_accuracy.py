"""Tests of planned against counted bytes, on some cells of benchmarks/plan_accuracy.py. All techniques have a cell."""

import pytest

import lit_efficient as le
from benchmarks.plan_70b import FIELDS, Llama70B
from benchmarks.plan_accuracy import error, row
from benchmarks.plan_cells import MODELS, Cell, cells, techniques
from benchmarks.plan_ranks import STRATEGIES
from lit_efficient.catalog import read_cards

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


@pytest.mark.turns(4, always=["Llama-names0-32-true"])
@pytest.mark.parametrize(
    ("model", "names", "precision"),
    [
        ("Llama", (), "32-true"),  # without the mask that tracing would make
        ("Qwen3-MoE", ("LoRA",), "32-true"),  # grouped products
        ("DiT", ("GaLore",), "bf16-mixed"),
        ("ViT", ("GradualUnfreezing",), "32-true"),  # what thaws later
        ("ResNet", ("CheckpointAverage",), "32-true"),  # snapshots that come later
    ],
)
def test_what_is_planned_is_what_is_counted(model, names, precision):
    found = row(Cell(model, names, 2, precision, MODELS[model].small), "cpu")
    assert abs(error(found)) <= 1.5
    assert found["by_plan"]["states"] == pytest.approx(found["by_count"]["states"], rel=0.02)


def test_every_technique_stands_in_a_cell_and_names_are_unique():
    wanted = cells()
    assert {name for cell in wanted for name in cell.techniques} == set(techniques())
    assert len({cell.name for cell in wanted}) == len(wanted) >= 60


def test_every_strategy_is_measured_in_two_processes_or_needs_deepspeed():
    named = {card.name for card in read_cards() if card.is_technique and card.slot == "trainer.strategy"}
    assert named == (STRATEGIES.keys() - {"DDPStrategy"}) | {"ZeroStrategy"}


@pytest.mark.turns(6, family="slow")
def test_a_fit_that_is_made_on_meta_whole_its_metrics_too_is_planned():
    found = le.plan(Llama70B(length=32, layers=1))
    embeddings = 2 * 2 * FIELDS["vocab_size"] * FIELDS["hidden_size"]  # and the head, in 16 bits
    assert embeddings < found.kinds["weights"] < 1.2 * embeddings
