"""The page of families says what a run finds."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests import families
from tests.families import FAMILIES, PAGE


def test_the_page_lists_each_family_once() -> None:
    assert len(FAMILIES) == 35
    assert FAMILIES.keys() <= {*CONFIG_MAPPING.keys()}
    table = PAGE.read_text("utf-8").split(families.BEGIN)[1]
    assert [name for name in FAMILIES if table.count(f"(`{name}`) |") != 1] == []


@pytest.mark.turns(35)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_does_what_the_page_says(family: str) -> None:
    """Another answer is written by ``python -m tests.generated families``."""
    pytest.importorskip("gguf")
    found = families.results(family)
    lines = PAGE.read_text("utf-8").splitlines()
    assert families.row(family, found) in lines
    told = [line.removeprefix("- ").partition(" Refused: ") for line in lines if " Refused: " in line]
    assert [reason for reason, _, names in told if f"`{family}`" in names] == families.reasons(family, found)
