"""OptimizerInBackward: weights equal the plain optimizer's, and only one layer's gradients exist at a time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lit_efficient
from lit_efficient import (
    EMA,
    ActivationCheckpointing,
    ConfigurationError,
    ConflictError,
    FusedAdamW,
    GroupedAdafactor,
    Lion,
    LoRA,
    LowBitOptimizer,
    MaxBatchSize,
    MuonAdamW,
    NonFiniteGuard,
    RunMetrics,
    ScheduleFree,
)
from lit_efficient.errors import DivergedError
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from lit_efficient.optimizers.in_backward import InBackward, step_in_backward
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.processes import run_ranks
from tests.ranks import in_backward
from tests.support import Net, Toy, assert_equal, data, trainer, weights


class OptimizerInBackward(lit_efficient.OptimizerInBackward):
    """Record the number of gradients at each step of a parameter."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.alive: list[int] = []
        trainer.optimizers[0].in_backward.watchers.append(
            lambda _: self.alive.append(sum(p.grad is not None for p in pl_module.parameters()))
        )


def frees_each_gradient(run: Run) -> None:
    """One gradient existed at a time, each parameter was stepped, and no gradient is left."""
    (optimizer,) = run.trainer.optimizers
    assert isinstance(optimizer, InBackward)
    assert {*run.technique("OptimizerInBackward").alive} == {1}
    assert {*optimizer.gradients_taken} <= optimizer.state.keys()
    assert optimizer.gradients_taken
    assert all(p.grad is None for p in run.module.parameters())


ROW = Row(OptimizerInBackward, frees_each_gradient, OptimizerInBackward, changes=False)


