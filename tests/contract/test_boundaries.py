"""Each argument of each technique at its boundaries: it acts, or an error that names the technique refuses it."""

from __future__ import annotations

import inspect
import math
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_efficient import errors
from lit_efficient.errors import LitEfficientError
from tests.contract.table import CASES, NAMES, case

LARGE = 10**6  # where an argument has no upper bound
# Arguments whose large values mean as many steps, layers or processes of the toy.
FEW = 16  # the largest value to try for them
LONG = {("LRFinder", "num_steps"), *(("DataLoaderTuner", one) for one in ("workers", "prefetch", "batches"))}
LONG |= {
    ("MaxBatchSize", "max_size"),
    ("MixtureOfExperts", "experts"),
    ("MixtureOfExperts", "shared"),
    ("TiledMLP", "tiles"),
    ("LoRA", "rank"),
}
WRONG = [True, "3", math.nan]  # for a number
NO_LIST: list[Any] = [[], 5, "word", [None]]  # for a list


class Bounds:
    """The ranges and choices that a constructor checks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: dict[str, dict[str, Any]] = {}
        self.choices: dict[str, list[Any]] = {}
        number, choice = errors.check_number, errors.check_choice

        def check_number(owner: str, name: str, value: Any, **given: Any) -> None:
            self.ranges[name] = given
            number(owner, name, value, **given)

        def check_choice(owner: str, name: str, value: object, choices: Any, **given: Any) -> None:
            self.choices[name] = list(choices)
            choice(owner, name, value, choices, **given)

        for module in [one for name, one in sys.modules.items() if name.startswith("lit_efficient.")]:
            for name, own, new in (("check_number", number, check_number), ("check_choice", choice, check_choice)):
                if vars(module).get(name) is own:
                    monkeypatch.setattr(module, name, new)

    def numbers(self, argument: str) -> list[Any]:
        """Each bound, a value just inside and one just outside."""
        given = self.ranges.get(argument, {})
        near = 1 if given.get("whole") else 1e-6
        found = []
        for bound, inside in (("least", near), ("above", near), ("most", -near), ("below", -near)):
            if given.get(bound) is not None:
                found += [given[bound], given[bound] + inside, given[bound] - inside]
        if given and given.get("most") is None and given.get("below") is None:
            found.append(LARGE if given.get("whole") else float(LARGE))
        return found


def values(technique: str, argument: str, hint: Any, bounds: Bounds) -> Iterator[Any]:
    """Values to try for an argument."""
    annotation = str(hint)
    numbers = [n for n in bounds.numbers(argument) if n <= FEW or (technique, argument) not in LONG]
    yield from numbers
    if argument in bounds.ranges:
        yield from WRONG
    choices = bounds.choices.get(argument, literals(hint))
    if choices:
        yield from [*choices, "no-such-choice"]
    if "bool" in annotation:
        yield from (False, True)
    if "None" in annotation:
        yield None
    if any(word in annotation for word in ("Sequence", "list", "tuple")):
        yield from [*NO_LIST, *([number] for number in numbers)]
    if any(word in annotation for word in ("dict", "Mapping")):
        yield from [{}, *NO_LIST]


def literals(hint: Any) -> list[Any]:
    """Return the values of the literals in an annotation."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return list(inner)
    return [value for one in inner for value in literals(one)]


def arguments(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(type(CASES[name].make())).parameters
    return {key: one for key, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD}


@pytest.mark.turns(60)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "argument"), [(name, key) for name in NAMES for key in arguments(name)])
def test_a_boundary_acts_or_is_refused(
    name: str, argument: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    bounds = Bounds(monkeypatch)
    technique = CASES[name].make()
    given = arguments(name)
    hints = typing.get_type_hints(type(technique).__init__)
    bad = []
    for value in values(name, argument, hints[argument], bounds):
        technique = CASES[name].make()
        try:
            changed = type(technique)(**{key: getattr(technique, key) for key in given} | {argument: value})
            run = case(name).fit([changed], saves=False)
        except LitEfficientError as error:
            if name not in str(error):
                bad.append(f"{argument}={value!r}: {error}")
        except Exception as error:
            if any(name in note for note in getattr(error, "__notes__", ())):
                continue  # an error of the module's own code
            bad.append(f"{argument}={value!r}: {type(error).__name__}: {error}")
        else:
            assert not any(report.states_nothing() for report in run.reports.values())
    assert not bad, "\n".join(bad)
