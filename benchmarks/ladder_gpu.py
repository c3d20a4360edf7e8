"""Train a network in the shape of Llama-3.2-3B on one GPU, with one more technique on each rung.

    python -m benchmarks.ladder_gpu base LoRA       rungs, one after the other in this process; without names all
    python -m benchmarks.ladder_gpu --list
    python -m benchmarks.ladder_gpu '8B QLoRA, 2k' --profile       also where the time of a step goes
    python -m benchmarks.ladder_gpu base --device cpu --tiny       test that the rung runs, on a tiny network

Further rungs train the shape of an 8B model and search for the longest context. Weights are random bfloat16, the
optimizer is AdamW, and rows have 4,096 tokens. The output is:

- the peak of the allocator,
- tokens per second (two warm-up steps, three timed steps),
- the utilisation of the device's dense bfloat16 peak, at 6 N T operations, if that peak is known.

A rung that runs out of memory reports this and exits with status 0. A limit in GiB is set in the allocator to emulate
a smaller card. The longest context is extrapolated from the peaks at two lengths, because the peak grows linearly. If
the extrapolated step takes less than 45 s, it is run; the result records whether it was. Rungs of one process share its
imports and compiled kernels, and not its memory. With ``--seconds`` no rung is begun that would usually end later.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lit_efficient as le

SHAPES = {
    "3B": {"dim": 3072, "depth": 28, "num_heads": 24, "num_kv_heads": 8, "hidden_dim": 8192, "tie_embeddings": True},
    "8B": {"dim": 4096, "depth": 32, "num_heads": 32, "num_kv_heads": 8, "hidden_dim": 14336, "tie_embeddings": False},
    # FLUX.1-dev's transformer; 512 pixels are 1,024 tokens of the image beside 512 of the text
    "flux": {"num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24},
    "tiny": {"dim": 128, "depth": 4, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 256, "tie_embeddings": True},
}
VOCABULARY = 128_256
DENSE_PEAK = {"H200": 9.9e14, "H100": 9.9e14, "A100": 3.12e14}  # FLOP/s in bfloat16 without sparsity, by the vendor


@dataclass(frozen=True)
class Rung:
    """One training of the ladder.

    Args:
        techniques: Function that returns the techniques.
        expected: Expected peak and speed, with their source.
        shape: A key of `SHAPES`.
        batch: Number of rows in a batch.
        length: Number of tokens in a row.
        packed: Number of documents in a row.
        limit_gib: Memory limit of the allocator, in GiB.
        longest: Whether to find the longest rows that fit.
        needs: Packages that the rung requires.
        usual: Seconds that the rung usually takes in a process that has run others.
    """

    techniques: Callable[[], list[Any]] = list
    expected: str = ""
    shape: str = "3B"
    batch: int = 2
    length: int = 4096
    packed: int = 1
    limit_gib: float | None = None
    longest: bool = False
    needs: tuple[str, ...] = ()
    usual: float = 15


def small() -> list[Any]:
    """Return the techniques with the least activation memory: no logits, recomputed blocks."""
    return [le.ChunkedCrossEntropy(), le.ActivationCheckpointing()]


def qlora() -> list[Any]:
    return [*small(), le.QuantizeBase(skip=("head",)), le.LoRA(rank=16)]


def longest() -> list[Any]:
    return [*qlora(), le.ActivationOffload()]


def tiled() -> list[Any]:
    return [*longest(), le.TiledMLP()]


def swapped() -> list[Any]:
    return [le.ActivationCheckpointing(), le.BlockSwap(), le.LoRA(rank=16)]


def float8() -> list[Any]:
    return [*small(), le.Compile(), le.Float8Precision(skip=("head",))]


BNB = ("bitsandbytes",)
RUNGS = {
    "base": Rung(expected="3.21 B x 8 bytes = 24 GiB of weights, gradients, moments; 3.9 GiB a copy of float32 logits"),
    "packed": Rung(packed=8, expected="base, plus a mask of 2 x 4096 x 4096; not the memory of float scores"),
    "chunked loss": Rung(lambda: [le.ChunkedCrossEntropy()], "base less 2 to 3 copies of the logits (8 to 12 GiB)"),
    "checkpointing": Rung(small, "24 GiB, 28 inputs of blocks (1.3 GiB) and one block; a third more time"),
    "compile": Rung(lambda: [*small(), le.Compile()], "checkpointing's memory or less, faster", usual=60),
    "float8": Rung(float8, "compile's memory; linear layers up to twice as fast", needs=("torchao",), usual=60),
    "optimizer in backward": Rung(
        lambda: [*small(), le.OptimizerInBackward()], "checkpointing less 6 GiB of gradients, plus one layer's"
    ),
    "activation offload": Rung(
        lambda: [le.ChunkedCrossEntropy(), le.ActivationOffload()],
        "chunked loss less the activations of all blocks but two, which are 16 GiB a way: the bus takes longer than "
        "the blocks",
    ),
    "checkpointing, offloaded": Rung(
        lambda: [*small(), le.ActivationOffload()],
        "checkpointing less 1.3 GiB, hidden behind the blocks; torchtune: -5.5 % of memory, -0.1 % of speed",
    ),
    "offloaded or recomputed": Rung(
        lambda: [*small(), le.ActivationOffload(flops_per_byte=8000)],
        "between checkpointing and chunked loss in memory and speed: about every third block is offloaded",
    ),
    "GaLore": Rung(lambda: [*small(), le.GaLore(rank=128)], "checkpointing less about 10 GiB of moments"),
    "8-bit AdamW": Rung(
        lambda: [*small(), le.LowBitOptimizer()], "checkpointing less 2 x 0.98 bytes x 3.21 B = 5.9 GiB", needs=BNB
    ),
    "offload": Rung(
        lambda: [*small(), le.OffloadOptimizer()],
        "checkpointing less 12 GiB, plus two pieces of 256 MB; 26 GB over the bus: about 0.5 s a step at 50 GB/s",
    ),
    "LoRA": Rung(lambda: [*small(), le.LoRA(rank=16)], "6.0 GiB of weights, activations; torchtune on an A100 8.5 GiB"),
    "QLoRA": Rung(qlora, "2.0 GiB of weights, activations; torchtune on an A100 4.6 GiB", needs=BNB),
    "block swap": Rung(
        lambda: [le.ChunkedCrossEntropy(), *swapped()],
        "LoRA less 28 blocks' 5.3 GiB, plus two blocks; 11 GB over the bus a step",
    ),
    "8B QLoRA, 2k": Rung(qlora, "torchtune 7.4 GiB", shape="8B", batch=1, length=2048, needs=BNB),
    "8B full": Rung(small, "8.03 B x 8 bytes = 60 GiB: fits 80 GiB by little", shape="8B"),
    "8B QLoRA, 24 GiB": Rung(
        longest, "longest context; unsloth 78k", shape="8B", batch=1, limit_gib=24, longest=True, needs=BNB, usual=70
    ),
    "8B QLoRA, 80 GiB": Rung(
        longest, "longest context; unsloth 343k", shape="8B", batch=1, limit_gib=80, longest=True, needs=BNB, usual=70
    ),
    "8B QLoRA in tiles, 24 GiB": Rung(
        tiled,
        "8B QLoRA, 24 GiB, with rows about 3 times as long (by plan)",
        "8B",
        1,
        limit_gib=24,
        longest=True,
        needs=BNB,
        usual=70,
    ),
    "8B QLoRA in tiles, 80 GiB": Rung(
        tiled,
        "8B QLoRA, 80 GiB, with rows about 3 times as long (by plan)",
        "8B",
        1,
        limit_gib=80,
        longest=True,
        needs=BNB,
        usual=70,
    ),
    "Flux LoRA, 512 px, 8 GiB": Rung(
        swapped, "kohya trains it in 8 GB", shape="flux", batch=1, length=1024, limit_gib=8, needs=("diffusers",)
    ),
}


def decoder(shape: str) -> Any:
    """Return our GPT on the meta device."""
    vocabulary = VOCABULARY if shape != "tiny" else 512
    return le.GPT(le.GPTConfig(vocab_size=vocabulary, max_length=2**21, **SHAPES[shape]))


def flux(shape: str) -> Any:
    """Return diffusers' transformer of FLUX.1-dev on the meta device."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(guidance_embeds=True, **SHAPES[shape])


