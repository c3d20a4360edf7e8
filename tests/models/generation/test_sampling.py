"""Filters of the next token's distribution are those of transformers, in its order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lit_efficient.errors import ConfigurationError
from lit_efficient.models.generation.sampling import UNIT, Sampling, drawn, penalized, remaining, sample_token

VOCABULARY = 50
CASES = list(
    itertools.product((0.3, 1.0, 2.5), (1.0, 0.9, 0.3), (0, 1, 7, 1000), (0.0, 0.05, 0.7), (0.6, 1.0, 1.8), (0, 1))
)


def theirs(logits: torch.Tensor, seen: torch.Tensor, how: Sampling) -> torch.Tensor:
    steps: list[Any] = [RepetitionPenaltyLogitsProcessor(how.repetition_penalty)]
    steps += [TemperatureLogitsWarper(how.temperature)]
    steps += [TopKLogitsWarper(how.top_k)] if how.top_k else []
    steps += [TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []
    steps += [MinPLogitsWarper(how.min_p)] if how.min_p else []
    return LogitsProcessorList(steps)(seen, logits.clone()).softmax(-1)


def test_what_is_left_is_what_transformers_leaves() -> None:
    assert len(CASES) == 648
    for number, (temperature, top_p, top_k, min_p, penalty, spread) in enumerate(CASES):
        generator = torch.Generator().manual_seed(number)
        logits = torch.randn(2, VOCABULARY, generator=generator) * (0.5 if spread else 4)
        seen = torch.randint(VOCABULARY, (2, 9), generator=generator)
        how = Sampling(temperature, top_p, top_k, min_p, penalty)
        ours = remaining(penalized(logits, seen, penalty), how).exp()
        expected = theirs(logits, seen, how)
        assert torch.equal(ours > 0, expected > 0), how
        torch.testing.assert_close(ours, expected)


def test_draws_are_those_of_the_distribution() -> None:
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(1)) * 2
    how = Sampling(1.3, 0.9, 5, 0.05)
    expected = theirs(logits, torch.zeros(1, 0, dtype=torch.long), how)
    generator = torch.Generator().manual_seed(0)
    tokens = sample_token(logits.expand(20_000, -1), 1.3, 0.9, generator, 5, 0.05).flatten()
    frequency = torch.bincount(tokens, minlength=8) / 20_000
    torch.testing.assert_close(frequency, expected[0], atol=0.015, rtol=0)
    assert not frequency[expected[0] == 0].any()


def test_a_uniform_number_decides_a_row_alone() -> None:
    probability = torch.tensor([[0.25, 0.0, 0.5, 0.25], [0.0, 1.0, 0.0, 0.0]])
    quarter = UNIT // 4
    numbers = torch.tensor([0, quarter - 1, quarter, 3 * quarter - 1, 3 * quarter, UNIT - 1])
    for number, token in zip(numbers, [0, 0, 2, 2, 3, 3]):
        assert drawn(probability.log(), number.expand(2)).tolist() == [token, 1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"top_k": -1}, "top_k must be a whole number of at least 0, got -1"),
        ({"top_k": 0.5}, "top_k must be a whole number of at least 0, got 0.5"),
        ({"min_p": 1.5}, "min_p must be at least 0 and at most 1, got 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, got 0.0"),
    ],
)
def test_what_means_nothing_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=f"me: {sentence}"):
        Sampling(**changes).check("me")
