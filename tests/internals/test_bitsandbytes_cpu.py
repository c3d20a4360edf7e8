import torch
from bitsandbytes.nn import Linear4bit
from torch import nn

from lit_efficient.internals.bitsandbytes_cpu import keep_unpacked
from tests.internals.leaning import leans_on


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
