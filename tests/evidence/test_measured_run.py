"""Tests of measured runs: measurements are those of the fit itself, and failures are reported."""

import copy
import os
import signal
import tempfile

import lightning.pytorch as L
import pytest
import torch

from lit_efficient import EMA, LoRA
from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.fits import Change, LiveFit
from lit_efficient.evidence.measured_run import Measured, measured
from tests.support import Toy, data, trainer, weights


@pytest.fixture(scope="module")
def source() -> LiveFit:
    run = trainer(max_steps=3, accumulate_grad_batches=2, check_val_every_n_epoch=1)
    return LiveFit(run, Toy(), (data(shuffle=True), data()))


class ByHand(Toy):
    """Module that steps two optimizers in each batch, which its trainer counts as two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self._sample_loss(batch).mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.net.stem, self.net.head)]


def test_the_last_validation_is_at_the_end_where_a_batch_is_two_steps():
    source = LiveFit(trainer(max_steps=3), ByHand(), (data(), data()))
    one = measured(source, steps=6, validations=2)
    assert one.failed == ""
    assert one.held_out["val/loss"][-1][0] == one.steps == 3


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))


def test_what_is_measured_is_what_the_fit_does(source):
    before = copy.deepcopy(weights(source.parts.module))
    one = measured(source, Change("plain"), steps=8, seed=3, validations=2, elsewhere=data)
    assert one.failed == ""
    assert (one.variant, one.seed, one.steps, one.unit, one.amounts) == ("plain", 3, 8, "samples", [8] * 8)
    assert all(torch.equal(value, weights(source.parts.module)[name]) for name, value in before.items())

    losses = Losses()
    settings = {"max_steps": 8, "max_epochs": -1, "val_check_interval": 8, "check_val_every_n_epoch": None}
    fit = source.make(Change(settings={f"trainer.{name}": value for name, value in settings.items()}, seed=3))
    fit.trainer.callbacks.append(losses)
    fit.run()
    pairs = [a + b for a, b in zip(losses.seen[::2], losses.seen[1::2])]  # halves: two are a step
    assert one.losses == pytest.approx(pairs, rel=1e-5)
    (last,) = fit.trainer.validate(fit.module, data(), verbose=False)
    assert [step for step, _, _ in one.held_out["val/loss"]] == [4, 8]
    assert one.held_out["val/loss"][-1][2] == pytest.approx(last["val/loss"], rel=1e-5)
    assert one.elsewhere["val/loss"][1] == pytest.approx(last["val/loss"], rel=1e-5)
    assert one.elsewhere["val/loss"][0] > one.elsewhere["val/loss"][1]

    assert len(one.seconds) == len(one.cpu_seconds) == 8
    assert min(one.seconds) > 0
    assert one.held_out["val/loss"][-1][1] == pytest.approx(sum(one.seconds))
    size = sum(p.nbytes for p in fit.module.parameters())
    assert one.kinds["weights"] == size
    assert size <= one.kinds["gradients"] <= 2 * size  # of the second batch of a step some arrive
    assert 2 * size <= one.kinds["states"] <= 2.1 * size  # and the counts of steps
    assert one.peak >= 4 * size
    assert one.checkpoint_bytes > 3 * size
    assert Measured.of(one.__dict__) == one


def test_a_technique_shows_in_the_bytes(source):
    plain, lora, ema = (
        measured(source, Change("", callbacks=made), steps=4, validations=0)
        for made in (list, lambda: [LoRA(rank=2)], lambda: [EMA()])
    )
    assert lora.trainable < plain.trainable == plain.parameters
    assert lora.kinds["states"] < plain.kinds["states"] / 2
    assert lora.checkpoint_bytes < plain.checkpoint_bytes / 2
    assert ema.kinds["averages"] == plain.kinds["weights"]
    assert ema.peak > plain.peak > lora.peak
    assert not plain.held_out


def test_a_step_of_several_optimizers_is_one_and_its_bytes_are_counted():
    one = measured(LiveFit(trainer(max_steps=1), Toy(optimizers=2), data()), steps=16)
    assert one.steps == len(one.amounts) == 8  # Lightning counts each optimizer's
    assert one.peak > one.kinds["weights"] > 0


class Dies(L.Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_start(self, trainer, pl_module):
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"memory": torch.OutOfMemoryError("no room"), "exit": SystemExit(3), "bug": KeyError("x")}[self.how]


@pytest.mark.parametrize(
    ("how", "said"), [("killed", "SIGKILL"), ("memory", "out of memory"), ("exit", "SystemExit"), ("bug", "KeyError")]
)
def test_what_dies_is_a_row_with_its_reason(source, how, said, tmp_path):
    one = measured(source, Change(how, callbacks=lambda: [Dies(how)]), steps=2, log=tmp_path / "log")
    assert said in one.failed
    assert (one.variant, one.steps, one.refused) == (how, 0, False)
    assert ("Traceback" in (tmp_path / "log").read_text()) == (how != "killed")


class Waits(Toy):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}


def test_a_scheduler_that_waits_for_a_validation_can_be_measured_without_any():
    fit = LiveFit(trainer(max_steps=3, check_val_every_n_epoch=1), Waits(), (data(), data()))
    one = measured(fit, steps=6)
    assert (one.failed, one.steps) == ("", 6)
    assert not measured(LiveFit(trainer(limit_val_batches=0), Toy(), (data(), data())), steps=2).held_out


def test_the_bytes_of_a_short_run_are_those_of_a_step_with_optimizer_states(source):
    short, long = (measured(source, steps=steps) for steps in (3, 8))
    assert short.kinds["states"] == long.kinds["states"] > 0
    assert short.peak == pytest.approx(long.peak, rel=1e-3)


def test_a_limit_of_one_batch_stays_one():
    fits = [LiveFit(trainer(limit_val_batches=limit), Toy(), (data(), data(16))) for limit in (1, 4, 1.0)]
    one, four, all_of_four = (measured(fit, steps=1, validations=1).held_out["val/loss"][0][2] for fit in fits)
    assert one != four == all_of_four


def test_what_is_refused_is_told_in_its_own_words(source):
    one = measured(source, Change("bad", callbacks=lambda: [LoRA(targets=["no_such"])]), steps=2)
    assert one.refused
    assert "no_such" in one.failed
    several = LiveFit(trainer(max_steps=1, devices=2, strategy="ddp_fork"), Toy(), data())
    assert "devices" in measured(several, steps=1).failed
    with pytest.raises(ConfigurationError, match="steps"):
        measured(source, steps=0)


class Hangs(L.Callback):
    def on_train_start(self, trainer, pl_module):
        signal.pause()


def test_a_run_that_takes_too_long_is_ended_and_leaves_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one = measured(source, Change(callbacks=lambda: [Hangs()]), steps=2, most_seconds=1.5)
    assert "more than 1.5 seconds" in one.failed
    assert list(tmp_path.iterdir()) == []
