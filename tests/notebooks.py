"""Runs the notebooks of examples/ without a notebook server: cells in order, what they print and show kept beside them.

python -m tests.notebooks             # runs them, and writes the outputs that are kept
python -m tests.notebooks NAME        # one of them
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True)
class Output:
    """What a code cell prints, and the PNG of the picture that its last line is, if it is one."""

    text: str
    picture: bytes | None = None


def read(path: Path) -> dict[str, Any]:
    """A notebook (format 4)."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def ran(notebook: dict[str, Any]) -> list[Output]:
    """The output of each code cell when all are run in order."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for cell in _code(notebook):
        number = f"cell {len(outputs) + 1}"
        tree = ast.parse("".join(cell["source"]), number)
        # As a notebook does: the value of the last line is shown, if it has one.
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        value = None
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(tree, number, "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), number, "eval"), names)
        assert value is None or hasattr(value, "_repr_png_"), f"{number} shows {value!r}: print it, or end with ';'"
        outputs.append(Output(out.getvalue(), None if value is None else value._repr_png_()))
    return outputs


def kept(notebook: dict[str, Any]) -> list[Output]:
    """What stands beside each code cell."""
    found = []
    for cell in _code(notebook):
        text = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        pictures = [output["data"]["image/png"] for output in cell["outputs"] if "data" in output]
        found.append(Output(text, base64.b64decode(pictures[0]) if pictures else None))
    return found


def write(path: Path) -> None:
    """Run a notebook, and keep what it prints and shows."""
    notebook = read(path)
    for number, (cell, output) in enumerate(zip(_code(notebook), ran(notebook), strict=True), 1):
        cell |= {"execution_count": number, "outputs": []}
        if output.text:
            lines = output.text.splitlines(keepends=True)
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": lines})
        if output.picture is not None:
            data = {"image/png": base64.b64encode(output.picture).decode(), "text/plain": ["a picture"]}
            cell["outputs"].append({"data": data, "metadata": {}, "output_type": "display_data"})
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))
    warnings.simplefilter("ignore")
    for path in sorted(FOLDER.glob("*.ipynb")):
        if path.stem in (sys.argv[1:] or [path.stem]):
            write(path)
