"""GradualUnfreezing on two ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lit_efficient import GradualUnfreezing
from tests.ranks.toys import weights_of_all
from tests.support import Toy, assert_equal, data, trainer, weights


class EqualRanks(L.Callback):
    """What trains after each step, and the weights, which all ranks must share."""

    def __init__(self) -> None:
        self.training: list[list[str]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.training.append([name for name, p in module.named_parameters() if p.requires_grad])
        self.weights.append(weights(module))
        first, second = weights_of_all(module)
        assert_equal(first, second)


def fit(
    batch: int, ckpt_path: str | None = None, epochs: int = 2, **arguments: Any
) -> tuple[L.Trainer, Toy, EqualRanks]:
    torch.manual_seed(0)
    seen, technique = EqualRanks(), GradualUnfreezing(every_n_steps=1)
    arguments |= {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    run = trainer([technique, seen], max_epochs=epochs, **arguments)
    module = Toy("configure_model", "lambda")
    dataset = data(32).dataset
    # interleaved rows: rank r of step s gets rows 2 * 4 * s + r, + 2, ...
    sampler: Any = DistributedSampler(dataset, 2, run.global_rank, shuffle=False)
    run.fit(module, DataLoader(dataset, batch, sampler=sampler), data(), ckpt_path=ckpt_path)
    return run, module, seen


def equal_after_each_thaw() -> None:
    run, module, seen = fit(4)
    trained = [2, 8, 14, 20, 26, 28, 28, 28]
    assert [len(names) for names in seen.training] == trained
    half, _, _ = fit(4, epochs=1)
    half.save_checkpoint("half.ckpt", weights_only=False)
    _, again, watched = fit(4, "half.ckpt")
    assert watched.training == seen.training[4:]
    assert_equal(weights(module), weights(again))
    _, _, counted = fit(2, accumulate_grad_batches=2)
    assert [len(names) for names in counted.training] == [n for n in trained for _ in range(2)]
    if run.is_global_zero:
        torch.save(seen.weights, "two.pt")
    dist.barrier()
