"""Float8: torchao's own numbers under unchanged names, in the contract's order, and what is left out of it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from lit_efficient import (
    GPT,
    ActivationCheckpointing,
    Compile,
    ConfigurationError,
    ConflictError,
    Float8Precision,
    GPTConfig,
    LoRA,
    QuantizeBase,
    restore,
)
from lit_efficient.application import apply
from lit_efficient.application.ledger import ledger, reports_of
from lit_efficient.precision.float8_precision import _Float8Linear, to_float8
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.cuda.fake_cuda import fake_cuda
from tests.support import Net, Toy, assert_equal, data, trainer, weights

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def emulated(**arguments: Any) -> Float8Precision:
    return Float8Precision(**{"precision": "32-true", "min_size": 16, "emulate": True, **arguments})


def multiplies_in_float8(run: Run) -> None:
    layers = [part for part in run.module.modules() if isinstance(part, _Float8Linear)]
    assert layers
    for layer in layers:
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0), dtype=layer.weight.dtype)
        y = _Float8Linear.forward(layer, x).detach()
        exact = nn.functional.linear(x, layer.weight, layer.bias).detach()
        rounded = nn.functional.linear(narrowed(x), narrowed(layer.weight.detach()), layer.bias).detach()
        torch.testing.assert_close(y, rounded)
        assert not torch.allclose(y, exact, rtol=1e-4, atol=1e-6)
    assert all(t.dtype.itemsize > 1 for t in run.checkpoint["state_dict"].values() if t.is_floating_point())


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """The formula of the module's header, for one scale a tensor."""
    scale = (torch.finfo(torch.float8_e4m3fn).max / x.abs().amax().double()).float()
    return (x.float() * scale).to(torch.float8_e4m3fn).float() / scale


ROW = Row(emulated, multiplies_in_float8)


@pytest.fixture(scope="module")
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(64, dim=64, depth=2, num_heads=2, hidden_dim=128, max_length=32, tie_embeddings=False))


IDS = torch.randint(0, 64, (2, 15), generator=torch.Generator().manual_seed(0))


