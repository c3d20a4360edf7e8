"""Pages made from the code: one per technique, the conflicts, the configs and the reference."""

import ast
import itertools
import json
import re
import textwrap
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import figures
from lit_efficient import PUBLIC
from lit_efficient.catalog import PURPOSES, Card, pairs, read_cards
from lit_efficient.commands.card import card_text, excluded, overlay_of, related
from lit_efficient.commands.card_python import python_lines
from lit_efficient.errors import listed
from lit_efficient.files import configs

# Titles of the reference by the first part of a module's name. Other modules belong to the contract.
PARTS = {
    "contract": "Contract of techniques",
    "callbacks": "Callbacks",
    "optimizers": "Optimizers and schedules",
    "tasks": "Tasks",
    "data": "Data",
    "models": "Models",
    "losses": "Losses",
    "distributed": "Several processes",
    "mechanisms": "Mechanisms",
}
_MENU = {
    "Start": [
        "index.md",
        "Overview <overview.md>",
        "installing.md",
        "goals.md",
        "techniques.md",
        "matrix.md",
        "symptoms.md",
    ],
    "Tutorials": ["tutorial_memory.md", "tutorial_language_model.md", "tutorial_photos.md"],
    "Notebooks": ["notebooks/*"],
    "Guides": [
        "llm.md",
        "reinforcement_learning.md",
        "families.md",
        "data.md",
        "diffusion.md",
        "fine_tuning_diffusion.md",
        "examples.md",
        "measuring.md",
        "resuming.md",
        "commands.md",
        "gpus.md",
        "scaling.md",
        "wandb.md",
        "migrating.md",
    ],
    "Results": ["measured.md", "negative_results.md", "pretrained.md"],
    "Reference": ["configs/*", "reference/*"],
    "The project": ["contributing.md", "agents.md", "changelog.md", "security.md"],
}


def made() -> dict[str, str]:
    """Return every page by its name. Links are relative to the repository's root."""
    cards = read_cards()
    pages = {f"techniques/{card.name}.md": technique(card, cards) for card in cards if card.is_technique}
    pages["matrix.md"] = "\n".join(matrix_lines(cards))
    for folder, names in itertools.groupby(configs.known(), lambda name: configs.known()[name].parent.name):
        pages[f"configs/{folder}.md"] = "\n".join(config_lines(folder, list(names)))
    pages["examples.md"] = "\n".join(example_lines())
    return pages | {f"reference/{part}.md": text for part, text in reference(cards)}


def technique_pages() -> dict[str, str]:
    """Return the page of each technique's file."""
    return {_file(card.module): f"techniques/{card.name}.md" for card in read_cards() if card.is_technique}


def menu(page: str) -> str:
    """Return the hidden table of contents that the site adds below a page."""
    if page == "techniques.md":
        return _tree("", ["techniques/*"])
    return "".join(_tree(title, names) for title, names in _MENU.items()) if page == "index.md" else ""


def _tree(title: str, names: list[str]) -> str:
    kept = [name for name in names if name != "index.md"]
    caption = f":caption: {title}\n" if title else ""
    return "\n".join(["", "```{toctree}", f":hidden:\n:glob:\n:maxdepth: 1\n{caption}", *kept, "```", ""])


