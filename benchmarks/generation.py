"""CPU time of generation beside ``generate`` of transformers: ``python -m benchmarks.generation MODEL``.

MODEL is a folder. Both run in one process. Rounds alternate, and each line is the median of the ratios of neighbours,
with their range. Both write all ``NEW`` tokens, drawn at temperature 1.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.clock import now, use_one_thread
from lit_efficient.models.generation.batched import generate
from lit_efficient.models.generation.sampling import Sampling

ROUNDS = 5
NEW = 64


def ratio(ours: Callable[[], object], theirs: Callable[[], object]) -> str:
    """Return the CPU time of ``ours`` divided by that of ``theirs``."""
    found = []
    ours()
    theirs()
    for _ in range(ROUNDS):
        times = []
        for work in (ours, theirs):
            start = now("cpu")
            work()
            times.append(now("cpu") - start)
        found.append(times[0] / times[1])
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def main(folder: str) -> None:
    """Print the ratios."""
    use_one_thread()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(0)
    how = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}

    def case(name: str, prompts: list[list[int]], samples: int = 1) -> None:
        most = max(map(len, prompts))
        ids = torch.tensor([[0] * (most - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (most - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        many = [prompt for prompt in prompts for _ in range(samples)]

        def ours() -> None:
            generate(model, many, NEW, sampling=Sampling(1.0, 1.0), seeds=range(len(many)), stop=set())

        def theirs() -> None:
            model.generate(ids, attention_mask=mask, num_return_sequences=samples, **how)

        print(f"{name}: {ratio(ours, theirs)}", flush=True)

    def prompt(length: int) -> list[int]:
        return torch.randint(100, 40_000, (length,), generator=draw).tolist()

    case("8 prompts of 128 tokens", [prompt(128) for _ in range(8)])
    case("8 prompts of 16 to 240 tokens", [prompt(16 + 32 * i) for i in range(8)])
    for length in (128, 256, 512):
        case(f"8 samples of a prompt of {length} tokens", [prompt(length)], 8)


if __name__ == "__main__":
    main(sys.argv[1])
