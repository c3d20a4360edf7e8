"""Classifiers, taggers and regressions leave as what transformers and peft load, with equal outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lit_efficient import CausalLMConfig, LabelledTextData, LoRA, QuantizeBase, TextLabelling
from tests.support import QUIET
from tests.support_cli import export
from tests.tasks.text_kit import FAMILIES, labelled, saved, sentence, written

HEADS = {"bert": "classifier", "roberta": "classifier", "electra": "classifier", "deberta-v2": "classifier"}


def _heads(family: str, labels: str) -> list[str]:
    if family == "distilbert":
        return ["classifier"] if labels == "tags" else ["pre_classifier", "classifier"]
    if family == "modernbert":
        return ["head", "classifier"]
    if family == "deberta-v2" and labels != "tags":
        return ["pooler", "classifier"]
    if family == "gpt2" and labels == "tags":
        return ["classifier"]
    return [HEADS.get(family, "score")]


@pytest.mark.turns(16, always=("bert-class-True",))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("labels", ["class", "classes", "number", "tags"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_transformers_on_texts(
    family: str, labels: Any, adapters: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft
    import transformers

    torch.manual_seed(0)
    source = written(tmp_path / "rows.jsonl", labelled(labels))
    base = saved(tmp_path, family)
    data = LabelledTextData(
        train=source, val=source, tokenizer=base, labels=labels, batch_size=6, max_length=32, cache_dir=str(tmp_path)
    )
    # With a higher rate the rectifier of DistilBERT's head is 0 for every text.
    task = TextLabelling(CausalLMConfig(base), labels, learning_rate=1e-3, warmup_steps=0)
    callbacks: Any = [LoRA(rank=2, modules_to_save=_heads(family, labels))] if adapters else []
    run = Trainer(callbacks=callbacks, **{**QUIET, "max_steps": 6, "max_epochs": -1})
    run.fit(task, datamodule=data)
    run.save_checkpoint(tmp_path / "run.ckpt")
    for format in ["merged", *["peft"] * adapters]:
        assert export([str(tmp_path / "run.ckpt"), "--format", format, "--output", str(tmp_path / format)]) == 0
        assert "not checked" not in capsys.readouterr().err
    name = "TokenClassification" if labels == "tags" else "SequenceClassification"
    models = [getattr(transformers, f"AutoModelFor{name}").from_pretrained(tmp_path / "merged")]
    if adapters:
        count = 1 if labels == "number" else 3
        models.append(getattr(peft, f"AutoPeftModelFor{name}").from_pretrained(tmp_path / "peft", num_labels=count))
        models[1].config.pad_token_id = models[0].config.pad_token_id
    else:
        assert models[0].config.id2label == dict(enumerate(task.names or ["LABEL_0"]))
    if labels == "classes":
        assert models[0].config.problem_type == "multi_label_classification"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    batch = tokenizer([sentence(i) for i in range(5)], padding=True, return_tensors="pt")
    with torch.no_grad():
        ours = task.eval()(**batch)
        for model in models:
            theirs = model.eval()(**batch).logits
            kept = batch.attention_mask == 1
            if labels == "tags":
                theirs, mine = theirs[kept], ours[kept]
            else:
                mine = ours[:, None] if labels == "number" else ours
            torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)
            assert theirs.std() > 1e-6


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_a_quantised_base_keeps_its_head_and_leaves_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setitem(FAMILIES, "llama", {**FAMILIES["llama"], "hidden_size": 64, "intermediate_size": 128})
    torch.manual_seed(0)
    source = written(tmp_path / "rows.jsonl", labelled("class"))
    base = saved(tmp_path, "llama")
    data = LabelledTextData(
        train=source, val=source, tokenizer=base, batch_size=6, max_length=32, cache_dir=str(tmp_path)
    )
    task = TextLabelling(CausalLMConfig(base), learning_rate=1e-2, warmup_steps=0)
    callbacks: Any = [QuantizeBase("nf4", skip=("score",)), LoRA(rank=2, modules_to_save=["score"])]
    run = Trainer(callbacks=callbacks, **{**QUIET, "max_steps": 6, "max_epochs": -1})
    run.fit(task, datamodule=data)
    run.save_checkpoint(tmp_path / "run.ckpt")
    assert export([str(tmp_path / "run.ckpt"), "--format", "merged", "--output", str(tmp_path / "merged")]) == 0
    head: Any = task.network.get_submodule("score")  # type: ignore[union-attr]
    assert head.weight.dtype == torch.float32
    assert head.weight.requires_grad
