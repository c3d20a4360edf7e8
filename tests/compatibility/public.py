"""What people write down of this package: names, arguments, defaults, keys of shipped configs, options of commands.

    python -m tests.compatibility.public       write public.json again: at a release, or once the changelog says it all

`differences` says in sentences what of the last snapshot is gone or means something else; what is new is no difference.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

import lit_efficient

FILE = Path(__file__).with_name("public.json")
ROOT = Path(__file__).parent.parent.parent
REQUIRED = "(required)"


@functools.cache
def snapshot() -> dict[str, Any]:
    """All of it: ``{kind: {owner: {member: [what it is by default, what it may be one of ...]}}}``."""
    from lit_efficient.commands.completion import options
    from lit_efficient.files.configs import known

    names = {name: arguments(getattr(lit_efficient, name)) for name in sorted(lit_efficient.PUBLIC)}
    keys = {
        name: {key: [] for key in sorted(_keys(yaml.safe_load(path.read_text())))} for name, path in known().items()
    }
    commands = {
        name: {option: [] for option in sorted(given) if not option.startswith("--trainer.")}  # those are Lightning's
        for name, given in options().items()
    }
    return {"names": names, "configs": keys, "commands": commands}


def arguments(public: Any) -> dict[str, list[str]]:
    """The arguments of a class or a function, each with its default and what it may be one of."""
    if inspect.isclass(public) and issubclass(public, Enum | Exception):
        return {member: [] for member in getattr(public, "__members__", ())}
    found: dict[str, list[str]] = {}
    hints = _hints(public.__init__ if inspect.isclass(public) else public)
    hints |= _hints(public) if dataclasses.is_dataclass(public) else {}
    for name, parameter in inspect.signature(public).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            found[("*" if parameter.kind is parameter.VAR_POSITIONAL else "**") + name] = []
            continue
        default = REQUIRED if parameter.default is parameter.empty else _shown(parameter.default)
        choices = sorted({choice for choice in _choices(hints.get(name)) if isinstance(choice, str)})
        by_name = " by name only" if parameter.kind is parameter.KEYWORD_ONLY else ""
        found[name] = [default + by_name, *choices]
    return found


def _hints(public: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(public)
    except (NameError, TypeError):  # names that only checkers import, or none at all
        return {}


def _choices(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
    else:
        for part in typing.get_args(hint):
            yield from _choices(part)


def _shown(default: Any) -> str:
    if inspect.isclass(default) or inspect.isfunction(default):
        return default.__name__
    if dataclasses.is_dataclass(default):  # a field more is no other default
        plain = {field.name: field.default for field in dataclasses.fields(default)}
        given = {name: getattr(default, name) for name in plain}
        changed = [f"{name}={_shown(value)}" for name, value in given.items() if value != plain[name]]
        return f"{type(default).__name__}({', '.join(changed)})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(default))


def _keys(node: Any, before: str = "") -> Iterator[str]:
    """The dotted keys of a config; of a list of classes, those of each by its name."""
    if isinstance(node, dict):
        of = node.get("class_path")
        for key, value in node.items():
            name = f"{before}.{key}".lstrip(".")
            if key not in ("class_path", "init_args"):
                yield name
            yield from _keys(value, f"{before}.{of}".lstrip(".") if of and key == "init_args" else name)
    elif isinstance(node, list):
        for part in node:
            yield from _keys(part, before)


@dataclass(frozen=True)
class Difference:
    """Something that people may have written down, and that is no more what it was."""

    owner: str
    member: str
    sentence: str

    def is_said_in(self, changelog: str) -> bool:
        """Whether a piece of code in the text names both."""
        words = [self.owner, *([self.member] if self.member else [])]
        code = re.findall(r"`([^`]+)`", changelog)
        return any(all(re.search(rf"(?<![\w-]){re.escape(w)}(?![\w-])", piece) for w in words) for piece in code)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    """What somebody's code, config or command line would notice, in sentences."""
    found = []
    of = {"names": "the public name", "configs": "the config", "commands": "the command"}
    for kind, owners in before.items():
        for owner, members in owners.items():
            if owner not in now[kind]:
                found.append(Difference(owner, "", f"{of[kind]} {owner} is gone"))
                continue
            present = now[kind][owner]
            for member, was in members.items():
                if member not in present:
                    found.append(Difference(owner, member, f"{of[kind]} {owner} has no {member} any more"))
                elif present[member][:1] != was[:1]:
                    found.append(
                        Difference(owner, member, f"{member} of {owner} was {was[0]} and is {present[member][0]}")
                    )
                elif present[member][1:] and (lost := set(was[1:]) - set(present[member])):
                    found.append(
                        Difference(owner, member, f"{member} of {owner} may not be {', '.join(lost)} any more")
                    )
            for member in present.keys() - members.keys() if kind == "names" else ():
                if present[member] and present[member][0].startswith(REQUIRED):
                    found.append(Difference(owner, member, f"{owner} cannot be made without {member} any more"))
            kept, stood = [m for m in present if m in members], [m for m in members if m in present]
            if kind == "names" and kept != stood:
                moved = next(a for a, b in zip(kept, stood) if a != b)
                found.append(Difference(owner, moved, f"the arguments of {owner} have another order, from {moved} on"))
    return found


def newest(changelog: str) -> str:
    """The part of a changelog that says what no release has yet, or what the last one brought."""
    return changelog.split("\n## ")[1]


def unsaid() -> list[str]:
    """What is different from the snapshot, and not in the changelog."""
    said = newest((ROOT / "CHANGELOG.md").read_text("utf-8"))
    found = differences(json.loads(FILE.read_text("utf-8")), snapshot())
    return [
        f"{one.sentence}: say so in CHANGELOG.md, with `{one.owner}({one.member})` or the like in backticks, or leave "
        "it as it was"
        for one in found
        if not one.is_said_in(said)
    ]


def main() -> None:
    for module in lit_efficient.PUBLIC.values():
        importlib.import_module(f"lit_efficient.{module}")
    kinds = []
    for kind, owners in snapshot().items():
        lines = ",\n".join(f"  {json.dumps(owner)}: {json.dumps(members)}" for owner, members in owners.items())
        kinds.append(f"{json.dumps(kind)}: {{\n{lines}\n}}")
    FILE.write_text("{\n" + ",\n".join(kinds) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
