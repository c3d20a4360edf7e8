"""EMA: which weights each stage and each checkpoint uses, and the faults of the stock callback as regression tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient import EMA, ConfigurationError, ConflictError, GradualUnfreezing
from lit_efficient.declaration import format_bytes
from lit_efficient.mechanisms.averages.weights import decay_at
from tests.support import Toy, assert_equal, data, trainer, weights


class Trace(Callback):
    """The parameters after every optimizer step, and those that each stage runs with."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.used: dict[str, dict[str, torch.Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > len(self.steps):
            self.steps.append(weights(pl_module))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.used["validate"] = weights(pl_module)

    def on_test_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.used["test"] = weights(pl_module)

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.used["predict"] = weights(pl_module)


def fit(ema: EMA, module: Any = None, *callbacks: Any, ckpt_path: Any = None, **arguments: Any) -> tuple[Any, Trace]:
    trace = Trace()
    run = trainer([ema, trace, *callbacks], **{"max_epochs": 2, **arguments})
    run.fit(module or Toy(), data(), data(), ckpt_path=ckpt_path)
    return run, trace


def expected_average(steps: list[dict[str, torch.Tensor]], decay: float, **how: Any) -> dict[str, torch.Tensor]:
    average = {name: tensor.clone() for name, tensor in steps[0].items()}
    for n, state in enumerate(steps[1:], 1):
        d = decay_at(n, decay, **how)
        average = {name: d * average[name] + (1 - d) * tensor for name, tensor in state.items()}
    return average


def test_every_stage_uses_the_average_and_the_raw_weights_come_back() -> None:
    run, trace = fit(EMA(decay=0.9, warmup="tf"))
    expected = expected_average(trace.steps, 0.9, warmup="tf")
    raw = trace.steps[-1]
    assert_equal(raw, weights(run.lightning_module))
    run.validate(run.lightning_module, data(), verbose=False)
    run.test(run.lightning_module, data(), verbose=False)
    run.predict(run.lightning_module, data())
    assert trace.used.keys() == {"validate", "test", "predict"}  # Lightning's skips test and predict
    for used in trace.used.values():
        torch.testing.assert_close(used, expected)
        assert not torch.equal(used["net.head.weight"], raw["net.head.weight"])
    assert_equal(raw, weights(run.lightning_module))


def test_validation_inside_the_fit_uses_the_average() -> None:
    _, trace = fit(EMA(decay=0.5), max_epochs=1)
    torch.testing.assert_close(trace.used["validate"], expected_average(trace.steps, 0.5))


def test_an_average_that_was_never_updated_is_never_used(tmp_path: Path) -> None:
    ema = EMA(decay=0.9, start_step=100)
    run, trace = fit(ema, num_sanity_val_steps=1)
    assert_equal(trace.used["validate"], trace.steps[-1])
    run.test(run.lightning_module, data(), verbose=False)
    assert_equal(trace.used["test"], trace.steps[-1])
    run.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    checkpoint = torch.load(tmp_path / "w.ckpt", weights_only=True)
    assert checkpoint["lit_efficient"]["weights"] == "raw"
    assert_equal(checkpoint["state_dict"], trace.steps[-1])


def test_start_and_frequency_count_optimizer_steps_not_micro_batches() -> None:
    ema = EMA(decay=0.9, warmup=None, start_step=2, every_n_steps=2)
    _, trace = fit(ema, accumulate_grad_batches=2, max_epochs=4)
    assert len(trace.steps) == 8
    assert ema._updates == 3  # after steps 3, 5 and 7
    average = trace.steps[2]
    for state in (trace.steps[4], trace.steps[6]):
        average = {name: 0.9 * average[name] + 0.1 * tensor for name, tensor in state.items()}
    torch.testing.assert_close(trace.used["validate"], average)


def test_several_optimizers_update_once_a_batch() -> None:
    ema = EMA(decay=0.9)
    fit(ema, Toy(optimizers=2), max_epochs=1)
    assert ema._updates == 4


