"""Claim about several processes: their gradient is the gradient of all their batches in one process.

    g = sum_i n_i g_i / sum_i n_i        g_i of batch i of some process alone; n_i its predicted tokens, or rows

Two processes on the CPU run the fit's own strategy for one optimizer step, and report batches, random states, weights
and gradients. Then one process computes the gradient of each batch from the same weights and random states.
"""

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.fits import AS_IT_IS, Change, FitSource
from lit_efficient.evidence.own_process import OwnProcess, TaskFailed
from lit_efficient.evidence.verifying.claims import (
    Batch,
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

# Tolerances in float32, and below.
_EXACT = 1e-3
_COARSE = 0.05
_SECONDS = 180.0  # time for two processes to make a step
_STEPS = "_lit_efficient_steps"  # attribute of a module
TWO = Change(settings={"trainer.devices": 2, "trainer.num_nodes": 1, "trainer.accelerator": "cpu"})
Report: TypeAlias = dict[str, Any]  # of a process: strategy, start, batches, states, gradients


class Sharded(Claim):
    """Two processes have the gradient that one process has for all of their batches."""

    name = "sharded"
    sentence = "several processes train on different rows, with the gradient of all rows together"
    unit = "largest relative difference of gradients"

    def check(self, subject: Subject) -> Verdict:
        if subject.source.make().trainer.world_size < 2 and not subject.full:
            return self.idle("the fit has one process; --full tries two")
        try:
            reports = _two_processes(subject.source, subject.folder)
        except TaskFailed as failed:
            return self.idle(f"two processes could not make a step: {failed}")
        first, second = reports
        if _same(first["batches"], second["batches"]):
            why = "both processes got the same rows: each step learns from half as many rows as it seems to"
            return self.measured(1.0, 0.0, why, "the data", unit="share of rows that both processes have")
        found = first["gradients"]
        if any(value.isnan().any() for value in found.values()) or not found:
            return self.idle("the gradients cannot be observed: none is left at the optimizer step")
        off, order, tolerance = subject.within(lambda trainer, module: _in_one(trainer, module, reports))
        why = f"a step of two processes ({first['strategy']}), and the sum of the gradients of their batches in one"
        if first["strategy"].startswith("DDP"):
            for name, by in difference(found, second["gradients"]).items():
                if by > tolerance:
                    off[name] = max(by, off.get(name, 0.0))
                    why = "two processes have different gradients after the reduction"
        return self.compared(off, tolerance, why, ("more than two processes, and accelerators",), lambda: order)


def _in_one(
    trainer: Trainer, module: LightningModule, reports: list[Report]
) -> tuple[dict[str, float], list[str], float]:
    """Return the differences of two processes' gradients from those of one, the order of layers, and the tolerance."""
    bench = Bench(trainer, module)
    device = trainer.strategy.root_device
    # Both processes start with the weights of the first.
    module.load_state_dict(reports[0]["start"], strict=False)
    total = sum(_count(batch) for report in reports for batch in report["batches"])
    joined: dict[str, Tensor] = {}
    for report in reports:
        for index, (batch, states) in enumerate(zip(report["batches"], report["states"])):
            share = _count(batch) / total
            moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
            for name, gradient in gradients(module, loss_of(module, moved, index, states)).items():
                joined[name] = joined.get(name, torch.zeros_like(gradient)) + gradient * share
    return difference(joined, reports[0]["gradients"]), bench.order(), bench.tolerance(_EXACT, _COARSE)


def _count(batch: Batch) -> int:
    """Return the number of predicted tokens of a batch, or of its rows."""
    tokens = token_batch(batch)
    if tokens is None:
        return max(1, few_rows(batch, count=1 << 30)[1])
    return int((tokens.targets != IGNORE).sum())


def _same(one: list[Batch], other: list[Batch]) -> bool:
    pairs = [(a, b) for a, b in zip(tree_leaves(one), tree_leaves(other)) if isinstance(a, Tensor)]
    return bool(pairs) and all(isinstance(b, Tensor) and torch.equal(a, b) for a, b in pairs)


def _two_processes(source: FitSource, folder: Path) -> list[Report]:
    """Return the reports of two processes on their first optimizer step.

    Raises:
        TaskFailed: If a process cannot make the step.
    """
    # Port 0 asks for any free port.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(OwnProcess(_one_of_two, source, folder, rank, port)) for rank in range(2)]
        files = [process.result(most_seconds=_SECONDS) for process in processes]
    return [pickle.loads(Path(file).read_bytes()) for file in files]  # noqa: S301 written by our own processes


def _one_of_two(source: FitSource, folder: Path, rank: int, port: int, tell: Callable[[int], None]) -> str:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**ranks, **address}.items()})
    own = folder / f"rank{rank}"
    own.mkdir(exist_ok=True)
    reporter = _Reporter()
    # Both processes write to separate folders.
    subject = Subject(source, own, alone=False)
    fit = subject.fit(_two(source))
    strategy = fit.trainer.strategy
    strategy.parallel_devices = strategy.parallel_devices[:2]
    fit.trainer.callbacks.append(reporter)
    subject.run(fit)
    file = own / "report"
    file.write_bytes(pickle.dumps(reporter.report))
    if rank == 0:
        time.sleep(0.5)  # the other process may still need the store of this one
    return str(file)


def _two(source: FitSource) -> Change:
    """Return the change that gives a fit two processes. An existing trainer has its processes already."""
    try:
        source.make(TWO)
    except ConfigurationError:
        return AS_IT_IS
    return TWO


class _Reporter(Callback):
    """Reports what a process does until its first optimizer step."""

    def __init__(self) -> None:
        self.report: Report = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        vars(pl_module)[_STEPS] = []
        wrap_method(pl_module, "training_step", _noted)
        self.report["strategy"] = type(trainer.strategy).__name__
        self.report["start"] = {name: _whole(value) for name, value in pl_module.state_dict().items()}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if "gradients" not in self.report:
            found = seen_gradients(pl_module, optimizer)
            self.report["gradients"] = {name: _whole(gradient) for name, gradient in found.items()}
            steps = vars(pl_module)[_STEPS]
            self.report["batches"] = [batch for batch, _ in steps]
            self.report["states"] = [states for _, states in steps]


def _noted(self: nn.Module, *args: object, **kwargs: object) -> object:
    given = args[0] if args else kwargs["batch"]
    batch = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), given)
    vars(self)[_STEPS].append((batch, random_states()))
    return inner_method(self, "training_step", _noted)(*args, **kwargs)


def _whole(value: object) -> object:
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return value


OF_SHARDS: tuple[Claim, ...] = (Sharded(),)
