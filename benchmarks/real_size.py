"""Host memory at the shapes of real models, ideal beside measured.

    python -m benchmarks.real_size [--layers N] [--cases qlora,merge,slices,shards]

The shapes of Llama 3.2 1B are drawn from a seed in bfloat16 and written to a folder once; each case then runs in a
process of its own, whose peak of anonymous memory is read (pages of files that are mapped can be dropped at any time).

    qlora    read the folder, quantise to NF4 on the way, put adapters beside it
    save     its checkpoint
    merge    export --format merged of that checkpoint, without the check
    slices   give an empty network the weights of the folder
    shards   two processes under ShardedStrategy, to where training begins: each reads its slices of the base, below
             adapters in bfloat16 or in NF4 (each layer is quantised whole); the larger peak, beside what it holds

Needs about 5 GiB of memory and 6 GB of disk with all 16 layers; fewer are the same shapes, 23 are 3 GiB.
"""

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
RANK = 16


def anonymous() -> float:
    """MiB of this process that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def peak_of(work: Callable[[], object]) -> float:
    """MiB by which ``work`` raised the peak."""
    before, found, over = anonymous(), [0.0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            found[0] = max(found[0], anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        over.set()
        watcher.join()
    return max(found[0], anonymous()) - before


def sizes(layers: int) -> dict[str, float]:
    """MiB: the embeddings and norms, all linear layers, and the largest of these, at a byte a weight."""
    h, f = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    heads = h + 2 * h * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"] + h
    rest = SHAPE["vocab_size"] * h + (2 * layers + 1) * h
    return {"rest": rest / 2**20, "linear": layers * (h * heads + 3 * h * f) / 2**20, "layer": h * f / 2**20}


def write_base(folder: Path, layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, dtype="bfloat16")
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="1GB")


def qlora(folder: Path, layers: int) -> dict[str, list[float]]:
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lit_efficient import CausalLMConfig, LanguageModeling, LoRA, QuantizeBase

    size, task = sizes(layers), LanguageModeling(CausalLMConfig(str(folder / "base"), dtype="bfloat16"))
    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}]
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_steps=1, accelerator="cpu", callbacks=[QuantizeBase(), LoRA(rank=RANK)],
                      enable_checkpointing=False, **quiet)  # fmt: skip
    loader = DataLoader(rows, batch_size=1)
    # bfloat16, and 0.52 bytes a weight; one layer on its way in bfloat16 and float32
    fit = peak_of(lambda: trainer.fit(task, loader))
    save = peak_of(lambda: trainer.save_checkpoint(folder / "run.ckpt"))
    return {"qlora": [2 * size["rest"] + 0.52 * size["linear"] + 6 * size["layer"], fit], "save": [0.0, save]}


def merge(folder: Path, layers: int) -> dict[str, list[float]]:
    from lit_efficient.export.adapters import export_checkpoint

    size = sizes(layers)
    measured = peak_of(lambda: export_checkpoint(folder / "run.ckpt", folder / "merged", "merged", check=False))
    return {"merge": [2 * (size["rest"] + size["linear"]), measured]}


def slices(folder: Path, layers: int) -> dict[str, list[float]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lit_efficient.models.weight_slices import load_slices

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "base"), dtype=torch.bfloat16)
    size = sizes(layers)

    def load() -> None:
        model.to_empty(device="cpu")
        model.tie_weights()
        load_slices(model, folder / "base")

    return {"slices": [2 * (size["rest"] + size["linear"]), peak_of(load)]}


def _rank(folder: Path, quantized: bool, rank: int, port: int, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lit_efficient import CausalLMConfig, LanguageModeling, LoRA, QuantizeBase, ShardedStrategy
    from lit_efficient.surgery import local

    task = LanguageModeling(CausalLMConfig(str(folder / "base"), dtype="bfloat16"))
    loader = DataLoader([{"input_ids": torch.arange(4), "labels": torch.arange(4)}], batch_size=1)
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    techniques: list[Any] = [*([QuantizeBase()] if quantized else []), LoRA(rank=RANK)]
    trainer = Trainer(max_steps=0, accelerator="cpu", devices=2, strategy=ShardedStrategy(), callbacks=techniques,
                      enable_checkpointing=False, **quiet)  # fmt: skip
    measured = peak_of(lambda: trainer.fit(task, loader))
    held = sum(local(p).nbytes for p in task.parameters())
    states = [part.quant_state for part in task.modules() if getattr(part, "quant_state", None) is not None]
    held += sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in states)
    results.put([held / 2**20, measured])


def shards(folder: Path, layers: int) -> dict[str, list[float]]:
    context, found = multiprocessing.get_context("spawn"), {}
    for name, quantized in (("shards", False), ("shards of codes", True)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        results = context.Queue()
        ranks = [context.Process(target=_rank, args=(folder, quantized, rank, port, results)) for rank in (0, 1)]
        for each in ranks:
            each.start()
        found[name] = max((results.get(timeout=3000) for _ in ranks), key=lambda one: one[1])
        for each in ranks:
            each.join()
    return found


def _case(work: Callable[[Path, int], Any], folder: Path, layers: int, results: Any) -> None:
    results.put(work(folder, layers))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--cases", default="qlora,merge,slices,shards")
    asked = parser.parse_args()
    layers = asked.layers
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = context.Process(target=write_base, args=(folder / "base", layers))
        writer.start()
        writer.join()
        found: dict[str, list[float]] = {}
        for work in [work for work in (qlora, merge, slices, shards) if work.__name__ in asked.cases.split(",")]:
            results = context.Queue()
            process = context.Process(target=_case, args=(work, folder, layers, results))
            process.start()
            process.join()
            found |= results.get(timeout=1) if process.exitcode == 0 else {work.__name__: [0.0, 0.0]}
        print(f"{'case':<15}  ideal MiB  measured MiB")
        for case, (ideal, measured) in found.items():
            print(f"{case:<15} {ideal:>10.0f}  {measured:>12.0f}")
        print(json.dumps({"layers": layers, **found}))


if __name__ == "__main__":
    main()
