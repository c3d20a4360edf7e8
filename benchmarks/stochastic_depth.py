"""Compare a training step with our stochastic depth, with DropPath masks, and of the plain network.

    python -m benchmarks.stochastic_depth [--blocks 12] [--width 128] [--rate 0.5] [--batch 32] [--steps 24]
                                          [--device cpu]

Runs forward, backward and AdamW of a transformer (pre-norm attention and MLP). Drop rates rise linearly from rate / L
to rate. The steps of all contenders are interleaved. Times are CPU times of this process on one thread (elapsed times
on a GPU). Other load therefore slows all contenders alike, and only the ratios are meaningful. The seeds are chosen so
that skip='batch' drops the expected share of blocks, because the share varies much in so few steps. timm's DropPath is
used if timm is installed, otherwise an equal mask.

Output with `--steps 16` on two vCPUs of a Xeon at 2.5 GHz under other load, torch 2.13.0:

    12 blocks of width 128, 32 rows of 64 tokens, linear rates to 0.5: 16 steps
    blocks dropped: 27.1% expected, 27.1% drawn for skip='batch'
    plain                               722.9 ms a step   100.0% of plain
    DropPath (timm)                     721.2 ms a step    99.8% of plain
    StochasticDepth(skip='batch')       530.8 ms a step    73.4% of plain
    StochasticDepth(skip='sample')      515.6 ms a step    71.3% of plain

With 8 rows less is saved, because the optimizer also steps for skipped blocks and takes a tenth of the plain step.
"""

from __future__ import annotations

import argparse
import importlib.util
import runpy
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.clock import machine, now, use_one_thread
from lit_efficient import StochasticDepth
from lit_efficient.application import apply
from lit_efficient.callbacks.stochastic_depth import linear_rates


class MaskedRows(nn.Module):
    """DropPath: compute the residual of each row, then multiply it by 0 or 1 / (1 - rate)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return x
        mask = x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * mask / (1 - self.rate)


def drop_path() -> tuple[Any, str]:
    """Return timm's DropPath. The helper of the tests imports it without torchvision, which timm requires."""
    if importlib.util.find_spec("timm") is None:
        return MaskedRows, "DropPath (an own mask)"
    models = runpy.run_path(str(Path(__file__).parent.parent / "tests" / "timm_models.py"))
    return models["import_timm"]().layers.DropPath, "DropPath (timm)"


def fair_seed(rates: list[float], steps: int) -> int:
    """Return the first seed from which ``steps`` consecutive seeds drop the expected number of blocks."""
    chances = torch.tensor(rates)
    draws = (torch.rand(len(rates), generator=torch.Generator().manual_seed(seed)) for seed in range(4096))
    drawn = [int((draw < chances).sum()) for draw in draws]
    expected = round(sum(rates) * steps)
    return next(first for first in range(len(drawn) - steps) if sum(drawn[first : first + steps]) == expected)


class Block(nn.Module):
    def __init__(self, width: int, drop: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


def network(blocks: int, width: int, drops: list[nn.Module] | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width, drops[i] if drops else nn.Identity()) for i in range(blocks)])


class Step:
    """Contender: a network, its optimizer, and the seconds of its steps."""

    def __init__(self, net: nn.Module, x: torch.Tensor) -> None:
        self.net = net.train()
        self.x = x
        self.seconds = []
        self.device = x.device.type
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True)

    def run(self, seed: int) -> None:
        torch.manual_seed(seed)
        start = now(self.device)
        self.net(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(now(self.device) - start)


class Counts:
    """Return the number of blocks that ran and the number that could have run."""

    def __init__(self, net: nn.Module, blocks: int) -> None:
        self.ran = 0
        self.all = blocks
        for block in net:
            block.up.register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        self.ran += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=32, help="rows of 64 tokens; the optimizer's time stays")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    use_one_thread()
    x = torch.randn(options.batch, 64, options.width, device=options.device)
    mask, name = drop_path()
    rates = linear_rates(options.rate, options.blocks)
    nets = {"plain": network(options.blocks, options.width)}
    nets[name] = network(options.blocks, options.width, [mask(rate) for rate in rates])
    for skip in ("batch", "sample"):
        net = nets[f"StochasticDepth(skip={skip!r})"] = network(options.blocks, options.width)
        apply(net, [StochasticDepth(options.rate, skip=skip)])
    for net in nets.values():
        net.to(options.device)
    counts = Counts(nets["StochasticDepth(skip='batch')"], options.blocks * options.steps)
    steps = {label: Step(net, x) for label, net in nets.items()}
    first = fair_seed(rates, options.steps)
    for number in range(-2, options.steps):
        counts.ran *= number != 0  # two steps warmed up
        for step in steps.values():
            step.run(first + max(number, 0))
    means = {label: mean(step.seconds[2:]) for label, step in steps.items()}  # the draws differ from step to step
    size = f"{options.blocks} blocks of width {options.width}, {options.batch} rows of 64 tokens"
    print(f"{size}, linear rates to {options.rate}: {options.steps} steps, {machine(options.device)}")
    print(f"blocks dropped: {mean(rates):.1%} expected, {1 - counts.ran / counts.all:.1%} drawn for skip='batch'")
    for label, seconds in means.items():
        print(f"{label:32} {seconds * 1e3:8.1f} ms a step   {seconds / means['plain']:6.1%} of plain")


if __name__ == "__main__":
    main()
