"""An error as a few lines: the key, the value, what is allowed, what was probably meant. Ten lines at most."""

import ast
import errno
import re
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_efficient import PUBLIC
from lit_efficient.cli.names import ALLOWED_IMPORTS, elsewhere
from lit_efficient.cli.signatures import known_names, missing_module
from lit_efficient.cli.tree import Table, class_name, place_of
from lit_efficient.distributed.rank_line import ENDED
from lit_efficient.errors import (
    CAUSE,
    ConfigurationError,
    LitEfficientError,
    OutOfMemoryError,
    checks_types,
    did_you_mean,
    install_line,
    is_out_of_memory,
)
from lit_efficient.internals.torch_loaders import broke_off

MAX_LINES = 10
_MAX_WIDTH = 400
_FEWER_WORKERS = "if it was killed, memory may have run out: set fewer num_workers"
_BASES = (Callback, LightningDataModule, LightningModule, Logger, Strategy, Optimizer, LRScheduler)
_MISFIT = re.compile(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'")
_NO_CAUSE = ("Expected a", "Not a valid subclass", "a class path", "a dict", "Does not validate")


def explain(error: BaseException) -> str | None:
    """Return what the user can do about an error, in at most ten lines.

    Args:
        error: What was raised.

    Returns:
        The lines, or ``None`` if the error is a bug: its traceback is the best answer.
    """
    notes = getattr(error, "__notes__", [])
    ended = [note for note in notes if note.startswith(ENDED)]
    if ended:
        return "\n".join(ended)
    lines = _lines_of(error)
    if lines is None and any(note.startswith(CAUSE) for note in notes):
        lines = [str(error)]
    if lines is None:
        return None
    if notes:
        lines = [*lines[:2], *"\n".join(notes).splitlines()]
    shown = []
    for line in lines:
        if line.strip():
            shown.append(line if len(line) <= _MAX_WIDTH else f"{line[: _MAX_WIDTH - 3]}...")
    return "\n".join(shown[:MAX_LINES])


def _lines_of(error: BaseException) -> list[str] | None:
    if isinstance(error, ArgumentError):
        return str(parsing_error(error.message, Table())).splitlines()
    if isinstance(error, LitEfficientError | MisconfigurationException):
        return _own_message(error).strip().splitlines()
    if is_out_of_memory(error):
        said = str(error).strip() or "no message"
        return [f"out of memory: {said.splitlines()[0]}"]
    if isinstance(error, ModuleNotFoundError):
        return _lines_of_missing_module(error)
    lines = None
    if isinstance(error, OSError):
        lines = _lines_of_os_error(error)
    if lines is not None:
        return lines
    if broke_off(error):
        return [f"a DataLoader worker ended while it handed over a batch ({error}): {_FEWER_WORKERS}"]
    twice = re.match(r"Found more than one stateful .* `(\w+)`", str(error))
    if twice:
        return [
            f"trainer.callbacks: {twice[1]} is listed twice, and both keep their state under one name; keep one of them"
        ]
    beyond = re.match(r" *`val_check_interval` \((\d+)\) must be less .* training batches \((\d+)\)", str(error))
    if beyond:
        return [
            f"trainer: val_check_interval must be at most {beyond[2]}, the number of batches of an epoch, got "
            f"{beyond[1]}; to count batches across epochs, set check_val_every_n_epoch: null"
        ]
    if not isinstance(error, RuntimeError):
        return None
    message = str(error)
    if message.startswith(("DataLoader worker (pid", "DataLoader timed out")):
        return [f"{message.splitlines()[0]}: {_FEWER_WORKERS}"]
    if "stateful loaders, but found" in message:
        return [
            "ckpt_path: the checkpoint has the position in the data of its run, and no loader of this run can continue "
            "there: resume with the ExactResume, or the loader with a state, that it was trained with, or begin a new "
            "run"
        ]
    if "loading state_dict" in message:
        return _lines_of_state_dict(message)
    return None


def _lines_of_os_error(error: OSError) -> list[str] | None:
    if error.filename is not None:
        return [f"{error.filename}: {error.strerror}"]
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):  # a logger does not say which file
        return [f"a file of the run cannot be written: {error.strerror}"]
    if _own_message(error) != str(error):
        return [f"reading the data: {_own_message(error)}"]
    return None


