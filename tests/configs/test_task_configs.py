"""The configs of tasks on texts lead from a user's file of rows to what other programs load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.configs.following import fit_and_follow, small
from tests.export.test_fields import base_of
from tests.support_cli import export

FOLDER = Path(__file__).parents[2] / "configs" / "llm"
WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog"]
ROWS: dict[str, list[dict[str, Any]]] = {
    "classification": [{"text": f"{w} {i}", "label": w[0]} for i, w in enumerate(WORDS * 10)],
    "embedding": [{"anchor": f"{w} {i}", "positive": f"the {w} number {i}"} for i, w in enumerate(WORDS * 10)],
    "kto": [
        {"prompt": f"What is {i}?", "completion": f"{i}!" if i % 3 else "No", "label": bool(i % 3)} for i in range(80)
    ],
}
TEXTS = ["red 3", "the cat number 12", "What is 3?"]


@pytest.mark.turns(3, family="shipped configs")
@pytest.mark.parametrize("name", ROWS)
def test_rows_become_what_the_other_program_loads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    monkeypatch.chdir(tmp_path)
    base_of("qwen2.5", tmp_path / "BASE")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    model: dict[str, Any] = {"model": {"name_or_path": "BASE"}, "warmup_steps": 0}
    if name == "kto":
        model["start_from"] = None
    if name == "embedding":
        model["sizes"] = [8, 16]
    data = {"train": "rows.jsonl", "tokenizer": "BASE", "max_length": 64, "num_workers": 0, "val_fraction": 0.2}
    commands = fit_and_follow(capsys, small(FOLDER / f"{name}.yaml", model=model, data=data))
    assert "export" in commands
    checkpoint = f"runs/llm/{name}/latest/last.ckpt"
    assert export([checkpoint, "--format", "merged", "--output", "merged"]) == 0
    kinds = {"classification": "AutoModelForSequenceClassification", "embedding": "AutoModel"}
    load = getattr(transformers, kinds.get(name, "AutoModelForCausalLM")).from_pretrained
    merged = load("merged", dtype=torch.float32).eval()
    base = transformers.AutoModelForCausalLM.from_pretrained("BASE", dtype=torch.float32)
    before = {key.removeprefix("model."): value for key, value in base.state_dict().items()}
    after = {key.removeprefix("model."): value for key, value in merged.state_dict().items()}
    moved = [key for key, value in before.items() if key in after and not torch.equal(value, after[key])]
    assert len(moved) >= 7 * base.config.num_hidden_layers
    if name == "classification":
        assert list(merged.config.id2label.values()) == sorted({row["label"] for row in ROWS[name]})
    tokenizer = transformers.AutoTokenizer.from_pretrained("merged")
    if name == "embedding":
        library = pytest.importorskip("sentence_transformers")
        theirs = torch.tensor(library.SentenceTransformer("merged", device="cpu").encode(TEXTS))
        batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
        with torch.no_grad():
            states = merged(**batch).last_hidden_state
        last = states[torch.arange(len(TEXTS)), batch.attention_mask.sum(1) - 1]
        torch.testing.assert_close(theirs, torch.nn.functional.normalize(last), rtol=1e-4, atol=1e-5)
