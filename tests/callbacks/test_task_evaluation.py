"""Tasks of lm-eval during training and on checkpoints: the figures of lm-eval's own run on the export."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lit_efficient import CausalLMConfig, GPTConfig, LanguageModeling, LoRA, TaskEvaluation
from lit_efficient.__main__ import main
from lit_efficient.data.text.chat_tokenizer import pack_tokenizer
from lit_efficient.errors import ConfigurationError
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.models.libraries.lm_eval_tasks import Harness
from tests.data.text.model_tokenizers import make
from tests.support import QUIET, assert_equal

TASK = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a task of one's own."""
    pytest.importorskip("lm_eval")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = []
    for i in range(24):
        choices = [f" {i + 1} of course", f" {i + 2}", f" {i * i}"]
        rows.append({"question": f"What is {i} plus one?", "choices": choices, "answer": i % 3})
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks" / "sums.yaml").write_text(TASK.format(rows=tmp_path / "tasks" / "rows.jsonl"))
    return tmp_path / "tasks" / "sums.yaml"


def module() -> Any:
    torch.manual_seed(0)
    tokenizer = make("smollm2")
    fields: Any = {"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 64, **SIZES}
    made = LanguageModeling(CausalLMConfig(config_fields=fields), learning_rate=0.5, warmup_steps=1)
    made.tokenizer_state = pack_tokenizer(tokenizer)
    return made


def rows() -> Any:
    ids = torch.randint(3, 250, (8, 12), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ids], 2)


def fitted(tmp_path: Path, *callbacks: Any, steps: int = 4) -> Any:
    torch.manual_seed(0)
    run = L.Trainer(
        **{**QUIET, "max_steps": steps, "logger": CSVLogger(tmp_path / "logs", flush_logs_every_n_steps=1)},
        callbacks=list(callbacks),
        log_every_n_steps=1,
        val_check_interval=2,
    )
    run.fit(module(), rows(), rows())
    return run


def logged(tmp_path: Path) -> list[dict[str, str]]:
    import csv

    with next((tmp_path / "logs").rglob("metrics.csv")).open() as file:
        return [row for row in csv.DictReader(file) if row.get("eval/sums/acc")]


@pytest.mark.filterwarnings("ignore")  # of lm-eval and what it imports
def test_the_figures_are_those_of_lm_eval_on_the_export(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    run = fitted(tmp_path, LoRA(rank=2, save_base=True), TaskEvaluation([str(task)], every_n_steps=2, limit=10))
    assert [int(row["step"]) for row in logged(tmp_path)] == [2, 4]
    run.save_checkpoint(tmp_path / "run.ckpt")
    written = tmp_path / "found.json"
    arguments = ["--tasks", "sums", "--include_path", str(task.parent), "--limit", "10", "--device", "cpu"]
    assert main(["evaluate", "--ckpt", str(tmp_path / "run.ckpt"), *arguments, "--output", str(written)]) == 0
    assert "|sums |" in capsys.readouterr().out
    ours = json.loads(written.read_text())
    assert ours["weights"] == "raw"
    assert ours["metrics"].keys() == {"sums/acc", "sums/acc_norm"}
    # The last step's weights are those of the checkpoint.
    assert {name: float(logged(tmp_path)[-1][f"eval/{name}"]) for name in ours["metrics"]} == pytest.approx(
        ours["metrics"]
    )
    export_checkpoint(tmp_path / "run.ckpt", tmp_path / "merged", "merged", check=False)
    theirs = simple_evaluate(
        "hf",
        {"pretrained": str(tmp_path / "merged"), "dtype": "float32", "device": "cpu"},
        tasks=["sums"],
        limit=10,
        task_manager=TaskManager(include_path=str(task.parent)),
    )["results"]["sums"]
    assert ours["metrics"] == {"sums/acc": theirs["acc,none"], "sums/acc_norm": theirs["acc_norm,none"]}
    assert main(["evaluate", "--model", str(tmp_path / "merged"), *arguments, "--output", str(written)]) == 0
    assert json.loads(written.read_text())["metrics"] == ours["metrics"]


@pytest.mark.filterwarnings("ignore")
def test_training_and_random_states_do_not_change(task: Path, tmp_path: Path) -> None:
    with_tasks = fitted(tmp_path / "a", TaskEvaluation([str(task)], every_n_steps=1, limit=4))
    after = (random.random(), np.random.rand(), torch.rand(()).item())
    random.seed(5)
    np.random.seed(5)
    plain = fitted(tmp_path / "b")
    assert_equal(with_tasks.lightning_module.state_dict(), plain.lightning_module.state_dict())
    assert torch.rand(()).item() == after[2]
    assert all(part.training for part in with_tasks.lightning_module.network.modules())


@pytest.mark.filterwarnings("ignore")
def test_without_steps_each_validation_evaluates(task: Path, tmp_path: Path) -> None:
    run = fitted(tmp_path, TaskEvaluation([str(task)], limit=4))
    assert len(logged(tmp_path)) == 2
    assert "eval/sums/acc" in run.callback_metrics


def test_wrong_arguments_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in [
        ({"tasks": []}, "tasks must be a list of at least one task"),
        ({"tasks": ["a"], "every_n_steps": 0}, "every_n_steps must be"),
        ({"tasks": ["a"], "limit": 0}, "limit must be"),
        ({"tasks": ["a"], "include_path": "nowhere"}, "include_path: there is no folder nowhere"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            TaskEvaluation(**arguments)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "lm_eval" else found(name))
    callback = TaskEvaluation(["arc_easy"])
    with pytest.raises(ConfigurationError, match="TaskEvaluation needs lm_eval: pip install"):
        callback.refuse(None, module())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_an_unknown_task_and_another_network_are_named(task: Path, tmp_path: Path) -> None:
    callback = TaskEvaluation(
        ["sum"], include_path=str(task.parent), every_n_steps=100
    )  # checked before the first step
    with pytest.raises(ConfigurationError, match=r"lm-eval has no task 'sum'; similar: "):
        fitted(tmp_path, callback)
    with pytest.raises(ConfigurationError, match=r"there is no file .*nowhere.yaml"):
        fitted(tmp_path, TaskEvaluation([str(task.with_name("nowhere.yaml"))], every_n_steps=1))
    callback = TaskEvaluation([str(task)])
    own = LanguageModeling(GPTConfig(32, dim=16, depth=1, num_heads=2, max_length=16))
    own.configure_model()
    with pytest.raises(ConfigurationError, match="lm-eval runs causal models of transformers, and this is a GPT"):
        Harness([str(task)]).prepared("TaskEvaluation", own.network)
    with pytest.raises(ConfigurationError, match="LightningModule has no network"):
        callback.refuse(None, L.LightningModule())  # type: ignore[arg-type]
