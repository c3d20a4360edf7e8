"""Compare our chunked cross-entropy with F.cross_entropy, torch's fused function and Liger's: memory and time.

    python -m benchmarks.cross_entropy [--tokens 2048] [--width 512] [--vocabularies 32000 128256 256000] [--chunks 256]
                                       [--only ours]

Measures one forward and backward pass of a language model's head without earlier gradients. Each pass runs in a
separate process after a warm-up on a small vocabulary. Rounds are interleaved, so that other load slows all contenders
alike. Memory is the growth of the resident set at its peak, beyond hidden states and weight (max_memory_allocated on a
GPU). Time is the median over rounds of the process's CPU time on one thread (of the device's time on a GPU). The line
`gradients` is the lower bound: (V + N) H numbers. The line `ours` has the chunks that are chosen for the device;
``--chunks`` are those of other lines. ``--only`` measures F.cross_entropy and the contenders that it names.

Output with `--vocabularies 32000 128256 --rounds 1 --only ours` on two CPUs of an AMD EPYC under other load, torch
2.13.0:

    2048 tokens, width 512, float32, cpu
    vocabulary 32,000
      gradients                       66 MiB  0.088 x
      F.cross_entropy                755 MiB  1.000 x       2.81 s   1.00 x
      ours                            79 MiB  0.105 x       3.04 s   1.08 x
    vocabulary 128,256
      gradients                      254 MiB  0.085 x
      F.cross_entropy               3011 MiB  1.000 x      11.16 s   1.00 x
      ours                           291 MiB  0.097 x      11.93 s   1.07 x

Target: with 128,256 entries at most a fifth of the peak of F.cross_entropy, in at most 1.1 times its time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.clock import use_one_thread
from lit_efficient.losses.chunked_cross_entropy import CHUNK_SIZE, chunked_cross_entropy
from lit_efficient.losses.liger_cross_entropy import installed

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
ROOT = Path(__file__).parent.parent
DENSE = "F.cross_entropy"


def dense(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels)


def torch_fused(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.linear_cross_entropy(hidden, weight, labels, options=torch.nn.LinearCrossEntropyOptions())


def torch_fused_in(chunk: int) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None)
        return F.linear_cross_entropy(hidden, weight, labels, options=options)

    return loss


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden, weight, labels, accum_dtype=torch.float32)


def ours_in(chunk: int | None, backend: str = "torch") -> Loss:
    return lambda *tensors: chunked_cross_entropy(*tensors, chunk_size=chunk, backend=backend)


def contenders(chunks: list[int], device: str) -> dict[str, Loss]:
    found: dict[str, Loss] = {DENSE: dense}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found["F.linear_cross_entropy"] = torch_fused
        found |= {f"  the same, chunks of {size}": torch_fused_in(size) for size in chunks}
    if device.startswith("cuda") and installed():
        found["Liger"] = liger
        found |= {f"ours, Liger's kernel, {size}": ours_in(size, "liger") for size in chunks}
    return found | {"ours": ours_in(None)} | {f"ours, chunks of {size}": ours_in(size) for size in chunks}


def step(loss: Loss, vocabulary: int, tokens: int, options: argparse.Namespace) -> Callable[[], None]:
    """Run a forward and backward pass on existing inputs, without larger temporaries."""
    torch.manual_seed(0)
    like = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    hidden = torch.empty(tokens, options.width, **like).normal_().requires_grad_()
    weight = torch.empty(vocabulary, options.width, **like).normal_(0, 0.02).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=options.device)
    return lambda: loss(hidden, weight, labels).backward()


def resident() -> int:
    """Return the process's largest resident set so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Return the bytes and seconds of one contender. Runs in a child process."""
    loss = contenders(options.chunks, options.device)[options.measure]
    step(loss, 1000, max(options.chunks), options)()  # threads, kernels and code are loaded
    run = step(loss, *options.vocabularies, options.tokens, options)
    if not options.device.startswith("cuda"):
        before = resident()
        start = time.process_time()
        run()
        return {"seconds": time.process_time() - start, "bytes": resident() - before}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - start, "bytes": torch.cuda.max_memory_allocated() - before}


def measured(name: str, vocabulary: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the result of :func:`measure` in a fresh process."""
    chunks = [str(size) for size in options.chunks]
    arguments = ["--measure", name, "--vocabularies", str(vocabulary), "--chunks", *chunks]
    for key in ("tokens", "width", "device", "dtype"):
        arguments += [f"--{key}", str(getattr(options, key))]
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.cross_entropy", *arguments],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(child.stdout)


def compare(vocabulary: int, options: argparse.Namespace) -> None:
    """Print the table of one vocabulary size."""
    names = list(contenders(options.chunks, options.device))
    if options.only:
        names = [DENSE, *options.only]
    found = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            found[name].append(measured(name, vocabulary, options))
    peaks = {name: median(one["bytes"] for one in rounds) for name, rounds in found.items()}
    times = {name: median(one["seconds"] for one in rounds) for name, rounds in found.items()}
    floor = (vocabulary + options.tokens) * options.width * getattr(torch, options.dtype).itemsize
    print(f"\nvocabulary {vocabulary:,}")
    print(f"  {'gradients':26} {floor / 2**20:7.0f} MiB  {floor / peaks[DENSE]:5.3f} x")
    for name in names:
        memory = f"{peaks[name] / 2**20:7.0f} MiB  {peaks[name] / peaks[DENSE]:5.3f} x"
        print(f"  {name:26} {memory}   {times[name]:8.2f} s  {times[name] / times[DENSE]:5.2f} x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_256, 256_000])
    parser.add_argument("--chunks", type=int, nargs="+", default=[CHUNK_SIZE])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders to measure beside F.cross_entropy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--measure", metavar="NAME", help="measure only this contender in this process, and print bytes and seconds"
    )
    options = parser.parse_args()
    use_one_thread()
    if options.measure is not None:
        print(json.dumps(measure(options)))
        return
    setting = f"{options.tokens} tokens, width {options.width}, {options.dtype}, {options.device}"
    print(f"{setting}, torch {torch.__version__}")
    for vocabulary in options.vocabularies:
        compare(vocabulary, options)


if __name__ == "__main__":
    main()
