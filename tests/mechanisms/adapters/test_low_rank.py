"""Adapters beside layers of all kinds: start unchanged, merge to the same output, equal peft's numbers."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_efficient import ConfigurationError, LoRA, merge_adapters
from lit_efficient.application import apply
from lit_efficient.mechanisms.adapters import low_rank_product
from lit_efficient.mechanisms.adapters.low_rank import (
    ON_INT4,
    VARIANTS,
    LowRank,
    add_low_rank,
    dora_norm,
    merged_matrix,
)
from lit_efficient.mechanisms.adapters.starts import FROM_WEIGHT
from lit_efficient.mechanisms.adapters.targets import find_targets
from lit_efficient.mechanisms.trials.memory import AllocationMeter, SavedTensors


def _conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(6, 5)


LAYERS: dict[str, Any] = {
    "linear": (lambda: nn.Linear(5, 6), lambda: torch.randn(3, 5)),
    "no_bias": (lambda: nn.Linear(5, 6, bias=False), lambda: torch.randn(2, 3, 5)),
    "conv1d": (_conv1d, lambda: torch.randn(3, 5)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), lambda: torch.randn(2, 4, 7, 7)),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), lambda: torch.randn(2, 4, 5, 5)),
    "embedding": (lambda: nn.Embedding(9, 6, padding_idx=0), lambda: torch.arange(9).view(3, 3)),
}


def _adapted(kind: str, variant: str, *, trained: bool = True) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    make, inputs = LAYERS[kind]
    layer, x = make(), inputs()
    before = layer(x)
    add_low_rank(layer, kind, rank=3, alpha=6.0, variant=variant)
    if trained:
        with torch.no_grad():
            for name, p in layer.named_parameters():
                if name.startswith("lora_"):
                    p.add_(0.3 * torch.randn_like(p))
    return layer, x, before


# Those of quantised layers are in test_int4.py, test_survival.py and test_starts.py, aLoRA in test_activated.py.
FLOAT = [variant for variant in VARIANTS if variant not in (*ON_INT4, "loftq", "alora")]
CASES = [(k, v) for k in LAYERS for v in FLOAT if k != "embedding" or v in ("lora", "rslora")]


@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_starts_as_the_base_bit_for_bit_and_keeps_its_names(kind: str, variant: str) -> None:
    layer, x, before = _adapted(kind, variant, trained=False)
    assert torch.equal(layer(x), before)
    plain = LAYERS[kind][0]()
    assert plain.state_dict().keys() <= layer.state_dict().keys()
    assert isinstance(layer, type(plain))
    assert type(layer).__name__ == type(plain).__name__


@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_merged_equals_unmerged(kind: str, variant: str) -> None:
    layer, x, before = _adapted(kind, variant)
    root = nn.Sequential(layer)
    y = root(x)
    assert not torch.allclose(y, before, atol=1e-2)
    copies = [copy.deepcopy(root), pickle.loads(pickle.dumps(root))]
    assert all(torch.equal(twin(x), y) for twin in copies)
    merge_adapters(root)
    torch.testing.assert_close(root(x), y, rtol=1e-5, atol=1e-5)
    plain = LAYERS[kind][0]()
    assert type(root[0]) is type(plain)
    assert root[0].state_dict().keys() == plain.state_dict().keys()


def test_merging_a_tied_head_unties_it_first() -> None:
    table, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    root = nn.ModuleDict({"table": table, "head": head})
    add_low_rank(head, "head", rank=2, alpha=2.0)
    nn.init.normal_(head.lora_B)
    x = torch.randn(3, 4)
    y, rows = head(x), table.weight.clone()
    merge_adapters(root)
    torch.testing.assert_close(head(x), y, rtol=1e-5, atol=1e-5)
    assert torch.equal(table.weight, rows)


@pytest.mark.parametrize("variant", FLOAT)
def test_equals_peft_in_outputs_and_gradients(variant: str) -> None:
    import peft

    layer, x, _ = _adapted("linear", variant)
    base = nn.Linear(5, 6)
    base.load_state_dict({key: layer.state_dict()[key] for key in ("weight", "bias")})
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["0"], use_dora=variant == "dora", use_rslora=variant == "rslora",
        init_lora_weights=variant if variant in FROM_WEIGHT else True,
    )  # fmt: skip
    theirs = peft.inject_adapter_in_model(config, nn.Sequential(base))[0]
    with torch.no_grad():
        if variant in FROM_WEIGHT:  # signs of singular vectors are arbitrary: compare what they start with
            start = theirs.scaling["default"] * theirs.lora_B["default"].weight @ theirs.lora_A["default"].weight
            torch.testing.assert_close(start, layer.lora_scale * layer.lora_B0 @ layer.lora_A0, rtol=1e-4, atol=1e-5)
        theirs.lora_A["default"].weight.copy_(layer.lora_A)
        theirs.lora_B["default"].weight.copy_(layer.lora_B)
        if variant == "dora":
            theirs.lora_magnitude_vector["default"].weight.copy_(layer.lora_magnitude)
    ours, other = layer(x), theirs(x)
    torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)
    ours.square().sum().backward()
    other.square().sum().backward()
    pairs = [(layer.lora_B, theirs.lora_B)]
    if variant != "lora_fa":
        pairs.append((layer.lora_A, theirs.lora_A))
    pairs += [(layer.lora_magnitude, theirs.lora_magnitude_vector)] if variant == "dora" else []
    for mine, peft_layers in pairs:
        torch.testing.assert_close(mine.grad, peft_layers["default"].weight.grad, rtol=1e-4, atol=1e-5)


def test_dora_keeps_one_output_more_than_lora_for_the_backward_pass() -> None:
    kept = {}
    for variant in ("lora", "dora"):
        net = nn.Sequential(nn.Linear(32, 64))
        apply(net, [LoRA(rank=2, variant=variant, targets=["0"])])
        x = torch.randn(512, 32, requires_grad=True)
        with SavedTensors([x, *net.parameters(), *net.buffers()]) as saved:
            net(x)
        kept[variant] = saved.bytes
    assert kept["dora"] - kept["lora"] <= 4 * (512 * 64 + 3 * 64)


def test_dora_norm_is_the_norm_of_the_sum() -> None:
    torch.manual_seed(0)
    w, a, b = torch.randn(7, 5), torch.randn(3, 5), torch.randn(7, 3)
    expected = (w.double() + 2 * b.double() @ a.double()).norm(dim=1)
    torch.testing.assert_close(dora_norm(w, a, b, 2.0).double(), expected, rtol=1e-6, atol=1e-6)


def test_all_linear_leaves_heads_tied_layers_and_uncalled_layers_out() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8))
    names = [name for name, _ in find_targets(model, "all-linear", who="LoRA")]
    assert [name.rpartition("h.0.")[2] for name in names] == ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    attention = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert [name for name, _ in find_targets(attention, "all-linear", who="LoRA")] == ["1"]
    with pytest.raises(ConfigurationError, match=r"'q_proj' matches none of the 1 modules that it could, .*: 1 "):
        find_targets(attention, ["q_proj"], who="LoRA")


def test_the_draw_depends_on_seed_and_name_alone_and_leaves_the_global_generator() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    state = torch.get_rng_state()
    for layer, (name, seed) in zip(layers, [("a", 0), ("a", 0), ("b", 0), ("a", 1)]):
        add_low_rank(layer, name, rank=2, alpha=2.0, seed=seed)
    assert torch.equal(state, torch.get_rng_state())
    same = [torch.equal(layers[0].lora_A, layer.lora_A) for layer in layers]
    assert same == [True, True, False, False]
    assert all(isinstance(layer, LowRank) for layer in layers)


class Widened(TorchDispatchMode):
    """Counts copies to float32 of as many numbers as an input has."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.count = numbers, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        wide = function is torch.ops.aten._to_copy.default and out.dtype == torch.float32
        self.count += wide and out.numel() == self.numbers
        return out


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_autocast_gets_the_input_as_it_is(kind: str) -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(24, 16) if kind == "linear" else nn.Conv2d(3, 4, 3)
    x = torch.randn(5, 24) if kind == "linear" else torch.randn(2, 3, 6, 6)
    add_low_rank(layer, "layer", rank=2, alpha=4.0)
    nn.init.normal_(layer.lora_B)
    x = x.to(torch.bfloat16)
    a, b, scale = layer.lora_A, layer.lora_B, layer.lora_scale
    with torch.autocast("cpu", torch.bfloat16):
        with Widened(x.numel()) as copies:
            found = layer(x)
        wide = x.float()
        if kind == "linear":
            plain = nn.functional.linear(x, layer.weight, layer.bias)
            wanted = torch.addmm(plain, nn.functional.linear(wide, a), b.mT, alpha=scale)
        else:
            added = nn.functional.conv2d(nn.functional.conv2d(wide, a), b)
            plain = nn.functional.conv2d(x, layer.weight, layer.bias)
            wanted = plain + (scale * added).to(plain.dtype)
    assert copies.count == 0
    assert torch.equal(found, wanted)
    assert layer(x.float()).dtype == torch.float32  # and without autocast in the adapter's own format


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_a_bfloat16_layer_copies_the_factors_and_not_its_input(kind: str) -> None:
    torch.manual_seed(0)
    made: dict[str, Any] = {"dtype": torch.bfloat16}
    layer: Any = nn.Linear(24, 16, **made) if kind == "linear" else nn.Conv2d(3, 4, 3, **made)
    x = torch.randn(5, 24, **made) if kind == "linear" else torch.randn(2, 3, 6, 6, **made)
    add_low_rank(layer, "layer", rank=2, alpha=4.0)
    nn.init.normal_(layer.lora_B)
    with Widened(x.numel()) as copies:
        found = layer(x)
        found.float().square().sum().backward()
    assert copies.count == 0
    assert found.dtype == torch.bfloat16
    wide = copy.deepcopy(layer).float()
    wide.zero_grad()
    expected = wide(x.float())
    expected.square().sum().backward()
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.05)
    for name in ("lora_A", "lora_B"):
        ours, theirs = getattr(layer, name).grad, getattr(wide, name).grad
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_a_column_of_a_narrow_adapter_stands_for_a_group_of_inputs() -> None:
    weight, a, b = torch.randn(4, 6), torch.randn(2, 3), torch.randn(4, 2)
    merged = merged_matrix(weight, {"lora_A": a, "lora_B": b}, 0.5)
    wide = torch.stack([a[:, 0], a[:, 0], a[:, 1], a[:, 1], a[:, 2], a[:, 2]], 1)
    torch.testing.assert_close(merged, weight + 0.5 * b @ wide)


