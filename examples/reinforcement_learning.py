"""Reinforcement learning with a reward of your own: a small GPT learns to add by GRPO.

    python examples/reinforcement_learning.py

The GPT is first fine-tuned on some sums, until a third of its answers is right. Then it answers other sums eight
times each, and learns from rewards that the functions below compute. Sums of a third set measure the share of exact
answers, drawn at temperature 1. The same from YAML, for pretrained models: configs/llm/grpo.yaml.
"""

import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from lit_efficient import (
    ExactResume,
    GPTConfig,
    LanguageChat,
    LanguageData,
    LanguageModeling,
    PolicyOptimization,
    PromptData,
    Reward,
    Rollout,
)

END = "<|endoftext|>"
# The text of a turn, without anything around it.
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
MODEL = GPTConfig(dim=64, depth=2, num_heads=4, max_length=32)
HELD_OUT = 500


def exact(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return 1 for the right answer, else 0."""
    return float(completion == row["completion"])


def digits(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return the share of digits that are right, which tells more about wrong answers than 0."""
    answer = row["completion"]
    if len(completion) != len(answer):
        return 0.0
    return sum(digit == right for digit, right in zip(completion, answer)) / len(answer)


def sums(seed: int) -> list[dict[str, str]]:
    """Return all sums of two numbers below 100, in an order that the seed decides."""
    rows = [{"prompt": f"{a:02}+{b:02}=", "completion": f"{a + b:03}"} for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(rows)
    return rows


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_tokenizer(path: Path) -> str:
    """Write a tokenizer whose tokens are single characters."""
    ids = {token: i for i, token in enumerate([END, *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(path))
    return str(path)


def trainer_for(folder: Path, max_steps: int, *callbacks: L.Callback) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        gradient_clip_val=1.0,
        callbacks=[ExactResume(), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        default_root_dir=folder,
    )


def measure(task: LanguageModeling, rows: list[dict[str, str]], temperature: float = 1.0) -> dict[str, float]:
    """Return the mean rewards of one answer to each prompt."""
    prompts = [row["prompt"] for row in rows]
    how: dict[str, Any] = {"temperature": temperature, "top_p": 1.0, "chat": True, "batch_size": len(prompts)}
    texts = task.generate_text(prompts, max_new_tokens=5, **how)
    answers = [text.removeprefix(prompt) for prompt, text in zip(prompts, texts)]
    triples = list(zip(prompts, answers, rows))
    return {reward.__name__: sum(reward(*triple) for triple in triples) / len(rows) for reward in (exact, digits)}


class StopWhenRight(L.Callback):
    """Ends the fine-tuning as soon as a third of the answers to some sums is right."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.rows = rows

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step % 25 == 0 and measure(pl_module, self.rows)["exact"] > 1 / 3:
            trainer.should_stop = True


def main(
    folder: str, seed: int = 0, sft_steps: int = 1000, max_steps: int = 2500, batch_size: int = 64
) -> dict[str, Any]:
    """Fine-tune, train on rewards, and return the mean rewards of answers to held-out sums."""
    L.seed_everything(seed, verbose=False)
    place = Path(folder)
    rows = sums(seed)
    held_out = rows[:HELD_OUT]
    train = write_rows(place / "sums.jsonl", rows[HELD_OUT:])

    start = LanguageModeling(MODEL, learning_rate=3e-3, warmup_steps=20)
    trainer = trainer_for(place, sft_steps, StopWhenRight(rows[HELD_OUT : 2 * HELD_OUT]))
    data = LanguageData(
        train=train,
        tokenizer=write_tokenizer(place / "tokenizer.json"),
        max_length=16,
        pack=False,
        batch_size=128,
        val_fraction=0,
        cache_dir=folder,
        chat=LanguageChat(template=TEMPLATE),
    )
    trainer.fit(start, data)
    checkpoint = str(place / "start.ckpt")
    trainer.save_checkpoint(checkpoint)
    before = measure(start, held_out)

    task = PolicyOptimization(
        [Reward(exact), Reward(digits)],
        MODEL,
        rollout=Rollout(samples=8, max_new_tokens=5, chat=True),
        start_from=checkpoint,
        learning_rate=2e-3,
        warmup_steps=10,
    )
    prompts = PromptData(train=train, tokenizer=checkpoint, batch_size=batch_size, val_fraction=0)
    trainer_for(place, max_steps).fit(task, prompts)
    return {"before": before, "after": measure(task, held_out), "greedily": measure(task, held_out, temperature=0.0)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(main(made))