def _own_message(error: Exception) -> str:
    """Return the message of an error. If a loader's worker raised it, the message is at the end of its traceback."""
    message = str(error)
    if re.match(r"Caught \w+ in DataLoader worker process", message):
        return message.rpartition(f"{type(error).__name__}: ")[2]
    return message


def _lines_of_missing_module(error: ModuleNotFoundError) -> list[str]:
    name = error.name
    if not name:
        required = re.search(r"Requirement '([\w-]+)", str(error))
        name = required[1] if required else str(error)
    if name == "tensorboardX":  # Lightning takes either
        name = "tensorboard"
    name = name.partition(".")[0]
    return [f"the package {name!r} is not installed: {install_line(name)}"]


def _lines_of_state_dict(message: str) -> list[str]:
    """Summarise torch's list of all keys that do not fit."""
    owner = re.search(r"for (\w+):", message)
    lines = [f"the checkpoint is of another architecture than {owner[1] if owner else 'the model'}:"]
    for label, title in (("Missing", "only in the model"), ("Unexpected", "only in the checkpoint")):
        match = re.search(rf"{label} key\(s\) in state_dict: (.+?)\. ", message.replace("\n", " ") + " ")
        if match:
            names = ast.literal_eval(f"[{match[1]}]")
            more = ", ..." if len(names) > 3 else ""
            lines.append(f"  {len(names)} {title}: {', '.join(names[:3])}{more}")
    shapes = re.findall(r"size mismatch for ([\w.]+): .*?Size\((\[.*?\])\).*?Size\((\[.*?\])\)", message)
    lines += [f"  {name}: {saved} in the checkpoint, {ours} in the model" for name, saved, ours in shapes[:3]]
    if len(shapes) > 3:
        lines.append(f"  and {len(shapes) - 3} more of another shape")
    return lines


def exit_code(error: BaseException) -> int:
    """Return the exit code of the command line for an error that it explains; see :mod:`lit_efficient.errors`."""
    if is_out_of_memory(error):
        return OutOfMemoryError.exit_code
    return getattr(error, "exit_code", 2)


