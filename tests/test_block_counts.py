"""A block of our GPT launches fewer kernels and moves fewer bytes than those of transformers and peft."""

from __future__ import annotations

import pytest

from benchmarks.block_counts import counts
from lit_efficient.mechanisms.adapters import base


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize(
    ("ours", "theirs", "launches", "gigabytes"),
    [
        ("all weights, bf16-true", "all weights, transformers", 74, 8.7),
        ("LoRA, bf16-true", "LoRA, peft", 144, 12.1),
        ("LoRA, weights in bfloat16, bf16-mixed", "LoRA, peft", 154, 13.8),
    ],
)
def test_a_block_launches_less_and_moves_less(
    ours: str, theirs: str, launches: int, gigabytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "digests", lambda module: {})  # of weights, which have no values here
    found, peer = (
        [sum(kernels.launches.total() for kernels in both), sum(kernels.bytes.total() for kernels in both)]
        for both in map(counts, (ours, theirs))
    )
    assert found[0] <= launches
    assert found[1] <= gigabytes * 1e9
    assert found[0] < 0.75 * peer[0]
    assert found[1] < 0.6 * peer[1]
