"""Shared code asks a class what it promises; it never decides by the name of a technique."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from lit_efficient import PUBLIC, errors
from lit_efficient.catalog import PACKAGE
from lit_efficient.declaration import Declaration

SHARED = ("mechanisms", "distributed", "export", "losses", "models", "data", "tasks", "cli", "files")
ROOT = ("application/__init__.py", "declaration.py", "technique.py", "protocol.py", "surgery.py")
SLOTS = ("callbacks", "precision", "plugins", "strategies", "optimizers")
TECHNIQUES = {name for name, module in PUBLIC.items() if module.split(".")[0] in SLOTS and name[0].isupper()}
MESSAGES = {name for name, value in vars(errors).items() if inspect.isfunction(value)}
ALLOWED = {
    "mechanisms/adapters/peft_vectors.py": {"IA3"},  # the word of peft's format
    # what the task is composed with, and the optimizer that it builds; no decision
    "tasks/language_modeling.py": {"FusedAdamW", "TokenWeightedAccumulation"},
    "tasks/latent_diffusion.py": {"FusedAdamW"},
    "tasks/autoencoding.py": {"FusedAdamW"},
}


def _files() -> list[Path]:
    inside = [path for folder in SHARED for path in (PACKAGE / folder).rglob("*.py")]
    # Beside the optimizers' own files lies what several of them share.
    own = {f"{module.split('.')[-1]}.py" for name, module in PUBLIC.items() if name in TECHNIQUES}
    beside = [path for path in (PACKAGE / "optimizers").glob("*.py") if path.name not in own]
    return sorted([*inside, *beside, *(PACKAGE / name for name in ROOT)])


def _named(tree: ast.Module) -> Iterator[str]:
    """Every technique that the code names: as a string, a variable, an attribute or an import."""
    lists = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["DEFAULTS"]
    ]
    excused = {id(node) for one in lists for node in ast.walk(one)}
    for node in ast.walk(tree):  # whose argument a message is about
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MESSAGES and node.args:
            excused.add(id(node.args[0]))
    for node in ast.walk(tree):
        words: list[object] = []
        if isinstance(node, ast.Constant):
            words = [node.value]
        elif isinstance(node, ast.Name):
            words = [node.id]
        elif isinstance(node, ast.Attribute):
            words = [node.attr]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            words = [alias.name.split(".")[-1] for alias in node.names]
        if id(node) not in excused:
            yield from (word for word in words if isinstance(word, str) and word in TECHNIQUES)


def test_shared_code_names_no_technique() -> None:
    files = _files()
    assert len(files) > 100
    any_name = re.compile("|".join(TECHNIQUES))
    found = {}
    for path in files:
        name = path.relative_to(PACKAGE).as_posix()
        text = path.read_text(encoding="utf-8")
        named = set(_named(ast.parse(text))) if any_name.search(text) else set()
        if named != ALLOWED.get(name, set()):
            found[name] = sorted(named ^ ALLOWED.get(name, set()))
    assert found == {}


@pytest.mark.parametrize(
    "code",
    [
        'x = record["name"] == "LoRA"',
        "from lit_efficient.callbacks.lora import LoRA",
        "lit_efficient.LoRA",
        'y = {"LoRA"}',
    ],
)
def test_the_search_finds_every_way_to_name_one(code: str) -> None:
    assert list(_named(ast.parse(code))) == ["LoRA"]
    assert "check_number" in MESSAGES
    assert list(_named(ast.parse('check_number("LoRA", "rank", 0)'))) == []
    assert list(_named(ast.parse('DEFAULTS = {"a": "LoRA"}\ndef f():\n    "LoRA."'))) == []


def test_every_technique_is_public() -> None:
    """A class that is missing from the list is in no catalogue, has no short name and no contract test."""
    for folder in (*SLOTS, "mechanisms"):
        for path in (PACKAGE / folder).rglob("*.py"):
            import_module(".".join(["lit_efficient", *path.relative_to(PACKAGE).with_suffix("").parts]))
    found = [cls for cls in _below(Declaration) if cls.__module__.startswith("lit_efficient.")]
    in_slots = {cls.__name__ for cls in found if cls.__module__.split(".")[1] in SLOTS}
    assert len(in_slots) > 20
    missing = sorted(in_slots - PUBLIC.keys())
    assert not missing, f"add these classes to PUBLIC in lit_efficient/__init__.py: {', '.join(missing)}"
    # What lies elsewhere is a base: nothing constructs it, and something public is built on it.
    bases = {cls for cls in found if cls.__name__ not in in_slots}
    assert {cls.__name__ for cls in bases if not any(sub.__name__ in PUBLIC for sub in _below(cls))} == set()


def _below(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _below(sub)
