"""``python -m lit_efficient configs``: the configs that come along, by folder, a line each."""

import argparse
import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from lit_efficient.files import configs

_TITLES = {
    "tasks": "whole runs",
    "techniques": "overlays, to append to a run: -c language_model -c ema",
    "loggers": "overlays, too",
}


def run(argv: Sequence[str]) -> int:
    """List the configs."""
    parser = argparse.ArgumentParser(
        "lit_efficient configs",
        description="List the configs that come along. `fit -c NAME` runs one, `copy NAME` writes it into a file.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="as a mapping of names to what each is and where it lies")
    if parser.parse_args(argv).json:
        entries = {
            name: {"summary": configs.summary(path), "path": str(path)} for name, path in configs.known().items()
        }
        print(json.dumps(entries, indent=2))
    else:
        print("\n".join(lines(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)))
    return 0


def lines(width: int | None) -> Iterator[str]:
    """Yield the list, wrapped to ``width`` columns if that is given."""
    known = configs.known()
    column = max(map(len, known), default=0) + 4
    for folder, names in itertools.groupby(known, lambda name: known[name].parent.name):
        yield f"{folder}{f': {title}' if (title := _TITLES.get(folder)) else ''}"
        for name in names:
            text = configs.summary(known[name])
            first, *more = textwrap.wrap(text, max(30, width - column)) if width else [text]
            yield f"  {name:<{column - 2}}{first}"
            yield from (" " * column + line for line in more)
    yield from ("", f"They lie in {configs.folder()}; `copy NAME` writes one into a file of yours, to edit it.")
