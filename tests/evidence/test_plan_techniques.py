"""Tests of plans of a toy with every technique against a real step."""

from __future__ import annotations

import pytest
import torch

import lit_efficient
from lit_efficient.evidence.fits import LiveFit
from lit_efficient.evidence.memory_kinds import StepMeter
from lit_efficient.testing import data, trainer
from lit_efficient.traits import Trait, has_trait
from tests.contract.table import NAMES, case

# On the CPU, where nothing moves, the copies of the toy's streams are not those of a step on a GPU.
STREAMED = {"ActivationOffload": 0.03, "BlockSwap": 0.07}


@pytest.mark.filterwarnings("ignore")  # of techniques, on a toy
@pytest.mark.turns(16)
@pytest.mark.parametrize(
    "name", [name for name in NAMES if not has_trait(getattr(lit_efficient, name), Trait.TRIES_STEPS)]
)
def test_every_technique_is_accounted_for(name: str) -> None:
    it = case(name)
    planned = lit_efficient.plan(LiveFit(trainer(it.make(), **it.trainer), it.toy(), data(it.rows)))
    assert name in dict(planned.techniques)
    parts, meter = it.make(), StepMeter()
    for part in parts:
        part.worst_case = True
    with torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        trainer([*parts, meter], **it.trainer).fit(it.toy(), data(it.rows), data())
    real = meter.steps[1]
    assert abs(planned.peak - real.peak) <= STREAMED.get(name, 0.001) * real.peak
