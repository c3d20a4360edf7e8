"""Does the best rate of a small GPT hold for a wide and a deep one? With WidthTransfer, and without.

    python -m benchmarks.width_transfer

Trains GPTs of width 64 (2 blocks), width 256 and 8 blocks on texts of a random grammar (each token depends on the one
before it), at rates a factor of two apart, and prints the mean loss of the last tenth of the steps.
"""

import argparse

import torch
import torch.nn.functional as F

from lit_efficient import WidthTransfer, apply
from lit_efficient.models.gpt import GPT, GPTConfig

VOCABULARY, LENGTH, BATCH = 32, 32, 8
BASE = (64, 2)
SIZES = (BASE, (256, 2), (64, 8))
RATES = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)


def texts(steps: int) -> torch.Tensor:
    """Tokens [steps, BATCH, LENGTH + 1], the same each time."""
    generator = torch.Generator().manual_seed(0)
    grammar = torch.randn(VOCABULARY, VOCABULARY, generator=generator).mul(3).softmax(-1)
    tokens = torch.randint(0, VOCABULARY, (steps * BATCH, 1), generator=generator)
    while tokens.shape[1] <= LENGTH:
        odds = grammar[tokens[:, -1]]
        tokens = torch.cat((tokens, torch.multinomial(odds, 1, generator=generator)), dim=1)
    return tokens.view(steps, BATCH, LENGTH + 1)


def loss_of(width: int, depth: int, rate: float, transfers: bool, batches: torch.Tensor, seed: int) -> float:
    """Mean loss of the last tenth of the steps."""
    torch.manual_seed(seed)
    heads = width // 16
    network = GPT(
        GPTConfig(VOCABULARY, dim=width, depth=depth, num_heads=heads, hidden_dim=2 * width, tie_embeddings=False)
    )
    technique = WidthTransfer(*BASE)
    if transfers:
        apply(network, [technique])
    optimizer = torch.optim.AdamW(network.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0)
    technique.rewrite_optimizer(optimizer, network)
    losses = []
    for tokens in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches = texts(arguments.steps)
    print("width depth  transfer  " + "  ".join(f"{rate:7.3f}" for rate in RATES) + "   best rate")
    for width, depth in SIZES:
        for transfers in (False, True)[: 1 if (width, depth) == BASE else 2]:
            runs = [
                [loss_of(width, depth, rate, transfers, batches, seed) for seed in range(arguments.seeds)]
                for rate in RATES
            ]
            means = [sum(run) / len(run) for run in runs]
            best = RATES[means.index(min(means))]
            shown = "  ".join(f"{mean:7.3f}" for mean in means)
            print(f"{width:5} {depth:5}  {transfers!s:8}  {shown}   {best}", flush=True)


if __name__ == "__main__":
    main()
