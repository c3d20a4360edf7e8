"""Tests of plans against the counted bytes of real fits: of this package, of transformers, and of a plain module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lit_efficient as le
from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.fits import Change, LiveFit
from lit_efficient.evidence.memory_kinds import KindMeter, StepMeter
from lit_efficient.internals.torch_fake import FakeTensorMode
from lit_efficient.optimizers import float32_step

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and of techniques, on fits as small as these
VOCABULARY = 256
LENGTH, DIM, HEADS, HIDDEN, BATCH = 256, 64, 4, 96, 2  # of the GPT that is planned for CUDA
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Rows(Dataset[Any]):
    """Dataset of tokens, or of images with labels."""

    def __init__(self, pictures: bool) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if self.pictures:
            return torch.full((1, 16, 16), index / 24), index % 10
        tokens = torch.arange(index, index + 32) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class Network(L.LightningModule):
    """Module without this package."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            return self.network(**batch, use_cache=False).loss
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def llama() -> L.LightningModule:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(zip(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), (2, 4, 2)))
    return Network(LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, vocab_size=VOCABULARY, **shape)))


def gpt() -> L.LightningModule:
    return le.LanguageModeling(le.GPTConfig(dim=32, depth=2, num_heads=2, max_length=32, vocab_size=VOCABULARY))


def resnet() -> L.LightningModule:
    from benchmarks.technique_runs import ResNet

    return Network(ResNet((4, 8), 1))


def fits(module: L.LightningModule, callbacks: list[Any], **arguments: Any) -> tuple[L.Trainer, Any, Any]:
    trainer = L.Trainer(max_steps=2, accelerator="cpu", limit_val_batches=0, callbacks=callbacks, **QUIET, **arguments)
    tokens = isinstance(module, le.LanguageModeling) or hasattr(module.network, "config")
    return trainer, module, DataLoader(Rows(pictures=not tokens), 4)


CASES: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], list[Any]], dict[str, Any]]] = {
    "gpt": (gpt, list, {}),
    "gpt-ema": (gpt, lambda: [le.EMA()], {}),
    "gpt-lora-nf4": (gpt, lambda: [le.LoRA(rank=2), le.QuantizeBase()], {}),
    "llama": (llama, list, {"accumulate_grad_batches": 2}),
    "llama-recomputed": (llama, lambda: [le.ActivationCheckpointing()], {"precision": "bf16-true"}),
    "llama-mixed": (llama, list, {"precision": "bf16-mixed", "gradient_clip_val": 1.0}),
    "resnet": (resnet, list, {}),
    "resnet-8bit": (resnet, lambda: [le.LowBitOptimizer(bits=8, min_size=0)], {}),
}


@pytest.mark.turns(3, always=["gpt", "llama"])
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_a_real_step(name: str) -> None:
    make, callbacks, arguments = CASES[name]
    planned = le.plan(LiveFit(*fits(make(), callbacks(), **arguments)))
    meter = StepMeter()
    trainer, module, data = fits(make(), [*callbacks(), meter], **arguments)
    trainer.fit(module, data)
    real = meter.steps[1]
    assert abs(planned.peak - real.peak) <= 0.001 * real.peak
    for kind, size in planned.kinds.items():
        assert abs(size - real.kinds.get(kind, 0)) <= 0.002 * real.peak, kind
    assert sum(planned.kinds.values()) == planned.peak
    if name != "gpt-lora-nf4":
        assert planned.parameters == sum(p.numel() for p in module.parameters())
    assert {technique for technique, _ in planned.techniques} == {type(one).__name__ for one in callbacks()}


def mixtral() -> L.LightningModule:
    shape = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "vocab_size": VOCABULARY}
    return le.LanguageModeling(le.CausalLMConfig(config_fields=shape))


@pytest.mark.turns(3, always=["gpt-nf4", "gpt-int4"])
@pytest.mark.parametrize(
    ("make", "how"),
    [
        pytest.param(gpt, {}, id="gpt-nf4"),
        pytest.param(gpt, {"format": "int4"}, id="gpt-int4"),
        pytest.param(gpt, {"format": "int8"}, id="gpt-int8"),
        pytest.param(mixtral, {"experts": True}, id="mixtral-experts"),
    ],
)
def test_quantised_weights_count_as_floats(make: Callable[[], L.LightningModule], how: dict[str, Any]) -> None:
    """Codes count as the weights that they encode, and products with them as those of dense layers."""
    dense = le.plan(LiveFit(*fits(make(), [le.LoRA(rank=2)])))
    codes = le.plan(LiveFit(*fits(make(), [le.LoRA(rank=2), le.QuantizeBase(**how)])))
    assert (codes.parameters, codes.trainable, codes.flops) == (dense.parameters, dense.trainable, dense.flops)
    assert codes.kinds["weights"] < dense.kinds["weights"]


