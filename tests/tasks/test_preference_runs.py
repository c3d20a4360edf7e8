"""Whole runs on the library's own pairs: a language model, then what it prefers, each from the one before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_efficient import (
    ConfigurationError,
    GPTConfig,
    LanguageChat,
    LanguageData,
    LanguageModeling,
    LoRA,
    Preference,
    PreferenceChat,
    PreferenceData,
    TokenWeightedAccumulation,
)
from lit_efficient.data.text.chat_tokenizer import load_chat_tokenizer
from lit_efficient.tasks.loading import load_language_model
from tests.tasks.preference_kit import loader, trainer

SHAPE = GPTConfig(dim=32, depth=1, num_heads=2, max_length=128)


def _rows(folder: Path) -> dict[str, str]:
    questions = [f"What is {i} and {i}?" for i in range(24)]
    rows = {
        "sft": [{"instruction": ask, "output": f"It is {2 * i}."} for i, ask in enumerate(questions)],
        "pairs": [
            {"prompt": [{"role": "user", "content": ask}], "chosen": f"It is {2 * i}.", "rejected": "No."}
            for i, ask in enumerate(questions)
        ],
    }
    for name, listed in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    return {name: str(folder / f"{name}.jsonl") for name in rows}


def test_a_language_models_checkpoint_gives_weights_and_tokenizer_to_what_follows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    files, cache = _rows(tmp_path), str(tmp_path / "cache")
    texts = LanguageData(
        train=files["sft"], chat=LanguageChat(vocab_size=280), max_length=64, batch_size=2, cache_dir=cache
    )
    sft = LanguageModeling(SHAPE, warmup_steps=0)
    runner = trainer(default_root_dir=tmp_path, max_steps=2, limit_val_batches=1)
    runner.fit(sft, datamodule=texts)
    path = str(tmp_path / "sft.ckpt")
    runner.save_checkpoint(path)
    options: dict[str, Any] = {"train": files["pairs"], "max_length": 64, "batch_size": 2, "cache_dir": cache}
    task = Preference(SHAPE, start_from=path, learning_rate=1e-3, warmup_steps=0)
    runner = trainer(
        default_root_dir=tmp_path, max_steps=2, limit_val_batches=1, callbacks=[LoRA(rank=2)], accumulate_grad_batches=2
    )
    runner.fit(task, datamodule=PreferenceData(tokenizer=path, **options))
    assert not any(isinstance(callback, TokenWeightedAccumulation) for callback in runner.callbacks)
    assert task.tokenizer_state == sft.tokenizer_state
    runner.save_checkpoint(tmp_path / "dpo.ckpt")
    loaded, _ = load_language_model(str(tmp_path / "dpo.ckpt"))  # base from the start, adapters from the checkpoint
    expected = task.generate_text("What", max_new_tokens=5)
    assert loaded.generate_text("What", max_new_tokens=5) == expected
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded(ids), task.eval()(ids))
    with pytest.raises(ConfigurationError, match="the tokenizer of start_from"):
        trainer(default_root_dir=tmp_path).fit(
            Preference(SHAPE, start_from=path),
            datamodule=PreferenceData(chat=PreferenceChat(vocab_size=290), **options),
        )


def test_what_is_no_language_models_checkpoint_has_no_tokenizer(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ConfigurationError, match="no checkpoint of LanguageModeling, or has no tokenizer"):
        load_chat_tokenizer(str(tmp_path / "other.ckpt"))


def test_windows_of_unequal_batches_weigh_every_pair_the_same_on_request(tmp_path: Path) -> None:
    """Batches of 4 and 2 pairs in one window: the gradient is that of the six together."""
    gradients = []
    for batch_size, callbacks in ((4, [TokenWeightedAccumulation()]), (6, [])):
        torch.manual_seed(0)
        task = Preference(GPTConfig(97, dim=32, depth=1, num_heads=2, max_length=16), warmup_steps=0)
        task.configure_optimizers = lambda task=task: torch.optim.SGD(task.parameters(), 1.0)  # type: ignore[method-assign]
        task.configure_model()
        start = [p.detach().clone() for p in task.parameters()]
        windows = {"accumulate_grad_batches": 2 if callbacks else 1}
        trainer(default_root_dir=tmp_path, max_steps=1, callbacks=callbacks, **windows).fit(
            task, loader(6, batch_size), loader()
        )
        gradients.append([a - b for a, b in zip(start, task.parameters())])
    for ours, whole in zip(*gradients):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-7)
    assert any(step.abs().max() > 1e-4 for step in gradients[0])
