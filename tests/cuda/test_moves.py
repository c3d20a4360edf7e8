"""Quantised layers on a GPU that is not there: made on either side, moved, copied, saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

from lit_efficient import QuantizeBase
from lit_efficient.mechanisms.adapters.quantized import dequantize
from tests.cuda.fake_cuda import fake_cuda, on_cuda

FORMATS = ("nf4", "fp4", "int8", "int4")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Before there seems to be a GPU: its import asks torch's build."""
    import_module("bitsandbytes")


def tensors(part: object, seen: set[int]) -> Iterator[Tensor]:
    """All that a module holds, be it a parameter or an attribute of one."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        yield part
    inside = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple | set) else ()
    for value in [*inside, *(vars(part).values() if hasattr(part, "__dict__") and not isinstance(part, type) else ())]:
        yield from tensors(value, seen)


def sides(module: nn.Module) -> set[bool]:
    return {on_cuda(tensor) for part in module.modules() for tensor in tensors(vars(part), set())}


@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_scales_lie_where_the_weight_does(format: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    x = torch.randn(3, 64)
    ours = copy.deepcopy(plain)
    QuantizeBase(format, skip=()).transform(ours)
    expected, weights = ours(x), dequantize(ours[2])
    unused = copy.deepcopy(plain)
    QuantizeBase(format, skip=()).transform(unused)
    with fake_cuda():
        there = copy.deepcopy(plain).cuda()
        QuantizeBase(format, skip=()).transform(there)
        found = [there(x.cuda())]
        # A copy of a layer that has not run yet, one of a layer that has, and what was loaded into both.
        for moved in (copy.deepcopy(unused).cuda(), copy.deepcopy(ours).cuda(), copy.deepcopy(there)):
            assert sides(moved) == {True}
            found.append(moved(x.cuda()))
            assert torch.equal(dequantize(moved[2]).cpu(), weights)
        for moved in (unused.cuda(), copy.deepcopy(there)):
            for p in moved.parameters():
                p.data = torch.zeros_like(p)
            moved.load_state_dict(there.state_dict())
            found.append(moved(x.cuda()))
        assert sides(there) == {True}
        assert all(torch.equal(y, found[0]) for y in found)
        there.cpu()
    assert sides(there) == {False}
    assert torch.equal(there(x), expected)
