"""``python -m lit_efficient techniques``: list techniques by purpose, print a card or the table of conflicts."""

import argparse
import csv
import io
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from lit_efficient.catalog import (
    PACKAGE,
    PURPOSES,
    Card,
    arguments_of,
    helping,
    overlay_of,
    pairs,
    purpose_of,
    read_cards,
    read_third_party,
)
from lit_efficient.cli.signatures import OPTIMIZERS
from lit_efficient.commands.card import card_text, excluded, wrapped
from lit_efficient.errors import ConfigurationError, did_you_mean

_SINGLE = {"optimizer", "lr_scheduler", "model", "data", "trainer.strategy"}  # slots that hold one class
_PARTS = {"model": "tasks", "data": "data modules", "trainer.callbacks": "other callbacks", "": "blocks of arguments"}
_OOM = "memory"  # purpose that `--for oom` ranks


def run(argv: Sequence[str]) -> int:
    """Run ``techniques``."""
    parser = argparse.ArgumentParser(
        "lit_efficient techniques",
        description="List all techniques by purpose, or print the card of one.",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="technique, task or data module whose card is printed")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--for",
        dest="purpose",
        metavar="WANT",
        choices=(*PURPOSES, "oom"),
        help=f"rank techniques for a purpose, cheapest first: {', '.join(PURPOSES)}, or oom when out of memory",
    )
    which.add_argument("--matrix", action="store_true", help="list pairs that exclude each other, with reasons")
    parser.add_argument(
        "--strategies",
        action="store_true",
        help="with --matrix: list which technique works with which strategy, with reasons",
    )
    which.add_argument("--csv", action="store_true", help="print all pairs as a CSV table")
    which.add_argument("--markdown", action="store_true", help="print the list by goal as Markdown")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(argv)
    others, refused = read_third_party()
    cards = [*read_cards(), *others]
    print("".join(f"note: {sentence}\n" for sentence in refused), end="", file=sys.stderr)
    whole = options.matrix or options.csv or options.markdown
    if (options.name and (whole or options.purpose)) or (options.json and whole):
        parser.error("NAME cannot be combined with --for or a table, and --json only with NAME or --for")
    if options.strategies and not options.matrix:
        parser.error("--strategies needs --matrix")
    print(_answer(options, cards, max(40, shutil.get_terminal_size().columns)))
    return 0


def _answer(options: argparse.Namespace, cards: list[Card], width: int) -> str:
    purpose = options.purpose
    if options.purpose == "oom":
        purpose = _OOM
    if options.json:
        chosen = cards
        if options.name:
            chosen = [_named(options.name, cards)]
        elif purpose:
            known_cards = {card.name: card for card in cards}
            chosen = [known_cards[name] for name, _ in helping(cards, purpose)]
        known = pairs(cards)
        return json.dumps([entry(card, known) for card in chosen], indent=2, ensure_ascii=False)
    if options.name:
        return card_text(_named(options.name, cards), cards, width)
    if purpose:
        return ranked(cards, purpose, width, options.purpose == "oom")
    if options.matrix and options.strategies:
        return strategies(cards, width)
    if options.matrix:
        return matrix(cards, width)
    if options.csv:
        return table(cards)
    if options.markdown:
        return markdown(cards)
    return listed(cards, width)


def _named(name: str, cards: Sequence[Card]) -> Card:
    known = {card.name.lower(): card for card in cards}
    if name.lower() not in known:
        hint = did_you_mean(name, [card.name for card in cards]) or "; `techniques` lists all names"
        raise ConfigurationError(f"there is no technique named {name!r}{hint}")
    return known[name.lower()]


