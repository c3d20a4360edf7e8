"""Pages of HTML that are filled in from the Jinja templates of this folder.

A page is one file. It holds its style sheet and its pictures, loads nothing and runs no scripts.
"""

import re
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

# Control characters that HTML forbids, characters that change the direction of text, and lone surrogates.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_TERMINAL_COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


def plain(text: object) -> str:
    """Return a value as text without terminal escapes and with each unprintable character replaced."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", _TERMINAL_COLOURS.sub("", str(text)))


def rendered(template: str, **values: object) -> Markup:
    """Return a template of this folder, filled in with values.

    Every value that is no ``Markup`` is escaped, so that a name or a text from a user stays text.
    """
    return Markup(_templates().get_template(f"{template}.jinja").render(values))  # noqa: S704 the templates escape


@cache
def _templates() -> Environment:
    # Templates are compiled once for all pictures of a page.
    folder = FileSystemLoader(Path(__file__).parent)
    return Environment(
        loader=folder,
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _printable(value: object) -> object:
    if isinstance(value, Markup):
        return value
    return plain(value)
