"""Gradual unfreezing: what trains is a function of the step, and nothing else in the run notices."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from lit_efficient import (
    EMA,
    CheckpointAverage,
    ConfigurationError,
    ConflictError,
    ExactResume,
    GradualUnfreezing,
    LoRA,
    LowBitOptimizer,
    MuonAdamW,
    PowerEMA,
    ScheduleFree,
    StochasticDepth,
    apply,
    depth_groups,
    thawed,
)
from tests.processes import run_ranks
from tests.ranks import unfreezing
from tests.support import SCHEDULERS, Net, Toy, assert_equal, data, trainer, weights

GROUPS = ["head", *(rf"blocks\.{i}" for i in (3, 2, 1, 0)), "stem"]


class Watch(Callback):
    """After each batch: names that train, that have a gradient, and that have optimizer state; the groups' objects."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self.training, self.gradients, self.states = folder, [], [], []
        self.groups: list[list[int]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append({n for n, p in pl_module.named_parameters() if p.grad is not None})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        named = dict(pl_module.named_parameters())
        self.training.append({name for name, p in named.items() if p.requires_grad})
        states = [o.state for o in trainer.optimizers]
        self.states.append({n for n, p in named.items() if any(p in state and state[p] for state in states)})
        self.groups.append([id(p) for o in trainer.optimizers for g in o.param_groups for p in g["params"]])
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.total_batch_idx + 1}.ckpt", weights_only=False)


