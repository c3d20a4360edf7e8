"""Measure the peak memory of a training: the most bytes alive at the same time in two of its steps.

On a CPU every operator of the steps is intercepted. Its outputs count while they are alive. Tensors that exist before
the steps are found among Python's objects. If operators cannot be intercepted (a compiled step), the allocator's
records are read. On a GPU the result is the allocator's peak.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import lightning.pytorch as L
import torch
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.technique_runs import _address, _flat, _tensors
from lit_efficient.evidence.fits import Change, FitSource
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from tests.state_bytes import measure_state_bytes

# The steps from FIRST to LAST are measured, because all optimizer states exist by then.
FIRST = 2
LAST = 4


class Measured(L.Callback):
    """Callback that records the bytes of two steps, at the peak and by kind. It must be the last callback.

    Args:
        before: Addresses of tensors that existed before the fit was made, such as its data.
        counted: Whether to intercept every operator. Otherwise the allocator's records are read.
    """

    def __init__(self, before: set[int], counted: bool = True) -> None:
        self.before = before
        self.counted = counted
        self.found = dict[str, int]()
        self._open: contextlib.ExitStack | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._open is not None or trainer.global_step < FIRST or self.found:
            return
        gc.collect()
        self._open = contextlib.ExitStack()
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        held = [p.grad for p in pl_module.parameters() if p.grad is not None]
        alive = [t for t in _tensors() if _address(t) not in self.before and not isinstance(t, FakeTensor)]
        self._meter = AllocationMeter([*alive, *held])
        if self.counted:
            self._open.enter_context(self._meter)
        else:
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            )
            self._open.enter_context(self._profile)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._open is None or trainer.global_step < LAST:
            return
        self._open.close()
        self._open = None
        weights = {_address(t): t for t in _flat([*pl_module.parameters(), *pl_module.buffers()])}
        states = sum(measure_state_bytes(optimizer) for optimizer in trainer.optimizers)
        gradients = sum(p.grad.nbytes for p in pl_module.parameters() if p.grad is not None)
        self.found = {"weights": sum(t.nbytes for t in weights.values()), "gradients": gradients, "states": states}
        if trainer.strategy.root_device.type == "cuda":
            self.found["peak"] = torch.cuda.max_memory_allocated()
        elif self.counted:
            self.found["peak"] = self._meter.peak
        else:
            self.found["peak"] = self._meter.live + _most(self._profile)


def _most(profile: Any) -> int:
    """Return the peak of the allocator beyond its bytes at the start."""
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def measure(source: FitSource, counted: bool = True) -> dict[str, int]:
    """Run a fit of the source. Return its bytes: ``peak``, ``weights``, ``gradients``, ``states``, ..."""
    gc.collect()
    measured = Measured({_address(tensor) for tensor in _tensors()}, counted)
    fit = source.make(Change())
    fit.trainer.callbacks.append(measured)
    fit.run()
    return measured.found
