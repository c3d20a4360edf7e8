"""Rewards of `PolicyOptimization` that can be verified, and the call of any reward under a limit of time.

A reward is a function ``f(prompt, completion, row, **arguments) -> float``. Its ``row`` is the row of the data. One
that raises, takes too long, or returns no finite number leaves its sample out, with a sentence.
"""

import ast
import json
import math
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lit_efficient.errors import ConfigurationError, check_number, checks_types, refusal

Row = Mapping[str, Any]

_LARGEST = 1e15  # squares of larger rewards are not finite in float32


@checks_types
@dataclass(frozen=True)
class Reward:
    """A reward and its weight.

    Args:
        function: Function by its dotted name: one of ``lit_efficient.tasks.rewards``, or of a package that
            ``--allow-import`` names.
        weight: Factor of the reward. Rewards are summed.
        arguments: Further arguments of the function.
        seconds: Longest time for one sample, above 0. On systems without SIGALRM, and outside of the main thread, there
            is no limit.
    """

    function: Callable[..., float]
    weight: float = 1.0
    arguments: dict[str, Any] | None = None
    seconds: float = 10.0

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise refusal("Reward", "function", "a function", self.function)
        check_number("Reward", "weight", self.weight)
        check_number("Reward", "seconds", self.seconds, above=0)

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def __call__(self, prompt: str, completion: str, row: Row) -> tuple[float, str]:
        """Return the reward of a sample and "", or NaN and a sentence."""
        try:
            with _at_most(self.seconds):
                value = float(self.function(prompt, completion, row, **(self.arguments or {})))
        except (Exception, SystemExit) as error:  # functions of users raise anything
            return math.nan, f"{self.name} raised {type(error).__name__}: {str(error)[:200]}"
        except _TookTooLong:
            return math.nan, f"{self.name} took longer than {self.seconds:g} seconds"
        if not abs(value * self.weight) <= _LARGEST:
            return math.nan, f"{self.name} returned {value}"
        return value, ""


class _TookTooLong(BaseException):
    """Not an Exception, so that functions that catch exceptions do not catch it."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_: object) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again, because a function may catch all that is raised, and go on.
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _wanted(row: Row, column: str) -> Any:
    if column not in row:
        raise ConfigurationError(f"the row has no column {column!r}, only {', '.join(map(repr, row))}")
    value = row[column]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ConfigurationError(f"column {column!r} of the row is empty")
    return value


def exact_answer(prompt: str, completion: str, row: Row, column: str = "answer", after: str = "") -> float:
    """Return 1 if the completion is the answer, without spaces around it, else 0.

    Args:
        prompt: Prompt.
        completion: Completion.
        row: Row of the data.
        column: Column of the answer.
        after: Text after which the answer begins, at its last occurrence. Without it the completion is wrong.
    """
    if after:
        _, found, completion = completion.rpartition(after)
        if not found:
            return 0.0
    return float(completion.strip() == str(_wanted(row, column)).strip())


def numeric_answer(prompt: str, completion: str, row: Row, column: str = "answer", tolerance: float = 1e-6) -> float:
    """Return 1 if the last number of the completion is the answer, else 0.

    Args:
        prompt: Prompt.
        completion: Completion. Commas between digits are left out.
        row: Row of the data.
        column: Column of the answer, a number or a text whose last number it is.
        tolerance: Largest difference, relative to the answer, or to 1 if that is more.
    """
    answer = _last_number(str(_wanted(row, column)))
    if answer is None or math.isinf(answer):
        raise ConfigurationError(f"{column!r} holds no number: {row[column]!r}")
    found = _last_number(completion)
    return float(found is not None and abs(found - answer) <= tolerance * max(1.0, abs(answer)))


def _last_number(text: str) -> float | None:
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text.replace("\N{MINUS SIGN}", "-"))
    found = re.findall(r"(?:(?<!\d)-)?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?", text)
    return float(found[-1]) if found else None


def matches(prompt: str, completion: str, row: Row, pattern: str = "", whole: bool = False) -> float:
    """Return 1 if a regular expression occurs in the completion, else 0.

    Args:
        prompt: Prompt.
        completion: Completion.
        row: Row of the data.
        pattern: Regular expression.
        whole: The expression must match the whole completion.
    """
    search = re.fullmatch if whole else re.search
    return float(search(pattern, completion, re.DOTALL) is not None)


def shorter(prompt: str, completion: str, row: Row, characters: int = 1000) -> float:
    """Return minus the length of the completion, in units of ``characters``: a penalty of length."""
    return -len(completion) / characters


def json_schema(
    prompt: str, completion: str, row: Row, schema: Mapping[str, Any] | None = None, column: str = "schema"
) -> float:
    """Return 1 if the completion is JSON that fits a schema, else 0. A fence of Markdown around it is left out.

    Args:
        prompt: Prompt.
        completion: Completion.
        row: Row of the data.
        schema: JSON schema with the keywords ``type``, ``properties``, ``required``, ``additionalProperties`` (a
            boolean), ``items``, ``enum``, ``const``, ``minimum``, ``maximum``, ``minLength``, ``maxLength``,
            ``minItems``, ``maxItems`` and ``pattern``. None: that of the row.
        column: Column of the schema, as a mapping or as JSON.
    """
    wanted = schema if schema is not None else _wanted(row, column)
    if isinstance(wanted, str):
        wanted = json.loads(wanted)
    try:
        value = json.loads(fenced(completion))
    except (ValueError, RecursionError):
        return 0.0
    return float(_fits(value, wanted))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
}
_CHECKS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("number", lambda value, limit: value >= limit),
    "maximum": ("number", lambda value, limit: value <= limit),
    "minLength": ("string", lambda value, limit: len(value) >= limit),
    "maxLength": ("string", lambda value, limit: len(value) <= limit),
    "minItems": ("array", lambda value, limit: len(value) >= limit),
    "maxItems": ("array", lambda value, limit: len(value) <= limit),
    "pattern": ("string", lambda value, limit: re.search(limit, value) is not None),
    "required": ("object", lambda value, names: all(name in value for name in names)),
    "items": ("array", lambda value, schema: all(_fits(item, schema) for item in value)),
    "properties": (
        "object",
        lambda value, schemas: all(_fits(value[name], schemas[name]) for name in schemas if name in value),
    ),
}
_NOTES = ("$schema", "title", "description", "default", "examples")


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a value fits a JSON schema.

    Raises:
        ConfigurationError: For keywords that are not supported.
    """
    unknown = [key for key in schema if key not in (*_CHECKS, *_NOTES, "type", "enum", "const", "additionalProperties")]
    if unknown:
        raise ConfigurationError(f"the JSON schema has the keyword {unknown[0]!r}, which is not supported")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_TYPES[kind](value) for kind in kinds):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    closed = schema.get("additionalProperties") is False and isinstance(value, dict)
    if closed and not value.keys() <= schema.get("properties", {}).keys():
        return False
    return all(
        check(value, schema[key]) for key, (kind, check) in _CHECKS.items() if key in schema and _TYPES[kind](value)
    )


