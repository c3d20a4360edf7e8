"""A block of our GPT launches fewer kernels and moves fewer bytes than those of transformers and peft.

By plan, all rungs of torchtune's table of peak memory take less than was published.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.block_counts import STEPPED, counts, head_counts, step_counts
from benchmarks.plan_beside_torchtune import RUNGS, Plain
from benchmarks.plan_ladder import RungFit
from lit_efficient import plan
from lit_efficient.callbacks import memory_efficient_layers as layers
from lit_efficient.internals.torch_compiler import compiled_once
from lit_efficient.mechanisms.adapters import base

UNSLOTH = 128  # launches of a block with adapters, read in its code


@pytest.mark.turns(6, family="slow")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize(
    ("ours", "theirs", "launches", "gigabytes"),
    [
        ("all weights, bf16-true", "all weights, transformers", 55, 8.4),
        ("LoRA, bf16-true", "LoRA, peft", 97, 10.9),
        ("LoRA, weights in bfloat16, bf16-mixed", "LoRA, peft", 107, 12.6),
        ("all weights, compiled layers", "all weights, transformers", 42, 6.7),
        ("LoRA, compiled layers", "LoRA, peft", 82, 9.2),
        ("LoRA, bf16-mixed, compiled layers", "LoRA, peft", 86, 10.0),
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
    assert found[0] <= min(launches, 1.1 * UNSLOTH)
    assert found[1] <= gigabytes * 1e9
    assert found[0] < 0.52 * peer[0]
    assert found[1] < 0.56 * peer[1]


def test_the_gradient_of_a_head_is_written_once_a_chunk_and_scaled_and_rounded_in_one_pass() -> None:
    found = head_counts()
    assert found.launches.total() <= 118
    assert found.bytes.total() <= 88e9
    chunks = 4
    total = 4 * 128_256 * 3072  # bytes of the head's gradient in float32
    assert found.launches["addmm"] == chunks - 1  # the first chunk writes the sum
    assert found.bytes["addmm"] < (chunks - 1) * 2.4 * total
    assert found.bytes["mul"] < 1.6 * total  # read in float32, written in bfloat16


def test_a_step_of_8_bit_adamw_is_one_kernel_that_reads_and_writes_codes() -> None:
    found = step_counts(low=True)
    numbers = STEPPED[0] * STEPPED[1]
    assert dict(found.launches) == {"optimizer_update_8bit_blockwise": 1}
    # Weight, both moments and their scales are read and written, the gradient is read, and so are two tables.
    assert found.bytes.total() == numbers * (2 + 2 + 2 + 4 + 16 / 256) + 2 * 1024
    assert found.bytes.total() < 0.73 * step_counts(low=False).bytes.total()


@pytest.mark.nightly
def test_inductor_makes_one_kernel_of_a_gate_each_way() -> None:
    from torch._inductor import metrics

    gate, up = (torch.randn(3, 5, 48, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    metrics.reset()
    compiled_once(layers._activated_product)(torch.nn.functional.silu, gate, up).sum().backward()
    assert metrics.generated_kernel_count == 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(RUNGS))
def test_a_rung_of_torchtune_s_table_is_planned_below_its_peak(name: str) -> None:
    published, rung = RUNGS[name]
    assert plan(RungFit(rung, Plain), device="cuda").peak < published * 2**30
