"""A small instruction set that every machine has: functions of Python's standard library, to write from their docs.

    user: "Write the body of this Python function." + signature and docstring;   assistant: the body

Made from the modules at the top of the installed library, without a download, in 2 CPU-seconds: 2,000 rows, no two
answers alike. Good for trying a recipe, not for a model that is to be of use.
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
_SHORTEST, _LONGEST = 30, 600  # characters of an answer: neither `pass` nor what no small model learns


@functools.cache
def instructions() -> list[dict[str, Any]]:
    """The rows, as ``{"messages": [user, assistant]}``: the same on every machine with the same Python."""
    pairs: dict[str, str] = {}
    for path in sorted(standard_library().glob("*.py")):
        for task, body in functions_of(path.read_text("utf-8")):
            pairs.setdefault(body, task)
    # By hash: a bounded choice from all modules, which adding or losing one module hardly changes.
    chosen = sorted(pairs, key=lambda body: hashlib.sha256(body.encode()).digest())[:MAX_ROWS]
    return [
        {
            "messages": [
                {"role": "user", "content": f"{REQUEST}\n\n{pairs[body]}"},
                {"role": "assistant", "content": body},
            ]
        }
        for body in chosen
    ]


def functions_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield (signature and docstring, body) for the documented functions of a module; both begin without indentation.

    A text that this Python cannot parse has no functions.
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
        first, last = node.body[0].end_lineno, node.end_lineno
        assert first is not None
        body = textwrap.dedent("\n".join(lines[first:last])).strip()
        if not _SHORTEST <= len(body) <= _LONGEST or len(doc) > _LONGEST:
            continue
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        quoted = textwrap.indent(f'"""{doc}"""', "    ")
        yield f"def {node.name}({ast.unparse(node.args)}){returns}:\n{quoted}", body
