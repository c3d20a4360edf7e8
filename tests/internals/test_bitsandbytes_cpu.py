from contextlib import contextmanager

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit
from bitsandbytes.nn import Linear4bit
from torch import nn

from lit_efficient.internals.bitsandbytes_cpu import keep_unpacked, read_any_rows
from lit_efficient.internals.torch_fake import FakeTensorMode
from tests.internals.leaning import leans_on


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@leans_on("bitsandbytes", "nn.Linear4bit.support_avx512bf16_for_cpu", "bitsandbytes_cpu")
def test_weights_stay_as_they_are_in_evaluation():
    network = nn.Sequential(Linear4bit(64, 20, quant_type="nf4"))  # 20: no multiple of 32
    network.to("cpu")
    for layer in network:
        assert layer.support_avx512bf16_for_cpu in (False, True)
        layer.support_avx512bf16_for_cpu = True
    keep_unpacked(network)
    codes = network[0].weight.data.clone()
    with torch.no_grad():
        assert network.eval()(torch.ones(1, 64)).shape == (1, 20)
    assert torch.equal(network[0].weight.data, codes)


@leans_on("bitsandbytes", "torch.ops.bitsandbytes.dequantize_4bit", "bitsandbytes_cpu")
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("sizes", [(8, 16), (5, 7), (24, 80), (4, 64)])
def test_every_number_has_the_scale_of_its_block(kind, sizes):
    read_any_rows.cache_clear()
    with FakeTensorMode(), default_dtype(torch.bfloat16):  # where a plan traces a network under bf16-true
        read_any_rows()
    weight = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    codes, state = quantize_4bit(weight, quant_type=kind, compress_statistics=False)
    numbers = torch.stack([codes >> 4, codes & 15], -1).flatten()[: weight.numel()].long()
    scales = state.absmax.repeat_interleave(64)[: weight.numel()]
    assert torch.equal(
        dequantize_4bit(codes, state).flatten(), get_4bit_type(kind, device="cpu").data[numbers] * scales
    )