@contextmanager
def readable_errors() -> Iterator[None]:
    """Raise an error inside that :func:`explain` knows as a ConfigurationError, or as an OutOfMemoryError."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        kind = OutOfMemoryError if is_out_of_memory(error) else ConfigurationError
        raise kind(message) from error


def constructor_error(error: ValueError | TypeError) -> Exception:
    """Return the error that a constructor raised, out of jsonargparse's report on all types that a value could have.

    A ``ValueError`` becomes a :class:`ConfigurationError` that names the file and line. Other errors are returned as
    they are.
    """
    root: BaseException = error
    while not isinstance(root, LitEfficientError) and root.__cause__ is not None:
        root = root.__cause__
    frame = traceback.extract_tb(root.__traceback__)[-1]
    # If several classes may stand there, one refuses its arguments, and the others do not have them.
    misfit = None
    called_wrongly = "jsonargparse" in frame.filename or frame.filename == checks_types.__code__.co_filename
    if isinstance(root, TypeError) and called_wrongly:
        misfit = _MISFIT.search(str(root))
    if isinstance(root, LitEfficientError) or not (isinstance(root, ValueError) or misfit):
        if isinstance(root, Exception):
            return root
        return error
    tried = [line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("- ")]
    telling = [line for line in tried if not line.startswith(_NO_CAUSE)]
    if telling and str(root).startswith("Expected a "):  # what stands there may be a name, too
        return ConfigurationError(telling[0])
    if misfit:
        others = [line for line in telling if not _MISFIT.search(line)]
        return ConfigurationError(others[0] if others else f"{misfit[1]}: no option {misfit[2]!r}")
    message = str(root)
    if telling and message.startswith("Not a valid subclass"):
        message = telling[0]
    return ConfigurationError(f"{message}\n  raised by {frame.name} in {frame.filename}, line {frame.lineno}")


# The reports of jsonargparse -----------------------------------------------------------------------------------------

_CONTEXT = re.compile(
    r"^\s*(?:- )?(?:Parser key \"(?P<key>[^\"]+)\":?|Problem with given class_path '(?P<path>[^']+)':)"
)
_BOILERPLATE = re.compile(
    r"[\s-]*(Expected |Does not validate|Errors:|Given value|Subclass types|a class path|a dict )"
)


_SAID = 5.5  # priority of what an import or a constructor says


class _Cause(NamedTuple):
    """A cause in a report. The report has one for each alternative that was tried.

    Args:
        priority: How likely this is what is wrong; the largest one is shown.
        text: The sentence.
        name: The key or class that the sentence is about, if it names one.
    """

    priority: float
    text: str
    name: str = ""


class _Context(NamedTuple):
    """A line of a report that later, more indented lines belong to."""

    indent: int
    key: str
    path: str


def parsing_error(message: str, tree: Table, unlikely: Set[str] = frozenset()) -> ConfigurationError:
    """Return the one cause out of jsonargparse's report on all the alternatives that it tried.

    Args:
        message: The report.
        tree: The config that was parsed, to find where a key is written.
        unlikely: Classes that were tried, and that the config does not mean.
    """
    message = message.removeprefix("Problems parsing config: ")
    causes = _without_other_classes(list(_causes(message, unlikely)))
    if not causes:
        return ConfigurationError(message.replace('"<unicode string>", ', ""))
    _, where, cause = max(causes, key=lambda entry: (entry[2].priority, entry[0]))
    sentence = f"{where}: {cause.text}" if where else cause.text
    head, _, accepted = sentence.partition(" (accepted: ")
    lines = [re.sub(r"\b(fit|validate|test|predict)\.(?=\w)", "", head) if head.startswith("required") else head]
    place = place_of(tree, where.partition(":")[0], class_name(cause.name or where.rpartition(": ")[2]))
    if place is not None and place.file:
        lines.append(f"  {place}")
    if accepted:
        lines.append(f"  accepted: {accepted.rstrip(')')}")
    return ConfigurationError("\n".join(lines))


def _without_other_classes(causes: list[tuple[int, str, _Cause]]) -> list[tuple[int, str, _Cause]]:
    """Leave out options that one class lacks and that another class has, which complains about the value."""
    keys = {where.rpartition(".")[2] for _, where, _ in causes}
    imports = {where.rpartition(".")[2] for _, where, cause in causes if cause.priority == _SAID}
    found = []
    for depth, where, cause in causes:
        lacks = cause.text.startswith("no option")
        if not lacks or (cause.name not in keys and where.rpartition(".")[2] not in imports):
            found.append((depth, where, cause))
    return found or causes


def _causes(message: str, unlikely: Set[str]) -> Iterator[tuple[int, str, _Cause]]:
    """Yield depth, place and cause for each line of a report that names a cause."""
    lines = re.sub(r'^( *)((?:- )?Parser key "[^"\n]+":) +', r"\1\2\n\1    ", message, flags=re.MULTILINE).splitlines()
    stack: list[_Context] = []
    subtypes: dict[int, str] = {}  # depth of the stack -> what is allowed there
    for line in lines:
        indent = len(line) - len(line.lstrip(" -"))
        context = _CONTEXT.match(line)
        if context:
            stack = [entry for entry in stack if entry.indent < indent]
            stack.append(_Context(indent, context["key"] or "", context["path"] or ""))
            continue
        if "Subtypes: " in line:
            subtypes[len(stack)] = line.partition("Subtypes: ")[2]
            continue
        if not line.strip():
            continue
        here = [entry for entry in stack if entry.indent <= indent]
        keys = [entry.key for entry in here if entry.key]
        classes = [class_name(entry.path) for entry in here if entry.path]
        allowed = _readable_types(subtypes.get(len(here), ""))
        cause = _cause(line.strip(" -"), allowed, _given(lines, here))
        if cause is None and (classes or line.lstrip().startswith("- ")) and not _BOILERPLATE.match(line):
            cause = _Cause(_SAID, line.strip(" -"))
        if cause is None:
            continue
        if cause.text.startswith("no option"):
            itself = _base_itself(classes[-1:])
            # If several classes may stand there, the complaint with a suggestion tells most.
            better = 0.05 * ("did you mean" in cause.text)
            cause = cause._replace(text=itself or cause.text, priority=cause.priority + better)
        if _may_be_another(cause.text, message):
            cause = cause._replace(priority=4)
        if not unlikely.isdisjoint(classes):
            cause = cause._replace(priority=2)
        yield len(here), _place(keys, classes), cause


def _may_be_another(text: str, message: str) -> bool:
    """Return whether a class that one alternative refuses is accepted by another one."""
    refused = re.match(r"(\S+) is not an? \w+|there is no class '(\w+)'", text)
    if not refused:
        return False
    name = re.escape(refused[1] or refused[2])
    return bool(re.search(rf"given class_path '(\S+\.)?{name}':", message))


def _given(lines: list[str], here: list[_Context]) -> str:
    """Return the value that the innermost context is about."""
    indent = here[-1].indent if here else 0
    for line in lines:
        if line.strip().startswith("Given value: ") and len(line) - len(line.lstrip()) >= indent:
            return line.partition("Given value: ")[2]
    return ""


def _place(keys: list[str], classes: list[str]) -> str:
    """Return the key of a cause: ``trainer.callbacks: EMA.decay``."""
    if not keys:
        return ""
    if not classes:
        return keys[0]
    return f"{keys[0]}: {'.'.join([classes[-1], *keys[1:]])}"


def _no_class(match: re.Match[str], allowed: str, given: str) -> _Cause:
    name = match[1]
    near = did_you_mean(name, known_names())
    if any(plain in allowed.split(", ") for plain in ("int", "float", "bool", "str")):
        near = near if _names_class(allowed) else ""
        return _Cause(5.1 if near else 5, _wrong_type(allowed, name) + near)
    return _Cause(7, f"there is no class {name!r}{near}", name)


def _no_attribute(match: re.Match[str], allowed: str, given: str) -> _Cause:
    module, name = match.groups()
    ours = name in PUBLIC or module == "lit_efficient"
    near = did_you_mean(name, PUBLIC if ours else dir(sys.modules.get(module)))
    return _Cause(7, f"there is no {name!r} in {module}{near}", name)


def _no_subclass(match: re.Match[str], allowed: str, given: str) -> _Cause:
    name = match[1].strip() or given
    bases = [base for base in _BASES if base.__name__ == match[2]]
    near = ""
    if bases:
        near = did_you_mean(class_name(name), _subclasses(bases))
    article = "a"
    if match[2][0] in "AEIOU":
        article = "an"
    return _Cause(7, f"{name or 'the class'} is not {article} {match[2]}{near}")


def _no_path(match: re.Match[str], allowed: str, given: str) -> _Cause:
    name = match[1].partition("(")[0]
    hint = did_you_mean(name, known_names())
    if "/" in name:
        hint = " (a model's name on a hub is the value of name_or_path)"
    return _Cause(7, f"{match[1]!r} is no class{hint}", name)


def _other_type(match: re.Match[str], allowed: str, given: str) -> _Cause:
    return _Cause(6, _wrong_type(_readable_types(match[1]), match[2]))


def _none_of_types(match: re.Match[str], allowed: str, given: str) -> _Cause | None:
    if not allowed:
        return None
    # Without a class among them, it comes before an option that another class does not have.
    return _Cause(5 if _names_class(allowed) else 5.95, _wrong_type(allowed, given))


def _unfit_class(match: re.Match[str], allowed: str, given: str) -> _Cause:
    return _Cause(3, f"not a class that fits here. Got: {match[1] or given}")


def _names_class(allowed: str) -> bool:
    return any(kind[:1].isupper() for kind in allowed.split(", "))


def _refused_import(match: re.Match[str], allowed: str, given: str) -> _Cause:
    """Return the cause of a class that is not imported. Trust is only offered to an installed package of others."""
    path = match[1]
    package = path.partition(".")[0]
    name = class_name(path)
    trusted = [one for one in ALLOWED_IMPORTS if one.partition(".")[0] == package]
    itself = _base_itself([name])
    if trusted and itself:  # jsonargparse tries the base class if no class is named
        return _Cause(4, itself)
    refusal = f"importing {path!r} is refused: a config may name classes of"
    if trusted:
        return _Cause(9, f"{refusal} {', '.join(trusted)} there{did_you_mean(name, known_names())}", name)
    if missing_module(path):
        near = did_you_mean(package, {one.partition(".")[0] for one in ALLOWED_IMPORTS})
        return _Cause(7, f"there is no module {package!r}{near}", name)
    return _Cause(9, f"{refusal} trusted packages only.\n  If you trust it: --allow-import {package}")


# Sentences of jsonargparse that need no more than another wording: pattern, priority, sentence, name.
_WORDINGS = (
    (r".*no option '(?:[^']+\.)?([^']+)'.*", 8, r"\g<0>", r"\1"),
    (r".*arguments are required: (.+)", 8, r"required and missing: \1", ""),
    (
        r".*Multiple subclasses with name (\w+)\..*ambiguity: (.+?)\.?$",
        8,
        r"two classes are named '\1'; write one of them in full: \2",
        "",
    ),
    (r".*No module named '([\w.]+)'.*", 7, r"there is no module '\1'", ""),
    (r".*File does not exist: '?([^']+)'?.*", 7, r"there is no file '\1'", ""),
    (
        r".*Unable to load config ['\"](.+)['\"].*",
        7,
        r"'\1' is no mapping of keys to values, and no file (after a key: a colon, and a space)",
        "",
    ),
    (r".*Subclasses are disabled for.*", 3, r"\g<0>", ""),  # of one class, where another one may stand
    (r"Unexpected config.*", 5, "this is no mapping of keys to values", ""),
)
# Sentences that are translated by a function. The first pattern that matches counts.
_TRANSLATIONS: tuple[tuple[str, Callable[[re.Match[str], str, str], _Cause | None]], ...] = (
    (r".*Importing '([^']+)' is not allowed", _refused_import),
    (r".*Expected a dot import path string: (\S+)", _no_class),
    (r".*module '([\w.]+)' has no attribute '(\w+)'", _no_attribute),
    (r".*[Ii]mport path (\S* ?)does not correspond to a subclass of (\w+)", _no_subclass),
    (r".*Unexpected import path format: (\S+)", _no_path),
    (r".*Expected an? (.+?)\.? Got value: ?(.*)", _other_type),
    (r"Expected an? ", _none_of_types),
    (r"Not a valid subclass of(?:.*Got value: (.*))?", _unfit_class),
)


def _cause(line: str, allowed: str, given: str) -> _Cause | None:
    """Translate a line of a report.

    Args:
        line: The line.
        allowed: Types that are allowed there.
        given: The value that was given.
    """
    for pattern, priority, wording, name in _WORDINGS:
        match = re.fullmatch(pattern, line)
        if match:
            return _Cause(priority, match.expand(wording), match.expand(name))
    for pattern, translate in _TRANSLATIONS:
        match = re.match(pattern, line)
        if match:
            return translate(match, allowed, given)
    return None


def _base_itself(names: Sequence[str]) -> str:
    """Return the sentence for a base class where no class is named, or an empty string."""
    for base in _BASES:
        if base.__name__ in names:
            return (
                f"{base.__name__} itself cannot stand here: write class_path: NAME, and its arguments below init_args"
            )
    return ""


def _wrong_type(allowed: str, value: str) -> str:
    """Return the sentence for a value of a type that is not allowed."""
    option = re.match(r"NestedArg\(key='(.+?)', val=(.*)\)", value)
    if option:
        value = "=".join(part.strip("'") for part in option.groups())
    value = value.strip("'") or "''"
    choices = re.findall(r"[\w.-]+", allowed)
    here = elsewhere("", value)
    hint = ""
    if value == "None" and "null" in allowed.split(", "):  # the word: null itself is allowed
        hint = ", did you mean null?"
    elif here.rpartition(" ")[2] in choices:  # the name that another trainer has for it
        hint = here
    elif "one of" in allowed:
        hint = did_you_mean(value, choices)
    if value == "None" and not hint:
        value = "null"
    if hint.endswith("?"):
        return f"{value} is not allowed{hint} Expected {allowed}"
    return f"{value} is not allowed{hint}, expected {allowed}"


def _readable_types(text: str) -> str:
    """Turn ``[<class 'int'>, typing.Literal['a'], <class 'NoneType'>]`` into ``int, one of 'a', null``."""
    text = re.sub(r"<class '(?:[\w]+\.)*(\w+)'>", r"\1", text)
    text = re.sub(r"typing\.Literal\[(.*?)\]", r"one of \1", text)
    text = re.sub(r"\b(?:typing|collections|lightning|torch)[\w.]*\.(\w+)", r"\1", text)
    text = text.replace("NoneType", "null").strip()
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1]
    return text


def _subclasses(bases: Sequence[type]) -> list[str]:
    """Return the names of all imported subclasses, direct or not, without private ones."""
    found: list[str] = []
    stack = list(bases)
    while stack:
        below: list[type] = stack.pop().__subclasses__()
        found += [cls.__name__ for cls in below if not cls.__name__.startswith("_")]
        stack += below
    return found
