"""What fakes that stand for CUDA's tensors keep, and that nothing of it stays."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_efficient.internals.torch_as_cuda import as_cuda, kind_of
from lit_efficient.internals.torch_fake import FakeTensorMode
from tests.internals.leaning import leans_on


def kept(call):
    """Shapes and types of what autograd keeps."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append((tuple(x.shape), x.dtype)) or x, lambda x: x):
        out = call()
    return out, found


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch's own
@leans_on("torch", "torch.ops.aten._fused_rms_norm, torch.library.Library._destroy", "torch_as_cuda")
def test_a_norm_keeps_what_one_kernel_keeps():
    with FakeTensorMode() as mode, as_cuda(), mode:
        norm, x = nn.RMSNorm(8, dtype=torch.bfloat16), torch.ones(2, 4, 8, dtype=torch.bfloat16, requires_grad=True)
        out, found = kept(lambda: norm(x))
        assert found == [((2, 4, 8), torch.bfloat16), ((8,), torch.bfloat16), ((2, 4, 1), torch.float32)]
        out.sum().backward()
        assert (x.grad.dtype, norm.weight.grad.shape) == (torch.bfloat16, (8,))
        _, found = kept(lambda: F.rms_norm(x, (8,), torch.ones(8, requires_grad=True)))  # another type: in pieces
        assert ((2, 4, 8), torch.float32) in found
    assert kind_of(torch.device("cpu")) == "cpu"


@leans_on(
    "torch",
    "torch._C._dispatch_has_kernel_for_dispatch_key, torch._C._ExcludeDispatchKeyGuard, operator._schema",
    "torch_as_cuda",
)
def test_autocast_widens_what_it_widens_on_cuda():
    x = torch.ones(2, 8, dtype=torch.bfloat16)

    def types():
        with torch.autocast("cpu", torch.bfloat16):
            return [one.dtype for one in (nn.LayerNorm(8)(x), x.softmax(-1), x.sum(), x.pow(2), nn.Linear(8, 8)(x))]

    with as_cuda():
        assert types() == [torch.float32] * 4 + [torch.bfloat16]
        with torch.autocast("cpu", torch.bfloat16):
            assert x.sum(dtype=torch.bfloat16).dtype == torch.bfloat16
            assert x.softmax(-1, torch.float64).dtype == torch.float64
    assert types() == [torch.bfloat16] * 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func
@leans_on(
    "torch",
    "torch._C, torch._subclasses",
    "torch_as_cuda",
)
def test_a_norm_of_values_is_torch_s_own_and_has_all_its_derivatives():
    x = torch.linspace(-1, 2, 16).view(2, 8).requires_grad_()
    weight = torch.linspace(1, 2, 8).requires_grad_()

    def derivatives():
        out = F.rms_norm(x, (8,), weight)
        first = torch.autograd.grad(out.square().sum(), (x, weight), create_graph=True)
        tangent = torch.func.jvp(lambda x: F.rms_norm(x, (8,), weight), (x,), (x.detach() + 1,))[1]
        return out, *first, *torch.autograd.grad(first[0].square().sum(), (x, weight)), tangent

    expected = derivatives()
    with as_cuda():
        torch.testing.assert_close(derivatives(), expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, as_cuda(), mode:
        x, weight = (torch.ones(one.shape, requires_grad=True) for one in (x, weight))
        assert [one.shape for one in derivatives()] == [one.shape for one in expected]
