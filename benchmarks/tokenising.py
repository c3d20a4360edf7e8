"""Compare the tokenising of `LanguageData` with ``datasets.map``: CPU time of conversations and of texts.

    python -m benchmarks.tokenising [--rows 600] [--rounds 3] [--tokenizer FOLDER] [--out rows.json]

Both sides read the same JSON lines, write tokens to a disk, and use one process and one thread of the tokenizer. They
alternate in this process, so that other load slows both alike. `LanguageData` also finds which tokens contribute to the
loss, checks that the template writes every message, splits rows for validation and counts bytes. ``datasets.map`` calls
``apply_chat_template`` for conversations, with the mask of the assistant's tokens if the template marks them, and the
tokenizer for batches of texts. Without ``--tokenizer``, one is trained on the rows.

The target is a ratio of at least 1: `LanguageData` takes no more time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_efficient.data.text import in_processes
from lit_efficient.data.text.python_instructions import instructions


def write_rows(folder: Path, count: int) -> dict[str, Path]:
    """Write conversations about Python's standard library, and the texts of their answers."""
    chats = [row for row in instructions() if "messages" in row][:count]
    texts = [{"text": "\n\n".join(turn["content"] for turn in row["messages"])} for row in chats]
    paths = {}
    for name, rows in (("conversations", chats), ("texts", texts)):
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return paths


def our_side(path: Path, tokenizer: str | None, cache: Path) -> None:
    from lit_efficient import LanguageData

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        LanguageData(train=str(path), tokenizer=tokenizer, cache_dir=str(cache)).prepare_data()


def their_side(path: Path, tokenizer: str | None, cache: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoTokenizer

    read: Any = AutoTokenizer.from_pretrained(tokenizer)
    rows: Any = load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
    marked = "generation" in read.chat_template

    def chat(row: dict[str, Any]) -> dict[str, Any]:
        found = read.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=marked)
        return dict(found)

    if "messages" in rows.column_names:
        rows.map(chat, remove_columns=rows.column_names)
    else:
        rows.map(lambda batch: read(batch["text"]), batched=True, remove_columns=rows.column_names)


def seconds(side: Callable[[Path, str | None, Path], None], path: Path, tokenizer: str | None) -> float:
    with tempfile.TemporaryDirectory() as cache:
        begin = time.process_time()
        side(path, tokenizer, Path(cache))
        return time.process_time() - begin


def trained_tokenizer(path: Path, cache: Path) -> str:
    """Return the folder of a tokenizer that `LanguageData` has trained on the rows."""
    our_side(path, None, cache)
    (found,) = cache.rglob("tokenizer")
    return str(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", help="folder of a tokenizer with a chat template")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    in_processes.usable_processors = lambda: 1
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = write_rows(Path(folder), options.rows)
        tokenizer = options.tokenizer or trained_tokenizer(paths["conversations"], Path(folder) / "cache")
        for name, path in paths.items():
            for side in (our_side, their_side):  # imports and compiled templates
                seconds(side, path, tokenizer)
            ratios = []
            for _ in range(options.rounds):
                ours = seconds(our_side, path, tokenizer)
                theirs = seconds(their_side, path, tokenizer)
                ratios.append(theirs / ours)
                print(f"{name}: {ours:.2f} s, datasets.map {theirs:.2f} s, ratio {ratios[-1]:.2f}", flush=True)
            figures[name] = sorted(ratios)
    for name, ratios in figures.items():
        print(
            f"{name}: median {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); target: at least 1"
        )
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return int(any(statistics.median(ratios) < 1 for ratios in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