@pytest.mark.turns(6, family="slow")
def test_a_plan_changes_nothing() -> None:
    trainer, module, data = fits(resnet(), [le.EMA()])
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    first = le.plan(LiveFit(trainer, module, data))
    larger = le.plan(LiveFit(trainer, module, data), Change(callbacks=lambda: [le.ActivationCheckpointing()]))
    rounded = le.plan(LiveFit(trainer, module, data), device="cuda")
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert trainer.callbacks[0]._average == {}
    assert larger.kinds["activations"] < first.kinds["activations"]
    assert rounded.kinds["margin"] > 0
    assert (first.batch, first.unit, first.amount) == (4, "samples", 4)
    with pytest.raises(ConfigurationError, match="device"):
        le.plan(LiveFit(trainer, module, data), device="abacus")


def planned_for_cuda(depth: int, *callbacks: L.Callback) -> le.Plan:
    """Return the plan of a GPT on packed rows."""
    config = le.GPTConfig(4096, DIM, depth, HEADS, num_kv_heads=2, hidden_dim=HIDDEN, max_length=LENGTH)
    tokens = torch.zeros(LENGTH, dtype=torch.long)
    row = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(LENGTH) % 64}
    how: dict[str, Any] = {"max_steps": 2, "accelerator": "cpu", "limit_val_batches": 0, "precision": "bf16-true"}
    trainer = L.Trainer(**how, **QUIET, callbacks=[*callbacks])
    return le.plan(LiveFit(trainer, le.LanguageModeling(config), DataLoader([row] * 4, BATCH)), device="cuda")


@pytest.mark.turns(6, family="slow")
def test_a_plan_for_cuda_has_offloaded_tensors_of_two_blocks() -> None:
    plain = [planned_for_cuda(depth).kinds["activations"] for depth in (5, 6)]
    block = plain[1] - plain[0]
    offloaded = [planned_for_cuda(depth, le.ActivationOffload(min_bytes=1)).kinds["activations"] for depth in (5, 6)]
    assert offloaded[1] - offloaded[0] < 0.05 * block
    assert plain[0] - offloaded[0] > 2.5 * block
    with pytest.raises(ConfigurationError, match="nothing can be saved"):  # and on a CPU there is none to leave
        le.plan(LiveFit(*fits(llama(), [le.ActivationOffload()])))


@pytest.mark.turns(6, family="slow")
def test_a_plan_for_cuda_offloads_the_blocks_that_the_bus_hides() -> None:
    """Copies that take the time of 1.5 blocks are hidden behind two: the first and the third of six are moved."""

    def planned(depth: int, *techniques: L.Callback) -> le.Plan:
        return planned_for_cuda(depth, *techniques)

    plain, more = planned(6), planned(7)
    block = more.kinds["activations"] - plain.kinds["activations"]
    flops = (more.flops - plain.flops) / 3  # forward and backward pass
    for blocks, moved in ((1.5, 2), (1e6, 0)):
        technique = le.ActivationOffload(min_bytes=1, flops_per_byte=blocks * flops / block)
        found = planned(6, technique).kinds["activations"]
        assert plain.kinds["activations"] - found == pytest.approx(moved * block, abs=0.3 * block)