@pytest.mark.filterwarnings("ignore:SGD steps .* in 16 bits")
def test_the_average_of_a_bfloat16_network_moves() -> None:
    class Small(Toy):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.3)

    ema = EMA(decay=0.9999, warmup=None)
    run, trace = fit(ema, Small().bfloat16(), precision="bf16-true", max_epochs=8)
    name = "net.head.weight"
    assert ema._average[name].dtype == torch.float32
    assert trace.used["validate"][name].dtype == torch.bfloat16
    first = trace.steps[0][name]
    in_bfloat16 = first.clone()
    for state in trace.steps[1:]:
        in_bfloat16.lerp_(state[name], 1 - 0.9999)
    moved, stuck = ((average.float() - first.float()).abs().sum() for average in (ema._average[name], in_bfloat16))
    assert moved > 0
    assert stuck < 0.1 * moved  # what an average in the network's own format would have done
    assert_equal(trace.steps[-1], weights(run.lightning_module))


def test_tied_weights_are_kept_once_and_saved_under_both_names(tmp_path: Path) -> None:
    module = Toy()
    module.net.blocks[1].up.weight = module.net.blocks[0].up.weight
    ema = EMA(decay=0.5)
    run, _ = fit(ema, module)
    assert "net.blocks.0.up.weight" in ema._average
    assert "net.blocks.1.up.weight" not in ema._average
    run.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "w.ckpt", weights_only=True)["state_dict"]
    for block in (0, 1):
        assert torch.equal(saved[f"net.blocks.{block}.up.weight"], ema._average["net.blocks.0.up.weight"])


def test_a_checkpoint_of_weights_alone_copies_nothing_that_is_there(tmp_path: Path) -> None:
    """Tied weights in another format than the average's stay one; what stands in the module is written as it is."""
    module = Toy()
    module.net.blocks[1].up.weight = module.net.blocks[0].up.weight
    fit(ema := EMA(decay=0.5), module, max_epochs=1)
    module.bfloat16()
    alone: Any = {"state_dict": dict(module.state_dict())}
    ema.write_checkpoint(alone, module)
    names = [f"net.blocks.{block}.up.weight" for block in (0, 1)]
    assert alone["state_dict"][names[0]] is alone["state_dict"][names[1]]
    with ema.averaged(module):
        standing: Any = {"state_dict": dict(module.state_dict())}
        before = dict(standing["state_dict"])
        ema.write_checkpoint(standing, module)
        assert all(standing["state_dict"][name] is tensor for name, tensor in before.items())
        assert_equal(standing["state_dict"], alone["state_dict"])


def test_frozen_weights_are_not_copied_even_if_an_optimizer_holds_them() -> None:
    class Frozen(Toy):
        def configure_optimizers(self) -> Any:
            self.net.stem.requires_grad_(False)
            return torch.optim.AdamW(self.parameters())

    ema = EMA(decay=0.9)
    fit(ema, Frozen(), max_epochs=1)
    assert not any("stem" in name for name in ema._average)
    assert len(ema._average) == len(list(Toy().parameters())) - 2
    fit(ema := EMA(trainable_only=False), Frozen(), max_epochs=1)
    assert len(ema._average) == len(list(Toy().parameters()))


def test_what_is_thawed_later_is_averaged_and_resumes(tmp_path: Path) -> None:
    class Thaws(Toy):
        def configure_optimizers(self) -> Any:
            self.net.stem.requires_grad_(False)
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def on_train_epoch_start(self) -> None:
            self.net.stem.requires_grad_(self.current_epoch > 0)

    def run(epochs: int, **arguments: Any) -> tuple[EMA, Any]:
        torch.manual_seed(0)
        ema = EMA(decay=0.5, warmup=None)
        run = trainer([ema], max_epochs=epochs)
        run.fit(Thaws(), data(), data(), **arguments)
        return ema, run

    ema, whole = run(4)
    stem = whole.lightning_module.net.stem.weight
    assert 0 < (ema._average["net.stem.weight"] - stem).abs().max() < 0.1
    _, half = run(3)
    half.save_checkpoint(tmp_path / "half.ckpt")
    again, _ = run(4, ckpt_path=tmp_path / "half.ckpt")
    assert_equal(ema.state_dict(), again.state_dict())
    held = EMA()
    trainer([held, GradualUnfreezing(every_n_epochs=9)]).fit(Toy(), data(), data())
    assert len(held._average) == len(list(Toy().parameters()))


