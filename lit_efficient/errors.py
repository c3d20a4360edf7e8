"""Errors that this package raises on purpose, and helpers that build their messages.

    LitEfficientError
    ├── ConfigurationError   an argument, file or combination that cannot work; also a ValueError
    │   ├── ConflictError    two techniques that exclude each other, or a requirement that is not met
    │   └── NoEffectError    nothing that a technique would change: an error unless another optimizer is changed
    ├── CheckpointError      a checkpoint that cannot be written, read or trusted
    ├── OutOfMemoryError     a step that needs more memory than is available or allowed
    ├── DivergedError        gradients or weights that are not finite
    └── FinishedError        a resumed fit that has reached its last step or epoch before

The command line prints these errors without a traceback and exits with their code of :data:`EXIT_CODES`.
"""

import functools
import inspect
import math
import operator
import os
import re
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar

EXIT_CODES = {
    0: "done",
    1: "a bug, with its traceback",
    2: "user error",
    3: "out of memory",
    4: "diverged",
    5: "undecided plan (only a bound is known)",
    6: "nothing left to do (a resumed fit that has reached its end)",
}
"""Exit codes of the command line and their meanings. After signal n the exit code is 128 + n."""

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)

CAUSE = "Cause: "
"""Beginning of a note on an error of a library, in which a technique says which argument has caused it."""


class LitEfficientError(Exception):
    """Base of all errors of this package. ``exit_code`` is the exit code of the command line."""

    exit_code = 2


class ConfigurationError(LitEfficientError, ValueError):
    """Error for an argument, file or combination that cannot work. The message names the allowed and given value."""


class ConflictError(ConfigurationError):
    """Error for techniques that exclude each other, or a requirement that is not met. The message says what to do."""


class NoEffectError(ConfigurationError):
    """Error for an optimizer of which a technique would change nothing. It is none beside one that is changed."""


class CheckpointError(LitEfficientError, RuntimeError):
    """Error for a checkpoint that cannot be written, read or trusted. The message names the file."""


class OutOfMemoryError(LitEfficientError, RuntimeError):
    """Error for a step that needs more memory than is available or allowed. The message gives both in bytes."""

    exit_code = 3


class DivergedError(LitEfficientError, RuntimeError):
    """Error for gradients or weights that are not finite. The message names them. The step was not applied."""

    exit_code = 4


class FinishedError(LitEfficientError, RuntimeError):
    """Error for a resumed fit with nothing left to do. The message names the checkpoint's step or epoch and the end."""

    exit_code = 6


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory has run out: ours, torch's on any device, or the CPU allocator's."""
    import torch  # late: the command line may not have needed it

    if isinstance(error, OutOfMemoryError | torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    phrases = ("out of memory", "can't allocate memory", "cudnn_status_not_supported", "cublas_status_alloc_failed")
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in phrases)


@contextmanager
def must_fit(who: str, what: str, smaller: str) -> Iterator[None]:
    """Context of code that allocates memory: its error names the argument that has to be smaller.

    Args:
        who: Name of the technique.
        what: Things that are allocated, with the argument's value.
        smaller: Name of the argument.

    Raises:
        OutOfMemoryError: If memory runs out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"{who}: {what} does not fit into memory: set a smaller {smaller}") from error


def shown(value: object, most: int = 200) -> str:
    """Return the beginning of the text of an object that a user's code has made.

    Args:
        value: The object, such as an exception. Its ``__str__`` may raise.
        most: Largest number of characters.
    """
    try:
        return str(value)[:most]
    except (Exception, SystemExit):
        return f"a {type(value).__name__} that cannot be written as text"


@contextmanager
def diagnostic(who: str, what: str) -> Iterator[None]:
    """Context of code that only looks at a run: an error in it becomes a warning, and never ends the run.

    It is no context for code that decides something, or in which processes wait for each other.

    Args:
        who: Name of the technique.
        what: Subject of the diagnostic, for the warning.
    """
    try:
        yield
    except LitEfficientError:
        raise
    except Exception as error:
        warnings.warn(f"{who}: {what} could not be examined: {type(error).__name__}: {shown(error)}", stacklevel=3)


