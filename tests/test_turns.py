from __future__ import annotations

import pytest

from tests.turns import commit, resting

CASES = list("abcdefg")


def test_each_case_has_its_turn() -> None:
    ran = [{*CASES} - resting(CASES, 3, turn, always="f") for turn in range(3)]
    assert set.union(*ran) == {*CASES}
    assert set.intersection(*ran) == {"f"}
    assert resting(CASES, 3, 1) == resting(CASES, 3, 4)
    with pytest.raises(AssertionError, match="no such case"):
        resting(CASES, 3, 0, always="z")


@pytest.mark.turns(1)
@pytest.mark.parametrize("case", CASES)
def test_one_of_one_rests_never(case: str, request: pytest.FixtureRequest) -> None:
    assert not rests(request)


@pytest.mark.turns(2, always=["a", "b"])
@pytest.mark.parametrize("case", CASES)
def test_who_rests_is_nightlys(case: str, request: pytest.FixtureRequest) -> None:
    assert rests(request) == (case in resting(CASES, 2, commit(), always="ab"))


@pytest.mark.turns(2, family="letters")
def test_a(request: pytest.FixtureRequest) -> None:
    assert rests(request) != (commit() % 2 == 0)


@pytest.mark.turns(2, family="letters")
def test_b(request: pytest.FixtureRequest) -> None:
    assert rests(request) != (commit() % 2 == 1)


def rests(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("nightly") is not None