def test_buffers_are_those_of_the_module() -> None:
    module = Toy()
    module.net.head = nn.Sequential(nn.BatchNorm1d(16), module.net.head)
    _, trace = fit(EMA(decay=0.9), module)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(trace.used["validate"][f"net.head.0.{name}"], trace.steps[-1][f"net.head.0.{name}"])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_checkpoints_hold_what_they_say(tmp_path: Path) -> None:
    files = [
        ModelCheckpoint(tmp_path, "alone", save_weights_only=True, monitor="val/loss"),
        ModelCheckpoint(tmp_path, "full", monitor="val/loss", mode="max"),
    ]
    ema = EMA(decay=0.9)
    _, trace = fit(ema, None, *files, enable_checkpointing=True, max_epochs=1)
    alone, full = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in ("alone", "full"))
    assert (alone["lit_efficient"]["weights"], full["lit_efficient"]["weights"]) == ("ema", "raw")
    assert_equal(alone["state_dict"], trace.used["validate"])  # what was validated is what is kept
    assert_equal(full["state_dict"], trace.steps[-1])
    assert_equal(full["callbacks"]["EMA"]["average"], trace.used["validate"])

    for name in ("alone", "full"):
        trace = Trace()
        run = trainer([EMA(decay=0.9), trace])
        run.test(Toy(), data(), ckpt_path=tmp_path / f"{name}.ckpt", verbose=False)
        assert_equal(trace.used["test"], alone["state_dict"])


def test_a_checkpoint_that_is_loaded_displaces_the_average_in_memory(tmp_path: Path) -> None:
    run, trace = fit(EMA(decay=0.9), max_epochs=1)
    first = trace.used["validate"]
    run.save_checkpoint(tmp_path / "alone.ckpt", weights_only=True)
    run.save_checkpoint(tmp_path / "full.ckpt", weights_only=False)
    run, trace = fit(EMA(decay=0.9), max_epochs=3)
    assert not torch.equal(first["net.head.weight"], trace.used["validate"]["net.head.weight"])
    for name in ("alone", "full"):
        run.test(run.lightning_module, data(), ckpt_path=tmp_path / f"{name}.ckpt", verbose=False)
        assert_equal(trace.used["test"], first)


def test_a_checkpoint_that_is_saved_in_the_middle_of_a_validation_holds_raw_weights(tmp_path: Path) -> None:
    class Save(Callback):
        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "full.ckpt", weights_only=False)

    _, trace = fit(EMA(decay=0.9), None, Save(), max_epochs=1)
    full = torch.load(tmp_path / "full.ckpt", weights_only=True)
    assert_equal(full["state_dict"], trace.steps[-1])
    assert_equal(full["callbacks"]["EMA"]["average"], trace.used["validate"])


def test_another_module_never_gets_the_average() -> None:
    run, trace = fit(EMA(decay=0.9))
    other = Toy()
    run.test(other, data(), verbose=False)
    assert_equal(trace.used["test"], weights(other))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_raw_weights_come_back_after_an_exception(stage: str, error: type[BaseException]) -> None:
    run, trace = fit(EMA(decay=0.9), max_epochs=1)
    module = run.lightning_module

    def explode(*_: Any) -> None:
        raise error("bomb")

    step = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[stage]
    setattr(module, step, explode)
    with pytest.raises((RuntimeError, SystemExit)):
        getattr(run, stage)(module, data())
    assert_equal(trace.steps[-1], weights(module))


@pytest.mark.turns(4, family="resumed")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_resume_in_the_middle_of_an_epoch_goes_on_with_the_same_average(tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "three.ckpt", weights_only=False)

    def run(*callbacks: Callback, **arguments: Any) -> tuple[Any, Any]:
        ema, module = EMA(decay=0.9, every_n_steps=2, switch_every=4), Toy()
        alike = DataLoader(TensorDataset(torch.ones(16, 16)), batch_size=4)  # whichever batch comes next
        trainer([ema, *callbacks], max_epochs=2).fit(module, alike, data(), **arguments)
        return ema.state_dict(), weights(module)

    assert_equal(run(Save()), run(ckpt_path=tmp_path / "three.ckpt"))


