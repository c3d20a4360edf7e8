"""What may stand in a config and on the command line: safe imports, known keys, no null where none is allowed.

Everything here is decided before a class is imported, because importing what a config names is running what it names.
"""

import contextlib
import json
import os
import re
import select
import types
import typing
from argparse import ArgumentError
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import set_loader, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from torch.optim.lr_scheduler import LRScheduler

from lit_efficient.catalog import registered
from lit_efficient.cli.config_text import (
    LISTS,
    SPEC,
    check_yaml,
    full_name,
    help_of,
    leaf,
    load_yaml,
    slot_of,
    strategy_class,
)
from lit_efficient.cli.merging import MergesMappings, holds_mappings
from lit_efficient.cli.without import TakesOut, options
from lit_efficient.errors import ConfigurationError, did_you_mean
from lit_efficient.files import configs
from lit_efficient.internals.jsonargparse_parser import (
    ChecksValues,
    actions,
    changing,
    is_section,
    plain,
    put_whole_numbers_first,
    subcommands,
    type_hint,
)

# Packages whose classes a config may name. Where an object is defined counts as well as where it was found, so
# `lightning.pytorch.cli.os.system` is refused as `os.system` is.
ALLOWED_IMPORTS = (
    "lit_efficient",
    "lightning.pytorch",
    "lightning.fabric.plugins",  # where Lightning defines the environments and checkpoint IOs that it re-exports
    "pytorch_lightning",
    "torch.optim",
    "torch.nn",
    torch.nn.functional.gelu.__module__,  # where torch defines it and its kin, in C
    "torchmetrics",
)
PARSER_MODE = "lit_efficient"

# Arguments by which schedulers call the length of the run. Left unset they are the run's number of optimizer steps.
HORIZONS = ("total_steps", "T_max", "num_training_steps", "total_iters")
_OF_THE_RUN: dict[type, tuple[str, ...]] = {LRScheduler: HORIZONS, Logger: ("save_dir",)}

_NAMES = {"--without": "class, as in --without EMA", "--allow_import": "package, as in --allow-import my_project"}
_granted: set[str] = set()
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning makes the calls, no user can mend them


def set_import_policy(extra: Sequence[str] = ()) -> None:
    """Refuse to import what a config names, except from :data:`ALLOWED_IMPORTS` and ``extra``.

    What an earlier call in this process allowed is taken back.

    Raises:
        ConfigurationError: If an entry is no dotted name, or cannot be allowed at all.
    """
    try:
        set_parsing_settings(
            config_read_mode_fsspec_enabled=False,  # no configs from URLs
            config_read_mode_urls_enabled=False,
            validate_subclass_spec_in_any=True,  # a class in an untyped argument is checked like any other
            instantiate_subclass_spec_in_any=False,
            import_path_denylist=["*", *_granted],
            import_path_allowlist=[*ALLOWED_IMPORTS, *extra, *_registered_classes()],
        )
    except ValueError as error:
        raise ConfigurationError(f"--allow-import: {error}") from error
    _granted.update(set(extra) - set(ALLOWED_IMPORTS))


