"""Each clause of the contract on its own: the forms of modules, optimizers and losses that exist, and the refusals."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient import (
    EMA,
    ConfigurationError,
    ConflictError,
    LoRA,
    LossHooks,
    LowBitOptimizer,
    Phase,
    Report,
    SNRWeighting,
    StochasticDepth,
)
from lit_efficient.application import apply, find_optimizers, install
from lit_efficient.application.checkpoints import CheckpointHooks, compare_techniques
from lit_efficient.application.ledger import ledger
from lit_efficient.application.recorded import replay
from lit_efficient.declaration import check_conflicts
from lit_efficient.files.checkpoints import load_verified
from lit_efficient.protocol import check_loss
from lit_efficient.technique import PrecisionTechnique, Technique
from lit_efficient.traits import Trait
from tests.support import SCHEDULERS, Net, Toy, ToyOnBatch, assert_equal, data, trainer, weights


class Widen(Technique):
    """A technique that adds a parameter beside the old ones."""

    phase = Phase.ADAPT
    alters = ("weights",)

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = value

    def transform(self, module: nn.Module) -> Report:
        for block in module.net.blocks:  # type: ignore[union-attr]
            block.extra = nn.Parameter(torch.full((2,), self.value))
        return Report("float32_advice")


class Early(Technique):
    phase = Phase.ARCHITECTURE

    def transform(self, module: nn.Module) -> Report:
        return Report("early")


def fit(module: Any, callbacks: list[Any], **arguments: Any) -> Any:
    run = trainer(callbacks, **arguments)
    run.fit(module, data(), data())
    return run


@pytest.mark.parametrize("techniques", [[Early], [Early, Widen], [Widen, Early, EMA]])
def test_what_techniques_touched_is_printed_once(techniques: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(Toy("init"), [kind() for kind in techniques], max_steps=1)
    printed = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Techniques:")]
    assert len(printed) == 1
    assert all(f"\n  {kind.__name__}" in printed[0] for kind in techniques)


# Optimizers and schedulers


@pytest.mark.turns(4, always=["lambda"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_form_of_schedule_keeps_its_optimizer_and_its_rates(scheduler: str) -> None:
    rates: dict[str, list[list[float]]] = {"plain": [], "low": []}

    class Watch(Callback):
        def __init__(self, key: str) -> None:
            self.key = key

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            rates[self.key].append([group["lr"] for group in trainer.optimizers[0].param_groups])

    fit(Toy(scheduler=scheduler), [Watch("plain")], max_epochs=3)
    run = fit(Toy(scheduler=scheduler), [LowBitOptimizer(min_size=0), Watch("low")], max_epochs=3)
    assert scheduler == "plateau" or rates["low"] == rates["plain"]
    optimizer = run.optimizers[0]
    assert type(optimizer).__name__ == "AdamW8bit"
    assert all(config.scheduler.optimizer is optimizer for config in run.lr_scheduler_configs)
    assert [group["name"] for group in optimizer.param_groups] == ["decay", "rest"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert {state["state1"].dtype for state in optimizer.state.values()} == {torch.uint8}


def test_several_optimizers_under_manual_optimization_are_all_rewritten() -> None:
    module = Toy("configure_model", optimizers=2)
    plain = weights(fit(Toy("configure_model", optimizers=2), []).lightning_module)
    run = fit(module, [LowBitOptimizer(min_size=0), StochasticDepth(0.5)])
    # The first one holds two vectors, whose states are smaller than the tables of 8-bit codes.
    assert [type(optimizer).__name__ for optimizer in run.optimizers] == ["AdamW", "AdamW8bit"]
    assert not all(torch.equal(plain[key], tensor) for key, tensor in weights(module).items())


def test_find_optimizers_sees_each_one_once_in_any_form() -> None:
    a, b = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(a, 1)
    forms: list[tuple[Any, list[Any]]] = [
        (None, []),
        (a, [a]),
        ((a, b), [a, b]),
        (([a, b], [scheduler]), [a, b]),
        ({"optimizer": a, "lr_scheduler": {"scheduler": scheduler}}, [a]),
        (({"optimizer": a, "lr_scheduler": scheduler}, {"optimizer": b}), [a, b]),
        ([a, a], [a]),
    ]
    for configured, expected in forms:
        assert [id(o) for o in find_optimizers(configured)] == [id(o) for o in expected]


def test_a_rewrite_without_an_optimizer_is_an_error() -> None:
    class NoOptimizer(Toy):
        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(ConfigurationError, match=r"LowBitOptimizer: NoOptimizer.configure_optimizers returned no"):
        fit(NoOptimizer(), [LowBitOptimizer(min_size=0)])


# Losses


def test_manual_optimization_refuses_a_weighted_loss_and_says_what_to_do() -> None:
    with pytest.raises(ConflictError, match=r"SNRWeighting.*manual optimization.*pure function"):
        fit(Toy(optimizers=2), [SNRWeighting()])


def test_a_module_without_the_protocol_is_told_what_to_return() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"(?s)SNRWeighting got no sample losses from Toy.training_step, but a Tensor.*sample_loss",
    ):
        fit(Toy(protocol=False), [SNRWeighting()])


def test_a_loss_with_more_in_it_than_the_protocol_says_is_refused() -> None:
    class Extra(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            return output | {"loss": output["loss"] + 1.0}

    with pytest.raises(ConfigurationError, match=r'"loss" is .*"extra_loss" is'):
        fit(Extra(), [SNRWeighting()])


@pytest.mark.parametrize(("share", "apart"), [(0.8e-3, 0.0), (0.0, 0.8e-6), (1.2e-3, 0.0), (0.0, 1.2e-6)])
def test_how_far_a_loss_may_be_from_the_mean(share: float, apart: float) -> None:
    mean = 1.0 if share else 0.0
    output = {"sample_loss": torch.full((4,), mean), "loss": torch.tensor(mean + share + apart)}
    if share < 1e-3 and apart < 1e-6:
        check_loss(output, nn.Identity())
    else:
        with pytest.raises(ConfigurationError, match='"loss" is'):
            check_loss(output, nn.Identity())


def test_a_technique_without_a_phase_is_recorded() -> None:
    class Plain(Technique):
        pass

    assert Plain().record() == {"name": "Plain", "phase": 0, "arguments": {}, "alters": []}


def test_extra_loss_is_left_unweighted_and_later_hooks_see_no_extras() -> None:
    class Extra(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            extra = self.net.head.bias.square().sum()
            return output | {"loss": output["loss"] + extra, "extra_loss": extra, "note": 3}

    class Zero(LossHooks, Technique):
        phase = Phase.LOSS

        def sample_weights(self, output: Any, module: nn.Module) -> torch.Tensor:
            return torch.zeros_like(output["sample_loss"])

    outputs: list[Any] = []
    gradients: dict[str, float] = {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs_: Any, *_: Any) -> None:
            outputs.append(outputs_)

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            gradients.update({name: float(p.grad.norm()) for name, p in pl_module.named_parameters()})

    fit(Extra(), [Zero(), Watch()])
    assert all(set(output) == {"loss", "note"} for output in outputs)
    assert {name for name, norm in gradients.items() if norm > 0} == {"net.head.bias"}


def test_a_training_step_that_takes_the_batch_alone() -> None:
    one, two = ToyOnBatch("init"), Toy("init")
    for module in (one, two):
        fit(module, [SNRWeighting(gamma=1.0)])
    assert_equal(weights(one), weights(two))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_skipped_step_stays_skipped() -> None:
    class Skip(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx else None

    first: list[Any] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            first.append(weights(pl_module))

    before = weights(module := Skip())
    fit(module, [SNRWeighting(), Watch()])
    assert_equal(before, first[0])
    assert not torch.equal(first[0]["net.head.weight"], first[1]["net.head.weight"])


class Bias(LossHooks, Technique):
    """Adds the head's squared bias."""

    phase = Phase.LOSS
    heard: ClassVar[list[str]] = []

    @contextmanager
    def watch_step(self, module: Any, batch: Any) -> Any:
        self.heard.append("watch")
        yield
        self.heard.append("done")

    def extra_loss(self, output: Any, module: Any, batch: Any) -> torch.Tensor:
        self.heard.append(f"term of {len(batch[0])}")
        return module.net.head.bias.square().sum()