def refusal(owner: str, name: str, allowed: str, value: object) -> ConfigurationError:
    """Return the error for a wrong argument, for example ``refusal("LoRA", "rank", "at least 1", 0)``.

    Args:
        owner: Class or subcommand that has the argument.
        name: Name of the argument; with dots if it is in a block of the YAML.
        allowed: Allowed values, as the end of a sentence that begins with "must be".
        value: The given value.
    """
    return ConfigurationError(f"{owner}: {name} must be {allowed}, got {value!r}")


def check_choice(owner: str, name: str, value: object, choices: Collection[object], *, null: bool = False) -> None:
    """Raise an error unless an argument is one of ``choices``, or ``None`` if ``null`` allows it.

    Raises:
        ConfigurationError: Naming argument, choices and value.
    """
    if value is None and null:
        return
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        allowed = f"one of {', '.join(map(str, choices))}"
        raise refusal(owner, name, f"{allowed} or null" if null else allowed, value)


def check_number(
    owner: str,
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    whole: bool = False,
    null: bool = False,
) -> None:
    """Raise an error unless an argument is a finite number in its range. Booleans are not numbers.

    Args:
        owner: Class or subcommand that has the argument.
        name: Name of the argument.
        value: The given value. A tensor of one number, which a learning rate may be, is allowed if not ``whole``.
        least: Smallest allowed value.
        above: Lower bound that is not allowed itself.
        most: Largest allowed value.
        below: Upper bound that is not allowed itself.
        whole: Whether only integers are allowed.
        null: Whether ``None`` is allowed.

    Raises:
        ConfigurationError: Naming argument, range and value.

    Example:
        >>> check_number("LoRA", "rank", 0, least=1, whole=True)
        Traceback (most recent call last):
        lit_efficient.errors.ConfigurationError: LoRA: rank must be a whole number of at least 1, got 0
    """
    if value is None and null:
        return
    number = value.item() if not whole and getattr(value, "ndim", None) == 0 else value
    bounds = {"at least": (least, operator.ge), "above": (above, operator.gt)}
    bounds |= {"at most": (most, operator.le), "below": (below, operator.lt)}
    given = {words: (bound, holds) for words, (bound, holds) in bounds.items() if bound is not None}
    is_integer = isinstance(number, int) and not isinstance(number, bool)
    is_number = is_integer or (not whole and isinstance(number, float) and math.isfinite(number))
    if is_number and all(holds(number, bound) for bound, holds in given.values()):
        return
    range_ = " and ".join(f"{words} {bound:.10g}" for words, (bound, _) in given.items())
    noun = ("a whole number" if whole else "" if given else "a number") + (" of " if whole and given else "")
    raise refusal(owner, name, noun + range_ + (" or null" if null else ""), value)


def check_list(
    owner: str,
    name: str,
    value: object,
    allowed: str,
    *,
    null: bool = False,
    empty: bool = False,
    text: bool = False,
) -> None:
    """Raise an error unless an argument is a list, or another collection that is neither a text nor a mapping.

    Args:
        owner: Class or subcommand that has the argument.
        name: Name of the argument.
        value: The given value.
        allowed: Allowed values, as the end of a sentence that begins with "must be".
        null: Whether ``None`` is allowed.
        empty: Whether an empty list is allowed.
        text: Whether a text is allowed, too.

    Raises:
        ConfigurationError: Naming argument, allowed and given value.

    Example:
        >>> check_list("DataLoaderTuner", "workers", 2, "a list of numbers")
        Traceback (most recent call last):
        lit_efficient.errors.ConfigurationError: DataLoaderTuner: workers must be a list of numbers, got 2
    """
    if (value is None and null) or (isinstance(value, str) and value and text):
        return
    is_list = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
    if not is_list or (len(value) == 0 and not empty):  # type: ignore[arg-type]
        raise refusal(owner, name, allowed, value)