def _registered_classes() -> list[str]:
    """What installed packages register as techniques: the classes alone, not what else lies beside them.

    Who installs such a package has decided to run it, as with a plugin of any program; a config only says when.
    """
    paths = [one.path for known in registered().values() for one in known]
    return [path for path in paths if all(part.isidentifier() for part in path.split("."))]


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without ``--allow-import PKG``, class names in full and configs by path, and the packages.

    Raises:
        ConfigurationError: If ``--allow-import`` stands without a package, or there is no such config.
    """
    arguments: list[str] = []
    allowed: list[str] = []
    without: list[str] = []
    tokens = iter(argv)
    names_class = False
    for token in tokens:
        key, equals, value = token.partition("=")
        if plain(key) in _NAMES:
            name = value or next(tokens, "")
            if not name or name.startswith("-"):
                raise ConfigurationError(f"{key.replace('_', '-')} needs the name of a {_NAMES[plain(key)]}")
            (without if key == "--without" else allowed).append(name)
            continue
        if key in ("-c", "--config"):
            arguments += [key, *map(configs.find, [value] if equals else islice(tokens, 1))]
            continue
        if re.fullmatch(r"--[A-Z]\w*\.help", key):
            arguments.append(help_of(key[2:-5]))
            continue
        if key.startswith("--") and key.endswith(".strategy"):
            value = value if equals else next(tokens, "")
            named = strategy_class(value)
            arguments.append(f"{key}={json.dumps(named) if isinstance(named, dict) else named}")
            continue
        last = leaf(key[2:]) if key.startswith("--") else ""
        if not key.startswith("--"):
            _check_text(arguments[-1] if arguments else "", token)
        elif equals:
            _check_text(key, value)
        is_slot = bool(slot_of(last)) or last in ("class_path", "help")
        if is_slot and equals:
            arguments.append(f"{key}={full_name(value)}")
        else:
            arguments.append(full_name(token) if names_class else token)
        names_class = is_slot and not equals
    return [*arguments, *options(without)], allowed


def _check_text(option: str, text: str) -> None:
    """Refuse in a mapping or list on the command line what is refused in a file: jsonargparse takes it for a string."""
    if text[:1] not in ("{", "["):
        return
    try:
        check_yaml(text, slot_of(option))
    except yaml.MarkedYAMLError:
        return  # a string
    except yaml.YAMLError as error:
        said = re.sub(r": in line 1 and line 1\b| in line 1\b", "", str(error))
        raise ConfigurationError(f"{option.removeprefix('--')}: {said}") from error


# The ways in which jsonargparse says that an option does not exist.
_UNKNOWN_OPTION = re.compile(
    r"(?:(Group '(?P<group>.+)' )?does not accept option|unrecognized arguments:|Option) "
    r"'?(?:--)?(?P<name>[\w.+-]+)[^']*'?( is not accepted)?"
)
_PATIENCE = 3  # seconds
_UNLISTED = {"help", "config", "print_config", "print_shtab", "==SUPPRESS==", "subcommand"}

set_loader(PARSER_MODE, load_yaml, (yaml.YAMLError,))


class Parser(ChecksValues, LightningArgumentParser):
    """The parser of the command line, of each subcommand and of each class that a config names."""

    described: type | None = None  # the class

    def add_class_arguments(self, theclass: type, *args: Any, **kwargs: Any) -> list[str]:
        """Add a class's arguments; those that the run knows, as a scheduler's length, may be left unset."""
        added = super().add_class_arguments(theclass, *args, **kwargs)
        self.described = theclass
        known = next((names for kind, names in _OF_THE_RUN.items() if issubclass(theclass, kind)), ())
        for action in actions(self):
            put_whole_numbers_first(action)
            if holds_mappings(type_hint(action)):
                kind: Any = type(action)
                action.__class__ = changing(kind, MergesMappings)
            if leaf(action.dest) in LISTS and not isinstance(action, TakesOut) and type_hint(action):
                kind = type(action)
                action.__class__ = changing(kind, TakesOut)
            if action.dest in known:
                action.required = False
                action.default = None
        return added

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Parse a config file; its name goes in front of what is wrong with it, unless another's stands there."""
        try:
            if os.path.exists(path) and Path(path).is_fifo():
                return self.parse_string(_through(path), str(path), *args, **kwargs)
            return super().parse_path(path, *args, **kwargs)
        except ArgumentError as error:
            named = error.message.startswith("In file ")
            raise error if named else ArgumentError(None, f"In file {path}:\n{error.message}") from error
        except UnicodeDecodeError as error:
            raise ArgumentError(None, f"In file {path}:\nit is no UTF-8 text: {error.reason}") from error

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Any:
        """Parse a config; its keys are checked first, because jsonargparse drops those that hold nothing."""
        with contextlib.suppress(yaml.YAMLError):  # which the parsing itself will report
            self._check_keys(load_yaml(content))
        return super().parse_string(content, *args, **kwargs)

    def _check_keys(self, tree: Any, prefix: str = "") -> None:
        if not isinstance(tree, dict):
            return
        # `trainer` alone is an option as well, which takes a file; it is no value.
        values = {action.dest for action in actions(self) if not is_section(action)}
        for name, value in tree.items():
            key = f"{prefix}{name}".rstrip("+")
            if any(f"{key}.".startswith(f"{dest}.") for dest in values | {*_UNLISTED, "$schema"}):
                continue
            if key in subcommands(self):
                subcommands(self)[key]._check_keys(value)
            elif not any(dest.startswith(f"{key}.") for dest in values):
                self.error(f"Option '{key}' is not accepted")
            elif not isinstance(value, dict | str):  # a string names a file
                shown = "null" if value is None else value
                self.error(f'Parser key "{key}":\n  Expected a mapping. Got value: {shown}')
            elif isinstance(value, dict):
                self._check_keys(value, f"{key}.")
            elif os.path.isfile(value):  # read again by the parsing, which would name the file around it
                self._check_section(key, value)
            elif Path(value).is_fifo():  # which the parsing would wait for
                self.error(f'Parser key "{key}":\n  {value} is a pipe: write it into a file')

    def _check_section(self, key: str, file: str) -> None:
        try:
            with contextlib.suppress(yaml.YAMLError):  # as above
                self._check_keys(load_yaml(Path(file).read_text("utf-8")), f"{key}.")
        except UnicodeDecodeError as error:
            self.error(f'Parser key "{key}":\n  {file} is no UTF-8 text: {error.reason}')
        except ArgumentError as error:
            raise ArgumentError(None, f"In file {file}:\n{error.message}") from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what is wrong; for an unknown option, add where it is now, or what was probably meant."""
        unknown = _UNKNOWN_OPTION.search(message)
        if unknown and "(accepted" not in message:
            parser = getattr(ex, "subcommand_parser", None) or self
            own = [a.dest for a in actions(parser) if a.dest not in _UNLISTED or type_hint(a)]
            dests = [dest for dest in own if not dest.endswith(".help")]
            inside = any(dest.startswith(f"{unknown['group']}.") for dest in dests)
            name = f"{unknown['group']}.{unknown['name']}" if inside else unknown["name"]
            level, _, last = name.rpartition(".")
            while level and not any(f"{dest}.".startswith(f"{level}.") for dest in dests):
                level = level.rpartition(".")[0]
            below = [dest[len(level) :].lstrip(".").split(".")[0] for dest in dests if dest.startswith(level)]
            accepted = ", ".join(dict.fromkeys(filter(None, below)))
            key, _, _ = name[len(level) :].lstrip(".").partition(".")
            near = did_you_mean(name, dests)
            if not did_you_mean(last, [leaf(near.rpartition("'")[0])]):  # the section alone makes them no kin
                near = did_you_mean(
                    key, [*below, *(s for s in SPEC if s[:3] == key[:3] and s != key), *map(leaf, dests)]
                )
            ungrouped = [dest for dest in dests if dest.endswith((f".{name}", f".{name.partition('.')[0]}"))]
            if ungrouped:  # the key is right, and the group in front of it is missing
                near = f", did you mean {ungrouped[0]!r}?"
            message = f"no option {name!r}{elsewhere(parser.described, last) or f'{near} (accepted: {accepted})'}"
        super().error(message, ex)

    def before_check(self, action: Any, value: Any, key: str) -> None:
        """Check null, too, which jsonargparse takes for "not given"."""
        if value is None and getattr(action, "default", None) is not None and not _accepts_null(action):
            raise TypeError(f'Parser key "{key}":\n  Expected a {type_hint(action)}. Got value: null')
        if is_section(action) and isinstance(value, int | float | list | None):  # a text is a file
            shown = "null" if value is None else value
            raise TypeError(f'Parser key "{key}":\n  Expected a mapping of keys to values. Got value: {shown}')


def elsewhere(owner: type | None, name: str) -> str:
    """What is here for an option that other trainers have, as the end of a sentence; else ""."""
    here = json.loads(Path(__file__).parent.with_name("names_elsewhere.json").read_text("utf-8"))
    found = here.get(f"{owner and owner.__name__}.{name}", here.get(name))
    return f": here it is {found}" if found else ""


def _through(path: Any) -> str:
    """What comes through a pipe until its writer closes it; one that nobody writes into would never end."""
    pipe, parts = os.open(path, os.O_RDONLY | os.O_NONBLOCK), list[bytes]()
    try:
        while select.select([pipe], [], [], _PATIENCE)[0]:
            if not (part := os.read(pipe, 1 << 16)):
                return b"".join(parts).decode("utf-8")
            parts.append(part)
    finally:
        os.close(pipe)
    raise ArgumentError(None, f"In file {path}:\nit is a pipe, and nothing came through it in {_PATIENCE} s")


def _accepts_null(action: Any) -> bool:
    def accepts(hint: Any) -> bool:
        if hint in (None, Any, object, type(None)):
            return True
        return any(accepts(part) for part in typing.get_args(hint)) if _is_union(hint) else _is_opaque(hint)

    return accepts(type_hint(action, Any))


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Literal)


def _is_opaque(hint: Any) -> bool:
    return type(hint).__module__.startswith("jsonargparse")
