"""SelectiveBackprop: the paper's odds, rows of any batch, backward for the chosen alone, nothing else disturbed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_efficient import ConfigurationError, SelectiveBackprop
from lit_efficient.losses.selection import choose, selection_odds
from lit_efficient.mechanisms.moving import take_rows
from lit_efficient.testing import Run, Toy, data, trainer
from tests.contract.row import Row


def half_is_trained_on(run: Run) -> None:
    """Steps see half of each batch, and past losses are in the checkpoint."""
    assert {len(step.seen["rows"]) for step in run.steps} <= {1, 2}
    past = run.checkpoint["callbacks"]["SelectiveBackprop"]["past"]
    assert 0 < len(past) <= 1024


ROW = Row(SelectiveBackprop, half_is_trained_on, lambda: SelectiveBackprop(keep=1.0))


def test_odds_are_the_papers() -> None:
    generator = torch.Generator().manual_seed(0)
    losses, history = torch.rand(4, generator=generator), torch.rand(50, generator=generator)
    past = torch.cat((history, losses))
    slow = torch.tensor([sum(float(one <= loss) for one in past) / len(past) for loss in losses]).double() ** 3
    torch.testing.assert_close(selection_odds(losses, past, 3.0), slow)


def test_samples_are_drawn_without_repetition_by_their_odds() -> None:
    odds = torch.tensor([1.0, 2.0, 0.0, 5.0])
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([choose(odds, 1, generator) for _ in range(4000)]).flatten()
    shares = torch.bincount(draws, minlength=4) / 4000
    torch.testing.assert_close(shares, odds / 8, atol=0.03, rtol=0)
    assert choose(odds, 3, generator).tolist() == [0, 1, 3]
    assert choose(odds, 4, generator).tolist() == [0, 1, 2, 3]


def test_the_chosen_alone_are_differentiated_and_nothing_else_is_disturbed() -> None:
    class Watched(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[int, bool, bool, float]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            self.calls.append((len(batch[0]), torch.is_grad_enabled(), self.net.training, float(self.seen["draw"])))
            return output

    module = Watched()
    selective = SelectiveBackprop(keep=0.25, beta=50.0)
    run = trainer([selective], max_steps=2, log_every_n_steps=1)
    torch.manual_seed(0)
    run.fit(module, data(), data())
    assert [call[:3] for call in module.calls] == [(4, False, False), (1, True, True)] * 2
    assert module.calls[0][3] == module.calls[1][3]  # the same draw
    assert float(run.callback_metrics["train/loss"]) == float(module.seen["sample_loss"].mean())
    assert len(selective.state_dict()["past"]) == 8
    assert float(module.seen["sample_loss"]) > float(selective._past[-4:].median())  # a hard one, nearly for certain


def test_rows_of_any_batch() -> None:
    rows = torch.tensor([0, 2])
    batch = (torch.arange(6).reshape(3, 2), {"text": ("a", "b", "c"), "n": 3, "t": torch.ones(2)}, [torch.zeros(3, 1)])
    x, named, (y,) = take_rows(batch, rows, 3)
    assert x.tolist() == [[0, 1], [4, 5]]
    assert named["text"] == ("a", "c")
    assert named["n"] == 3
    assert named["t"].shape == (2,)
    assert y.shape == (2, 1)


def test_what_it_cannot_choose_from_is_refused() -> None:
    class Plain(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"]

    with pytest.raises(ConfigurationError, match=r"SelectiveBackprop got no sample losses from Plain.training_step"):
        trainer([SelectiveBackprop()], max_steps=1).fit(Plain(), data(), data())
    for arguments, words in (({"keep": 0}, "keep"), ({"beta": -1}, "beta"), ({"history": 0}, "history")):
        with pytest.raises(ConfigurationError, match=f"SelectiveBackprop: {words} must be"):
            SelectiveBackprop(**arguments)  # type: ignore[arg-type]


def test_a_second_run_does_not_compare_with_the_losses_of_the_first() -> None:
    technique = SelectiveBackprop()
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        module = Toy()
        torch.manual_seed(0)
        trainer([technique], max_epochs=2).fit(module, data(), data())
        weights.append(module.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
