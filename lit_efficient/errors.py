"""Every error that this package raises on purpose, as one small tree.

    LitEfficientError
    ├── ConfigurationError   an argument, file or combination that cannot work; also a ValueError
    │   └── ConflictError    two techniques that exclude each other, or a requirement that is not met
    ├── CheckpointError      a checkpoint that cannot be written, read or trusted
    ├── OutOfMemoryError     a step that needs more memory than there is, or than it may take
    └── DivergedError        gradients or weights that are not finite

The command line prints any of them without a traceback, and ends with the code of :data:`EXIT_CODES` for it.
"""

import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

EXIT_CODES = {
    0: "done",
    1: "a bug, with its traceback",
    2: "user error",
    3: "out of memory",
    4: "diverged",
    5: "undecided plan (only a bound is known)",
}
"""What the command line ends with; after signal n it is 128 + n."""


class LitEfficientError(Exception):
    """Base of all errors of this package. ``exit_code`` is what the command line ends with."""

    exit_code = 2


class ConfigurationError(LitEfficientError, ValueError):
    """An argument, file or combination that cannot work. The message names it, what is allowed and the value given."""


class ConflictError(ConfigurationError):
    """Two techniques that exclude each other, or a requirement that is not met. The message names the way out."""


class CheckpointError(LitEfficientError, RuntimeError):
    """A checkpoint that cannot be written, read or trusted. The message names the file."""


class OutOfMemoryError(LitEfficientError, RuntimeError):
    """A step that needs more memory than there is, or than it may take. The message gives both in bytes."""

    exit_code = 3


class DivergedError(LitEfficientError, RuntimeError):
    """Gradients or weights that are not finite. The message names them; the weights are those before the step."""

    exit_code = 4


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out: ours, torch's on any device, or the CPU allocator's."""
    import torch  # which the command line may not have needed

    if isinstance(error, OutOfMemoryError | torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    phrases = ("out of memory", "can't allocate memory", "cudnn_status_not_supported", "cublas_status_alloc_failed")
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in phrases)


def refusal(owner: str, name: str, allowed: str, value: object) -> ConfigurationError:
    """The error of an argument that is not what it must be: ``refusal("LoRA", "rank", "at least 1", 0)``.

    Args:
        owner: Whose argument it is, as people know it: a class, or a subcommand.
        name: The argument; of a block in YAML with dots.
        allowed: What would be right, to be read after "must be".
        value: What was given.
    """
    return ConfigurationError(f"{owner}: {name} must be {allowed}, got {value!r}")


def check_choice(owner: str, name: str, value: object, choices: Collection[object], *, null: bool = False) -> None:
    """Raise the refusal of an argument that is none of ``choices`` (nor, with ``null``, ``None``).

    Raises:
        ConfigurationError: Naming argument, choices and value.
    """
    if not (value is None and null) and not any(type(value) is type(choice) and value == choice for choice in choices):
        raise refusal(owner, name, f"one of {', '.join(map(str, choices))}" + (" or null" if null else ""), value)


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
    """Raise the refusal of an argument that is no finite number in its range; a truth value is no number.

    Args:
        owner: Whose argument it is.
        name: The argument.
        value: What was given; a tensor of one number, which a rate may be, counts as that number, if not ``whole``.
        least: The smallest value allowed.
        above: What the value must exceed.
        most: The largest value allowed.
        below: What must exceed the value.
        whole: Allow integers only.
        null: Allow ``None``, too.

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


def nearest(name: str, known: Collection[str], most: int = 1) -> list[str]:
    """Return those of the known names that ``name`` may be meant for, the nearest first."""
    import difflib  # which nobody needs who makes no mistake

    names = {one.lower(): one for one in known} | {one: one for one in known}
    near = difflib.get_close_matches(name, names, most) or difflib.get_close_matches(name.lower(), names, most)
    return list(dict.fromkeys(names[one] for one in near))


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return ``", did you mean 'x'?"`` for the nearest known name, or an empty string."""
    return f", did you mean {near[0]!r}?" if (near := nearest(name, known)) else ""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_installed(owner: str, *packages: str) -> None:
    """Refuse what needs packages that are missing, before it starts; once for all of them.

    Raises:
        ConfigurationError: Naming them, and the line that installs them.
    """
    from importlib.util import find_spec

    if missing := [package for package in packages if find_spec(package) is None]:
        raise ConfigurationError(f"{owner} needs {' and '.join(missing)}: {install_line(*missing)}")


def install_line(*packages: str) -> str:
    """Return what installs packages: ``pip install`` with the first extra of ours that has them all, or their names."""
    import re
    from importlib.metadata import PackageNotFoundError, requires

    extras: dict[str, set[str]] = {}
    try:
        for line in requires("lit-efficient") or ():
            if match := re.match(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"]", line):
                extras.setdefault(match[2], set()).add(match[1])
    except PackageNotFoundError:  # a checkout that is not installed
        pass
    every = "'lit-efficient[all]'"
    for extra, names in extras.items():
        if names >= set(packages):
            return f"pip install 'lit-efficient[{extra}]'  (or {every}, for every config)"
    known = set(packages) <= set().union(*extras.values())
    return f"pip install {every if known else ' '.join(packages)}"
