"""HTML from nested calls: what is no :class:`Markup` is escaped, so text of anybody's stays text.

tag("p", "a < b ", tag("b", name), class_="note")
"""

import html
import re
from collections.abc import Sequence
from pathlib import Path

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


def grid(kind: str, *children: Markup) -> Markup:
    """What stands side by side where there is room: cards of ``runs``, figures of a ``grid``; nothing of nothing."""
    return tag("div", *children, class_=kind) if any(children) else Markup()


def table(rows: Sequence[Sequence[object]], head: Sequence[object] = ()) -> Markup:
    """A table, whose first cell of each row is a heading; nothing without rows."""
    if not rows:
        return Markup()
    first = [tag("tr", *(tag("th", cell) for cell in head))] if head else []
    body = (tag("tr", tag("th", row[0]), *(tag("td", cell) for cell in row[1:])) for row in rows)
    return tag("div", tag("table", *first, *body), class_="card wide")


def document(title: str, *body: Markup) -> Markup:
    """A whole page that needs nothing else, and may load and run nothing."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", title),
        tag("style", Markup(Path(__file__).with_name("page.css").read_text("utf-8"))),
    )
    return tag("html", head, tag("body", *body), lang="en")
