"""Judged answers in a file, and a small model with its tokenizer for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from lit_efficient import UnpairedPreferenceData
from tests.data.text.chat_kit import tokenizer

ROWS = [
    {"prompt": f"What is {i} plus two?", "completion": " Four, of course." if i % 3 else " Two", "label": bool(i % 3)}
    for i in range(12)
]


def base(folder: Path) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / "base"
    if not path.exists():
        read = tokenizer()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        state = torch.get_rng_state()
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", vocab_size=len(read), max_position_embeddings=128, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        torch.set_rng_state(state)
        read.save_pretrained(path)
    return str(path)


def data(folder: Path, rows: list[dict[str, Any]] = ROWS, **options: Any) -> UnpairedPreferenceData:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = str(folder / "rows.jsonl")
    options = {"val": source, "batch_size": 4, "max_length": 100, "cache_dir": str(folder / "cache"), **options}
    return UnpairedPreferenceData(train=source, tokenizer=base(folder), **options)
