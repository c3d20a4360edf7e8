"""Clock, device name and number of threads for the benchmarks."""

from __future__ import annotations

import os
import time

import torch


def now(device: str) -> float:
    """Return the current time in seconds, to be subtracted from a later one.

    On a CPU the clock counts the CPU time of this process alone, so that a busy machine slows down all contenders
    alike. On a GPU it counts elapsed time, after the device has finished its work.
    """
    if not device.startswith("cuda"):
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def machine(device: str) -> str:
    """Return the name of the device and the version of torch, for the heading of a table."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name()
    else:
        name = f"a CPU with {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


def use_one_thread() -> None:
    """Compute with one thread, or with ``OMP_NUM_THREADS``, in this process and in those that it starts."""
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(threads))
