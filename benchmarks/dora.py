"""Compare our DoRA's forward and backward pass with peft's, which computes B A through an identity matrix.

    python -m benchmarks.dora [--device cpu]

Prints the ratio of times for square layers. A time is the best of five: CPU time of one thread, or elapsed time on a
GPU. The outputs are checked for equality first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.clock import machine, now, use_one_thread
from lit_efficient.mechanisms.adapters.low_rank import add_low_rank


def seconds(function: Callable[[], object], device: str) -> float:
    times = []
    for _ in range(5):
        start = now(device)
        function()
        times.append(now(device) - start)
    return min(times)


def main() -> None:
    import peft  # Imported here because it takes longer than all other imports, and --help does not need it.

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    use_one_thread()
    print(machine(device))
    print("width  tokens  rank    peft ms  ours ms  ratio   lora ms")
    for width, tokens, rank in ((512, 128, 8), (1024, 128, 8), (2048, 128, 8), (2048, 1024, 8), (2048, 128, 64)):
        torch.manual_seed(0)
        base = nn.Linear(width, width, bias=False, device=device)
        x = torch.randn(tokens, width, device=device, requires_grad=True)
        steps = {}
        for name, variant in (("ours", "dora"), ("lora", "lora")):
            layer = nn.Linear(width, width, bias=False, device=device)
            layer.weight = nn.Parameter(base.weight.detach(), requires_grad=False)
            add_low_rank(layer, "layer", rank=rank, alpha=rank, variant=variant)
            steps[name] = layer
        config = peft.LoraConfig(r=rank, lora_alpha=rank, use_dora=True, target_modules=["0"])
        steps["peft"] = peft.inject_adapter_in_model(config, nn.Sequential(base))[0]
        b = torch.randn(width, rank, device=device) * 0.1
        with torch.no_grad():
            steps["ours"].lora_B.copy_(b)
            steps["peft"].lora_B["default"].weight.copy_(b)
            steps["peft"].lora_A["default"].weight.copy_(steps["ours"].lora_A)
        torch.testing.assert_close(steps["ours"](x), steps["peft"](x), rtol=1e-4, atol=1e-4)
        ms = {
            name: 1000 * seconds(lambda layer=layer, x=x: layer(x).sum().backward(), device)
            for name, layer in steps.items()
        }
        ratio = ms["ours"] / ms["peft"]
        print(f"{width:5} {tokens:7} {rank:5} {ms['peft']:10.1f} {ms['ours']:8.1f} {ratio:6.2f} {ms['lora']:9.1f}")


if __name__ == "__main__":
    main()
