"""ThroughputMeter counts what formulas on paper give, of tokens that are no padding, and changes no bit of the run."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lit_efficient import (
    ActivationCheckpointing,
    Compile,
    ConfigurationError,
    LanguageModeling,
    LoRA,
    StochasticDepth,
    ThroughputMeter,
)
from lit_efficient.cli.defaults import add_default_parts
from lit_efficient.internals.torch_compiler import counts
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.mechanisms.flops import FlopMeter, mixed_peak
from lit_efficient.mechanisms.metering import Amount, held_bytes, measure
from lit_efficient.mechanisms.run_figures import RunFigures
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from tests.support import assert_equal, trainer, weights

CONFIG = GPTConfig(48, dim=32, depth=2, num_heads=4, hidden_dim=64, max_length=32, tie_embeddings=False)
LENGTH, ROWS = 16, 4
ATTENTION = 12 * CONFIG.depth * CONFIG.dim  # of a pair of tokens: 2 products forward and 4 backward, in all blocks


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = GPT(CONFIG)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["input_ids"], position_ids=batch.get("position_ids"))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Kept(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append(dict(metrics))


def rows(count: int = 12, **more: Any) -> DataLoader[Any]:
    data: Any = [{"input_ids": torch.arange(LENGTH) % 48, **more}] * count
    return DataLoader(data, batch_size=ROWS)


def fit(*callbacks: Any, module: Model | None = None, loader: Any = None, **options: Any) -> Any:
    module = module or Model()
    run = trainer(callbacks, **({"max_steps": 3, "log_every_n_steps": 1} | options))
    run.fit(module, loader or rows())
    return module


def matrices(module: nn.Module) -> int:
    """Elements that are multiplied: all but embeddings, which are looked up, and norms."""
    return sum(p.numel() for name, p in module.named_parameters() if p.ndim == 2 and "embedding" not in name)


def test_a_transformer_costs_six_operations_a_weight_and_twelve_a_pair_and_width() -> None:
    module = fit(meter := ThroughputMeter(peak_flops=1e12))
    assert meter.flops is not None
    assert (meter.flops.position, meter.flops.row, meter.flops.document) == (6 * matrices(module), ATTENTION, 0)
    assert meter.flops.position_again == 0
    assert meter.flops.row_again == ATTENTION / 6  # the fused backward pass forms the scores again


def test_what_a_network_is_asked_before_its_first_step_is_not_counted() -> None:
    module: Any = LanguageModeling(CONFIG, warmup_steps=0)
    loader = rows(4, labels=torch.arange(LENGTH) % 48)
    trainer([meter := ThroughputMeter()], max_steps=1, log_every_n_steps=1).fit(module, loader, loader)
    assert meter.flops is not None
    assert meter.flops.position == 6 * matrices(module)


def test_blocks_that_are_dropped_by_chance_are_counted_in_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[Any] = []
    module = Model()
    for block in module.net.blocks:
        block.mlp.register_forward_hook(lambda *_: ran.append(1))
    drops = StochasticDepth(0.5, mode="uniform")
    fit(drops, meter := ThroughputMeter(), module=module, loader=rows(16 * ROWS), max_steps=16)
    with caplog.at_level("INFO"):
        fit(StochasticDepth(0.5, mode="uniform"), ThroughputMeter(), max_steps=2)  # says what it has counted
    assert "operations per token" in caplog.text
    head = 48 * 32
    assert meter.flops is not None
    assert meter.flops.position == pytest.approx(6 * (head + len(ran) / 32 * (matrices(module) - head)))


def test_experts_in_groups_cost_what_they_cost_one_by_one() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=64, num_hidden_layers=1, num_local_experts=4, **sizes)
    ids, sums = torch.arange(64).view(4, 16), []
    for how in ("eager", "grouped_mm"):
        network = MixtralForCausalLM._from_config(config, experts_implementation=how)
        with FlopMeter(16) as meter:
            network(input_ids=ids, labels=ids).loss.backward()
        assert not meter.unknown
        sums.append(meter.sums)
    assert sums[0] == sums[1]


def test_frozen_weights_cost_four_and_adapters_six() -> None:
    module = fit(LoRA(rank=2), meter := ThroughputMeter())
    adapters = sum(p.numel() for p in module.parameters() if p.requires_grad)
    # Nothing before the first block trains: its three projections, and their adapters' first halves, pass nothing on.
    first = 2 * 3 * 32 * 32 + 2 * 3 * 32 * 2
    frozen = matrices(module) - adapters
    assert meter.flops is not None
    assert meter.flops.position == 4 * frozen + 6 * adapters - first


def test_what_is_computed_again_is_the_hardwares_alone() -> None:
    module = fit(ActivationCheckpointing(), meter := ThroughputMeter())
    plain = 6 * matrices(module)
    head = 48 * 32
    last = 32 * 64  # a block's last product is nobody's to save: it is left out
    assert meter.flops is not None
    assert meter.flops.position == plain
    assert meter.flops.position_again == 2 * (matrices(module) - head - CONFIG.depth * last)
    assert meter.flops.row_again == ATTENTION / 6 + ATTENTION / 3


def test_compiled_blocks_are_counted_and_compiled_all_the_same() -> None:
    graphs = counts()[0]
    module = fit(Compile(backend="eager"), meter := ThroughputMeter())
    assert meter.flops is not None
    assert meter.flops.position == 6 * matrices(module)
    assert counts()[0] > graphs


def test_attention_between_documents_and_padding_are_not_the_models() -> None:
    positions = torch.tensor([*range(3), *range(5), *range(8)])
    labels = torch.tensor([1] * 8 + [IGNORE] * 8)  # the last document fills the row up
    clock = Kept()
    meter = ThroughputMeter(peak_flops=1e12)
    fit(meter, loader=rows(position_ids=positions, labels=labels), logger=clock)
    amount, _ = measure(next(iter(rows(position_ids=positions, labels=labels))))
    assert (amount.positions, int(amount.real)) == (ROWS * 16, ROWS * 8)
    assert (amount.squares, int(amount.pairs)) == (ROWS * 256, ROWS * (9 + 25))
    assert meter.flops is not None
    linear = meter.flops.position
    assert meter.flops.model(amount) == ROWS * (8 * linear + 34 * ATTENTION)
    assert meter.flops.hardware(amount) == ROWS * (16 * linear + (34 + 64) * ATTENTION * 7 / 6)  # padding's, too
    last = clock.rows[-1]
    assert last["tokens_per_second_padded"] == pytest.approx(2 * last["tokens_per_second"])
    ratio = meter.flops.hardware(amount) / meter.flops.model(amount)
    assert last["hfu"] == pytest.approx(ratio * last["mfu"])
    assert last["model_tflops"] == pytest.approx(last["mfu"])  # of 1e12


def test_a_document_that_fills_its_row_counts_among_documents() -> None:
    whole, halves = torch.arange(16), torch.arange(16) % 8
    data: Any = [{"input_ids": torch.arange(16), "position_ids": p} for p in (whole, halves, halves, halves)]
    fit(meter := ThroughputMeter(), loader=DataLoader(data, batch_size=ROWS), max_steps=1)
    amount, _ = measure(next(iter(DataLoader(data, batch_size=ROWS))))
    assert meter.flops is not None
    attention = meter.flops.model(amount) - meter.flops.position * ROWS * 16
    assert attention == pytest.approx((256 + 3 * 128) * ATTENTION)


def test_lengths_of_documents_and_padded_rows() -> None:
    ids = torch.ones(2, 6, dtype=torch.long)
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 6, [0] * 4 + [1] * 2])}
    assert measure(padded) == (Amount(12, torch.tensor(8), 72, torch.tensor(40), torch.tensor(40)), "tokens")
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])}
    assert int(measure(packed)[0].pairs) == 9 + 4 + 1 + 36
    assert measure({"input_ids": ids})[0] == Amount(12, 12, 72, 72, 72)
    assert measure([torch.ones(7, 2)]) == (Amount(7, 7), "samples")
    assert measure({"input_ids": torch.ones(5)})[0] == Amount(5, 5)  # rows of one token have no pairs


@pytest.mark.parametrize("network", ["gpt", "llama", "convolution"])
def test_sums_are_those_of_torchs_own_counter(network: str) -> None:
    torch.manual_seed(0)
    call: Any
    if network == "convolution":
        net: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, groups=2))
        call, length = (lambda: net(torch.ones(2, 3, 8, 8)).sum()), 0
    elif network == "llama":
        from transformers import AutoModelForCausalLM, LlamaConfig

        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=48)
        net = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # whose products are plain ones
        ids, length = torch.arange(32).view(2, 16), 16
        call = lambda: net(input_ids=ids, labels=ids, use_cache=False).loss  # noqa: E731
    else:
        net, ids, length = GPT(CONFIG), torch.arange(32).view(2, 16), 16
        call = lambda: net(ids).sum()  # noqa: E731
    with FlopMeter(length) as meter:
        call().backward()
    with FlopCounterMode(display=False) as counter:
        call().backward()
    missing = 3.5 * 4 * 32 * 2 * 2 * 256 if network == "gpt" else 0  # torch has no formula for the CPU's attention
    assert meter.sums.total() == counter.get_total_flops() + missing
    assert meter.sums["row"] == (0 if network == "convolution" else 2 * 256 * ATTENTION)


class Elementwise(Model):
    """Multiplies no matrices in its first ``empty`` steps."""

    empty = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx >= self.empty else self.net.norm.weight.sum()


def test_a_step_without_operations_is_tried_again_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def counting(self: Any) -> Any:
        counted.append(1)
        return nullcontext()

    monkeypatch.setattr(ThroughputMeter, "_counting", counting)
    fit(ThroughputMeter(), max_steps=6, loader=rows(24))
    assert len(counted) == 3 * 2  # forward and backward
    monkeypatch.undo()
    fit(meter := ThroughputMeter(), module=Elementwise(), max_steps=6, loader=rows(24))
    assert meter.flops is not None
    assert meter.flops.position == 6 * matrices(Model())


def test_odd_ones_are_counted_or_named() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    with FlopMeter() as meter:
        x = torch.randn(4, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad((x @ weight).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert meter.sums["position_again"] == 0  # a penalty on gradients is the model's own
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    layer = nn.Linear(8, 4)
    with FlopMeter() as meter:
        layer(nested).values().sum().backward()
    assert meter.sums == {"position": 3 * 2 * 8 * 8 * 4}
    with FlopMeter() as meter:
        nn.LSTM(8, 8)(torch.randn(3, 2, 8))[0].sum().backward()
    assert any("rnn" in name for name in meter.unknown)
    with FlopMeter() as meter:
        torch.zeros(8, 8).addmm_(x.detach().t(), x.detach())
    assert meter.sums == {"position": 2 * 4 * 8 * 8}

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            x, w = ctx.saved_tensors
            return g @ w.t(), x.t() @ g

    for reentrant in (True, False):
        with FlopMeter() as meter:
            checkpoint(lambda x: Own.apply(x.sin(), weight), x, use_reentrant=reentrant).sum().backward()
        assert meter.sums == {"position": 3 * 512, "position_again": 512}


@pytest.mark.parametrize("technique", [None, ActivationCheckpointing])
def test_not_a_bit_changes(technique: Any) -> None:
    callbacks = [technique()] if technique else []
    assert_equal(weights(fit(*callbacks)), weights(fit(*callbacks, ThroughputMeter())))


def test_a_resumed_run_does_not_count_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ThroughputMeter()
    run = trainer([first], max_steps=1, log_every_n_steps=1)
    run.fit(Model(), rows())
    run.save_checkpoint(tmp_path / "one.ckpt")
    monkeypatch.setattr("lit_efficient.callbacks.throughput_meter.FlopMeter", None)
    second = ThroughputMeter()
    trainer([second], max_steps=2, log_every_n_steps=1).fit(
        Model(), rows(), ckpt_path=tmp_path / "one.ckpt", weights_only=True
    )
    assert second.flops == first.flops
    assert second._by_type == first._by_type


def test_a_resumed_run_with_other_techniques_counts_what_it_computes(tmp_path: Any) -> None:
    run = trainer([ThroughputMeter()], max_epochs=1, log_every_n_steps=1)
    run.fit(Model(), rows())
    run.save_checkpoint(tmp_path / "one.ckpt")
    resumed, whole = ThroughputMeter(), ThroughputMeter()
    for meter, path in ((resumed, tmp_path / "one.ckpt"), (whole, None)):
        again = trainer([meter, ActivationCheckpointing()], max_epochs=2, log_every_n_steps=1)
        again.fit(Model(), rows(), ckpt_path=path, weights_only=True)
    assert whole.flops is not None
    assert resumed.flops == whole.flops


class Thawing(L.Callback):
    """Freezes all but the head until the second batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for block in pl_module.net.blocks:
            block.requires_grad_(batch_idx >= 1)


