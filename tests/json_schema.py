"""The keywords of JSON schema (draft 7) that our schema uses, and no others."""

import re
from typing import Any

TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
    "number": int | float,
}  # fmt: skip


def is_valid(value: Any, schema: Any, root: dict[str, Any]) -> bool:
    """Whether a value is what a schema says; ``root`` holds what it refers to."""
    if isinstance(schema, bool):
        return schema
    return all(CHECKS[key](value, schema, root) for key in schema)


def _type(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, TYPES[name]) for name in names)


def _ref(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    assert schema.keys() <= {"$ref", "description"}, "draft 7 reads nothing beside it"
    place = root
    for key in schema["$ref"].removeprefix("#").split("/")[1:]:
        place = place[key]
    return is_valid(value, place, root)


def _properties(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    found = value.items() if isinstance(value, dict) else ()
    return all(is_valid(item, schema["properties"][key], root) for key, item in found if key in schema["properties"])


def _additional(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    found = value.items() if isinstance(value, dict) else ()
    rest = [item for key, item in found if key not in schema.get("properties", {})]
    return all(is_valid(item, schema["additionalProperties"], root) for item in rest)


def _items(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    if not isinstance(value, list):
        return True
    each = schema["items"] if isinstance(schema["items"], list) else [schema["items"]] * len(value)
    return all(is_valid(item, one, root) for item, one in zip(value, each, strict=False))


def _if(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    return not is_valid(value, schema["if"], root) or is_valid(value, schema["then"], root)


CHECKS: dict[str, Any] = {
    "type": _type,
    "$ref": _ref,
    "properties": _properties,
    "additionalProperties": _additional,
    "items": _items,
    "if": _if,
    "maxItems": lambda value, schema, root: not isinstance(value, list) or len(value) <= schema["maxItems"],
    "enum": lambda value, schema, root: any(type(one) is type(value) and one == value for one in schema["enum"]),
    "pattern": lambda value, schema, root: not isinstance(value, str) or bool(re.search(schema["pattern"], value)),
    "required": lambda value, schema, root: not isinstance(value, dict) or {*schema["required"]} <= value.keys(),
    "anyOf": lambda value, schema, root: any(is_valid(value, one, root) for one in schema["anyOf"]),
    "allOf": lambda value, schema, root: all(is_valid(value, one, root) for one in schema["allOf"]),
    **dict.fromkeys(("then", "description", "title", "definitions", "$schema"), lambda value, schema, root: True),
}
