"""HTML from nested calls: what is no :class:`Markup` is escaped, so text of anybody's stays text.

tag("p", "a < b ", tag("b", name), class_="note")
"""

import html
import re

# Control characters that HTML forbids, those that turn the direction of text around, and halves of characters.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")  # of terminals
_VOID = ("img", "meta", "br")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def plain(text: object) -> str:
    """Any value as text that neither a page nor a terminal takes for anything else."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", _COLOURS.sub("", str(text)))


def escaped(text: object) -> Markup:
    """Any value as text that is shown as it is written."""
    return text if isinstance(text, Markup) else Markup(html.escape(plain(text)))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element; an underscore at the end of an attribute's name is dropped, others are hyphens."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: object) -> Markup:
    """Elements and texts one after another."""
    return Markup("".join(map(escaped, children)))
