"""Measure whether rows that select-data's scores choose train a small GPT better than random rows.

    python -m benchmarks.data_selection            run five seeds, and print the table
    python -m benchmarks.data_selection --show     print the table of the finished runs
    python -m benchmarks.data_selection --record   write the table into figures.json

The texts are those of Python's standard library, in rows of 64 tokens. In the setting ``noise`` half of the rows have
their tokens in random order; in ``plain`` none has. A quarter of the rows is kept, by the reducible loss (the current
model has trained for 40 steps on all rows, the reference for 200 steps on other rows, without noise) or by LESS
(adapters of the current model, trained for 40 steps; the target are 64 held-out rows), or at random. A new network then
trains for 200 steps on the kept rows. Scored is its loss on 256 further rows. p is that of a paired t test over the
seeds, corrected by Holm's method over the rows of the table. Each run is a line of ``data_selection.jsonl`` in the
cache, and is not repeated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lit_efficient as le
from benchmarks import figures
from benchmarks.clock import use_one_thread
from lit_efficient.evidence.comparing.estimates import Estimate, holm, ratio_of
from lit_efficient.files.cache import cache_root
from lit_efficient.losses.data_selection import adam_direction, influence, project, reducible_loss
from lit_efficient.losses.next_token import token_losses
from lit_efficient.models.networks.gpt import GPT, GPTConfig

SEEDS = (1, 2, 3, 4, 5)
SETTINGS = ("noise", "plain")
RANDOM = "random rows"
METHODS = (RANDOM, "rho", "less")
COLUMNS = ("Rows", "Score", "Kept rows without noise", "Loss beside random rows", "p", "Seeds")
ROWS, HELD_OUT, TARGETS, TESTED = 1600, 1600, 64, 256
KEPT = 0.25
LENGTH, BATCH, STEPS, WARM, RATE = 64, 16, 200, 40, 3e-3


def corpus() -> Tensor:
    """Return rows of tokens [N, LENGTH], in a random order that is always the same."""
    data = le.PythonCorpus(vocab_size=1024, sequence_length=LENGTH, val_fraction=0.005)
    data.prepare_data()
    data.setup("fit")
    windows: Any = data.train_windows
    count = ROWS + HELD_OUT + TARGETS + TESTED
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[:count]
    return torch.stack([windows[i]["input_ids"] for i in chosen.tolist()])


def network(seed: int, vocabulary: int) -> GPT:
    """Return a network with random weights."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocabulary, dim=64, depth=2, num_heads=4, max_length=LENGTH))


def loss_of(model: Any, rows: Tensor) -> Tensor:
    """Return the mean loss of each row [B]."""
    return token_losses(model(rows[:, :-1]), rows[:, 1:]).mean(1)


def train(model: Any, rows: Tensor, steps: int, seed: int, rate: float = RATE) -> torch.optim.Optimizer:
    """Train the parameters that require gradients on random batches."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate, weight_decay=0.1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20, (steps - step) / (0.3 * steps))
        batch = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
        optimizer.zero_grad()
        loss_of(model, batch).mean().backward()
        optimizer.step()
    return optimizer


@torch.no_grad()
def losses(model: Any, rows: Tensor) -> Tensor:
    """Return the mean loss of each row [N]."""
    return torch.cat([loss_of(model, part) for part in rows.split(64)])


def gradients(model: Any, rows: Tensor, parameters: list[Tensor]) -> Tensor:
    """Return the gradient of each row's loss [N, P]."""
    found = []
    for row in rows:
        parts = torch.autograd.grad(loss_of(model, row[None]).mean(), parameters)
        found.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(found)


