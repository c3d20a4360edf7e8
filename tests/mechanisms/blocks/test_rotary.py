"""Rotary positions by Liger's kernel: found by numbers, equal in value and gradient. Nightly interprets Triton."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import lit_efficient
from lit_efficient import CausalLMConfig
from lit_efficient.application import apply
from lit_efficient.mechanisms.blocks.rotary import Turns, turns_of
from lit_efficient.models.libraries.causal_lm import build
from tests.losses.test_liger_cross_entropy import interpreted
from tests.mechanisms.test_documents import FIELDS, network_of
from tests.models.libraries.test_causal_lm import SMALL
from tests.support import Net

CPU = torch.device("cpu")


def small(kind: str) -> Any:
    if kind in ("gpt", *FIELDS):
        return network_of(kind)
    fields = {name: value for name, value in SMALL.items() if hasattr(CONFIG_MAPPING[kind](), name)}
    return build(CausalLMConfig(config_fields={**fields, "model_type": kind}))


def found(network: nn.Module) -> set[tuple[str, str]]:
    return {pair for part in network.modules() for pair in turns_of(part, CPU).items()}


def both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """As in transformers."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    first, second = (
        (x, torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)) for x in (query, key)
    )
    return first[0] * cos + first[1] * sin, second[0] * cos + second[1] * sin


class Layer(nn.Module):
    """Its forward calls the function above."""

    def forward(self, query: Tensor, key: Tensor, *tables: Tensor, more: float = 1.0) -> tuple[Tensor, Tensor]:
        return both(query * more, key, *tables)


def test_without_the_kernel_nothing_is_found_or_changed() -> None:
    network = network_of("llama")
    assert not any(isinstance(part, Turns) for part in network.modules())
    apply(network, [lit_efficient.MemoryEfficientLayers("torch")])
    assert not any(isinstance(part, Turns) for part in network.modules())


@interpreted
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("gpt", {("rotate", "one")}),
        ("llama", {("apply_rotary_pos_emb", "both")}),
        ("qwen2", {("apply_rotary_pos_emb", "both")}),
        ("qwen3", {("apply_rotary_pos_emb", "both")}),
        ("opt", set()),
        ("gpt_oss", set()),  # its pairs are of another kind of table
    ],
)
def test_networks_give_the_same_by_the_kernel(kind: str, names: set[Any]) -> None:
    network = small(kind).train()
    assert found(network) == names
    assert found(Net()) == set()
    if not names:
        return
    changed = deepcopy(network)
    report = apply(changed, [lit_efficient.MemoryEfficientLayers("liger")])["MemoryEfficientLayers"]
    assert "2 layers rotate queries and keys by Liger's kernel" in report.summary
    assert list(network.state_dict()) == list(changed.state_dict())
    ids = torch.arange(64).view(2, 32)
    outs = []
    for each in (network, changed, deepcopy(changed)):
        out = each(ids)
        out = out if isinstance(out, Tensor) else out.logits
        out.square().mean().backward()
        outs.append([out.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
    for more in outs[1:]:
        torch.testing.assert_close(outs[0], more, rtol=1e-4, atol=1e-5)


class Number(float):
    """A number as Triton's compiler passes it to a kernel. Its interpreter passes a plain float."""

    def to(self, dtype: object) -> Number:
        return self


@pytest.fixture
def interpreted_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run Liger's norm: it lacks the square root's inverse, and the dtype of numbers.

    It also multiplies and adds the bits of bfloat16 numbers as if they were integers, which gives NaN. A GPU computes
    with their values.
    """
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    own = interpreter._implicit_cvt
    builder = interpreter.InterpreterBuilder
    of_bits = builder.binary_op

    def of_values(self: Any, one: Any, two: Any, operation: Any) -> Any:
        if one.dtype.scalar != tl.bfloat16:
            return of_bits(self, one, two, operation)
        wide = [self.cast_impl(each, tl.float32) for each in (one, two)]
        values = torch.from_numpy(of_bits(self, *wide, operation).data)  # the interpreter's own cast truncates
        return interpreter.TensorHandle(values.bfloat16().view(torch.uint16).numpy(), tl.bfloat16)

    monkeypatch.setattr(builder, "binary_op", of_values)
    monkeypatch.setattr(interpreter, "_implicit_cvt", lambda x: Number(x) if isinstance(x, float) else own(x))
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))  # noqa: PLW0108  # replaced in the interpreter


class Passes(TorchDispatchMode):
    """Counts operators of norms, activations and rotations, which Liger's kernels replace."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ in ("mul", "silu", "cat", "pow", "square", "mean", "rsqrt")
        return function(*args, **(kwargs or {}))


@interpreted
@pytest.mark.usefixtures("interpreted_norms")
@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("autocast", [False, True])
def test_recomputed_blocks_use_the_kernels_in_both_passes(kind: str, autocast: bool) -> None:
    network = small(kind).train()
    changed = deepcopy(network)
    checkpointing = lit_efficient.ActivationCheckpointing()
    apply(network, [checkpointing])
    apply(changed, [checkpointing, lit_efficient.MemoryEfficientLayers("liger")])
    ids = torch.arange(64).view(2, 32)
    outs, counts = [], []
    for each in (network, changed):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Passes() as passes:
            out = each(ids)
            out = out if isinstance(out, Tensor) else out.logits
        loss = out.float().square().mean()
        with passes:
            loss.backward()
        outs.append([out.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
        counts.append(passes.count)
    for plain, fused in zip(*outs, strict=True):
        if autocast:
            assert (plain - fused).norm() < 0.02 * plain.norm()
        else:
            torch.testing.assert_close(plain, fused, rtol=1e-4, atol=1e-5)
    assert counts[1] < 0.4 * counts[0], counts


@interpreted
@pytest.mark.parametrize("rows", [1, 2])
def test_nobody_else_s_tensors_change(rows: int) -> None:
    layer, plain = Layer(), Layer()
    apply_to = turns_of(layer, CPU)
    assert apply_to == {"both": "both"}
    lit_efficient.surgery.mix_under(layer, Turns, _fused_turns=apply_to)
    angle = torch.randn(rows, 5, 4)
    tables = [torch.cat((f, f), -1) for f in (angle.cos(), angle.sin())]
    query, key = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (4, 2))
    kept = [x.detach().clone() for x in (query, key, *tables)]
    slopes = []
    for each in (plain, layer):
        turned = each(query, key, *tables, more=2.0)
        loss = sum((x.square() + x).sum() for x in turned) + (turned[0] + query).square().sum()
        slopes.append(torch.autograd.grad(loss, (query, key)))
    torch.testing.assert_close(*slopes)
    assert all(torch.equal(*pair) for pair in zip(kept, (query, key, *tables), strict=True))
    wide = [torch.cat((table, table), -1) for table in tables]  # another width, which the kernel would misread
    with pytest.raises(RuntimeError, match="size of tensor"):
        layer(query, key, *wide)
    halves = [table.half() for table in tables]
    torch.testing.assert_close(layer(query, key, *halves), plain(query, key, *halves))  # the function itself