def test_a_second_fit_of_the_same_trainer_goes_on() -> None:
    ema = EMA(decay=0.9)
    run, trace = fit(ema, max_epochs=1)
    run.fit_loop.max_epochs = 2
    run.fit(run.lightning_module, data(), data())
    assert ema._updates == 8
    torch.testing.assert_close(trace.used["validate"], expected_average(trace.steps, 0.9))


def test_switch_ema_copies_the_average_into_the_weights() -> None:
    _, trace = fit(EMA(decay=0.5, warmup=None, switch_every=4), max_epochs=1)
    torch.testing.assert_close(trace.steps[-1], trace.used["validate"])
    _, plain = fit(EMA(decay=0.5, warmup=None), max_epochs=1)
    assert_equal(trace.steps[:3], plain.steps[:3])
    expected = {name: 0.5 * average + 0.5 * plain.steps[3][name] for name, average in plain.steps[0].items()}
    assert trace.steps[3].keys() == expected.keys()
    assert not torch.equal(trace.steps[3]["net.head.weight"], plain.steps[3]["net.head.weight"])


def test_averaged_is_a_context_for_code_of_ones_own() -> None:
    ema = EMA(decay=0.9)
    run, trace = fit(ema)
    module = run.lightning_module
    inside: list[Any] = []

    def fail() -> None:
        with ema.averaged(module):
            inside.append(weights(module))
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert_equal(inside[0], trace.used["validate"])
    assert_equal(weights(module), trace.steps[-1])


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_a_network_without_trained_parameters_is_refused() -> None:
    class Nothing(Toy):
        def configure_optimizers(self) -> None:
            return None

    module = Nothing().requires_grad_(False)
    with pytest.raises(ConfigurationError, match="EMA: no parameter of Nothing trains"):
        fit(EMA(), module)


def test_lightnings_own_averages_are_refused() -> None:
    for other in (EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=1e-3)):
        with pytest.raises(ConflictError, match=r"EMA cannot be combined with .*: both swap the weights"):
            fit(EMA(), None, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 1.0}, "EMA: decay must be at least 0 and below 1, got 1.0"),
        ({"warmup": "linear"}, "EMA: warmup must be one of inverse_gamma, tf or null, got 'linear'"),
        ({"power": 0}, "EMA: power must be above 0, got 0"),
        ({"every_n_steps": 0}, "EMA: every_n_steps must be a whole number of at least 1, got 0"),
        ({"start_step": -1}, "EMA: start_step must be a whole number of at least 0, got -1"),
        ({"switch_every": 0}, "EMA: switch_every must be a whole number of at least 1 or null, got 0"),
        ({"device": "moon"}, "EMA: device must be a device that torch knows .* got 'moon'"),
    ],
)
def test_arguments_are_checked_when_it_is_built(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EMA(**arguments)


@pytest.mark.parametrize(
    "how", [{}, {"warmup": None}, {"every_n_steps": 3}, {"start_step": 2}, {"start_step": 4, "every_n_steps": 3}]
)
def test_it_tells_what_each_step_holds_of_the_average(how: dict[str, Any]) -> None:
    ema = EMA(decay=0.7, **how)
    run, trace = fit(ema)
    shares = ema.shares(len(trace.steps))
    assert shares is not None
    assert sum(shares) == pytest.approx(1)
    average = ema.average(run.lightning_module)
    assert average is not None
    for name, tensor in average.items():
        torch.testing.assert_close(tensor, sum(s * state[name] for s, state in zip(shares, trace.steps, strict=True)))
    assert EMA(start_step=5).shares(5) is None
    assert EMA(switch_every=2).shares(5) is None


def test_the_report_counts_what_is_kept() -> None:
    module = Toy("init")
    count = sum(p.numel() for p in module.parameters())
    report = EMA().describe(module)
    assert report.parameters == count
    assert report.details == {"average_bytes": 4 * count}
    assert f"{count:,} parameters ({format_bytes(4 * count)}), decay 0.9999 after inverse_gamma" in report.summary
    assert "copied" not in report.summary
    assert "copied into the weights every 3 steps" in EMA(switch_every=3).describe(module).summary
