import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.internals.leaning import leans_on


def operators_of(function):
    from lit_efficient.internals.torch_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        found = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.found = (*self.found, func)
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        function()
    return {*seen.found}


@leans_on("torch", "aten._scaled_mm", "torch_operators")
def test_products_are_known():
    from lit_efficient.internals.torch_operators import MATMUL

    x, w = torch.ones(2, 16, 16), torch.ones(16, 16)
    assert operators_of(lambda: w @ w) & {*MATMUL}
    assert operators_of(lambda: F.linear(w, w, w[0])) & {*MATMUL}
    assert operators_of(lambda: torch.bmm(x, x)) & {*MATMUL}
    eighth, one = w.to(torch.float8_e4m3fn), torch.tensor(1.0)
    scaled = operators_of(lambda: torch._scaled_mm(eighth, eighth.t(), one, one, out_dtype=torch.bfloat16))
    assert scaled & {*MATMUL}


KERNELS = ["flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"]
KERNELS += ["fused_attention_overrideable"]


@leans_on("torch", "aten._safe_softmax", "torch_operators")
def test_attention_without_a_kernel_is_known():
    from lit_efficient.internals.torch_operators import ATTENTION_KERNELS

    x = torch.ones(1, 2, 8, 16, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        found = operators_of(lambda: F.scaled_dot_product_attention(x, x, x, is_causal=True))
    assert {ATTENTION_KERNELS[operator] for operator in found & {*ATTENTION_KERNELS}} == {"math"}


OPERATORS = [*(f"aten._scaled_dot_product_{kernel}" for kernel in KERNELS), "torch_attn._varlen_attn"]


@leans_on("torch", ", ".join(OPERATORS), "torch_operators")
def test_attention_is_known():
    from lit_efficient.internals.torch_operators import ATTENTION

    x = torch.ones(1, 2, 8, 16, requires_grad=True)
    assert operators_of(lambda: F.scaled_dot_product_attention(x, x, x, is_causal=True)) & {*ATTENTION}
    assert [str(operator) for operator in ATTENTION] == [f"{name}.default" for name in OPERATORS]


@leans_on("torch", "OpOverload._overloadpacket", "torch_operators")
@leans_on("torch", "OpOverload._schema", "torch_operators")
@leans_on("torch", "torch._ops.OpOverload", "torch_operators")
def test_operators_say_their_names_and_whether_they_write_or_give_a_truth_value():
    from lit_efficient.internals.torch_operators import Overload, base_name, returns_bool, writes

    aten = torch.ops.aten
    assert isinstance(aten.add_.Tensor, Overload)
    assert base_name(aten.add_.Tensor) == "add_"
    assert writes(aten.add_.Tensor)
    assert not writes(aten.add.Tensor)
    assert returns_bool(aten.equal.default)
    assert not returns_bool(aten.eq.Scalar)


@leans_on("torch", "aten._grouped_mm", "torch_operators")
def test_products_of_groups_are_one_operator():
    from lit_efficient.internals.torch_operators import GROUPED_MM, base_name

    assert base_name(GROUPED_MM) == "_grouped_mm"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func
@leans_on("torch", "_C._are_functorch_transforms_active, autograd.forward_ad._current_level", "torch_operators")
def test_transforms_and_forward_mode_are_seen():
    from lit_efficient.internals.torch_operators import transformed

    seen = []

    def doubled(x):
        seen.append(transformed())
        return 2 * x

    doubled(torch.ones(2))
    torch.func.vmap(doubled)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        doubled(torch.ones(2))
    assert seen == [False, True, True]


@leans_on("torch", "_C._functorch.is_legacy_batchedtensor", "torch_operators")
def test_tensors_of_batched_gradients_are_seen():
    from lit_efficient.internals.torch_operators import is_batched

    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    y.register_hook(lambda gradient: seen.append(is_batched(gradient)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [True, False]
