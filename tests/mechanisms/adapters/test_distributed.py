"""Adapters on two gloo processes: the same on all ranks, under DDP and sharded by FSDP2; resumed without the base."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_ranks
from tests.ranks import adapters


@pytest.mark.turns(6, family="ranks")
@pytest.mark.parametrize("variant", ["dora", "lora_fa"])
def test_ranks_agree_and_shards_compute_what_ddp_computes(variant: str, tmp_path: Path) -> None:
    run_ranks(adapters.as_under_ddp, tmp_path, variant)


@pytest.mark.turns(6, family="ranks")
def test_shards_resume_from_adapters_alone_and_miss_none(tmp_path: Path) -> None:
    run_ranks(adapters.resumed_from_adapters_alone, tmp_path)
