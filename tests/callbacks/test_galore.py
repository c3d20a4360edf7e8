"""GaLore: what it says of a module, which matrices it takes, resume in the middle of a period, refusals."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn

from lit_efficient import APOLLO, ConfigurationError, ConflictError, GaLore
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from lit_efficient.optimizers.low_rank_adamw import LowRankAdamW
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.state_bytes import measure_state_bytes
from tests.support import Net, Toy, data, trainer

RANK = 4


def moments_live_in_a_subspace(run: Run) -> None:
    """Moments of linear layers, in the run and in the checkpoint, have four rows; bases are orthonormal."""
    (optimizer,) = run.trainer.optimizers
    for states in (optimizer.state_dict()["state"], run.checkpoint["optimizer_states"][0]["state"]):
        seen = [state for state in states.values() if "projector" in state]
        assert seen
        for state in seen:
            basis = state["projector"]
            assert state["exp_avg"].shape == state["exp_avg_sq"].shape
            assert RANK in state["exp_avg"].shape
            assert state["exp_avg"].numel() * basis.numel() >= basis.numel() ** 2  # the shorter side is projected
            torch.testing.assert_close(basis.mT @ basis, torch.eye(RANK).expand(*basis.shape[:-2], -1, -1))


ROW = Row(
    lambda: GaLore(rank=RANK, update_every=3),
    moments_live_in_a_subspace,
    beside={"ReplaceHead": lambda: GaLore(rank=RANK, update_every=3, targets=["head"])},
)


class Experts(nn.Module):
    """What `expert_stacks` takes for experts: three-dimensional weights of as many."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, 32))


def rewritten(module: nn.Module, technique: Any, **groups: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return optimizer, technique.rewrite_optimizer(optimizer, module)


def test_all_linear_takes_linear_layers_and_experts_but_no_embedding() -> None:
    module = nn.ModuleDict({"table": nn.Embedding(50, 16), "up": nn.Linear(16, 32), "experts": Experts()})
    _, report = rewritten(module, GaLore(rank=4))
    assert report.modules == ("up", "experts")
    assert report.parameters == 16 * 32 * 4
    _, report = rewritten(module, GaLore(rank=4, targets=["table", "experts.up"]))
    assert report.modules == ("table", "experts")
    with pytest.raises(ConfigurationError, match=r"GaLore: the pattern 'down' matches none .* end in: "):
        rewritten(module, GaLore(rank=4, targets=["down"]))


@pytest.mark.parametrize("technique", [GaLore, APOLLO, partial(GaLore, basis_bits=4)])
def test_the_report_has_the_bytes_that_the_states_take(technique: Any) -> None:
    module = GPT(GPTConfig(300, dim=64, depth=2, num_heads=4, max_length=16, tie_embeddings=False))
    optimizer, report = rewritten(module, technique(rank=16, bits=8))
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert measure_state_bytes(optimizer) == report.details["state_bytes"]
    assert report.bytes_saved == sum(8 * p.numel() for p in module.parameters()) - report.details["state_bytes"]
    assert optimizer.state[module.get_parameter("embedding.weight")]["exp_avg"].dtype == torch.float32
    assert " in 16 dimensions; " in report.summary


def test_what_is_frozen_has_nothing_to_project_and_what_another_optimizer_holds_is_left() -> None:
    module = Net()
    first = torch.optim.AdamW(module.stem.parameters())
    other = torch.optim.SGD(module.blocks.parameters(), lr=0.1)
    assert GaLore(rank=4, targets=["stem"]).rewrite_optimizer(other, module).summary == (
        "SGD: holds none of the targets and does not change"
    )
    GaLore(rank=4, targets=["stem"]).rewrite_optimizer(first, module)
    assert (type(first), type(other)) == (LowRankAdamW, torch.optim.SGD)
    module.stem.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"none of the 1 matrices that targets=\['stem'\] names trains"):
        rewritten(module, GaLore(rank=4, targets=["stem"]))


@pytest.mark.parametrize("arguments", [{"basis_bits": 8}, {"similarity": 1.5}])
def test_arguments_of_q_galore_are_checked(arguments: dict[str, Any]) -> None:
    allowed = {"basis_bits": "one of 32, 4, got 8", "similarity": "at least 0 and at most 1 or null, got 1.5"}
    (name,) = arguments
    with pytest.raises(ConfigurationError, match=f"GaLore: {name} must be {allowed[name]}"):
        GaLore(**arguments)


def test_sharded_and_flattened_parameters_are_refused_before_the_run() -> None:
    for strategy, name in ((ModelParallelStrategy(), "ModelParallelStrategy"), (FSDPStrategy(), "FSDPStrategy")):
        for technique in (GaLore(), APOLLO()):
            with pytest.raises(ConflictError, match=f"whole matrices, and with {name} no process has one"):
                technique.check(SimpleNamespace(strategy=strategy), Toy())


@pytest.mark.parametrize("trains", [True, False])
def test_int8_weights_of_torchao_are_refused_unless_they_are_frozen(trains: bool) -> None:
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    codes = Int8QuantizedTrainingLinearWeight.from_float(module[0].weight)
    module[0].weight = nn.Parameter(codes, requires_grad=trains)
    if trains:
        message = (
            "GaLore: weights of the class Int8QuantizedTrainingLinearWeight lack .* INT8 weights are not supported"
        )
        with pytest.raises(ConfigurationError, match=message):
            rewritten(module, GaLore(rank=4, targets=["1"]))
        return
    optimizer, _ = rewritten(module, GaLore(rank=4, targets=["1"]))
    module(torch.randn(3, 16)).sum().backward()
    optimizer.step()
    assert "projector" in optimizer.state[module[1].weight]


def test_beside_bf16_mixed_clipping_and_accumulation_it_trains() -> None:
    module = Toy()
    run = {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 2}
    fitted = trainer([GaLore(rank=4, update_every=1)], **run)
    before = module.net.stem.weight.detach().clone()
    fitted.fit(module, data(), data())
    assert not torch.equal(before, module.net.stem.weight)
    assert fitted.optimizers[0].state[module.net.stem.weight]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank must be a whole number of at least 1, got 0"),
        ({"update_every": 2.5}, "update_every must be a whole number of at least 1, got 2.5"),
        ({"scale": 0.0}, "scale must be above 0, got 0.0"),
        ({"bits": 4}, "bits must be one of 32, 8, got 4"),
    ],
)
@pytest.mark.parametrize("technique", [GaLore, APOLLO])
def test_arguments_are_checked_when_it_is_built(technique: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{technique.__name__}: {message}"):
        technique(**arguments)
