"""GradientClipping: torch's numbers where torch can, and where it cannot: by hand, sparse, and partly in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lit_efficient
from lit_efficient import AdaptiveGradientClipping, ConfigurationError, GradientClipping, LoRA
from lit_efficient.application.gradients import change_gradients
from lit_efficient.testing import Run
from tests.callbacks.test_adaptive_gradient_clipping import Plain
from tests.contract.row import Row
from tests.processes import run_ranks
from tests.ranks import dynamics
from tests.support import data, trainer, weights


class Watched(lit_efficient.GradientClipping):
    """Keeps the norms before and after."""

    def __init__(self, max_norm: float | None = None, max_value: float | None = None) -> None:
        super().__init__(max_norm, max_value)
        self.norms: list[tuple[float, float]] = []

    def change_gradients(self, gradients: dict[Tensor, Tensor], *others: Any) -> None:
        before = together(gradients)
        super().change_gradients(gradients, *others)
        self.norms.append((before, together(gradients)))


Watched.__name__ = Watched.__qualname__ = "GradientClipping"


def together(gradients: dict[Tensor, Tensor]) -> float:
    if not gradients:  # a guard has removed those of a batch that it skips
        return 0.0
    return float(torch.cat([g.detach().double().flatten() for g in gradients.values()]).norm())


def norms_are_at_most_the_limit(run: Run) -> None:
    norms = run.technique("GradientClipping").norms
    assert any(before > 1.1e-3 for before, _ in norms)
    assert all(after == pytest.approx(min(before, 1e-3), rel=1e-2) for before, after in norms)


ROW = Row(lambda: Watched(1e-3), norms_are_at_most_the_limit, lambda: GradientClipping(1e30, 1e30))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("parts", [list, lambda: [LoRA(rank=2)]])
def test_one_optimizer_is_clipped_as_gradient_clip_val_does(algorithm: str, parts: Any) -> None:
    runs = []
    for arguments, own in (
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}, []),
        ({}, [GradientClipping(**{f"max_{algorithm}": 0.01})]),  # type: ignore[arg-type]
        ({}, []),
    ):
        torch.manual_seed(0)
        trainer([*own, *parts()], accumulate_grad_batches=2, **arguments).fit(module := Plain(), data(), data())
        runs.append(weights(module))
    theirs, ours, unclipped = runs
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-7)  # torch adds 1e-6 to the norm
    assert any(not torch.allclose(unclipped[name], tensor, atol=1e-4) for name, tensor in theirs.items())


def test_by_hand_each_optimizer_has_a_norm_of_its_own() -> None:
    class ByHand(Plain):
        """The same with torch's function."""

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(self._sample_loss(batch).mean())
            for optimizer in optimizers:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)
                optimizer.step()

    trainer([]).fit(reference := ByHand(optimizers=2), data(), data())
    trainer([GradientClipping(0.01)]).fit(module := Plain(optimizers=2), data(), data())
    for name, tensor in weights(reference).items():
        torch.testing.assert_close(weights(module)[name], tensor, rtol=0, atol=2e-7)
    trainer([]).fit(plain := Plain(optimizers=2), data(), data())
    assert not torch.allclose(weights(plain)["net.head.weight"], weights(module)["net.head.weight"], atol=1e-4)


@pytest.mark.parametrize("technique", [GradientClipping(2.0, 1.5), AdaptiveGradientClipping(0.01)])
def test_sparse_gradients_are_clipped_as_dense_ones_and_values_come_first(technique: Any) -> None:
    def stepped(sparse: bool, clip: Any) -> list[Tensor]:
        torch.manual_seed(0)
        table, layer = nn.Embedding(4, 3, sparse=sparse), nn.Linear(3, 1)
        (50 * layer(table(torch.tensor([1, 1, 3])))).sum().backward()  # a sparse one has the row 1 twice
        optimizer = torch.optim.SGD([table.weight, *layer.parameters()], 0.1)
        clip(optimizer)
        optimizer.step()
        return [table.weight.detach(), *(p.detach() for p in layer.parameters())]

    def by_torch(optimizer: torch.optim.Optimizer) -> None:
        parameters = optimizer.param_groups[0]["params"]
        nn.utils.clip_grad_value_(parameters, 1.5)
        nn.utils.clip_grad_norm_(parameters, 2.0)

    def clip(optimizer: torch.optim.Optimizer) -> None:
        change_gradients([technique], optimizer, None)

    ours = stepped(True, clip)
    dense = by_torch if isinstance(technique, GradientClipping) else clip
    torch.testing.assert_close(ours, stepped(False, dense), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ours[0], stepped(False, lambda optimizer: None)[0], atol=1e-2)


@pytest.mark.turns(6, family="ranks")
def test_two_processes_clip_skip_and_measure_as_one(tmp_path: Path) -> None:
    """In shards by norm, value and unit; a spike of one process alone; the noise between both."""
    run_ranks(dynamics.act_as_one, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "both max_norm and max_value are null"),
        ({"max_norm": 0.0}, "max_norm must be above 0 or null, got 0.0"),
        ({"max_value": -1}, "max_value must be above 0 or null, got -1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"GradientClipping: {message}"):
        GradientClipping(**arguments)