_Class = TypeVar("_Class")


class ChecksTypes:
    """Base of classes whose constructors refuse values of other types than the annotations of their arguments.

    A message of the constructor that names the value is kept, because it also names the range. Only values that YAML
    can hold are compared, and only with annotations of this kind or of classes.
    """

    def __init_subclass__(cls, **named: object) -> None:
        super().__init_subclass__(**named)
        if "__init__" in vars(cls):
            checks_types(cls)


def checks_types(cls: type[_Class]) -> type[_Class]:
    """Class decorator with the checks of :class:`ChecksTypes`, for dataclasses: above ``@dataclass``."""
    cls.__init__ = _checking_types(vars(cls)["__init__"])  # type: ignore[method-assign]
    return cls


def _checking_types(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def checked(self: object, *given: object, **named: object) -> None:
        wrong: ConfigurationError | None
        try:
            init(self, *given, **named)
        except Exception as error:  # often raised by a value of a wrong type
            ours = isinstance(error, LitEfficientError)
            wrong = _of_wrong_type(self, init, given, named, ours, str(error) if ours else "")
            if wrong is None:
                raise
        else:
            wrong = _of_wrong_type(self, init, given, named, True)
        if wrong is not None:
            raise wrong

    # Lightning reads the arguments of load_from_checkpoint by getfullargspec, which does not follow __wrapped__.
    vars(checked)["__signature__"] = inspect.signature(init)
    return checked


def _of_wrong_type(
    self: object,
    init: Callable[..., None],
    given: Sequence[Any],
    named: Mapping[str, Any],
    rebuilds: bool,
    said: str = "",
) -> ConfigurationError | None:
    """Return the error of the first argument that does not have the type of its annotation.

    Args:
        self: The object that is built.
        init: Its constructor.
        given: Positional arguments.
        named: Arguments by name.
        rebuilds: Whether a mapping may stand for a dataclass, which the constructor builds. Tasks do so with the
            hyper-parameters of checkpoints.
        said: Message of the constructor, which is kept if it names the value, because it also names the range.
    """
    signature = inspect.signature(init)
    try:
        hints = typing.get_type_hints(init)
        values = signature.bind_partial(self, *given, **named).arguments
    except (NameError, TypeError):  # an annotation for type checkers alone, or an argument that does not exist
        return None
    for name, value in values.items():
        parameter = signature.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name not in hints:
            continue
        hint = hints[name]
        is_rebuilt = rebuilds and isinstance(value, dict) and getattr(self, name, None) is not value
        if is_rebuilt and any(map(is_dataclass, (hint, *typing.get_args(hint)))):
            continue
        if not _fits(value, hint) and not (name in said and repr(value) in said):
            return refusal(type(self).__name__, name, _words(hint), value)
    return None


_PLAIN = (str, bool, int, float, NoneType, list, tuple, set, frozenset, dict)
_NOUNS = {str: "text", int: "whole number", float: "number"}


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value has the type of an annotation. Values that YAML cannot hold always have it."""
    origin = typing.get_origin(hint) or hint
    inner = typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is typing.Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if not isinstance(value, _PLAIN) or not isinstance(origin, type) or origin in (Any, object):
        return True
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, str):
        return issubclass(origin, str | os.PathLike)
    if isinstance(value, dict):
        if not issubclass(origin, Mapping) or not issubclass(dict, origin):
            return False
        # Where lists and mappings are allowed, it is a configuration of transformers, which may hold deeper ones.
        is_open = bool(inner) and any(typing.get_origin(one) in (list, dict) for one in typing.get_args(inner[1]))
        return not inner or all((is_open and isinstance(v, list | dict)) or _fits(v, inner[1]) for v in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        if not issubclass(origin, Collection | Iterable) or issubclass(origin, str | Mapping):
            return False
        if len(inner) == 1 or inner[1:] == (...,):
            # The constructor builds the dataclasses in a list from mappings.
            builds = any(map(is_dataclass, (inner[0], *typing.get_args(inner[0]))))
            return all((builds and isinstance(one, dict)) or _fits(one, inner[0]) for one in value)
        return not inner or (len(value) == len(inner) and all(map(_fits, value, inner)))
    return isinstance(value, origin)


def _words(hint: Any) -> str:
    """Return the allowed values of an annotation, in words."""
    origin = typing.get_origin(hint) or hint
    inner = typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        kinds = [one for one in inner if not (one is int and float in inner)]
        return " or ".join(dict.fromkeys(map(_words, kinds)))
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is NoneType:
        return "null"
    if origin is bool:
        return "true or false"
    if origin in _NOUNS:
        return f"a {_NOUNS[origin]}"
    if not isinstance(origin, type):
        return str(hint)
    if issubclass(origin, Mapping):
        return "a mapping"
    if issubclass(origin, tuple) and len(inner) > 1 and inner[1] is not ...:
        return f"a list of {len(inner)} values"
    if issubclass(origin, Collection | Iterable):
        return f"a list of {_NOUNS[inner[0]]}s" if inner and inner[0] in _NOUNS else "a list"
    return f"an instance of {origin.__name__}"


def nearest(name: str, known: Collection[str], most: int = 1) -> list[str]:
    """Return at most ``most`` known names that ``name`` may be a misspelling of, the nearest first."""
    import difflib  # late: only needed after a mistake

    names = {one.lower(): one for one in known} | {one: one for one in known}
    near = difflib.get_close_matches(name, names, most) or difflib.get_close_matches(name.lower(), names, most)
    return list(dict.fromkeys(names[one] for one in near))


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return ``", did you mean 'x'?"`` for the nearest known name, or an empty string."""
    near = nearest(name, known)
    return f", did you mean {near[0]!r}?" if near else ""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` names, separated by commas, and the number of further ones."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_installed(owner: str, *packages: str) -> None:
    """Check that packages are installed.

    Raises:
        ConfigurationError: Naming all missing packages and the command that installs them.
    """
    from importlib.util import find_spec

    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ConfigurationError(f"{owner} needs {' and '.join(missing)}: {install_line(*missing)}")


def install_line(*packages: str) -> str:
    """Return the command that installs packages: with the first extra of ours that has them all, or by their names."""
    from importlib.metadata import PackageNotFoundError, requires

    extras: dict[str, set[str]] = {}
    try:
        for line in requires("lit-efficient") or ():
            match = re.match(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"]", line)
            if match:
                extras.setdefault(match[2], set()).add(match[1])
    except PackageNotFoundError:  # a checkout that is not installed
        pass
    every = "'lit-efficient[all]'"
    for extra, names in extras.items():
        if names >= set(packages):
            return f"pip install 'lit-efficient[{extra}]'  (or {every}, for every config)"
    known = set(packages) <= set().union(*extras.values())
    return f"pip install {every if known else ' '.join(packages)}"


def parse_bytes(size: int | str, who: str = "parse_bytes", name: str = "memory_limit") -> int:
    """Return the bytes of a number or of a text such as ``12GiB`` (powers of 1024) or ``12GB`` (powers of 1000).

    Args:
        size: The number or text.
        who: Class or function whose argument it is, for the error.
        name: Name of the argument, for the error.

    Raises:
        ConfigurationError: If ``size`` is neither, or not above 0, or a text of a small number, which lacks its unit.
    """
    bytes_ = 0
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is not None:
            number, unit, binary = match.groups()
            base = 1024 if binary else 1000
            bytes_ = int(float(number) * base ** _UNITS[unit.upper()])
    elif isinstance(size, int) and not isinstance(size, bool):
        bytes_ = size
    if bytes_ < 1:
        raise refusal(who, name, "a number of bytes above 0 or a text like 12GiB", size)
    if isinstance(size, str) and size.strip().isdigit() and bytes_ < 2**20:
        raise refusal(who, name, "a size with its unit, such as 24GiB", size)
    return bytes_