def test_adapters_start_as_the_papers_code_does() -> None:
    layer: Any = nn.Linear(64, 32)
    add_low_rank(layer, "layer", rank=16, alpha=1.0)
    assert not layer.lora_B.any()
    bound = 1 / 8  # Kaiming's uniform distribution with a = sqrt(5) on 64 inputs
    assert layer.lora_A.abs().max() <= bound
    assert layer.lora_A.mean().abs() < 0.05 * bound
    assert layer.lora_A.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_a_merge_takes_two_float32_copies_of_a_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 512, generator=generator).bfloat16()
    added = {"lora_A": torch.randn(4, 512, generator=generator), "lora_B": torch.randn(256, 4, generator=generator)}
    with AllocationMeter() as meter:
        merged = merged_matrix(weight, added, 0.3)
    assert torch.equal(merged, weight.float() + 0.3 * (added["lora_B"] @ added["lora_A"]))
    assert meter.peak < 2.5 * merged.nbytes


class _Sizes(TorchDispatchMode):
    """Records the operators whose result has as many elements as the layer's output."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self.elements and "view" not in func.name():
            self.found.append(func.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("autocast", [False, True])
def test_an_adapter_adds_one_pass_over_the_output(autocast: bool) -> None:
    """Scaling, adding and rounding would each be a pass; the product with ``B`` does them."""
    layer = nn.Linear(6, 10, bias=False).requires_grad_(False)
    add_low_rank(layer, "layer", rank=2, alpha=6.0)
    x = torch.randn(3, 5, 6)
    with _Sizes(3 * 5 * 10) as passes, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(x)
    assert passes.found == ["mm", "addmm"]


class _Pair(nn.Module):
    """Two adapted layers on one input, one of them beside a residual connection."""

    def __init__(self, dtype: torch.dtype, bias: bool) -> None:
        super().__init__()
        self.one = nn.Linear(12, 8, bias=bias, dtype=dtype)
        self.two = nn.Linear(12, 12, bias=bias, dtype=dtype)
        self.requires_grad_(False)
        for name in ("one", "two"):
            add_low_rank(getattr(self, name), name, rank=3, alpha=6.0)
            nn.init.normal_(getattr(self, name).lora_B)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.two(x)
        return torch.cat((self.one(x), self.one(y.sin()), y), -1)


def _outcome(layer: nn.Module, x: torch.Tensor, *, given: bool = True) -> list[torch.Tensor]:
    x = x.detach().requires_grad_(given)
    layer.zero_grad()
    y = layer(x)
    (y.float().sin() * torch.arange(y.shape[-1])).sum().backward()
    return [y.detach(), *([x.grad] if given else []), *(p.grad for p in layer.parameters() if p.requires_grad)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
def test_products_of_an_adapter_equal_those_of_plain_operators(
    how: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    layer = _Pair(dtype, bias)
    x = torch.randn(2, 5, 12, dtype=dtype)
    for given in (True, False):
        found = []
        for used in (True, False):
            if not used:
                monkeypatch.setattr(low_rank_product, "is_differentiated_here", lambda *_: False)
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                found.append(_outcome(layer, x, given=given))
        monkeypatch.undo()
        for ours, plain in zip(*found, strict=True):
            assert ours.dtype == plain.dtype
            limit = 1e-5 if how == "float32" else 0.02
            assert (ours.float() - plain.float()).norm() <= limit * plain.float().norm()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch.func uses it
def test_an_adapter_has_second_derivatives_and_those_of_functional_transforms() -> None:
    torch.manual_seed(0)
    layer = _Pair(torch.float64, True)
    x = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    a, b = layer.one.lora_A, layer.one.lora_B
    assert torch.autograd.gradcheck(lambda *_: layer(x), (x, a, b))
    assert torch.autograd.gradgradcheck(lambda *_: layer(x), (x, a, b))
    direction = torch.randn_like(x)
    slope = torch.func.jvp(layer, (x,), (direction,))[1]
    step = 1e-6 * direction
    torch.testing.assert_close(slope, (layer(x + step) - layer(x - step)) / 2e-6, rtol=1e-6, atol=1e-6)


def test_kept_products_of_a_recomputed_block_are_not_changed_in_place() -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    torch.manual_seed(0)
    layer = _Pair(torch.float32, False)
    x = torch.randn(2, 5, 12)
    plain = _outcome(layer, x)
    own = layer.forward
    context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    layer.forward = lambda x: checkpoint(own, x, use_reentrant=False, context_fn=context)  # type: ignore[method-assign]
    assert all(torch.equal(*pair) for pair in zip(plain, _outcome(layer, x), strict=True))


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("given", "products"), [(False, 3), (True, 5)])
def test_the_backward_pass_of_an_adapter_adds_no_gradients(given: bool, products: int) -> None:
    """Products for h, A and B, and for x one of the layer and one of the adapter, which adds."""
    layer = nn.Linear(12, 8, bias=False).requires_grad_(False)
    add_low_rank(layer, "layer", rank=3, alpha=6.0)
    x = torch.randn(5, 12, requires_grad=given)
    y = layer(x)
    with _Products() as passes:
        y.backward(torch.ones_like(y))
    assert "add" not in passes.names
    assert passes.names.count("mm") + passes.names.count("addmm") == products


class _Own(nn.Linear):
    """Linear layer with a forward of its own, as transformers' Falcon has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_a_network_may_change_the_output_of_an_adapted_layer_in_place() -> None:
    layer = nn.Sequential(_Own(6, 6))
    apply(layer, [LoRA(rank=2, targets=["0"])])
    with torch.no_grad():
        next(p for name, p in layer.named_parameters() if name.endswith("lora_B")).normal_()
    x = torch.randn(2, 3, 6)
    gradients = []
    for add in (torch.Tensor.add, torch.Tensor.add_):
        loss = add(layer(x), x).square().sum()
        gradients.append(torch.autograd.grad(loss, [p for p in layer.parameters() if p.requires_grad]))
    for plain, in_place in zip(*gradients):
        assert torch.equal(plain, in_place)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [_conv1d, lambda: nn.Linear(5, 6), lambda: _Shifted(5, 6)])
