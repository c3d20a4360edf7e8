"""What may stand in a config: safe imports, short class names, no duplicate keys, no null where none is allowed.

Everything here is decided before a class is imported, because importing what a config names is running what it names.
"""

import contextlib
import dataclasses
import json
import os
import re
import types
import typing
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import Namespace, get_loader, set_loader, set_parsing_settings
from lightning.pytorch import callbacks, loggers, plugins, profilers, strategies
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lit_efficient import PUBLIC
from lit_efficient.catalog import registered, third_party
from lit_efficient.cli.without import TakesOut, marked, options
from lit_efficient.errors import ConfigurationError, did_you_mean
from lit_efficient.files import configs
from lit_efficient.files.moved import moved_key
from lit_efficient.internals.jsonargparse_parser import (
    ChangesValues,
    ChecksValues,
    actions,
    changing,
    is_section,
    nested,
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

# Keys whose value, or the items of whose value, may be a class name alone.
_SLOTS = {"callbacks", "plugins", "strategy", "logger", "model", "data", "optimizer", "lr_scheduler"}
_LISTS = {"callbacks", "plugins"}
_SPEC = ("class_path", "init_args", "dict_kwargs")
_NULL = ("", "~", "null", "Null", "NULL")
# torch has a class of the same name, without the `monitor` that Lightning needs.
_ALIASES = {"ReduceLROnPlateau": "lightning.pytorch.cli.ReduceLROnPlateau"}
# Other packages, once imported, have optimizers of the same names as torch's, and a short name would be ambiguous.
_ALIASES |= {name: f"torch.optim.{name}" for name, value in vars(torch.optim).items() if isinstance(value, type)}
# Their short names are resolved by Lightning.
_LIGHTNINGS = {name for part in (callbacks, loggers, plugins, profilers, strategies) for name in part.__all__}
# Fields of a mapping that say what it describes: another value is another thing, and nothing of the first remains.
_KINDS = ("model_type", "_class_name")
# Arguments by which schedulers call the length of the run. Left unset they are the run's number of optimizer steps.
HORIZONS = ("total_steps", "T_max", "num_training_steps", "total_iters")
_OF_THE_RUN: dict[type, tuple[str, ...]] = {LRScheduler: HORIZONS, Logger: ("save_dir",)}

_granted: set[str] = set()
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning makes the calls, no user can mend them


def set_import_policy(extra: Sequence[str] = ()) -> None:
    """Refuse to import what a config names, except from :data:`ALLOWED_IMPORTS` and ``extra``.

    Args:
        extra: Packages that the user allows. What an earlier call in this process allowed is taken back.

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
        if plain(key) in ("--allow_import", "--without"):
            name = value or next(tokens, "")
            if not name or name.startswith("-"):
                example = (
                    "class, as in --without EMA" if key == "--without" else "package, as in --allow-import my_project"
                )
                raise ConfigurationError(f"{key.replace('_', '-')} needs the name of a {example}")
            (without if key == "--without" else allowed).append(name)
            continue
        if key in ("-c", "--config"):
            arguments += [key, *map(configs.find, [value] if equals else islice(tokens, 1))]
            continue
        if re.fullmatch(r"--[A-Z]\w*\.help", key):
            arguments.append(_help_of(key[2:-5]))
            continue
        if key.startswith("--") and key.endswith(".strategy"):
            value = value if equals else next(tokens, "")
            named = strategy_class(value)
            arguments.append(f"{key}={json.dumps(named) if isinstance(named, dict) else named}")
            continue
        leaf = _leaf(key[2:]) if key.startswith("--") else ""
        if not key.startswith("--"):
            _check_text(arguments[-1] if arguments else "", token)
        elif equals:
            _check_text(key, value)
        is_slot = leaf in _SLOTS or leaf in ("class_path", "help")
        if is_slot and equals:
            arguments.append(f"{key}={full_name(value)}")
        else:
            arguments.append(full_name(token) if names_class else token)
        names_class = is_slot and not equals
    return [*arguments, *options(without)], allowed


def _help_of(name: str) -> str:
    """The option that prints the arguments of a class of torch or Lightning, ``--optimizer.help=torch.optim.AdamW``."""
    slots: dict[str, Sequence[str]] = {
        "optimizer": [one for one, value in vars(torch.optim).items() if isinstance(value, type)],
        "lr_scheduler": [*vars(lr_scheduler)],
        "trainer.callbacks": callbacks.__all__,
        "trainer.logger": loggers.__all__,
        "trainer.plugins": plugins.__all__,
        "trainer.profiler": profilers.__all__,
        "trainer.strategy": strategies.__all__,
    }
    slot = next((slot for slot, names in slots.items() if name in names), None)
    if slot is None:
        known = [*PUBLIC, *(one for names in slots.values() for one in names)]
        raise ConfigurationError(f"--{name}.help: there is no class {name!r}{did_you_mean(name, known)}")
    return f"--{slot}.help={full_name(name)}"


def _check_text(option: str, text: str) -> None:
    """Refuse in a mapping or list on the command line what is refused in a file: jsonargparse takes it for a string."""
    if text[:1] not in ("{", "["):
        return
    try:
        _check_nodes(yaml.compose(text, Loader=yaml.SafeLoader), set(), (), _slot(option))
    except yaml.MarkedYAMLError:
        return  # a string
    except yaml.YAMLError as error:
        said = re.sub(r": in line 1 and line 1\b| in line 1\b", "", str(error))
        raise ConfigurationError(f"{option.removeprefix('--')}: {said}") from error


def full_name(name: str) -> str:
    """Return the import path of a short class name: of ours, of torch's, or one that another package registers.

    Any other string is returned as it is, and so are the names of Lightning's classes.

    Raises:
        ConfigurationError: If two packages register the name.
    """
    if name in PUBLIC:
        return f"lit_efficient.{name}"
    theirs = None if name in _ALIASES or name in _LIGHTNINGS else third_party(name)
    return theirs.path if theirs else _ALIASES.get(name, name)


def strategy_class(name: str) -> str | dict[str, str]:
    """What the trainer takes for a class: a plain string would be one of Lightning's own short names, such as ddp."""
    full = full_name(name)
    return {"class_path": full} if full.rpartition(".")[2] in strategies.__all__ else full


def expand_short_names(tree: Any, key: str = "") -> Any:
    """Write the short class names in a loaded config in full: those in ``class_path`` and in the slots."""
    if isinstance(tree, dict):
        return {k: expand_short_names(value, str(k)) for k, value in marked(tree).items()}
    if isinstance(tree, list):
        return [expand_short_names(item, key) for item in tree]
    if isinstance(tree, str) and _leaf(key) == "strategy":
        return strategy_class(tree)
    if isinstance(tree, str) and (_leaf(key) in _SLOTS or _leaf(key) == "class_path"):
        return full_name(tree)
    return tree


def _leaf(key: str) -> str:
    return key.rstrip("+").split(".")[-1]


def _slot(key: str) -> str:
    return leaf if (leaf := _leaf(key.removeprefix("--"))) in _SLOTS else ""


def load_yaml(text: str) -> Any:
    """Load YAML as jsonargparse does, but refuse duplicate and misspelt keys and know our short class names.

    Raises:
        yaml.YAMLError: If the text is no YAML, a mapping has a key twice or holds itself, or what names a class does
            not do so. The message names the lines.
    """
    if re.search(r"[:?\[{-]", text):  # else it is a single value
        _check_nodes(yaml.compose(text, Loader=yaml.SafeLoader), set(), ())
    return expand_short_names(get_loader("yaml")(text))


def _check_nodes(node: yaml.Node | None, seen: set[int], within: tuple[int, ...], slot: str = "") -> None:
    """Raise what is wrong with a node and those below it; ``slot``: in which it stands, and so may be a class."""
    if node is not None and id(node) in within:
        raise yaml.YAMLError(f"what begins in line {node.start_mark.line + 1} holds itself")
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    lines: dict[str, int] = {}
    for item in node.value:
        key, value = item if isinstance(node, yaml.MappingNode) else (None, item)
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        if isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"the key {name!r} stands twice: in line {lines[name]} and line {line}")
            lines[name] = line
        _check_nodes(value, seen, (*within, id(node)), _slot(name) if key else slot)
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        _check_spec(lines, {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}, slot)


