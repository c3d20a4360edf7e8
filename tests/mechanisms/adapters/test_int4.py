"""Weights in int4: rounding, bytes, gradients, and QA-LoRA's merge into the zero points."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import merge_adapters
from lit_efficient.mechanisms.adapters.int4 import (
    Int4Linear,
    codes_on_grid,
    dequantize_groups,
    quantize_groups,
    unpack_codes,
)
from lit_efficient.mechanisms.adapters.low_rank import add_low_rank
from lit_efficient.mechanisms.adapters.merge import dequantize_layers
from lit_efficient.mechanisms.adapters.quantized import quantize_linear, stored_bytes


def _adapted(dtype: torch.dtype) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    layer = quantize_linear(nn.Linear(64, 24), "int4", group_size=16)
    root = nn.Sequential(layer).to(dtype)
    add_low_rank(layer, "0", rank=3, alpha=6.0, variant="qalora")
    assert layer.lora_A.shape == (3, 4)
    with torch.no_grad():
        layer.lora_B.normal_()
        layer.lora_A.normal_()
    layer.to(dtype)
    return root, torch.randn(5, 64, dtype=dtype)


def test_codes_round_trip_and_lie_within_half_a_step() -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 24)
    weight[0, :8] = 0.25  # a constant group
    packed, scale, zero = quantize_groups(weight, 8)
    codes = unpack_codes(packed)
    assert packed.shape == (7, 12)
    assert scale.shape == zero.shape == (7, 3)
    groups = codes[1:].unflatten(1, (-1, 8))
    assert (groups.amin(-1) == 0).all()
    assert (groups.amax(-1) == 15).all()
    back = dequantize_groups(packed, scale, zero)
    error = (back - weight).abs().unflatten(1, (-1, 8)).amax(-1)
    assert (error <= scale / 2 * (1 + 1e-4)).all()
    assert torch.equal(back[0, :8], weight[0, :8])
    again = quantize_groups(back, 8)
    assert torch.equal(again[0], packed)


@pytest.mark.parametrize("group_size", [16, 32, 128])
def test_bytes_a_weight(group_size: int) -> None:
    layer = quantize_linear(nn.Linear(256, 64), "int4", group_size=group_size)
    assert stored_bytes(layer) / (256 * 64) == 0.5 + 8 / group_size


def test_the_layer_computes_with_the_dequantised_weight_and_saves_no_float_one() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    layer: Any = quantize_linear(linear, "int4", group_size=16)
    x = torch.randn(3, 64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = layer(x)
    weight = layer.dequantized()
    torch.testing.assert_close(y, nn.functional.linear(x, weight, linear.bias), rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * y.detach() @ weight, rtol=1e-5, atol=1e-5)
    assert sum(t.nbytes for t in kept) < weight.nbytes / 2
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), y)
    assert layer(x.bfloat16()).dtype is torch.bfloat16
    narrow = copy.deepcopy(layer).bfloat16()
    assert torch.equal(narrow.weight_zero, layer.weight_zero)
    assert narrow.bias.dtype is torch.bfloat16


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_qalora_merges_into_the_zero_points_exactly(dtype: torch.dtype, tolerance: float) -> None:
    root, x = _adapted(dtype)
    layer: Any = root[0]
    base, codes = Int4Linear.forward(layer, x), layer.weight.clone()
    y = root(x)
    pooled = x.unflatten(-1, (4, 16)).sum(-1)  # the formula, written out
    torch.testing.assert_close(y, base + 2.0 * pooled @ layer.lora_A.T @ layer.lora_B.T, rtol=1e-6, atol=1e-5)
    zero, scale = layer.weight_zero.clone(), layer.weight_scale.clone()
    expected = zero - 2.0 * (layer.lora_B @ layer.lora_A).detach() / scale
    merge_adapters(root)
    assert type(root[0]) is Int4Linear
    assert torch.equal(layer.weight, codes)
    assert torch.equal(layer.weight_scale, scale)
    torch.testing.assert_close(layer.weight_zero, expected.detach(), rtol=1e-6, atol=0)
    norm = y.detach().abs().max()
    torch.testing.assert_close(root(x) / norm, y / norm, rtol=0, atol=tolerance)
    assert set(root.state_dict()) == {"0.weight", "0.weight_scale", "0.weight_zero", "0.bias"}
    plain = dequantize_layers(copy.deepcopy(root))
    assert type(plain[0]) is nn.Linear
    torch.testing.assert_close(plain(x) / norm, y / norm, rtol=0, atol=tolerance)


def test_qalora_is_lora_whose_a_is_constant_over_each_group() -> None:
    root, x = _adapted(torch.float64)
    grouped: Any = root[0]
    plain: Any = quantize_linear(nn.Linear(64, 24), "int4", group_size=16).double()
    plain.load_state_dict({k: v for k, v in grouped.state_dict().items() if not k.startswith("lora_")})
    add_low_rank(plain, "0", rank=3, alpha=6.0)
    plain.double()
    with torch.no_grad():
        plain.lora_A.copy_(grouped.lora_A.repeat_interleave(16, dim=1))
        plain.lora_B.copy_(grouped.lora_B)
    torch.testing.assert_close(plain(x), root(x), rtol=1e-12, atol=1e-12)
    y = grouped(x).square().sum()
    z = plain(x).square().sum()
    a, b = torch.autograd.grad(y, [grouped.lora_A, grouped.lora_B])
    c, d = torch.autograd.grad(z, [plain.lora_A, plain.lora_B])
    torch.testing.assert_close(a, c.unflatten(1, (-1, 16)).sum(-1), rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(b, d, rtol=1e-10, atol=1e-9)


def test_codes_on_a_given_grid_are_the_nearest() -> None:
    generator = torch.Generator().manual_seed(0)
    packed, scale, zero = quantize_groups(torch.randn(3, 16, generator=generator), 8)
    grid = dequantize_groups(packed, scale, zero)
    assert torch.equal(codes_on_grid(grid, scale, zero), packed)
    moved = grid + torch.randn(3, 16, generator=generator)
    steps, offsets = (t.repeat_interleave(8, 1) for t in (scale, zero))
    wanted = moved.clamp(-offsets * steps, (15 - offsets) * steps)
    found = dequantize_groups(codes_on_grid(moved, scale, zero), scale, zero)
    assert ((found - wanted).abs() <= steps / 2 + 1e-6).all()
