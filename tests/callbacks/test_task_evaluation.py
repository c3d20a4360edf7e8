"""Tasks of lm-eval during training and on checkpoints: the figures of lm-eval's own run on the export."""

from __future__ import annotations

import importlib.util
import json
import os
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lit_efficient import CausalLMConfig, GPTConfig, LanguageModeling, LoRA, RewardModeling, TaskEvaluation
from lit_efficient.__main__ import main
from lit_efficient.data.text.chat_tokenizer import of_transformers, pack_tokenizer
from lit_efficient.data.text.token_cache import train_tokenizer
from lit_efficient.errors import ConfigurationError
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.models.libraries.lm_eval_tasks import Harness
from tests.data.text.model_tokenizers import make
from tests.models.networks.test_gpt import as_llama, build
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
ROLLING = """
task: texts
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}} {{{{question}}}}"
metric_list:
  - {{metric: word_perplexity}}
"""
WRITING = """
task: written
dataset_path: json
dataset_kwargs:
  data_files: {{test: {rows}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{question}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 12}}
metric_list:
  - {{metric: bleu}}
  - {{metric: chrf}}
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
    for name, text in (("sums", TASK), ("texts", ROLLING), ("written", WRITING)):
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text.format(rows=tmp_path / "tasks" / "rows.jsonl"))
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
    arguments = ["--tasks", "sums", "written", "--include_path", str(task.parent), "--limit", "10", "--device", "cpu"]
    arguments += ["--output", str(written)]
    assert main(["evaluate", "--ckpt", str(tmp_path / "run.ckpt"), *arguments]) == 0
    assert "|sums   |" in capsys.readouterr().out
    ours = json.loads(written.read_text())
    assert ours["weights"] == "raw"
    assert ours["metrics"].keys() == {"sums/acc", "sums/acc_norm", "written/bleu", "written/chrf"}
    # The last step's weights are those of the checkpoint.
    last = logged(tmp_path)[-1]
    for name in ("sums/acc", "sums/acc_norm"):
        assert float(last[f"eval/{name}"]) == pytest.approx(ours["metrics"][name])
    export_checkpoint(tmp_path / "run.ckpt", tmp_path / "merged", "merged", check=False)
    theirs = simple_evaluate(
        "hf",
        {"pretrained": str(tmp_path / "merged"), "dtype": "float32", "device": "cpu"},
        tasks=["sums", "written"],
        limit=10,
        task_manager=TaskManager(include_path=str(task.parent)),
    )["results"]
    for name, value in ours["metrics"].items():
        of, _, metric = name.partition("/")
        assert value == theirs[of][f"{metric},none"], name
    assert main(["evaluate", "--model", str(tmp_path / "merged"), *arguments]) == 0
    assert json.loads(written.read_text())["metrics"] == ours["metrics"]


@pytest.mark.filterwarnings("ignore")
def test_our_gpt_has_the_figures_of_a_llama_with_its_weights(task: Path, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokenizer = train_tokenizer([path.read_text() for path in task.parent.iterdir()], 300)
    config = GPTConfig(tokenizer.get_vocab_size(), dim=32, depth=2, num_heads=4, num_kv_heads=2, max_length=48)
    own = LanguageModeling(config)
    own.configure_model()
    own.tokenizer_state = pack_tokenizer(tokenizer)
    own.network.load_state_dict(build(config, scale=8.0).state_dict())
    trainer = L.Trainer(**QUIET)
    trainer.strategy.connect(own)
    trainer.save_checkpoint(tmp_path / "gpt.ckpt")
    names = ["sums", "texts", "written"]
    arguments = ["--tasks", *names, "--include_path", str(task.parent), "--limit", "9", "--batch_size", "4"]
    written = tmp_path / "found.json"
    arguments += ["--device", "cpu", "--output", str(written), "--ckpt", str(tmp_path / "gpt.ckpt")]
    assert main(["evaluate", *arguments]) == 0
    ours = json.loads(written.read_text())["results"]
    llama = as_llama(own.network).eval()
    model = HFLM(llama, tokenizer=of_transformers(tokenizer), batch_size=1)
    theirs = simple_evaluate(
        model, tasks=names, limit=9, task_manager=TaskManager(include_path=str(task.parent)), log_samples=True
    )
    answers = {sample["filtered_resps"][0] for sample in theirs["samples"]["written"]}
    assert len(answers) > 3
    for name in names:
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float) and "stderr" not in metric:
                assert ours[name][metric] == pytest.approx(value, rel=1e-4), (name, metric)


@pytest.mark.filterwarnings("ignore")
def test_texts_end_at_the_stop_tokens_of_a_checkpoint(task: Path) -> None:
    made = module()
    made.configure_model()
    calls: list[int] = []
    made.network.register_forward_hook(lambda *_: calls.append(1))
    for stop, expected in (((), 12), (range(made.network.config.vocab_size), 1)):
        settings = made.network.generation_config
        calls.clear()
        Harness([str(task.with_name("written.yaml"))], limit=8).run("evaluate", made.network, made.tokenizer, stop)
        assert len(calls) == expected
        assert made.network.generation_config is settings


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
def test_without_steps_each_validation_evaluates(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each process: lm-eval returns results in the first one only."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    run = fitted(tmp_path, TaskEvaluation([str(task)], limit=4))
    assert len(logged(tmp_path)) == 2
    assert "eval/sums/acc" in run.callback_metrics
    assert os.environ["LOCAL_RANK"] == "1"


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
    fields: Any = {"model_type": "llama", "vocab_size": 32, **SIZES}
    reward = RewardModeling(CausalLMConfig(config_fields=fields))
    reward.configure_model()
    with pytest.raises(ConfigurationError, match="and our GPT, and this is a LlamaForSequenceClassification"):
        Harness([str(task)]).prepared("TaskEvaluation", reward.network)
    reward = RewardModeling(GPTConfig(32, dim=16, depth=1, num_heads=2, max_length=16))
    reward.configure_model()
    with pytest.raises(ConfigurationError, match="and this is a GPT without a head for tokens"):
        Harness([str(task)]).prepared("TaskEvaluation", reward.network)
    with pytest.raises(ConfigurationError, match="LightningModule has no network"):
        callback.refuse(None, L.LightningModule())  # type: ignore[arg-type]
