"""``python -m lit_efficient schema``: print a JSON schema of configs for editors.

The schema is made from the parser of configs and from the classes that a config may name, so that it accepts what
``fit`` accepts. It follows draft 7, which the YAML language server reads.
"""

import argparse
import dataclasses
import enum
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_efficient.catalog import registered

_USE = """Print a JSON schema of configs. With the schema an editor completes keys and
class names, and marks typos:

  python -m lit_efficient schema > lit_efficient.schema.json

and, as the first line of a config beside it,

  # yaml-language-server: $schema=lit_efficient.schema.json

Visual Studio Code needs the YAML extension of Red Hat; other editors need the
yaml-language-server."""
_PLAIN: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
    Path: {"type": "string"},
}
_OTHERS = r"^(?!lit_efficient\.|lightning\.|pytorch_lightning\.)\w+(\.\w+)+$"  # path of a class of another package
_OF_THE_PARSER = {"help", "print_config"}


def run(argv: Sequence[str]) -> int:
    """Run ``schema``."""
    parser = argparse.ArgumentParser(
        "lit_efficient schema",
        description=_USE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.parse_args(argv)
    print(json.dumps(schema(), indent=1))
    return 0


def schema() -> dict[str, Any]:
    """Return the schema of complete configs and of overlays."""
    from lightning.pytorch.cli import LightningCLI

    from lit_efficient.cli import LitEfficientCLI
    from lit_efficient.cli.parsing import set_import_policy
    from lit_efficient.internals.jsonargparse_parser import subcommands

    class ParserAlone(LitEfficientCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            set_import_policy()
            raise _Stop(subcommands(parser)["fit"])

    try:
        ParserAlone(args=["fit"])
    except _Stop as stop:
        parser = stop.args[0]
    made = _Schema()
    whole = made.of_parser(parser)
    whole["properties"] |= {key: {"$ref": "#"} for key in LightningCLI.subcommands()}
    whole["properties"]["$schema"] = {"type": "string"}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A config of lit_efficient"}
    return {**head, **whole, "definitions": made.definitions}


class _Stop(Exception):
    pass


class _Schema:
    """Builder of schemas from types. Each class has one definition for its arguments."""

    def __init__(self) -> None:
        self.definitions: dict[str, object] = {}
        self.known = _known_classes()

    def of_parser(self, parser: Any) -> dict[str, Any]:
        """Return the schema of a parser's options; names with dots become nested mappings."""
        from lit_efficient.cli.tree import LISTS
        from lit_efficient.internals.jsonargparse_parser import options

        root: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
        for option in options(parser):
            if option.key.endswith(".help") or option.key in _OF_THE_PARSER:
                continue
            *parents, leaf = option.key.split(".")
            place = root
            for parent in parents:
                place = place["properties"].setdefault(parent, {"properties": {}, "additionalProperties": False})
            if option.is_section:
                place["properties"].setdefault(leaf, {"properties": {}, "additionalProperties": False})
                place["properties"][leaf]["type"] = ["object", "string"]  # a string names a file
                continue
            hint = Any if option.hint is None else option.hint
            entry = {"description": _text(option.help), **self.of(hint)}
            place["properties"][leaf] = entry if entry["description"] else self.of(hint)
            if any(_is_list(part) for part in _parts(hint)):
                place["properties"][f"{leaf}+"] = place["properties"][leaf]
            if leaf in LISTS:
                names: dict[str, Any] = {"type": "string"}
                place["properties"][f"{leaf}-"] = {"anyOf": [names, {"type": "array", "items": names}]}
        return root

    def of(self, hint: object) -> dict[str, Any]:
        """Return the schema of a type; for an unknown type the schema allows everything."""
        origin = typing.get_origin(hint) or hint
        arguments = typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            parts = [self.of(part) for part in arguments]
            if {} in parts:
                return {}
            return {"anyOf": parts}
        if origin is typing.Literal:
            return {"enum": list(arguments)}
        if origin is typing.Annotated:
            return self.of(arguments[0])
        if origin is Callable:  # its dotted name, or an object that can be called
            return {"anyOf": [{"type": "string"}, {"type": "object", "required": ["class_path"]}]}
        if not isinstance(origin, type) or origin is object:
            return {}
        if origin is type:
            return {"type": "string"}
        if origin in _PLAIN:
            return _PLAIN[origin].copy()
        return self._of_class(origin, arguments)

    def _of_class(self, kind: type, arguments: Sequence[object]) -> dict[str, object]:
        if issubclass(kind, enum.Enum):
            return {"enum": list(kind.__members__)}
        if kind is tuple and arguments and arguments[-1] is not Ellipsis:
            return {"type": "array", "items": [self.of(one) for one in arguments], "maxItems": len(arguments)}
        if _is_list(kind):
            return {"type": "array", "items": self.of(arguments[0]) if arguments else {}}
        if issubclass(kind, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1]) if arguments else True}
        plain = next((known for known in (bool, int, float, str) if issubclass(kind, known)), None)
        if plain:
            return self.of(plain)
        if dataclasses.is_dataclass(kind):
            return {"anyOf": [self._arguments(kind), self._spec(kind)]}
        return self._spec(kind)

    def _arguments(self, kind: type) -> dict[str, Any]:
        """Return a reference to the schema of a class's arguments."""
        from torch.optim import Optimizer
        from torch.optim.lr_scheduler import LRScheduler

        from lit_efficient.cli.parsing import HORIZONS, PARSER_MODE, Parser

        name = f"{kind.__module__}.{kind.__qualname__}"
        if name not in self.definitions:
            self.definitions[name] = {}  # before the content, which may refer to the class again
            parser = Parser(parser_mode=PARSER_MODE, exit_on_error=False)
            skip: set[str] = set()
            if issubclass(kind, Optimizer):
                skip = {"params"}
            elif issubclass(kind, LRScheduler):
                skip = {"optimizer"}
            parser.add_class_arguments(kind, fail_untyped=False, skip=skip)
            found = self.of_parser(parser)
            self.definitions[name] = found
            if issubclass(kind, LRScheduler):
                for horizon in found["properties"].keys() & HORIZONS:
                    found["properties"][horizon] = {"anyOf": [found["properties"][horizon], {"type": "null"}]}
        return {"$ref": f"#/definitions/{name}"}

    def _spec(self, base: type) -> dict[str, object]:
        """Return a reference to the schema of a subclass of ``base``: its name, or its name with arguments."""
        found: dict[type, list[str]] = {}
        for name, kind in self.known.items():
            if issubclass(kind, base) and not inspect.isabstract(kind):
                found.setdefault(kind, []).append(name)
        key = f"class.{base.__module__}.{base.__qualname__}"
        if key not in self.definitions:
            self.definitions[key] = {}
            names = {
                "anyOf": [
                    {"enum": [name for spelt in found.values() for name in spelt] + [*registered()]},
                    {"type": "string", "pattern": _OTHERS},
                ]
            }
            cases = [
                {
                    "if": {"required": ["class_path"], "properties": {"class_path": {"enum": spelt}}},
                    "then": {"properties": {"init_args": {"anyOf": [self._arguments(kind), {"type": "null"}]}}},
                }
                for kind, spelt in found.items()
            ]
            mapping = {
                "type": "object",
                "properties": {
                    "class_path": names,
                    "init_args": {"type": ["object", "null"]},
                    "dict_kwargs": {"type": "object"},
                },
                "additionalProperties": False,
            }
            if cases:
                mapping["allOf"] = cases
            self.definitions[key] = {"anyOf": [names, mapping]}
        return {"$ref": f"#/definitions/{key}"}


