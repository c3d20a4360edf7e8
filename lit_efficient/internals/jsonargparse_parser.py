"""Private parts of jsonargparse: the options of a parser, and the check of a value. Checked with jsonargparse 4.53."""

import argparse
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser
from jsonargparse._loaders_dumpers import get_yaml_default_loader

# YAML as jsonargparse reads it: `1e-3` is a number, a date is a text.
YAML_LOADER: type[yaml.SafeLoader] = get_yaml_default_loader()


class Option(NamedTuple):
    """An option of a parser.

    Args:
        key: Dotted key in a config.
        hint: Its type, or ``None``.
        is_section: True if it stands for a group of options and takes a file.
        help: Its help text.
    """

    key: str
    hint: Any
    is_section: bool
    help: str | None


def options(parser: ArgumentParser) -> Iterator[Option]:
    """Yield the options of a parser, without the one that takes a config: ``_actions``."""
    for action in parser._actions:
        if not isinstance(action, ActionConfigFile):
            yield Option(action.dest, getattr(action, "_typehint", None), _is_section(action), action.help)


def _is_section(action: argparse.Action) -> bool:
    return type(action).__name__ == "_ActionConfigLoad"


def subcommands(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    """Return the parsers of subcommands by name: ``_subcommands_action``."""
    if parser._subcommands_action:
        return parser._subcommands_action.choices
    return {}


def spelt_for(parser: ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return words in which options are written as the parser has them: ``-`` and ``_`` are the same in a name."""
    known = {name.replace("-", "_"): name for action in parser._actions for name in action.option_strings}
    result = []
    for word in words:
        name, equals, value = word.partition("=")
        result.append(f"{known.get(name.replace('-', '_'), name)}{equals}{value}")
    return result


def prepare_arguments(parser: ArgumentParser, may_be_unset: Collection[str]) -> None:
    """Prepare the arguments of a class that were added to a parser.

    Args:
        parser: The parser.
        may_be_unset: Names of arguments that the run knows: they are neither required nor have a default.
    """
    for action in parser._actions:
        _put_whole_numbers_first(action)
        if action.dest in may_be_unset:
            action.required = False
            action.default = None


def _put_whole_numbers_first(action: argparse.Action) -> None:
    """Keep a whole number whole where floats are allowed, too: the first type that takes a value wins.

    ``limit_train_batches: 1`` is one batch and ``1.0`` is all batches. Lightning's annotation has ``int`` first, but
    ``typing`` caches unions: a package that wrote ``Optional[Union[float, int]]`` earlier turns the order.
    """
    hint = getattr(action, "_typehint", None)
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and {int, float} <= set(kinds):
        ordered = sorted(kinds, key=lambda kind: kind is float)
        action._typehint = typing.Union[tuple(ordered)]  # type: ignore[attr-defined]  # noqa: UP007 (of many)


class ChecksEmptyValues:
    """Mix-in for a parser that refuses null where a type does not allow it, and plain values in place of a section.

    Jsonargparse takes null for "not given". The mix-in overrides ``_check_value_key``.
    """

    def _check_value_key(self, action: Any, value: object, key: str, cfg: object, append: bool = False) -> object:
        hint = getattr(action, "_typehint", Any)
        if value is None and getattr(action, "default", None) is not None and not _accepts_null(hint):
            raise TypeError(f'Parser key "{key}":\n  Expected a {hint}. Got value: null')
        if _is_section(action) and isinstance(value, int | float | list | None):  # a text is a file
            shown = "null" if value is None else value
            raise TypeError(f'Parser key "{key}":\n  Expected a mapping of keys to values. Got value: {shown}')
        return super()._check_value_key(action, value, key, cfg, append=append)  # type: ignore[misc]  # of the parser


def _accepts_null(hint: object) -> bool:
    if hint in (None, Any, object, type(None)):
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Literal):
        return any(_accepts_null(part) for part in typing.get_args(hint))
    return type(hint).__module__.startswith("jsonargparse")
