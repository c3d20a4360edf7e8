"""Surgery leaves names, copies, pickles and schedules as they were, and raises where it finds nothing."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import ConfigurationError, mix_in
from lit_efficient.surgery import (
    become,
    call_layers,
    endings,
    expert_stacks,
    inputs_first,
    is_sharded,
    local,
    match_modules,
    match_parameters,
    mix_out,
    unmixed,
)
from tests.support import Net


class Double(nn.Module):
    factor: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


class AddOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def test_mix_in_changes_the_forward_and_no_name() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    plain, keys = layer(x), list(layer.state_dict())
    mix_in(layer, Double, factor=2.0)
    assert torch.equal(layer(x), plain * 2)
    assert list(layer.state_dict()) == keys
    assert isinstance(layer, nn.Linear)
    assert type(layer).__name__ == "Linear"
    mix_in(layer, AddOne)
    assert torch.equal(layer(x), plain * 2 + 1)


def test_mixing_in_twice_only_updates_the_attributes() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    plain = layer(x)
    for factor in (2.0, 3.0):
        mix_in(layer, Double, factor=factor)
    assert torch.equal(layer(x), plain * 3)
    other = nn.Linear(3, 3)
    mix_in(other, Double, factor=1.0)
    assert type(other) is type(layer)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_is_equal_and_independent(clone) -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    layer.register_forward_hook(print_nothing)
    mix_in(layer, Double, factor=2.0)
    mix_in(layer, AddOne)
    twin = clone(layer)
    assert type(twin) is type(layer)
    assert torch.equal(twin(x), layer(x))
    before = layer(x)
    with torch.no_grad():
        twin.weight.zero_()
    twin.factor = 5.0
    assert torch.equal(layer(x), before)
    assert len(twin._forward_hooks) == 1


def print_nothing(*_: object) -> None:
    """A hook that can be pickled."""


def test_a_mix_in_with_an_init_is_refused() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()

    with pytest.raises(TypeError, match=r"Wrong\.__init__ would never run"):
        mix_in(nn.Linear(2, 2), Wrong)


def test_match_modules_lists_what_could_match() -> None:
    net = Net()
    assert [name for name, _ in match_modules(net, ["up"], who="T", kind=nn.Linear)] == [
        f"blocks.{i}.up" for i in range(4)
    ]
    assert [name for name, _ in match_modules(net, [r"blocks\.[02]\.(up|down)"], who="T")] == [
        "blocks.0.up",
        "blocks.0.down",
        "blocks.2.up",
        "blocks.2.down",
    ]
    said = r"T: the pattern 'upp' matches none of the 10 .* end in: up, stem, down, head \(as in blocks\.\d\.up\)$"
    with pytest.raises(ConfigurationError, match=said):
        match_modules(net, ["upp"], who="T", kind=nn.Linear)
    assert endings(["a.b.0", "c.b.0", "b.1", "3", "x.q", "y.q", "x2.1.0"]) == ["b.0", "b.1", "3", "q", "x2.1.0"]
    many = nn.ModuleDict({f"layer{i}": nn.Linear(1, 1) for i in range(23)})
    with pytest.raises(ConfigurationError, match=r"layer0, layer1, .*layer19 and 3 more \(as in"):
        match_modules(many, ["fc"], who="T")
    with pytest.raises(ConfigurationError, match=r"none of the 0 modules that it could, .* end in: there are none$"):
        match_modules(many, ["fc"], who="T", kind=nn.Conv2d)


def test_match_parameters_by_their_names_and_by_those_of_what_holds_them() -> None:
    net = Net()
    named = dict(net.named_parameters())
    found = match_parameters(net, [r"blocks\.1\.norm", "head", "bias"], who="T", where=lambda p: p.ndim == 1)
    norms = {"blocks.1.norm.weight"}
    assert [name for name, _ in found] == [name for name in named if name.endswith("bias") or name in norms]
    assert all(parameter is named[name] for name, parameter in found)
    net.again = net.head  # a tied parameter is found by each of its names and given once
    assert [name for name, _ in match_parameters(net, ["again"], who="T")] == ["head.weight", "head.bias"]
    with pytest.raises(
        ConfigurationError, match=r"T: the pattern 'bais' matches none of the 28 parameters .* in: bias,"
    ):
        match_parameters(net, ["bais"], who="T")
    with pytest.raises(ConfigurationError, match=r"T: '\(' is no regular expression"):
        match_parameters(net, ["("], who="T")


def test_a_shard_is_known_on_parameters_too(tmp_path: Path) -> None:
    from torch.distributed import destroy_process_group, init_process_group, is_initialized
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    if is_initialized():  # by the strategy of an earlier test in this process
        destroy_process_group()
    init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        shard = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        assert is_sharded(shard)
        assert is_sharded(nn.Parameter(shard))
        assert not is_sharded(nn.Parameter(torch.ones(2)))
        assert type(local(shard)) is torch.Tensor
        assert local(shard).data_ptr() == shard.to_local().data_ptr()
        assert local(whole := torch.ones(2)) is whole
    finally:
        destroy_process_group()


def test_become_keeps_object_groups_hooks_and_the_scheduler_chain() -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    groups = [{"params": parameters[:1], "lr": 0.5, "name": "a"}, {"params": parameters[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.5, 0.6), weight_decay=0.3, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    become(optimizer, torch.optim.NAdam)
    assert type(optimizer) is torch.optim.NAdam
    assert scheduler.optimizer is optimizer
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.6)] * 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.param_groups[0]["name"] == "a"
    assert "fused" not in optimizer.param_groups[0] or not optimizer.param_groups[0]["fused"]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.step()
    scheduler.step()  # warns, and so fails here, if it does not see that the optimizer has stepped
    assert optimizer.param_groups[0]["lr"] > rate
    assert calls == ["stepped"]
    with pytest.raises(ConfigurationError, match="NAdam has stepped already"):
        become(optimizer, torch.optim.AdamW)


def test_mix_out_undoes_one_mix_in_and_leaves_the_others() -> None:
    class A:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1  # type: ignore[misc]

    class B(A):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super(A, self).forward(x) * 2  # type: ignore[misc]

    class C:
        pass

    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    for mixin in (A, C):
        mix_in(layer, mixin)
    mix_out(layer, A)
    assert isinstance(layer, C)
    assert not isinstance(layer, A)
    mix_out(layer, C)
    mix_out(layer, C)
    assert type(layer) is nn.Linear
    mix_in(layer, B)
    mix_out(layer, A)  # subclasses, too
    assert type(layer) is nn.Linear
    assert layer(x).shape == (1, 2)


class _PassesOn:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_forward_that_takes_anything_keeps_the_signature_of_the_classs_own() -> None:
    """Generation reads from the signature which arguments a model takes."""

    class Own(nn.Module):
        def forward(self, x: torch.Tensor, *, labels: torch.Tensor | None = None) -> torch.Tensor:
            return x

    module = Own()
    expected = inspect.signature(module.forward)
    mix_in(module, _PassesOn)
    assert inspect.signature(module.forward) == expected
    assert torch.equal(module(torch.ones(2), labels=None), torch.ones(2))
    mix_out(module, _PassesOn)
    assert type(module) is Own


class Named(nn.Module):
    label: str


def test_a_mix_in_without_a_forward_leaves_the_own_one() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    plain, cls = layer(x), type(layer)
    mix_in(layer, Named, label="a")
    mix_in(layer, Double, factor=1.0)
    assert torch.equal(layer(x), plain)
    assert unmixed(layer) is cls
    assert "input" in inspect.signature(layer.forward).parameters or Double.forward is type(layer).forward


def test_experts_are_modules_of_stacked_matrices() -> None:
    class Experts(nn.Module):
        def __init__(self, *shapes: tuple[int, ...]) -> None:
            super().__init__()
            for number, shape in enumerate(shapes):
                self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))

    root = nn.ModuleDict(
        {
            "experts": Experts((4, 2, 3), (4, 3)),
            "others": Experts((4, 2, 3), (5, 3)),
            "matrix": Experts((4, 3)),
            "table": Experts((1, 7, 3)),
            "convolution": nn.Conv1d(4, 2, 3),
        }
    )
    assert [(name, stacks) for name, _, stacks in expert_stacks(root)] == [("experts", ["p0"])]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_transformer_encoder_calls_layers_whose_forward_is_changed() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x = torch.randn(3, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 5])
    for layer in encoder.layers:
        mix_in(layer.linear1, Double, factor=3.0)
    wanted = encoder(x, src_key_padding_mask=padding).detach()  # with gradients it calls each layer
    call_layers(encoder)
    with torch.no_grad():
        found = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], wanted[~padding])


def test_which_weights_have_their_inputs_first() -> None:
    from transformers.pytorch_utils import Conv1D

    features = nn.Linear(2, 3)
    features.nf = 3  # as GPT-2's layer calls its outputs, and others call something else
    assert not inputs_first(features)
    assert inputs_first(Conv1D(3, 2))
    assert inputs_first(nn.ConvTranspose2d(2, 3, 1))
    assert not inputs_first(nn.Conv2d(2, 3, 1))
