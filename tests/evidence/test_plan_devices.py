"""Tests of plans for several devices against sums by hand."""

import pytest
import torch
from torch import nn

from lit_efficient.evidence.planning.plan import Moment
from lit_efficient.evidence.planning.plan_devices import gathered_bytes, least_devices, per_device
from lit_efficient.internals.lightning_strategies import traits_named
from tests.evidence.known_plans import plan_of

KINDS = {"weights": 4_000, "gradients": 4_000, "states": 8_000, "activations": 3_000, "logits": 500}
STEP = {"weights": 4_000, "gradients": 4_000, "states": 8_000, "other": 2_000}
PLAN = plan_of(KINDS, timeline=(Moment("forward", KINDS), Moment("optimizer step", STEP)), resident={"states": 8_000})
DDP, FSDP = traits_named("ddp"), traits_named({"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"})


def test_ddp_shrinks_nothing_and_adds_its_buckets():
    of_eight = per_device(PLAN, 8, DDP)
    assert of_eight.peak == PLAN.peak + 4_000
    assert of_eight.kinds == {**KINDS, "communication": 4_000}
    assert per_device(PLAN, 1, DDP) is PLAN
    assert least_devices(PLAN, PLAN.peak - 1, DDP, 0) is None
    assert least_devices(PLAN, PLAN.peak, DDP, 0) == 1


def test_gradients_that_are_views_are_there_once_and_travel_after_them():
    views = traits_named({"class_path": "lit_efficient.ReplicatedStrategy"})
    assert per_device(PLAN, 2, views).kinds == {**KINDS, "communication": 0}
    few = Moment("backward", {**KINDS, "activations": 3_100, "gradients": 100})
    assert per_device(plan_of(KINDS, timeline=(few,)), 2, views).kinds == {
        **KINDS,
        "activations": 3_100,
        "communication": 0,
    }
    of_two = per_device(plan_of(KINDS, timeline=(*PLAN.timeline, Moment("backward", KINDS))), 2, views)
    assert of_two.kinds == {**KINDS, "communication": 6_000}


def test_sharding_shares_what_belongs_to_parameters_and_gathers_a_unit():
    of_four = per_device(PLAN, 4, FSDP, 1_700)
    assert of_four.kinds == {
        "weights": 1_000,
        "gradients": 1_000,
        "states": 2_000,
        "activations": 3_000,
        "logits": 500,
        "communication": 1_700,
    }
    assert of_four.peak == sum(of_four.kinds.values()) == 9_200
    assert of_four.resident == {"states": 2_000, "communication": 0}
    assert any("the weights and gradients" in note for note in of_four.notes)


@pytest.mark.parametrize(
    ("given", "shared"),
    [
        ("deepspeed_stage_2", {"gradients", "states"}),
        ({"class_path": "lit_efficient.ZeroStrategy", "init_args": {"stage": 1}}, {"states"}),
    ],
)
def test_deepspeeds_stages_shard_what_they_say(given, shared):
    found = per_device(PLAN, 4, traits_named(given), 10).kinds
    assert {kind for kind in KINDS if found[kind] < KINDS[kind]} == shared


def test_offloaded_shards_are_in_host_memory_and_the_device_has_what_is_gathered():
    of_four = per_device(PLAN, 4, FSDP, 1_700, offloads=True)
    assert (of_four.peak, of_four.host) == (3_000 + 500 + 1_700, 16_000 // 4)
    assert of_four.resident == {"states": 0, "communication": 0}


@pytest.mark.parametrize("limit", range(5_300, 25_000, 1_371))
def test_the_least_number_of_devices_is_what_counting_finds(limit):
    fits = [n for n in range(1, 300) if per_device(PLAN, n, FSDP, 1_700).peak <= limit]
    assert least_devices(PLAN, limit, FSDP, 1_700) == min(fits)
    assert least_devices(PLAN, 5_000, FSDP, 1_700) is None


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8 * n), nn.Linear(8 * n, 8)) for n in (1, 3))
        self.layers[1][0].requires_grad_(False)


def test_gathered_is_the_rest_and_the_largest_unit_with_its_gradients():
    module = Blocks()
    embedding = 100 * 8 * 4
    small, large = 4 * (8 * 8 + 8) * 2, 4 * (8 * 24 + 24 + 24 * 8 + 8)
    trained = 4 * (24 * 8 + 8)  # of the large block, the first layer of which is frozen
    assert gathered_bytes(module, FSDP) == embedding + max(embedding, large + trained, 2 * small)
    itself = traits_named({"class_path": "lit_efficient.ShardedStrategy"})
    assert gathered_bytes(module, itself) == max(2 * embedding, large + trained)
    assert gathered_bytes(module, itself, "bf16-mixed") == gathered_bytes(module, itself) // 2
    assert gathered_bytes(nn.Linear(3, 2, dtype=torch.float64), FSDP) == 2 * 64


@pytest.mark.parametrize(
    ("given", "replicates", "shards"),
    [("auto", True, False), ("ddp_find_unused_parameters_true", True, False), ("fsdp", False, True)],
)
def test_strategies_by_their_names_in_a_config(given, replicates, shards):
    traits = traits_named(given)
    assert (traits.replicates, traits.shards) == (replicates, shards)
