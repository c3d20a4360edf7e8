"""OptimizerInBackward on the shards of two ranks."""

from __future__ import annotations

from typing import Any

import torch

from lit_efficient import NonFiniteGuard, OptimizerInBackward
from lit_efficient.surgery import local
from tests.ranks.toys import Sharded, Small, sharding
from tests.support import assert_equal, data, trainer


def fit(*callbacks: Any) -> Any:
    torch.manual_seed(0)
    run = trainer([NonFiniteGuard(), *callbacks], devices=2, strategy=sharding(), max_epochs=2, limit_val_batches=0)
    run.fit(Sharded("configure_model", network=Small), data(16))
    return run


def shards_are_stepped_alike() -> None:
    plain, ours = fit(), fit(OptimizerInBackward())
    (reference,), (optimizer,) = plain.optimizers, ours.optimizers
    for p, q in zip(*(run.lightning_module.parameters() for run in (plain, ours)), strict=True):
        assert hasattr(q, "placements")
        assert torch.equal(local(p), local(q))
        assert q.grad is None
        states, reference_states = ([*map(local, o.state[r].values())] for o, r in ((optimizer, q), (reference, p)))
        assert_equal(states, reference_states)
        assert q in optimizer.gradients_taken
    assert optimizer.in_backward.late == 0
