import math

import pytest

from lit_efficient.optimizers.schedules import warmup_cosine


def test_the_rate_rises_then_falls_to_zero() -> None:
    factors = [warmup_cosine(step, 10, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[10] == 1.0
    assert factors[55] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert warmup_cosine(10**6, 10, math.inf) == 1.0
    assert warmup_cosine(0, 0, 10) == 1.0
