"""Seeds of random draws: mixed from a run's seed, a step and a rank, and set on all global generators."""

import hashlib
import random

import numpy as np
import torch

_MPS = torch.backends.mps.is_available()


def mix_seed(*parts: int) -> int:
    """Return a 63-bit seed from integers: the same on every machine, and unrelated for neighbouring integers."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_rank(rank: int) -> None:
    """Give a process other random numbers than rank 0, whose numbers stay as they are.

    ``seed_everything`` seeds all processes alike. Samples of different ranks would get the same noise and times.

    Args:
        rank: Rank among the processes with batches of their own.
    """
    if rank > 0:
        seed_all(mix_seed(torch.initial_seed(), rank))


def seed_all(seed: int) -> None:
    """Seed the global generators of torch (all devices in use), Python and NumPy: about 15 microseconds on the CPU.

    ``torch.manual_seed`` takes twenty times as long, because it records a stack trace for each device not in use.
    """
    torch.default_generator.manual_seed(seed)
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            backend.manual_seed_all(seed)
    if _MPS:
        torch.mps.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
