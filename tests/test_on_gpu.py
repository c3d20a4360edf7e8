"""What techniques do on a CUDA device, one test each; benchmarks/gpu.sh runs them, each in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F

from lit_efficient import EMA, ExactResume, LoRA, MaxBatchSize, QuantizeBase
from lit_efficient.application import apply
from lit_efficient.mechanisms.adapters.quantized import dequantize, is_quantized
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from tests.support import Net, Toy, assert_equal, data, trainer, weights

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


class Dropped(Net):
    """Draws on the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class Look(L.Callback):
    """The weights after each step, and whether all of the module is on the device."""

    def __init__(self, save: Path | None = None) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.save = save

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: object) -> None:
        assert {t.device.type for t in (*pl_module.parameters(), *pl_module.buffers())} == {DEVICE}
        self.steps.append({name: p.detach().cpu().clone() for name, p in pl_module.named_parameters()})
        if self.save is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.save)


def fit(
    module: L.LightningModule, *callbacks: Any, rows: int = 16, batch: int = 4, path: Any = None, **more: Any
) -> Any:
    run = trainer(callbacks, accelerator=DEVICE, limit_val_batches=0, **more)
    run.fit(module, data(rows, batch, shuffle=True), ckpt_path=path, weights_only=True)
    return run


@pytest.mark.parametrize("variant", ["lora", "dora", "pissa"])
@pytest.mark.parametrize("where", ["init", "configure_model"])
def test_lora_trains_adapters_and_leaves_the_base(where: str, variant: str) -> None:
    look = Look()
    fit(Toy(where), LoRA(rank=2, variant=variant), look)
    first, last = look.steps[0], look.steps[-1]
    assert any("lora_" in name for name in first)
    for name in first:
        moved = not torch.equal(first[name], last[name])
        assert moved == (".lora_" in name), name


