"""ReplicatedStrategy on two ranks, beside plain DDP."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lit_efficient import ConflictError, ExactResume, GradualUnfreezing, LRFinder, ReplicatedStrategy, StochasticDepth
from tests.ranks import sharded
from tests.ranks.toys import Small, everyones, weights_of_all
from tests.support import Toy, assert_equal, data, trainer, weights


class Gradients(L.Callback):
    """Those that each step is made with, and in how many pieces of memory they lie."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.storages = 0

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        self.storages = len({gradient.untyped_storage().data_ptr() for gradient in gradients.values()})
        self.steps.append({name: gradient.clone() for name, gradient in gradients.items()})


class ThawsByItself(L.Callback):
    """Somebody else's: the stem is frozen for two steps."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.freeze(module, True)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.freeze(module, batch_idx < 2)

    def freeze(self, module: Any, frozen: bool) -> None:
        for parameter in module.net.stem.parameters():
            parameter.requires_grad = not frozen


def fit(strategy: Any, *callbacks: Any, optimizers: int = 1, **arguments: Any) -> tuple[Toy, Gradients]:
    torch.manual_seed(0)
    seen = Gradients()
    arguments = {"max_epochs": 1, "devices": 2, "strategy": strategy, "use_distributed_sampler": False} | arguments
    run = trainer([*callbacks, seen], **arguments)
    module = Toy("configure_model", optimizers=optimizers)
    dataset = data(32).dataset
    sampler: Any = DistributedSampler(dataset, 2, run.global_rank, shuffle=False)
    run.fit(module, DataLoader(dataset, 4, sampler=sampler), data())
    return module, seen


def equals_plain_ddp() -> None:
    plain, reference = fit("ddp")
    exact, seen = fit(ReplicatedStrategy(compression="none"))
    assert_equal(weights(plain), weights(exact))
    assert reference.storages > 20 > 2 >= seen.storages > 0  # views of the buckets
    _, rounded = fit(ReplicatedStrategy())
    first, other = rounded.steps[0], reference.steps[0]
    assert any(not torch.equal(first[name], other[name]) for name in other)
    worst = max(float((first[name] - other[name]).norm() / other[name].norm()) for name in other)
    assert worst < 2**-7  # each rank's ones and their sum are rounded to 8 bits
    assert all(torch.equal(value, value.bfloat16().float()) for value in first.values())
    for arguments in ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"optimizers": 2}):
        plain, ours = (fit(strategy, **arguments)[0] for strategy in ("ddp", ReplicatedStrategy(compression="none")))
        assert_equal(weights(plain), weights(ours))  # the first window of a static graph sends its gradients once, too
        first, second = weights_of_all(ours)
        assert_equal(first, second)


def renews_what_thaws() -> None:
    strategies = ("ddp", ReplicatedStrategy(compression="none"))
    plain, ours = (fit(strategy, GradualUnfreezing(every_n_steps=1))[0] for strategy in strategies)
    assert_equal(weights(plain), weights(ours))
    for optimizers in (1, 2):
        module, seen = fit(ReplicatedStrategy(compression="none"), ThawsByItself(), optimizers=optimizers)
        first, second = weights_of_all(module)
        assert_equal(first, second)
    module, seen = fit(ReplicatedStrategy(compression="none"), ThawsByItself())
    assert ["net.stem.weight" in step for step in seen.steps] == [False, False, True, True]
    assert len({str(step) for step in everyones(seen.steps)}) == 1
    with pytest.raises(ConflictError, match="StochasticDepth draws in each step which layers run"):
        fit(ReplicatedStrategy(), StochasticDepth(0.5))
    fit(ReplicatedStrategy(static_graph=False), StochasticDepth(0.5))


def resumed_by_three() -> None:
    """Three ranks add in an order that the place in a bucket decides: after a resume as before, accumulated or not."""
    for strategy, more in (("ddp", {}), (ReplicatedStrategy, {}), (ReplicatedStrategy, {"accumulate_grad_batches": 2})):

        def epochs(count: int, path: str | None = None, make: Any = strategy, more: Any = more) -> Any:
            chosen = make() if isinstance(make, type) else make
            # Trials leave the module with another reducer; a resumed run makes none.
            trials = LRFinder(min_lr=1e-3, max_lr=1.0, num_steps=12)
            return sharded.fit(lambda: [ExactResume(seed=0), trials], Small, count, path, chosen, **more)

        _, _, straight = epochs(2)
        epochs(1)[0].save_checkpoint("half.ckpt", weights_only=False)
        assert_equal(epochs(2, "half.ckpt")[2], straight)


def both() -> None:
    equals_plain_ddp()
    renews_what_thaws()
