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


def _calls():
    """A call of each operator for which autocast has a kernel for CUDA and none for a CPU, by its name."""
    from torch import linalg

    def narrow(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16)

    def wide(*shape):
        return torch.empty(*shape)

    one, matrix, image = narrow(8), narrow(4, 8), {n: narrow(1, 1, *(4,) * n) for n in (1, 2, 3)}
    index = torch.zeros(4, dtype=torch.int64)
    aten = torch.ops.aten
    calls = {name: lambda name=name: getattr(torch, name)(one) for name in ("acos", "asin", "cosh", "erfinv", "exp")}
    calls |= {name: lambda name=name: getattr(torch, name)(one) for name in ("expm1", "log", "log10", "log2", "log1p")}
    calls |= {name: lambda name=name: getattr(torch, name)(one) for name in ("reciprocal", "rsqrt", "sinh", "tan")}
    calls |= {
        "pow.Tensor_Scalar": lambda: one**3,
        "pow.Tensor_Tensor": lambda: one**one,
        "pow.Scalar": lambda: 3**one,
        "softplus": lambda: F.softplus(one),
        "logsumexp": lambda: one.logsumexp(0),
        "rms_norm": lambda: F.rms_norm(matrix, (8,), one),
        "layer_norm": lambda: F.layer_norm(matrix, (8,), wide(8)),
        "native_layer_norm": lambda: torch.native_layer_norm(matrix, (8,), one, one, 1e-5)[0],
        "group_norm": lambda: F.group_norm(matrix, 2, wide(8)),
        "frobenius_norm.dim": lambda: aten.frobenius_norm.dim(matrix, [1]),
        "nuclear_norm": lambda: aten.nuclear_norm(matrix),
        "nuclear_norm.dim": lambda: aten.nuclear_norm.dim(matrix, [0, 1]),
        "norm.Scalar": lambda: aten.norm.Scalar(one),
        "norm.ScalarOpt_dim": lambda: aten.norm.ScalarOpt_dim(matrix, 2, [1]),
        "renorm": lambda: matrix.renorm(2, 0, 1.0),
        "cosine_similarity": lambda: F.cosine_similarity(matrix, matrix),
        "dist": lambda: torch.dist(one, one),
        "pdist": lambda: F.pdist(matrix),
        "softmax.int": lambda: one.softmax(0),
        "log_softmax.int": lambda: one.log_softmax(0),
        "sum": one.sum,
        "sum.dim_IntList": lambda: matrix.sum(1),
        "cumsum": lambda: one.cumsum(0),
        "cumprod": lambda: one.cumprod(0),
        "linalg_vector_norm": lambda: linalg.vector_norm(one),
        "linalg_matrix_norm": lambda: linalg.matrix_norm(wide(4, 8), 2),
        "linalg_matrix_norm.str_ord": lambda: linalg.matrix_norm(wide(4, 8)),
        "addmv": lambda: torch.addmv(wide(4), wide(4, 8), wide(8)),
        "addr": lambda: torch.addr(wide(4, 8), wide(4), wide(8)),
        "mv": lambda: wide(4, 8).mv(wide(8)),
        "chain_matmul": lambda: aten.chain_matmul([wide(4, 8), wide(8, 4)]),
        "linalg_multi_dot": lambda: linalg.multi_dot([wide(4, 8), wide(8, 4)]),
        "einsum": lambda: torch.einsum("ab,cb->ac", wide(4, 8), wide(4, 8)),
        "addcdiv": lambda: torch.addcdiv(one, wide(8), one),
        "addcmul": lambda: torch.addcmul(one, wide(8), one),
        "atan2": lambda: torch.atan2(one, wide(8)),
        "bilinear": lambda: F.bilinear(matrix, wide(4, 8), wide(3, 8, 8)),
        "cross": lambda: torch.cross(narrow(3), wide(3), 0),
        "dot": lambda: one.dot(wide(8)),
        "vdot": lambda: one.vdot(wide(8)),
        "index_put": lambda: one.index_put((index,), wide(4)),
        "tensordot": lambda: torch.tensordot(matrix, wide(4, 8), [[1], [1]]),
        "scatter_add": lambda: one.scatter_add(0, index, wide(4)),
    }
    for kind, n in (("nearest1d", 1), ("nearest2d", 2), ("nearest3d", 3), ("linear1d", 1), ("bilinear2d", 2)):
        mode = kind[:-2]
        calls[f"upsample_{kind}"] = lambda n=n, mode=mode: F.interpolate(image[n], scale_factor=2, mode=mode)
    calls["upsample_trilinear3d"] = lambda: F.interpolate(image[3], scale_factor=2, mode="trilinear")
    calls["upsample_bicubic2d"] = lambda: F.interpolate(image[2], scale_factor=2, mode="bicubic")
    for mode in ("bilinear", "bicubic"):
        calls[f"_upsample_{mode}2d_aa"] = lambda mode=mode: F.interpolate(image[2], (2, 2), mode=mode, antialias=True)
    for n in (1, 2, 3):
        calls[f"_upsample_nearest_exact{n}d"] = lambda n=n: F.interpolate(image[n], size=8, mode="nearest-exact")
    return calls


def _types(device):
    """Types of the results under autocast."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)  # the context of autocast would look for a GPU
    torch.set_autocast_dtype(device, torch.bfloat16)
    try:
        return {name: call().dtype for name, call in _calls().items()}
    finally:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


@pytest.mark.filterwarnings("ignore")
@leans_on(
    "torch",
    "torch._C._dispatch_get_all_op_names, _upsample_bilinear2d_aa, _upsample_bicubic2d_aa, _convolution, "
    "_scaled_dot_product_flash_attention, _thnn_fused_gru_cell, _thnn_fused_lstm_cell",
    "torch_as_cuda",
)
def test_every_operator_gets_the_type_that_autocast_of_this_torch_gives_it_on_cuda():
    """Torch's own autocast acts on fake CUDA tensors, without a GPU. A new torch with other lists fails here."""
    from lit_efficient.internals import torch_as_cuda

    def has(key, name):
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    alone = {name[6:] for name in names if has("AutocastCUDA", name) and not has("AutocastCPU", name)}
    calls = _calls()
    assert set(calls) | set(torch_as_cuda._LEFT) == alone
    assert {name for kinds, _ in torch_as_cuda._LISTS for name in kinds} == set(calls)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        theirs = _types("cuda")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, as_cuda(), mode:
        ours = _types("cpu")
    assert ours == theirs
