"""Tests of the search on simulated costs: it finds the fastest candidate that fits, with few runs."""

import copy
import functools
import math
import os
import random
import signal
from dataclasses import dataclass, field

import lightning.pytorch as L
import pytest
import torch
import yaml

from lit_efficient import MaxBatchSize
from lit_efficient.cli.fits import ConfigFit
from lit_efficient.errors import ConfigurationError, ConflictError
from lit_efficient.evidence import own_process
from lit_efficient.evidence.fits import Change, Fit, LiveFit, batch_setting
from lit_efficient.evidence.tuning.candidates import Candidate, Option, Space
from lit_efficient.evidence.tuning.tuned import Tuned, tune
from lit_efficient.evidence.tuning.tuning import Ledger, Row, Search
from lit_efficient.internals.torch_fake import FakeTensor
from tests.support import Toy, data, trainer


@dataclass
class Ran:
    timed: list[float]
    failed: str = ""
    peak: int = 0
    unit: str = "samples"
    late: bool = False
    amounts: list[int] = field(default_factory=lambda: [64])


@functools.cache
def _space() -> Space:
    return Space(Fit(trainer(max_steps=1), Toy(), data()), only=())


def space_of(options: int, effective: int = 64) -> Space:
    """Return a space with artificial options."""
    space = copy.copy(_space())
    space.options = {name: Option(name, "same", settings={name: 1}) for name in "ABCDEFGH"[:options]}
    space.left_out, space.effective, space.asked = {}, effective, Candidate(effective // 2, 2)
    space.sizes = [2**i for i in range(effective.bit_length())]
    return space


class Surface:
    """Simulated costs of all candidates: options add up, pairs interact, and time is a curve of the batch size."""

    def __init__(self, space: Space, seed: int, limit: float = 0.5) -> None:
        draw = random.Random(seed)
        self.ran: list[tuple[str, int]] = []
        self.planned: list[str] = []
        self.candidates = {str(one): one for one in space.candidates()}
        names = list(space.options)
        effects = {name: draw.gauss(0.0, 0.25) for name in names}
        pairs = {(a, b): draw.gauss(0.0, 0.05) for a in names for b in names if a < b}
        spared = {name: draw.choice([0.0, 0.0, 0.3, 0.6]) for name in names}
        best, bend = draw.uniform(0, 6), draw.uniform(0.005, 0.03)
        self.seconds, self.peaks = {}, {}
        for name, one in self.candidates.items():
            cost = sum(effects[o] for o in one.options) + bend * (math.log2(one.batch) - best) ** 2
            cost += sum(v for (a, b), v in pairs.items() if a in one.options and b in one.options)
            self.seconds[name] = math.exp(cost)
            saved = math.prod(1 - spared[o] for o in one.options)
            self.peaks[name] = int(1_000_000 + 1_000_000 * one.batch * saved)
        self.limit = sorted(self.peaks.values())[int(limit * (len(self.peaks) - 1))]
        self.noise = random.Random(seed)

    def predict(self, change: Change) -> tuple[int, float]:
        self.planned.append(change.name)
        return self.peaks[change.name], 1e9

    def measure(self, change: Change, steps: int) -> Ran:
        assert self.peaks[change.name] <= self.limit, "plan says that it does not fit"
        self.ran.append((change.name, steps))
        seconds = [self.seconds[change.name] * math.exp(self.noise.gauss(0, 0.005)) for _ in range(steps)]
        return Ran(seconds, peak=self.peaks[change.name])

    @property
    def best(self) -> float:
        return min(self.seconds[name] for name, peak in self.peaks.items() if peak <= self.limit)


@pytest.mark.parametrize("limit", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_is_found_by_running_a_few(seed, limit):
    space = space_of(5)
    surface = Surface(space, seed, limit)
    search = Search(space, surface.predict, surface.measure, surface.limit).run()
    assert search.complete
    assert surface.seconds[str(search.best.candidate)] <= 1.05 * surface.best
    assert len({name for name, _ in surface.ran}) <= 0.3 * len(surface.candidates)
    assert len(set(surface.planned)) == len(surface.planned)


def test_an_interrupted_search_goes_on_and_runs_nothing_twice(tmp_path):
    whole = Surface(space_of(4), 5)
    expected = Search(space_of(4), whole.predict, whole.measure, whole.limit).run().best
    surface, file = Surface(space_of(4), 5), tmp_path / "rows.jsonl"
    plain = surface.measure

    def interrupted(change, steps):
        if len(surface.ran) == 4:
            raise KeyboardInterrupt
        return plain(change, steps)

    with pytest.raises(KeyboardInterrupt):
        Search(space_of(4), surface.predict, interrupted, surface.limit, ledger=Ledger(file, "x")).run()
    with file.open("a") as torn:
        torn.write('\n{"search": "x", "asked": "run')
    search = Search(space_of(4), surface.predict, plain, surface.limit, ledger=Ledger(file, "x")).run()
    assert search.best.candidate == expected.candidate
    assert surface.ran == whole.ran
    assert surface.planned == whole.planned
    before = len(surface.ran)
    Search(space_of(4), surface.predict, plain, surface.limit, ledger=Ledger(file, "x")).run()
    assert len(surface.ran) == before
    Search(space_of(4), surface.predict, plain, surface.limit, ledger=Ledger(file, "of another fit")).run()
    assert len(surface.ran) > before


def test_what_nobody_can_run_is_told_from_what_does_not_fit():
    surface = Surface(space_of(2), 0)
    nothing = Tuned(Search(space_of(2), surface.predict, surface.measure, 10).run(), None)
    nothing.check()  # no error: it is the memory
    assert nothing.best is None
    assert not surface.ran
    assert "Nothing fits" in nothing.summary()

    def refuses(change):
        raise ConfigurationError("no such layer")

    with pytest.raises(ConfigurationError, match="refused: no such layer"):
        Tuned(Search(space_of(2), refuses, surface.measure, 10).run(), None).check()
    with pytest.raises(ConfigurationError, match="more minutes"):
        Tuned(Search(space_of(2), surface.predict, surface.measure, 10**9, seconds=-1).run(), None).check()


def test_runs_correct_what_plan_says():
    """A candidate that ran out of memory, or had another batch, is not chosen, nor is a candidate that needs more."""
    surface = Surface(space_of(3), 2, limit=1.0)

    def measure(change, steps):
        one = surface.measure(change, steps)
        if change.name.startswith("64 x"):
            one.failed = "out of memory: 1 byte"
        if change.name.startswith("32 x") and "A" in change.name:
            one.peak = surface.limit + 1
        if change.name.startswith("16 x"):
            one.amounts = [16]
        return one

    search = Search(space_of(3), surface.predict, measure, surface.limit).run()
    states = {size: {row.state for one, row in search.rows.items() if one.batch == size} for size in (64, 16)}
    assert states[64] - {""} == {"too large"}
    assert states[16] - {""} == {"failed"}
    assert search.best.candidate.batch not in (16, 64)
    peaks = [surface.peaks[name] for name, _ in surface.ran if name.startswith("64 x")]
    assert peaks == sorted(set(peaks), reverse=True)  # what takes as much as one that ran out of memory does not run
    reasons = [row.reason for row in search.rows.values() if row.state == "failed"]
    assert any("does not follow data.batch_size" in reason for reason in reasons)


def test_of_those_that_cannot_be_told_apart_the_one_that_adds_least_is_chosen():
    space = space_of(3)
    search = Search(space, lambda change: (1, 1e9), lambda change, steps: Ran([1.0, 1.02, 0.98] * steps), 10).run()
    assert search.best.candidate == space.asked


def test_what_changes_the_mathematics_is_tried_only_if_allowed():
    fit = Fit(trainer(max_steps=1, accumulate_grad_batches=2), Toy(), data())
    same = Space(fit)
    assert {option.computes for option in same.options.values()} == {"same"}
    assert "LowBitOptimizer" in same.left_out
    more = {option.computes for option in Space(fit, allow=True).options.values()}
    assert more == {"same", "rounded"}
    assert "LoRA" in Space(fit, allow=["LoRA"], only=["batch_size"]).options
    assert same.sizes == [1, 2, 4, 8]
    normed = Fit(fit.trainer, _normed(), data())
    assert Space(normed).sizes == [4]
    assert "normalise over the batch" in Space(normed).left_out["batch_size"]
    assert Space(normed, allow=["batch_size"]).sizes == [1, 2, 4, 8]


def _normed() -> Toy:
    toy = Toy()
    toy.norm = torch.nn.BatchNorm1d(4)
    return toy


def test_errors_name_what_is_wrong():
    fit = Fit(trainer(max_steps=1), Toy(), data())
    with pytest.raises(ConfigurationError, match="did you mean 'Compile'"):
        Space(fit, only=["compile"])
    with pytest.raises(ConfigurationError, match="'no_such'"):
        Space(fit, allow=["no_such"])
    with pytest.raises(ConflictError, match="MaxBatchSize"):
        Space(Fit(trainer(max_steps=1, callbacks=[MaxBatchSize()]), Toy(), data()))
    with pytest.raises(ConfigurationError, match=r"data\.batch_size"):
        batch_setting(Fit(trainer(max_steps=1), Toy(), None), "data.rows")
    source = LiveFit(trainer(max_steps=1), Toy(), data())
    for arguments in ({"device_memory": "much"}, {"minutes": 0}, {"steps": 0}):
        with pytest.raises(ConfigurationError, match=next(iter(arguments))):
            tune(source, **arguments)


@pytest.mark.turns(2, family="whole searches")
def test_a_live_fit_is_tuned(tmp_path):
    """Real plans and runs, with a loader's batch size and one technique."""
    source = LiveFit(trainer(max_steps=2, limit_val_batches=0), Toy(), data())
    told: list[str] = []
    found = tune(
        source, "1GiB", only=["batch_size", "MemoryEfficientLayers"], folder=tmp_path, steps=2, say=told.append
    )
    assert found.search.complete
    row = found.search.rows[found.space.asked]
    assert row.state == "ran"
    assert row.amount == 4
    assert {one.candidate.batch * one.candidate.accumulation for one in found.search.ran} == {4}
    assert found.best is not None
    assert "4 x 1" in (tmp_path / "table.csv").read_text("utf-8")
    assert any("tried" in line for line in told)
    assert any(line.startswith(str(found.best.candidate)) and "*" in line for line in found.lines())
    assert batch_setting(source.make(found.change))[1] == found.best.candidate.batch


class Hangs(L.Callback):
    here = os.getpid()

    def on_train_start(self, trainer, pl_module):
        if os.getpid() != self.here:
            signal.pause()


def test_a_run_that_hangs_does_not_hold_the_search(tmp_path):
    source = LiveFit(trainer([Hangs()], max_steps=2, limit_val_batches=0), Toy(), data())
    with pytest.raises(ConfigurationError, match="more minutes"):
        tune(source, "1GiB", only=["batch_size"], folder=tmp_path, steps=1, minutes=0.05)
    assert "took more than 3 seconds" in (tmp_path / "rows.jsonl").read_text("utf-8")


class HangsInPlans(L.Callback):
    """Callback that hangs in a plan."""

    here = os.getpid()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if os.getpid() != self.here and isinstance(next(pl_module.parameters()), FakeTensor):
            signal.pause()


def test_a_plan_that_hangs_is_ended_and_the_candidate_runs(monkeypatch):
    monkeypatch.setattr(own_process, "_PLANNING", 1.0)
    source = LiveFit(trainer([HangsInPlans()], max_steps=2, limit_val_batches=0), Toy(), data())
    found = tune(source, "1GiB", only=[], steps=1)
    row = found.search.rows[found.space.asked]
    assert (row.state, row.planned) == ("ran", 0)
    assert "took more than 1 seconds" in row.reason


def test_the_overlay_gives_what_was_measured(tmp_path):
    argv = ["-c", "latent_diffusion", "--trainer.val_check_interval", "100"]
    source = ConfigFit(argv, tmp_path, "meta")
    space = Space(source.make(), allow=True, only=["batch_size", "ChannelsLast", "trainer.precision=bf16-mixed"])
    assert {"ChannelsLast", "trainer.precision=bf16-mixed"} == set(space.options)
    size = space.asked.batch // 2
    candidate = space.candidate(size, space.options)
    search = Search(space, lambda change: (1, 1e9), lambda change, steps: Ran([1.0]), 10)
    search.rows[candidate] = Row(candidate, "ran", seconds=[1.0, 1.1], amount=64, unit="samples")
    found = Tuned(search, source.make().trainer.strategy.root_device)
    file = tmp_path / "best.yaml"
    file.write_text(found.overlay("python -m lit_efficient tune", "fit"))
    measured = source.make(found.change)
    laid = ConfigFit([*argv, "-c", str(file)], tmp_path, "meta").make()
    for fit in (measured, laid):
        assert fit.data.batch_size == size
        assert fit.trainer.accumulate_grad_batches == 2 * space.asked.accumulation
        assert fit.trainer.val_check_interval == 200
        assert fit.trainer.precision == "bf16-mixed"
    assert {type(one) for one in measured.trainer.callbacks} == {type(one) for one in laid.trainer.callbacks}
    assert yaml.safe_load(file.read_text())["trainer"]["callbacks+"] == [{"class_path": "ChannelsLast"}]
