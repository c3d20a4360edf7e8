"""Train SmolLM2-135M-Instruct by GRPO with LoRA to use three given words in one short sentence.

    python -m benchmarks.pretrained.smollm2_words            train, and go on where an earlier call was stopped
    python -m benchmarks.pretrained.smollm2_words --write    write the result into records/figures.json and docs/

Needs the base of `benchmarks.pretrained.smollm2`. A program can check the task: the reward is the share of the words
that occur, plus 0.5 for one sentence that ends within 24 tokens. The held-out prompts have other triples of words. Each
is answered once at temperature 1, with the same random numbers before and after training.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks import figures
from benchmarks.clock import use_one_thread
from benchmarks.pretrained.smollm2 import BASE, FOLDER, download_base
from lit_efficient import (
    CausalLMConfig,
    ExactResume,
    LoRA,
    PolicyOptimization,
    Reward,
    Rollout,
    SafeCheckpointIO,
)
from lit_efficient.data.prompt_data import prompt_batch
from lit_efficient.data.text.chat_tokenizer import load_chat_tokenizer, pack_tokenizer
from lit_efficient.tasks.rollout import write_answers

RUN = FOLDER / "words"
PICTURE = figures.ROOT / "docs" / "policy_words.png"
STEPS = 24
PROMPTS = 4
SAMPLES = 6
HELD_OUT = 64
TABLE = "policy_words"
WORDS = [
    "apple",
    "river",
    "chair",
    "music",
    "window",
    "garden",
    "coffee",
    "dog",
    "cat",
    "school",
    "train",
    "winter",
    "summer",
    "book",
    "doctor",
    "kitchen",
    "ocean",
    "mountain",
    "city",
    "letter",
    "phone",
    "friend",
    "bread",
    "horse",
    "bird",
    "sun",
    "moon",
    "road",
    "market",
    "tree",
]


def prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows with different triples of words."""
    draw = random.Random(seed)
    triples = [draw.sample(WORDS, 3) for _ in range(count)]
    return [
        {"prompt": f"Write one short sentence with the words {a}, {b} and {c}.", "words": [a, b, c]}
        for a, b, c in triples
    ]


def words_used(prompt: str, completion: str, row: Any) -> float:
    """Return the share of the words that occur."""
    return sum(word in completion.lower() for word in row["words"]) / len(row["words"])


def one_sentence(prompt: str, completion: str, row: Any) -> float:
    """Return 1 for one sentence that has ended, else 0."""
    text = completion.strip()
    ends = sum(text.count(mark) for mark in ".!?")
    return float(ends == 1 and text[-1] in ".!?" and "\n" not in text)


def held_out_rewards(task: PolicyOptimization) -> dict[str, Any]:
    """Return the reward of one answer to each held-out prompt, and the first answers."""
    rows = prompts(HELD_OUT, seed=1)
    asked = [row["prompt"] for row in rows]
    texts = write_answers(task, asked, range(HELD_OUT), task.rollout).texts
    both = [(words_used("", text, row), one_sentence("", text, row)) for text, row in zip(texts, rows)]
    return {
        "rewards": [words + 0.5 * sentence for words, sentence in both],
        "solved": [float(words == sentence == 1) for words, sentence in both],
        "texts": texts,
    }


