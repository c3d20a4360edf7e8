"""Compare low-bit optimizers with torch.optim.AdamW: bytes of state per parameter and time of a step.

    python -m benchmarks.low_bit_optimizer [--width 1024] [--layers 4] [--steps 5] [--device cpu] [--torchao]

The ratios are from one run on one machine. Times are CPU seconds of the process, or elapsed seconds on a GPU. torchao
compiles its step first. The compilation takes up to minutes on a CPU and is not counted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.clock import machine, now
from lit_efficient import (
    ConfigurationError,
    FusedAdamW,
    GroupedAdafactor,
    Lion,
    LowBitOptimizer,
    MuonAdamW,
    OffloadOptimizer,
    ScheduleFreeAdamW,
)
from tests.state_bytes import measure_state_bytes

Make = Callable[[nn.Module], torch.optim.Optimizer]


def low(kind: type, bits: int | str = 8, backend: str = "auto") -> Make:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(module.parameters(), lr=1e-3, **extra)
        LowBitOptimizer(bits, backend).rewrite_optimizer(optimizer, module)
        return optimizer

    return make


def offloaded(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    OffloadOptimizer().rewrite_optimizer(optimizer, module)
    return optimizer


def schedule_free(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = ScheduleFreeAdamW(module.parameters())
    optimizer.train()
    return optimizer


def their_own(module: nn.Module) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(module.parameters())


def measure(make: Make, arguments: argparse.Namespace) -> tuple[float, float]:
    """Return the bytes of state per parameter, and the median seconds of a step."""
    torch.manual_seed(0)
    layers = [nn.Linear(arguments.width, arguments.width) for _ in range(arguments.layers)]
    module = nn.Sequential(*layers).to(arguments.device)
    optimizer = make(module)
    seconds = []
    for _ in range(arguments.steps + 2):
        for p in module.parameters():
            p.grad = torch.randn_like(p)
        start = now(arguments.device)
        optimizer.step()
        seconds.append(now(arguments.device) - start)
    return measure_state_bytes(optimizer) / sum(p.numel() for p in module.parameters()), statistics.median(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--torchao", action="store_true", help="also measure torchao's optimizers")
    arguments = parser.parse_args()
    rows: dict[str, Make] = {
        "torch.optim.AdamW": lambda m: torch.optim.AdamW(m.parameters()),
        "torch.optim.AdamW, fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
        "FusedAdamW": lambda m: FusedAdamW(m.parameters()),
        "LowBitOptimizer, AdamW, 8 bits, bitsandbytes": low(torch.optim.AdamW),
        "AdamW8bit of bitsandbytes": their_own,
        "LowBitOptimizer, SGD, 8 bits, bitsandbytes": low(torch.optim.SGD),
        "LowBitOptimizer, Lion, 8 bits, bitsandbytes": low(Lion),
        "Lion": lambda m: Lion(m.parameters()),
        "GroupedAdafactor": lambda m: GroupedAdafactor(m.parameters()),
        "MuonAdamW": lambda m: MuonAdamW(m.parameters()),
        "ScheduleFreeAdamW": schedule_free,
    }
    if arguments.device.startswith("cuda"):
        rows["OffloadOptimizer, AdamW"] = offloaded
    if arguments.torchao:
        for bits in (8, 4, "fp8"):
            rows[f"LowBitOptimizer, AdamW, {bits}, torchao"] = low(torch.optim.AdamW, bits, "torchao")
    print(machine(arguments.device))
    print(f"{'optimizer':46} {'bytes/parameter':>15} {'ratio':>6} {'step time, ratio':>17}")
    reference: tuple[float, float] | None = None
    for name, make in rows.items():
        try:
            size, seconds = measure(make, arguments)
        except (ImportError, ConfigurationError) as error:  # a package that is missing
            print(f"{name:46} skipped: {str(error).splitlines()[0][:100]}")
            continue
        reference = reference or (size, seconds)
        print(f"{name:46} {size:15.3f} {size / reference[0]:6.2f} {seconds / reference[1]:17.2f}")


if __name__ == "__main__":
    main()
