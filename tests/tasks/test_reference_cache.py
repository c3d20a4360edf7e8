"""Cached references: the losses of live ones, one computation for all runs with one start, exact on resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lit_efficient import CausalLMConfig, ConfigurationError, ExactResume, LoRA, Preference, UnpairedPreference
from lit_efficient.mechanisms import progress
from tests.support import SlowClock, assert_equal, weights
from tests.tasks import unpaired_kit as unpaired
from tests.tasks.preference_kit import Rows, SaveAfter, loader, saved, trainer


class Counting:
    """Counts the batches of which the reference is computed, and notes the losses."""

    computed = 0
    noted: list[float]

    def _live_references(self, *args: Any) -> Any:
        self.computed += 1
        return super()._live_references(*args)  # type: ignore[misc]

    def training_step(self, *args: Any) -> Any:
        output = super().training_step(*args)  # type: ignore[misc]
        self.noted = [*getattr(self, "noted", []), float(output["loss"].detach())]
        return output


class Counted(Counting, Preference):
    pass


class CountedJudge(Counting, UnpairedPreference):
    pass


Counted.__name__ = Counted.__qualname__ = "Preference"
CountedJudge.__name__ = CountedJudge.__qualname__ = "UnpairedPreference"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_EFFICIENT_CACHE", str(tmp_path / "cache"))


def _fit(folder: Path, adapters: bool, cached: bool, **options: Any) -> Counted:
    torch.manual_seed(0)
    task = Counted(saved(folder), cache_reference=cached, learning_rate=5e-3, warmup_steps=0)
    callbacks: list[Any] = [ExactResume(), SaveAfter(5, folder / f"{cached}.ckpt")]
    callbacks += [LoRA(rank=4)] if adapters else []
    runner = trainer(default_root_dir=folder, max_steps=8, callbacks=callbacks, limit_val_batches=0)
    runner.fit(task, DataLoader(Rows(12), 4, shuffle=True), loader(), **options)
    return task


@pytest.mark.parametrize("adapters", [True, False])
def test_a_run_has_the_losses_of_live_references_and_computes_them_once(
    adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    live = _fit(tmp_path, adapters, cached=False)
    monkeypatch.setattr(progress, "time", SlowClock())
    first = _fit(tmp_path, adapters, cached=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if " rows, about" in line]
    assert lines == [f"{work}: 12 of 12 rows, about 0 s left" for work in ("reading data", "running the reference")]
    assert first.noted == pytest.approx(live.noted, rel=1e-5)
    assert (live.computed, first.computed) == (8, 3)
    again = _fit(tmp_path, adapters, cached=True)
    assert again.computed == 0
    assert again.noted == first.noted
    resumed = _fit(tmp_path, adapters, cached=True, ckpt_path=str(tmp_path / "True.ckpt"))
    assert resumed.computed == 0
    assert_equal(weights(resumed), weights(first))
    assert len([path for path in (tmp_path / "cache" / "reference").iterdir() if path.is_dir()]) == 1


def test_another_start_and_other_pairs_have_another_cache(tmp_path: Path) -> None:
    for family, seed in (("llama", 1), ("qwen3", 1), ("llama", 2)):
        task = Counted(saved(tmp_path, family), cache_reference=True)
        runner = trainer(default_root_dir=tmp_path, max_steps=1, limit_val_batches=0)
        runner.fit(task, DataLoader(Rows(4, seed), 4), loader())
        assert task.computed == 1
    assert len([path for path in (tmp_path / "cache" / "reference").iterdir() if path.is_dir()]) == 3


def test_validation_reads_the_cache_and_other_rows_run_the_reference(tmp_path: Path) -> None:
    torch.manual_seed(0)
    figures = []
    for cached in (False, True):
        task = Counted(saved(tmp_path), cache_reference=cached, learning_rate=1e-3, warmup_steps=0)
        runner = trainer(default_root_dir=tmp_path, max_steps=4, limit_val_batches=2, num_sanity_val_steps=0)
        runner.fit(task, loader(), loader(12))
        figures.append({name: float(value) for name, value in runner.callback_metrics.items() if "val/" in name})
        # Two batches for training, and those two of three for validation that are read.
        assert task.computed == (4 if cached else 8)
        figures[-1] |= runner.validate(task, DataLoader(Rows(4, seed=5), 4), verbose=False)[0]
        assert task.computed == (5 if cached else 9)
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)
    assert figures[0]["val/margin"] > 0


def test_another_configuration_of_the_same_weights_has_another_cache(tmp_path: Path) -> None:
    for theta in (10000.0, 50.0):
        rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
        task = Counted(replace(saved(tmp_path), config_fields=rotary), cache_reference=True)
        runner = trainer(default_root_dir=tmp_path, max_steps=1, limit_val_batches=0)
        runner.fit(task, DataLoader(Rows(4), 4), loader())
        assert task.noted == [pytest.approx(math.log(2), rel=1e-5)]  # the network is its own reference


@pytest.mark.parametrize("loss", ["kto", "apo_zero"])
def test_answers_without_pairs_have_the_losses_of_live_references(loss: Any, tmp_path: Path) -> None:
    def run(cached: bool, **options: Any) -> CountedJudge:
        torch.manual_seed(0)
        model = CausalLMConfig(unpaired.base(tmp_path))
        task = CountedJudge(model, loss, learning_rate=5e-3, warmup_steps=0, cache_reference=cached)
        path = tmp_path / f"{cached}.ckpt"
        runner = trainer(default_root_dir=tmp_path, max_steps=8, callbacks=[ExactResume(), SaveAfter(5, path)])
        runner.fit(task, datamodule=unpaired.data(tmp_path, fixed_others=loss == "kto"), **options)
        return task

    live = run(False)
    first = run(True)
    assert first.noted == pytest.approx(live.noted, rel=1e-5)
    assert first.noted[0] != pytest.approx(first.noted[-1], rel=1e-2)
    assert live.computed > 8
    assert first.computed == 3  # the rows for training and for validation are the same
    resumed = run(True, ckpt_path=str(tmp_path / "True.ckpt"))
    assert resumed.computed == 0
    assert_equal(weights(resumed), weights(first))
    if loss == "kto":
        runner = trainer(default_root_dir=tmp_path)
        with pytest.raises(ConfigurationError, match="set fixed_others of UnpairedPreferenceData"):
            runner.fit(CountedJudge(cache_reference=True), datamodule=unpaired.data(tmp_path))


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([Rows(4)[i] for i in range(4)])


class _Changing(Rows):
    """Rows that differ from one reading to the next."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        row = dict(super().__getitem__(index))
        row["chosen_input_ids"] = row["chosen_input_ids"] * 0 + 3 + self.reads % 90
        return row


def test_data_without_an_order_and_losses_without_a_reference_are_refused(tmp_path: Path) -> None:
    task = Preference(saved(tmp_path), cache_reference=True)
    with pytest.raises(ConfigurationError, match="cache_reference needs one DataLoader over an indexed data set"):
        trainer(default_root_dir=tmp_path, limit_val_batches=0).fit(task, DataLoader(_Stream(), 4), loader())
    task = Preference(saved(tmp_path), cache_reference=True)
    with pytest.raises(ConfigurationError, match="does not hold a row of this batch"):
        trainer(default_root_dir=tmp_path, limit_val_batches=0).fit(task, DataLoader(_Changing(4), 4), loader())
    with pytest.raises(ConfigurationError, match="cache_reference must be false with simpo, which has no reference"):
        Preference(loss="simpo", cache_reference=True)
