"""Tables of samples with their rewards: a text in the run's folder, a table of W&B, and the charts of the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from lit_efficient import ConfigurationError, LanguageModeling, Reward, SampleTable
from lit_efficient.evidence.reporting.run_page import chart_of, page
from lit_efficient.evidence.reporting.run_record import RunRecord
from lit_efficient.tasks.conversations import transcript
from lit_efficient.tasks.rewards import shorter
from tests import wandb_file
from tests.tasks.test_environments import Echo
from tests.tasks.test_environments import _task as _conversing
from tests.tasks.test_policy_optimization import ROWS, _loader, _task, letters, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
TABLE = "train/samples"
COLUMNS = [
    *("step", "prompt", "completion", "reward", "reward/letters", "reward/shorter"),
    *("advantage", "length", "end"),
]


def _fit(folder: Path, table: SampleTable, **options: Any) -> Any:
    task = _task(rewards=(letters,))
    task.rewards = [Reward(letters), Reward(shorter, 0.5)]
    run = trainer(default_root_dir=folder, max_steps=4, callbacks=[table], log_every_n_steps=1, **options)
    run.fit(task, _loader())
    return task


@pytest.mark.turns(6, family="slow")
def test_the_tables_of_an_offline_run_of_wandb_are_the_texts_in_the_folder(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, offline=True, name="run")
    task = _fit(tmp_path, SampleTable(2, samples=3, folder=str(tmp_path)), logger=logger)
    folder = Path(logger.experiment.dir).parent
    file = wandb_file.written(folder)
    logged = []
    for record in wandb_file.records(file):
        items = record.history.item if record.WhichOneof("record_type") == "history" else ()
        own = {item.nested_key[-1]: json.loads(item.value_json) for item in items if item.nested_key[0] == TABLE}
        logged += [own] if own else []
    assert [one["nrows"] for one in logged] == [3, 3]
    tables = [json.loads((folder / "files" / one["path"]).read_text()) for one in logged]
    assert [table["columns"] for table in tables] == [COLUMNS, COLUMNS]
    rows = tables[1]["data"]
    assert [row[0] for row in rows] == [4, 4, 4]
    for row, sample in zip(rows, task.sample_table):
        assert row[1:] == [*sample.values()]
        assert row[3] == pytest.approx(letters("", row[2], {}) + 0.5 * shorter("", row[2], {}), abs=1e-6)
        assert row[3] == pytest.approx(row[4] + row[5], abs=1e-6)
        assert row[8] in ("length", "stop")
    assert sum(sample["advantage"] for sample in task.sample_table[:4]) == pytest.approx(0, abs=1e-4)
    text = (tmp_path / "samples" / "rewards_step_0000004.txt").read_text()
    assert text.count("──▶") == 3
    assert f"{rows[0][1]}\n──▶\n{rows[0][2]}\n" in text
    assert f"reward {rows[0][3]:.4g}" in text


def test_the_report_draws_a_run_and_shows_its_tables(tmp_path: Path) -> None:
    _fit(tmp_path, SampleTable(2), logger=CSVLogger(tmp_path, name="", version=""))
    shown = page([RunRecord(tmp_path)])
    for title in ("Reward", "Share of clipped ratios", "Length of samples, tokens", "Entropy", "Shares of samples"):
        assert shown.count(f">{title}<") == 2, title  # of the card, and of the vertical axis
    for name in ("train/reward", "train/reward/letters", "train/reward/shorter", "train/truncated", "train/empty"):
        assert name in shown
    assert "──▶" in shown
    assert chart_of("val/rewards/chosen") == "rewards/chosen"


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_resumed_run_writes_no_table_of_other_samples_under_a_step_before(tmp_path: Path) -> None:
    """In the accumulation of the next step, the step's number is still that of the checkpoint."""
    options: dict[str, Any] = {"default_root_dir": tmp_path, "accumulate_grad_batches": 2}
    run = trainer(max_steps=1, callbacks=[SampleTable(1)], **options)
    run.fit(_task(), _loader(batch_size=1))
    run.save_checkpoint(tmp_path / "middle.ckpt")
    (table,) = tmp_path.glob("samples/*")
    table.rename(tmp_path / "kept")
    run = trainer(max_steps=2, callbacks=[SampleTable(1)], **options)
    run.fit(_task(), _loader(batch_size=1), ckpt_path=tmp_path / "middle.ckpt")
    assert [path.name for path in tmp_path.glob("samples/*")] == ["rewards_step_0000002.txt"]


def test_a_conversation_is_shown_as_a_whole(tmp_path: Path) -> None:
    task = _conversing(Echo())
    rows = [{"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat"}]}] * 4
    run = trainer(default_root_dir=tmp_path, max_steps=1, callbacks=[SampleTable(1)])
    run.fit(task, _loader(rows))
    turns = [row["completion"].count("assistant: ") for row in task.sample_table]
    assert max(turns) == 3
    for row, count in zip(task.sample_table, turns):
        assert row["prompt"] == "system: Be brief.\nuser: the cat"
        assert row["completion"].count("\nuser: ") == count - 1
    assert transcript(
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "ü"}}}]}]
    ) == 'assistant: {"name": "f", "arguments": {"a": "ü"}}'  # fmt: skip


@pytest.mark.filterwarnings("ignore:PolicyOptimization. a prompt of")
def test_long_texts_are_cut_and_other_modules_are_refused(tmp_path: Path) -> None:
    table = SampleTable(1, samples=2)
    task = _task()
    run = trainer(default_root_dir=tmp_path, max_steps=1, callbacks=[table])
    run.fit(task, _loader([{"prompt": "the cat " * 1000}] * len(ROWS)))
    text = next(tmp_path.glob("samples/*")).read_text()
    assert text.count("... (4,000 characters are left out) ...") == 2
    assert len(text) < 10_000
    with pytest.raises(ConfigurationError, match="SampleTable: LanguageModeling has no sample_table"):
        trainer(default_root_dir=tmp_path, max_steps=1, callbacks=[table]).fit(LanguageModeling(), _loader())
    for options in ({"every_n_steps": 0}, {"samples": 0}):
        with pytest.raises(ConfigurationError, match=f"SampleTable: {next(iter(options))} must be a whole number"):
            SampleTable(**options)
