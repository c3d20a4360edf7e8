"""Quantisation-aware training: torchao's numbers under unchanged names, and an export of the validated network."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from lit_efficient import (
    GPT,
    IA3,
    ConfigurationError,
    ConflictError,
    GPTConfig,
    LanguageModeling,
    LoRA,
    QuantizationAwareTraining,
    load_codes,
    restore,
)
from lit_efficient.application import apply
from lit_efficient.callbacks.quantization_aware_training import _RoundedLinear, _WatchesWeight
from lit_efficient.export.adapters import _safetensors, _Source, export_checkpoint
from lit_efficient.export.pipelines import export_pipeline
from lit_efficient.files.checkpoints import read
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.support import Net, Toy, assert_equal, data, trainer, weights


def computes_with_rounded_weights(run: Run) -> None:
    layers = [part for part in run.module.modules() if isinstance(part, _RoundedLinear)]
    assert layers
    for layer in layers:
        out = _RoundedLinear.forward(layer, torch.eye(layer.in_features))  # 0 and 1 are among the levels of each row
        weight = (out - (0 if layer.bias is None else layer.bias)).detach().T.unflatten(1, (-1, 8))
        own = layer.weight.detach().unflatten(1, (-1, 8))
        scale = own.abs().amax(-1, keepdim=True) / 7.5
        codes = weight / scale
        assert (codes - codes.round()).abs().amax() < 1e-3
        assert codes.round().unique().numel() <= 16
        assert (weight - own).abs().amax() <= 0.501 * scale.amax()
        assert not torch.allclose(weight, own, atol=1e-2 * float(own.abs().max()))
    assert all(tensor.is_floating_point() for tensor in run.checkpoint["state_dict"].values())


ROW = Row(
    lambda: QuantizationAwareTraining(group_size=8),
    computes_with_rounded_weights,
    beside={"ChunkedCrossEntropy": lambda: QuantizationAwareTraining(group_size=8, skip=["head"])},
)

CONFIG = GPTConfig(64, dim=64, depth=1, num_heads=2, hidden_dim=96, max_length=32, tie_embeddings=False)
IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def backward(network: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = network(IDS)
    out.float().square().mean().backward()
    return out.detach(), {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:Deprecation. TorchAODType")  # its own use of it
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_torchao_s_bit_for_bit(gpt: GPT, dtype: torch.dtype) -> None:
    from torchao.quantization.qat.linear import Int8DynActInt4WeightQATQuantizer

    theirs, ours = (copy.deepcopy(gpt).to(dtype) for _ in range(2))
    report = apply(ours, [QuantizationAwareTraining()])["QuantizationAwareTraining"]
    theirs = Int8DynActInt4WeightQATQuantizer(groupsize=32, precision=dtype).prepare(theirs)
    assert list(ours.state_dict()) == list(gpt.state_dict())
    assert len(report.modules) == 8
    assert_equal(backward(theirs), backward(ours))


def test_outputs_are_those_of_torchao_s_newer_interface(gpt: GPT) -> None:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import QATConfig

    theirs, ours = copy.deepcopy(gpt), copy.deepcopy(gpt)
    apply(ours, [QuantizationAwareTraining()])
    base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantize_(theirs, QATConfig(base, step="prepare"))
    torch.testing.assert_close(ours(IDS), theirs(IDS))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModeling, Path]:
    """Return a language model after a few steps of training, and its checkpoint."""
    torch.manual_seed(0)
    module = LanguageModeling(CONFIG)
    batch = [{"input_ids": row, "labels": row} for row in IDS]
    run = trainer([QuantizationAwareTraining()], max_steps=2, limit_val_batches=0)
    loader = torch.utils.data.DataLoader(batch, 2)
    run.fit(module, loader, loader)
    path = tmp_path_factory.mktemp("qat") / "a.ckpt"
    run.save_checkpoint(path)
    return module.eval(), path


def test_the_export_holds_codes_and_computes_what_was_validated(
    trained: tuple[LanguageModeling, Path], tmp_path: Path
) -> None:
    module, path = trained
    write = _safetensors(_Source(read(path), str(path), "raw", None), True).write  # compares, but in this process
    write(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    codes = state["network.blocks.0.mlp.up.weight"]
    assert codes.dtype == torch.int8
    assert codes.amin() >= -8
    assert codes.amax() <= 7
    assert state["network.blocks.0.mlp.up.scales"].shape == (96, 2)
    fresh = LanguageModeling(CONFIG)
    fresh.configure_model()
    load_codes(fresh, state)
    with torch.no_grad():
        validated = module.network(IDS)
        torch.testing.assert_close(fresh.eval().network(IDS), validated, atol=1e-5, rtol=1e-5)
        float_ones = GPT(CONFIG)
        float_ones.load_state_dict(module.network.state_dict())
        assert not torch.allclose(float_ones(IDS), validated, atol=1e-3)  # what an export of floats would compute


def test_codes_compute_in_torch_s_own_encoder_layer() -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"net": nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)}).eval()
    trained, x = copy.deepcopy(plain), torch.randn(2, 3, 32)
    apply(trained, [QuantizationAwareTraining()])
    layers = {name: ("int4", 32) for name, part in trained.named_modules() if isinstance(part, _RoundedLinear)}
    state = dict(trained.state_dict())
    QuantizationAwareTraining.convert_export(state, {"lit_efficient": {"qat_layers": layers}}, plain)
    with torch.no_grad():
        torch.testing.assert_close(plain["net"](x), trained["net"](x))


@pytest.mark.filterwarnings("ignore:Deprecation. TorchAODType")
def test_torchao_itself_loads_the_export(gpt: GPT, tmp_path: Path) -> None:
    from torchao.quantization.qat.linear import Int8DynActInt4WeightQATQuantizer

    run = trainer([QuantizationAwareTraining(group_size=16)])
    run.fit(module := Toy("configure_model"), data(), data())
    run.save_checkpoint(tmp_path / "a.ckpt")
    folder = export_checkpoint(tmp_path / "a.ckpt", tmp_path / "out", "safetensors", check=False)
    quantizer = Int8DynActInt4WeightQATQuantizer(groupsize=16)
    theirs = quantizer.convert(quantizer.prepare(Toy("init")))
    theirs.load_state_dict(load_file(folder / "model.safetensors"))
    x = next(iter(data()))[0]
    with torch.no_grad():
        torch.testing.assert_close(theirs.net(x), module.eval().net(x), atol=1e-5, rtol=1e-5)
        again = restore(Toy("init"), tmp_path / "a.ckpt")
        assert torch.equal(again.net(x), module.net(x))
    assert_equal(weights(again), weights(module))


BLOCKS = ("mxfp4", "mxfp8", "nvfp4")


def theirs_in_blocks(weight: torch.Tensor, x: torch.Tensor, format: str) -> tuple[Any, torch.Tensor]:
    """Return torchao's converted weight, and the rounded input that its product takes."""
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4WeightOnlyConfig
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone())
    if format == "nvfp4":
        quantize_(layer, NVFP4WeightOnlyConfig())
        codes: Any = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
    else:
        element = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp8": torch.float8_e4m3fn}[format]
        emulated = KernelPreference.EMULATED
        config = MXDynamicActivationMXWeightConfig(32, element, element, emulated)
        quantize_(layer, config)
        codes = MXTensor.to_mx(x, element, 32, ScaleCalculationMode.RCEIL, emulated)
    return layer.weight, codes.dequantize(x.dtype)


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_in_blocks_are_torchao_s_bit_for_bit(format: str, dtype: torch.dtype) -> None:
    """For MX those of its layer. Its product in NVFP4 needs a GPU, so its rounded operands are multiplied here."""
    from torchao.prototype.qat import MXFakeQuantizeConfig, MXFakeQuantizedLinear

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(64, 48)).to(dtype)
    theirs = copy.deepcopy(ours)
    apply(ours, [QuantizationAwareTraining(format=format)])
    x = torch.randn(3, 5, 64, dtype=dtype)
    found = []
    for net in (ours, theirs):
        inputs = x.clone().requires_grad_()
        if net is theirs and format != "nvfp4":
            config = MXFakeQuantizeConfig(torch.float4_e2m1fn_x2 if format == "mxfp4" else torch.float8_e4m3fn)
            net[0] = MXFakeQuantizedLinear.from_linear(net[0], config, config)
        if net is theirs and format == "nvfp4":
            weight, rounded = theirs_in_blocks(net[0].weight.detach(), x.flatten(0, 1), format)
            w = weight.dequantize(dtype).requires_grad_()
            rows = rounded.unflatten(0, (3, 5)).requires_grad_()
            F.linear(rows, w, net[0].bias).float().square().sum().backward()
            found.append((F.linear(rows, w, net[0].bias).detach(), rows.grad, w.grad))
            continue
        out = net(inputs)
        out.float().square().sum().backward()
        found.append((out.detach(), inputs.grad, net[0].weight.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0 if format != "nvfp4" else 1e-6)


@pytest.mark.parametrize("format", BLOCKS)
def test_exports_in_blocks_are_torchao_s_conversion_and_compute_what_was_validated(format: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = LanguageModeling(CONFIG)
    batch = [{"input_ids": row, "labels": row} for row in IDS]
    run = trainer([QuantizationAwareTraining(format=format)], max_steps=2, limit_val_batches=0)
    run.fit(module, loader := torch.utils.data.DataLoader(batch, 2), loader)
    run.save_checkpoint(path := tmp_path / "a.ckpt")
    folder = export_checkpoint(path, tmp_path / "out", "safetensors", check=False)
    state = load_file(folder / "model.safetensors")
    weight = module.network.blocks[0].mlp.up.weight.detach()
    converted, _ = theirs_in_blocks(weight.bfloat16(), torch.zeros(32, 64).bfloat16() + 1, format)
    own = state["network.blocks.0.mlp.up.weight"]
    if format != "mxfp8":
        assert own.shape == (96, 32)
        assert own.dtype == torch.uint8
    fresh = LanguageModeling(CONFIG)
    fresh.configure_model()
    load_codes(fresh, state)
    layer = fresh.network.blocks[0].mlp.up
    assert type(layer.weight.data) is type(converted.data)
    with torch.no_grad():
        assert torch.equal(fresh.eval().network(IDS), module.eval().network(IDS))
    theirs, _ = theirs_in_blocks(weight.bfloat16(), torch.ones(32, 64).bfloat16(), format)
    from lit_efficient.internals.torchao_mx import block_entries

    entries = block_entries(weight.bfloat16(), format)
    assert torch.equal(entries["weight"].view(torch.uint8), theirs.qdata.view(torch.uint8))
    assert torch.equal(block_layer_of(entries).weight.dequantize(torch.float32), theirs.dequantize(torch.float32))


@pytest.mark.parametrize("format", ["int4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_adapters_train_for_the_rounding_of_their_sum_with_the_weights(
    format: str, precision: str, tmp_path: Path
) -> None:
    """Only adapters change; the export has the codes of the merged weights, and computes what was validated."""
    torch.manual_seed(0)
    module = LanguageModeling(CONFIG)
    batch = [{"input_ids": row, "labels": row} for row in IDS]
    techniques = [QuantizationAwareTraining(format=format), LoRA(rank=4, save_base=True)]
    run = trainer(techniques, max_steps=4, limit_val_batches=0, precision=precision)
    run.fit(module, loader := torch.utils.data.DataLoader(batch, 2), loader)
    run.save_checkpoint(path := tmp_path / "a.ckpt")
    layer = module.network.blocks[0].attention.query
    assert layer.lora_B.abs().max() > 0
    merged = layer.weight + layer.lora_scale * (layer.lora_B @ layer.lora_A)
    x = torch.randn(3, 64)
    plain = nn.Sequential(nn.Linear(64, 64, bias=False))
    plain[0].weight = nn.Parameter(merged.detach())
    apply(plain, [QuantizationAwareTraining(format=format)])
    assert torch.equal(layer(x), plain(x))
    folder = export_checkpoint(path, tmp_path / "out", "safetensors", check=False)
    fresh = LanguageModeling(CONFIG)
    fresh.configure_model()
    load_codes(fresh, load_file(folder / "model.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(fresh.eval().network(IDS), module.eval().network(IDS), atol=1e-5, rtol=1e-5)


def block_layer_of(entries: dict[str, torch.Tensor]) -> Any:
    from lit_efficient.internals.torchao_mx import block_layer

    return block_layer(entries, None, torch.bfloat16)


def test_a_layer_of_zeros_is_finite() -> None:
    for format in BLOCKS:
        network = nn.Sequential(nn.Linear(32, 32, bias=False))
        nn.init.zeros_(network[0].weight)
        apply(network, [QuantizationAwareTraining(format=format)])
        network(torch.zeros(2, 32)).sum().backward()
        assert network[0].weight.grad.isfinite().all()
        assert network(torch.ones(2, 32)).eq(0).all()


def test_formats_that_hold_floats_are_refused(trained: tuple[LanguageModeling, Path], tmp_path: Path) -> None:
    for format in ("merged", "peft"):
        with pytest.raises(ConfigurationError, match=f"which format {format} cannot hold.*use format safetensors"):
            export_checkpoint(trained[1], tmp_path / format, format)
    with pytest.raises(ConfigurationError, match="which format diffusers cannot hold"):
        export_pipeline(trained[1], tmp_path / "pipeline")


def test_tied_and_odd_layers_stay_and_are_named() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.stem.weight
            self.odd = nn.Linear(20, 4)

    report = apply(Tied(), [QuantizationAwareTraining(group_size=16, skip=("down",))])["QuantizationAwareTraining"]
    assert {name.rpartition(".")[2] for name in report.modules} == {"up"}
    assert "4 of 11 linear layers" in report.summary
    assert "stem, blocks.0.down" in report.summary
    with pytest.raises(ConfigurationError, match=r"no linear layer whose inputs group_size=48.*\[16, 64\]"):
        apply(Net(), [QuantizationAwareTraining(group_size=48)])
    for adapter, said in ((LoRA(rank=2, variant="dora"), "only plain adapters"), (IA3(), "freezes the weights")):
        with pytest.raises(ConflictError, match=said):
            trainer([QuantizationAwareTraining(8), adapter]).fit(Toy("init"), data(), data())
    with pytest.raises(ConfigurationError, match=r"rounds its weight, .* without dropout"):
        trainer([QuantizationAwareTraining(8), LoRA(rank=2, dropout=0.1)]).fit(Toy("init"), data(), data())


class Reads(Net):
    """Module that reads the weight of its stem without calling it, or reads only its type."""

    used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = self.stem
        x = F.linear(x, stem.weight, stem.bias) if self.used else stem(x.to(stem.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Asks(Reads):
    used = False


def test_a_layer_whose_weight_the_network_uses_by_itself_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"reads the weight of 'net\.stem' .* Name the layer in skip"):
        trainer([QuantizationAwareTraining(8)]).fit(toy := Toy(network=Reads), data(), data())
    assert type(toy.net.stem.weight) is nn.Parameter
    for network, skip in ((Reads, ("stem",)), (Asks, ())):
        trainer([QuantizationAwareTraining(8, skip)]).fit(toy := Toy(network=network), data(), data())
        assert isinstance(toy.net.stem, _RoundedLinear) == (not skip)
        assert not any(isinstance(part, _WatchesWeight) for part in toy.modules())


def test_training_with_the_roundings_beats_rounding_afterwards() -> None:
    """Training lets the rounding errors of a row cancel, which rounding the best float weights does not.

    The inputs vary in two directions, and 32 weights share them. The float weights are exact, so the first loss is
    the error of rounding them. Each of the 128 outputs is a separate problem. The last loss is a quarter of the first,
    with a standard deviation of 0.04 over seeds, on each instruction set.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(256, 2, generator=generator) @ torch.randn(2, 32, generator=generator)
    x = directions + 0.05 * torch.randn(256, 32, generator=generator)
    network = nn.Sequential(nn.Linear(32, 128, bias=False))
    with torch.no_grad():
        network[0].weight.copy_(torch.randn(128, 32, generator=generator))
        y = network(x)
    apply(network, [QuantizationAwareTraining(group_size=16)])
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    errors = []
    for _ in range(60):
        loss = F.mse_loss(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
    assert errors[-1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"group_size": 1}, "group_size must be a whole number of at least 2 or null, got 1"),
        ({"format": "fp4"}, "format must be one of int4, mxfp4, mxfp8, nvfp4, got 'fp4'"),
        ({"format": "nvfp4", "group_size": 32}, "group_size must be null for format='nvfp4', got 32"),
        ({"skip": "head"}, "skip must be a list of texts, got 'head'"),
        ({"skip": ("(",)}, "is no regular expression"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        QuantizationAwareTraining(**arguments)