class Tied(nn.Module):
    """Network whose embedding is also the head, and whose blocks share weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.block = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.checkpoints = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(3):
            x = checkpoint(self._step, x, use_reentrant=False) if self.checkpoints else self._step(x)
        return F.cross_entropy(x @ self.embed.weight.T, tokens.flip(0))

    def _step(self, x: Tensor) -> Tensor:
        return self.norm(x + self.block(x).tanh())


def both(network: nn.Module, kind: Callable[..., Any], **arguments: Any) -> list[tuple[nn.Module, Any]]:
    """Return the network twice, with an optimizer of two groups each; the second one steps in the backward pass."""
    made = []
    for early in (False, True):
        twin = copy.deepcopy(network)
        first, *rest = twin.parameters()
        optimizer = kind([{"params": [first], "weight_decay": 0.1}, {"params": rest, "lr": 5e-3}], lr=1e-2, **arguments)
        if early:
            step_in_backward(optimizer)
        made.append((twin, optimizer))
    return made


def train(network: nn.Module, optimizer: Any, steps: int = 3) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(steps):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = network(torch.arange(12).roll(step))
            loss.backward()
            return loss

        optimizer.step(closure)
        schedule.step()


def bnb(params: Any, **arguments: Any) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, min_8bit_size=16, **arguments)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW(foreach)": (torch.optim.AdamW, {"foreach": True}),
    "AdamW(amsgrad)": (torch.optim.AdamW, {"amsgrad": True}),
    "FusedAdamW": (FusedAdamW, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "GroupedAdafactor": (GroupedAdafactor, {"decay_norm_and_bias": False}),
    "Lion": (Lion, {}),
    "MuonAdamW": (MuonAdamW, {}),
    "MuonAdamW(dion)": (MuonAdamW, {"dion": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {}),  # whose states are there before the first step
    "NAdam": (torch.optim.NAdam, {}),
    "bitsandbytes": (bnb, {}),
}


def test_settings_that_are_found_by_a_parameter_s_place_are_refused() -> None:
    from bitsandbytes.optim import GlobalOptimManager

    net = nn.Linear(8, 8)
    known = GlobalOptimManager.get_instance()
    try:
        known.override_config(net.weight, "optim_bits", 32)
        step_in_backward(bnb(net.parameters()))  # which it finds by the parameter itself
        known.register_parameters(net.parameters())
        with pytest.raises(ConfigurationError, match=r"settings of single parameters, which AdamW8bit finds by their"):
            step_in_backward(bnb(net.parameters()))
        step_in_backward(torch.optim.AdamW(net.parameters()))
    finally:
        known.initialize()


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", KINDS)
def test_weights_and_states_equal_the_plain_optimizers_bit_for_bit(name: str, checkpoints: bool) -> None:
    kind, arguments = KINDS[name]
    network = Tied()
    network.checkpoints = checkpoints
    (plain, reference), (ours, optimizer) = both(network, kind, **arguments)
    stepped: list[int] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(len(optimizer.param_groups)))
    before = weights(ours)
    train(plain, reference)
    train(ours, optimizer)
    assert_equal(weights(plain), weights(ours))
    assert_equal(reference.state_dict(), optimizer.state_dict())
    assert not any(torch.equal(before[name], tensor) for name, tensor in weights(ours).items())
    assert stepped == [len(optimizer.param_groups)] * 3  # hooks once a step, with the user's groups
    assert all(p.grad is None for p in ours.parameters())
    assert type(optimizer).__name__ == type(reference).__name__
    again = type(reference)(optimizer.param_groups)
    again.load_state_dict(reference.state_dict())  # a run may go on without it, and with it
    optimizer.load_state_dict(reference.state_dict())


def test_it_is_one_optimizer_a_parameter_as_torchs_tutorial_has_it() -> None:
    network, ours = Tied(), Tied()
    ours.load_state_dict(network.state_dict())
    each = {p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in network.parameters()}

    def hook(p: Tensor) -> None:
        each[p].step()
        each[p].zero_grad()

    for p in network.parameters():
        p.register_post_accumulate_grad_hook(hook)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    step_in_backward(optimizer)
    for step in range(3):
        network(torch.arange(12).roll(step)).backward()
        optimizer.step(lambda step=step: ours(torch.arange(12).roll(step)).backward())
    assert_equal(weights(network), weights(ours))


def test_live_gradients_are_those_of_one_layer_at_every_moment() -> None:
    """All storages of gradients are counted while they live."""
    peaks = []
    for network, optimizer in both(Net(), torch.optim.AdamW):
        meter = AllocationMeter()
        for p in network.parameters():
            p.register_hook(meter.add)  # when autograd has made it

            p.register_post_accumulate_grad_hook(lambda p, meter=meter: meter.add(p.grad))

        def closure(network: nn.Module = network) -> None:
            network(torch.ones(2, 16)).square().mean().backward()

        optimizer.step(closure)
        peaks.append((meter.peak, meter.live))
    layers = [sum(p.nbytes for p in part.parameters(recurse=False)) for part in Net().modules()]
    total = sum(layers)
    assert peaks[0] == (total, total)
    assert peaks[1][0] <= max(layers) < total / 7
    assert peaks[1][1] == 0


def loss_that_needs_a_stepped_weight(p: Tensor) -> Tensor:
    x = torch.ones(3, requires_grad=True)
    first = x * p.detach()  # its backward pass comes last, and reads p
    return (first * p).sum()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdamW, bnb], ids=["AdamW", "FusedAdamW", "bitsandbytes"])
def test_a_weight_that_is_needed_after_its_step_is_an_error(kind: Any) -> None:
    """Fused kernels do not increase the version counter from which autograd detects changes."""
    p = nn.Parameter(torch.ones(3))
    optimizer = kind([p, nn.Parameter(torch.ones(3))])
    step_in_backward(optimizer)
    with pytest.raises(ConfigurationError, match=r"needs a weight again that it has stepped.*Leave step_in_backward"):
        optimizer.step(lambda: loss_that_needs_a_stepped_weight(p).backward())
    assert not p._post_accumulate_grad_hooks


def test_a_gradient_that_comes_in_parts_is_an_error() -> None:
    linear = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    step_in_backward(optimizer)

    def twice() -> None:
        x = torch.ones(2, 4, requires_grad=True)
        for _ in range(2):
            x = checkpoint(linear, x, use_reentrant=True)
        x.sum().backward()

    with pytest.raises(ConfigurationError, match=r"gradient in two parts.*use_reentrant=True"):
        optimizer.step(twice)
    assert len(optimizer.param_groups[0]["params"]) == 2


# In a trainer --------------------------------------------------------------------------------------------------------


def fitted(*callbacks: Any, early: bool, toy: Callable[[str], Toy] = Toy, **arguments: Any) -> tuple[Any, Toy]:
    module = toy("configure_model")
    torch.manual_seed(0)
    arguments = {"max_epochs": 2, "max_steps": 4, **arguments}
    run = trainer([*callbacks, *([OptimizerInBackward()] if early else [])], **arguments)
    run.fit(module, data(), data())
    return run, module


SETS: dict[str, Callable[[], list[Any]]] = {
    "averages": lambda: [EMA(decay=0.8)],
    "recomputed": lambda: [ActivationCheckpointing()],
    "DoRA": lambda: [LoRA(rank=2, variant="dora")],
    "8 bits": lambda: [LowBitOptimizer(min_size=0)],
    "schedule-free": lambda: [ScheduleFree(warmup_steps=2)],
    "compiled": lambda: [lit_efficient.Compile(backend="aot_eager")],
}


@pytest.mark.parametrize("name", SETS)
def test_a_fit_with_it_is_the_fit_without_it(name: str) -> None:
    (plain, reference), (ours, module) = (fitted(*SETS[name](), early=early) for early in (False, True))
    assert_equal(weights(reference), weights(module))
    assert_equal(plain.optimizers[0].state_dict(), ours.optimizers[0].state_dict())
    assert_equal(plain.callback_metrics["val/loss"], ours.callback_metrics["val/loss"])
    assert plain.global_step == ours.global_step == 4
    frees_each_gradient(Run(ours, module))


def test_clipping_by_value_is_lightnings() -> None:
    clip: dict[str, Any] = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    (_, unclipped), (_, reference), (_, module) = (
        fitted(early=False),
        fitted(early=False, **clip),
        fitted(early=True, **clip),
    )
    assert_equal(weights(reference), weights(module))
    assert not torch.equal(weights(unclipped)["net.head.bias"], weights(module)["net.head.bias"])


def test_the_gradient_norm_is_logged_as_it_is_without_it() -> None:
    class Noted(DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[float] = []

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            self.norms += [metrics["grad_norm"]] if "grad_norm" in metrics else []

    kept = []
    for early in (False, True):
        logger = Noted()
        fitted(RunMetrics(), early=early, logger=logger, log_every_n_steps=2)
        kept.append(logger.norms)
    assert len(kept[0]) == 2
    assert kept[1] == pytest.approx(kept[0], rel=1e-6)


def test_no_weight_becomes_nan() -> None:
    class Explodes(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            poison = self.net.blocks[1].up.weight.sum() * (float("nan") if self.global_step == 2 else 0.0)
            return loss | {"loss": loss["loss"] + poison}

    module = Explodes("configure_model")
    run = trainer([OptimizerInBackward(), NonFiniteGuard()], max_epochs=2)
    with pytest.raises(DivergedError, match=r"step 2 .* net\.blocks\.1\.up\.weight; the weights were stepped with"):
        run.fit(module, data(), data())
    assert all(tensor.isfinite().all() for tensor in weights(module).values())


Manual = functools.partial(Toy, optimizers=2)


class Clips(Toy):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Clip nothing."""


