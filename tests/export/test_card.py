"""The card of an export names base, licence, data, techniques and metrics; merged models come in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_efficient.errors import ConfigurationError
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.export.card import licence_of, model_card
from lit_efficient.files.sums import check_sums
from tests.export.test_fields import base_of, trained
from tests.support_cli import export

CHECKPOINT: dict[str, Any] = {
    "global_step": 4,
    "epoch": 0,
    "language_modeling": {},
    "lit_efficient": {"transforms": [{"name": "LoRA", "arguments": {"rank": 2, "targets": None, "text": "a|b"}}]},
}


def front(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return fields


def test_a_card_names_what_a_run_did(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine" / "2026"
    run.mkdir(parents=True)
    train = [{"path": "chats.jsonl", "weight": 2}, "code.jsonl"]
    (run / "config.yaml").write_text(yaml.safe_dump({"data": {"class_path": "A", "init_args": {"train": train}}}))
    events = [
        {"step": 1, "kind": "metrics", "values": {"val/loss": 2.5, "train/loss": 2.4}},
        {"step": 4, "kind": "metrics", "values": {"val/loss": 1.23456789, "eval/sums/acc": 0.25, "val/none": None}},
        {"step": 5, "kind": "metrics", "values": {"val/loss": 9.0}},
        {"step": 1, "kind": "warning", "text": "a"},
        {"step": 1, "kind": "metrics", "values": 3},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"step"')
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\ntags: [a]\n---\n# Base\n")
    text = model_card(CHECKPOINT, run / "best.ckpt", "merged", str(base), "Said.")
    fields = front(text)
    assert fields == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["lit_efficient", "LoRA"],
    }
    for line in (
        "# mine",
        "Said.",
        f"| Base | {base} |",
        "| Licence of the base | apache-2.0 |",
        "| Data | chats.jsonl |",
        "| Data | code.jsonl |",
        "| Technique | LoRA(rank=2, text='a\\|b') |",
        "| Steps | 4, epoch 0 |",
        "| `eval/sums/acc` | 0.25 |",
        "| `val/loss` | 1.2346 |",  # the value at step 5 is that of a later checkpoint
    ):
        assert line in text.splitlines(), line
    assert "train/loss" not in text


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    text = model_card(CHECKPOINT, tmp_path / "a.ckpt", "gguf", "owner/name", "Said.")
    assert front(text)["base_model"] == "owner/name"
    assert "license" not in front(text)
    assert "| Data |" not in text
    (tmp_path / "README.md").write_text("---\n{broken: [\n---\n")
    assert licence_of(str(tmp_path)) is None
    (tmp_path / "README.md").write_bytes(b"\xff")
    assert licence_of(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("task", "arguments", "expected"),
    [
        ("Preference", {}, "text-generation"),
        ("RewardModeling", {}, "text-classification"),
        ("TextEmbedding", {}, "sentence-similarity"),
        ("TextLabelling", {"labels": "class"}, "text-classification"),
        ("TextLabelling", {"labels": "tags"}, "token-classification"),
        ("LanguageModeling", {"processor": {}}, "image-text-to-text"),
    ],
)
def test_the_hub_is_told_what_a_model_does(task: str, arguments: dict[str, Any], expected: str, tmp_path: Path) -> None:
    about = {"task": task, "tokenizer": arguments}
    checkpoint = {**CHECKPOINT, "language_modeling": about, "hyper_parameters": arguments}
    assert front(model_card(checkpoint, tmp_path / "a.ckpt", "merged", None, "Said."))["pipeline_tag"] == expected


def test_a_merged_model_in_shards_is_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    base_of("llama-3.1", tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
    checkpoint = trained(tmp_path, "llama-3.1", [])
    arguments = [str(checkpoint), "--format", "merged", "--output", str(tmp_path / "out"), "--max-shard-size", "10KB"]
    assert export(arguments) == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(path.stat().st_size for path in files)[-3] < 12_000  # embeddings and head are larger
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    check_sums(tmp_path / "out")
    export_checkpoint(checkpoint, tmp_path / "whole", "merged", check=False)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict().items():
        assert torch.equal(tensor, whole[name]), name
    card = (tmp_path / "out" / "README.md").read_text()
    assert front(card)["license"] == "mit"
    assert "outputs of transformers differ by" in card
    with pytest.raises(ConfigurationError, match="max_shard_size must be a number above 0 with KB, MB, GB or TB"):
        export_checkpoint(checkpoint, tmp_path / "a", "merged", max_shard_size="5 apples")
    arguments = [str(checkpoint), "--format", "gguf", "--output", str(tmp_path / "b"), "--max-shard-size", "10KB"]
    assert export(arguments) == 2
    assert "--max_shard_size does not belong to --format gguf" in capsys.readouterr().err
