import torch

from lit_efficient.internals.import_noise import silence_imports
from tests.internals.leaning import leans_on


@leans_on("torchao", "matmul_with_hp_or_float8_args and hp_tensor_to_float8_dynamic", "torchao_float8")
def test_a_product_and_that_of_a_frozen_weight_are_a_float8_linear_s():
    silence_imports()
    from lit_efficient.internals.torchao_float8 import Float8Linear, float8_product, settings_of

    settings = settings_of("rowwise", True)
    linear = torch.nn.Linear(16, 32, bias=False)
    theirs = Float8Linear.from_float(linear, config=settings[0])
    x = torch.randn(3, 16, requires_grad=True)
    (wanted,) = torch.autograd.grad(theirs(x).square().sum(), x)
    for trains in (True, False):
        weight = linear.weight.detach().requires_grad_(trains)
        y = float8_product(x, weight, settings)
        assert torch.equal(y, theirs(x))
        assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], wanted)