def fenced(text: str) -> str:
    """Return the content of the last fenced block of Markdown in a text, or the text itself without one."""
    found = re.findall(r"```[^\n`]*\n(.*?)```", text, re.DOTALL)
    return str(found[-1] if found else text)


def valid_python(prompt: str, completion: str, row: Row) -> float:
    """Return 1 if the completion is Python code that can be parsed and that does something, else 0."""
    try:
        return float(bool(ast.parse(fenced(completion)).body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the latter two for deeply nested code
        return 0.0


# Runs in the subprocess before the code. Hooks cannot be taken out again.
_GUARD = """
import os, resource, sys
limits = {{"RLIMIT_AS": {memory}, "RLIMIT_CPU": {seconds}, "RLIMIT_FSIZE": 2**20, "RLIMIT_NOFILE": 64}}
for name, most in limits.items():
    resource.setrlimit(getattr(resource, name), (most, most))
here = os.getcwd() + os.sep
refused = ("socket.", "subprocess.", "ctypes.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
           "os.kill", "os.putenv", "pty.", "signal.", "shutil.")
changes = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown",
           "os.truncate", "os.utime")
def guard(event, arguments):
    if event.startswith(refused):
        raise PermissionError(event)
    writes = event == "open" and (any(c in (arguments[1] or "") for c in "wax+") or (arguments[2] or 0) & 3)
    if writes or event in changes:
        for path in arguments[:2] if event in ("os.rename", "os.link", "os.symlink") else arguments[:1]:
            if not isinstance(path, int) and not os.path.realpath(os.fsdecode(path)).startswith(here):
                raise PermissionError(event)
sys.addaudithook(guard)
"""


def python_tests(
    prompt: str,
    completion: str,
    row: Row,
    column: str = "tests",
    seconds: float = 5.0,
    megabytes: int = 512,
    with_prompt: bool = False,
) -> float:
    """Return the share of tests that Python code passes, which runs in a process of its own.

    Time, memory and the size of files are limited. Network, other processes, and changes of files outside of a
    temporary folder are refused. This stops accidents, and not somebody who attacks Python itself.

    Args:
        prompt: Prompt.
        completion: Code, or a text with the code in its last fenced block.
        row: Row of the data.
        column: Column of the tests: a list of Python statements, such as ``assert f(1) == 2``, or a text of one.
        seconds: Longest time for the code with all tests.
        megabytes: Largest memory.
        with_prompt: The code begins with the prompt.
    """
    tests = _wanted(row, column)
    tests = [tests] if isinstance(tests, str) else list(tests)
    if not tests:
        raise ConfigurationError(f"{column!r} holds no tests")
    code = (prompt if with_prompt else "") + fenced(completion)
    # The names of the results are drawn anew, so that code cannot print them itself.
    token = secrets.token_hex(16)
    runs = "".join(
        f"\ntry:\n    exec(compile({test!r}, 'test', 'exec'), dict(space))\n    passed += 1\n"
        "except BaseException:\n    pass\n"
        for test in tests
    )
    program = (
        _GUARD.format(memory=megabytes * 2**20, seconds=math.ceil(seconds))
        + "space = {'__name__': 'code'}\nwrite = sys.__stdout__.write\npassed = 0\n"
        + f"try:\n    exec(compile({code!r}, 'code', 'exec'), space)\n"
        + "except BaseException:\n    os._exit(1)\n"
        + runs
        + f"write({token!r} + ' ' + str(passed) + '\\n')\nsys.__stdout__.flush()\nos._exit(0)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(  # noqa: S603 (under the limits above)
                [sys.executable, "-I", "-S", "-c", program],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
                start_new_session=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 0.0
    last = done.stdout.rstrip("\n").rpartition("\n")[2].split(" ")
    if done.returncode != 0 or last[0] != token or len(last) != 2:
        return 0.0
    return min(int(last[1]), len(tests)) / len(tests)