def _fit(callbacks: list[Any], module: Any = None, rows: int = 16, ckpt_path: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    run = trainer(callbacks, **arguments)
    run.fit(module or Toy("configure_model"), data(rows), data(), ckpt_path=ckpt_path)
    return run


def _prefixes(names: set[str]) -> set[str]:
    parts = [name.split(".") for name in names]
    return {".".join(part[1:3]) if part[1] == "blocks" else part[1] for part in parts}


def test_thawed_is_a_function_of_the_step() -> None:
    assert [thawed(step, [2, 3, 7]) for step in (0, 1, 2, 3, 6, 7, 99)] == [1, 1, 2, 3, 3, 4, 4]


def test_frozen_groups_have_no_gradient_no_state_and_do_not_move() -> None:
    watch, module = Watch(), Toy("configure_model")
    seen: list[dict[str, torch.Tensor]] = []

    class Weights(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(weights(pl_module))

    _fit([GradualUnfreezing(every_n_steps=2), watch, Weights()], module, rows=56)
    order = ["head", "blocks.3", "blocks.2", "blocks.1", "blocks.0", "stem"]
    for step in range(14):
        wanted = set(order[: 1 + step // 2])
        for names in (watch.training[step], watch.gradients[step], watch.states[step]):
            assert _prefixes(names) == wanted
    for step, (before, after) in enumerate(zip(seen, [*seen[1:], weights(module)])):
        moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
        assert moved == watch.training[step]  # weight decay does not move what is frozen
    assert len({tuple(ids) for ids in watch.groups}) == 1
    assert all(p.requires_grad for p in module.parameters())


def test_thawing_epochs_and_milestones() -> None:
    watch = Watch()
    _fit([GradualUnfreezing(GROUPS, every_n_epochs=1), watch], max_epochs=3)
    assert [len(_prefixes(names)) for names in watch.training] == [1] * 4 + [2] * 4 + [3] * 4
    watch = Watch()
    _fit([GradualUnfreezing(["head", "blocks", "stem"], milestones=[3]), watch], rows=24)
    assert [_prefixes(names) == {"head"} for names in watch.training] == [True] * 3 + [False] * 3
    assert "net.stem.weight" not in watch.training[-1]


def test_accumulation_thaws_between_optimizer_steps() -> None:
    watch = Watch()
    _fit([GradualUnfreezing(every_n_steps=1), watch], rows=44, accumulate_grad_batches=3)  # 11 batches, 4 steps
    assert [len(_prefixes(names)) for names in watch.training] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 2


@pytest.mark.turns(3)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_steps_all_groups_in_proportion(scheduler: str) -> None:
    """BackboneFinetuning adds groups in the run, which LambdaLR and OneCycleLR refuse."""

    class Rates(Callback):
        def __init__(self) -> None:
            self.history: list[dict[str, float]] = []

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.history.append({g["name"]: float(g["lr"]) for g in trainer.optimizers[0].param_groups})

    plain, ours = Rates(), Rates()
    _fit([plain], Toy("init", scheduler), max_epochs=2)
    _fit([GradualUnfreezing(every_n_steps=1, lr_decay=2.0), ours], Toy("init", scheduler), max_epochs=2)
    assert [len(rates) for rates in ours.history] == [12] * 8
    for before, after in zip(plain.history, ours.history, strict=True):
        for name, rate in after.items():
            assert rate == pytest.approx(before[name.partition("/")[0]] / 2.0 ** int(name[-1]), rel=1e-6)


@pytest.mark.turns(4, family="resumed")
@pytest.mark.parametrize("scheduler", ["lambda", "one_cycle", "sequential"])
def test_resumes_at_every_step_with_equal_training_and_weights(scheduler: str, tmp_path: Path) -> None:
    """BackboneFinetuning freezes everything again on resume."""

    def run(callbacks: list[Any], **arguments: Any) -> tuple[Any, Watch]:
        watch = Watch(tmp_path if not arguments else None)
        fitted = _fit([*callbacks, watch], Toy("configure_model", scheduler), max_epochs=2, **arguments)
        return fitted, watch

    whole, watched = run([GradualUnfreezing(every_n_steps=1), ExactResume(0)])
    expected = weights(whole.lightning_module), whole.optimizers[0].state_dict()
    for done in range(1, 8):
        resumed, watch = run([GradualUnfreezing(every_n_steps=1), ExactResume(0)], ckpt_path=tmp_path / f"{done}.ckpt")
        assert watch.training == watched.training[done:]
        assert_equal(expected, (weights(resumed.lightning_module), resumed.optimizers[0].state_dict()))


def test_the_report_and_each_thaw_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        _fit([GradualUnfreezing(GROUPS, every_n_steps=1), LearningRateMonitor()], logger=L.loggers.CSVLogger(tmp_path))
    text = caplog.text
    assert "6 groups, 272 of 9,184 parameters train at the start (net.head), one more at steps 1, 2, 3, 4, 5" in text
    assert [text.count(f"net.blocks.{i} trains from now on, 2,160 parameters") for i in range(4)] == [0, 1, 1, 1]


class Normed(Toy):
    """A body with BatchNorm in each part; the second layer of the stem has no weights of its own."""

    def _build(self) -> None:
        if self.net is None:
            torch.manual_seed(1)
            parts = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.BatchNorm1d(16, affine=False)]
            self.net = nn.Sequential()
            self.net.add_module("stem", nn.Sequential(*parts))
            for i in range(2):
                block = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
                self.net.add_module(f"block{i}", nn.Sequential(block))
            self.net.add_module("head", nn.Linear(16, 16))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_epoch_start(self) -> None:
        self.train()  # as users do


@pytest.mark.parametrize("train_batchnorm", [False, True])
def test_statistics_of_frozen_batchnorm_stand_still(train_batchnorm: bool) -> None:
    class Statistics(Callback):
        def __init__(self) -> None:
            self.counts: list[list[int]] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            norms = [m for m in pl_module.modules() if isinstance(m, nn.BatchNorm1d)]
            self.counts.append([int(norm.num_batches_tracked) for norm in norms])

    module, seen = Normed("configure_model"), Statistics()
    groups = ["head", "block1", "block0", "stem"]
    callbacks = [GradualUnfreezing(groups, every_n_steps=2, train_batchnorm=train_batchnorm), seen]
    _fit(callbacks, module, max_epochs=2)
    if train_batchnorm:
        assert seen.counts == [[i] * 4 for i in range(1, 9)]
    else:
        assert [counts[3] for counts in seen.counts] == [0, 0, 1, 2, 3, 4, 5, 6]  # block1
        assert [counts[2] for counts in seen.counts] == [0, 0, 0, 0, 1, 2, 3, 4]
        assert [counts[:2] for counts in seen.counts] == [[0, 0]] * 6 + [[1, 1], [2, 2]]
    assert all(part.training for part in module.modules())


def test_parameters_that_were_frozen_before_stay_frozen() -> None:
    module, watch = Toy("init"), Watch()
    module.net.blocks[2].requires_grad_(False)
    module.net.stem.bias.requires_grad_(False)
    _fit([GradualUnfreezing(every_n_steps=1), watch], module, rows=32)
    never = {"net.stem.bias", *(f"net.blocks.2.{n}" for n, _ in module.net.blocks[2].named_parameters())}
    assert not any(names & never for names in watch.training)
    assert len(watch.training[-1]) == 28 - len(never)
    assert {n for n, p in module.named_parameters() if not p.requires_grad} == never


def test_with_adapters_it_is_they_that_thaw_and_checkpoints_hold_them_all(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [GradualUnfreezing(every_n_steps=2), LoRA(rank=2, variant="dora"), ExactResume(0)]

    watch, module = Watch(tmp_path), Toy("configure_model")
    whole = _fit([*callbacks(), watch], module, rows=28)
    sizes = [len(names) for names in watch.training]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert all(".lora_" in name for names in watch.training for name in names)
    adapters = {name for name, _ in module.named_parameters() if ".lora_" in name}
    for done in (1, 3, 6):
        saved = torch.load(tmp_path / f"{done}.ckpt", weights_only=True)["state_dict"]
        assert {name for name in saved if ".lora_" in name and "magnitude" not in name} == {
            name for name in adapters if "magnitude" not in name
        }
        assert "net.blocks.0.up.weight" not in saved
        resumed = _fit(callbacks(), rows=28, ckpt_path=tmp_path / f"{done}.ckpt")
        assert_equal(weights(module), weights(resumed.lightning_module))
    assert whole.global_step == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: EMA(decay=0.8),
        lambda folder: CheckpointAverage(last_k=2, every_n_steps=1),
        lambda folder: PowerEMA(dirpath=str(folder / "snapshots")),
    ],
    ids=["EMA", "CheckpointAverage", "PowerEMA"],
)
def test_averages_hold_what_thaws_later(make: Any, tmp_path: Path) -> None:
    average = make(tmp_path)
    module = Toy("configure_model")
    start = copy.deepcopy(_fit([], module, max_steps=0).lightning_module.net.state_dict())
    _fit([GradualUnfreezing(every_n_steps=2), average], module, rows=48)
    kept = average._averages[0] if isinstance(average, PowerEMA) else average.average(module)
    assert kept.keys() == dict(module.named_parameters()).keys()
    stem = kept["net.stem.weight"]
    assert not torch.equal(stem, start["stem.weight"])
    assert not torch.equal(stem, module.net.stem.weight)


def test_schedule_free_begins_anew_for_a_group_that_thaws() -> None:
    """Each group counts its own steps: else the first update of a late one would be many times too large."""
    run = _fit([GradualUnfreezing(every_n_steps=3), ScheduleFree()], rows=32)
    steps = {group["name"]: group["steps"] for group in run.optimizers[0].param_groups}
    assert [steps[f"decay/{k}"] for k in range(6)] == [8, 5, 2, 0, 0, 0]


class WithOptimizer(Toy):
    def __init__(self, make: Any) -> None:
        super().__init__("configure_model")
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make([p for p in self.net.parameters() if p.requires_grad])


@pytest.mark.parametrize(
    ("make", "callbacks"),
    [
        (lambda ps: torch.optim.AdamW(ps, fused=True), []),
        (MuonAdamW, []),
        (lambda ps: torch.optim.Adagrad(ps, lr=0.1), []),
        (torch.optim.AdamW, [LowBitOptimizer(min_size=0)]),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1), [StochasticDepth(0.5)]),
    ],
    ids=["fused", "muon", "adagrad", "low_bit", "sgd"],
)
def test_optimizers_of_every_kind_leave_frozen_groups_alone(make: Any, callbacks: list[Any]) -> None:
    module = WithOptimizer(make)
    start = weights(_fit([], module, max_steps=0).lightning_module)
    run = _fit([GradualUnfreezing(every_n_steps=2), *copy.deepcopy(callbacks)], module)
    moved = {name for name, tensor in weights(module).items() if not torch.equal(tensor, start[name])}
    assert _prefixes(moved) == {"head", "blocks.3"}
    rates = sorted({float(group["lr"]) for group in run.optimizers[0].param_groups}, reverse=True)
    assert rates == pytest.approx([rates[0] / 2.6**k for k in range(6)])


