"""Compare our activation checkpointing with that of torch and transformers: bytes kept for backward, time of a step.

    python -m benchmarks.activation_checkpointing [--layers 6] [--width 128] [--batch 4] [--length 128] [--steps 8]
                                                  [--device cpu]

Runs the forward and backward pass of a Llama from transformers. Memory is the size of all live tensors without the
parameters, after the forward pass and at the peak of the step. On a GPU the allocator reports it. The steps of all
contenders are interleaved. Times are CPU times of this process on one thread (elapsed times on a GPU). Other load
therefore slows all contenders alike, and only the ratios are meaningful. Gradients are compared bit by bit.

Output with the defaults on two vCPUs of a Xeon at 2.5 GHz under other load, torch 2.13.0:

    6 layers of width 128, 4 rows of 128 tokens: 8 steps
    plain                          kept   40.4 MiB 100.0%   peak   41.7 MiB 100.0%   time 100.0%   gradients equal
    transformers' own              kept    2.8 MiB   6.9%   peak   14.2 MiB  34.0%   time 147.5%   gradients equal
    torch's checkpoint             kept    2.8 MiB   6.9%   peak   14.2 MiB  34.0%   time 142.6%   gradients equal
    ours                           kept    2.8 MiB   6.9%   peak   14.2 MiB  34.0%   time 148.7%   gradients equal
    ours, every=2                  kept   21.6 MiB  53.5%   peak   23.7 MiB  56.8%   time 124.6%   gradients equal
    ours, save=matmul, attention   kept   23.8 MiB  59.1%   peak   28.2 MiB  67.6%   time 198.3%   gradients equal
    ours, save=attention           kept    4.3 MiB  10.7%   peak   14.2 MiB  34.0%   time 187.1%   gradients equal

Saving by operator costs more time here than it saves. In eager mode torch intercepts each operator in Python, which on
layers this small takes longer than the operators. Use it with large layers or with the compiler, which intercepts once.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.clock import machine, now, use_one_thread
from lit_efficient import ActivationCheckpointing
from lit_efficient.application import apply
from lit_efficient.mechanisms.trials.memory import AllocationMeter


def llama(options: argparse.Namespace) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return transformers.LlamaForCausalLM(config).train().to(options.device)


def with_torch(net: nn.Module) -> None:
    """Call each layer through ``torch.utils.checkpoint.checkpoint``, as in torch's documentation."""
    for layer in net.model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, **kwargs
        )


class Contender:
    """Network with the seconds of its steps and the bytes of one step."""

    def __init__(self, net: nn.Module, ids: torch.Tensor) -> None:
        self.net = net
        self.ids = ids
        self.device = ids.device.type
        self.seconds: list[float] = []

    def loss(self) -> torch.Tensor:
        return self.net(input_ids=self.ids, labels=self.ids, use_cache=False).loss

    def step(self) -> None:
        self.net.zero_grad()
        start = now(self.device)
        self.loss().backward()
        self.seconds.append(now(self.device) - start)

    def measure(self) -> tuple[int, int]:
        """Return the bytes beyond the parameters after the forward pass, and at the peak, including gradients."""
        self.net.zero_grad()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            resident = torch.cuda.memory_allocated()
            loss = self.loss()
            kept = torch.cuda.memory_allocated() - resident
            loss.backward()
            return kept, torch.cuda.max_memory_allocated() - resident
        with AllocationMeter([*self.net.parameters(), *self.net.buffers()]) as meter:
            resident = meter.live
            loss = self.loss()
            kept = meter.live - resident
            loss.backward()
        return kept, meter.peak - resident

    def gradients(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.net.parameters()])


def ours(**arguments: object) -> Callable[[nn.Module], object]:
    return lambda net: apply(net, [ActivationCheckpointing(**arguments)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    use_one_thread()
    warnings.filterwarnings("ignore")
    ways: dict[str, Callable[[nn.Module], object]] = {
        "plain": lambda net: None,
        "transformers' own": lambda net: getattr(
            net, "activation_checkpointing_enable", net.gradient_checkpointing_enable
        )(),
        "torch's checkpoint": with_torch,
        "ours": ours(),
        "ours, every=2": ours(every=2),
        "ours, save=matmul, attention": ours(save=["matmul", "attention"]),
        "ours, save=attention": ours(save=["attention"]),
    }
    ids = torch.randint(256, (options.batch, options.length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(options.device)
    contenders: dict[str, Contender] = {}
    for name, change in ways.items():
        net = llama(options)
        change(net)
        contenders[name] = Contender(net, ids)
    for _ in range(options.steps + 1):
        for contender in contenders.values():
            contender.step()
    plain = contenders["plain"]
    size = f"{options.layers} layers of width {options.width}, {options.batch} rows of {options.length} tokens"
    print(f"{size}: {options.steps} steps, {machine(options.device)}")
    base = None
    for name, contender in contenders.items():
        same = torch.equal(contender.gradients(), plain.gradients())
        kept, peak = contender.measure()
        seconds = median(contender.seconds[1:])
        base = base or (kept, peak, seconds)
        print(
            f"{name:30} kept {kept / 2**20:6.1f} MiB {kept / base[0]:6.1%}   peak {peak / 2**20:6.1f} MiB "
            f"{peak / base[1]:6.1%}   time {seconds / base[2]:6.1%}   gradients {'equal' if same else 'DIFFER'}"
        )


if __name__ == "__main__":
    main()