@pytest.mark.parametrize("format", ["nf4", "fp4", "int8", "int4"])
@pytest.mark.parametrize("where", ["init", "configure_model"])
def test_quantised_layers_multiply_by_what_they_dequantise_to(where: str, format: str) -> None:
    if format != "int4":
        pytest.importorskip("bitsandbytes")
    seen: list[str] = []

    class Multiply(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for name, layer in pl_module.named_modules():
                if is_quantized(layer):
                    x = torch.randn(8, layer.in_features, device=DEVICE)
                    with torch.no_grad():
                        weight = dequantize(layer).float()
                        bias = None if layer.bias is None else layer.bias.float()
                        wanted = F.linear(x, weight, bias)
                        found = type(layer).__mro__[1].forward(layer, x) if hasattr(layer, "lora_A") else layer(x)
                    assert weight.device.type == DEVICE
                    assert (found - wanted).norm() <= 0.02 * wanted.norm(), name  # int8 rounds its input, too
                    seen.append(name)

    look = Look()
    quantize = QuantizeBase(format, group_size=16, skip=("head",))
    fit(Toy(where), quantize, LoRA(rank=2, targets=["head"]), Multiply(), look)
    assert len(seen) == 9  # a stem and two layers in each of four blocks
    assert not torch.equal(look.steps[0]["net.head.lora_B"], look.steps[-1]["net.head.lora_B"])


@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_moving_average_is_that_of_the_weights(device: str | None) -> None:
    look, ema, module = Look(), EMA(decay=0.8, warmup=None, device=device), Toy()
    fit(module, ema, look)
    expected = look.steps[0]
    for step in look.steps[1:]:
        expected = {name: torch.lerp(average, step[name], 0.2) for name, average in expected.items()}
    average = ema.average(module)
    assert average is not None
    assert {t.device.type for t in average.values()} == {device or DEVICE}
    for name, tensor in average.items():
        torch.testing.assert_close(tensor.cpu(), expected[name], rtol=1e-5, atol=1e-6)


def test_the_largest_batch_is_found_where_memory_runs_out_for_real() -> None:
    class Hungry(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            filled = torch.ones(len(batch[0]), 2**24, device=self.device)  # 64 MiB a row
            output = super().training_step(batch, batch_idx)
            return {**output, "loss": output["loss"] * filled[0, 0]}

    found: list[tuple[int, int]] = []

    class Sizes(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append((len(batch[0]), trainer.accumulate_grad_batches))

    free, total = torch.cuda.mem_get_info()
    assert free > 3 * 2**30
    before = torch.cuda.memory_stats().get("num_ooms", 0)
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / total)
    try:
        fit(Hungry(), MaxBatchSize(), Sizes(), rows=64, batch=64)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_stats()["num_ooms"] > before
    assert found[-1] in {(8, 8), (16, 4)}  # 2 GiB hold less than 32 rows; the trials come first


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    saved = tmp_path / "two.ckpt"
    whole = Toy(network=Dropped)
    fit(whole, ExactResume(0), Look(saved))
    torch.manual_seed(123)
    resumed, look = Toy(network=Dropped), Look()
    fit(resumed, ExactResume(0), look, path=saved)
    assert len(look.steps) == 2
    assert_equal(weights(whole), weights(resumed))


def test_packed_rows_with_grouped_heads_take_a_fused_kernel() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    config = GPTConfig(vocab_size=64, dim=128, depth=1, num_heads=4, num_kv_heads=2)
    model = GPT(config).to(DEVICE, torch.bfloat16)
    ids = torch.zeros(2, 96, dtype=torch.long, device=DEVICE)
    positions = (torch.arange(96, device=DEVICE) % 40).expand(2, -1)
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(fused):  # without the one that forms all scores: raises where none of these can
        model(ids, position_ids=positions).float().mean().backward()
        model(ids).float().mean().backward()


def test_packed_rows_go_through_flex_attention_and_give_the_processors_numbers() -> None:
    from lit_efficient.models.networks.document_attention import _flex_tried, attend_documents, document_starts

    positions = torch.cat([torch.arange(n) for n in (150, 1, 261)]).repeat(2, 1)
    shapes = ((2, 4, 412, 32), (2, 2, 412, 32), (2, 2, 412, 32))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    there = [value.detach().to(DEVICE).requires_grad_() for value in inputs]
    found = attend_documents(*there, document_starts(positions.to(DEVICE)))
    assert _flex_tried(torch.float32, 32)
    expected = attend_documents(*inputs, document_starts(positions))
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-2)
    gradients = [torch.autograd.grad(out.square().sum(), to) for out, to in ((found, there), (expected, inputs))]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=5e-2, atol=5e-2)


def test_packed_rows_go_through_lengths_of_documents_and_give_the_processors_numbers() -> None:
    from lit_efficient.models.networks.document_attention import (
        _by_lengths,
        _one_by_one,
        _varlen_tried,
        document_starts,
    )

    assert _varlen_tried(torch.bfloat16, 64)
    documents = document_starts(torch.cat([torch.arange(n) for n in (150, 1, 261)]).repeat(2, 1))
    inputs = [torch.randn(2, heads, 412, 64).bfloat16() for heads in (4, 2, 2)]
    for starts in (documents, torch.maximum(documents, torch.arange(412) - 99)):
        wide = [value.float().requires_grad_() for value in inputs]
        expected = _one_by_one(*wide, starts)
        there = [value.to(DEVICE).requires_grad_() for value in inputs]
        for attend in (_by_lengths, _one_by_one):
            found = attend(*there, starts.to(DEVICE))
            torch.testing.assert_close(found.float().cpu(), expected, rtol=5e-2, atol=5e-2)
            gradients = [
                torch.autograd.grad(out.sum(), to, retain_graph=True) for out, to in ((found, there), (expected, wide))
            ]
            for one, other in zip(*gradients, strict=True):
                torch.testing.assert_close(one.float().cpu(), other, rtol=1e-1, atol=1e-1)


def test_a_float_base_on_the_cpu_is_rounded_on_the_device_and_stays_where_it_was() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(1024, 1024))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.device(DEVICE):
        apply(network, [QuantizeBase("int4", skip=())])
    assert torch.cuda.max_memory_allocated() - before >= 4 * 1024**2
    assert torch.cuda.memory_allocated() == before
    assert {t.device.type for t in (*network.parameters(), *network.buffers())} == {"cpu"}