@pytest.mark.turns(6, family="slow")
def test_a_plan_for_cuda_has_swapped_weights_of_two_blocks_and_offloaded_states_of_two_pieces() -> None:
    def planned(depth: int, *techniques: L.Callback) -> le.Plan:
        return planned_for_cuda(depth, le.ActivationCheckpointing(), le.LoRA(rank=2, targets=["up"]), *techniques)

    plain, more = planned(6), planned(7)
    swapped, longer = planned(6, le.BlockSwap()), planned(7, le.BlockSwap())
    block = more.kinds["weights"] - plain.kinds["weights"]
    norms = 2 * 2 * DIM  # are frozen, too
    assert block == 2 * (2 * DIM * DIM + 2 * DIM * DIM // 2 + 3 * DIM * HIDDEN) + norms
    assert longer.kinds["weights"] == swapped.kinds["weights"]
    assert plain.kinds["weights"] - swapped.kinds["weights"] == 4 * block
    assert swapped.kinds["activations"] == plain.kinds["activations"]
    assert swapped.host >= 4 * block
    whole = planned_for_cuda(6)
    away = planned_for_cuda(6, le.OffloadOptimizer(piece_mb=1))
    states = whole.resident["states"]
    assert away.resident["states"] < 0.01 * states
    assert away.host >= 0.99 * states
    largest = max(2 * 2**20, 2 * 4096 * DIM)  # of the parameters of a piece, or of one parameter
    assert away.kinds["states"] <= 2 * 2 * largest
    for technique in (le.OffloadOptimizer(gradients=True), le.BlockSwap(trained=True)):
        with pytest.raises(ConfigurationError, match="cannot be planned without a GPU"):
            planned_for_cuda(6, technique)


@pytest.mark.turns(6, family="slow")
def test_a_plan_for_cuda_of_packed_rows_grows_linearly_with_their_length() -> None:
    """Windows, too: no mask of T x T. Embeddings and logits are linear by themselves."""
    from transformers import MistralConfig

    fields = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    fields |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 8192}

    def peak(length: int, window: int | None) -> int:
        config = MistralConfig(**fields, sliding_window=window).to_dict()
        tokens = torch.zeros(length, dtype=torch.long)
        row = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(length) % 300}
        module = le.LanguageModeling(le.CausalLMConfig(config_fields={"model_type": "mistral", **config}))
        trainer = L.Trainer(max_steps=2, accelerator="cpu", limit_val_batches=0, precision="bf16-true", **QUIET)
        return le.plan(LiveFit(trainer, module, DataLoader([row] * 4, 1)), device="cuda").peak

    for window in (None, 128):
        one, two, four = (peak(length, window) for length in (512, 1024, 2048))
        assert four - two <= 2.01 * (two - one)