def test_a_technique_adds_to_a_tensor_a_dict_and_the_protocol_alike() -> None:
    class Own(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self._sample_loss(batch).mean() + self.net.head.bias.square().sum()

    class Dict(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self._sample_loss(batch).mean(), "note": 3}

    fit(own := Own(), [])
    Bias.heard.clear()
    for module in (Toy(protocol=False), Dict(), Toy(protocol=True)):
        fit(module, [Bias()])
        assert_equal(weights(own), weights(module))
    assert Bias.heard == ["watch", "term of 4", "done"] * 12
    fit(weighted := Toy(), [Bias(), SNRWeighting(gamma=1e30, prediction="eps")])  # weights of 1
    assert_equal(weights(own), weights(weighted))


def test_a_term_needs_a_loss_and_automatic_optimization() -> None:
    class Nothing(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"note": 3}

    with pytest.raises(ConfigurationError, match=r"Bias adds a term to the loss, but Nothing.training_step returned"):
        fit(Nothing(), [Bias()])
    with pytest.raises(ConflictError, match=r"Bias adds a term .* Toy uses manual optimization"):
        fit(Toy(optimizers=2), [Bias()])


def test_a_technique_that_changes_losses_must_say_so() -> None:
    class Plain(Technique):
        def extra_loss(self, output: Any, module: Any, batch: Any) -> torch.Tensor:
            return output["loss"]

    with pytest.raises(
        ConfigurationError, match=r"extra_loss would never be called: write class Plain\(LossHooks, Technique\)"
    ):
        fit(Toy(), [Plain()])


# Forms of a run


def test_iterable_dataset_and_no_validation_loop() -> None:
    class Rows(IterableDataset):
        def __iter__(self) -> Any:
            yield from data().dataset

    module = Toy("setup")
    module.validation_step = None  # type: ignore[method-assign,assignment]
    run = trainer([StochasticDepth(0.5), LowBitOptimizer(min_size=0), SNRWeighting()], max_steps=3, max_epochs=-1)
    run.fit(module, DataLoader(Rows(), batch_size=4))
    assert run.global_step == 3


def test_accumulation_draws_anew_for_each_micro_batch() -> None:
    seeds: list[int] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seeds.append(pl_module.net.blocks[0]._drop_seed)

    run = fit(Toy(), [StochasticDepth(0.5), Watch()], accumulate_grad_batches=2)
    assert run.global_step == 2
    assert len(set(seeds)) == 4


@pytest.mark.turns(4, family="compiled")
@pytest.mark.filterwarnings("ignore")  # torch.compile stumbles over warnings of its own making
def test_a_module_that_was_compiled_before_it_met_the_trainer() -> None:
    plain, compiled = (Toy(network=lambda: Net(depth=2)) for _ in range(2))
    short = {"max_steps": 2, "limit_val_batches": 0}  # the second step drops other blocks, which is another graph
    fit(plain, [SNRWeighting(gamma=1.0), StochasticDepth(0.5)], **short)
    fit(torch.compile(compiled, backend="eager"), [SNRWeighting(gamma=1.0), StochasticDepth(0.5)], **short)
    assert_equal(weights(plain), weights(compiled))


def test_spawned_processes_are_refused_because_they_lose_the_change() -> None:
    run = trainer([StochasticDepth()], strategy="ddp_spawn")
    with pytest.raises(ConflictError, match=r"StochasticDepth changes the network.*use strategy='ddp'"):
        install(run, Toy())
    run = trainer([EMA()], strategy="ddp_fork")
    with pytest.raises(ConflictError, match=r"EMA keeps averaged weights, which .* would use the raw weights"):
        install(run, Toy())


def test_a_validation_before_the_fit_transforms_once() -> None:
    module = Toy("configure_model")
    trainer([Widen()]).validate(module, data(), verbose=False)
    parameter = module.net.blocks[0].extra
    fit(module, [Widen()])
    assert module.net.blocks[0].extra is parameter


# The ledger


def test_other_arguments_or_a_late_earlier_phase_are_refused_by_name() -> None:
    module = Toy()
    fit(module, [Widen(1.0)])
    with pytest.raises(ConfigurationError, match=r"Widen was applied .* \(value was 1.0 and is 2.0\)"):
        fit(module, [Widen(2.0)])
    with pytest.raises(ConfigurationError, match="Early must act before Widen"):
        fit(module, [Widen(1.0), Early()])


def test_apply_refuses_what_changes_no_network() -> None:
    network = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ConfigurationError, match=r"^apply\(module, techniques\): EMA would change nothing, because it"):
        apply(network, [LoRA(rank=2, targets=["0"]), EMA()])
    assert [name for name, _ in network.named_parameters()] == ["0.weight", "0.bias"]


