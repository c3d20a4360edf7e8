"""What mixed precision keeps is counted as it is, and a run in which it costs memory says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import ActivationCheckpointing
from lit_efficient.cli import mixed_copies
from lit_efficient.cli.mixed_copies import MixedCopies, MixedPrecisionAdvice
from tests.support import Toy, data, trainer


@pytest.mark.parametrize("rows", [3, 500])
def test_copies_are_those_that_autograd_keeps(rows: int) -> None:
    """Two layers and a table, which nothing casts: what saved tensors hold in 16 bits, and no more of the weights."""
    module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
    x, saved, copies = torch.randn(rows, 64, requires_grad=True), {}, MixedCopies()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is torch.bfloat16:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    watching = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    with torch.autocast("cpu", torch.bfloat16), watching, copies.counting(module):
        module(x)
    held = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert copies.weights == 2 * (64 * 128 + 128 * 32)
    assert held <= copies.weights + copies.activations <= held + 2 * rows * 32  # nobody needs the last output
    again = MixedCopies()
    with again.counting(module):
        module(x)
    assert (again.weights, again.activations) == (0, 0)  # float32 keeps no copy
    assert not any(part._forward_hooks for part in module.modules())


def test_a_step_may_use_function_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tangent(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.func.grad(lambda x: self.net(x).sum())(batch[0])
            return super().training_step(batch, batch_idx)

    trainer([MixedPrecisionAdvice()], precision="bf16-mixed", max_steps=1, limit_val_batches=0).fit(
        Tangent(), data(), data()
    )


@pytest.mark.parametrize(
    ("rows", "precision", "said"), [(4, "bf16-mixed", 1), (4000, "bf16-mixed", 0), (4, "32-true", 0)]
)
def test_a_run_says_that_it_costs_memory(
    rows: int, precision: Any, said: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(mixed_copies, "_LEAST", 2**13)
    run = trainer([MixedPrecisionAdvice()], precision=precision, max_steps=2, limit_val_batches=0)
    run.fit(Toy(), data(2 * rows, rows), data())
    texts = [str(w.message) for w in recwarn if "copies of weights" in str(w.message)]
    assert len(texts) == said
    assert all("precision: bf16-mixed costs memory" in text for text in texts)


def test_what_decides_by_itself_what_is_kept_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_copies, "_LEAST", 0)
    run = trainer(
        [ActivationCheckpointing(), MixedPrecisionAdvice()], precision="bf16-mixed", max_steps=1, limit_val_batches=0
    )
    run.fit(Toy(), data(), data())  # a warning would be an error


def test_copies_of_mixed_precision_are_counted_in_the_first_step_alone() -> None:
    class Watching(Toy):
        hooks: list[int]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.hooks.append(len(self.net.head._forward_hooks))
            return super().training_step(batch, batch_idx)

    module = Watching()
    module.hooks = []
    trainer([MixedPrecisionAdvice()], precision="bf16-mixed").fit(module, data(), data())
    assert len(module.hooks) > 1
    assert module.hooks[0] == 1 + module.hooks[1]
    assert len({*module.hooks[1:]}) == 1
