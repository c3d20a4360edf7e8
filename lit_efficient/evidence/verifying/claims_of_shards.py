"""The claim on several processes: their gradient is that of all their batches together in one process.

    g = sum_i n_i g_i / sum_i n_i        g_i of batch i of some process, alone; n_i learned tokens of it, or rows

Two processes on the CPU run the fit's own strategy for one optimizer step, and tell batches, random states, weights and
gradients. Then one process computes each batch's gradient by itself, from these weights and with these draws.
"""

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.fits import AS_IT_IS, Change, FitSource
from lit_efficient.evidence.own_process import OwnProcess, TaskFailed
from lit_efficient.evidence.verifying.claims import (
    Claim,
    Subject,
    Verdict,
    difference,
    gradients,
    loss_of,
    seen_gradients,
)
from lit_efficient.evidence.verifying.layer_calls import Bench, few_rows
from lit_efficient.evidence.verifying.token_batches import token_batch
from lit_efficient.internals.torch_trees import tree_leaves, tree_map_only
from lit_efficient.internals.wraps import inner_method, wrap_method
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.mechanisms.rewind import random_states

_EXACT, _COARSE = 1e-3, 0.05
_SECONDS = 180.0  # until two processes must have made a step
_NOTES = "_lit_efficient_steps"
TWO = Change(settings={"trainer.devices": 2, "trainer.num_nodes": 1, "trainer.accelerator": "cpu"})


class Sharded(Claim):
    """Two processes have the gradient that one has for all of their batches."""

    name, sentence = "sharded", "several processes train on different rows, with the gradient of all rows together"

    def check(self, subject: Subject) -> Verdict:
        if subject.source.make().trainer.world_size < 2 and not subject.full:
            return self.idle("one process trains; --full tries two")
        try:
            first, second = reports = _two_processes(subject.source, subject.folder)
        except TaskFailed as failed:
            return self.idle(f"two processes could not make a step: {failed}")
        if _same(first["batches"], second["batches"]):
            why = "both processes got the same rows: each step learns half as much as it seems to"
            return self.measured(1.0, 0.0, "share of rows that both have", why, where="the data")
        if any(value.isnan().any() for value in first["gradients"].values()) or not first["gradients"]:
            return self.idle("the gradients cannot be seen: none is left when the optimizer steps")
        apart = difference(first["gradients"], second["gradients"])
        off, order, tolerance = subject.within(lambda trainer, module: _in_one(trainer, module, reports))
        why = (
            f"a step of two processes ({first['strategy']}), and the gradients of their batches in one process, joined"
        )
        for name, by in apart.items() if first["strategy"].startswith("DDP") else ():
            if by > tolerance:
                off[name], why = max(by, off.get(name, 0.0)), "two processes have different gradients after they met"
        uncovered = ("more than two processes, and accelerators",)
        unit = "largest relative difference of gradients"
        return self.compared(off, tolerance, unit, why, uncovered, lambda: order)


def _in_one(trainer: Any, module: Any, reports: list[dict[str, Any]]) -> tuple[dict[str, float], list[str], float]:
    """By parameter how far the two processes' gradient is from that of one; the layers' order; the tolerance."""
    bench = Bench(trainer, module)
    device = trainer.strategy.root_device
    module.load_state_dict(reports[0]["start"], strict=False)
    steps = [step for one in reports for step in zip(one["batches"], one["states"])]
    joined: dict[str, Tensor] = {}
    total = sum(_count(batch) for batch, _ in steps)
    for number, (batch, states) in enumerate(steps):
        index = number % len(reports[0]["batches"])
        moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
        for name, gradient in gradients(module, loss_of(module, moved, index, states)).items():
            joined[name] = joined.get(name, torch.zeros_like(gradient)) + gradient * (_count(batch) / total)
    return difference(joined, reports[0]["gradients"]), bench.order(), bench.tolerance(_EXACT, _COARSE)


def _count(batch: Any) -> int:
    """Learned tokens of a batch, or its rows."""
    tokens = token_batch(batch)
    return max(1, few_rows(batch, 1 << 30)[1]) if tokens is None else int((tokens.targets != IGNORE).sum())


def _same(one: list[Any], other: list[Any]) -> bool:
    pairs = [pair for pair in zip(tree_leaves(one), tree_leaves(other)) if all(isinstance(x, Tensor) for x in pair)]
    return bool(pairs) and all(torch.equal(*pair) for pair in pairs)


def _two_processes(source: FitSource, folder: Path) -> list[dict[str, Any]]:
    """What each of two processes tells of its first optimizer step.

    Raises:
        TaskFailed: If one of them cannot make it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with contextlib.ExitStack() as held:
        processes = [held.enter_context(OwnProcess(_one_of_two, source, folder, rank, port)) for rank in range(2)]
        files = [process.result(most_seconds=_SECONDS) for process in processes]
    return [pickle.loads(Path(file).read_bytes()) for file in files]  # noqa: S301 our own processes'


def _one_of_two(source: FitSource, folder: Path, rank: int, port: int, tell: Callable[[int], None]) -> str:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**ranks, **address}.items()})
    own = folder / f"rank{rank}"
    own.mkdir(exist_ok=True)
    notes = _Notes()
    subject = Subject(source, own, alone=False)
    fit = subject.fit(_two(source))
    strategy = fit.trainer.strategy
    strategy.parallel_devices = strategy.parallel_devices[:2]
    fit.trainer.callbacks.append(notes)
    subject.run(fit)
    file = own / "reports"
    file.write_bytes(pickle.dumps(notes.reports))
    if rank == 0:
        time.sleep(0.5)  # it holds the store that the other one may still ask
    return str(file)


def _two(source: FitSource) -> Change:
    """What makes two processes of a fit; a trainer that exists has its own already."""
    try:
        source.make(TWO)
    except ConfigurationError:
        return AS_IT_IS
    return TWO


class _Notes(Callback):
    """Notes what a process does until its first optimizer step."""

    def __init__(self) -> None:
        self.reports: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        vars(pl_module)[_NOTES] = []
        wrap_method(pl_module, "training_step", _noted)
        self.reports["strategy"] = type(trainer.strategy).__name__
        self.reports["start"] = {name: _whole(value) for name, value in pl_module.state_dict().items()}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if "gradients" not in self.reports:
            found = seen_gradients(pl_module, optimizer)
            self.reports["gradients"] = {name: _whole(gradient) for name, gradient in found.items()}
            steps = vars(pl_module)[_NOTES]
            self.reports |= {"batches": [batch for batch, _ in steps], "states": [states for _, states in steps]}


def _noted(self: Any, *args: Any, **kwargs: Any) -> Any:
    batch = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), args[0] if args else kwargs["batch"])
    vars(self)[_NOTES].append((batch, random_states()))
    return inner_method(self, "training_step", _noted)(*args, **kwargs)


def _whole(value: Any) -> Any:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


OF_SHARDS: tuple[Claim, ...] = (Sharded(),)