def listed(cards: Sequence[Card], width: int) -> str:
    """Return the list of techniques by purpose, each once, followed by the other classes that a config may name."""
    techniques = [card for card in cards if card.is_technique and card.slot not in ("model", "data")]
    others = [card for card in cards if card not in techniques]
    names = max((len(card.name) for card in techniques), default=0)
    lines: list[str] = []
    for title, group in _by_goal(techniques):
        lines.append(title)
        for card in group:
            lines += _line(card, names, width)
        lines.append("")
    for slot, title in _PARTS.items():
        rest = [card.name for card in others if ("" if card.is_block else card.slot) == slot]
        if rest:
            lines += wrapped(f"{title}: {', '.join(rest)}", width, "  ")
    lines += wrapped(f"optimizers of other packages: {', '.join(OPTIMIZERS)}", width, "  ")
    lines += [f"{card.name} is a technique of the package {card.distribution}" for card in cards if card.distribution]
    more = (
        "`techniques NAME` prints a card, `techniques --for memory` ranks by cost, `techniques --help` lists options."
    )
    return "\n".join([*lines, "", *wrapped(more, width)])


def _by_goal(techniques: Sequence[Card]) -> Iterator[tuple[str, list[Card]]]:
    """Yield each goal with its techniques, the cheapest first; then tasks, data modules and others."""
    parts = [card for card in techniques if card.slot in ("model", "data")]
    rest = [card for card in techniques if card not in parts]
    for purpose in dict.fromkeys([*PURPOSES, *map(purpose_of, rest)]):
        group = [card for card in rest if purpose_of(card) == purpose]
        if not group:
            continue
        order = [name for name, _ in helping(group, purpose)]
        # Techniques that `helping` does not rank come last.
        group.sort(key=lambda card: (card.name not in order, order.index(card.name) if card.name in order else 0))
        yield PURPOSES.get(purpose, "others"), group
    for slot in ("model", "data"):
        group = [card for card in parts if card.slot == slot]
        if group:
            yield _PARTS[slot], group


def _reason(card: Card) -> str:
    """Return why one uses a technique, or what it does."""
    return card.facts.get(purpose_of(card), "").partition(". ")[2] or card.summary.rstrip(".")


def _line(card: Card, names: int, width: int) -> list[str]:
    reason = card.facts.get(purpose_of(card), "").partition(". ")[2] or card.summary
    slot = "" if card.slot == "trainer.callbacks" else f" ({card.slot})"
    return wrapped(f"  {card.name:<{names}}  {reason}{slot}", width, " " * (names + 4))


def ranked(cards: Sequence[Card], purpose: str, width: int, numbered: bool = False) -> str:
    """Return the techniques for a purpose, cheapest first, with the words that add each to a run."""
    found = helping(cards, purpose)
    known = {card.name: card for card in cards}
    names = max((len(name) for name, _ in found), default=0)
    uses = {name: _use(known[name]) for name, _ in found}
    column = max(map(len, uses.values()), default=0)
    head = f"{PURPOSES[purpose]}, cheapest first; append to `fit -c CONFIG`:"
    if numbered:
        head = "out of memory: add these one after the other; append to `fit -c CONFIG`:"
    lines = wrapped(head, width)
    for number, (name, reason) in enumerate(found, 1):
        start = f"{number:>2}. " if numbered else "  "
        text = f"{start}{name:<{names}}  {uses[name]:<{column}}  {reason}"
        short = f"{start}{uses[name]:<{column}}  {reason}"  # the overlay's name is close to the technique's
        lines += wrapped(text if width >= 100 else short, width, " " * (len(start) + column + 2))
    rest = [card.name for card in cards if purpose in card.facts and card.name not in uses]
    if rest:
        lines += wrapped(f"  also: {', '.join(rest)}", width, "    ")
    return "\n".join(lines)


def _use(card: Card) -> str:
    """Return the options that add a technique to a run."""
    overlay = overlay_of(card)
    if overlay:
        return f"-c {overlay}"
    if card.slot in _SINGLE:
        return f"--{card.slot}={card.name}"
    return f"--{card.slot}+={card.name}"


def entry(card: Card, known: dict[tuple[str, str], str]) -> dict[str, Any]:
    """Return a card as plain data; conflicts include those that other techniques declare."""
    facts = {key: card.facts.get(key, "") for key in ("saves", "costs", "source")}
    return {
        "name": card.name,
        "slot": "" if card.is_block else card.slot,
        "group": purpose_of(card),
        "summary": card.summary,
        **facts,
        "arguments": arguments_of(card),
        "conflicts": excluded(card, known),
        "config": overlay_of(card) or None,
        "module": card.module,
        "technique": card.is_technique,
        "package": card.distribution or "lit_efficient",
    }


