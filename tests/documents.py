"""The documents of the repository, and the commands that stand in them."""

import itertools
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *PAGES, ROOT / "configs/llm/README.md"]
SCRIPT = ROOT / "benchmarks" / "pretrained.sh"
# What stands for something of the reader's, and what it is here. A word in capitals that is not named here is an error.
GIVEN = {
    "examples/resnet.yaml": str(ROOT / "examples" / "resnet.yaml"),
    "CONFIG": "language_model",
    "mine.yaml": "llm/llama_3_1_8b_qlora",
    "NAME": "LoRA",
    "FILE": "file.ckpt",
}
GIVEN |= {"CKPT": "file.ckpt", "CKPT...": "file.ckpt", "DIR": "snapshots", "COMMAND": "average", "TASK": "autoencoder"}
GIVEN |= {"OVERLAY": "ema", "RUN": "run", "PACKAGE": "tests", "my_package": "tests"}
GIVEN |= {"mine": "tests", "mine.Model": "tests.support_cli.ToyModel", "mine.Data": "tests.support_cli.ToyData"}
GIVEN |= {"my_package.MyModule": "tests.support_cli.ToyModel", "my_package.MyData": "tests.support_cli.ToyData"}
_BEGINS = r"(?:(?:python )?-m lit_efficient|\blit-efficient)(?=[ \n`]|$)"


def built() -> dict[str, Any]:
    """What the site's build defines."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return runpy.run_path(str(ROOT / "docs" / "build.py"), run_name="build")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def commands(text: str) -> Iterator[tuple[str, ...]]:
    """The words after ``python -m lit_efficient`` of each command in Markdown or a script, comments left out."""
    text = text.replace("\\\n", " ")
    fenced = re.findall(r"^```(?:bash|text)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in itertools.chain(*(block.splitlines() for block in fenced), inline):
        for part in re.split(r" && | [|>] ", line):
            if found := re.search(_BEGINS + r"(.*)", part):
                yield tuple(shlex.split(found[1], comments=True))


def of_header(text: str) -> Iterator[tuple[str, ...]]:
    """The same of the comments of a config."""
    for line in re.findall(r"^# (.*)$", text.replace("\\\n#", " "), re.MULTILINE):
        if found := re.search(_BEGINS + r"([^`]*)", line):
            yield tuple(shlex.split(found[1], comments=True))


def of_script(text: str) -> Iterator[tuple[str, ...]]:
    """The same of a script whose function ``run`` is the command, with the folder of its configs."""
    for line in re.findall(r"^  run (.*)$", text, re.MULTILINE):
        words = shlex.split(line.replace("${LIMIT:-}", "").replace("$configs", str(SCRIPT.parent / "pretrained")))
        yield tuple(words)


def all_commands() -> dict[tuple[str, ...], str]:
    """Every command, with the document that it stands in; each once."""
    found: dict[tuple[str, ...], str] = {}
    for path in DOCUMENTS:
        for words in commands(path.read_text("utf-8")):
            found.setdefault(words, path.name)
    for words in of_script(SCRIPT.read_text("utf-8")):
        found.setdefault(words, SCRIPT.name)
    return found


def page(name: str) -> str:
    """The text of a page of the documentation."""
    return (ROOT / "docs" / name).read_text("utf-8")


def rows_of(text: str) -> list[list[str]]:
    """The cells of the tables in a text, without their heads."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rules = [number for number, line in enumerate(lines) if set("".join(line)) <= set("- |")]
    return [[cell.strip() for cell in line] for n, line in enumerate(lines) if n not in rules and n + 1 not in rules]