class Climb:
    """Network with its techniques and optimizer, on the device."""

    def __init__(self, rung: Rung, device: str) -> None:
        import torch

        from lit_efficient.application import apply
        from lit_efficient.declaration import in_order, overrides

        self.rung = rung
        self.device = device
        techniques = in_order(rung.techniques())
        with torch.device("meta"):
            net = (flux if rung.shape == "flux" else decoder)(rung.shape).to(torch.bfloat16)
        swaps = any(isinstance(technique, le.BlockSwap) for technique in techniques)
        net = net.to_empty(device="cpu" if swaps else device)
        if getattr(net.config, "tie_embeddings", False):
            net.head.weight = net.embedding.weight
        for p in net.parameters():  # drawn on the device, wherever they are to live
            p.data.copy_(torch.ones((), device=device) if p.ndim == 1 else 0.02 * torch.randn(p.shape, device=device))
        self.parameters = sum(p.numel() for p in net.parameters())
        apply(net, techniques)
        self.net = net.to(device).train()
        trained = [p for p in net.parameters() if p.requires_grad]
        self.full = sum(p.numel() for p in trained) == self.parameters
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        for technique in techniques:
            if overrides(technique, "rewrite_optimizer"):
                technique.rewrite_optimizer(self.optimizer, net)

    def loss(self, length: int) -> Any:
        import torch

        generator = torch.Generator(self.device).manual_seed(0)
        if self.rung.shape == "flux":
            made = {"generator": generator, "device": self.device, "dtype": torch.bfloat16}
            image = torch.randn(1, length, 64, **made)
            text = torch.randn(1, 512, 4096, **made)
            given = {"pooled_projections": torch.randn(1, 768, **made), "timestep": torch.rand(1, **made)}
            given |= {"guidance": torch.rand(1, **made), "img_ids": torch.zeros(length, 3, device=self.device)}
            given |= {"txt_ids": torch.zeros(512, 3, device=self.device)}
            return self.net(image, encoder_hidden_states=text, return_dict=False, **given)[0].float().square().mean()
        shape = (self.rung.batch, length)
        ids = torch.randint(self.net.config.vocab_size, shape, generator=generator, device=self.device)
        extra = {}
        if self.rung.packed > 1:
            positions = torch.arange(length, device=self.device) % (length // self.rung.packed)
            extra["position_ids"] = positions.expand(self.rung.batch, -1)
        losses = self.net(ids, labels=ids.roll(-1, 1), **extra)
        # The gradient of a sum is one number for all tokens, which ChunkedCrossEntropy sees without reading it. The
        # gradient of `losses.mean()` is a tensor, for which it would compute all logits a second time.
        return losses.sum() / losses.numel()

    def step(self, length: int) -> None:
        import torch

        def closure() -> Any:
            self.optimizer.zero_grad()
            with torch.autocast(self.device, torch.bfloat16):
                loss = self.loss(length)
            loss.backward()
            return loss

        self.optimizer.step(closure)
        self.optimizer.zero_grad()

    def profile(self, length: int) -> str:
        """Return a table of the operators and kernels that take most of a step's time, on the CPU and on the device."""
        import torch

        with torch.profiler.profile() as profiler:
            self.step(length)
        order = "self_device_time_total" if self.device == "cuda" else "self_cpu_time_total"
        averages = profiler.key_averages()
        tables = [averages.table(sort_by=key, row_limit=15) for key in dict.fromkeys([order, "self_cpu_time_total"])]
        return "\n".join(tables)

    def measure(self, length: int, steps: int = 3, warm: int = 2) -> dict[str, Any]:
        import torch

        from benchmarks.clock import now

        cuda = self.device == "cuda"
        for _ in range(warm):
            self.step(length)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        start = now(self.device)
        for _ in range(steps):
            self.step(length)
        seconds = (now(self.device) - start) / steps
        tokens = self.rung.batch * length / seconds
        found = {"length": length, "tokens_a_second": round(tokens), "seconds_a_step": round(seconds, 3)}
        if cuda:
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            name = torch.cuda.get_device_name()
            peak = next((value for key, value in DENSE_PEAK.items() if key in name), None)
            if peak and self.full:
                found["share_of_peak"] = round(6 * self.parameters * tokens / peak, 3)
        return found


def climb(name: str, rung: Rung, device: str, profile: bool = False) -> dict[str, Any]:
    """Return the figures of a rung. With ``longest``, return those of the longest rows that fit."""
    import torch

    cuda = device == "cuda"
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        limit = total if rung.limit_gib is None else rung.limit_gib * 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    found: dict[str, Any] = {}
    top = None
    try:
        top = Climb(rung, device)
        if rung.longest and rung.limit_gib and cuda:
            found = find_longest(top, rung.limit_gib, name)
        else:
            found = top.measure(rung.length)
        if profile:
            print(top.profile(rung.length), flush=True)
    except torch.OutOfMemoryError as error:
        found["does not fit"] = str(error).splitlines()[0][:200]
    finally:
        del top
        release(cuda)
    return found


def release(cuda: bool) -> None:
    """Free the memory of a rung before the next one."""
    import torch

    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


def say(name: str, figures: dict[str, Any], done: bool) -> None:
    """Print figures of a rung for the driver, which reads them also if the process ends before ``done``."""
    print("RESULT " + json.dumps({"rung": name, "done": done, **figures}), flush=True)


def find_longest(top: Climb, limit_gib: float, name: str = "") -> dict[str, Any]:
    """Return the longest row length, extrapolated from two lengths, with the figures of the longest step run."""
    import torch

    short = top.measure(8192, steps=3, warm=1)
    say(name, short, done=False)
    long = top.measure(24576, steps=3, warm=1)
    distance = long["length"] - short["length"]
    slope = (long["peak_gib"] - short["peak_gib"]) / distance
    reserve = 0.02 * limit_gib + 0.3  # what the allocator loses between its pieces
    length = int((limit_gib - reserve - long["peak_gib"]) / slope + long["length"]) // 1024 * 1024
    a_token, b_token = (row["seconds_a_step"] / row["length"] for row in (short, long))
    square = (b_token - a_token) / distance
    seconds = length * (a_token + square * (length - short["length"]))
    by = [{key: row[key] for key in ("length", "peak_gib", "seconds_a_step")} for row in (short, long)]
    found = {**long, "longest by two lengths": length, "seconds expected": round(seconds), "by": by}
    for _ in range(3):
        if seconds > 45:
            return found
        say(name, found, done=False)
        torch.cuda.empty_cache()
        try:
            return {**found, **top.measure(length, steps=1, warm=0), "longest was run": True}
        except torch.OutOfMemoryError:
            top.optimizer.zero_grad()
            length = int(0.96 * length) // 1024 * 1024
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rungs", nargs="*", metavar="RUNG", help=", ".join(RUNGS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no rung that usually ends later")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a rung ends the process")
    options = parser.parse_args()
    unknown = [name for name in options.rungs if name not in RUNGS]
    if unknown:
        parser.error(f"there is no rung {unknown[0]!r}; --list names them")
    if options.list:
        print("\n".join(f"{name:20} {rung.expected}" for name, rung in RUNGS.items()))
        return 0
    begin = time.monotonic()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for name in options.rungs or RUNGS:
        rung = RUNGS[name]
        if options.tiny:
            rung = replace(rung, shape="tiny", length=64, longest=False)
        if time.monotonic() - begin + rung.usual > options.seconds:
            print(f"{name}: left out, as {options.seconds:g} seconds are nearly over", flush=True)
            return 0
        faulthandler.dump_traceback_later(options.limit, exit=True)
        for package in ("torch", "lit_efficient.application", *rung.needs):
            importlib.import_module(package)
        say(name, climb(name, rung, options.device, options.profile), done=True)
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