def test_adapters_of_layers_of_all_classes_train_under_autocast(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = make().requires_grad_(False)
    add_low_rank(layer, "layer", rank=3, alpha=6.0)
    nn.init.normal_(layer.lora_B, std=0.2)
    x = 0.3 * torch.randn(2, 4, 5)
    plain = _outcome(layer, x)
    with torch.autocast("cpu", dtype):
        y = layer(x)
    assert y.dtype == dtype
    with torch.autocast("cpu", dtype):
        narrow = _outcome(layer, x)
    for ours, exact in zip(narrow, plain, strict=True):
        assert (ours.float() - exact).norm() <= 0.03 * exact.norm()


class _Shifted(nn.Linear):
    """Linear layer of a class of a user."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def test_many_gradients_of_an_adapter_are_computed_at_once() -> None:
    torch.manual_seed(0)
    layer = _Pair(torch.float32, True)
    x = torch.randn(2, 12, requires_grad=True)
    y = layer(x)
    directions = torch.randn(3, *y.shape)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    found = torch.autograd.grad(y, leaves, directions, retain_graph=True, is_grads_batched=True)
    for index, direction in enumerate(directions):
        for ours, alone in zip(found, torch.autograd.grad(y, leaves, direction, retain_graph=True), strict=True):
            torch.testing.assert_close(ours[index], alone)