class Early(Toy):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class Reads(Toy):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def test_a_later_run_without_it_that_has_the_same_optimizer_clips() -> None:
    class Same(Toy):
        def configure_optimizers(self) -> Any:
            self.__dict__.setdefault("kept", torch.optim.SGD(self.parameters(), lr=0.1))
            return self.kept

    def run(*callbacks: Any) -> list[Tensor]:
        module = Same()
        trainer([*callbacks], max_epochs=1).fit(module, data(), data())
        trainer([], max_epochs=1, gradient_clip_val=1e-3).fit(module, data(), data())
        return [*module.parameters()]

    assert_equal(run(), run(OptimizerInBackward()))


class Keeps(Toy):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Let gradients add up over steps."""


@pytest.mark.parametrize(
    ("toy", "callbacks", "arguments", "reason"),
    [
        (Keeps, [], {}, "Keeps.optimizer_zero_grad keeps gradients of an earlier step"),
        (Manual, [], {}, "Toy uses manual optimization"),
        (Clips, [], {}, "Clips.configure_gradient_clipping finds no gradients"),
        (Early, [], {}, r"Early runs the backward pass before optimizer.step.*step\(closure=optimizer_closure\)"),
        (Reads, [], {}, r"reads the gradient of 'net.stem.weight' after the backward pass"),
        (Toy, [], {"accumulate_grad_batches": 2}, "with accumulate_grad_batches=2, all gradients stay"),
        (Toy, [], {"gradient_clip_val": 1.0}, "clips by the norm .*gradient_clip_algorithm='value'"),
        (Toy, [L.callbacks.GradientAccumulationScheduler({1: 2})], {}, "GradientAccumulationScheduler: accumulated"),
        (Toy, [MaxBatchSize()], {}, r"MaxBatchSize\(keep_effective_batch=True\): accumulated"),
        (Toy, [NonFiniteGuard("skip")], {}, r"NonFiniteGuard\(action='skip'\): a part of the step"),
        (
            Toy,
            [lit_efficient.TokenWeightedAccumulation()],
            {},
            "TokenWeightedAccumulation needs all gradients of a step",
        ),
    ],
)
def test_what_needs_gradients_later_is_refused_with_the_way_out(
    toy: Callable[[str], Toy], callbacks: list[Any], arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises((ConfigurationError, ConflictError), match=reason):
        fitted(*callbacks, early=True, toy=toy, **arguments)


@pytest.mark.turns(6, family="ranks")
def test_the_shards_of_two_processes_are_stepped_alike(tmp_path: Path) -> None:
    run_ranks(in_backward.shards_are_stepped_alike, tmp_path)


def test_ddp_is_refused() -> None:
    with pytest.raises(ConflictError, match=r"DDPStrategy keeps all gradients in its buckets.*FSDP2"):
        OptimizerInBackward().check(trainer(strategy="ddp"), Toy())  # to begin the fit would begin a process group


def test_a_gradient_scaler_is_refused() -> None:
    class Scaled(L.plugins.precision.Precision):
        scaler = torch.amp.GradScaler("cpu")

    with pytest.raises(ConflictError, match=r"gradient scaler decides about the whole step.*bf16-mixed"):
        fitted(early=True, plugins=[Scaled()])


@pytest.mark.parametrize("early", [False, True])
def test_adapters_that_get_no_gradient_are_found_all_the_same(early: bool) -> None:
    class Bypasses(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(x, self.stem.weight, self.stem.bias)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    with pytest.raises(ConfigurationError, match=r"1 adapters cannot learn, first that of 'net\.stem'"):
        fitted(LoRA(rank=2, targets=["stem", "head"]), early=early, toy=functools.partial(Toy, network=Bypasses))
