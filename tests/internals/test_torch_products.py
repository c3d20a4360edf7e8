"""Products with a wide result: float32 sums on a GPU, and FLOPs that counters can read."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lit_efficient.internals.torch_as_cuda import as_cuda
from lit_efficient.internals.torch_products import add_product, product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_products_and_sums_equal_those_of_float32(dtype: torch.dtype, scale: float) -> None:
    a, b, more = torch.randn(9, 5).to(dtype), torch.randn(5, 7).to(dtype), torch.randn(5, 7).to(dtype)
    limit = 1e-5 if dtype == torch.float32 else 0.02
    found = product(a, b, torch.float32, scale)
    assert (found - scale * a.float() @ b.float()).norm() <= limit * found.norm()
    total = None
    for factor in (b, more):
        total = add_product(total, a, factor, torch.float32)
    assert total is not None
    assert total.dtype == torch.float32
    assert (total - a.float() @ (b.float() + more.float())).norm() <= limit * total.norm()


def test_on_a_gpu_the_sums_are_written_in_float32_and_counted() -> None:
    with torch.no_grad(), as_cuda(), FakeTensorMode(), FlopCounterMode(display=False) as counter:
        a, b = torch.empty(9, 5, dtype=torch.bfloat16), torch.empty(5, 7, dtype=torch.bfloat16)
        total = torch.empty(9, 7)
        found = [product(a, b, torch.float32), product(a, b, torch.float32, 2.0)]
        found += [add_product(None, a, b, torch.float32), add_product(total, a, b, torch.float32)]
    assert all(one.dtype == torch.float32 and one.shape == (9, 7) for one in found)
    assert found[-1] is total
    assert counter.get_total_flops() == len(found) * 2 * 9 * 5 * 7
