"""Compare our adapters with peft's methods on a small Llama, in the manner of peft's method comparison.

    python -m benchmarks.adapters [--steps 30] [--only LoRA LOKR] [--device cpu] [--out runs/adapters.jsonl] [--write]

The base model is trained on the bytes of Python's standard library. Each adapter is then trained on this repository's
documents, on the same rows, at the better of two learning rates. One line for each method gives:

- the trainable parameters and their bytes,
- the peak bytes of a step beyond the base (all tensors are counted; on a GPU the allocator reports them),
- the median time of a step relative to our LoRA, whose steps alternate with the method's at the first rate,
- the loss on held-out documents.

Each line is appended to ``--out`` when it is measured, and is not measured again. ``--write`` copies the lines into
benchmarks/records/figures.json. A document shows them between the markers of the table ``adapters``.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import textwrap
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.clock import machine, now, use_one_thread
from lit_efficient import IA3, LoRA, PeftAdapter, QuantizeBase
from lit_efficient.application import apply
from lit_efficient.mechanisms.trials.memory import AllocationMeter

ROOT = Path(__file__).parent.parent
WIDTH = 128
LAYERS = 4
LENGTH = 128
ROWS = 8
RANK = 8
RATES = (1e-3, 5e-3)
LOSS = "{loss_before:.3f} → {loss:.3f}"
OURS: dict[str, Any] = {
    "LoRA": lambda: [LoRA(rank=RANK)],
    "LoRA, rslora": lambda: [LoRA(rank=RANK, variant="rslora")],
    "LoRA, dora": lambda: [LoRA(rank=RANK, variant="dora")],
    "LoRA, pissa": lambda: [LoRA(rank=RANK, variant="pissa")],
    "IA3": lambda: [IA3()],
    "QLoRA (nf4)": lambda: [QuantizeBase("nf4"), LoRA(rank=RANK)],
    "QA-LoRA (int4)": lambda: [QuantizeBase("int4"), LoRA(rank=RANK, variant="qalora")],
    "LoRA, rounded (int4)": lambda: [QuantizeBase("int4"), LoRA(rank=RANK, variant="rounded")],
}
PEFTS: dict[str, dict[str, Any]] = {  # where peft's own defaults do not fit layers this small
    "LORA": {"r": RANK}, "LOKR": {"r": RANK}, "LOHA": {"r": RANK}, "OFT": {"oft_block_size": 16},
    "BOFT": {"boft_block_size": 16}, "HRA": {"r": RANK}, "HIRA": {"r": RANK}, "MISS": {"r": RANK},
    "RANDLORA": {"r": RANK}, "ROAD": {"group_size": 32}, "DELORA": {"r": RANK}, "C3A": {"block_size": 16},
    "FOURIERFT": {"n_frequency": 500}, "WAVEFT": {"n_frequency": 500}, "SHIRA": {"r": RANK}, "GRALORA": {"r": RANK},
    "VERA": {"r": 64}, "VBLORA": {"r": 4, "num_vectors": 64, "vector_length": 64},
    "LN_TUNING": {"target_modules": ["input_layernorm", "post_attention_layernorm"]},
}  # fmt: skip


def rows(text: bytes, device: str) -> torch.Tensor:
    """Return the bytes of a text as rows of tokens."""
    count = len(text) // LENGTH
    return torch.frombuffer(bytearray(text[: count * LENGTH]), dtype=torch.uint8).long().view(count, LENGTH).to(device)


def llama(device: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train().to(device)


def loss_of(net: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return net(input_ids=ids, labels=ids, use_cache=False).loss


class Contender:
    """Network with an adapter, its optimizer, and the times of its steps."""

    def __init__(self, name: str, base: nn.Module, rate: float) -> None:
        self.name = name
        self.net = nn.ModuleDict({"net": copy.deepcopy(base)})
        fields = {"peft_type": name, "target_modules": "all-linear", **PEFTS.get(name, {})}
        apply(self.net, OURS[name]() if name in OURS else [PeftAdapter(fields)])
        self.trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=rate, weight_decay=0.0)
        self.seconds: list[float] = []
        self.peak = 0

    def step(self, ids: torch.Tensor) -> None:
        start = now(ids.device.type)
        self.optimizer.zero_grad()
        loss_of(self.net["net"], ids).backward()
        self.optimizer.step()
        self.seconds.append(now(ids.device.type) - start)

    def measure(self, ids: torch.Tensor) -> None:
        """Return the peak bytes of one step, including the parameters and optimizer states of the adapter."""
        frozen = sum(p.nbytes for p in self.net.parameters() if not p.requires_grad)
        if ids.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            resident = torch.cuda.memory_allocated()
            self.step(ids)
            self.peak = torch.cuda.max_memory_allocated() - resident
            return
        with AllocationMeter([*self.net.parameters(), *self.net.buffers()]) as meter:
            self.step(ids)
        self.peak = meter.peak - frozen

    @torch.no_grad()
    def held_out(self, ids: torch.Tensor) -> float:
        return float(loss_of(self.net["net"].eval(), ids))


def trained_base(learn: torch.Tensor, steps: int, device: str, path: Path) -> nn.Module:
    """Return the trained base. Load it from a file if an earlier run has trained it."""
    base = llama(device)
    if path.exists():
        base.load_state_dict(torch.load(path, map_location=device, weights_only=True))
        return base
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
    for i in range(steps):
        batch = learn[torch.arange(i * ROWS, (i + 1) * ROWS) % len(learn)]
        optimizer.zero_grad()
        loss_of(base, batch).backward()
        optimizer.step()
    torch.save(base.state_dict(), path)
    return base


def found_of(name: str, base: nn.Module, documents: torch.Tensor, held: torch.Tensor, steps: int) -> dict[str, Any]:
    """Return the figures of one method at the better of the two learning rates."""
    best: dict[str, Any] = {}
    usual = Contender("LoRA", base, RATES[0])
    ratio = 0.0
    for rate in RATES:
        one = Contender(name, base, rate)
        for i in range(steps):
            batch = documents[torch.arange(i * ROWS, (i + 1) * ROWS) % len(documents)]
            one.step(batch)
            if rate == RATES[0]:
                usual.step(batch)
        ratio = ratio or median(one.seconds) / median(usual.seconds)
        one.measure(documents[:ROWS])
        loss = round(one.held_out(held), 3)
        if not best or loss < best["loss"]:
            sizes = {"parameters": sum(p.numel() for p in one.trained), "bytes": sum(p.nbytes for p in one.trained)}
            best = {**sizes, "peak": round(one.peak / 2**20, 2), "step": 0.0, "loss": loss, "rate": rate}
    return best | {"step": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--base-steps", type=int, default=150)
    parser.add_argument("--only", nargs="+", choices=[*OURS, *PEFTS])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "adapters.jsonl")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    use_one_thread()
    warnings.simplefilter("ignore")
    print(machine(options.device), flush=True)
    code = "".join(inspect.getsource(module) for module in (argparse, textwrap, inspect)).encode()
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    learn = rows(code, options.device)
    documents = rows(text, options.device)
    held = documents[::10]
    documents = torch.cat([documents[i::10] for i in range(1, 10)])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"steps": options.steps, "base_steps": options.base_steps, "device": options.device}
    path = options.out.with_suffix(f".{options.base_steps}.{options.device}.pt")
    base = trained_base(learn, options.base_steps, options.device, path)
    with torch.no_grad():
        before = round(float(loss_of(base.eval(), held)), 3)
    base.train()
    print(f"base: loss {before:.3f} on held-out documents", flush=True)
    settings["loss_before"] = before  # of other documents, or another base, it is another one

    lines = options.out.read_text("utf-8").splitlines() if options.out.exists() else []
    known = {row["name"]: row["figures"] for row in map(json.loads, lines) if row["settings"] == settings}
    print("method                   trains   adapter B     peak MiB    step   loss    rate", flush=True)
    for name in options.only or [*OURS, *PEFTS]:
        if name not in known:
            known[name] = found_of(name, base, documents, held, options.steps)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"name": name, "settings": settings, "figures": known[name]}) + "\n")
        figures = known[name]
        print(
            f"{name:22} {figures['parameters']:8,} {figures['bytes']:11,} {figures['peak']:12.2f} "
            f"{figures['step']:7.2f} {figures['loss']:6.3f} {figures['rate']:7.0e}",
            flush=True,
        )
    if options.write:
        write([(name, known[name]) for name in (*OURS, *PEFTS) if name in known], before)


def write(records: list[tuple[str, dict[str, Any]]], before: float) -> None:
    """Write the table ``adapters`` into figures.json and replace the earlier table."""
    from figures import here

    path = Path(__file__).parent / "records" / "figures.json"
    source = json.loads(path.read_text("utf-8"))
    source["tables"]["adapters"] = [
        "Method",
        "Trains",
        "Adapter",
        "Peak beyond the base",
        "Time of a step",
        "Loss",
        "Rate",
    ]
    now_here = here()
    environment = {key: now_here[key] for key in ("versions", "machine")}
    source["environments"]["adapters"] = environment
    kept = [record for record in source["records"] if record.get("table") != "adapters"]
    for name, figures in records:
        shown = f"`{name}`" if name in OURS else f"`PeftAdapter`, {name}"
        kept.append(
            {
                "id": f"adapters/{name}",
                "table": "adapters",
                "command": "python -m benchmarks.adapters",
                "unit": "bytes; MiB; times LoRA's; nats a byte",
                "figures": figures | {"loss_before": round(before, 3)},
                "date": now_here["date"],
                "threads": 1,
                "environment": "adapters",
                "cells": [shown, "{parameters:,}", "{bytes:,} B", "{peak} MiB", "{step:.2f}", LOSS, "{rate:g}"],
            }
        )
    source["records"] = kept
    path.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print("To update the documents, run: python -m benchmarks.figures --write")


if __name__ == "__main__":
    main()
