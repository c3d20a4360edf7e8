"""Pages of HTML as a browser reads them, and what a page that stands alone may hold."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser

KNOWN = "html head meta title style body h1 h2 h3 section div span p pre code dl dt dd table tr th td ul li"
KNOWN += " figure figcaption small svg path text img details summary rect desc"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """What a browser makes of a page: its elements, their attributes, the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def attributes(self, name: str) -> list[str]:
        return [value or "" for _, attributes in self.tags for key, value in attributes.items() if key == name]

    def cells(self) -> Iterator[list[str]]:
        """Yield the rows of all tables, for texts that hold no line break."""
        for row in re.findall(r"<tr>(.*?)</tr>", self.source):
            yield re.findall(r"<t[hd]>(.*?)</t[hd]>", row)


def alone(found: Page) -> None:
    """Assert that a page needs nothing else and runs nothing."""
    assert {tag for tag, _ in found.tags} <= set(KNOWN.split())
    keys = {key for _, attributes in found.tags for key in attributes}
    assert not [
        key for key in keys if key.startswith("on") or key in ("href", "srcset", "action", "style", "xlink:href")
    ]
    assert all(source.startswith("data:image/png;base64,") for source in found.attributes("src"))
    (style,) = re.findall(r"<style>(.*?)</style>", found.source, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    assert found.attributes("content")[1].startswith("default-src 'none'")  # should something slip through
