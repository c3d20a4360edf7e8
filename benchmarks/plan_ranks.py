"""Compare `plan` for two devices with the memory of each of two processes: DDP, our DDP strategy, and FSDP2 shards.

    python -m benchmarks.plan_ranks            four small trainings in each strategy, with gloo on a CPU

The memory of a process is read from malloc after each operator of the third and fourth step. Counting tensors would not
be enough: DDP's buckets are not Python tensors, FSDP2 resizes storages without an operator, and gloo frees memory in
its own threads. Only blocks of 16 KiB or more are counted, in whole pages. The part of them that is not tensors is
taken from a fit of one process.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import socket
import sys
import warnings
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lit_efficient as le
from benchmarks.clock import use_one_thread
from benchmarks.plan_cells import MODELS, Cell, CellFit, Size
from benchmarks.plan_truth import FIRST, LAST
from lit_efficient.evidence.planning.plan_devices import gathered_bytes, per_device
from lit_efficient.internals.lightning_strategies import traits_named

RANKS = 2
_LIBC = ctypes.CDLL("libc.so.6")
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
STRATEGIES: dict[str, Any] = {
    "DDPStrategy": {"class_path": "lightning.pytorch.strategies.DDPStrategy"},
    "ReplicatedStrategy": {"class_path": "lit_efficient.ReplicatedStrategy"},
    "ShardedStrategy": {"class_path": "lit_efficient.ShardedStrategy"},
}
CELLS = (
    Cell("Llama", (), 4, "32-true", Size(192, 3, 64, 4096)),
    Cell("Llama", ("LoRA",), 4, "32-true", Size(192, 3, 64, 4096)),
    Cell("ViT", (), 8, "32-true", Size(192, 6, 32)),
    Cell("GPT", (), 2, "bf16-mixed", Size(128, 4, 32, 512)),
)


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", *"abcde")]


_LIBC.mallinfo2.restype = _Mallinfo


def _held() -> int:
    """Return the bytes of large blocks that this process has allocated, whichever thread frees them."""
    return int(_LIBC.mallinfo2().hblkhd)


class Watch(TorchDispatchMode, L.Callback):
    """Callback that records the bytes between steps and at the peak of two steps, beyond the bytes at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.before = _held()
        self.found = dict[str, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found["peak"] = max(self.found["peak"], _held() - self.before)
        return result

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == FIRST:
            gc.collect()
            self.found = dict.fromkeys(("resident", "peak"), _held() - self.before)
            self.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == LAST and self.found:
            self.__exit__(None, None, None)


def _rank(cell: Cell, strategy: str, rank: int, port: int, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "a"}
    rows = MODELS[cell.model].rows(cell.size)
    kind = getattr(le, strategy, None) or getattr(L.strategies, strategy, None)
    _LIBC.mallopt(_M_MMAP_THRESHOLD, 16 * 1024)
    _LIBC.mallopt(_M_MMAP_MAX, 1_000_000)
    watch = Watch()
    fit = CellFit(cell, rows).make()
    trainer = L.Trainer(
        callbacks=[*(one for one in fit.trainer.callbacks if isinstance(one, le.Technique)), watch],
        strategy=kind() if kind else "auto",
        accelerator="cpu",
        devices=RANKS if kind else 1,
        precision=cell.precision,
        max_steps=LAST + 1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(fit.module, fit.data)
    pipe.send(watch.found)
    if kind:
        torch.distributed.barrier()
    os._exit(0)


def measured(cell: Cell, strategy: str) -> dict[str, int]:
    """Return the largest bytes of any process. Without a strategy, run one process."""
    ranks = RANKS if strategy else 1
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(cell, strategy, rank, port, pipes[rank][1])) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    found = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join()
    return {key: max(one[key] for one in found) for key in found[0]}


def planned(cell: Cell, strategy: str) -> dict[str, int]:
    """Return the plan for one of the devices."""
    traits = traits_named(STRATEGIES[strategy])
    kept = []

    class Kept(CellFit):
        def make(self, *change: Any) -> Any:
            kept.append(super().make(*change))
            return kept[-1]

    alone = le.plan(Kept(cell, MODELS[cell.model].rows(cell.size)))
    gathered = gathered_bytes(kept[-1].module, traits, cell.precision) if traits.shards else 0
    found = per_device(alone, RANKS, traits, gathered)
    own = sum(alone.resident.values())
    return {"resident": sum(found.resident.values()), "peak": found.peak, "alone": own}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    options = parser.parse_args()
    use_one_thread()
    rows = []
    for cell in CELLS:
        other = None
        for strategy in STRATEGIES:
            name = f"{cell.name}, {strategy}"
            if not any(word in name for word in options.only):
                continue
            plan = planned(cell, strategy)
            other = other or measured(cell, "")["resident"] - plan["alone"]  # what is no tensor
            count = {key: size - other for key, size in measured(cell, strategy).items()}
            errors = {key: round(100 * (plan[key] / count[key] - 1), 2) for key in count}
            rows.append({"name": name, "planned": plan, "measured": count, "errors": errors})
            print(f"{name:70} " + ", ".join(f"{key} {plan[key]:,} / {count[key]:,} {errors[key]:+} %" for key in count))
            sys.stdout.flush()
    print("RESULT " + json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
