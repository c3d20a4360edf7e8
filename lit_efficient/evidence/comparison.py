"""Stub until the real one is merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Estimate:
    value: float
    low: float
    high: float
    p: float | None
    n: int


@dataclass
class VariantResult:
    name: str
    failed: str
    time: Estimate
    rate: Estimate
    unit: str
    peak: int
    peak_ratio: float
    kinds: dict[str, int]
    planned: int | None
    checkpoint_bytes: int
    trainable: int
    loss: Estimate
    loss_at_time: Estimate
    steps_to_loss: Estimate | None
    time_to_loss: Estimate | None
    forgetting: Estimate | None
    curve: list[tuple[int, float, float]]
    seeds: int
    rounds: int


@dataclass
class Comparison:
    command: str
    about: dict[str, Any]
    metric: str
    variants: list[VariantResult]
