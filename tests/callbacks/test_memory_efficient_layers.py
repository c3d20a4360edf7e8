"""MemoryEfficientLayers: identical numbers and gradients from fewer saved bytes, in any network."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lit_efficient
from lit_efficient import ActivationCheckpointing, ConfigurationError, LoRA
from lit_efficient.application import apply
from lit_efficient.callbacks import memory_efficient_layers as layers
from lit_efficient.evidence.memory_kinds import KindMeter
from lit_efficient.internals.torch_compiler import as_compiled, compiled_once
from lit_efficient.internals.torch_fake import FakeTensorMode
from lit_efficient.mechanisms.trials.memory import SavedTensors
from lit_efficient.surgery import mix_out
from lit_efficient.testing import Run, assert_equal, trainer
from tests.contract.row import Row
from tests.mechanisms.test_documents import network_of
from tests.support import Net


class MemoryEfficientLayers(lit_efficient.MemoryEfficientLayers):
    """Technique that also changes the toy's LayerNorms."""

    worth = 1.0


def norms_keep_less(run: Run) -> None:
    changed: list[Any] = [part for part in run.module.modules() if isinstance(part, layers._Norm)]
    assert changed
    x = torch.randn(4, len(changed[0].weight), requires_grad=True)
    plain = deepcopy(changed[0])  # both copies: what comes later finds no gradients
    fewer = kept(deepcopy(plain), x)[0]
    mix_out(plain, layers._Norm)
    assert fewer < kept(plain, x)[0]


ROW = Row(MemoryEfficientLayers, norms_keep_less, MemoryEfficientLayers, changes=False)


