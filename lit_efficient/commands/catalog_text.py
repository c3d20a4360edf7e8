"""How the catalogue looks: a table, one card, who goes with whom, and the README's table. Standard library only."""

import difflib
import shutil
import sys
import textwrap
from collections.abc import Sequence

from lit_efficient.catalog import PURPOSES, Card, helping, pairs, read_cards, read_third_party
from lit_efficient.commands.card_python import python_lines

USAGE = """usage: python -m lit_efficient techniques [NAME | --for PURPOSE | --matrix | --markdown]

  (nothing)    all techniques: slot in the YAML, what it saves, what it costs, where it comes from
  NAME         the card of one technique, task or data module
  --for memory | speed | quality   what to use, what costs least first
  --matrix     what goes with what
  --markdown   the table as Markdown"""


_SINGLE = {"optimizer", "lr_scheduler", "model", "data", "trainer.strategy"}  # slots that hold one class


def main(arguments: Sequence[str]) -> int:
    """Answer ``techniques ...``, what follows that word; the exit code is 0, or 2 for a name that does not exist."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE)
        return 0
    others, refused = read_third_party()
    cards = [*read_cards(), *others]
    print("".join(f"note: {sentence}\n" for sentence in refused), end="", file=sys.stderr)
    if not arguments:
        print(table(cards, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
        return 0
    if arguments[0] == "--for" and len(arguments) == 2 and arguments[1] in PURPOSES:
        print(ranked(cards, arguments[1]))
        return 0
    renderers = {"--matrix": matrix, "--markdown": markdown}
    wanted = arguments[0]
    if len(arguments) > 1 or (wanted.startswith("-") and wanted not in renderers):
        allowed = "a name, --for memory | speed | quality, --matrix or --markdown"
        print(f"error: techniques takes {allowed}, got: {' '.join(arguments)}", file=sys.stderr)
        return 2
    if wanted in renderers:
        print(renderers[wanted](cards))
        return 0
    known = {card.name.lower(): card for card in cards}
    if wanted.lower() not in known:
        near = difflib.get_close_matches(wanted.lower(), known, n=1)
        hint = f" Did you mean {known[near[0]].name}?" if near else " `techniques` alone lists all names."
        print(f"error: there is no technique named {wanted!r}.{hint}", file=sys.stderr)
        return 2
    print(card_text(known[wanted.lower()]))
    return 0


def ranked(cards: Sequence[Card], purpose: str) -> str:
    """Render what helps with a purpose, what costs least first, with the line of YAML that uses it."""
    lines = [(f"trainer: {{callbacks+: [{name}]}}", reason) for name, reason in helping(cards, purpose)]
    width = max(len(line) for line, _ in lines)
    return "\n".join(f"{line:<{width}}  # {reason}" for line, reason in lines)


def table(cards: Sequence[Card], width: int | None) -> str:
    """Render the techniques as a table.

    Args:
        cards: What to show; tasks, data modules and the rest are named below the table.
        width: Columns of the terminal: cells are wrapped to it. ``None`` puts each technique on one line, for ``grep``.
    """
    header = ("name", "slot", "saves", "costs", "source")
    rows: list[tuple[str, ...]] = [
        header,
        *((c.name, c.slot, *(text or "-" for text in _labelled(c))) for c in cards if c.is_technique),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    if width is not None:
        rows = [(name, slot.removeprefix("trainer."), *rest) for name, slot, *rest in rows]
        fixed = [max(len(row[i]) for row in rows) for i in range(2)]
        room = max(30, width - sum(fixed) - 2 * (len(header) - 1))
        widths = [*fixed, *(min(w, room // 3) for w in widths[2:])]
    lines = [line for row in rows for line in _wrapped_row(row, widths)]
    others = [f"{c.name} ({c.slot})" for c in cards if not c.is_technique]
    text = "no techniques, but public too: " + ", ".join(others)
    footer = ["", *(textwrap.wrap(text, width) if width else [text])] if others else []
    footer += [f"{c.name} is a technique of {c.distribution}" for c in cards if c.distribution]
    return "\n".join([*lines, *footer, "", "python -m lit_efficient techniques NAME prints a card."])


def _wrapped_row(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [textwrap.wrap(cell, size) or [""] for cell, size in zip(row, widths)]
    height = max(len(cell) for cell in cells)
    padded = [cell + [""] * (height - len(cell)) for cell in cells]
    return ["  ".join(part.ljust(size) for part, size in zip(line, widths)).rstrip() for line in zip(*padded)]


def card_text(card: Card) -> str:
    """Render everything that a card knows, with the lines of YAML and Python that use it."""
    lines = [f"{card.name}   (slot {card.slot})", "", card.summary, ""]
    facts = card.facts | {"file": card.module, "of": card.distribution}
    lines += [f"{label:<8}{text}" for label, text in facts.items() if text]
    lines += [f"{'not with':<8} {name}: {reason}" for name, reason in card.conflicts.items()]
    lines += ["", f"{card.name}({card.signature})"]
    if card.arguments:
        lines += ["", textwrap.indent(card.arguments, "  ")]
    lines += ["", "In YAML:", textwrap.indent(_yaml(card), "  ")]
    python = textwrap.indent("\n".join(python_lines(card)), "  ")
    return "\n".join([*lines, *(["", "In Python:", python] if python else [])])


def _yaml(card: Card) -> str:
    *parents, key = card.slot.split(".")
    lines = [f"{'  ' * depth}{parent}:" for depth, parent in enumerate(parents)]
    indent = "  " * len(parents)
    if key in ("callbacks", "plugins"):  # lists: the plus sign appends to what earlier files gave
        return "\n".join([*lines, f"{indent}{key}+:", f"{indent}  - class_path: {card.name}"])
    return "\n".join([*lines, f"{indent}{key}:", f"{indent}  class_path: {card.name}"])


def matrix(cards: Sequence[Card]) -> str:
    """Render which techniques go together: a grid, and below it each exception with its reason."""
    techniques = [card for card in cards if card.is_technique]
    names = [card.name for card in techniques]
    known = pairs(techniques)
    width = max(map(len, names), default=0)
    lines = [" " * (width + 4) + " ".join(f"{i + 1:>2}" for i in range(len(names)))]
    for i, row in enumerate(techniques):
        marks = " ".join(f"{_mark(row, column, known):>2}" for column in techniques)
        lines.append(f"{i + 1:>2}  {row.name:<{width}}{marks}".rstrip())
    lines += ["", "+ go together   x exclude each other   o at some setting   / the slot holds one   . itself"]
    reasons = [f"{a} and {b}: {text}" for (a, b), text in known.items()]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def _mark(row: Card, column: Card, known: dict[tuple[str, str], str]) -> str:
    if row.name == column.name:
        return "."
    if row.slot == column.slot and row.slot in _SINGLE:
        return "/"
    either = (known.get((row.name, column.name), ""), known.get((column.name, row.name), ""))
    for start, mark in (("conflicts:", "x"), ("conflicts if", "o")):
        if any(text.startswith(start) for text in either):
            return mark
    return "+"


def markdown(cards: Sequence[Card]) -> str:
    """Render the table of techniques as Markdown: the README holds it, and a test compares the two."""
    rows: list[tuple[str, ...]] = [("Technique", "Slot", "Saves", "Costs", "Source"), ("---",) * 5]
    for card in cards:
        if card.is_technique and not card.distribution:
            path = card.module.replace(".", "/") + ".py"
            rows.append((f"[`{card.name}`]({path})", f"`{card.slot}`", *_labelled(card)))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") or "-" for cell in row) + " |" for row in rows)


def _labelled(card: Card) -> list[str]:
    return [card.facts.get(label, "") for label in ("saves", "costs", "source")]
