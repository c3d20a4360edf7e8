"""Rewards of `PolicyOptimization` that can be verified, and the call of any reward under a limit of time.

A reward is a function ``f(prompt, completion, row, **arguments) -> float``. Its ``row`` is the row of the data. An
argument ``messages`` is the whole conversation, and an argument ``environment`` is the environment that answered in it.
A reward that raises, takes too long, or returns no finite number leaves its sample out, with a sentence.
"""

import ast
import copy
import inspect
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lit_efficient.errors import ConfigurationError, check_installed, check_number, checks_types, refusal, shown

Row = Mapping[str, Any]

_BESIDE = ("messages", "environment")  # arguments that a function may have
LARGEST_REWARD = 1e15  # squares of larger rewards are not finite in float32


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
        if self.function is json_schema:
            check_installed("json_schema", "jsonschema")
        check_number("Reward", "weight", self.weight)
        self._check_arguments()
        check_number("Reward", "seconds", self.seconds, above=0)

    def _check_arguments(self) -> None:
        """Refuse a function that cannot be called with the arguments."""
        arguments = dict(self.arguments or {})
        reserved = [name for name in ("prompt", "completion", "row", *_BESIDE) if name in arguments]
        if reserved:
            raise refusal("Reward", "arguments", f"without {reserved[0]!r}, which each sample has", self.arguments)
        try:
            signature = inspect.signature(self.function)
        except ValueError:  # of a function in C
            return
        beside = dict.fromkeys(self._beside)
        try:
            signature.bind_partial("", "", {}, **beside)
        except TypeError as error:
            allowed = "a function of prompt, completion and row"
            raise refusal("Reward", "function", allowed, f"{self.name}{signature}") from error
        try:
            signature.bind("", "", {}, **arguments, **beside)
        except TypeError as error:
            allowed = f"those of {self.name}{signature} behind prompt, completion and row ({error})"
            raise refusal("Reward", "arguments", allowed, self.arguments) from error

    @cached_property
    def _beside(self) -> list[str]:
        """Return the names of further arguments that the function has."""
        try:
            return [name for name in _BESIDE if name in inspect.signature(self.function).parameters]
        except ValueError:
            return []

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def __call__(
        self, prompt: str, completion: str, row: Row, messages: Sequence[Any] = (), environment: Any = None
    ) -> tuple[float, str]:
        """Return the reward of a sample and "", or NaN and a sentence.

        Args:
            prompt: Prompt, or the last message of one.
            completion: Text that the model wrote, the last one of a conversation.
            row: Row of the data.
            messages: The whole conversation.
            environment: Environment that answered. None without one.
        """
        given = {"messages": messages, "environment": environment}
        arguments = {**(self.arguments or {}), **{name: given[name] for name in self._beside}}
        try:
            with at_most(self.seconds):
                own = copy.deepcopy(row)  # the function may change it
                value = float(self.function(prompt, completion, own, **arguments))
        except (Exception, SystemExit) as error:  # functions of users raise anything
            return math.nan, f"{self.name} raised {type(error).__name__}: {shown(error)}"
        except TookTooLong:
            return math.nan, f"{self.name} took longer than {self.seconds:g} seconds"
        if not abs(value * self.weight) <= LARGEST_REWARD:
            return math.nan, f"{self.name} returned {value}"
        return value, ""


