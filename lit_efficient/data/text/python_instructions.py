"""Small data sets that every machine has: bodies of functions in Python's standard library, to write from their docs.

    instructions  user: "Write the body of this Python function." + signature and docstring;   assistant: the body
    preferences   prompt: the same request;   chosen: the function's own body;   rejected: the next function's body
    judged        prompt: the same request;   completion: the own body or the next function's;   label: true or false
    modules       text: signature, docstring and body;   label: the module that the function is from
    docstrings    anchor: signature and docstring;   positive: the body

They are made from the modules at the top of the installed library, without a download, in 2 CPU-seconds: 2,000 rows
with distinct answers. They are for trying a recipe, not for training a useful model. Every body is chosen once and
rejected once, so the docstring alone tells which one is right.
"""

import ast
import functools
import hashlib
import textwrap
from collections.abc import Iterator
from typing import Any

from lit_efficient.data.text.text_files import standard_library

REQUEST = "Write the body of this Python function."
MAX_ROWS = 2000
_MODULES = 10
# Characters of an answer: more than `pass`, and short enough for a small model.
_SHORTEST, _LONGEST = 30, 600


@functools.cache
def instructions() -> list[dict[str, Any]]:
    """Return rows ``{"messages": [user, assistant]}``, the same on every machine with the same Python."""
    request_of: dict[str, str] = {}
    for path in sorted(standard_library().glob("*.py")):
        for request, body in functions_of(path.read_text("utf-8")):
            request_of.setdefault(body, request)
    # The choice by hash takes rows from all modules, and a new or missing module hardly changes it.
    chosen = sorted(request_of, key=lambda body: hashlib.sha256(body.encode()).digest())[:MAX_ROWS]
    rows = []
    for body in chosen:
        user = {"role": "user", "content": f"{REQUEST}\n\n{request_of[body]}"}
        rows.append({"messages": [user, {"role": "assistant", "content": body}]})
    return rows


@functools.cache
def preferences() -> list[dict[str, Any]]:
    """Return rows ``{"prompt": [user], "chosen": [assistant], "rejected": [assistant]}`` from `instructions`."""
    pairs = [row["messages"] for row in instructions()]
    rows = []
    for (user, answer), (_, other) in zip(pairs, pairs[1:] + pairs[:1]):
        rows.append({"prompt": [user], "chosen": [answer], "rejected": [other]})
    return rows


@functools.cache
def judged() -> list[dict[str, Any]]:
    """Return rows ``{"prompt": [user], "completion": [assistant], "label": bool}``, good and bad by turns."""
    rows = []
    for number, row in enumerate(preferences()):
        good = number % 2 == 0
        rows.append({"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good})
    return rows


@functools.cache
def modules() -> list[dict[str, Any]]:
    """Return rows ``{"text": function, "label": module}`` of the ten modules with the most functions."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(standard_library().glob("*.py")):
        for request, body in functions_of(path.read_text("utf-8")):
            text = f"{request}\n{textwrap.indent(body, '    ')}"
            found.setdefault(path.stem, []).append({"text": text, "label": path.stem})
    largest = sorted(found, key=lambda name: (-len(found[name]), name))[:_MODULES]
    return [row for name in sorted(largest) for row in found[name]]


@functools.cache
def docstrings() -> list[dict[str, Any]]:
    """Return rows ``{"anchor": signature and docstring, "positive": body}`` from `instructions`."""
    pairs = [row["messages"] for row in instructions()]
    beginning = f"{REQUEST}\n\n"
    return [{"anchor": user["content"].removeprefix(beginning), "positive": own["content"]} for user, own in pairs]


def functions_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield (signature and docstring, body) of the documented functions of a module, without indentation.

    A source that this Python cannot parse yields nothing.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        doc = ast.get_docstring(node)
        if not doc:
            continue
        body = textwrap.dedent("\n".join(lines[node.body[0].end_lineno : node.end_lineno])).strip()
        if not _SHORTEST <= len(body) <= _LONGEST or len(doc) > _LONGEST:
            continue
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        quoted = textwrap.indent(f'"""{doc}"""', "    ")
        yield f"def {node.name}({ast.unparse(node.args)}){returns}:\n{quoted}", body