def backward(network: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = network(IDS)
    out.float().square().mean().backward()
    return out.detach(), {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def torchao_s(network: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return convert_to_float8_training(network, config=config, module_filter_fn=lambda _, name: "blocks" in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_and_gradients_are_torchao_s_bit_for_bit(gpt: GPT, recipe: str, dtype: torch.dtype) -> None:
    for frozen in (False, True):
        theirs, ours = (copy.deepcopy(gpt).to(dtype) for _ in range(2))
        for network in (theirs, ours):
            network.blocks.requires_grad_(not frozen)
        report = apply(ours, [emulated(recipe=recipe)])["Float8Precision"]
        assert list(ours.state_dict()) == list(gpt.state_dict())
        assert_equal(backward(torchao_s(theirs, recipe)), backward(ours))
        assert len(report.modules) == 14
        assert not torch.equal(ours(IDS), gpt.to(dtype)(IDS))
        gpt.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_with_gw_hp"])
def test_outputs_and_gradients_in_blocks_are_torchao_s_bit_for_bit(gpt: GPT, recipe: str, dtype: torch.dtype) -> None:
    """Rows are padded by hand for torchao, whose layer needs multiples of 32; those of sizes below 32 stay."""
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    class Theirs(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = nn.functional.pad(x.flatten(0, 1), (0, 0, 0, -x[..., 0].numel() % 32))
            kernels = config.MXFP8Dim0CastKernelChoice.TORCH, config.MXFP8Dim1CastKernelChoice.TORCH
            how = KernelPreference.EMULATED, *kernels, config.ScaleCalculationMode.RCEIL, recipe.endswith("hp")
            y = mx_mm.apply(rows, self.weight, *[torch.float8_e4m3fn] * 3, 32, *how)
            return y[: x[..., 0].numel()].view(*x.shape[:-1], -1)

    for frozen in (False, True):
        theirs, ours = (copy.deepcopy(gpt).to(dtype) for _ in range(2))
        for network in (theirs, ours):
            network.blocks.requires_grad_(not frozen)
        report = apply(ours, [emulated(recipe=recipe)])["Float8Precision"]
        for name in report.modules:
            theirs.get_submodule(name).__class__ = Theirs
        assert list(ours.state_dict()) == list(gpt.state_dict())
        assert_equal(backward(theirs), backward(ours))
        assert len(report.modules) == 14
    small = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    assert apply(small, [emulated(recipe=recipe, modules="all")])["Float8Precision"].modules == ("1",)


def test_a_frozen_layer_does_not_compute_the_gradient_that_nobody_wants(gpt: GPT) -> None:
    counts = []
    for frozen in (False, True):
        network = copy.deepcopy(gpt)
        apply(network, [emulated()])
        network.blocks.requires_grad_(not frozen)
        with FlopCounterMode(display=False) as counter:
            backward(network)
        counts.append(counter.get_total_flops())
    layers = sum(p.numel() for name, p in gpt.named_parameters() if "blocks" in name and p.ndim == 2)
    assert counts[0] - counts[1] == 2 * IDS.numel() * layers


def test_rows_are_padded_to_what_float8_units_sum_over_and_only_then() -> None:
    to_float8(layer := nn.Linear(16, 32, bias=False), emulate=True)
    for rows in (32, 30):
        with torch.profiler.profile() as seen:
            layer(torch.ones(rows, 16)).sum().backward()
        padded = [event for event in seen.events() if event.name == "aten::constant_pad_nd"]
        assert bool(padded) is (rows == 30)


@pytest.mark.turns(6, family="slow")
def test_loss_stays_close_to_bf16() -> None:
    torch.manual_seed(0)
    x, y = torch.randint(0, 32, (8, 16)), torch.randint(0, 32, (8, 16))

    def losses(*techniques: Any) -> list[float]:
        torch.manual_seed(0)
        network = GPT(GPTConfig(32, dim=64, depth=2, num_heads=2, hidden_dim=128, max_length=16))
        apply(network, techniques)
        optimizer, seen = torch.optim.AdamW(network.parameters(), lr=3e-3), []
        for _ in range(16):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(network(x).float().flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    bf16 = losses()
    assert bf16[-1] < 0.8 * bf16[0]
    for recipe in ("tensorwise", "rowwise", "mxfp8"):
        float8 = losses(emulated(recipe=recipe))
        assert float8 != bf16
        assert float8[-1] == pytest.approx(bf16[-1], rel=0.05)


def test_it_acts_before_compilation_and_behind_adapters_whichever_callbacks_there_are() -> None:
    order = [Compile(modules=["head"], backend="aot_eager"), LoRA(rank=2), ActivationCheckpointing(), emulated()]
    run = trainer(order)
    run.fit(module := Toy("configure_model"), data(), data())
    names = [entry.record["name"] for entry in ledger(module)]
    assert names == ["LoRA", "ActivationCheckpointing", "Float8Precision", "Compile"]
    fronts = [base.__name__ for base in type(module.net.blocks[0].up).__mro__]
    assert fronts.index("_LowRankLinear") < fronts.index("_Float8Linear")
    assert all(p.grad is None for n, p in module.named_parameters() if "lora" not in n and "blocks" in n)


def test_alone_it_brings_the_contract_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trainer([emulated(precision="bf16-mixed")])
    with caplog.at_level("INFO"):
        run.fit(module := Toy("configure_model"), data(), data())
    assert "Float8Precision  8 of 10 linear layers multiply in float8 (tensorwise, emulated)" in caplog.text
    assert "in bf16-mixed stay net.stem, net.head" in caplog.text
    run.fit_loop.max_epochs = 2
    run.fit(module, data(), data())
    assert len(ledger(module)) == 1
    assert not {"configure_model", "_lit_efficient_session"} & module.__dict__.keys()
    run.save_checkpoint(tmp_path / "a.ckpt")
    kept = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert [record["name"] for record in kept["lit_efficient"]["techniques"]] == ["Float8Precision"]
    plain = restore(Toy("init"), tmp_path / "a.ckpt")
    assert not any(isinstance(part, _Float8Linear) for part in plain.modules())  # the weights are what trained
    assert_equal(weights(plain), weights(module))
    with pytest.raises(ConflictError, match=r"QuantizeBase.*codes"):
        trainer([QuantizeBase(format="int4", group_size=4), emulated()]).fit(Toy("init"), data(), data())


@pytest.mark.filterwarnings("ignore:.*in 16 bits, where a step:UserWarning")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_the_rest_is_computed_as_lightning_s_precision_of_that_name(precision: Any) -> None:
    def fit(*parts: Any, **arguments: Any) -> Any:
        torch.manual_seed(0)
        run = trainer(list(parts), **arguments)
        run.fit(module := Toy("configure_model"), data(), data())
        return run, module

    nothing = Float8Precision(modules=["head"], precision=precision, min_size=16, emulate=True)
    (ours, module), (theirs, plain) = fit(nothing), fit(precision=precision)
    assert ours.precision == theirs.precision == precision
    assert module.net.head.weight.dtype == plain.net.head.weight.dtype
    with ours.precision_plugin.forward_context(), torch.no_grad():
        x = torch.ones(2, 16, dtype=module.net.stem.weight.dtype)
        assert module.net.stem(x).dtype == (torch.float32 if precision == "32-true" else torch.bfloat16)


def test_what_must_stay_is_left_out_by_what_it_is(gpt: GPT) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gating = nn.Linear(32, 16)
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + sum(w[..., None] * e(x) for w, e in zip(self.gating(x).unbind(-1), self.experts, strict=True))

    network = nn.Sequential(nn.Linear(16, 32), nn.ModuleList([Experts(), Experts()]), nn.Linear(32, 48))
    report = apply(network, [emulated(modules="all")])["Float8Precision"]
    assert "2" not in report.modules  # the last one: the output head
    assert not any("gating" in name for name in report.modules)
    assert len(report.modules) == 33
    assert report.details["left_names"] == "1.0.gating, 1.1.gating, 2"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vit = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=16)
    report = apply(transformers.ViTForImageClassification(vit), [emulated(modules="all")])["Float8Precision"]
    assert report.details["left_names"] == "classifier"  # though the model names no output embeddings
    tied = copy.deepcopy(gpt)
    tied.blocks[0].mlp.up.weight = nn.Parameter(torch.zeros(128, 60))
    tied.blocks[0].mlp.up.in_features = 60
    report = apply(tied, [emulated(skip=("down",), modules=["blocks"])])["Float8Precision"]
    assert {name.rpartition(".")[2] for name in report.modules}.isdisjoint({"down", "head"})
    assert "blocks.0.mlp.up" not in report.modules
    assert "blocks.1.mlp.up" in report.modules


def test_copies_pickles_and_evaluation_multiply_in_float8_too(gpt: GPT) -> None:
    network = copy.deepcopy(gpt)
    apply(network, [emulated()])
    with torch.no_grad():
        wanted = network(IDS)
        assert torch.equal(copy.deepcopy(network)(IDS), wanted)
        network.blocks = pickle.loads(pickle.dumps(network.blocks))
        assert torch.equal(network(IDS), wanted)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    x = torch.randn(2, 4, 32)
    with torch.no_grad():
        plain = encoder(x)
        apply(encoder, [emulated(modules=[r"linear\d"])])
        assert not torch.equal(encoder(x), plain)  # torch's fused path reads the weights past the layers


def test_it_compiles_whole_to_the_same_numbers(gpt: GPT) -> None:
    results = []
    for further in ([], [Compile(modules="network", backend="aot_eager", fullgraph=True)]):
        mlp = copy.deepcopy(gpt.blocks[0].mlp)
        mlp.gate.requires_grad_(False)  # both kinds of product
        apply(mlp, [emulated(modules=["gate", "up"]), *further])
        x = torch.linspace(-1, 1, 128).view(2, 64).requires_grad_()
        mlp(x).square().mean().backward()
        results.append([x.grad, mlp.up.weight.grad, mlp.gate.weight.grad])
    torch.testing.assert_close(*results)


def test_sharded_by_fsdp2_it_is_the_same(gpt: GPT) -> None:
    whole, network = copy.deepcopy(gpt), copy.deepcopy(gpt)
    apply(whole, [emulated()])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for block in network.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        apply(network, [emulated()])  # as the contract does it, when configure_model has sharded
        (ours, gradients), (theirs, wanted) = backward(network), backward(whole)
        assert torch.equal(ours, theirs)
        assert_equal({name: g.full_tensor() for name, g in gradients.items()}, wanted)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"recipe": "blockwise"}, "recipe must be one of tensorwise, rowwise, rowwise_with_gw_hp, mxfp8"),
        ({"precision": "16-mixed"}, "precision must be one of bf16-mixed, bf16-true, 32-true, got '16-mixed'"),
        ({"min_size": 8}, "min_size must be a whole number of at least 16, got 8"),
        ({"skip": "head"}, "skip must be a list of texts, got 'head'"),
        ({"skip": ("(",)}, "is no regular expression"),
        ({"modules": []}, "modules must be blocks, all or patterns"),
        ({"emulate": 1}, "emulate must be true or false, got 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        Float8Precision(**arguments)


def test_devices_and_networks_without_anything_for_it_are_refused(gpt: GPT) -> None:
    def refused(said: str, *parts: Any, module: L.LightningModule | None = None, **arguments: Any) -> None:
        with pytest.raises(ConfigurationError, match=said):
            trainer(list(parts), **arguments).fit(module or Toy("init"), data(), data())

    refused(r"compute capability 8.9 .*this is cpu.*emulate=True", Float8Precision(min_size=16))
    with fake_cuda():
        refused(r"this is compute capability \(8, 0\)", Float8Precision(min_size=16), accelerator="gpu")
    with pytest.raises(ConfigurationError, match=r"none of the 10 .* below min_size \(256\).*\(16, 16\), \(16, 64\)"):
        apply(Net(), [emulated(min_size=256)])
    apply(network := copy.deepcopy(gpt), [QuantizeBase(format="int4")])
    with pytest.raises(ConfigurationError, match=r"quantised, first 'blocks.0"):
        emulated().transform(network)
    assert "Float8Precision" not in reports_of(gpt)
