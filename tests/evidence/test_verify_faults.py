"""Each planted fault is found by the claim that it breaks, which says where; of healthy runs nothing is reported."""

import pytest

import lit_efficient as le
from tests.evidence.seeded_faults import FAULTS


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_where_it_is(name):
    fault = FAULTS[name]
    (verdict,) = le.verify(*fault.setup.made(), only=[fault.claim]).verdicts
    assert verdict.held is False, verdict
    assert verdict.number > verdict.tolerance
    assert fault.where in verdict.where, verdict