def matrix(cards: Sequence[Card], width: int) -> str:
    """Return the pairs that exclude each other, each with its reason once and a reference at the other technique."""
    known = pairs([card for card in cards if card.is_technique])
    lines: list[str] = []
    names = {name for pair in known for name in pair}
    for card in cards:
        if card.name not in names:
            continue
        lines.append(card.name)
        own = {pair: text for pair, text in known.items() if pair[0] == card.name}
        for other, reason in excluded(card, own).items():
            lines += wrapped(f"  not with {other}: {reason}", width, "    ")
        after = [a for a, b in known if b == card.name]
        if after:
            lines += wrapped(f"  nor with {', '.join(after)}: see these", width, "    ")
    free = [card.name for card in cards if card.is_technique and card.name not in names]
    lines += ["", *wrapped(f"Without conflicts: {', '.join(free)}.", width, "  ")]
    one = "A run has one optimizer, one model and one data module. `techniques --csv` has all pairs."
    return "\n".join([*lines, *wrapped(one, width)])


def strategies(cards: Sequence[Card], width: int) -> str:
    """Return a table of techniques and strategies: whether a test ran on two processes, or the reason of the refusal.

    The results are in ``tested.json`` in the package.
    """
    tested: dict[str, dict[str, str]] = json.loads((PACKAGE / "tested.json").read_text("utf-8"))
    techniques = [c for c in cards if c.is_technique and c.slot not in ("model", "data", "trainer.strategy")]
    names = max((len(card.name) for card in techniques), default=0)
    columns = ("one device", *tested)
    lines = ["  ".join([" " * names, *(f"{column:<10}" for column in columns)]).rstrip()]
    for card in techniques:
        found = {kind: tested[kind].get(card.name, "") for kind in tested}
        words = [{"works": "works", "": "not tried"}.get(text, "refused") for text in found.values()]
        lines.append("  ".join([f"{card.name:<{names}}", *(f"{word:<10}" for word in ["works", *words])]).rstrip())
        for kind, text in found.items():
            if text not in ("works", ""):
                lines += wrapped(f"  {kind}: {text}", width, "    ")
    said = (
        "works: the losses on two processes equal those of one process to 1e-5 (techniques that round by the rows in a "
        "process: nearly), and a resumed run ends with the same bits. not tried: no test has run (EmptyCache needs "
        "GPUs). ZeRO-1 to ZeRO-3 are DeepSpeed's stages, tested on its CPU backend. Each technique has tests on one "
        "device."
    )
    return "\n".join([*lines, "", *wrapped(said, width)])


def table(cards: Sequence[Card]) -> str:
    """Return all pairs as CSV, with a row and a column for each technique."""
    techniques = [card for card in cards if card.is_technique]
    known = pairs(techniques)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["", *(card.name for card in techniques)])
    writer.writerows([[row.name, *(_pair(row, column, known) for column in techniques)] for row in techniques])
    return text.getvalue().rstrip("\n")


def _pair(row: Card, column: Card, known: dict[tuple[str, str], str]) -> str:
    if row.name == column.name:
        return "itself"
    text = known.get((row.name, column.name)) or known.get((column.name, row.name))
    if text:
        return text
    if row.slot == column.slot and row.slot in _SINGLE:
        return "the slot holds one"
    return "together"


def markdown(cards: Sequence[Card]) -> str:
    """Return the list of techniques by goal as Markdown; docs/techniques.md contains it, and a test compares both."""
    lines: list[str] = []
    for title, group in _by_goal([card for card in cards if card.is_technique and not card.distribution]):
        lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
        for card in group:
            path = card.module.replace(".", "/") + ".py"
            lines.append(f"- [`{card.name}`]({path}): {_reason(card)}")
    lines += ["", "## Optimizers of other packages", ""]
    lines += wrapped(", ".join(f"`{name}`" for name in OPTIMIZERS), 120)
    return "\n".join(lines[1:])
