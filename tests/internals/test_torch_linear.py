"""Linear layers by oneDNN: torch's numbers, only where nothing but its numbers is wanted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_efficient.internals.torch_linear import linear_by_onednn
from tests.internals.leaning import leans_on
from tests.internals.test_torch_operators import operators_of

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def _by_onednn(layer: nn.Module, x: torch.Tensor) -> bool:
    with linear_by_onednn():
        return any(str(one).startswith("mkldnn") for one in operators_of(lambda: layer(x)))


@needs_onednn
@leans_on("torch", "ops.mkldnn._linear_pointwise", "torch_linear")
@pytest.mark.parametrize("bias", [False, True])
def test_large_layers_have_torchs_numbers(bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    layer = nn.Linear(512, 512, bias=bias)
    inputs = [torch.randn(shape, generator=draw) for shape in ((8, 1, 512), (512,), (0, 512), (2, 3, 40, 512))]
    strided = torch.randn(8, 1024, generator=draw)
    with torch.no_grad():
        for x in (*inputs, strided[:, ::2], strided[:1, :512].expand(8, -1), inputs[0].mT.contiguous().mT):
            assert _by_onednn(layer, x)
            with linear_by_onednn():
                found = layer(x)
            torch.testing.assert_close(found, layer(x), atol=1e-5, rtol=1e-5)


@needs_onednn
def test_gradients_other_dtypes_small_and_compiled_layers_are_left_to_torch() -> None:
    own = F.linear
    layer = nn.Linear(512, 512)
    x = torch.ones(2, 512)
    assert not _by_onednn(layer, x)
    with linear_by_onednn():
        layer(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        assert not _by_onednn(nn.Linear(256, 512), x[:, :256])
        assert not _by_onednn(nn.Linear(512, 512, dtype=torch.float64), x.double())
        with torch.autocast("cpu", torch.bfloat16), linear_by_onednn():
            assert layer(x).dtype == torch.bfloat16
        graphs: list[str] = []

        def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
            graphs.append(graph.code)
            return graph

        with linear_by_onednn():
            torch.compile(layer, backend=backend)(x)
        assert len(graphs) == 1
        assert "mkldnn" not in graphs[0]
    assert F.linear is own
