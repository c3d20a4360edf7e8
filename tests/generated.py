"""What is written from the sources and lies beside them: ``python -m tests.generated`` writes it again.

With the word ``families`` it also tries the families of language models again, which takes minutes, for
docs/families.md.
"""

import sys
from pathlib import Path

from lit_efficient import PUBLIC
from lit_efficient.catalog import PACKAGE, read_cards
from lit_efficient.commands.techniques import markdown

STUB = PACKAGE / "__init__.pyi"  # what type checkers and editors read
DOCUMENT = PACKAGE.parent / "docs" / "techniques.md"
BEGIN, END = "techniques --markdown -->\n", "<!-- /techniques -->"


def stub() -> str:
    lines = [f"from lit_efficient.{module} import {name} as {name}" for name, module in PUBLIC.items()]
    head = "# The names of __init__.py for type checkers; written by: python -m tests.generated"
    return "\n".join([head, *lines, "", "PUBLIC: dict[str, str]", "__version__: str", ""])


def document() -> str:
    """The document with the table of techniques as it is now."""
    before, rest = DOCUMENT.read_text("utf-8").split(BEGIN)
    table = markdown(read_cards()).replace("](lit_efficient/", "](../lit_efficient/").strip()
    return f"{before}{BEGIN}{table}\n{END}{rest.split(END)[1]}"


def written() -> dict[Path, str]:
    return {STUB: stub(), DOCUMENT: document()}


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
    if "families" in sys.argv[1:]:
        from tests import families

        families.PAGE.write_text(families.document(), encoding="utf-8")