def scores(method: str, rows: Tensor, others: Tensor, targets: Tensor, seed: int, vocabulary: int) -> Tensor:
    """Return the score of each row [N]."""
    if method == RANDOM:
        return torch.rand(len(rows), generator=torch.Generator().manual_seed(seed))
    current = network(seed, vocabulary)
    train(current, rows, WARM, seed)
    if method == "rho":
        reference = network(seed + 100, vocabulary)
        train(reference, others, STEPS, seed + 100)
        return reducible_loss(losses(current, rows), losses(reference, rows))
    torch.manual_seed(seed)
    le.apply(current, le.LoRA(rank=4))
    optimizer = train(current, rows, WARM, seed + 1, 1e-3)
    parameters = [p for p in current.parameters() if p.requires_grad]
    states = [optimizer.state[p] for p in parameters]
    mean, square = (torch.cat([state[key].flatten() for state in states]) for key in ("exp_avg", "exp_avg_sq"))
    wanted = project(gradients(current, targets, parameters), 512, seed)
    found = []
    for part in rows.split(64):
        steps = adam_direction(gradients(current, part, parameters), mean, square, (0.9, 0.999))
        found.append(influence(project(steps, 512, seed), wanted))
    return torch.cat(found)


def run(setting: str, method: str, seed: int, texts: Tensor) -> dict[str, float]:
    """Return the loss after training on the kept rows, and the share of them without noise."""
    vocabulary = int(texts.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    texts = texts[torch.randperm(len(texts), generator=generator)]
    rows, others, targets, tested = texts.split([ROWS, HELD_OUT, TARGETS, TESTED])
    noisy = torch.zeros(ROWS, dtype=torch.bool)
    if setting == "noise":
        noisy[: ROWS // 2] = True
        order = torch.rand(ROWS, LENGTH, generator=generator).argsort(1)
        rows = torch.where(noisy[:, None], rows.gather(1, order), rows)
    kept = scores(method, rows, others, targets, seed, vocabulary).topk(round(KEPT * ROWS)).indices
    model = network(seed + 1000, vocabulary)
    train(model, rows[kept], STEPS, seed)
    return {"loss": float(losses(model, tested).mean()), "clean": float((~noisy[kept]).float().mean())}


def main() -> None:
    """Run what is missing, and print the table."""
    arguments = figures.arguments_of(__doc__)
    use_one_thread()
    file = cache_root() / "data_selection.jsonl"
    done = {(one["setting"], one["method"], one["seed"]): one for one in figures.finished_runs(file)}
    texts = None if arguments.show or arguments.record else corpus()
    for seed in SEEDS:
        for setting in SETTINGS:
            for method in METHODS:
                key = (setting, method, seed)
                if texts is not None and key not in done:
                    done[key] = {**dict(zip(("setting", "method", "seed"), key)), **run(*key, texts)}
                    with Path(file).open("a") as opened:
                        opened.write(json.dumps(done[key]) + "\n")
    rows = table(done)
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    if arguments.record:
        figures.record_ratios("data_selection", "python -m benchmarks.data_selection", rows, COLUMNS)


def table(done: dict[tuple[str, str, int], dict[str, float]]) -> list[list[str]]:
    """Return the rows of the table: the ratios to random rows, with p."""
    ratios = {}
    clean = {}
    for setting in SETTINGS:
        for method in METHODS[1:]:
            pairs = [(done.get((setting, method, seed)), done.get((setting, RANDOM, seed))) for seed in SEEDS]
            both = [(a, b) for a, b in pairs if a is not None and b is not None]
            if len(both) > 1:
                ratios[setting, method] = ratio_of([a["loss"] for a, _ in both], [b["loss"] for _, b in both])
                clean[setting, method] = sum(a["clean"] for a, _ in both) / len(both)
    return [[*name, f"{clean[name]:.2f}", *shown(ratio)] for name, ratio in holm(ratios).items()]


def shown(ratio: Estimate) -> list[str]:
    """Return a ratio with its interval, p and the number of seeds."""
    p = "< 0.001" if ratio.p < 0.0005 else f"{ratio.p:.3f}"
    return [f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})", p, str(ratio.n)]


if __name__ == "__main__":
    main()