def test_manual_optimization_with_several_optimizers() -> None:
    module, watch = Toy("configure_model", optimizers=2), Watch()
    _fit([GradualUnfreezing(GROUPS, every_n_steps=2), watch], module, rows=28)  # two optimizer steps a batch
    assert [len(_prefixes(names)) for names in watch.training] == [1, 2, 3, 4, 5, 6, 6]
    assert [len(_prefixes(names)) for names in watch.states] == [1, 2, 3, 4, 5, 6, 6]


def test_a_second_fit_may_thaw_otherwise_and_a_copy_made_in_the_middle_may_too() -> None:
    copies: list[Any] = []

    class Copy(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if not copies:
                run, pl_module._trainer = pl_module._trainer, None
                copies.append(copy.deepcopy(pl_module))
                pl_module._trainer = run

    module = Toy("configure_model")
    _fit([GradualUnfreezing(every_n_steps=2), Copy()], module)
    for other in (module, copies[0]):
        watch = Watch()
        _fit([GradualUnfreezing(["head", ".*"], milestones=[1]), watch], other)
        assert [len(names) for names in watch.training] == [2, 28, 28, 28]


def test_bad_arguments_and_modules_are_errors() -> None:
    for arguments, message in [
        ({}, "set exactly one of every_n_steps, every_n_epochs and milestones, got {}"),
        ({"every_n_steps": 1, "every_n_epochs": 2}, "exactly one"),
        ({"every_n_steps": 0}, "every_n_steps must be a whole number of at least 1 or null, got 0"),
        ({"milestones": [3, 3]}, "milestones must be steps from 1 on"),
        ({"milestones": [0, 3]}, "milestones must be steps from 1 on"),
        ({"milestones": []}, "milestones must be steps from 1 on"),
        ({"every_n_steps": 1, "lr_decay": 0.5}, "lr_decay must be at least 1, got 0.5"),
        ({"every_n_steps": 1, "groups": "head"}, "groups must be auto or a list of patterns"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            GradualUnfreezing(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="milestones must be at most 5"):
        _fit([GradualUnfreezing(milestones=[1, 2, 3, 4, 5, 6])])

    class Partial(Toy):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.head.parameters())

    with pytest.raises(
        ConfigurationError, match=r"no optimizer holds 26 of the 28 parameters .*: net\.blocks\.3\.norm"
    ):
        _fit([GradualUnfreezing(every_n_steps=1)], Partial("configure_model"))
    with pytest.raises(ConfigurationError, match="LBFGS"):
        _fit([GradualUnfreezing([".*"], every_n_steps=1)], WithOptimizer(torch.optim.LBFGS))
    freezing = L.pytorch.callbacks.BackboneFinetuning if hasattr(L, "pytorch") else L.callbacks.BackboneFinetuning
    with pytest.raises(ConflictError, match="BaseFinetuning"):
        _fit([GradualUnfreezing(every_n_steps=1), freezing()])


@pytest.mark.turns(6, family="ranks")
def test_ddp_ranks_are_equal_after_each_thaw_and_equal_one_process(tmp_path: Path) -> None:
    """Without a new reducer what thaws is never averaged over the ranks, or the first backward waits for ever."""
    run_ranks(unfreezing.equal_after_each_thaw, tmp_path)
    _, module, seen = _one_process()
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    for alone, together in zip(seen, two, strict=True):
        for name, tensor in alone.items():
            torch.testing.assert_close(tensor, together[name], rtol=1e-4, atol=1e-5)
    assert not torch.equal(seen[0]["net.stem.weight"], module.net.stem.weight)


def _one_process() -> tuple[Any, Toy, list[dict[str, torch.Tensor]]]:
    class Weights(Callback):
        def __init__(self) -> None:
            self.seen: list[dict[str, torch.Tensor]] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.seen.append(weights(pl_module))

    torch.manual_seed(0)
    module, watch = Toy("configure_model", "lambda"), Weights()
    run = trainer([GradualUnfreezing(every_n_steps=1), watch], max_epochs=2)
    run.fit(module, data(32, 8), data())
    return run, module, watch.seen


def test_fsdp2_is_refused_with_its_reason() -> None:
    run = SimpleNamespace(strategy=ModelParallelStrategy(1, 1))
    with pytest.raises(ConflictError, match=r"frozen groups have none yet, .*: use ShardedStrategy, or 'ddp'"):
        GradualUnfreezing(every_n_steps=1).check(run, Toy("configure_model"))


class ActorCritic(L.LightningModule):
    """Two networks of different depth, whose losses are summed, or alternate."""

    def __init__(self, alternate: bool) -> None:
        super().__init__()
        self.actor = Net()
        self.critic = Net(depth=2)
        self.alternate = alternate

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        losses = [(self.actor(x) - x.flip(-1)).square().mean(), (self.critic(x) - x).square().mean()]
        return losses[batch_idx % 2] if self.alternate else losses[0] + losses[1]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("alternate", [False, True])
def test_networks_side_by_side_thaw_from_their_own_heads(alternate: bool) -> None:
    torch.manual_seed(0)
    module = ActorCritic(alternate)
    names = depth_groups(module)
    assert {name.rpartition(".")[0] for name in names[0]} == {"actor.head", "critic.head"}
    blocks = len(module.actor.blocks)
    assert any(name.startswith(f"actor.blocks.{blocks - 1}.") for name in names[1])
    assert any(name.startswith("critic.blocks.1.") for name in names[1])
    before = {name: value.clone() for name, value in module.named_parameters()}
    _fit([GradualUnfreezing(every_n_steps=2)], module, rows=28, max_epochs=3)
    still = [name for name, value in module.named_parameters() if torch.equal(value, before[name])]
    assert still == []
    rates = apply(ActorCritic(alternate), [StochasticDepth(rate=0.2)])["StochasticDepth"].details["rates"]
    assert rates == " ".join([*(f"{0.2 * (i + 1) / blocks:.3g}" for i in range(blocks)), "0.1", "0.2"])
