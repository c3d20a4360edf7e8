"""What a parser of jsonargparse holds, and where it checks a value. Checked with jsonargparse 4.53."""

import functools
import types
import typing
from collections.abc import Sequence
from typing import Any


def actions(parser: Any) -> list[Any]:
    """The options of a parser: ``_actions``, argparse's too."""
    return parser._actions


def is_section(action: Any) -> bool:
    """Whether an option stands for a group of others and takes a file, no value: ``_ActionConfigLoad``."""
    return type(action).__name__ == "_ActionConfigLoad"


def subcommands(parser: Any) -> dict[str, Any]:
    """The parsers of subcommands by name: ``_subcommands_action``."""
    return parser._subcommands_action.choices if parser._subcommands_action else {}


def type_hint(action: Any, default: Any = None) -> Any:
    """The type of an option that has one: ``_typehint``."""
    return getattr(action, "_typehint", default)


def put_whole_numbers_first(action: Any) -> None:
    """Let a whole number stay one where floats are allowed, too: the first type that takes a value wins.

    ``limit_train_batches: 1`` is one batch and ``1.0`` all of them. Lightning's hint has ``int`` first, but ``typing``
    takes unions of the same types for one: any package that wrote ``Optional[Union[float, int]]`` before turns it.
    """
    kinds = typing.get_args(hint := type_hint(action))
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and {int, float} <= set(kinds):
        action._typehint = typing.Union[tuple(sorted(kinds, key=lambda kind: kind is float))]  # noqa: UP007 (of many)


class ChecksValues:
    """Put in front of a parser: ``before_check`` sees each value before its own check does: ``_check_value_key``."""

    def before_check(self, action: Any, value: Any, key: str) -> None:
        """Raise a ``TypeError`` for a value that is not allowed."""
        raise NotImplementedError

    def _check_value_key(self, action: Any, value: Any, key: str, cfg: Any, append: bool = False) -> Any:
        self.before_check(action, value, key)
        return super()._check_value_key(action, value, key, cfg, append=append)  # type: ignore[misc]


class ChangesValues:
    """Put in front of an action: a value, or what is appended, may change before its own check: ``_check_type_``."""

    dest: str

    def changed(self, value: Any, earlier: Any) -> Any:
        """The value to check instead; ``earlier`` is what files and options before gave."""
        return value

    def appended(self, value: Any, earlier: Any) -> tuple[Any, list[Any]] | None:
        """What to append and the items before it; None for what stays as it is."""
        return None

    def _check_type_(self, value: Any, append: bool = False, cfg: Any = None, mode: Any = None) -> Any:
        earlier = cfg.get(self.dest) if cfg else None
        if append and (both := self.appended(value, earlier)):
            value, cfg = both[0], {self.dest: both[1]}
        elif cfg and not append:
            value = self.changed(value, earlier)
        return super()._check_type_(value, append=append, cfg=cfg, mode=mode)  # type: ignore[misc]  # of the action


def spelt(argv: Sequence[str], parser: Any = None) -> list[str]:
    """Arguments with each option as the parser or a subcommand's has it: ``-`` and ``_`` are alike in its name."""
    parsers = () if parser is None else (parser, *subcommands(parser).values())
    dashed = {plain(name): name for one in parsers for action in actions(one) for name in action.option_strings}
    names = [(token.partition("=")[0], token) for token in argv]
    return [
        dashed.get(plain(name), plain(name)) + token[len(name) :] if name.startswith("--") else token
        for name, token in names
    ]


def plain(name: str) -> str:
    """The name of an option with ``_`` alone."""
    return name[:2] + name[2:].replace("-", "_")


@functools.cache
def changing(kind: type, mixin: type) -> type:
    """The class of actions ``kind`` with the mix-in in front, under its own name; as it is where it has it already."""
    return kind if issubclass(kind, mixin) else type(kind.__name__, (mixin, kind), {})


def nested(value: Any) -> tuple[str, Any] | None:
    """Key and value of an option that sets a part of an argument, ``NestedArg``; None for any other value."""
    return (value.key, value.val) if type(value).__name__ == "NestedArg" else None
