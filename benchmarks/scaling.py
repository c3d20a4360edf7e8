"""Count the bytes sent, the memory and the steps of strong and weak scaling on 1, 2 and 4 processes.

    python -m benchmarks.scaling [--processes 2 4] [--json]
    python -m benchmarks.scaling --needs    compute the needs of 8, 64 and 1,024 GPUs by docs/scaling.md

A small GPT takes four steps of AdamW. Bytes are computed from the inputs of collectives for a ring algorithm: each of n
processes sends 2 (n-1)/n of the bytes of an all-reduce, and (n-1)/n of those of an all-gather or reduce-scatter. The
ideal is one all-reduce of the gradients (DDP; half the bytes in bfloat16), or two all-gathers of the weights and one
reduce-scatter of the gradients (FSDP2). Memory is that of weights, gradients and optimizer states. Strong scaling has
eight rows in a step in total, and must give the weights of one process. Weak scaling has eight rows in each process.
The benchmark uses GPUs and NCCL where they are available.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lit_efficient.models.networks.gpt import GPT, GPTConfig
from lit_efficient.strategies.replicated_strategy import reduce_in_bfloat16

ROWS = 8
LENGTH = 16
STEPS = 4
VOCABULARY = 64
LINE = (
    "{way:10} {processes} processes: sent {sent} of the ideal (weak scaling, {rows} times the rows: {sent_weak}), "
    "memory {memory} of one's, weights {apart} apart from one's"
)
WAYS = ("ddp", "ddp, bf16", "fsdp2")
# By the name of an operator: how often the tensor travels around the ring, and which argument it is.
KINDS = {
    "allreduce_": (2, 0),
    "_allgather_base_": (1, 0),
    "_reduce_scatter_base_": (1, 1),
    "allgather_into_tensor_coalesced_": (1, 0),
}


class Sent(TorchDispatchMode):
    """Counter of the bytes that this process sends, by operator."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.share = (processes - 1) / processes
        self.bytes: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d" and name in KINDS:
            times, place = KINDS[name]
            given = args[place] if isinstance(args[place], list | tuple) else [args[place]]
            self.bytes[name] += times * self.share * sum(tensor.nbytes for tensor in given)
        return func(*args, **(kwargs or {}))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def steps(way: str, rows: int, device: torch.device) -> dict[str, Any]:
    """Return the bytes that this process sends and holds in four steps, and the final weights."""
    rank = distributed.get_rank()
    processes = distributed.get_world_size()
    torch.manual_seed(0)
    network: Any = GPT(GPTConfig(VOCABULARY, dim=64, depth=4, num_heads=4, max_length=LENGTH)).to(device)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    if way == "fsdp2":
        for block in network.blocks:
            fully_shard(block)
        fully_shard(network)
    else:
        network = DistributedDataParallel(network, gradient_as_bucket_view=True)
        if way == "ddp, bf16":
            network.register_comm_hook(None, reduce_in_bfloat16)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(step))
        own = tokens[rank::processes].to(device)
        with Sent(processes) as sent:  # of the last step: DDP's first one rebuilds its buckets
            logits = network(own)
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), own[:, 1:].flatten()).backward()
        held = [*network.parameters(), *(parameter.grad for parameter in network.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    held += [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    state = {name.removeprefix("module."): p for name, p in network.state_dict().items()}
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in state.items()}
    found = {"sent": sum(sent.bytes.values()), "memory": sum(local(tensor).nbytes for tensor in held)}
    return {**found, "parameters": parameters, "rows": rows, "weights": {name: p.cpu() for name, p in whole.items()}}


def process(rank: int, processes: int, port: int, folder: str) -> None:
    device = torch.device("cuda", rank) if torch.cuda.device_count() >= processes else torch.device("cpu")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=processes)
    ways = WAYS if processes > 1 else WAYS[:1]
    found = {way: [steps(way, rows, device) for rows in (ROWS, ROWS * processes)] for way in ways}
    if rank == 0:
        torch.save(found, Path(folder, "found.pt"))
    distributed.barrier()
    distributed.destroy_process_group()


def measured(processes: int) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each strategy under strong and weak scaling."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        multiprocessing.spawn(process, (processes, port, folder), nprocs=processes)
        return torch.load(Path(folder, "found.pt"), weights_only=True)


def ideal(way: str, processes: int, parameters: int) -> float:
    """Return the bytes that a process must send in a step, with weights and gradients in float32."""
    once = (processes - 1) / processes * 4 * parameters
    return {"ddp": 2 * once, "ddp, bf16": once, "fsdp2": 3 * once}[way]


def row(
    way: str, processes: int, strong: dict[str, Any], weak: dict[str, Any], alone: dict[str, Any]
) -> dict[str, Any]:
    wanted = ideal(way, processes, strong["parameters"])
    apart = max(float((strong["weights"][name] - w).abs().max()) for name, w in alone["weights"].items())
    return {
        "way": way,
        "processes": processes,
        "sent": round(strong["sent"] / wanted, 3),
        "sent_weak": round(weak["sent"] / wanted, 3),
        "memory": round(strong["memory"] / alone["memory"], 3),
        "apart": float(f"{apart:.1e}"),
        "rows": weak["rows"] // alone["rows"],
    }


# What the page assumes: bytes a second of a GPU to its neighbours in a node and to other nodes, and FLOPs a second that
# a training reaches (two fifths of an H100's in bfloat16).
IN_NODE = 450e9
BETWEEN = 50e9
FLOPS = 4e14
NODE = 8
MODELS = {"8B, AdamW": (8.03e9, 0.525e9), "70B, AdamW": (70.55e9, 1.05e9)}  # all parameters, those of the largest unit


def needs(parameters: float, unit: float, gpus: int, replicas: int = 1) -> tuple[float, float, float, float]:
    """Return memory, network bytes of a GPU in a step, and tokens that take as long: bf16-mixed under FSDP2."""
    shards = gpus // replicas
    memory = 16 * parameters / shards + 6 * unit  # float32: weights, gradients, two moments; two gathered units
    gathered = (shards - 1) / shards * (2 * 2 + 4) * parameters  # twice in bfloat16; gradients in float32
    reduced = 2 * (replicas - 1) / replicas * 4 * parameters / shards
    inside, outside = (gathered, reduced) if shards <= NODE else (0.0, gathered + reduced)
    seconds = inside / IN_NODE + outside / BETWEEN
    return memory, inside, outside, seconds * FLOPS / (6 * parameters)


def page() -> list[str]:
    """Return the lines of the table of docs/scaling.md."""
    lines = [
        "| Model | GPUs | Shards x replicas | Memory | In a node | Between nodes | Tokens a GPU |",
        "|" + " --- |" * 7,
    ]
    for model, (parameters, unit) in MODELS.items():
        for gpus in (8, 64, 1024):
            for replicas in dict.fromkeys((1, gpus // NODE)):
                memory, inside, outside, tokens = needs(parameters, unit, gpus, replicas)
                sizes = " | ".join(f"{size / 1e9:.1f} GB" for size in (memory, inside, outside))
                lines.append(f"| {model} | {gpus:,} | {gpus // replicas:,} x {replicas} | {sizes} | {tokens:,.0f} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", action="store_true", help="print each row as a line of JSON")
    parser.add_argument("--needs", action="store_true", help="compute the needs of more GPUs")
    options = parser.parse_args()
    if options.needs:
        print("\n".join(page()))
        return 0
    alone = measured(1)["ddp"][0]
    for processes in options.processes:
        for way, (strong, weak) in measured(processes).items():
            found = row(way, processes, strong, weak, alone)
            print(json.dumps(found) if options.json else LINE.format(**found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
