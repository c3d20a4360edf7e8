"""Runs the notebooks of examples/ without a notebook server: cells in order, what they print kept beside them.

python -m tests.notebooks    # runs them, and writes the outputs that are kept
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "examples"


def read(path: Path) -> dict[str, Any]:
    """A notebook (format 4)."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def printed(notebook: dict[str, Any]) -> list[str]:
    """What each code cell prints when all are run in order."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("".join(cell["source"]), f"cell {len(outputs) + 1}", "exec"), names)
            outputs.append(out.getvalue())
    return outputs


def kept(notebook: dict[str, Any]) -> list[str]:
    """What stands beside each code cell."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in cells]


def write(path: Path) -> None:
    """Run a notebook, and keep what it prints."""
    notebook = read(path)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(cells, printed(notebook), strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell |= {"execution_count": number, "outputs": [stream] if text else []}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))
    warnings.simplefilter("ignore")
    for path in sorted(FOLDER.glob("*.ipynb")):
        write(path)
