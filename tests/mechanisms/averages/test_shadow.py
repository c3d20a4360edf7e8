"""Averages that change places with the weights: no third copy, the same memory, and whatever interrupts is undone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_efficient import EMA, CheckpointAverage
from lit_efficient.mechanisms.averages.weights import whole
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from tests.support import assert_equal, weights


class Interrupt(TorchDispatchMode):
    """An operator, by its number, that is not run, or run and not returned from."""

    def __init__(self, at: int, behind: bool) -> None:
        super().__init__()
        self.left, self.behind = at, behind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        found = func(*args, **(kwargs or {})) if self.left or self.behind else None
        if not self.left:
            raise KeyboardInterrupt
        return found


def trained(kind: type, width: int = 8) -> tuple[Any, nn.Module]:
    """Four layers, one in bfloat16, and an average that is far from them."""
    technique = kind(last_k=1, every_n_steps=1) if kind is CheckpointAverage else kind(0.5)
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    module[1].bfloat16()
    trainer: Any = SimpleNamespace(global_step=0)
    technique.on_train_start(trainer, module)
    for trainer.global_step in (1, 2):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
        technique.on_train_batch_end(trainer, module, None, None, 0)
    with torch.no_grad():
        module[0].weight[0, 0] = torch.nan
        module[0].weight[0, 1] = -0.0
    return technique, module


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: whole(tensor).clone().view(torch.uint8) for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", [EMA, CheckpointAverage])
def test_one_tensor_at_a_time_is_kept_beside_both(kind: type) -> None:
    technique, module = trained(kind, 256)
    average, raw = bits(technique.average(module)), bits(weights(module))
    places = [p.data_ptr() for p in module.parameters()]
    layer = 256 * 256 * 4
    meter = AllocationMeter([*module.parameters(), *technique.average(module).values()])
    before = meter.live
    with meter:
        technique.swap_in(module)
    assert_equal(bits(technique.average(module)), average)
    assert [p.data_ptr() for p in module.parameters()] == places
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    assert_equal(bits(weights(module)), bits({n: t.to(dtypes[n]) for n, t in technique.average(module).items()}))
    with meter:
        technique.swap_out(module)
    assert meter.live == before
    assert before + layer < meter.peak < before + 2 * layer  # one on its way, and the raw one of another format
    assert_equal(bits(weights(module)), raw)
    assert_equal(bits(technique.average(module)), average)


@pytest.mark.parametrize("behind", [False, True])
def test_whatever_operator_is_interrupted_both_sets_are_whole(behind: bool) -> None:
    technique, module = trained(EMA)
    average, raw = bits(technique.average(module)), bits(weights(module))
    interrupted, operators = 0, 0
    while interrupted == operators:
        operators += 1
        try:
            with Interrupt(operators, behind):
                technique.swap_in(module)
                technique.swap_out(module)
        except KeyboardInterrupt:
            interrupted += 1
        assert_equal(bits(technique.average(module)), average)
        technique.swap_out(module)
        assert_equal(bits(weights(module)), raw)
        assert_equal(bits(technique.average(module)), average)
        technique.swap_in(module)
        technique.swap_out(module)
        assert_equal(bits(weights(module)), raw)
    assert interrupted > 20


def test_an_average_that_is_replaced_meanwhile_is_left_alone() -> None:
    technique, module = trained(EMA)
    raw, saved = bits(weights(module)), {"average": {}, "updates": 3}
    technique.swap_in(module)
    technique.load_state_dict({**saved, "average": {n: torch.ones_like(p) for n, p in module.named_parameters()}})
    technique.swap_out(module)
    assert_equal(bits(weights(module)), raw)
    assert all(bool((tensor == 1).all()) for tensor in technique.average(module).values())
    technique.swap_in(module)
    technique.forget()
    technique.swap_out(module)
    assert_equal(bits(weights(module)), raw)


@pytest.mark.parametrize("apart", [0, 24])
def test_two_parameters_of_one_memory_come_back(apart: int) -> None:
    technique, module = trained(EMA)
    memory = torch.randn(64 + apart)
    module[2].weight.data, module[3].weight.data = memory[:64].view(8, 8), memory[apart:].view(8, 8)
    average, raw = bits(technique.average(module)), bits(weights(module))
    technique.swap_in(module)
    checkpoint = {"state_dict": dict(module.state_dict()), "callbacks": {}}
    technique.write_checkpoint(checkpoint, module)
    assert_equal(bits(checkpoint["state_dict"]), raw)
    technique.swap_out(module)
    assert_equal(bits(weights(module)), raw)
    assert_equal(bits(technique.average(module)), average)


def test_a_parameter_that_is_made_anew_of_its_memory_takes_nothing_from_the_average() -> None:
    technique, module = trained(EMA)
    average, raw = bits(technique.average(module)), bits(weights(module))
    technique.swap_in(module)
    module[2].weight = nn.Parameter(module[2].weight.data, requires_grad=False)
    technique.swap_out(module)
    assert_equal(bits(weights(module)), raw)
    assert_equal(bits(technique.average(module)), average)
    assert technique.average(module)["2.weight"].data_ptr() != module[2].weight.data_ptr()
