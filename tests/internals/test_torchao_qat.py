import torch

from lit_efficient.internals.import_noise import silence_imports
from tests.internals.leaning import leans_on

NAMES = (
    "torchao._executorch_ops._quantized_decomposed_quantize_per_channel_group_wrapper, "
    "_fake_quantize_per_channel_group and _fake_quantize_per_token"
)


@leans_on("torchao", NAMES, "torchao_qat")
def test_a_layer_of_codes_computes_what_the_roundings_do():
    silence_imports()
    from lit_efficient.internals.torchao_qat import int4_entries, int4_layer, rounded_activations, rounded_weight

    torch.manual_seed(0)
    weight, x = torch.randn(4, 16), torch.randn(2, 3, 16)
    entries = int4_entries(weight, 8)
    assert entries["weight"].dtype == torch.int8
    assert entries["weight"].unique().numel() <= 16
    wanted = rounded_activations(x) @ rounded_weight(weight, 8).T
    torch.testing.assert_close(int4_layer(entries, None, torch.float32)(x), wanted)
