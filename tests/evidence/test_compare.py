"""Tests of comparisons of a small fit: results are right, nothing runs twice, and failures are reported."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch

import lit_efficient
from lit_efficient import EMA, LoRA
from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.comparing import comparison_runs
from lit_efficient.evidence.comparing.comparison import TRAINING_LOSS, Comparison
from lit_efficient.evidence.comparing.comparison_rows import Row, Rows, metric_of, results
from lit_efficient.evidence.comparing.comparison_runs import Comparing, Schedule, variants
from lit_efficient.evidence.comparing.comparison_tables import notes
from lit_efficient.evidence.fits import Change, LiveFit
from lit_efficient.evidence.measured_run import Measured
from tests.support import Toy, data, trainer

TWICE = {"trainer.accumulate_grad_batches": 2}
SHORT = Schedule(steps=6, seeds=2, minutes=5, validations=2, narrow=None)
CHANGES = [Change("lora", callbacks=lambda: [LoRA(rank=2)]), Change("bad", callbacks=lambda: [LoRA(targets=["none"])])]


@pytest.fixture(scope="module")
def source() -> LiveFit:
    return LiveFit(trainer(max_steps=3), Toy(), (data(shuffle=True), data()))


@pytest.mark.turns(2, family="whole comparisons")
def test_it_goes_on_where_it_was_stopped(source, tmp_path):
    said: list[str] = []

    def stop(line: str) -> None:
        said.append(line)
        if "seed 0: " in said[-1] and sum("seed 0: " in line for line in said) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Comparing(source, CHANGES, SHORT, tmp_path, data, stop, alone=True).run()
    lines = (tmp_path / "rows.jsonl").read_text()
    assert lines.count("\n") == 3
    (tmp_path / "rows.jsonl").write_text(lines + '{"key": "torn')

    again = Comparing(source, CHANGES, SHORT, tmp_path, data, said.append, alone=True)
    again.run()
    done = [(row.key, row.round, row.whole) for row in again.rows.rows]
    assert len(done) == len(set(done))
    assert sum("refused" in line for line in said) == 1
    assert (tmp_path / "rows.jsonl").read_text().startswith(lines)
    assert again.settled

    idle = Comparing(source, CHANGES, SHORT, tmp_path, data, said.append, alone=True)
    before = len(said)
    idle.run()
    assert ["runs already" in line for line in said[before:]] == [True]

    found = idle.result()
    assert [one.name for one in found.variants] == ["baseline", "lora"]
    assert "none" in found.about["left_out"]["bad"]
    baseline, lora = found.variants
    assert found.metric == "val/loss"
    assert lora.trainable < baseline.trainable / 2
    assert lora.peak_ratio == lora.peak / baseline.peak < 1
    assert lora.kinds["states"] < baseline.kinds["states"] / 2
    assert lora.checkpoint_bytes < baseline.checkpoint_bytes / 2
    assert baseline.planned == pytest.approx(baseline.peak, rel=0.02)
    assert (lora.seeds, lora.rounds) == (2, 2)
    assert [step for step, _, _ in lora.curve] == [3, 6]
    assert lora.loss.value == pytest.approx(lora.final_loss - baseline.final_loss)
    assert lora.forgetting.value == pytest.approx(lora.forgotten - baseline.forgotten)
    assert baseline.forgotten < 0  # the other data is the same here, and it learns
    assert (baseline.time.value, baseline.time.p, baseline.loss.value, baseline.steps_to_loss.value) == (1, None, 0, 1)


@pytest.mark.parametrize(
    ("steps", "schedule", "end"),
    [
        # 10 s until the first step and 2 s for each; from step 5 on a validation's share is known 5 steps later.
        ([2, 5, 9, 10], {"minutes": 6.0}, "each about 50 s, take about 5.0 min"),
        ([], {"minutes": 6.0}, "each about 50 s, take about 5.0 min"),  # after the whole run
        ([5, 10], {"minutes": 6.0, "narrow": 0.05}, "; short runs that compare times follow, until 6 min have passed"),
        ([5, 10], {"minutes": 3.0}, "5.0 min, and none begins after 3 min: give more minutes or fewer steps"),
        ([4, 5], {"minutes": 6.0, "validations": 0}, "each about 50 s, take about 5.0 min"),
    ],
)  # fmt: skip
def test_the_first_steps_tell_how_long_it_takes(source, tmp_path, monkeypatch, steps, schedule, end):
    now = 0.0
    said: list[str] = []

    def run(source, change, *, seed, heard, **_):
        nonlocal now
        begun = now
        for step in steps:
            now = begun + 10 + 2 * step
            heard(step)
            if step == steps[-1] and not change.overlays and seed == 0:
                assert "take about" in " ".join(said)
        now = begun + 50
        return run_of(change.name, seed, [1.0, 0.9], 2.0)

    monkeypatch.setattr(comparison_runs, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(comparison_runs, "measured", run)
    monkeypatch.setattr(Comparing, "_planned", lambda *_: None)
    plan = Schedule(**{"steps": 20, "seeds": 2, "validations": 4, "narrow": None, **schedule})
    Comparing(source, CHANGES, plan, tmp_path, said=said.append, alone=True).run()
    (line,) = [line for line in said if line.startswith("compare: ")]
    assert line.startswith("compare: 6 trainings of 20 steps, each about 50 s, take about ")
    assert line.endswith(end)


def test_a_folder_belongs_to_one_comparison(source, tmp_path):
    Comparing(source, CHANGES, SHORT, tmp_path)
    more = Comparing(source, [*CHANGES, Change("ema", callbacks=lambda: [EMA()])], replace(SHORT, seeds=5), tmp_path)
    assert list(more.variants)[-3:] == ["all but lora", "all but bad", "all but ema"]
    with pytest.raises(ConfigurationError, match="steps"):
        Comparing(source, CHANGES, replace(SHORT, steps=8), tmp_path)
    other = LiveFit(trainer(max_steps=3), Toy(), data(batch_size=2))
    with pytest.raises(ConfigurationError, match="fit"):
        Comparing(other, CHANGES, SHORT, tmp_path)


def test_a_fit_that_is_refused_is_not_compared(source, tmp_path):
    wrong = LiveFit(trainer(max_steps=1, callbacks=[LoRA(targets=["none"])]), Toy(), data())
    comparing = Comparing(wrong, CHANGES[:1], SHORT, tmp_path)
    comparing.run()
    assert comparing.refused
    assert len(comparing.rows.rows) == 1
    assert ["none" in one.failed for one in comparing.result().variants] == [True, False]
    assert "refused" in comparing.result()["lora"].failed


class TooMuch(L.Callback):
    """Callback that runs out of memory without LoRA."""

    def on_train_start(self, trainer, pl_module):
        if not any(isinstance(one, LoRA) for one in trainer.callbacks):
            raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_technique_may_be_what_makes_it_fit(tmp_path):
    source = LiveFit(trainer(max_steps=1, callbacks=[TooMuch()]), Toy(), data())
    comparing = Comparing(source, CHANGES[:1], Schedule(steps=3, seeds=1, validations=1), tmp_path)
    comparing.run()
    baseline, lora = comparing.result().variants
    assert "out of memory" in baseline.failed
    assert lora.failed == ""
    assert lora.peak > 0
    assert math.isnan(lora.peak_ratio)
    assert lora.time.n == 0


@pytest.mark.turns(2, family="whole comparisons")
def test_what_is_live_is_compared_in_one_call_and_stays(source, tmp_path):
    module, run = Toy(), trainer(max_steps=3)
    before = [p.clone() for p in module.parameters()]
    found = lit_efficient.compare(
        run, module, data(), with_={"ema": [EMA(decay=0.5)], "more": Change(settings=TWICE)},
        steps=4, seeds=1, validations=0, narrow=None, folder=tmp_path,
    )  # fmt: skip
    assert [one.name for one in found.variants] == ["baseline", "ema", "more", "all"]
    assert not [one.failed for one in found.variants if one.failed]
    assert found.metric == TRAINING_LOSS
    assert found["ema"].kinds["averages"] == found["ema"].kinds["weights"]
    assert found["ema"].loss.value == 0
    assert found["ema"].loss.evidence is False
    assert found["more"].loss.value != 0
    assert "averages" in found["all"].kinds
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters()))
    assert "averages" in (tmp_path / "comparison.html").read_text()
    json.dumps(found.as_dict())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"steps": 2}, "steps"),
        ({"seeds": 1.5}, "seeds"),
        ({"minutes": 0}, "minutes"),
        ({"validations": -1}, "validations"),
        ({"narrow": 0}, "narrow"),
        ({"with_": {}}, "with"),
        ({"with_": {"baseline": []}}, "with"),
        ({"with_": {"all": [], "ema": []}}, "with"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(given, named):
    with pytest.raises(ConfigurationError, match=named):
        lit_efficient.compare(trainer(max_steps=1), Toy(), data(), **{"with_": {"ema": [EMA()]}, **given})


def run_of(name: str, seed: int, losses: list[float], seconds: float, **more) -> Measured:
    steps = len(losses)
    curve = [(i + 1, (i + 1) * seconds, loss) for i, loss in enumerate(losses)]
    return Measured(
        name, seed, steps, "samples", [seconds] * steps, [], [1] * steps, losses, {"val/loss": curve}, **more
    )


def rows_of(name: str, slope: float, seconds: float) -> list[Row]:
    rows = []
    for seed, noise in enumerate((0.0, 0.011, -0.007)):
        losses = [10 - slope * (i + 1) + noise for i in range(8)]
        rows.append(Row(name, seed, True, run_of(name, seed, losses, seconds + noise / 9)))
    return rows


def test_losses_are_compared_at_equal_steps_and_time_and_steps_and_time_at_equal_losses():
    baseline, fast, slow = results(
        {"baseline": rows_of("b", 0.5, 0.2), "fast": rows_of("f", 0.5, 0.1), "slow": rows_of("s", 1.0, 0.4)}, "val/loss"
    )
    assert fast.time.value == pytest.approx(0.5, abs=0.01)
    assert fast.time.evidence
    assert fast.loss.value == pytest.approx(0)
    assert not fast.loss.evidence
    # After the 0.8 seconds of the fast one's 8 steps the baseline has made 4.
    assert fast.loss_at_time.value == pytest.approx(-0.5 * 4, rel=0.02)
    assert fast.steps_to_loss.value == pytest.approx(1)
    assert fast.time_to_loss.value == pytest.approx(0.5, rel=0.02)
    assert slow.loss.value == pytest.approx(-4.0)
    assert slow.loss_at_time.value == pytest.approx(0, abs=0.05)  # 4 steps of twice the slope
    assert slow.steps_to_loss.value == pytest.approx(0.5)
    assert slow.time_to_loss.value == pytest.approx(1.0, rel=0.02)
    assert results({"slow": rows_of("s", 1.0, 0.4), "b": rows_of("b", 0.5, 0.2)}, "val/loss")[1].steps_to_loss is None
    assert baseline.curve[0][0] == 1


def test_seeds_that_change_nothing_are_no_evidence():
    same = {name: [Row(name, i, True, run_of(name, i, [loss, loss + i * 1e-8], 0.1)) for i in range(3)]
            for name, loss in (("baseline", 1.0), ("better", 0.5))}  # fmt: skip
    assert results(same, "val/loss")[1].loss.value == pytest.approx(-0.5)
    assert not results(same, "val/loss")[1].loss.evidence


def test_a_run_that_diverges_is_not_left_out_of_the_mean():
    rows = rows_of("v", 0.5, 0.2)
    rows[1].run.held_out["val/loss"][-1] = (8, 1.6, math.nan)
    found = results({"baseline": rows_of("b", 0.5, 0.2), "v": rows}, "val/loss")[1]
    assert math.isnan(found.loss.value)
    assert not found.loss.evidence


def test_a_run_that_failed_ended_early_or_diverged_is_told_of():
    rows = rows_of("v", 0.5, 0.2)
    rows[0].run.held_out["val/loss"][-1] = (8, 1.6, math.nan)
    rows[1].run.steps = 5
    rows[2].run.failed = "out of memory"
    found = results({"baseline": rows_of("b", 0.5, 0.2), "v": rows}, "val/loss")
    assert found[0].remarks == []
    assert all(
        part in " ".join(found[1].remarks) for part in ("1 of 3 runs failed", "out of memory", "5 steps", "1 of 2")
    )
    assert "out of memory" in " ".join(notes(Comparison("", {}, "val/loss", found)))


def test_what_two_at_once_have_made_counts_once(tmp_path):
    rows = Rows(tmp_path, {})
    for _ in range(2):
        rows.add(rows_of("v", 0.5, 0.2)[0])
    assert len(rows.of("v")) == 1


def test_an_interval_that_is_narrow_by_chance_does_not_end_the_runs(source, tmp_path):
    """With at least three rounds, a tenth of all comparisons of equals found evidence of a difference."""
    run = Comparing(source, [Change("null")], Schedule(steps=3, seeds=1), tmp_path)
    settled = []
    for turn in range(6):
        run.rows.rows += [Row(key, turn, False, run_of("", 0, [1.0, 1.0], 1.0)) for key in run.keys.values()]
        settled.append(run.settled)
    assert settled == [False] * 5 + [True]


def test_the_metric_is_the_validation_loss_or_the_one_that_is_asked_for():
    row = Row("", 0, True, Measured("", 0, held_out={"val/acc": [], "val/other_loss": []}))
    assert metric_of([row], None) == "val/other_loss"
    assert metric_of([row], "val/acc") == "val/acc"
    assert metric_of([], None) == TRAINING_LOSS
    with pytest.raises(ConfigurationError, match="val/acc"):
        metric_of([row], "val/f1")


def test_all_together_and_all_but_one_have_the_changes_of_each():
    changes = [Change(name, {name: 1}, (name,), lambda name=name: [name]) for name in "abc"]
    found = {one.name: one for one in variants(changes)}
    assert list(found) == ["baseline", "a", "b", "c", "all", "all but a", "all but b", "all but c"]
    assert found["all but b"].overlays == ("a", "c")
    assert found["all"].callbacks() == ["a", "b", "c"]
    assert found["all but c"].settings == {"a": 1, "b": 1}
    assert [one.name for one in variants(changes[:2])] == ["baseline", "a", "b", "all"]
    values = [Change(name, {"LoRA.variant": name}) for name in ("pissa", "eva", "olora")]
    assert [one.name for one in variants(values)] == ["baseline", "pissa", "eva", "olora"]  # one setting has one value


def test_rows_survive_what_a_machine_does_to_a_file(tmp_path):
    rows = Rows(tmp_path, {"fit": "x"})
    first, second = rows_of("v", 1.0, 0.1)[:2]
    rows.add(first)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"key": "v", "rou')
    Rows(tmp_path, {"fit": "x"}).add(second)
    assert Rows(tmp_path, {"fit": "x"}).rows == [first, second]