def _check_spec(lines: dict[str, int], values: dict[str, yaml.Node], slot: str) -> None:
    """Raise what is wrong with a class and its arguments, if a mapping is that, or nearly so."""
    misspelt = [name for name in lines if slot and did_you_mean(name, ["class_path"]) and name != "class_path"]
    how = "write class_path: {}, and its arguments below init_args"
    named = next((name for name in lines if slot and "class_path" not in lines and _is_class(name)), None)
    if named is not None:
        raise yaml.YAMLError(f"{named!r} in line {lines[named]} is a class, no argument: {how.format(named)}")
    if "class_path" in lines:
        misspelt = [name for name in lines if name not in _SPEC]
        if values["class_path"].tag != "tag:yaml.org,2002:str":
            raise yaml.YAMLError(f"class_path in line {lines['class_path']} names no class")
    if misspelt:
        name, accepted = misspelt[0], ", ".join(_SPEC)
        advice = did_you_mean(name, _SPEC)
        raise yaml.YAMLError(f"no option {name!r} in line {lines[name]}{advice} (accepted: {accepted})")
    if slot in _LISTS and lines and not lines.keys() & {*_SPEC}:
        name, line = next(iter(lines.items()))
        raise yaml.YAMLError(f"{name!r} in line {line} of {slot} is of no class: {how.format('NAME')}")
    arguments = values.get("init_args") if "class_path" in lines else None
    if arguments is not None and not isinstance(arguments, yaml.MappingNode) and arguments.value not in _NULL:
        raise yaml.YAMLError(f"init_args in line {lines['init_args']} is no mapping of names to values")


