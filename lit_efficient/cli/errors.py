"""An error as a sentence: which key, which value, what is allowed, what was probably meant. Ten lines at most."""

import ast
import errno
import os
import re
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_efficient import PUBLIC
from lit_efficient.cli.parsing import ALLOWED_IMPORTS, elsewhere
from lit_efficient.distributed.rank_line import ENDED
from lit_efficient.errors import (
    ConfigurationError,
    LitEfficientError,
    OutOfMemoryError,
    did_you_mean,
    install_line,
    is_out_of_memory,
)
from lit_efficient.files import configs
from lit_efficient.internals.torch_loaders import broke_off

MAX_LINES = 10
_FEWER = "where it is killed, memory may have run out: set fewer num_workers"
_MAX_WIDTH = 400
_BASES = (Callback, LightningDataModule, LightningModule, Logger, Strategy, Optimizer, LRScheduler)
_CONTEXT = re.compile(
    r"^\s*(?:- )?(?:Parser key \"(?P<key>[^\"]+)\":?|Problem with given class_path '(?P<path>[^']+)':)"
)
_MISFIT = re.compile(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'")
_NO_CAUSE = ("Expected a", "Not a valid subclass", "a class path", "a dict", "Does not validate")
_BOILERPLATE = re.compile(
    r"[\s-]*(Expected |Does not validate|Errors:|Given value|Subclass types|a class path|a dict )"
)


def explain(error: BaseException, argv: Sequence[str]) -> str | None:
    """What the user can do about an error, in at most ten lines without a traceback; files and lines are looked up in
    ``argv``. ``None`` if the error is a bug, whose traceback is the best answer.
    """
    if alone := [note for note in getattr(error, "__notes__", ()) if note.startswith(ENDED)]:
        return "\n".join(alone)
    if isinstance(error, ArgumentError):
        lines = _explain_parsing(error.message, argv)
    elif isinstance(error, (LitEfficientError, MisconfigurationException)):
        lines = _of_worker(error).strip().splitlines()
    elif is_out_of_memory(error):
        lines = [f"out of memory: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"]
    elif isinstance(error, ModuleNotFoundError):
        lines = _explain_missing_module(error)
    elif isinstance(error, OSError) and error.filename is not None:
        lines = [f"{error.filename}: {error.strerror}"]
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        lines = [f"a file of the run cannot be written: {error.strerror}"]  # a logger's, that does not say which
    elif isinstance(error, OSError) and _of_worker(error) != str(error):
        lines = [f"reading the data: {_of_worker(error)}"]
    elif broke_off(error):
        lines = [f"a DataLoader worker ended while it handed over a batch ({error}): {_FEWER}"]
    elif isinstance(error, RuntimeError) and str(error).startswith(("DataLoader worker (pid", "DataLoader timed out")):
        lines = [f"{str(error).splitlines()[0]}: {_FEWER}"]
    elif twice := re.match(r"Found more than one stateful .* `(\w+)`", str(error)):
        lines = [f"trainer.callbacks: {twice[1]} stands there twice, and both keep their state under one name"]
    elif isinstance(error, RuntimeError) and "stateful loaders, but found" in str(error):
        lines = [
            "ckpt_path: the checkpoint says where in its data the run was, and no loader of this run can go on there: "
            "resume with the ExactResume, or the loader with a state, that it was trained with, or begin a new run"
        ]
    elif isinstance(error, RuntimeError) and "loading state_dict" in str(error):
        lines = _explain_state_dict(str(error))
    else:
        return None
    lines = [*lines[:2], *"\n".join(notes).splitlines()] if (notes := getattr(error, "__notes__", ())) else lines
    lines = [line if len(line) <= _MAX_WIDTH else line[: _MAX_WIDTH - 3] + "..." for line in lines if line.strip()]
    return "\n".join(lines[:MAX_LINES])


def _of_worker(error: Exception) -> str:
    """The message of an error; of one that a loader's worker raised the last words of the traceback in it."""
    caught, name = re.match(r"Caught \w+ in DataLoader worker process", str(error)), type(error).__name__
    return str(error).rpartition(f"{name}: ")[2] if caught else str(error)


def exit_code(error: BaseException) -> int:
    """What the command line ends with for an error that it can explain; see :mod:`lit_efficient.errors`."""
    return OutOfMemoryError.exit_code if is_out_of_memory(error) else getattr(error, "exit_code", 2)


@contextmanager
def explained(argv: Sequence[str]) -> Iterator[None]:
    """Raise what `explain` can say about an error inside as a ConfigurationError, or as want of memory."""
    try:
        yield
    except Exception as error:
        message = None if isinstance(error, ConfigurationError) else explain(error, argv)
        if message is None:
            raise
        kind = OutOfMemoryError if is_out_of_memory(error) else ConfigurationError
        raise kind(message) from error


def constructor_error(error: ValueError | TypeError) -> Exception:
    """Return what a constructor raised: jsonargparse wraps it into a report on all types that a value could have.

    A ``ValueError`` becomes a :class:`ConfigurationError` that says where it comes from; other errors are themselves.
    """
    root: BaseException = error
    while not isinstance(root, LitEfficientError) and root.__cause__ is not None:
        root = root.__cause__
    frame = traceback.extract_tb(root.__traceback__)[-1]
    # Of classes that could stand here one refuses its arguments, and the others do not have them.
    fields_error = isinstance(root, TypeError) and "jsonargparse" in frame.filename and _MISFIT.search(str(root))
    if isinstance(root, LitEfficientError) or not (isinstance(root, ValueError) or fields_error):
        return root if isinstance(root, Exception) else error
    tried = [line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("- ")]
    telling = [line for line in tried if not line.startswith(_NO_CAUSE)]
    message = telling[0] if telling and str(root).startswith("Not a valid subclass") else str(root)
    if telling and str(root).startswith("Expected a "):  # what stands there may be a name, too
        return ConfigurationError(telling[0])
    if fields_error:
        others = [line for line in telling if not _MISFIT.search(line)]
        return ConfigurationError(others[0] if others else f"{fields_error[1]}: no option {fields_error[2]!r}")
    return ConfigurationError(f"{message}\n  raised by {frame.name} in {frame.filename}, line {frame.lineno}")


def _explain_parsing(message: str, argv: Sequence[str]) -> list[str]:
    """Pick the one cause out of jsonargparse's report on all the alternatives that it tried."""
    file = ""
    if match := re.match(r"In file (.+):\n", message):
        file, message = match[1], message[match.end() :]
    message = message.removeprefix("Problems parsing config: ")
    causes = list(_causes(message))
    if not causes:
        lines = message.replace('"<unicode string>", ', "").splitlines()
        return [f"{file}: {lines[0]}" if file else lines[0], *lines[1:]]
    _, _, place, cause, leaf = max(causes, key=lambda entry: entry[:2])
    lines = [f"{place}: {cause}" if place else cause]
    head, _, accepted = lines[0].partition(" (accepted: ")
    name = leaf or place.split(":")[0]
    typed = any(name.split(".")[-1] in token.replace("-", "_") for token in argv)  # then no file is to blame
    where = _line_of(name, [file] if file else [] if typed else _config_files(argv))
    return [head, *([f"  {where}"] if where else []), *([f"  accepted: {accepted.rstrip(')')}"] if accepted else [])]


def _causes(message: str) -> Iterator[tuple[float, int, str, str, str]]:
    """Yield (how telling, how deep, place, cause, last part of the key) for each line that names a cause."""
    lines = re.sub(r'^( *)((?:- )?Parser key "[^"\n]+":) +', r"\1\2\n\1    ", message, flags=re.MULTILINE).splitlines()
    stack: list[tuple[int, str, str]] = []  # indentation, kind, name
    subtypes: dict[int, str] = {}  # depth of the stack -> what is allowed there
    for line in lines:
        indent = len(line) - len(line.lstrip(" -"))
        if context := _CONTEXT.match(line):
            stack = [entry for entry in stack if entry[0] < indent]
            stack.append((indent, "key", context["key"]) if context["key"] else (indent, "class", context["path"]))
        elif "Subtypes: " in line:
            subtypes[len(stack)] = line.partition("Subtypes: ")[2]
        elif line.strip():
            here = [entry for entry in stack if entry[0] <= indent]
            keys = [name for _, kind, name in here if kind == "key"]
            classes = [name.split(".")[-1] for _, kind, name in here if kind == "class"]
            allowed = _readable_types(subtypes.get(len(here), ""))
            found = _cause(line.strip(" -"), allowed, _given(lines, here))
            if not found and (classes or line.lstrip().startswith("- ")) and not _BOILERPLATE.match(line):
                found = 5.5, line.strip(" -"), ""  # what an import or a constructor says
            if found:
                priority, cause, leaf = found
                cause = (_base_itself(classes[-1:]) if cause.startswith("no option") else "") or cause
                other = re.match(r"(\S+) is not a \w+|there is no class '(\w+)'", cause)
                if other and re.search(rf"given class_path '(\S+\.)?{re.escape(other[1] or other[2])}':", message):
                    priority = 4  # it may stand there as another
                if accepted := re.search(r"\(accepted: (.+)\)", cause):  # of several classes, the one that fits best
                    beside = _beside(re.split(r"[.']", cause)[:2][-1], message)
                    fits = sum(name in beside for name in accepted[1].split(", "))
                    priority = priority + 0.01 * fits if fits else 5.9  # another one's complaint of a type comes first
                    priority += 0.05 * ("did you mean" in cause)
                place = _place(keys, classes)
                yield priority, len(here), place, cause, leaf or (keys[-1] if keys else "")


def _beside(key: str, message: str) -> Collection[str]:
    """The names beside a key in the mapping that has it; all that were given, where none says which."""
    for given in re.findall(r"Given value: (\{.*\})", message):
        with suppress(ValueError, SyntaxError, TypeError, AttributeError):  # of values that are no literals or mappings
            value = ast.literal_eval(given)
            if key in (names := value.get("init_args") or value):
                return {*names}
    return re.findall(r"'(\w+)':", message)


def _given(lines: list[str], here: list[tuple[int, str, str]]) -> str:
    indent = here[-1][0] if here else 0
    values = [line for line in lines if line.strip().startswith("Given value: ")]
    near = [v for v in values if len(v) - len(v.lstrip()) >= indent]
    return near[0].partition("Given value: ")[2] if near else ""


def _place(keys: list[str], classes: list[str]) -> str:
    if not keys:
        return ""
    inner = ".".join(keys[1:])
    owner = f": {classes[-1]}" if classes else ""
    return f"{keys[0]}{owner}{f'.{inner}' if owner and inner else ''}"


def _cause(line: str, allowed: str, given: str) -> tuple[float, str, str] | None:
    """Translate one line of jsonargparse: (how telling it is, the sentence, the last part of the key if named)."""
    if match := re.search(r"Importing '([^']+)' is not allowed", line):
        return _refused_import(match[1])
    if match := re.search(r"no option '([^']+)'", line):
        return 8, line, match[1].split(".")[-1]
    if match := re.match(r"there is no '(\S+)' to take out|every run has (\w+)", line):
        return 8, line, match[1] or match[2]
    if match := re.search(r"arguments are required: (.+)", line):
        names = re.sub(r"\b(fit|validate|test|predict)\.", "", match[1])
        return 8, f"required and missing: {names}", ""
    if match := re.search(r"Multiple subclasses with name (\w+)\..*ambiguity: (.+?)\.?$", line):
        return 8, f"two classes are named {match[1]!r}; write one of them in full: {match[2]}", ""
    if match := re.search(r"Expected a dot import path string: (\S+)", line):
        if any(basic in allowed.split(", ") for basic in ("int", "float", "bool", "str")):
            near = did_you_mean(match[1], _known_classes()) if _has_class(allowed) else ""
            return 5.1 if near else 5, _wrong_type(allowed, match[1]) + near, ""
        return 7, f"there is no class {match[1]!r}{did_you_mean(match[1], _known_classes())}", match[1]
    if match := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", line):
        ours = match[2] in PUBLIC or match[1] == "lit_efficient"
        near = did_you_mean(match[2], PUBLIC if ours else dir(sys.modules.get(match[1])))
        return 7, f"there is no {match[2]!r} in {match[1]}{near}", ""
    if match := re.search(r"No module named '([\w.]+)'", line):
        return 7, f"there is no module {match[1]!r}", ""
    if match := re.search(r"[Ii]mport path (\S* ?)does not correspond to a subclass of (\w+)", line):
        name, bases = match[1].strip() or given, [base for base in _BASES if base.__name__ == match[2]]
        near = did_you_mean(name.rpartition(".")[2], _known_classes(bases)) if bases else ""
        return 7, f"{name or 'the class'} is not a {match[2]}{near}", ""
    if match := re.search(r"File does not exist: '?([^']+)'?", line):
        return 7, f"there is no file {match[1]!r}", ""
    if match := re.search(r"Unexpected import path format: (\S+)", line):
        name = match[1].split("(")[0]
        hub = " (a model's name on a hub stands in name_or_path)" if "/" in name else ""
        return 7, f"{match[1]!r} is no class{hub or did_you_mean(name, _known_classes())}", name
    if match := re.search(r"Unable to load config ['\"](.+)['\"]", line):
        return 7, f"{match[1]!r} is no mapping of keys to values, and no file (after a key: a colon, and a space)", ""
    if match := re.search(r"Expected an? (.+?)\.? Got value: ?(.*)", line):
        return 6, _wrong_type(_readable_types(match[1]), match[2]), ""
    if re.match(r"Expected an? ", line):
        priority = 5 if _has_class(allowed) else 5.95  # before an option that another class does not have
        return (priority, _wrong_type(allowed, given), "") if allowed else None
    if "Subclasses are disabled for" in line:  # one of several classes, of which another may stand there
        return 3, line, ""
    if line.startswith("Not a valid subclass of"):
        return 3, f"not a class that fits here. Got: {line.partition('Got value: ')[2] or given}", ""
    if line.startswith("Unexpected config"):
        return 5, "this is no mapping of keys to values", ""
    return None


def _refused_import(path: str) -> tuple[float, str, str]:
    """What to say of a class that is not imported; a package to trust only if it is there and none of ours."""
    package, name = path.split(".", maxsplit=1)[0], path.rpartition(".")[2]
    trusted = [allowed for allowed in ALLOWED_IMPORTS if allowed.split(".")[0] == package]
    if trusted and (itself := _base_itself([name])):  # what jsonargparse takes where nothing is named
        return 4, itself, ""
    refusal = f"importing {path!r} is refused: a config may name classes of"
    if trusted:
        return 9, f"{refusal} {', '.join(trusted)} there{did_you_mean(name, _known_classes())}", name
    with suppress(ValueError):  # of a module without a specification
        if find_spec(package) is None:
            near = did_you_mean(package, {allowed.split(".")[0] for allowed in ALLOWED_IMPORTS})
            return 7, f"there is no module {package!r}{near}", name
    return 9, f"{refusal} trusted packages only.\n  If you trust it: --allow-import {package}", ""


def _base_itself(names: Sequence[str]) -> str:
    """What to say of a class that others extend, which stands where nothing is named."""
    how = "{} itself cannot stand here: write class_path: NAME, and its arguments below init_args"
    return next((how.format(base.__name__) for base in _BASES if base.__name__ in names), "")


def _has_class(allowed: str) -> bool:
    return any(kind[:1].isupper() for kind in allowed.split(", "))


def _wrong_type(allowed: str, value: str) -> str:
    if option := re.match(r"NestedArg\(key='(.+?)', val=(.*)\)", value):
        value = "=".join(part.strip("'") for part in option.groups())
    value = value.strip("'") or "''"
    word = value == "None" and "null" in allowed.split(", ")  # where null may stand, it is the word that may not
    value = "null" if value == "None" and not word else value
    choices = re.findall(r"[\w.-]+", allowed)
    hint = ", did you mean null?" if word else did_you_mean(value, choices) if "one of" in allowed else ""
    if (here := elsewhere(None, value)).rpartition(" ")[2] in choices:  # as another trainer calls it
        hint = f"{here},"
    return f"{value} is not allowed{hint or ','} expected {allowed}".replace("? expected", "? Expected")


def _readable_types(text: str) -> str:
    """Turn ``[<class 'int'>, typing.Literal['a'], <class 'NoneType'>]`` into ``int, one of 'a', null``."""
    text = re.sub(r"<class '(?:[\w]+\.)*(\w+)'>", r"\1", text)
    text = re.sub(r"typing\.Literal\[(.*?)\]", r"one of \1", text)
    text = re.sub(r"\b(?:typing|collections|lightning|torch)[\w.]*\.(\w+)", r"\1", text)
    text = text.replace("NoneType", "null").strip()
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def _known_classes(bases: Sequence[type] = ()) -> list[str]:
    found = [] if bases else [name for name in PUBLIC if name[:1].isupper()]
    stack: list[type] = list(bases or _BASES)
    while stack:
        below: list[type] = stack.pop().__subclasses__()
        found += [cls.__name__ for cls in below if not cls.__name__.startswith("_")]
        stack += below
    return found


def _config_files(argv: Sequence[str]) -> list[str]:
    pairs, flags = zip(argv, [*argv[1:], ""]), ("-c", "--config")
    given = [after if one in flags else one.partition("=")[2] for one, after in pairs if one.split("=")[0] in flags]
    return [path for path in map(configs.located, given) if os.path.isfile(path)]


def _line_of(key: str, files: Sequence[str]) -> str:
    """Return "in FILE, line N" if one line of the files mentions the key or value, "in FILE" if several do."""
    pattern = re.compile(rf"(?<![\w.]){re.escape(key.rsplit('.', maxsplit=1)[-1])}(?![\w.])")
    for file in files:
        text = Path(file).read_text(encoding="utf-8", errors="replace") if os.path.isfile(file) else ""
        numbers = [i for i, line in enumerate(text.splitlines(), 1) if pattern.search(line.partition("#")[0])]
        if len(numbers) == 1:
            return f"in {file}, line {numbers[0]}"
        if numbers or len(files) == 1:
            return f"in {file}"
    return ""


def _explain_missing_module(error: ModuleNotFoundError) -> list[str]:
    name = error.name or (re.search(r"Requirement '([\w-]+)", str(error)) or ["", str(error)])[1]
    name = "tensorboard" if name == "tensorboardX" else name.partition(".")[0]  # Lightning takes either
    return [f"the package {name!r} is not installed: {install_line(name)}"]


def _explain_state_dict(message: str) -> list[str]:
    """Summarise torch's list of every key that does not fit."""
    owner = re.search(r"for (\w+):", message)
    lines = [f"the checkpoint is of another architecture than {owner[1] if owner else 'the model'}:"]
    for label, title in (("Missing", "only in the model"), ("Unexpected", "only in the checkpoint")):
        if match := re.search(rf"{label} key\(s\) in state_dict: (.+?)\. ", message.replace("\n", " ") + " "):
            names = ast.literal_eval(f"[{match[1]}]")
            lines.append(f"  {len(names)} {title}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")
    shapes = re.findall(r"size mismatch for ([\w.]+): .*?Size\((\[.*?\])\).*?Size\((\[.*?\])\)", message)
    lines += [f"  {name}: {saved} in the checkpoint, {ours} in the model" for name, saved, ours in shapes[:3]]
    return [*lines, f"  and {len(shapes) - 3} more of another shape"] if len(shapes) > 3 else lines