class TookTooLong(BaseException):
    """Not an Exception, so that functions that catch exceptions do not catch it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in code that takes longer than ``seconds``."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_: object) -> None:
        raise TookTooLong

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
    if found:
        return float(found[-1])
    return None


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
        schema: JSON schema of any draft, by default 2020-12. It may refer to its own parts, and to no address. None:
            that of the row.
        column: Column of the schema, as a mapping or as JSON.
    """
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    wanted = schema if schema is not None else _wanted(row, column)
    if isinstance(wanted, str):
        wanted = json.loads(wanted)
    kind: Any = validator_for(wanted)
    try:
        kind.check_schema(wanted)
    except SchemaError as error:
        raise ConfigurationError(f"the JSON schema is not valid: {error.message}") from error
    try:
        value = json.loads(fenced(completion), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return 0.0
    return float(kind(wanted, registry=REGISTRY).is_valid(value))  # the default registry opens addresses


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def fenced(text: str) -> str:
    """Return the content of the last fenced block of Markdown in a text, or the text itself without one."""
    found = re.findall(r"```[^\n`]*\n(.*?)```", text, re.DOTALL)
    return str(found[-1] if found else text)


def valid_python(prompt: str, completion: str, row: Row) -> float:
    """Return 1 if the completion is Python code that can be parsed and that does something, else 0."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in the code
            return float(bool(ast.parse(fenced(completion)).body))
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two for code that is nested too deeply
        return 0.0


# Runs in the subprocess before the code. Its output is the result, and that of the code goes nowhere. Hooks cannot be
# taken out again.
_GUARD = """
import _posixsubprocess, os, resource, sys
limits = {{"RLIMIT_AS": {memory}, "RLIMIT_CPU": {seconds}, "RLIMIT_FSIZE": 2**20, "RLIMIT_NOFILE": 64}}
for name, most in limits.items():
    resource.setrlimit(getattr(resource, name), (most, most))
here = os.getcwd() + os.sep
refused = ("socket.", "subprocess.", "ctypes.", "sqlite3.", "shutil.", "pty.", "signal.", "resource.", "os.system",
           "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "os.chdir", "os.mkdir", "os.link",
           "os.symlink", "os.chmod", "os.chown", "os.chflags", "os.utime", "os.setxattr", "os.removexattr")
unaudited = ("_dbm", "_gdbm", "_multiprocessing", "_posixshmem", "readline")  # they write files without an event
def guard(event, arguments):
    if event.startswith(refused) or (event == "import" and arguments[0] in unaudited):
        raise PermissionError(event)
    paths = ()
    if event == "open":
        path, mode, flags = arguments
        if any(c in (mode or "") for c in "wax+") or (flags or 0) & 3:
            paths = (path,)
        elif mode is None and os.path.isdir(path):  # a descriptor to which the paths of other calls are relative
            raise PermissionError(event)
    elif event in ("os.remove", "os.rename", "os.rmdir", "os.truncate"):
        paths = arguments[:1 + (event == "os.rename")]
    for path in paths:
        if not isinstance(path, int) and not os.path.realpath(os.fsdecode(path)).startswith(here):
            raise PermissionError(event)
def run(code, tests, token, exec=exec, compile=compile, dict=dict, write=os.write, leave=os._exit):
    result = os.dup(1)
    write(result, b"ready")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    _posixsubprocess.fork_exec = None  # has no event
    sys.modules["__main__"] = type(sys)("__main__")
    sys.addaudithook(guard)
    sys.modules["solution"] = type(sys)("solution")
    space = sys.modules["solution"].__dict__
    try:
        exec(compile(code, "code", "exec"), space)
    except BaseException:
        leave(1)
    passed = 0
    for test in tests:
        try:
            exec(compile(test, "test", "exec"), dict(space))
            passed += 1
        except BaseException:
            pass
    write(result, (token + " %d" % passed).encode())
    leave(0)
"""
_MOST_OUTPUT = 10_000  # bytes that are read of a result


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

    Time, memory and the size of files are limited. Network, other processes, folders, and changes of files outside of
    a temporary folder are refused. This stops accidents, and not somebody who attacks Python itself. Code can deceive
    tests, for example with objects that are equal to everything.

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
    if not tests or not all(isinstance(test, str) for test in tests):
        raise ConfigurationError(f"{column!r} must hold tests as texts, got {row[column]!r}")
    code = (prompt if with_prompt else "") + fenced(completion)
    token = secrets.token_hex(16)  # unknown to code that writes to the file of the result
    guard = _GUARD.format(memory=megabytes * 2**20, seconds=math.ceil(seconds))
    output = _output_of(f"{guard}run({code!a}, {tests!a}, {token!r})\n", seconds)
    if not output.startswith("ready"):
        reason = output.strip().rpartition("\n")[2] or "it needs more time or memory"
        raise ConfigurationError(f"Python could not be started under the limits of time and memory: {reason}")
    found = re.fullmatch(f"ready{token} ([0-9]+)", output)
    if found:
        return int(found[1]) / len(tests)
    return 0.0


def _output_of(program: str, seconds: float) -> str:
    """Run a Python program in a process of its own, end all that it has started, and return its output."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as written:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-"],  # the program is no argument, which a process may read
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.communicate(program.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        written.seek(0)
        return written.read(_MOST_OUTPUT).decode(errors="replace")
