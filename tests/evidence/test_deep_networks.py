"""Tests of plans of deep networks: tracing few blocks gives the plan of all blocks."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from lit_efficient import (
    EMA,
    ActivationCheckpointing,
    CausalLMConfig,
    GPTConfig,
    LanguageModeling,
    LoRA,
    LowBitOptimizer,
    plan,
)
from lit_efficient.errors import ConfigurationError, NoEffectError
from lit_efficient.evidence.fits import LiveFit
from lit_efficient.evidence.memory_kinds import Moment, StepMemory
from lit_efficient.evidence.planning import deep_networks
from lit_efficient.evidence.planning import plan as planning
from lit_efficient.evidence.planning.traced_step import Traced
from lit_efficient.models.libraries.causal_lm import build

SHAPES: dict[str, Any] = {
    "gpt": GPTConfig(64, dim=32, depth=6, num_heads=2, max_length=32),
    "llama": CausalLMConfig(
        config_fields={
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 1024,
            "max_position_embeddings": 32,
        }
    ),
}


def planned(shape: str, *callbacks: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    tokens = torch.zeros(32, dtype=torch.long)
    run = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=9,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    rows = DataLoader([{"input_ids": tokens, "labels": tokens}] * 16, 4)
    return plan(LiveFit(run, LanguageModeling(SHAPES[shape], warmup_steps=0), rows))


@pytest.mark.turns(6, family="slow")
def test_a_folder_that_is_named_is_planned_as_what_is_in_it(tmp_path, monkeypatch):
    build(SHAPES["llama"]).bfloat16().save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16", "auto"):
        for name, spec in (
            ("folder", CausalLMConfig(str(tmp_path), dtype=dtype)),
            ("fields", replace(SHAPES["llama"], dtype="bfloat16" if dtype == "auto" else dtype)),
        ):
            monkeypatch.setitem(SHAPES, name, spec)
        folder, fields = (planned(name, LoRA(targets=["v_proj"])) for name in ("folder", "fields"))
        assert (folder.kinds, folder.trainable) == (fields.kinds, fields.trainable), dtype
    monkeypatch.setitem(SHAPES, "folder", CausalLMConfig(str(tmp_path), quantize="nf4"))
    with pytest.raises(ConfigurationError, match=r"model\.quantize must be null \(use QuantizeBase"):
        planned("folder")


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("shape", "techniques", "options"),
    [
        ("gpt", [ActivationCheckpointing, EMA], {"accumulate_grad_batches": 2}),
        ("llama", [lambda: LoRA(targets=["v_proj"]), ActivationCheckpointing], {"precision": "bf16-true"}),
    ],
)
def test_what_each_block_adds_is_counted_as_often_as_it_is_there(shape, techniques, options, monkeypatch):
    for name, blocks in (("FEW", 2), ("MORE", 3), ("MANY", 5)):
        monkeypatch.setattr(planning, name, blocks)
        monkeypatch.setattr(deep_networks, name, blocks)
    few = planned(shape, *(kind() for kind in techniques), **options)
    monkeypatch.setattr(planning, "MANY", 10**6)
    whole = planned(shape, *(kind() for kind in techniques), **options)
    assert "were traced" in " ".join(few.notes)
    assert "were traced" not in " ".join(whole.notes)
    assert (few.reported, whole.reported) == ("3 of the 6 blocks", "")
    assert few.peak == pytest.approx(whole.peak, rel=0.01)
    assert sum(few.kinds.values()) == few.peak
    assert few.resident == whole.resident
    assert (few.parameters, few.trainable, few.flops) == (whole.parameters, whole.trainable, whole.flops)


@pytest.mark.turns(6, family="slow")
def test_all_blocks_are_traced_where_a_technique_would_save_nothing_on_few(monkeypatch):
    """States of the embedding keep 32 bits, which costs more than two blocks of bfloat16 save."""
    monkeypatch.setitem(SHAPES, "large table", GPTConfig(1024, dim=64, depth=6, num_heads=2, max_length=32))
    options = {"precision": "bf16-true"}
    for name, blocks in (("FEW", 2), ("MORE", 3), ("MANY", 5)):
        monkeypatch.setattr(planning, name, blocks)
        monkeypatch.setattr(deep_networks, name, blocks)
    found = planned("large table", LowBitOptimizer(), **options)
    monkeypatch.setattr(planning, "MANY", 10**6)
    whole = planned("large table", LowBitOptimizer(), **options)
    assert (found.peak, found.kinds, found.notes) == (whole.peak, whole.kinds, whole.notes)
    monkeypatch.setitem(SHAPES, "shallow", GPTConfig(1024, dim=64, depth=2, num_heads=2, max_length=32))
    with pytest.raises(NoEffectError, match="would take"):
        planned("shallow", LowBitOptimizer(), **options)


def test_the_peak_of_few_blocks_at_the_start_of_a_backward_pass_is_not_mixed_with_that_of_more_at_its_end():
    """As with a large tied table: its gradient in float32 is the peak of four blocks, gradients of blocks of eight."""

    def traced(blocks: int) -> Traced:
        moments = [Moment("forward", {"weights": blocks}), Moment("backward", {"weights": blocks, "activations": 21})]
        for block in range(blocks):
            for place in range(8):
                activations = 17 if place == 3 else 9
                moments.append(Moment("backward", {"weights": blocks, "gradients": block, "activations": activations}))
        moments.append(Moment("backward", {"weights": blocks, "gradients": blocks + 8}))
        top = max(moments, key=lambda moment: moment.bytes)
        return Traced(StepMemory(top.bytes, top.kinds, moments[-1].kinds, 0, tuple(moments)), 0, 0, 0, ())

    few, more, whole = traced(4), traced(8), traced(28)
    assert few.memory.kinds["activations"] == 21
    assert more.memory.kinds["activations"] == 17
    found = deep_networks.deepened(few, more, 28).memory
    assert (found.peak, dict(found.kinds)) == (whole.memory.peak, dict(whole.memory.kinds))


@pytest.mark.turns(6, family="slow")
def test_all_blocks_are_traced_where_the_peaks_of_few_are_at_different_places(monkeypatch):
    for name, blocks in (("FEW", 2), ("MORE", 3), ("MANY", 5)):
        monkeypatch.setattr(planning, name, blocks)
        monkeypatch.setattr(deep_networks, name, blocks)
    extrapolated = planned("gpt")
    given = []

    def elsewhere(few: Traced, more: Traced, blocks: int) -> Traced | None:
        top = Moment("backward", {"weights": few.memory.peak, "activations": few.memory.peak})
        few = replace(few, memory=replace(few.memory, timeline=(top,)))
        last = Moment("backward", {"weights": 2 * more.memory.peak})
        more = replace(more, memory=replace(more.memory, timeline=(last,)))
        given.append(deep_networks.deepened(few, more, blocks))
        return given[0]

    monkeypatch.setattr(planning, "deepened", elsewhere)
    found = planned("gpt")
    monkeypatch.setattr(planning, "MANY", 10**6)
    whole = planned("gpt")
    assert given == [None]
    assert (found.peak, found.kinds, found.notes) == (whole.peak, whole.kinds, whole.notes)
    assert found.notes != extrapolated.notes
