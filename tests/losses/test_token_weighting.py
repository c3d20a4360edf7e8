"""Weights of tokens: the formulas of LLaMA-Factory and axolotl on single tokens, and weights without a gradient."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import IGNORE, token_losses
from lit_efficient.losses.token_weighting import TokenWeighting


def _logits(vocab: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 5, vocab, generator=generator)
    labels = torch.randint(0, vocab, (2, 5), generator=generator)
    labels[0, 1] = IGNORE
    return logits, labels


@pytest.mark.parametrize("kind", ["dft", "eaft"])
def test_the_gradient_is_that_of_the_cross_entropy_times_a_constant(kind: str) -> None:
    logits, labels = _logits()
    logits.requires_grad_()
    weights = TokenWeighting(kind, 2.0)(logits, labels)  # type: ignore[arg-type]
    assert not weights.requires_grad
    (got,) = torch.autograd.grad((token_losses(logits, labels) * weights).sum(), logits)
    one_hot = F.one_hot(labels.clamp(min=0), logits.shape[-1])
    expected = (logits.detach().softmax(-1) - one_hot) * weights[..., None] * (labels != IGNORE)[..., None]
    torch.testing.assert_close(got, expected)


def test_dft_weighs_a_token_by_its_probability() -> None:
    logits, labels = _logits()
    weights = TokenWeighting("dft")(logits, labels)
    for row, column in ((0, 0), (1, 4)):
        probabilities = logits[row, column].double().exp()
        expected = probabilities[labels[row, column]] / probabilities.sum()
        assert float(weights[row, column]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("vocab", [50, 7])
def test_eaft_weighs_a_token_by_the_entropy_of_the_20_most_likely(vocab: int) -> None:
    logits, labels = _logits(vocab)
    weights = TokenWeighting("eaft", 1.5)(logits, labels)
    for row, column in ((0, 0), (1, 4)):
        top = sorted(logits[row, column].double().tolist(), reverse=True)[:20]
        total = sum(math.exp(value) for value in top)
        entropy = -sum(math.exp(v) / total * math.log(math.exp(v) / total) for v in top)
        assert float(weights[row, column]) == pytest.approx((entropy / math.log(len(top))) ** 1.5, rel=1e-5)
    uniform = TokenWeighting("eaft")(torch.zeros(1, vocab), labels[:1, 0])
    certain = TokenWeighting("eaft")(F.one_hot(torch.tensor([3]), vocab) * 1e4, labels[:1, 0])
    assert float(uniform) == pytest.approx(1)
    assert float(certain) == 0


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="kind must be one of dft, eaft, got 'focal'"):
        TokenWeighting("focal")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="alpha must be above 0, got 0"):
        TokenWeighting("eaft", 0)
