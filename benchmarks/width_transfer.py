"""Test whether the best learning rate of a small network holds for wide and deep ones, with and without WidthTransfer.

    python -m benchmarks.width_transfer                     our GPT, a Llama of transformers, our DiT
    python -m benchmarks.width_transfer --networks dit      one of these networks
    python -m benchmarks.width_transfer --show              print the tables of the finished runs

Trains networks of width 64 (2 blocks), of width 256, and of 8 blocks, at learning rates a factor of two apart. The
language models train on texts of a random grammar, in which each token depends on the previous one. The DiT trains on
latents of ten random patterns in noise. The output is the mean loss of the last tenth of the steps, and the coordinate
check: the change of the last block's output after ten steps (root mean square, at the best rate of the base), relative
to the base. Each run is a line of ``width_transfer.jsonl`` in the cache, and is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.clock import use_one_thread
from lit_efficient import WidthTransfer, apply
from lit_efficient.files.cache import cache_root
from lit_efficient.models.networks.dit import DiT, DiTConfig
from lit_efficient.models.networks.gpt import GPT, GPTConfig

VOCABULARY = 32
LENGTH = 32
BATCH = 8
BASE = (64, 2)
SIZES = (BASE, (256, 2), (64, 8))
RATES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
EARLY = 10  # steps of the coordinate check


def gpt(width: int, depth: int) -> nn.Module:
    """Ours."""
    sizes = {"dim": width, "depth": depth, "num_heads": width // 16, "hidden_dim": 2 * width}
    return GPT(GPTConfig(VOCABULARY, tie_embeddings=False, **sizes))


def llama(width: int, depth: int) -> nn.Module:
    """Return a Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth}
    heads = {"num_attention_heads": width // 16, "num_key_value_heads": width // 32, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes, **heads))


def dit(width: int, depth: int) -> nn.Module:
    """Ours."""
    return DiT(DiTConfig(width=width, depth=depth, heads=width // 16))


def text_loss(network: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of the next token."""
    output = network(tokens[:, :-1])
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def flow_loss(network: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss of a flow from latents to noise. A row holds latents, noise, time and label."""
    latents, noise, t, labels = (*batch[:, :512].chunk(2, 1), batch[:, 512], batch[:, 513].long())
    latents, noise = (one.reshape(-1, 4, 8, 8) for one in (latents, noise))
    share = t[:, None, None, None]
    return F.mse_loss(network((1 - share) * latents + share * noise, t, labels), noise - latents)


def texts(steps: int) -> Tensor:
    """Return tokens of shape [steps, BATCH, LENGTH + 1], the same on each call."""
    generator = torch.Generator().manual_seed(0)
    grammar = torch.randn(VOCABULARY, VOCABULARY, generator=generator).mul(3).softmax(-1)
    tokens = torch.randint(0, VOCABULARY, (steps * BATCH, 1), generator=generator)
    while tokens.shape[1] <= LENGTH:
        odds = grammar[tokens[:, -1]]
        tokens = torch.cat((tokens, torch.multinomial(odds, 1, generator=generator)), dim=1)
    return tokens.view(steps, BATCH, LENGTH + 1)


def patterns(steps: int) -> Tensor:
    """Return batches [steps, 2 * BATCH, 256 + 256 + 2] of latents, noise, times and labels, the same on each call."""
    generator = torch.Generator().manual_seed(0)
    rows = steps * 2 * BATCH
    of_class = torch.randn(10, 256, generator=generator)
    labels = torch.randint(0, 10, (rows, 1), generator=generator)
    latents = (of_class[labels[:, 0]] + 0.5 * torch.randn(rows, 256, generator=generator)) / 1.25**0.5
    rest = [torch.randn(rows, 256, generator=generator), torch.rand(rows, 1, generator=generator), labels.float()]
    return torch.cat([latents, *rest], 1).view(steps, 2 * BATCH, -1)


Loss = Callable[[nn.Module, Tensor], Tensor]
NETWORKS: dict[str, tuple[Callable[[int, int], nn.Module], Loss, Callable[[int], Tensor]]] = {
    "gpt": (gpt, text_loss, texts),
    "llama": (llama, text_loss, texts),
    "dit": (dit, flow_loss, patterns),
}


def run(
    kind: str, width: int, depth: int, rate: float, transfers: bool, batches: Tensor, seed: int
) -> dict[str, float]:
    """Return the mean loss of the last tenth of the steps, and the last block's output change after `EARLY` steps."""
    make, loss_of, _ = NETWORKS[kind]
    torch.manual_seed(seed)
    network = make(width, depth)
    technique = WidthTransfer(*BASE)
    if transfers:
        apply(network, [technique])
    optimizer = torch.optim.AdamW(network.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0)
    technique.rewrite_optimizer(optimizer, network)
    block = next(part for part in network.modules() if isinstance(part, nn.ModuleList))[-1]
    seen: list[Tensor] = []

    def look() -> None:
        handle = block.register_forward_hook(lambda *call: seen.append(_first(call[2])))
        with torch.no_grad():
            loss_of(network, batches[0])
        handle.remove()

    look()
    losses = []
    for step, batch in enumerate(batches):
        if step == EARLY:
            look()
        optimizer.zero_grad()
        loss = loss_of(network, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    last = losses[-max(1, len(losses) // 10) :]
    return {"loss": sum(last) / len(last), "change": float((seen[1] - seen[0]).square().mean().sqrt())}


def _first(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def lines(rows: list[dict[str, Any]], kind: str) -> list[str]:
    """Return the lines of a network's table."""
    found = [
        f"{kind:6} width depth  transfer  {'  '.join(f'{rate:6g}' for rate in RATES)}   best rate   change / base's"
    ]
    base = 0.0
    best_of_base = 0.0
    for (width, depth), transfers in itertools.product(SIZES, (False, True)):
        mine = [
            row for row in rows if (row["network"], row["size"], row["transfers"]) == (kind, [width, depth], transfers)
        ]
        by_rate = {rate: [row for row in mine if row["rate"] == rate] for rate in RATES}
        if not all(by_rate.values()):
            continue
        means = {rate: sum(row["loss"] for row in some) / len(some) for rate, some in by_rate.items()}
        best = min(means, key=lambda rate: means[rate] if means[rate] == means[rate] else float("inf"))
        best_of_base = best_of_base or best
        change = sum(row["change"] for row in by_rate[best_of_base]) / len(by_rate[best_of_base])
        base = base or change
        shown = "  ".join(f"{mean:6.3f}" for mean in means.values())
        found.append(f"{'':6} {width:5} {depth:5}  {transfers!s:8}  {shown}   {best:9g}   {change / base:.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--file", type=Path, default=None)
    arguments = parser.parse_args()
    use_one_thread()
    file = arguments.file or cache_root() / "width_transfer.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    rows = [row for row in rows if row["steps"] == arguments.steps and row["seed"] < arguments.seeds]
    for kind in arguments.networks:
        batches = NETWORKS[kind][2](arguments.steps)
        for size, transfers, rate, seed in itertools.product(SIZES, (False, True), RATES, range(arguments.seeds)):
            settings = {"network": kind, "size": [*size], "transfers": transfers, "rate": rate, "seed": seed}
            settings["steps"] = arguments.steps
            known = any(settings.items() <= row.items() for row in rows)
            if known or arguments.show or (size == BASE and transfers):  # at the base's size it changes nothing
                continue
            rows.append({**settings, **run(kind, *size, rate, transfers, batches, seed)})
            with file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(rows[-1]) + "\n")
        print("\n".join(lines(rows, kind)), flush=True)


if __name__ == "__main__":
    main()
