"""Losses on pairs: numbers computed by hand, gradients, and values far out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.preference import (
    dpo_loss,
    kto_loss,
    log1mexp,
    orpo_loss,
    reward_loss,
    sequence_log_probs,
    simpo_loss,
)


def _vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# h = (-10 + 12) - (-20 + 15) = 7;  (-8 + 5) - (-6 + 9) = -6
POLICY = _vector(-10.0, -8.0), _vector(-20.0, -6.0)
REFERENCE = _vector(-12.0, -5.0), _vector(-15.0, -9.0)


@pytest.mark.parametrize(
    ("kind", "smoothing", "expected"),
    [
        ("sigmoid", 0.0, [math.log1p(math.exp(-0.7)), math.log1p(math.exp(0.6))]),
        (
            "sigmoid",
            0.1,
            [
                0.9 * math.log1p(math.exp(-0.7)) + 0.1 * math.log1p(math.exp(0.7)),
                0.9 * math.log1p(math.exp(0.6)) + 0.1 * math.log1p(math.exp(-0.6)),
            ],
        ),
        ("hinge", 0.0, [0.3, 1.6]),
        ("ipo", 0.0, [(7 - 5) ** 2, (-6 - 5) ** 2]),
    ],
)
def test_dpo_by_hand(kind: Any, smoothing: float, expected: list[float]) -> None:
    got = dpo_loss(*POLICY, *REFERENCE, beta=0.1, kind=kind, label_smoothing=smoothing)
    torch.testing.assert_close(got, _vector(*expected))


def test_a_policy_that_is_the_reference_pays_log_2_and_learns_half_beta() -> None:
    chosen = _vector(-30.0).requires_grad_()
    loss = dpo_loss(chosen, _vector(-7.0), _vector(-30.0), _vector(-7.0), beta=0.2)
    loss.sum().backward()
    assert float(loss.detach()) == math.log(2)
    assert float(chosen.grad) == pytest.approx(-0.1)  # -beta s(-0)


def test_orpo_by_hand() -> None:
    # p = 0.5 and 0.2: odds 1 and 0.25, so log s(log 4) = log 0.8
    losses, log_odds = orpo_loss(_vector(math.log(0.5)), _vector(math.log(0.2)), weight=0.3)
    assert float(log_odds) == pytest.approx(math.log(4))
    assert float(losses) == pytest.approx(math.log(2) - 0.3 * math.log(0.8))


def test_simpo_by_hand() -> None:
    loss = simpo_loss(_vector(-1.0), _vector(-1.5), beta=2.0, gamma=0.4)
    assert float(loss) == pytest.approx(math.log1p(math.exp(-(2 * 0.5 - 0.4))))


def test_reward_by_hand() -> None:
    chosen, rejected = _vector(2.0, -1.0), _vector(0.5, 1.0)
    torch.testing.assert_close(
        reward_loss(chosen, rejected), _vector(math.log1p(math.exp(-1.5)), math.log1p(math.exp(2.0)))
    )
    got = reward_loss(chosen, rejected, margin=_vector(1.0, 0.0), centering=0.01)
    expected = _vector(math.log1p(math.exp(-0.5)) + 0.0625, math.log1p(math.exp(2.0)))
    torch.testing.assert_close(got, expected)


def test_sequences_are_summed_over_the_tokens_that_count() -> None:
    logits = torch.zeros(2, 3, 4)
    logits[0, 1, 2] = math.log(5)  # p = 5 / 8
    labels = torch.tensor([[-100, 2, 0], [-100, -100, -100]])
    for scores in (logits, torch.tensor([[0.0, math.log(8 / 5), math.log(4)], [0.0, 0.0, 0.0]])):
        sums, tokens = sequence_log_probs(scores, labels)
        torch.testing.assert_close(sums, torch.tensor([-math.log(8 / 5) - math.log(4), 0.0]))
        assert tokens.tolist() == [2, 1]


FUNCTIONS: dict[str, Any] = {
    "sigmoid": lambda a, b: dpo_loss(a, b, *REFERENCE, beta=0.3),
    "smoothed": lambda a, b: dpo_loss(a, b, *REFERENCE, beta=0.3, label_smoothing=0.2),
    "hinge": lambda a, b: dpo_loss(a, b, *REFERENCE, beta=0.3, kind="hinge"),
    "ipo": lambda a, b: dpo_loss(a, b, *REFERENCE, beta=0.3, kind="ipo"),
    "orpo": lambda a, b: orpo_loss(a, b, weight=0.5)[0],
    "simpo": lambda a, b: simpo_loss(a, b, beta=2.0, gamma=0.5),
    "reward": lambda a, b: reward_loss(a, b, centering=0.1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name: str) -> None:
    chosen, rejected = _vector(-0.05, -3.0).requires_grad_(), _vector(-0.9, -0.2).requires_grad_()
    assert torch.autograd.gradcheck(FUNCTIONS[name], (chosen, rejected))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("far", [(-1e4, -1e-9), (-1e-9, -1e4), (0.0, 0.0), (-1e4, -1e4)])
def test_far_out_losses_and_gradients_are_finite(name: str, far: tuple[float, float]) -> None:
    chosen, rejected = (torch.full((2,), value, requires_grad=True) for value in far)
    loss = FUNCTIONS[name](chosen, rejected)
    loss.sum().backward()
    for tensor in (loss, chosen.grad, rejected.grad):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("x", [-1e-6, -0.1, -0.6931, -0.6932, -5.0, -80.0])
def test_log1mexp_is_exact_in_float32(x: float) -> None:
    x = float(torch.tensor(x))
    expected = math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x))
    assert float(log1mexp(torch.tensor(x))) == pytest.approx(expected, rel=1e-6, abs=0)


def test_an_offset_moves_the_difference_of_rewards() -> None:
    """https://arxiv.org/abs/2402.10571, equation 6, pair by pair."""
    policy = torch.tensor([-3.0, -5.0]), torch.tensor([-4.0, -4.5])
    refs = torch.tensor([-3.5, -4.0]), torch.tensor([-3.0, -6.0])
    offset = torch.tensor([0.0, 0.7])
    got = dpo_loss(*policy, *refs, 0.5, offset=offset)
    rewards = [0.5 * (0.5 + 1.0), 0.5 * (-1.0 - 1.5) - 0.7]
    assert got.tolist() == pytest.approx([math.log(1 + math.exp(-reward)) for reward in rewards])
    with pytest.raises(ConfigurationError, match="offset needs kind 'sigmoid', got 'ipo'"):
        dpo_loss(*policy, *refs, 0.5, "ipo", offset=offset)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: dpo_loss(a, a, a, a, beta=0.0), "beta must be above 0, got 0.0"),
        (lambda a: dpo_loss(a, a, a, a, beta=1.0, kind="kto"), "kind must be one of sigmoid, hinge, ipo, got 'kto'"),
        (lambda a: dpo_loss(a, a, a, a, beta=1.0, label_smoothing=0.5), "below 0.5, got 0.5"),
        (
            lambda a: dpo_loss(a, a, a, a, beta=1.0, kind="ipo", label_smoothing=0.1),
            "label_smoothing needs kind 'sigmoid', got 0.1 with 'ipo'",
        ),
        (lambda a: orpo_loss(a, a, weight=-1.0), "weight must be at least 0, got -1.0"),
        (lambda a: simpo_loss(a, a, beta=-1.0, gamma=0.0), "simpo_loss: beta must be above 0, got -1.0"),
        (lambda a: simpo_loss(a, a, beta=1.0, gamma=-0.1), "gamma must be at least 0, got -0.1"),
        (lambda a: reward_loss(a, a, centering=-0.1), "centering must be at least 0, got -0.1"),
    ],
)
def test_bad_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call(_vector(-1.0))


def test_kto_pulls_good_answers_up_and_bad_ones_down_with_their_weights() -> None:
    """w (1 - sigmoid(beta (r - k))) for good answers, and w (1 - sigmoid(beta (k - r))) for bad ones."""
    ratios = torch.tensor([1.2, -0.3, 1.2, -0.3], dtype=torch.float64)
    good = torch.tensor([True, True, False, False])
    found = kto_loss(ratios, good, beta=0.5, kl=torch.tensor(0.4), desirable_weight=1.5, undesirable_weight=0.7)
    expected = [1.5 / (1 + math.exp(0.5 * (r - 0.4))) for r in (1.2, -0.3)]
    expected += [0.7 / (1 + math.exp(0.5 * (0.4 - r))) for r in (1.2, -0.3)]
    assert found.tolist() == pytest.approx(expected)
