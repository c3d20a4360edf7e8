import torch

from lit_efficient.internals.import_noise import silence_imports
from tests.internals.leaning import leans_on


@leans_on("torchao", "torchao.prototype.mx_formats and torchao.prototype.moe_training.mxfp8_linear.mx_mm", "torchao_mx")
def test_a_product_in_mxfp8_and_that_of_a_frozen_weight_are_torchao_s():
    silence_imports()
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    from lit_efficient.internals.torchao_mx import BlockProduct

    torch.manual_seed(0)
    element = torch.float8_e4m3fn
    kernels = MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH
    for exact in (False, True):
        for rows in (64, 40):  # 40 are padded for the gradient of the weight
            x, weight = torch.randn(rows, 64), torch.randn(96, 64)
            found = {}
            for kind in ("theirs", "ours", "frozen"):
                given, own = x.clone().requires_grad_(), weight.clone().requires_grad_(kind != "frozen")
                if kind == "theirs":
                    padded = torch.nn.functional.pad(given, (0, 0, 0, -rows % 32))
                    how = (element, element, element, 32, KernelPreference.EMULATED, *kernels)
                    y = mx_mm.apply(padded, own, *how, ScaleCalculationMode.RCEIL, exact)[:rows]
                else:
                    y = BlockProduct(True, exact)(given.view(2, -1, 64), own).view(rows, -1)
                y.square().sum().backward()
                found[kind] = y.detach(), given.grad, own.grad
            assert all(torch.equal(one, other) for one, other in zip(found["ours"], found["theirs"], strict=True))
            assert all(torch.equal(one, other) for one, other in zip(found["frozen"][:2], found["theirs"]))
            assert found["frozen"][2] is None
            assert not torch.equal(found["ours"][0], x @ weight.T)
