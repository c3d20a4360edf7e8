"""Rewards that can be verified, and what happens to those that fail."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
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
        ("valid_python", "x = '\\d'", {}, {}, 1),
    ],
)
def test_verifiable_answers(function: str, completion: str, row: Any, arguments: Any, expected: float) -> None:
    assert getattr(rewards, function)("", completion, row, **arguments) == expected


SCHEMA = {
    "type": "object",
    "required": ["name", "ages"],
    "additionalProperties": False,
    "properties": {
        "name": {"$ref": "#/$defs/name"},
        "ages": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 150}},
        "kind": {"oneOf": [{"enum": ["cat", "dog"]}, {"type": "null"}]},
    },
    "$defs": {"name": {"type": "string", "pattern": "^[A-Z]", "maxLength": 5}},
}


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ('{"name": "Tom", "ages": [1, 2]}', True),
        ('```json\n{"name": "Tom", "ages": [1], "kind": null}\n```', True),
        ('{"name": "tom", "ages": [1]}', False),
        ('{"name": "Thomas", "ages": [1]}', False),
        ('{"name": "Tom", "ages": []}', False),
        ('{"name": "Tom", "ages": [true]}', False),
        ('{"name": "Tom", "ages": [NaN]}', False),
        ('{"name": "Tom", "ages": [1], "more": 1}', False),
        ('{"name": "Tom", "ages": [1], "kind": "cow"}', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_json_is_compared_with_a_schema(value: str, fits: bool) -> None:
    pytest.importorskip("jsonschema")
    assert rewards.json_schema("", value, {}, SCHEMA) == fits
    assert rewards.json_schema("", value, {"form": SCHEMA}, column="form") == fits


def test_schemas_that_are_not_valid_and_addresses_are_refused() -> None:
    pytest.importorskip("jsonschema")
    value, sentence = Reward(rewards.json_schema, arguments={"schema": {"type": "text"}})("", "1", {})
    assert math.isnan(value)
    assert "the JSON schema is not valid: 'text' is not valid under any of the given schemas" in sentence
    value, sentence = Reward(rewards.json_schema)("", "1", {"schema": {"$ref": "http://127.0.0.1:9/schema"}})
    assert math.isnan(value)
    assert "Unresolvable: http://127.0.0.1:9/schema" in sentence


def test_the_missing_package_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "jsonschema" else found(name))
    with pytest.raises(ConfigurationError, match=r"json_schema needs jsonschema: pip install '?(lit-eff|jsonschema)"):
        Reward(rewards.json_schema)


CODE = "def add(a, b):\n    return a + b\n"
_DATA_CLASS = "from dataclasses import dataclass\n@dataclass\nclass A:\n    a: int\n"
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
        (f"from __future__ import annotations\n{_DATA_CLASS}{CODE}", 1.0),
        (f"{CODE}\nif __name__ == '__main__':\n    input()\n", 1.0),
    ],
)
def test_python_code_passes_a_share_of_its_tests(code: str, share: float) -> None:
    assert rewards.python_tests("", code, {"tests": TESTS}) == share


_WRITES_EVERYWHERE = """
import os
for n in range(64):
    try:
        os.write(n, b'ready 2')
    except OSError:
        pass
"""
_FAKES = {
    "results that are printed": ("print('ready 3')", 2),
    "results in every file": (_WRITES_EVERYWHERE, 0),
    "the result of its own command line": ("print(open('/proc/self/cmdline').read().split()[-1] + ' 3')", 2),
    "the number of passed tests": ("import __main__\n__main__.passed = 3\n__main__.run = print", 2),
    "another exec": ("import builtins\nbuiltins.exec = lambda *given: None\ndef add(a, b): return 3", 1),
}


@pytest.mark.parametrize("name", _FAKES)
def test_python_code_cannot_fake(name: str) -> None:
    tests = [*TESTS, "assert add(5, 5) == 9"]
    code, passed = _FAKES[name]
    assert rewards.python_tests("", f"{CODE}\n{code}\n", {"tests": tests}) == passed / 3
    assert rewards.python_tests("", f"{CODE}\n{code}\nimport os\nos._exit(0)\n", {"tests": tests}) == 0


_WRITES = (
    "open({0!r}, 'w')",
    "import os; os.remove({0!r})",
    "import os; os.open({0!r}, os.O_RDWR)",
    "import os; os.open('kept', os.O_RDWR | os.O_TRUNC, dir_fd=os.open({1!r}, os.O_RDONLY))",
    "import os; os.chdir({1!r}); open('kept', 'w')",
    "import os; os.rename({0!r}, 'kept')",
    "import os; os.symlink({0!r}, 'link'); open('link', 'w')",
    "import os; os.truncate({0!r}, 0)",
    "import pathlib; pathlib.Path({0!r}).chmod(0)",
    "import sqlite3; sqlite3.connect({1!r} + '/new')",
    "import dbm.ndbm; dbm.ndbm.open({1!r} + '/new', 'c')",
    "import shutil; shutil.rmtree({1!r})",
)


def test_python_code_changes_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("a")
    for change in _WRITES:
        code = f"{CODE}\n{change.format(str(kept), str(tmp_path))}\n"
        assert rewards.python_tests("", code, {"tests": TESTS}) == 0, change
    assert kept.read_text() == "a"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


_NEVER_ENDS = """
import signal, threading
for n in range(1, 64):
    try:
        signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
for _ in range(20):
    threading.Thread(target=lambda: list(iter(int, 1))).start()
while True:
    print("a" * 10**6)
"""
_NO_LIMITS = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
kept = [bytearray(2**26) for _ in iter(int, 1)]
"""
_BOMBS = (
    _NEVER_ENDS,
    _NO_LIMITS,
    "import multiprocessing as m\nm.set_start_method('spawn')\nm.Process(target=print).start()",
    "import _posixsubprocess\n_posixsubprocess.fork_exec([b'/bin/sleep'], [b'/bin/sleep'])",
    "import os\nfor i in range(10**6): os.mkdir('a/' * i + 'a')",
)


@pytest.mark.parametrize("bomb", _BOMBS)
def test_python_code_ends_in_time_with_all_that_it_has_started(bomb: str) -> None:
    start = time.monotonic()
    assert rewards.python_tests("", f"{CODE}\n{bomb}\n", {"tests": TESTS}, seconds=2) == 0
    assert time.monotonic() - start < 60


def test_other_processes_of_a_program_are_ended_with_it(tmp_path: Path) -> None:
    """The guard refuses them, but the end does not depend on it."""
    program = f"import os, time\nif not os.fork():\n    time.sleep(1)\n    open({str(tmp_path / 'late')!r}, 'w')\n"
    assert rewards._output_of(f"{program}else: print(1)", 60) == "1\n"
    assert rewards._output_of(f"{program}else: time.sleep(60)", 0.5) == ""
    time.sleep(1)
    assert not (tmp_path / "late").exists()


def test_limits_under_which_python_does_not_start_are_named() -> None:
    with pytest.raises(ConfigurationError, match="Python could not be started under the limits"):
        rewards.python_tests("", CODE, {"tests": TESTS}, seconds=1e-3)


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


class Mute(Exception):
    """Its text cannot be written."""

    def __str__(self) -> str:
        raise self


def _mute(prompt: str, completion: str, row: Any) -> float:
    raise Mute


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
        (_mute, "_mute raised Mute: a Mute that cannot be written as text"),
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
