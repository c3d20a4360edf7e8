from pathlib import Path

import pytest
import torch

from lit_efficient.internals.heap import give_back
from tests.internals.leaning import leans_on

STATUS = Path("/proc/self/status")


@leans_on("libc", "malloc_trim", "heap")
@pytest.mark.skipif(not STATUS.exists(), reason="reads Linux's count of pages")
def test_pages_between_what_is_kept_go_back_to_the_system():
    def mebibytes():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) / 1024

    made = [torch.ones(2**13) for _ in range(2048)]  # 32 KiB each, on the heap: 64 MiB
    kept, before = made[::2], mebibytes()
    del made
    give_back()
    assert before - mebibytes() > 24
    assert all(tensor.numel() for tensor in kept)