def test_other_weights_that_train_are_counted_again() -> None:
    fit(Thawing(), meter := ThroughputMeter(), loader=rows(24), max_steps=2)
    assert meter.flops is None  # the second step's log has seen it: the third counts
    fit(Thawing(), meter, loader=rows(24), max_steps=4)
    assert meter.flops is not None
    assert meter.flops.position == 6 * matrices(Model())


def test_memory_by_kind_and_a_line_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        module = fit(meter := ThroughputMeter(peak_flops=1e12), max_steps=4, loader=rows(24))
    size = 4 * sum(p.numel() for p in module.parameters())
    assert meter.figures["memory_weights_gib"] == held_bytes(module.parameters()) / 2**30 == size / 2**30
    assert meter.figures["memory_gradients_gib"] == size / 2**30
    steps = 4 * len([*module.parameters()])  # AdamW counts them in tensors
    assert meter.figures["memory_optimizer_gib"] == (2 * size + steps) / 2**30
    said = [record.message for record in caplog.records if record.message.startswith("ThroughputMeter: ")]
    assert len(said) == 2
    assert "operations per token" in said[0]
    assert "tokens/s; MFU" in said[1]
    assert "of the time waiting for data" in said[1]


def test_the_command_line_adds_no_second_one_beside_it() -> None:
    config: dict[str, Any] = {"callbacks": [ThroughputMeter()], "logger": False}
    add_default_parts(config, "fit")
    assert [type(one) for one in config["callbacks"] if isinstance(one, RunFigures)] == [ThroughputMeter]


def test_peaks_are_dense_ones() -> None:
    half, single = Counter({torch.bfloat16: 3}), Counter({torch.float32: 1})
    peaks = {name: mixed_peak(name, half) for name in ("NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB")}
    assert peaks == {
        "NVIDIA H200": pytest.approx(9.89e14),  # Lightning's table has the one with sparsity
        "NVIDIA H100 PCIe": pytest.approx(7.56e14),
        "NVIDIA A100-SXM4-80GB": pytest.approx(3.12e14),
    }
    assert mixed_peak("NVIDIA A100-SXM4-80GB", single) == pytest.approx(1.95e13)
    # As long for a third of them as for the other two.
    assert mixed_peak("NVIDIA A100-SXM4-80GB", half + single) == pytest.approx(4 / (3 / 3.12e14 + 1 / 1.95e13))
    for name in ("NVIDIA L4000", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        assert mixed_peak(name, half) is None


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), True, "fast"])
def test_a_peak_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="ThroughputMeter: peak_flops must be above 0 or null, got"):
        ThroughputMeter(peak_flops=value)