def _is_class(name: str) -> bool:
    known = name in _LIGHTNINGS or hasattr(lr_scheduler, name) or full_name(name) != name
    return known or ("." in name and name.rpartition(".")[2][:1].isupper())


# The ways in which jsonargparse says that an option does not exist.
_UNKNOWN_OPTION = re.compile(
    r"(?:does not accept option|unrecognized arguments:|Option) '?(?:--)?(?P<name>[\w.+-]+)[^']*'?( is not accepted)?"
)
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
            if _holds_mappings(type_hint(action)):
                kind: Any = type(action)
                action.__class__ = changing(kind, MergesMappings)
            if _leaf(action.dest) in _LISTS and not isinstance(action, TakesOut) and type_hint(action):
                kind = type(action)
                action.__class__ = changing(kind, TakesOut)
            if action.dest in known:
                action.required = False
                action.default = None
        return added

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Parse a config file; its name goes in front of what is wrong with it."""
        try:
            return super().parse_path(path, *args, **kwargs)
        except ArgumentError as error:
            raise ArgumentError(None, f"In file {path}:\n{error.message}") from error
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
            else:
                self._check_keys(value, f"{key}.")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what is wrong; for an unknown option, add where it is now, or what was probably meant."""
        unknown = _UNKNOWN_OPTION.search(message)
        if unknown and "(accepted" not in message:
            parser = getattr(ex, "subcommand_parser", None) or self
            dests = [a.dest for a in actions(parser) if a.dest not in _UNLISTED and not a.dest.endswith(".help")]
            level, _, leaf = unknown["name"].rpartition(".")
            while level and not any(f"{dest}.".startswith(f"{level}.") for dest in dests):
                level = level.rpartition(".")[0]
            below = [dest[len(level) :].lstrip(".").split(".")[0] for dest in dests if dest.startswith(level)]
            accepted = ", ".join(dict.fromkeys(filter(None, below)))
            key = unknown["name"][len(level) :].lstrip(".").split(".")[0]
            near = did_you_mean(unknown["name"], dests) or did_you_mean(key, [*below, *_SPEC])
            advice = f"{near} (accepted: {accepted})"
            moved = moved_key(parser.described, leaf) or moved_key(parser.described, unknown["name"])
            message = f"no option {unknown['name']!r}{moved or advice}"
        super().error(message, ex)

    def before_check(self, action: Any, value: Any, key: str) -> None:
        """Check null, too, which jsonargparse takes for "not given"."""
        if value is None and getattr(action, "default", None) is not None and not _accepts_null(action):
            raise TypeError(f'Parser key "{key}":\n  Expected a {type_hint(action)}. Got value: null')