def _known_classes() -> dict[str, type]:
    """Return classes by the names under which a config may refer to them."""
    import torch
    from lightning.pytorch import callbacks, loggers, plugins, profilers, strategies
    from lightning.pytorch.cli import ReduceLROnPlateau
    from lightning.pytorch.plugins import environments
    from torch.optim import lr_scheduler

    import lit_efficient

    known: dict[str, type] = {}
    for module in (torch.optim, lr_scheduler):
        names = {name: value for name, value in vars(module).items() if isinstance(value, type) and name[0] != "_"}
        known |= names | {f"{module.__name__}.{name}": value for name, value in names.items()}
    for part in (callbacks, loggers, plugins, environments, profilers, strategies):
        names = {name: getattr(part, name) for name in getattr(part, "__all__", vars(part))}
        names = {name: value for name, value in names.items() if isinstance(value, type)}
        known |= names | {f"{part.__name__}.{name}": value for name, value in names.items()}
    known["ReduceLROnPlateau"] = known["lightning.pytorch.cli.ReduceLROnPlateau"] = ReduceLROnPlateau
    for name, place in lit_efficient.PUBLIC.items():
        value = getattr(lit_efficient, name)
        if isinstance(value, type):
            known |= dict.fromkeys((name, f"lit_efficient.{name}", f"lit_efficient.{place}.{name}"), value)
    return known


def _parts(hint: object) -> Sequence[Any]:
    """Return the members of a union; for another type, the type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _is_list(hint: object) -> bool:
    kind = typing.get_origin(hint) or hint
    return (
        isinstance(kind, type)
        and issubclass(kind, Iterable)
        and not issubclass(kind, str | bytes | Mapping | enum.Enum)
    )


def _text(help_: str | None) -> str:
    if help_ in (None, argparse.SUPPRESS):
        return ""
    return " ".join(str(help_).replace("%%", "%").split())
