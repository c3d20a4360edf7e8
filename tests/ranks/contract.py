"""The contract on two ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lit_efficient import ConflictError, LowBitOptimizer, Phase, SNRWeighting, StochasticDepth, Technique
from tests.ranks.toys import Sharded, sharding, weights_of_all
from tests.support import Toy, assert_equal, data, trainer, weights


def resumed_exactly(skip: Any) -> None:
    def fit(epochs: int, ckpt_path: str | None = None) -> tuple[Any, Toy]:
        parts = [StochasticDepth(0.9, skip=skip), LowBitOptimizer(min_size=0), SNRWeighting(gamma=1.0)]
        run = trainer(parts, devices=2, strategy="ddp", max_epochs=epochs)
        module = Toy("configure_model", "lambda")
        run.fit(module, data(32), data(), ckpt_path=ckpt_path)
        return run, module

    run, module = fit(2)
    first, second = weights_of_all(module)
    assert_equal(first, second)
    half, _ = fit(1)
    half.save_checkpoint("half.ckpt", weights_only=False)
    resumed, again = fit(2, "half.ckpt")
    assert resumed.global_step == run.global_step == 8
    assert_equal(first, weights_of_all(again)[0])


def halves_of_batches() -> None:
    torch.manual_seed(0)
    parts = [StochasticDepth(0.7), SNRWeighting(gamma=1.0)]
    run = trainer(parts, devices=2, strategy="ddp", max_epochs=1, use_distributed_sampler=False)
    module, dataset = Toy("configure_model"), data(32).dataset
    # interleaved rows: rank r of step s gets rows 2 * 4 * s + r, + 2, ...
    sampler: Any = DistributedSampler(dataset, 2, int(os.environ["LOCAL_RANK"]), shuffle=False)
    run.fit(module, DataLoader(dataset, 4, sampler=sampler))
    if run.is_global_zero:
        torch.save(weights(module), "two.pt")
    dist.barrier()


class Grow(Technique):
    phase = Phase.ADAPT

    def transform(self, module: torch.nn.Module) -> Any:
        raise AssertionError("must be refused before it acts")


def trained_or_refused_on_shards() -> None:
    def fit(callbacks: list[Any]) -> Sharded:
        run = trainer(callbacks, devices=2, strategy=sharding(), max_epochs=1, limit_val_batches=0)
        module = Sharded("configure_model")
        run.fit(module, data(32))
        return module

    plain = weights_of_all(fit([]))
    module = fit([StochasticDepth(0.9), SNRWeighting(gamma=1.0)])
    first, second = weights_of_all(module)
    assert_equal(first, second)
    assert plain[0].keys() == first.keys()
    assert not torch.equal(plain[0]["net.head.weight"], first["net.head.weight"])
    assert type(module.net.blocks[0].up.weight).__name__ == "DTensor"
    with pytest.raises(ConflictError, match="must change the network before it is sharded"):
        fit([Grow()])
    with pytest.raises(ConflictError, match="DTensors"):
        fit([LowBitOptimizer(backend="bitsandbytes")])
    with pytest.raises(ConflictError, match="shards nothing by itself, and neither does Toy: each of the 2 processes"):
        trainer([SNRWeighting()], devices=2, strategy=sharding()).fit(Toy("configure_model"), data(32))