def kept(network: nn.Module, x: Tensor) -> tuple[int, Tensor, list[Tensor]]:
    """Return the bytes saved for the backward pass, the output, and the gradients of the parameters."""
    network.zero_grad()
    with SavedTensors(network.parameters()) as saved:
        torch.manual_seed(0)
        out = network(x)
        out = out if isinstance(out, Tensor) else out.logits
    out.square().mean().backward()
    return saved.bytes, out.detach(), [p.grad for p in network.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", ["gpt", "llama", "gemma2"])
def test_gradients_are_the_same_from_two_thirds_of_the_bytes(kind: str) -> None:
    network = network_of(kind).train()
    changed = deepcopy(network)
    report = apply(changed, [lit_efficient.MemoryEfficientLayers()])["MemoryEfficientLayers"]
    ids = torch.arange(64).view(2, 32)
    (before, *plain), (after, *found) = kept(network, ids), kept(changed, ids)
    assert torch.equal(plain[0], found[0])
    assert all(torch.equal(*pair) for pair in zip(plain[1], found[1], strict=True))
    assert list(network.state_dict()) == list(changed.state_dict())
    assert before - after == pytest.approx(64 * report.details["bytes_per_token_saved"], rel=0.15)
    assert report.summary.startswith(f"{9 if kind == 'gemma2' else 5} norms and 2 gated MLPs")


def test_adapters_with_dropout_draw_in_the_same_order() -> None:
    network = network_of("llama").train()
    apply(network, [LoRA(dropout=0.5)])
    for parameter in network.parameters():
        parameter.data.add_(0.01)  # fresh adapters give zeros
    changed = deepcopy(network)
    apply(changed, [lit_efficient.MemoryEfficientLayers()])
    one, two = (kept(each, torch.arange(8)[None]) for each in (network, changed))
    assert torch.equal(one[1], two[1])
    assert all(torch.equal(*pair) for pair in zip(one[2], two[2], strict=True))


class Odd(nn.Module):
    """Layer of three matrices that is not a gated MLP, because of a term, or of dropout in training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.a(x)) * self.b(x) + (0.0 if self.rate else 1e-3)
        return F.dropout(self.c(inner), self.rate, self.training)


def test_what_only_looks_like_one_is_left_alone() -> None:
    for network in (Odd(0.0), Odd(0.1), Net()):
        with pytest.raises(ConfigurationError, match="has no norm or gated MLP that saves more"):
            apply(network, [lit_efficient.MemoryEfficientLayers()])
        assert not any(hasattr(type(part), "mixed_from") for part in network.modules())
    network = network_of("gpt")
    reports = apply(network, [ActivationCheckpointing(), lit_efficient.MemoryEfficientLayers()])
    assert reports["MemoryEfficientLayers"].modules == ("norm",)  # all else is computed again as a whole
    with pytest.raises(ConfigurationError, match="needs the package liger-kernel"):
        lit_efficient.MemoryEfficientLayers("liger")
    with pytest.raises(ConfigurationError, match="backend must be one of"):
        lit_efficient.MemoryEfficientLayers("fused")


class Saves(nn.Module):
    """A norm that saves bytes that do not depend on the number of rows: ``size`` numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + torch.ones(self.size, requires_grad=True).exp().sum() * 0


def test_layers_that_save_no_byte_per_token_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms of the network save fewer bytes when they are recomputed, but less than one for each token."""
    monkeypatch.setattr(lit_efficient.MemoryEfficientLayers, "worth", 1.0)
    with pytest.raises(ConfigurationError, match="save 0 B less per token"):
        apply(nn.ModuleList([Saves(1)]), [lit_efficient.MemoryEfficientLayers()])


def test_the_trial_of_a_layer_changes_none_of_its_buffers() -> None:
    torch.manual_seed(0)
    spectral = [nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)) for _ in range(3)]
    network = nn.ModuleList([nn.Sequential(*spectral), nn.LayerNorm(16)])  # three linear layers, as in a gated MLP
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    apply(network, MemoryEfficientLayers())
    assert len(before) == 6
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.fixture(scope="module")
def without_inductor() -> Iterator[None]:
    """Compile by the whole stack but inductor, which takes seconds for each kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        compiled_once.cache_clear()
        yield
        compiled_once.cache_clear()


def graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_layers_give_the_same_and_are_compiled_once_for_all_lengths(
    kind: str, recomputed: bool, autocast: bool
) -> None:
    network = network_of(kind).train()
    changed = deepcopy(network)
    technique = lit_efficient.MemoryEfficientLayers("compile")
    if recomputed:
        apply(network, [ActivationCheckpointing()])
    report = apply(changed, [ActivationCheckpointing(), technique] if recomputed else [technique])
    summary = report["MemoryEfficientLayers"].summary
    assert "7 of them by compiled kernels; 2 layers rotate queries and keys by compiled kernels" in summary
    assert list(network.state_dict()) == list(changed.state_dict())
    made = []
    for length in (20, 11, 28):
        for each in (changed, deepcopy(changed)):  # a copy shares the kernels
            results = []
            for one in (network, each):
                one.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    out = one(torch.arange(3 * length).view(3, length) % 60)
                    out = out if isinstance(out, Tensor) else out.logits
                out.float().square().mean().backward()
                results.append([out.detach(), *(p.grad for p in one.parameters())])
            for plain, fused in zip(*results, strict=True):
                assert (plain - fused).norm() <= (2e-3 if autocast else 1e-5) * plain.norm()  # bfloat16 rounds by 2e-3
        made.append(graphs())
    assert made[0] == made[1] == made[2]


class Lengths(L.LightningModule):
    """Fits a small Llama to texts whose number and length differ from batch to batch, and validates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = network_of("llama")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch).logits.float().square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def train_dataloader(self) -> DataLoader[Tensor]:
        shapes = [(2, 12), (4, 20)]
        return DataLoader([torch.arange(a * b).view(a, b) % 60 for a, b in shapes], batch_size=None)

    val_dataloader = train_dataloader


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.turns(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_resumed_fit_of_compiled_layers_is_the_whole_fit(tmp_path: Path, precision: Any) -> None:
    def fit(steps: int, resumed: Path | None = None) -> dict[str, Tensor]:
        techniques = [LoRA(), ActivationCheckpointing(), lit_efficient.MemoryEfficientLayers("compile")]
        run = trainer(techniques, max_epochs=steps // 2, precision=precision, val_check_interval=1)
        module = Lengths()
        run.fit(module, ckpt_path=resumed, weights_only=False)
        run.save_checkpoint(tmp_path / f"{steps}.ckpt")
        assert run.global_step == steps
        return dict(module.state_dict())

    whole = fit(4)
    made = graphs()
    fit(2)
    resumed = fit(4, tmp_path / "2.ckpt")
    assert graphs() == made  # later fits in a process share the kernels
    assert_equal(resumed, whole)


def test_a_plan_counts_only_results_and_gradients_of_compiled_layers() -> None:
    size = 4 * 1024
    peaks = []
    for run in (layers._activated_product, partial(as_compiled, layers._activated_product)):
        with FakeTensorMode():
            gate, up = (torch.empty(1024, requires_grad=True) for _ in range(2))
            meter = KindMeter()
            meter.add([gate, up])
            meter.step()
            with meter:
                out = run(F.silu, gate, up)
                peaks.append(meter.step().peak)
                out.backward(torch.empty_like(out))
                peaks.append(meter.step().peak)
            assert gate.grad is not None
            assert gate.grad.shape == gate.shape
    assert peaks[2:] == [3 * size, 6 * size]  # inputs and result; a slope and two gradients
    assert peaks[0] > peaks[2]
    assert peaks[1] > peaks[3]


def test_a_plan_keeps_only_inputs_that_a_gradient_needs() -> None:
    with FakeTensorMode():
        x = torch.empty(1024, requires_grad=True)
        table = torch.empty(1024)
        with SavedTensors([]) as saved:
            as_compiled(lambda x, table: x * table, x, table)
        assert saved.bytes == table.nbytes
        with SavedTensors([]) as saved:
            as_compiled(lambda x, table: x.exp() * table, x, table)
        assert saved.bytes == x.nbytes + table.nbytes