def test_what_serves_training_alone_is_not_rebuilt(tmp_path: Path) -> None:
    class Passing(Early):
        traits = frozenset({Trait.TRAINING_ONLY})

    run = fit(Toy(), [Passing(), StochasticDepth(0.3)])
    run.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    module = Toy()
    replay(module, torch.load(tmp_path / "w.ckpt", weights_only=True))
    assert [entry.record["name"] for entry in ledger(module)] == ["StochasticDepth"]


def test_a_ledger_rebuilds_the_network_without_a_trainer(tmp_path: Path) -> None:
    run = fit(Toy(), [Widen(3.0), StochasticDepth(0.3)])
    run.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    checkpoint = torch.load(tmp_path / "w.ckpt", weights_only=True)
    module = Toy()
    replay(module, checkpoint)
    module.load_state_dict(checkpoint["state_dict"])
    assert module.net.blocks[3]._drop_rate == pytest.approx(0.3)
    again = apply(module, [Widen(3.0)])
    assert sorted(again) == ["StochasticDepth", "Widen"]
    unknown = {"lit_efficient": {"transforms": [{"name": "os.system", "arguments": {}}]}}
    with pytest.raises(ConfigurationError, match=r"technique 'os.system': import its class first"):
        replay(Toy(), unknown)


def test_a_base_checkpoint_loads_with_and_without_the_techniques(tmp_path: Path) -> None:
    base = fit(Toy(), [])
    base.save_checkpoint(tmp_path / "base.ckpt", weights_only=True)
    trained = weights(base.lightning_module)
    for callbacks in ([], [StochasticDepth(0.5), SNRWeighting(), LowBitOptimizer(min_size=0)]):
        module = Toy("configure_model")
        trainer(callbacks).validate(module, data(), ckpt_path=tmp_path / "base.ckpt", verbose=False)
        assert_equal(trained, weights(module))