def test_a_plan_for_cuda_keeps_what_its_kernels_keep() -> None:
    """The bytes of an additional block: outputs of products and gates, inputs of norms. Rotary tables are shared."""
    rows = BATCH * LENGTH
    norms = 2 * rows * (2 * 2 * DIM + 4)  # input, output, 1/rms
    attention = rows * (2 * 2 * DIM + 2 * 2 * DIM // 2 + 4 * HEADS)  # q and its result, by token; k, v; sums
    gates = 4 * 2 * rows * HIDDEN
    one, two = (planned_for_cuda(depth).kinds["activations"] for depth in (1, 2))
    assert two - one == norms + attention + gates


@pytest.mark.turns(6, family="slow")
def test_data_with_fewer_batches_than_a_step_is_planned_as_enough_data() -> None:
    def planned(batch_size: int, **options: Any) -> Any:
        trainer, module, _ = fits(gpt(), [], accumulate_grad_batches=8, max_epochs=1, **options)
        return le.plan(LiveFit(trainer, module, DataLoader(Rows(pictures=False), batch_size)))

    enough = planned(1)
    assert enough.kinds["states"] >= 2 * enough.kinds["gradients"] > 0  # of the second step
    few = planned(1, limit_train_batches=1)
    assert (few.peak, few.kinds, few.flops) == (enough.peak, enough.kinds, enough.flops)
    assert planned(24).flops == 24 * enough.flops  # a single batch


@pytest.mark.parametrize("elements", [640, 1000, 1024])
def test_rounding_needs_as_much_memory_without_values_in_one_piece_as_with_them_in_many(elements, monkeypatch) -> None:
    monkeypatch.setattr(float32_step, "_ROUNDED", 64)
    peaks = []
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            weight = torch.empty(elements)
            meter = KindMeter()
            meter.add(weight)
            meter.step()
            with meter:
                float32_step.round_stochastically(weight)
            peaks.append(meter.step().peak)
    assert peaks[0] == peaks[1] > 6 * elements  # the weight, its result, and the draws of a piece


def test_flops_are_counted() -> None:
    """Two linear layers: twice the products in forward, and in backward for the weights and the inputs."""
    module = Network(nn.Sequential(nn.Flatten(), nn.Linear(256, 32, bias=False), nn.Linear(32, 10, bias=False)))
    planned = le.plan(LiveFit(*fits(module, [])))
    first, second = 2 * 4 * 256 * 32, 2 * 4 * 32 * 10
    assert planned.flops == 2 * first + 3 * second


def test_what_needs_values_is_left_out_and_said() -> None:
    class Curious(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.network[1].weight.unique()

    module = Network(nn.Sequential(nn.Flatten(), nn.Linear(256, 10)))
    planned = le.plan(LiveFit(*fits(module, [Curious()])))
    assert any(note.startswith("Curious") for note in planned.notes)


class Recurrent(Network):
    """Module with an LSTM's workspace, which fake tensors lack, and a history that grows with each step."""

    def __init__(self, steps: int = 16, history: int = 0) -> None:
        super().__init__(nn.LSTM(16, 12, num_layers=2, bidirectional=True))
        self.steps, self.history = steps, history

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch[0].reshape(-1, 16).repeat(self.steps // 16, 1).view(self.steps, -1, 16)
        return 1e4 * (self.network(rows)[0] - 1).square().mean()  # or LBFGS stops, and remembers nothing

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.history:
            return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=2, history_size=self.history)
        return super().configure_optimizers()


@pytest.mark.parametrize(("steps", "history"), [(16, 0), (160, 0), (16, 3)])
def test_an_lstm_on_a_cpu_and_a_history_that_grows_are_counted(steps: int, history: int) -> None:
    def source() -> tuple[L.Trainer, L.LightningModule, DataLoader[Any]]:
        torch.manual_seed(0)
        trainer = L.Trainer(accelerator="cpu", max_steps=20 if history else 3, max_epochs=-1, **QUIET)
        return trainer, Recurrent(steps, history), DataLoader(Rows(True), 4)

    planned = le.plan(LiveFit(*source()))
    trainer, module, loader = source()
    trainer.callbacks.append(meter := StepMeter())
    trainer.fit(module, loader)
    assert planned.peak == pytest.approx(max(step.peak for step in meter.steps), rel=0.01)
    assert [note.partition(":")[0] for note in planned.notes] == (["LBFGS"] if history else [])


class Critic(L.LightningModule):
    """Module that steps its large network once in five batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(16, 256), nn.Linear(256, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, due in zip(self.optimizers(), (batch_idx % 5 == 4, True)):  # type: ignore[arg-type]
            if due:
                optimizer.zero_grad()
                self.manual_backward(self.critic(self.generator(batch[0][:, 0, 0])).square().mean())
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters()) for part in (self.generator, self.critic)]


def test_of_what_is_optimized_by_hand_the_largest_step_is_planned() -> None:
    def source() -> tuple[L.Trainer, L.LightningModule, DataLoader[Any]]:
        return L.Trainer(accelerator="cpu", max_steps=16, max_epochs=-1, **QUIET), Critic(), DataLoader(Rows(True), 2)

    planned = le.plan(LiveFit(*source()))
    trainer, module, loader = source()
    trainer.callbacks.append(meter := StepMeter())
    trainer.fit(module, loader)
    assert planned.peak == max(step.peak for step in meter.steps)


def test_sparse_gradients_are_said_to_be_left_out() -> None:
    class Looked(Network):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.network(batch["input_ids"]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SparseAdam(list(self.parameters()))

    trainer = L.Trainer(accelerator="cpu", max_steps=2, **QUIET)
    planned = le.plan(LiveFit(trainer, Looked(nn.Embedding(512, 16, sparse=True)), DataLoader(Rows(False), 4)))
    assert "sparse" in planned.at_least


class Chooses(Network):
    """Module that selects entries by value, or has rows of unequal lengths."""

    ragged = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.ragged:
            rows = torch.nested.nested_tensor(list(batch[0].flatten(1)), layout=torch.jagged)
            return self.network(rows).values().square().mean()
        states = self.network(batch[0].flatten(1))
        return states[torch.rand_like(states) < 0.25].square().mean()


def test_what_a_plan_cannot_know_is_no_plan_or_a_bound() -> None:
    trainer = L.Trainer(accelerator="cpu", max_steps=2, **QUIET)
    module, loader = Chooses(nn.Linear(256, 4)), DataLoader(Rows(True), 4)
    assert "select all entries" in le.plan(LiveFit(trainer, module, loader)).at_most
    module.ragged = True
    with pytest.raises(ConfigurationError, match="ragged nested tensors"):
        le.plan(LiveFit(trainer, module, loader))