class MergesMappings(ChangesValues):
    """An argument of which a later file or option may give a part: the rest stays as it was."""

    def changed(self, value: Any, earlier: Any) -> Any:
        given, before = value, _as_mapping(earlier)
        path = (before or {}).get("class_path", "")
        fields = self._fields(path)
        if (option := nested(value)) is not None:
            key, value = option
            if isinstance(earlier, str):
                raise TypeError(
                    f'Parser key "{self.dest}":\n  no option {key!r}: {earlier!r} is a name, without fields'
                )
            if fields and key.split(".")[0] not in (
                *fields,
                *_SPEC,
            ):  # but maybe of another class that could stand here
                self._refuse(key, path, fields)
            value = None if value == "None" else value  # as jsonargparse hands on a null
            with contextlib.suppress(yaml.YAMLError):
                value = load_yaml(value) if isinstance(value, str) else value
            for part in reversed(key.split(".")):
                value = {part: value}
        now = _as_mapping(value)
        if before is None or now is None or "class_path" in now:
            return given
        arguments = _as_mapping(before.get("init_args")) if "class_path" in before else before
        if arguments is None or (isinstance(earlier, Namespace) and not now.keys() <= {*arguments, *fields}):
            return given  # of another class
        merged = _merged(arguments, now)
        return merged if arguments is before else {**before, "init_args": merged}

    def _fields(self, path: str) -> list[str]:
        """What the dataclass at a path takes, if it is one that may stand here."""
        hint = type_hint(self)
        parts = typing.get_args(hint) or (hint,)
        known = [part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)]
        named = next((part for part in known if part.__name__ == path.rpartition(".")[2]), None)
        return [field.name for field in dataclasses.fields(named)] if named else []

    def _refuse(self, key: str, path: str, known: Sequence[str]) -> NoReturn:
        option = f"no option {key!r}{did_you_mean(key.split('.', maxsplit=1)[0], known)} (accepted: {', '.join(known)})"
        raise TypeError(f'Parser key "{self.dest}":\n  Problem with given class_path {path!r}:\n    {option}')


def _as_mapping(value: Any) -> dict[str, Any] | None:
    value = value.as_dict() if isinstance(value, Namespace) else value
    return value if isinstance(value, dict) else None


def _merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Both, where ``now`` counts; ``now`` alone if it is of another kind, as its names or a field of its say."""
    if any(name in now and name in before and now[name] != before[name] for name in _KINDS):
        return now
    merged = {
        name: _merged(before[name], value) if _both(before.get(name), value) else value for name, value in now.items()
    }
    return before | merged


def _both(before: Any, now: Any) -> bool:
    return isinstance(before, dict) and isinstance(now, dict)


def _holds_mappings(hint: Any) -> bool:
    """Whether a type is a mapping, or a choice of which one is, or a dataclass."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_holds_mappings(part) or dataclasses.is_dataclass(part) for part in typing.get_args(hint))
    return isinstance(origin := typing.get_origin(hint) or hint, type) and issubclass(origin, Mapping)


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
