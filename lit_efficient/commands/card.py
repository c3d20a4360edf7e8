"""Text of a card of the catalogue, in the terminal's width. Uses only the standard library."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from lit_efficient.catalog import PACKAGE, PURPOSES, Card, overlay_of, pairs
from lit_efficient.commands.card_python import python_lines


def card_text(card: Card, cards: Sequence[Card] = (), width: int = 80) -> str:
    """Return the full text of a card, with YAML and Python for using the class.

    Args:
        card: The card.
        cards: All cards, for related classes and for conflicts that other techniques declare.
        width: Width in letters.
    """
    place = "a block of arguments" if card.is_block else f"slot {card.slot}"
    lines = [f"{card.name}   ({place})", "", *wrapped(card.summary, width)]
    if not card.is_block:
        lines += _use(card)
    if card.signature or not card.is_block:
        lines += ["", *wrapped(f"{card.name}({card.signature})", width, " " * 4)]
    if card.arguments:
        lines += ["", *(f"  {line}".rstrip() for line in argument_lines(card.arguments, width - 2))]
    facts = dict(card.facts)
    for purpose in PURPOSES.keys() & facts:
        facts[purpose] = facts[purpose].partition(". ")[2]  # without its rank
    facts |= {"measured": measured(card), "file": card.module, "of": card.distribution}
    others = cards or [card]
    facts["related"] = ", ".join(related(card, others))
    known = pairs([card, *(one for one in others if one.name != card.name)])
    for other, reason in excluded(card, known).items():
        facts[f"not with {other}:"] = reason
    lines.append("")
    for label, text in facts.items():
        if text:
            lines += wrapped(f"{label:<8} {text}", width, " " * 9)
    return "\n".join(lines).rstrip()


def _use(card: Card) -> list[str]:
    """Return the lines that show a class in YAML and in Python."""
    overlay = overlay_of(card)
    option = ""
    if overlay:
        option = f" (`-c {overlay}` on the command line)"
    lines = ["", f"In YAML{option}:", textwrap.indent(_yaml(card), "  ")]
    python = python_lines(card)
    if python:
        lines += ["", "In Python:", textwrap.indent("\n".join(python), "  ")]
    return lines


def argument_lines(text: str, width: int) -> Iterator[str]:
    """Yield wrapped lines of the arguments' explanations; items of a list stay on lines of their own."""
    for part in re.split(r"\n(?=\S|\s+[-*] |\s*\n)", text):
        depth = len(part) - len(part.lstrip(" "))
        if part.strip():
            yield from wrapped(" ".join(part.split()), width - depth, " " * 4, " " * depth)


def measured(card: Card) -> str:
    """Return the measured figures of a technique from ``measured.json`` in the package, or ""."""
    file = PACKAGE / "measured.json"
    if not file.is_file():
        return ""
    return str(json.loads(file.read_text("utf-8")).get(card.name, ""))


def excluded(card: Card, known: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Return why a card's class and other classes exclude each other.

    Args:
        card: Card of the class.
        known: Reasons by pairs of names, as :func:`lit_efficient.catalog.pairs` returns them.

    Returns:
        Reasons by the other class's name, with the setting if the pair excludes each other only with a setting.
    """
    found = {}
    for (a, b), text in known.items():
        if card.name in (a, b):
            other = b if a == card.name else a
            setting, _, reason = text.removeprefix("conflicts").strip(": ").partition(": ")
            if not text.startswith("conflicts if"):
                setting, reason = other, text.removeprefix("conflicts: ")
            setting = setting.removeprefix("if ")
            found[setting if setting.startswith(other) else f"{other}, if {setting}"] = reason
    return found


def related(card: Card, cards: Sequence[Card]) -> list[str]:
    """Return the names of classes that a card mentions, or whose cards mention it."""
    texts = {one.name: " ".join([one.summary, *one.facts.values(), one.arguments]) for one in [*cards, card]}

    def names(text: str, name: str) -> bool:
        return re.search(rf"(?<!\w){name}(?!\w)", text) is not None

    others = [one.name for one in cards if one.name != card.name]
    return [name for name in others if names(texts[card.name], name) or names(texts[name], card.name)]


def _yaml(card: Card) -> str:
    *parents, key = card.slot.split(".")
    lines = [f"{'  ' * depth}{parent}:" for depth, parent in enumerate(parents)]
    indent = "  " * len(parents)
    if key in ("callbacks", "plugins"):  # the plus sign appends to the lists of earlier files
        return "\n".join([*lines, f"{indent}{key}+:", f"{indent}  - class_path: {card.name}"])
    return "\n".join([*lines, f"{indent}{key}:", f"{indent}  class_path: {card.name}"])


def wrapped(text: str, width: int, indent: str = "", start: str = "") -> list[str]:
    """Wrap a text; ``start`` precedes each line, and ``indent`` follows it from the second line on."""
    return [
        start + line
        for line in textwrap.wrap(
            text, max(20, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    ]
