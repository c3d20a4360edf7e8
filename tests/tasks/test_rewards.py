"""Rewards that can be verified, and what happens to those that fail."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from typing import Any

import pytest

from lit_efficient.errors import ConfigurationError
from lit_efficient.tasks import rewards
from lit_efficient.tasks.rewards import Reward


@pytest.mark.parametrize(
    ("function", "completion", "row", "arguments", "expected"),
    [
        ("exact_answer", " 12\n", {"answer": 12}, {}, 1),
        ("exact_answer", "it is 12", {"answer": "12"}, {}, 0),
        ("exact_answer", "#### 3 no, #### 12", {"answer": "12"}, {"after": "####"}, 1),
        ("exact_answer", "12", {"answer": "12"}, {"after": "####"}, 0),
        ("numeric_answer", "3 + 4 = 7.0", {"answer": 7}, {}, 1),
        ("numeric_answer", "1,234,567", {"answer": "#### 1234567"}, {}, 1),
        ("numeric_answer", "-0.5e1", {"answer": -5}, {}, 1),
        ("numeric_answer", "7.1", {"answer": 7}, {}, 0),
        ("numeric_answer", "7.1", {"answer": 7}, {"tolerance": 0.1}, 1),
        ("numeric_answer", "", {"answer": 7}, {}, 0),
        ("numeric_answer", "x = .5", {"answer": 0.5}, {}, 1),
        ("numeric_answer", "10-4", {"answer": 4}, {}, 1),
        ("numeric_answer", "it is \N{MINUS SIGN}2", {"answer": -2}, {}, 1),
        ("matches", "<b>a\nb</b>", {}, {"pattern": "<b>.*</b>", "whole": True}, 1),
        ("matches", "x <b>a</b>", {}, {"pattern": "<b>.*</b>", "whole": True}, 0),
        ("matches", "x <b>a</b>", {}, {"pattern": "<b>.*</b>"}, 1),
        ("shorter", "a" * 500, {}, {}, -0.5),
        ("valid_python", "```python\nx = 1\n```", {}, {}, 1),
        ("valid_python", "x = = 1", {}, {}, 0),
        ("valid_python", "", {}, {}, 0),
        ("valid_python", "-" * 100_000 + "1", {}, {}, 0),
        ("json_schema", '{"a": 1}', {"schema": '{"type": "object", "required": ["a"]}'}, {}, 1),
        ("json_schema", "not json", {"schema": {}}, {}, 0),
        ("json_schema", "[" * 100_000, {"schema": {}}, {}, 0),
    ],
)
def test_verifiable_answers(function: str, completion: str, row: Any, arguments: Any, expected: float) -> None:
    assert getattr(rewards, function)("", completion, row, **arguments) == expected


SCHEMA = {
    "type": "object",
    "required": ["name", "ages"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z]", "maxLength": 5},
        "ages": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 150}},
        "kind": {"enum": ["cat", "dog", None]},
        "sure": {"type": ["boolean", "null"]},
    },
}


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ('{"name": "Tom", "ages": [1, 2]}', True),
        ('```json\n{"name": "Tom", "ages": [1], "kind": null, "sure": null}\n```', True),
        ('{"name": "tom", "ages": [1]}', False),
        ('{"name": "Thomas", "ages": [1]}', False),
        ('{"name": "Tom", "ages": []}', False),
        ('{"name": "Tom", "ages": [151]}', False),
        ('{"name": "Tom", "ages": [1.5]}', False),
        ('{"name": "Tom", "ages": [true]}', False),
        ('{"name": "Tom"}', False),
        ('{"name": "Tom", "ages": [1], "more": 1}', False),
        ('{"name": "Tom", "ages": [1], "kind": "cow"}', False),
        ('{"name": "Tom", "ages": [1], "sure": 1}', False),
        ("[]", False),
    ],
)
def test_json_is_compared_with_a_schema(value: str, fits: bool) -> None:
    assert rewards.json_schema("", value, {}, SCHEMA) == fits


def test_keywords_that_are_not_supported_are_named() -> None:
    with pytest.raises(ConfigurationError, match="has the keyword 'oneOf', which is not supported"):
        rewards.json_schema("", "1", {}, {"oneOf": []})


CODE = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


@pytest.mark.parametrize(
    ("code", "share"),
    [
        (CODE, 1.0),
        (f"Here it is:\n```python\n{CODE}```\nDone.", 1.0),
        ("def add(a, b):\n    return 3\n", 0.5),
        ("def add(a, b:\n", 0.0),
        ("", 0.0),
        (f"{CODE}print('passed 2')\n", 1.0),
        (f"{CODE}\nimport os\nos._exit(0)\n", 0.0),
        (f"{CODE}\nraise SystemExit\n", 0.0),
        (f"{CODE}\nx = bytearray(2**33)\n", 0.0),
        (f"{CODE}\nimport socket\nsocket.socket()\n", 0.0),
        (f"{CODE}\nimport subprocess\nsubprocess.run(['true'])\n", 0.0),
        (f"{CODE}\nimport os\nos.fork()\n", 0.0),
        (f"{CODE}\nimport ctypes\nctypes.CDLL(None)\n", 0.0),
        (f"{CODE}\nopen('here.txt', 'w').write('a')\n", 1.0),
        (f"{CODE}\nopen('big.txt', 'wb').write(b'a' * 2**22)\n", 0.0),
    ],
)
def test_python_code_passes_a_share_of_its_tests(code: str, share: float) -> None:
    assert rewards.python_tests("", code, {"tests": TESTS}) == share


def test_python_code_changes_no_file_outside_of_its_folder_and_ends_in_time(tmp_path: Any) -> None:
    kept = tmp_path / "kept"
    kept.write_text("a")
    for change in (
        f"open({str(kept)!r}, 'w')",
        f"import os; os.remove({str(kept)!r})",
        f"import os; os.open({str(kept)!r}, os.O_RDWR)",
    ):
        assert rewards.python_tests("", f"{CODE}\n{change}\n", {"tests": TESTS}) == 0
    assert kept.read_text() == "a"
    start = time.monotonic()
    assert rewards.python_tests("", f"{CODE}\nwhile True: pass\n", {"tests": TESTS}, seconds=1) == 0
    assert time.monotonic() - start < 60


def _raises(prompt: str, completion: str, row: Any) -> float:
    return float(row["no such column"])


def _hangs(prompt: str, completion: str, row: Any) -> float:
    while True:
        try:
            time.sleep(1000)
        except Exception:
            continue


def _nothing(prompt: str, completion: str, row: Any) -> float:
    return math.nan


def _large(prompt: str, completion: str, row: Any) -> float:
    return 1e39  # not finite in float32


def _leaves(prompt: str, completion: str, row: Any) -> float:
    sys.exit(1)


def _catches_once(prompt: str, completion: str, row: Any) -> float:
    with contextlib.suppress(BaseException):
        time.sleep(1000)
    time.sleep(1000)
    return 1.0


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (_raises, "_raises raised KeyError: 'no such column'"),
        (_hangs, "_hangs took longer than 0.1 seconds"),
        (_nothing, "_nothing returned nan"),
        (_large, "_large returned 1e+39"),
        (_leaves, "_leaves raised SystemExit: 1"),
        (_catches_once, "_catches_once took longer than 0.1 seconds"),
        (rewards.exact_answer, "exact_answer raised ConfigurationError: column 'answer' of the row is empty"),
        (rewards.numeric_answer, "numeric_answer raised ConfigurationError: column 'answer' of the row is empty"),
    ],
)
def test_a_reward_that_fails_gives_a_sentence(function: Any, sentence: str) -> None:
    value, found = Reward(function, seconds=0.1)("a", "b", {"answer": None})
    assert math.isnan(value)
    assert found == sentence


def test_an_alarm_that_was_set_before_goes_on() -> None:
    before = signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert Reward(_one)("a", "b", {}) == (1.0, "")
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def _one(prompt: str, completion: str, row: Any) -> float:
    return 1.0
