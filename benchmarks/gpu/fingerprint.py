"""Fingerprint of the code that a piece runs, so that a second run of the driver repeats only what has changed.

The fingerprint is a hash of the piece's own definition and of all files of this repository that its code imports,
directly or through others. Comments and docstrings do not count, and neither do the definitions of other pieces in the
same file. A name of the package, as in ``le.LoRA``, counts as an import of the file that defines it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FunctionType

from lit_efficient import PUBLIC

ROOT = Path(__file__).parents[2]
_FOLDERS = ("lit_efficient", "benchmarks", "tests")
_EAGER = "lit_efficient/__init__.py"  # imports nothing by itself
_PIECES = {"RUNGS", "CASES", "BENCHMARKS"}  # tables of pieces, each of which counts for its own fingerprint alone


def fingerprint(words: Iterable[object], *files: str, names: Iterable[str] = ()) -> str:
    """Return a hash of ``words`` and of all code that ``files`` and the public ``names`` import.

    Args:
        words: Anything whose ``repr`` decides about the result.
        files: Paths relative to the repository.
        names: Public names of the package.
    """
    begin = {*files, *(_file_of(f"lit_efficient.{PUBLIC[name]}") for name in names if name in PUBLIC)}
    todo = {path for path in begin if path}
    seen: set[str] = set()
    while todo:
        path = todo.pop()
        seen.add(path)
        todo |= _imports(path) - seen
    parts = [repr(word) for word in words] + [f"{path} {_code(path)}" for path in sorted(seen)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def names_in(function: object) -> set[str]:
    """Return the names of attributes and functions that a function uses, also through functions of its own file."""
    found: set[str] = set()
    todo = [function]
    while todo:
        one = todo.pop()
        if isinstance(one, FunctionType):
            fresh = {name for code in _codes(one) for name in code.co_names} - found
            found |= fresh
            todo += [one.__globals__.get(name) for name in fresh]
    return found


def definition(function: object) -> list[object]:
    """Return what a function does by itself, such as a lambda of a table: its instructions, names and constants."""
    found: list[object] = []
    if isinstance(function, FunctionType):
        for code in _codes(function):
            constants = [one for one in code.co_consts if not isinstance(one, CodeType)]
            found += [code.co_code, code.co_names, constants]
    return found


def _codes(function: FunctionType) -> list[CodeType]:
    codes: list[CodeType] = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return codes


@functools.cache
def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text("utf-8"))


@functools.cache
def _code(path: str) -> str:
    """Return a hash of a file's syntax tree without docstrings and tables of pieces."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    tree.body = [node for node in tree.body if not _is_table(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_table(node: ast.stmt) -> bool:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return any(isinstance(target, ast.Name) and target.id in _PIECES for target in targets)


@functools.cache
def _imports(path: str) -> set[str]:
    """Return the files of this repository that a file imports, at its top or inside of functions."""
    tree = _tree(path)
    package = Path(path).parent.as_posix().replace("/", ".")
    found: set[str | None] = set()
    aliases: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {_file_of(alias.name) for alias in node.names if alias.name != "lit_efficient"}
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == "lit_efficient"}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or package
            for alias in node.names:
                if module == "lit_efficient" and alias.name in PUBLIC:
                    found.add(_file_of(f"{module}.{PUBLIC[alias.name]}"))
                else:
                    found |= {_file_of(module), _file_of(f"{module}.{alias.name}")}
    # Files with many public names (the ladder, the cases) name those of one piece themselves.
    if not path.startswith("benchmarks/"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                found.add(_file_of(f"lit_efficient.{PUBLIC.get(node.attr, '')}"))
    return {one for one in found if one and one != _EAGER}


@functools.cache
def _file_of(module: str) -> str | None:
    """Return the path of a module of this repository, or None for another one."""
    if not module.startswith(tuple(f"{folder}." for folder in _FOLDERS)):
        return None
    place = module.replace(".", "/")
    for path in (f"{place}.py", f"{place}/__init__.py"):
        if (ROOT / path).is_file():
            return path
    return None