class _Curve(L.Callback):
    """Add the figures of each step to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        names = ("reward", "reward/words_used", "reward/one_sentence", "length", "truncated", "entropy", "kl")
        found = {name: float(trainer.callback_metrics.get(f"train/{name}", math.nan)) for name in names}
        line = json.dumps({"step": trainer.global_step, "cpu": time.process_time(), **found})
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


def train() -> None:
    """Measure, train and measure again."""
    RUN.mkdir(parents=True, exist_ok=True)
    L.seed_everything(0, verbose=False)
    task = PolicyOptimization(
        [Reward(words_used), Reward(one_sentence, weight=0.5)],
        CausalLMConfig(str(BASE)),
        rollout=Rollout(samples=SAMPLES, max_new_tokens=24, chat=True),
        learning_rate=3e-4,
        warmup_steps=2,
    )
    task.tokenizer_state = pack_tokenizer(load_chat_tokenizer(str(BASE)))
    before = RUN / "before.json"
    if not before.exists():
        task.configure_model()
        before.write_text(json.dumps(held_out_rewards(task)), encoding="utf-8")
    unseen = {frozenset(row["words"]) for row in prompts(HELD_OUT, seed=1)}
    rows: Any = [row for row in prompts(1000, seed=0) if frozenset(row["words"]) not in unseen]
    last = RUN / "last.ckpt"
    saves = ModelCheckpoint(RUN, "at_{step}", save_last=True, every_n_train_steps=2, save_top_k=0)
    saves.CHECKPOINT_EQUALS_CHAR = "_"
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        callbacks=[LoRA(rank=16, alpha=32), ExactResume(), saves, _Curve(RUN / "curve.jsonl")],
        plugins=[SafeCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        default_root_dir=RUN,
    )
    loader = DataLoader(rows, PROMPTS, shuffle=True, drop_last=True, collate_fn=prompt_batch)
    trainer.fit(task, loader, ckpt_path=last if last.exists() else None)
    (RUN / "after.json").write_text(json.dumps(held_out_rewards(task)), encoding="utf-8")


def interval(values: list[float]) -> str:
    """Return the mean of values with its 95 % confidence interval, by the normal distribution."""
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.2f} ± {half:.2f}"


def curve() -> list[dict[str, float]]:
    """Return the figures of each step. A resumed run repeats some."""
    lines = (RUN / "curve.jsonl").read_text("utf-8").splitlines()
    found = {one["step"]: one for one in map(json.loads, lines)}
    return [found[step] for step in sorted(found)]


def draw(steps: list[dict[str, float]]) -> None:
    """Draw the rewards of the steps."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name, label in (("reward", "reward"), ("reward/words_used", "share of the words"), ("length", "tokens / 24")):
        divisor = 24 if name == "length" else 1
        axes.plot([one["step"] for one in steps], [one[name] / divisor for one in steps], label=label)
    axes.set_xlabel("step (24 samples)")
    axes.set_ylim(0, 1.6)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


def write() -> None:
    """Write the result into records/figures.json, and the picture."""
    before = json.loads((RUN / "before.json").read_text("utf-8"))
    after = json.loads((RUN / "after.json").read_text("utf-8"))
    steps = curve()
    draw(steps)
    count = len(after["rewards"])
    before = {name: values[:count] for name, values in before.items()}
    gains = [new - old for new, old in zip(after["rewards"], before["rewards"])]
    rewards = [one["reward"] for one in steps]
    cpu = [
        later["cpu"] - earlier["cpu"] for earlier, later in itertools.pairwise(steps) if later["cpu"] > earlier["cpu"]
    ]
    found = {
        "before": interval(before["rewards"]),
        "after": interval(after["rewards"]),
        "gain": interval(gains),
        "solved_before": statistics.mean(before["solved"]),
        "solved_after": statistics.mean(after["solved"]),
        "seconds": statistics.median(cpu),
        "steps": len(steps),
        "prompts": count,
        "first": statistics.mean(rewards[:4]),
        "last": statistics.mean(rewards[-4:]),
    }
    source = json.loads(figures.FILE.read_text("utf-8"))
    source["records"] = [record for record in source["records"] if record["id"] != TABLE]
    now = figures.here()
    source["environments"][TABLE] = {key: now[key] for key in ("versions", "machine")}
    source["records"].append(
        {
            "id": TABLE,
            "text": "In {steps} steps of {seconds:.0f} CPU-seconds the mean reward of four steps rises from "
            "{first:.2f} to {last:.2f}. The mean reward of {prompts} held-out prompts rises from {before} to "
            "{after} (gain {gain}, 95% intervals), and the share of answers with all words in one sentence from "
            "{solved_before:.0%} to {solved_after:.0%}",
            "command": "python -m benchmarks.pretrained.smollm2_words",
            "unit": "reward of 1.5, shares, CPU-seconds",
            "figures": found,
            "date": now["date"],
            "threads": 1,
            "environment": TABLE,
        }
    )
    figures.FILE.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the result into records/figures.json and docs/")
    if parser.parse_args().write:
        write()
        return 0
    use_one_thread()
    download_base()
    train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
