"""What a parser of jsonargparse holds, and where it checks a value. Checked with jsonargparse 4.53."""

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


class ChecksValues:
    """Put in front of a parser: ``before_check`` sees each value before its own check does: ``_check_value_key``."""

    def before_check(self, action: Any, value: Any, key: str) -> None:
        """Raise a ``TypeError`` for a value that is not allowed."""
        raise NotImplementedError

    def _check_value_key(self, action: Any, value: Any, key: str, cfg: Any, append: bool = False) -> Any:
        self.before_check(action, value, key)
        return super()._check_value_key(action, value, key, cfg, append=append)  # type: ignore[misc]
