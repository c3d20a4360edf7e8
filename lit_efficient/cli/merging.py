"""Options of which a later file or option may give a part."""

import contextlib
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

import yaml
from jsonargparse import Namespace

from lit_efficient.cli.config_text import SPEC, full_name, load_yaml
from lit_efficient.errors import did_you_mean
from lit_efficient.internals.jsonargparse_parser import ChangesValues, nested, type_hint

# Fields of a mapping that say what it describes: another value is another thing, and nothing of the first remains.
_KINDS = ("model_type", "_class_name")
_NAMES = {"name_or_path", "config_fields"}


class MergesMappings(ChangesValues):
    """An argument of which a later file or option may give a part: the rest stays as it was."""

    def changed(self, value: Any, earlier: Any) -> Any:
        given, before = value, _as_mapping(earlier)
        path = (before or {}).get("class_path", "")
        fields = self._classes().get(path.rpartition(".")[2], [])
        if (option := nested(value)) is not None:
            key, value = option
            if isinstance(earlier, str):
                raise TypeError(
                    f'Parser key "{self.dest}":\n  no option {key!r}: {earlier!r} is a name, without fields'
                )
            if fields and key.split(".")[0] not in (*fields, *SPEC):  # maybe of another class that could stand here
                near = did_you_mean(key.split(".", maxsplit=1)[0], fields)
                said = f"no option {key!r}{near} (accepted: {', '.join(fields)})"
                raise TypeError(f'Parser key "{self.dest}":\n  Problem with given class_path {path!r}:\n    {said}')
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
            return self._of_another_class(now) or given
        merged = _merged(arguments, now)
        return merged if arguments is before else {**before, "init_args": merged}

    def _classes(self) -> dict[str, list[str]]:
        """What each dataclass takes that may stand here."""
        hint = type_hint(self)
        known = [
            one for one in typing.get_args(hint) or (hint,) if isinstance(one, type) and dataclasses.is_dataclass(one)
        ]
        return {one.__name__: [field.name for field in dataclasses.fields(one)] for one in known}

    def _of_another_class(self, now: dict[str, Any]) -> dict[str, Any]:
        """Fields of which one names a model, with the class that takes it: no longer that of an earlier config."""
        kind = next((name for name, fields in self._classes().items() if now.keys() & _NAMES & {*fields}), "")
        return {"class_path": full_name(kind), "init_args": now} if kind else {}


def _as_mapping(value: Any) -> dict[str, Any] | None:
    value = value.as_dict() if isinstance(value, Namespace) else value
    return value if isinstance(value, dict) else None


def _merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Both, where ``now`` counts; ``now`` alone if it is of another kind, as its names or a field of its say."""
    if any(name in now and name in before and now[name] != before[name] for name in _KINDS):
        return now
    both = [name for name, value in now.items() if isinstance(value, dict) and isinstance(before.get(name), dict)]
    return before | now | {name: _merged(before[name], now[name]) for name in both}


def holds_mappings(hint: Any) -> bool:
    """Whether a type is a mapping, or a choice of which one is, or a dataclass."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(holds_mappings(part) or dataclasses.is_dataclass(part) for part in typing.get_args(hint))
    return isinstance(origin := typing.get_origin(hint) or hint, type) and issubclass(origin, Mapping)