def example_lines() -> Iterator[str]:
    """Yield the lines of the examples' page: each script with the first paragraph of its docstring."""
    folder = Path(__file__).resolve().parents[1] / "examples"
    yield from ("# Examples", "", "Scripts that run offline without changes; the tests run them.", "")
    for path in sorted(folder.glob("*.py")):
        text = " ".join((ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n\n")[0].split())
        yield f"- [{path.name}](examples/{path.name}): {text}"
    yield from ("", "Notebooks, with their outputs:", "")
    for path in notebooks():
        yield f"- [{path.stem}](examples/{path.name}): {''.join(_cells(path)[0]['source']).splitlines()[0].strip('# ')}"
    yield ""


def notebooks() -> list[Path]:
    """Return the notebooks of the examples."""
    return sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.ipynb"))


def notebook_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a notebook's page: text, code, and what the code printed and showed."""
    for number, cell in enumerate(_cells(path)):
        source = "".join(cell["source"])
        yield from ([source, ""] if cell["cell_type"] == "markdown" else _fenced("python", source))
        for output in cell.get("outputs", []):
            if "text" in output:
                yield from _fenced("text", "".join(output["text"]).rstrip("\n"))
            else:
                yield from (f"![What the code above shows]({path.stem}-{number}.png)", "")
    yield from (f"This page is the notebook `examples/{path.name}` with its outputs.", "")


def notebook_pictures() -> dict[str, bytes]:
    """Return the pictures of the notebooks' pages by their names."""
    found = {}
    for path in notebooks():
        for number, cell in enumerate(_cells(path)):
            for output in cell.get("outputs", []):
                if "data" in output:
                    found[f"{path.stem}-{number}.png"] = b64decode(output["data"]["image/png"])
    return found


def _cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["cells"]
    return cells


def anchor(folder: str, stem: str) -> str:
    """Return the anchor of a config on its folder's page."""
    return f"config-{folder}-{stem}".replace("_", "-")


def technique(card: Card, cards: list[Card]) -> str:
    """Return the page of a technique; all pages have the same parts in the same order."""
    lines = [f"# {card.name}", "", _sentence(card.summary), ""]
    lines += ["## When to use it", "", *_reasons(card), "", "## When not", ""]
    lines += [f"- It costs {_cell(card.facts['costs'])}." if card.facts.get("costs") else "- No cost is known.", ""]
    if refused := excluded(card, pairs(cards)):
        lines[-1:] = [f"- Not together with {_names(refused, cards)}: [reasons](#what-it-excludes).", ""]
    if python := python_lines(card):
        lines += ["## In Python", "", *_fenced("python", "\n".join(python)), ""]
    yaml = card_text(card).partition("In YAML")[2].partition(":\n")[2].partition("\n\n")[0]
    lines += ["## In YAML", "", *_fenced("yaml", textwrap.dedent(yaml)), ""]
    if name := overlay_of(card):
        lines += [f"The overlay [{name}](configs/techniques/{name}.yaml) has settings to begin with:", ""]
        lines += [*_fenced("bash", f"python -m lit_efficient fit -c CONFIG -c {name}"), ""]
    lines += ["## Measured", "", *(measured(card.name) or ["It was not measured alone.", ""])]
    names = [name for name, module in PUBLIC.items() if f"lit_efficient.{module}" == card.module]
    lines += ["## Arguments", "", *_objects(sorted(names, key=lambda name: name != card.name))]
    lines += ["## How it works", "", *_described(card.module), "", *_place(card), ""]
    if refused:
        lines += ["## What it excludes", ""]
        lines += [f"- {_linked(other, cards)}: {_cell(why)}" for other, why in refused.items()]
    else:
        lines += ["## What it excludes", "", "No pair with another technique is refused."]
    if others := related(card, [one for one in cards if one.is_technique]):
        lines += ["", "## Related", "", ", ".join(_linked(other, cards) for other in others)]
    return "\n".join([*lines, ""])


def _reasons(card: Card) -> Iterator[str]:
    """Yield list entries: the goals that a technique serves, and what it saves."""
    for key, title in PURPOSES.items():
        if reason := card.facts.get(key, "").partition(". ")[2]:
            yield f"- For {title.partition(':')[0]}: {_cell(reason)}."
    if saves := card.facts.get("saves", ""):
        yield f"- It saves {_sentence(_cell(saves))}"
    if not any(card.facts.get(key) for key in (*PURPOSES, "saves")):
        yield f"- As `{card.slot}` of a run."


def _place(card: Card) -> Iterator[str]:
    """Yield list entries: the slot of a technique, its phase and its source."""
    yield f"- Slot in YAML: `{card.slot}`"
    if phase := card.facts.get("phase"):
        yield f"- Phase, which decides the order in which techniques act: `{phase}`"
    if found := card.facts.get("source"):
        yield f"- Source: {_cell(found)}"


def _names(refused: dict[str, str], cards: list[Card]) -> str:
    first = [_linked(other, cards) for other in itertools.islice(refused, 3)]
    rest = len(refused) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest else "")


def _sentence(text: str) -> str:
    return f"{text.rstrip('. ')}."


def measured(name: str) -> list[str]:
    """Return the measurements of a technique: ratios for three small trainings, and results of other benchmarks."""
    lines: list[str] = []
    for record in figures.RECORDS.values():
        if record.get("technique") != name or "cells" not in record:
            continue
        cells = [figures.filled(record, cell) for cell in record["cells"]]
        if "reason" in record["figures"]:
            lines += [f"On the three small trainings it was not measured: {record['figures']['reason']}.", ""]
        elif record["table"] == "techniques":
            titles = figures.SOURCE["tables"]["techniques"][1:]
            rows = [(title, *cell.split(" / ")) for title, cell in zip(titles, cells[1:])]
            lines += [f"{cells[0]} as a ratio to the same training without it (below 1 is less), on a CPU:", ""]
            lines += ["| | GPT | DiT | ResNet |", "| --- | --- | --- | --- |"]
            lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
        else:
            command, what, result = cells
            lines += [f"- {what}: {result} ({command})", ""]
    return [*lines, "[All results](docs/measured.md).", ""] if lines else []


def matrix_lines(cards: list[Card]) -> Iterator[str]:
    """Yield the lines of the page of conflicts."""
    techniques = [card for card in cards if card.is_technique]
    known = pairs(techniques)
    yield from (
        "# Conflicts",
        "",
        "The output of `python -m lit_efficient techniques --matrix`; `--csv` prints a",
    )
    yield from ("table of all pairs. Pairs that are not listed work together in any order; a test runs each pair.", "")
    yield from ("| Technique | Not with | Reason and solution |", "| --- | --- | --- |")
    for card in techniques:
        for other, why in excluded(card, {pair: text for pair, text in known.items() if pair[0] == card.name}).items():
            yield f"| {_linked(card.name, cards)} | {_linked(other, cards)} | {_cell(why)} |"
    free = [card.name for card in techniques if not any(card.name in pair for pair in known)]
    yield from ("", f"Without conflicts: {', '.join(_linked(name, cards) for name in free)}. A run has one optimizer,")
    yield from ("one model and one data module.", "")


def config_lines(folder: str, names: list[str]) -> Iterator[str]:
    """Yield the lines of a folder's page: each config with its text."""
    yield from (f"# Configs: {folder}", "", "To copy a config into a file of yours:", "")
    yield from (*_fenced("bash", f"python -m lit_efficient copy {names[0]}"), "")
    for name in names:
        path = configs.known()[name]
        yield from (f"({anchor(folder, path.stem)})=", f"## {name}", "", f"{configs.summary(path)}.", "")
        yield from (*_fenced("yaml", path.read_text("utf-8").rstrip()), "")


def reference(cards: list[Card]) -> Iterator[tuple[str, str]]:
    """Yield each part of the reference with its page: public names that have no technique's page."""
    there = {card.module for card in cards if card.is_technique}
    rest = {name: module for name, module in PUBLIC.items() if f"lit_efficient.{module}" not in there}
    rest["check_technique"] = "testing"
    for part, title in PARTS.items():
        of_part = {name: module for name, module in rest.items() if _part(module) == part}
        lines = [f"# {title}: {listed(list(of_part))}", ""]
        for module in dict.fromkeys(of_part.values()):
            names = [name for name, home in of_part.items() if home == module]
            lines += [f"## {', '.join(names)}", "", *_described(f"lit_efficient.{module}"), ""]
            lines += _objects(names, f"lit_efficient.{module}")
        if of_part:
            yield part, "\n".join([*lines, ""])


def _part(module: str) -> str:
    first, _, more = module.partition(".")
    return first if more and first in PARTS else "contract"


def _described(module: str) -> list[str]:
    return _fenced("{eval-rst}", f".. automodule:: {module}")


def _objects(names: list[str], module: str = "lit_efficient") -> list[str]:
    lines = []
    for name in names:
        whole = f"{'lit_efficient' if name in PUBLIC else module}.{name}"
        text = f".. autofunction:: {whole}" if name[0].islower() else f".. autoclass:: {whole}\n   :members:"
        lines += [*_fenced("{eval-rst}", text), ""]
    return lines


def _fenced(kind: str, text: str) -> list[str]:
    return [f"```{kind}", text, "```"]


def _linked(name: str, cards: list[Card]) -> str:
    """Return a technique's name, perhaps with a setting, as a link to its page."""
    modules = {card.name: card.module for card in cards if card.is_technique}
    first = re.split(r"\W", name)[0]
    return f"[{name}]({_file(modules[first])})" if first in modules else name


def _file(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _cell(text: str) -> str:
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("|", "\\|")
