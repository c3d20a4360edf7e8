"""Precision and sizes for tensor cores: NVIDIA's table, and what a run says of its sizes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import ConfigurationError, GPTConfig, auto_precision
from lit_efficient.callbacks.tiling import Tiling
from lit_efficient.cli import advice
from lit_efficient.cli.advice import SizesAdvice
from lit_efficient.mechanisms import tensor_cores
from lit_efficient.mechanisms.tensor_cores import multiple_for, rows_of, slow_sizes
from lit_efficient.models.networks.gpt import GPT
from tests.support import Toy, data, trainer

V100, T4, A100, H100 = (7, 0), (7, 5), (8, 0), (9, 0)


@pytest.mark.parametrize(
    ("dtype", "capability", "multiple"),
    [
        # "Most efficient with multiples of", in NVIDIA's guide to matrix multiplication, table 1.
        (torch.float16, V100, 8),
        (torch.float16, A100, 64),
        (torch.bfloat16, A100, 64),
        (torch.bfloat16, H100, 64),
        (torch.int8, T4, 16),
        (torch.int8, A100, 128),
        (torch.float32, A100, 32),
        (torch.float64, A100, 16),
        # Formats that the tensor cores do not have.
        (torch.bfloat16, T4, 1),
        (torch.float32, V100, 1),
        (torch.float16, (6, 1), 1),
    ],
)
def test_multiples_are_those_of_the_guide(dtype: torch.dtype, capability: tuple[int, int], multiple: int) -> None:
    assert multiple_for(dtype, capability) == multiple


def test_a_format_that_is_not_in_the_guide_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"dtype must be one of torch\.float16"):
        multiple_for(torch.int64, A100)


@pytest.mark.parametrize(
    ("capability", "accelerator", "precision"),
    [
        (H100, "auto", "bf16-mixed"),
        (A100, "gpu", "bf16-mixed"),
        (T4, "auto", "16-mixed"),
        (V100, "cuda", "16-mixed"),
        (A100, "cpu", "32-true"),
        (None, "auto", "32-true"),
        (None, "cuda", "bf16-mixed"),  # planned for, but not here
        (A100, "mps", "32-true"),
    ],
)
def test_the_precision_is_one_that_the_device_has(
    capability: tuple[int, int] | None, accelerator: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_cores, "capability_here", lambda: capability)
    assert auto_precision(accelerator) == precision


def test_of_several_gpus_the_oldest_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [H100, V100][index])
    assert auto_precision() == "16-mixed"


def gpt(vocabulary: int, dim: int = 64) -> GPT:
    return GPT(GPTConfig(vocabulary, dim=dim, depth=1, num_heads=2, max_length=16))


def test_sizes_are_named_only_where_they_matter() -> None:
    (line,) = slow_sizes(gpt(5025), 0, "bf16-mixed", A100)
    assert "5,025, no multiple of 64" in line
    assert line.endswith("in bfloat16: use 5,056")
    assert slow_sizes(gpt(5056), 2048, "bf16-mixed", A100) == []
    assert slow_sizes(gpt(5032), 0, "16-mixed", V100) == []  # a multiple of 8
    assert len(slow_sizes(gpt(5032), 0, "16-mixed", A100)) == 1
    (line,) = slow_sizes(gpt(5056, 72), 0, "bf16-mixed", A100)
    assert line.startswith("A size of blocks.0.attention.query is 72")
    rank = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 4), nn.Linear(4, 1024))
    assert slow_sizes(rank, 0, "bf16-mixed", A100) == []  # less than a twentieth of the weights


def test_float32_counts_only_as_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision, found in (("highest", 0), ("high", 1)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        assert len(slow_sizes(gpt(5025), 0, "32-true", A100)) == found


def test_a_padded_vocabulary_is_not_named() -> None:
    network = gpt(5025)
    Tiling(64).transform(network)
    assert slow_sizes(network, 0, "bf16-mixed", A100) == []


@pytest.mark.parametrize(("rows", "said"), [(100, 1), (63, 0), (64, 0), (65, 1), (5_000, 0)])
def test_rows_are_named_if_many_of_their_tiles_are_empty(rows: int, said: int) -> None:
    found = slow_sizes(gpt(5056), rows, "bf16-mixed", A100)
    assert len(found) == said
    assert all("128 take the same time" in line for line in found)


def test_rows_are_tokens_or_vectors() -> None:
    tokens = torch.zeros(3, 50, dtype=torch.long)
    assert rows_of({"input_ids": tokens, "labels": tokens}) == 150
    assert rows_of((torch.zeros(7, 4), torch.zeros(7, dtype=torch.long))) == 7
    assert rows_of((torch.zeros(7, 3, 8, 8), torch.zeros(7, dtype=torch.long))) == 0
    assert rows_of(["text"]) == 0


@pytest.mark.parametrize(("capability", "said"), [(A100, 1), (None, 0)])
def test_a_run_on_a_gpu_names_slow_sizes_once(
    capability: Any, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(advice, "capability_of", lambda device: capability)
    caplog.set_level(logging.INFO)
    run = trainer([SizesAdvice()], precision="bf16-mixed", max_steps=3, limit_val_batches=0)
    run.fit(Toy(), data(), data())
    lines = [record.message for record in caplog.records if record.message.startswith("sizes: ")]
    assert len(lines) == said
    assert all("no multiple of 64" in line for line in lines)
