"""Under bf16-true Lightning casts the module after the transforms: what trains beside a base stays in float32."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

from lit_efficient import GradualUnfreezing, Technique
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import overrides, techniques_of
from lit_efficient.testing import data, trainer
from tests.contract.table import NAMES, case


def adds_its_own(technique: Technique) -> bool:
    """Whether it trains what was not there without it; GradualUnfreezing trains the base itself."""
    return overrides(technique, "trains") and not isinstance(technique, GradualUnfreezing)


TRAINED = [(name,) for name in NAMES if any(map(adds_its_own, case(name).make()))]


class Watch(L.Callback):
    """One step at a rate of 1e-5: what moved of what had a gradient."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        own = {
            id(p) for one in techniques_of(trainer) if isinstance(one, OptimizerHooks) for p in one.trains(pl_module)
        }
        self.before = [(p, p.detach().clone()) for p in pl_module.parameters() if id(p) in own]
        self.formats = {p.dtype for p in pl_module.parameters() if id(p) not in own and p.is_floating_point()}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group |= {"lr": 1e-5, "weight_decay": 0.0}
        self.pushed = [None if p.grad is None else p.grad != 0 for p, _ in self.before]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        moved: list[Tensor] = [
            (p != old)[pushed] for (p, old), pushed in zip(self.before, self.pushed, strict=True) if pushed is not None
        ]
        self.share = float(torch.cat(moved).float().mean())


@pytest.mark.filterwarnings("ignore:AdamW.* steps .* in 16 bits")  # the base, here and there
@pytest.mark.parametrize("names", [*TRAINED, ("ChunkedCrossEntropy", "ReplaceHead")], ids="+".join)
def test_updates_of_1e_5_survive(names: tuple[str, ...]) -> None:
    """In bfloat16 none of IA3's did, 1 in 60 of a prefix's and of a projection's, 1 in 4 of a head's."""
    about, watch = case(*names), Watch()
    run = trainer([*about.make(), watch], precision="bf16-true", max_steps=1, limit_val_batches=1, **about.trainer)
    torch.manual_seed(0)
    run.fit(about.toy(), data(about.rows), data())
    assert watch.formats == {torch.bfloat16}
    assert {p.dtype for p, _ in watch.before} == {torch.float32}
    assert watch.share > 0.99
