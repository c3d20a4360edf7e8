"""What is written from the sources and lies beside them: ``python -m tests.generated`` writes it again.

The README gets the table of models that fit on a card, and the families of docs/families.md in groups. With the word
``families`` the command also tries the families of language models again, which takes minutes, for
docs/families.md.
"""

import sys
from pathlib import Path

from lit_efficient import PUBLIC
from lit_efficient.catalog import PACKAGE, read_cards
from lit_efficient.commands.techniques import markdown
from lit_efficient.files.image_recipes import CARDS, TRAINED, fitting_images, image_recipes, ladder
from lit_efficient.files.recipes import fitting

STUB = PACKAGE / "__init__.pyi"  # what type checkers and editors read
DOCUMENT = PACKAGE.parent / "docs" / "techniques.md"
README = PACKAGE.parent / "README.md"
MEMORIES = (8, 16, 24, 80)  # GB
METHODS = {"full": "all weights", "lora": "LoRA", "qlora": "LoRA on a base in 4 bits"}
BEGIN, END = "techniques --markdown -->\n", "<!-- /techniques -->"
CARDS_DOCUMENT = PACKAGE.parent / "docs" / "fine_tuning_diffusion.md"
CARDS_BEGIN, CARDS_END = "<!-- image_recipes: python -m tests.generated -->\n", "<!-- /image_recipes -->"


def stub() -> str:
    lines = [f"from lit_efficient.{module} import {name} as {name}" for name, module in PUBLIC.items()]
    head = "# The names of __init__.py for type checkers; written by: python -m tests.generated"
    return "\n".join([head, *lines, "", "PUBLIC: dict[str, str]", "__version__: str", ""])


def document() -> str:
    """The document with the table of techniques as it is now."""
    table = markdown(read_cards()).replace("](lit_efficient/", "](../lit_efficient/").strip()
    return with_table(DOCUMENT, BEGIN, END, table)


def cards_document() -> str:
    """The document with the table of image recipes for each card as it is now."""
    cells = {card: {one.config: one for one in fitting_images(card * 10**9)} for card in CARDS}
    planned = {(one.config, one.rung) for one in image_recipes()}
    lines = ["| Config | " + " | ".join(f"{card} GB" for card in CARDS) + " |", "| --- " * (1 + len(CARDS)) + "|"]
    for config in TRAINED:
        row = [f"`{config.removeprefix('diffusion/')}`"]
        nothing = "-" if (config, list(ladder(config))[-1]) in planned else "not planned"
        for card in CARDS:
            found = cells[card].get(config)
            row.append(nothing if found is None else f"{found.rung}, {found.batch_size}: {found.peak / 1e9:.1f}")
        lines.append(f"| {' | '.join(row)} |")
    return with_table(CARDS_DOCUMENT, CARDS_BEGIN, CARDS_END, "\n".join(lines))


def with_table(path: Path, begin: str, end: str, table: str) -> str:
    """A document with another table between two marks."""
    before, rest = path.read_text("utf-8").split(begin)
    return f"{before}{begin}{table}\n{end}{rest.split(end)[1]}"


def hardware() -> list[str]:
    """Return the rows of the table of cards: the largest planned model that fits, by method and memory."""
    lines = []
    for method, title in METHODS.items():
        cells = []
        for memory in MEMORIES:
            recipes = [recipe for recipe in fitting(memory * 10**9) if recipe.method == method]
            best = max(recipes, key=lambda recipe: recipe.peak)
            cells.append(f"{best.model.rpartition('/')[2]} ({best.peak / 1e9:.1f} GB)")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    head = ["|  |" + "".join(f" {memory} GB |" for memory in MEMORIES), "| --- |" + " --- |" * len(MEMORIES)]
    return [*head, *lines]


def groups() -> list[str]:
    """Return the rows of docs/families.md with equal answers as one row."""
    page = (PACKAGE.parent / "docs" / "families.md").read_text("utf-8")
    table = page.partition("<!-- families -->\n")[2].partition("\n\n")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in table]
    answers: dict[tuple[str, ...], list[str]] = {}
    for name, *found in rows[2:]:
        answers.setdefault(tuple(found), []).append(name.partition(" (`")[0])
    ordered = sorted(answers, key=lambda found: found.count("refused"))
    lines = ["| Families | " + " | ".join(rows[0][1:]) + " |", "| --- |" + " --- |" * len(rows[0][1:])]
    return lines + [f"| {'; '.join(answers[found])} | {' | '.join(found)} |" for found in ordered]


def readme() -> str:
    """Return the README with its two generated tables."""
    text = README.read_text("utf-8")
    for name, lines in (("hardware", hardware()), ("families", groups())):
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n".join([*lines, ""]) + end + rest.split(end, 1)[1]
    return text


def written() -> dict[Path, str]:
    return {STUB: stub(), DOCUMENT: document(), README: readme(), CARDS_DOCUMENT: cards_document()}


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
    if "families" in sys.argv[1:]:
        from tests import families

        families.PAGE.write_text(families.document(), encoding="utf-8")
