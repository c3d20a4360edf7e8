"""Sphinx configuration for the pages that build.py writes."""

import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from lit_efficient import __version__

_ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
_REPOSITORY = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["lit_efficient"]["repository"]

project = "lit_efficient"
author = copyright = "The lit_efficient developers"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"lit_efficient {__version__}"
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_theme_options = {"source_repository": _REPOSITORY} if _REPOSITORY else {}

highlight_language = "none"  # for formulas; code blocks name their language
default_role = "py:obj"  # `Name` in a docstring
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # levels of headings suit the documents as files, not as pages

autodoc_inherit_docstrings = False  # hooks that override need no docstring, and get nobody else's
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
toc_object_entries = False  # the headings say the same, and a third of the time goes into them
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
napoleon_numpy_docstring = False

_FACTS = ("Saves:", "Costs:", "Source:")


def literal_formulas(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Keep an indented formula as it is written, and leave out the facts that stand in the page's table."""
    shown = list(_without_facts(lines)) if what == "module" else list(lines)
    lines[:] = []
    for before, line in pairwise(["", *shown]):
        previous = next((one for one in reversed(lines) if one), "")
        begins = line.startswith("    ") and not before and not previous.startswith((" ", "*", "-"))
        if begins and not previous.endswith("::") and not line.lstrip().startswith(">>>"):
            lines += ["::", ""]
        lines.append(line)


def _without_facts(lines: list[str]) -> Iterator[str]:
    inside = False
    for line in lines:
        inside = line.startswith(_FACTS) or (inside and bool(line.strip()))
        if not inside:
            yield line


def setup(app: Any) -> None:
    """Look at docstrings before napoleon does."""
    app.connect("autodoc-process-docstring", literal_formulas, priority=100)
