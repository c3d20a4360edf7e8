import torch

from tests.internals.leaning import leans_on


def pair():
    return [torch.tensor([1.0, -2.0]), torch.tensor([[3.0]])]


def same(tensors, numbers):
    assert [tensor.flatten().tolist() for tensor in tensors] == numbers


@leans_on("torch", "torch._foreach_add_", "torch_foreach")
def test_add():
    from lit_efficient.internals.torch_foreach import foreach_add_

    tensors = pair()
    foreach_add_(tensors, pair(), alpha=2)
    same(tensors, [[3.0, -6.0], [9.0]])


@leans_on("torch", "torch._foreach_copy_", "torch_foreach")
def test_copy_into_another_format():
    from lit_efficient.internals.torch_foreach import foreach_copy_

    tensors = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1, 1)]
    foreach_copy_(tensors, pair())
    same(tensors, [[1.0, -2.0], [3.0]])


@leans_on("torch", "torch._foreach_lerp", "torch_foreach")
def test_lerp_anew():
    from lit_efficient.internals.torch_foreach import foreach_lerp

    same(foreach_lerp(pair(), [torch.zeros(2), torch.zeros(1, 1)], weight=0.5), [[0.5, -1.0], [1.5]])


@leans_on("torch", "torch._foreach_lerp_", "torch_foreach")
def test_lerp_in_place():
    from lit_efficient.internals.torch_foreach import foreach_lerp_

    tensors = pair()
    foreach_lerp_(tensors, [torch.zeros(2), torch.zeros(1, 1)], 0.5)
    same(tensors, [[0.5, -1.0], [1.5]])


@leans_on("torch", "torch._foreach_mul_", "torch_foreach")
def test_multiply():
    from lit_efficient.internals.torch_foreach import foreach_mul_

    tensors = pair()
    foreach_mul_(tensors, 2.0)
    same(tensors, [[2.0, -4.0], [6.0]])


@leans_on("torch", "torch._foreach_sign_", "torch_foreach")
def test_sign():
    from lit_efficient.internals.torch_foreach import foreach_sign_

    tensors = pair()
    foreach_sign_(tensors)
    same(tensors, [[1.0, -1.0], [1.0]])


@leans_on("torch", "torch._foreach_addcmul_", "torch_foreach")
def test_add_a_product():
    from lit_efficient.internals.torch_foreach import foreach_addcmul_

    tensors = pair()
    foreach_addcmul_(tensors, pair(), pair(), value=0.5)
    same(tensors, [[1.5, 0.0], [7.5]])


@leans_on("torch", "torch._foreach_div", "torch_foreach")
def test_divide_anew():
    from lit_efficient.internals.torch_foreach import foreach_div

    same(foreach_div(pair(), pair()), [[1.0, 1.0], [1.0]])


@leans_on("torch", "torch._foreach_div_", "torch_foreach")
def test_divide_in_place():
    from lit_efficient.internals.torch_foreach import foreach_div_

    tensors = pair()
    foreach_div_(tensors, 2.0)
    same(tensors, [[0.5, -1.0], [1.5]])


@leans_on("torch", "torch._foreach_sqrt", "torch_foreach")
def test_square_root():
    from lit_efficient.internals.torch_foreach import foreach_sqrt

    same(foreach_sqrt([torch.tensor([4.0, 0.0]), torch.tensor([9.0])]), [[2.0, 0.0], [3.0]])


@leans_on("torch", "torch._foreach_norm", "torch_foreach")
def test_norms_in_another_format():
    from lit_efficient.internals.torch_foreach import foreach_norm

    norms = foreach_norm([torch.tensor([300.0, 400.0], dtype=torch.float16)], 2.0, dtype=torch.float32)
    assert [(norm.item(), norm.dtype) for norm in norms] == [(500.0, torch.float32)]
