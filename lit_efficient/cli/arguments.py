"""The words of a command line, read once: configs and options become one tree, all other words go to the parser."""

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lit_efficient.cli.tree import SECTIONS, Table, list_of, merge, read_file, restated, set_option, take_out
from lit_efficient.cli.words import RUNS, plain
from lit_efficient.errors import ConfigurationError
from lit_efficient.files import configs

# Keys that each subcommand has of its own; `return_predictions` is of predict, `verbose` of validate and test.
_OWN = ("seed_everything", "ckpt_path", "weights_only", "verbose", "return_predictions")
KEYS = (*SECTIONS, *_OWN)
_NAMING = {"--without": "class, as in --without EMA", "--allow_import": "package, as in --allow-import my_project"}
_PATIENCE = 3  # seconds that a pipe may be silent


@dataclass
class Command:
    """A command line.

    Args:
        subcommand: The subcommand, or ``None`` for a program without any.
        tree: All configs and options, merged in their order.
        configs: Paths of the configs.
        packages: Packages that ``--allow-import`` names.
        rest: Words that are no key of a config.
        restated: Names of classes that were appended to a list which had them.
        unlikely: Dataclasses that the fields in the tree are not of; the check of names sets it.
    """

    subcommand: str | None
    tree: Table = field(default_factory=Table)
    configs: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    restated: list[str] = field(default_factory=list)
    unlikely: set[str] = field(default_factory=set)


def read_command(words: Sequence[str], defaults: Table | None = None) -> Command:
    """Read the words after the program's name.

    Configs and options are merged in the order in which they are written, so that the overlay of ``tune``, appended to
    the searched command, overrides its options. ``--without`` comes last.

    Args:
        words: The words.
        defaults: What a script sets below its configs.

    Raises:
        ConfigurationError: If a config cannot be read, an option has no value, or a class that is taken out is not
            there.
    """
    start = next((index for index, word in enumerate(words) if word in RUNS), -1)
    command = Command(words[start] if start >= 0 else None, defaults or Table())
    _read_shared(command, words[: max(start, 0)])
    without: list[str] = []
    left = list(words[start + 1 :])
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        key = plain(name).removeprefix("--")
        if plain(name) in _NAMING:
            if not value and left:
                value = left.pop(0)
            if not value or value.startswith("-"):
                raise ConfigurationError(f"{name.replace('_', '-')} needs the name of a {_NAMING[plain(name)]}")
            if key == "without":
                without.append(value)
            else:
                command.packages.append(value)
        elif name in ("-c", "--config"):
            if not equals and not left:
                raise ConfigurationError(f"{name} needs the name of a config, or a file")
            if not equals:
                value = left.pop(0)
            path = configs.find(value)
            given = read_config(path)
            command.restated += restated(command.tree, given)
            command.tree = merge(command.tree, given)
            command.configs.append(path)
        elif name.startswith("--") and key.partition(".")[0].rstrip("+-") in KEYS and not key.endswith(".help"):
            if not equals and not (left and _is_value(left[0])):
                raise ConfigurationError(f"argument {name}: expected one argument")
            if not equals:
                value = left.pop(0)
            if key in SECTIONS and os.path.isfile(value):
                command.tree = merge(command.tree, _with_sections(Table({key: value}), ""))
            else:
                if key.endswith("+"):
                    command.restated += restated(command.tree, set_option(Table(), key, value))
                command.tree = set_option(command.tree, key, value)
        elif name.endswith(".help") and not equals and left and _is_value(left[0]):
            command.rest.append(f"{name}={left.pop(0)}")
        else:
            command.rest.append(word)
    trainer = command.tree.get("trainer")
    for name in without:
        if isinstance(trainer, Table):
            trainer = trainer.copy()
        else:
            trainer = Table()
        take_out(trainer, list_of(name), name)
        command.tree.put("trainer", trainer)
    return command


def _read_shared(command: Command, words: Sequence[str]) -> None:
    """Read the words before the subcommand: configs with a section for each subcommand."""
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if name not in ("-c", "--config") or not (equals or left):
            raise ConfigurationError(f"{name}: only -c CONFIG may be written before {command.subcommand}")
        if not equals:
            value = left.pop(0)
        path = configs.find(value)
        tree = read_config(path)
        for key in tree:
            if key not in RUNS:
                raise ConfigurationError(f"no option {str(key)!r}\n  {tree.places[key]}\n  accepted: {', '.join(RUNS)}")
        section = tree.get(command.subcommand)
        if isinstance(section, Table):
            command.configs.append(path)
            command.tree = merge(command.tree, section)


def _is_value(word: str) -> bool:
    """Return whether a word can be a value. A negative number can, an option cannot."""
    return not word.startswith("--")


def read_config(path: str) -> Table:
    """Read a config and the files that it names for its sections.

    Raises:
        ConfigurationError: If one of them cannot be read.
    """
    text = _through_pipe(path) if Path(path).is_fifo() else None
    return _with_sections(read_file(path, text), os.path.dirname(path))


def _with_sections(tree: Table, folder: str) -> Table:
    """Replace the name of a file, ``trainer: fast.yaml``, by what is in it, and resolve keys with dots."""
    result = tree.copy()
    for key in tree:
        first, *others = str(key).split(".")
        if others and first in SECTIONS:
            place = tree.places.get(key)
            value = result.pop(key)
            for part in reversed([first, *others]):
                outer = Table()
                outer.put(part, value, place)
                value = outer
            result = merge(result, outer)
    for key in SECTIONS:
        value = result.get(key)
        if not isinstance(value, str):
            continue
        for file in (os.path.join(folder, value), value):
            if Path(file).is_fifo():
                raise ConfigurationError(f"{key}: {value} is a pipe: write it into a file")
            if os.path.isfile(file):
                result.put(key, read_file(file))
                break
    return result


def _through_pipe(path: str) -> str:
    """Return what comes through a pipe until its writer closes it.

    Raises:
        ConfigurationError: If nothing comes: a pipe without a writer never ends.
    """
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    parts: list[bytes] = []
    try:
        while select.select([pipe], [], [], _PATIENCE)[0]:
            part = os.read(pipe, 1 << 16)
            if not part:
                return b"".join(parts).decode("utf-8", "replace")
            parts.append(part)
    finally:
        os.close(pipe)
    raise ConfigurationError(f"{path}: it is a pipe, and nothing came through it in {_PATIENCE} s")
