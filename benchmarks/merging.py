"""Measure whether soups and merges of `average` help a small GPT that was fine-tuned from one base.

    python -m benchmarks.merging            run five seeds, and print the table
    python -m benchmarks.merging --show     print the table of the finished runs
    python -m benchmarks.merging --record   write the table into figures.json

The base has trained for 200 steps on Python's standard library, in rows of 64 tokens. ``soup``: nine models are
fine-tuned for 100 steps on the reference of the language in English (``pydoc_data``), at three learning rates and with
three orders of the rows; a soup, uniform or greedy by 128 rows, is compared with the model that is best on these rows.
``merge``: one model is fine-tuned on the English rows and one on tables of character codes (``encodings``); merges are
compared with the mean of the two models. Scored is the loss on further rows, for ``merge`` the mean of both kinds. p is
that of a paired t test over the seeds, corrected by Holm's method over the rows of the table. Each seed is a line of
``merging.jsonl`` in the cache, and is not repeated.
"""

from __future__ import annotations

import encodings
import json
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import lit_efficient as le
from benchmarks import figures
from benchmarks.clock import use_one_thread
from benchmarks.data_selection import LENGTH, RATE, STEPS, losses, network, shown, train
from lit_efficient.commands.average import greedy_soup
from lit_efficient.evidence.comparing.estimates import holm, ratio_of
from lit_efficient.files.cache import cache_root
from lit_efficient.mechanisms.averages.merging import merged_change

SEEDS = (1, 2, 3, 4, 5)
TUNING = 100  # steps
RATES = (1e-3, 2e-3, 4e-3)
HELD_OUT, TESTED = 128, 192
COLUMNS = ("Setting", "Weights", "Beside", "Ratio of losses", "p", "Seeds")
BASELINES = {"soup": "best model", "merge": "mean of both"}
State = dict[str, Tensor]


def rows_of_texts() -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [N, LENGTH] of Python, of English and of tables."""
    data = le.PythonCorpus(vocab_size=1024, sequence_length=LENGTH, val_fraction=0.005)
    data.prepare_data()
    data.setup("fit")
    windows: Any = data.train_windows
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[:1600]
    python = torch.stack([windows[i]["input_ids"] for i in chosen.tolist()])
    tables = "\n".join(path.read_text("utf-8") for path in sorted(Path(encodings.__path__[0]).glob("cp*.py")))

    def cut(text: str) -> Tensor:
        ids = torch.tensor(data.tokenizer.encode(text[:400_000]).ids)
        return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    return python, cut("\n".join(topics.values())), cut(tables)


def mean(states: Sequence[State]) -> State:
    """Return the mean of weights."""
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def run(seed: int, python: Tensor, *kinds: Tensor) -> dict[str, float]:
    """Return the loss of each arm of one seed."""
    vocabulary = int(max(rows.max() for rows in (python, *kinds))) + 1
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rows in kinds:
        mixed = rows[torch.randperm(len(rows), generator=generator)]
        parts.append((mixed[HELD_OUT + TESTED :], mixed[:HELD_OUT], mixed[HELD_OUT : HELD_OUT + TESTED]))
    model = network(seed, vocabulary)
    train(model, python, STEPS, seed)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def tuned(rows: Tensor, rate: float, order: int) -> State:
        model.load_state_dict(base)
        train(model, rows, TUNING, order, rate)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def loss(state: State, *tested: Tensor) -> float:
        model.load_state_dict(state)
        return float(torch.stack([losses(model, rows).mean() for rows in tested]).mean())

    (english, held_out, tested), (tables, _, tested_tables) = parts
    cooks = {f"{rate} {order}": tuned(english, rate, 10 * seed + order) for rate in RATES for order in range(3)}
    alone = {name: loss(state, held_out) for name, state in cooks.items()}
    names = [*cooks]
    greedy = greedy_soup(names, alone, lambda few: loss(mean([cooks[one] for one in few]), held_out), 1.0)
    best = min(names, key=lambda name: alone[name])
    soups = {"best model": [best], "uniform": names, "greedy": greedy}
    found = {f"soup | {name}": loss(mean([cooks[one] for one in few]), tested) for name, few in soups.items()}

    both = [tuned(english, RATE, seed), tuned(tables, RATE, seed)]
    half = len(tables) if len(tables) < len(english) else len(english)
    merged: dict[str, State] = {"mean of both": mean(both), "base": base, "English alone": both[0]}
    merged["trained on both"] = tuned(torch.cat([english[:half], tables[:half]]), RATE, seed)
    for method in ("task_arithmetic", "ties", "dare_linear", "dare_ties"):
        draws = torch.Generator().manual_seed(seed)
        merged[method] = {
            name: before
            + merged_change(torch.stack([one[name] - before for one in both]), torch.ones(2), method, 0.5, draws)
            for name, before in base.items()
        }
    return found | {f"merge | {name}": loss(state, tested, tested_tables) for name, state in merged.items()}


def ratios(done: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the ratio of each arm to the baseline of its group, with corrected p values."""
    found = {}
    for name in done[0]:
        group, _, arm = name.partition(" | ")
        if arm != BASELINES[group]:
            baseline = f"{group} | {BASELINES[group]}"
            found[name] = ratio_of([one[name] for one in done], [one[baseline] for one in done])
    return holm(found)


def main() -> None:
    """Run what is missing, and print or record the table."""
    arguments = figures.arguments_of(__doc__)
    use_one_thread()
    file = cache_root() / "merging.jsonl"
    done = {one.pop("seed"): one for one in figures.finished_runs(file)}
    if not (arguments.show or arguments.record):
        texts = rows_of_texts()
        for seed in SEEDS:
            if seed not in done:
                done[seed] = run(seed, *texts)
                with file.open("a") as opened:
                    opened.write(json.dumps({"seed": seed, **done[seed]}) + "\n")
    rows = []
    for name, ratio in ratios([*done.values()]).items():
        group, _, arm = name.partition(" | ")
        rows.append([group, arm, BASELINES[group], *shown(ratio)])
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    if arguments.record:
        figures.record_ratios("merging", "python -m benchmarks.merging", rows, COLUMNS)


if __name__ == "__main__":
    main()
