"""Seconds of work on a device, for the benchmarks: of the process on a CPU, elapsed and waited for on a GPU."""

from __future__ import annotations

import time

import torch


def now(device: str) -> float:
    """A point in time: on a CPU that of this process alone, so that a busy machine slows all contenders alike."""
    if not device.startswith("cuda"):
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def machine(device: str) -> str:
    """Where and with what a benchmark runs."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "one thread of a CPU"
    return f"{name}, torch {torch.__version__}"