def test_resuming_across_other_optimizer_states_is_refused_before_anything_loads(tmp_path: Path) -> None:
    run = fit(Toy(), [StochasticDepth(0.5)])
    run.save_checkpoint(tmp_path / "full.ckpt", weights_only=False)
    with pytest.raises(ConfigurationError, match=r"LowBitOptimizer is new: .* optimizer"):
        trainer([StochasticDepth(0.5), LowBitOptimizer(min_size=0)], max_epochs=2).fit(
            Toy(), data(), data(), ckpt_path=tmp_path / "full.ckpt"
        )


def test_a_harmless_difference_is_printed_and_the_arguments_given_win(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = fit(Toy(), [StochasticDepth(0.5)])
    run.save_checkpoint(tmp_path / "full.ckpt", weights_only=False)
    module = Toy()
    with caplog.at_level("INFO"):
        trainer([StochasticDepth(0.25)], max_epochs=2).fit(module, data(), data(), ckpt_path=tmp_path / "full.ckpt")
    assert "StochasticDepth has changed: rate was 0.5 and is 0.25" in caplog.text
    assert module.net.blocks[3]._drop_rate == 0.25


def test_compare_techniques_asks_for_weights_always_and_for_optimizers_in_a_fit() -> None:
    weights_record, optimizer_record = Widen().record(), LowBitOptimizer().record()
    compare_techniques([optimizer_record], [], fitting=False)
    with pytest.raises(ConfigurationError, match="LowBitOptimizer is missing"):
        compare_techniques([optimizer_record], [], fitting=True)
    with pytest.raises(ConfigurationError, match="Widen is missing"):
        compare_techniques([weights_record], [], fitting=False)


# Conflicts


def test_conflicts_name_both_sides_and_the_reason() -> None:
    class A(Technique):
        conflicts: ClassVar[dict[str, str]] = {"B": "they both do it; drop one", "ModelPruning": "it prunes"}

    class B(Technique):
        pass

    class C(Technique):
        pass

    class Child(B):
        pass

    with pytest.raises(ConflictError, match="A cannot be combined with B: they both do it; drop one"):
        check_conflicts([B(), C(), A()])
    with pytest.raises(ConflictError, match="A cannot be combined with B"):
        check_conflicts([Child(), C(), A()])
    with pytest.raises(ConflictError, match="C is listed twice"):
        check_conflicts([C(), C()])
    check_conflicts([B(), C()])


def test_a_conflict_stops_the_run_before_the_module_is_touched() -> None:
    module = Toy("configure_model")
    with pytest.raises(ConflictError, match="listed twice"):
        fit(module, [StochasticDepth(0.1, seed=1), _Twin(0.1)])
    assert module.net is None


class _Twin(StochasticDepth):
    """A second technique of the same kind, under a name of its own so that Lightning accepts both."""

    conflicts: ClassVar[dict[str, str]] = {"StochasticDepth": "listed twice, so to speak"}


# Checkpoints


def test_a_technique_may_change_weights_only_checkpoints_and_learns_of_every_load(tmp_path: Path) -> None:
    class Stamp(CheckpointHooks, Technique):
        def __init__(self) -> None:
            super().__init__()
            self.loaded: list[str] = []

        def write_checkpoint(self, checkpoint: dict[str, Any], module: nn.Module) -> None:
            checkpoint["stamp"] = type(module).__name__

        def read_checkpoint(self, checkpoint: Any, module: nn.Module) -> None:
            self.loaded.append(checkpoint["stamp"])

    run = fit(Toy(), [Stamp()])
    for alone in (True, False):  # after teardown, too
        run.save_checkpoint(tmp_path / f"{alone}.ckpt", weights_only=alone)
        assert torch.load(tmp_path / f"{alone}.ckpt", weights_only=True)["stamp"] == "Toy"
        stamp = Stamp()
        trainer([stamp]).test(Toy(), data(), ckpt_path=tmp_path / f"{alone}.ckpt", verbose=False)
        assert stamp.loaded == ["Toy"]
    stamp = Stamp()
    trainer([stamp], max_epochs=2).fit(Toy(), data(), data(), ckpt_path=tmp_path / "False.ckpt")
    assert stamp.loaded == ["Toy"]


def test_numbers_of_numpy_are_recorded_as_numbers(tmp_path: Path) -> None:
    """A record with NumPy's own would not load safely, one with their names would not build the network again."""
    average = EMA(decay=np.float64(0.5))
    run = trainer([average, LoRA(rank=2, alpha=np.float32(3))])
    run.fit(Toy(), data(), data())
    run.save_checkpoint(tmp_path / "run.ckpt")
    records = load_verified(tmp_path / "run.ckpt")["lit_efficient"]["techniques"]
    kept = {record["name"]: record["arguments"] for record in records}
    assert (kept["EMA"]["decay"], kept["LoRA"]["alpha"]) == (0.5, 3.0)
    assert {type(kept["EMA"]["decay"]), type(kept["LoRA"]["alpha"])} == {float}


class Refusing(PrecisionTechnique):
    phase = Phase.LAYOUT
    precision = "32-true"

    def check(self, trainer: Any, module: Any) -> None:
        raise ConfigurationError("Refusing: not on this device")


def test_a_precision_that_is_the_only_technique_is_asked_what_it_refuses() -> None:
    with pytest.raises(ConfigurationError, match="Refusing: not on this device"):
        fit(Toy(), [Refusing()])


class Unread(LightningDataModule):
    def prepare_data(self) -> None:
        raise AssertionError("read before the techniques were asked")


class Refuses(Early):
    check = Refusing.check


def test_techniques_are_asked_before_data_is_prepared() -> None:
    with pytest.raises(ConfigurationError, match="Refusing: not on this device"):
        trainer([Refuses()]).fit(Toy(), datamodule=Unread())
