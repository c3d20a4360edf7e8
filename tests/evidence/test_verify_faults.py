"""Tests of `verify`: each fault is found by the claim that it breaks, and healthy runs fail no claim."""

import pytest

import lit_efficient as le
from lit_efficient.evidence.verifying.verification import CLAIMS
from tests.evidence.seeded_faults import FAULTS
from tests.evidence.setups import HEALTHY

# What needs no batch of a certain kind holds wherever it is tried.
OF_ANY = {"runs", "determinism", "trains", "frozen", "resume", "rows", "modes"}
# Rows are mixed before the network sees them, on purpose.
MIXED = {"mixup"}
REFUSED = {"optimizer in backward": "accumulation"}  # by the technique, which accumulates nothing


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_where_it_is(name):
    fault = FAULTS[name]
    (verdict,) = le.verify(*fault.setup.made(), only=[fault.claim]).verdicts
    assert verdict.held is False, verdict
    assert verdict.number > verdict.tolerance
    assert fault.where in verdict.where, verdict


@pytest.mark.turns(9)
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_reported_of_a_healthy_run(name):
    report = le.verify(*HEALTHY[name].made())
    assert report.held, report.text()
    held = {verdict.claim for verdict in report.verdicts if verdict.held}
    assert held >= OF_ANY - ({"rows"} if name in MIXED else set())
    untried = {verdict.claim for verdict in report.verdicts if "could not be tried" in verdict.why}
    assert untried <= {REFUSED.get(name, "")}, report.text()


def test_each_claim_is_broken_by_some_fault():
    assert {fault.claim for fault in FAULTS.values()} == {claim.name for claim in CLAIMS}
    assert len(FAULTS) >= 30
    assert len(HEALTHY) >= 25
