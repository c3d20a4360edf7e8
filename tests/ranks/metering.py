"""The norm of a step's gradients on two ranks, and of one process that sees both batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lit_efficient import RunMetrics
from tests.ranks.toys import Sharded, sharding
from tests.support import Toy, data, trainer


class _Kept(DummyLogger):
    norm = 0.0

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.norm = metrics.get("grad_norm", self.norm)


def _norm(module: Toy, loader: Any, **options: Any) -> float:
    torch.manual_seed(0)
    kept = _Kept()
    options |= {"max_steps": 1, "limit_val_batches": 0, "logger": kept, "log_every_n_steps": 1}
    trainer([RunMetrics()], use_distributed_sampler=False, **options).fit(module, loader, data())
    return kept.norm


def alone() -> float:
    return _norm(Toy("configure_model"), DataLoader(data(32).dataset, 8), devices=1)


def norms() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    for name, kind, strategy in (("ddp", Toy, "ddp"), ("fsdp2", Sharded, sharding())):
        sampler: Any = DistributedSampler(data(32).dataset, 2, rank, shuffle=False)
        norm = _norm(
            kind("configure_model"), DataLoader(data(32).dataset, 4, sampler=sampler), devices=2, strategy=strategy
        )
        if rank == 0:
            Path(name).write_text(str(norm))
