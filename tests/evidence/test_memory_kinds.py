"""Tests of memory by kind, against sums by hand and the meter of all bytes."""

import contextlib
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_efficient import EMA, LoRA
from lit_efficient.evidence.memory_kinds import KINDS, KindMeter, StepMeter
from lit_efficient.internals.torch_fake import FakeTensorMode
from lit_efficient.mechanisms.trials.memory import AllocationMeter

VOCABULARY, WIDTH, TOKENS = 48, 16, 64


class Words(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.ones(7))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(F.gelu(self.layer(self.table(batch))))
        return F.cross_entropy(logits, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], foreach=False)


class Counted(L.Callback):
    """Callback that counts all bytes of the second step."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Tensor, i: int) -> None:
        if i == 1:
            states = [t for s in trainer.optimizers[0].state.values() for t in s.values()]
            average = next((list(c._average.values()) for c in trainer.callbacks if isinstance(c, EMA)), [])
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            live = [*pl_module.parameters(), *pl_module.buffers(), *states, *average, *gradients, batch]
            self.meter = AllocationMeter(live)
            self.meter.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, out: object, batch: Tensor, i: int
    ) -> None:
        if i == 1:
            self.meter.__exit__(None, None, None)


def _measured(*callbacks: L.Callback) -> tuple[StepMeter, AllocationMeter, Words]:
    meter, counted, module = StepMeter(), Counted(), Words()
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(max_steps=2, callbacks=[*callbacks, counted, meter], accelerator="cpu", **silent)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randint(VOCABULARY, (2 * TOKENS,)), TOKENS))
    return meter, counted.meter, module


def test_bytes_by_kind() -> None:
    meter, counted, module = _measured(EMA(decay=0.9))
    first, second = meter.steps
    weights = 4 * sum(p.numel() for p in module.parameters())
    assert second.resident["weights"] == second.resident["gradients"] == second.resident["averages"] == weights
    assert second.resident["states"] == 2 * weights + 4 * 4  # and a count of steps for each of four parameters
    assert second.resident["buffers"] == 7 * 4
    assert "states" not in first.kinds
    assert second.kinds["states"] == second.resident["states"]
    assert second.kinds["logits"] == 3 * 4 * TOKENS * VOCABULARY  # logarithms, their gradient, and the logits'
    assert abs(second.peak - counted.peak) <= 0.01 * counted.peak
    for step in meter.steps:
        assert sum(step.kinds.values()) == step.peak == max(moment.bytes for moment in step.timeline)
        assert set(step.kinds) <= set(KINDS)
        assert {"forward", "backward", "optimizer step"} <= {moment.name for moment in step.timeline}


def test_adapters_are_apart() -> None:
    meter, _, module = _measured(LoRA(rank=2, targets=["layer"]))
    added = 4 * 2 * (WIDTH + 2 * WIDTH)
    resident = meter.steps[1].resident
    assert resident["adapters"] == resident["gradients"] == added
    assert resident["weights"] == 4 * sum(p.numel() for p in module.parameters()) - added
    assert not any(p._backward_hooks for p in module.parameters())  # the meter takes its hooks off


def _peak_without_a_meter(step: Callable[[], None]) -> int:
    """Return the peak of the bytes that a step allocates, as torch's profiler records them."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("head", "tables"),
    [
        (lambda hidden, table: table @ hidden.T, 2),  # the second gradient is added to the first
        (F.linear, 3),  # its gradient is a view, to which autograd does not add
        (lambda hidden, table: (table @ hidden.T) * (table @ (2 * hidden.T)), 2),  # three uses
    ],
)
def test_gradients_of_several_uses_are_added_as_without_a_meter(head: Any, tables: int, fake: bool) -> None:
    def step(ids: Tensor, table: Tensor) -> None:
        head(F.embedding(ids, table), table).sum().backward()

    ids = torch.arange(2)
    real = nn.Parameter(torch.randn(4096, WIDTH))
    expected = _peak_without_a_meter(lambda: step(ids, real))
    assert expected == pytest.approx(tables * real.nbytes, rel=0.15)  # logits are small
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext():
        table = nn.Parameter(torch.empty(4096, WIDTH))
        meter = KindMeter()
        meter.know(nn.ParameterList([table]))
        meter.step()
        with meter:
            step(ids, table)
    assert meter.step().peak - table.nbytes == pytest.approx(expected, rel=0.01)


def test_a_sum_that_a_node_makes_of_its_own_tensors_is_new() -> None:
    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.new_ones(1024) + gradient.new_ones(1024)

    x = torch.zeros(1024, requires_grad=True)
    loss = Sums.apply(x)
    meter = KindMeter()
    with meter:
        loss.backward()
    assert meter.step().peak >= 3 * x.nbytes
