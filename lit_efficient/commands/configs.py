"""``python -m lit_efficient configs``: list the configs of the package, by folder."""

import argparse
import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from lit_efficient.files import configs

_TITLES = {
    "tasks": "complete runs",
    "techniques": "overlays to append to a run: -c language_model -c ema",
    "loggers": "overlays",
}


def run(argv: Sequence[str]) -> int:
    """Run ``configs``."""
    parser = argparse.ArgumentParser(
        "lit_efficient configs",
        description="List the configs of the package. `fit -c NAME` runs one, `copy NAME` writes one into a file.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print a mapping of names to summaries and paths")
    if parser.parse_args(argv).json:
        entries = {
            name: {"summary": configs.summary(path), "path": str(path)} for name, path in configs.known().items()
        }
        print(json.dumps(entries, indent=2))
    else:
        print("\n".join(lines(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)))
    return 0


def lines(width: int | None) -> Iterator[str]:
    """Yield the lines of the list, wrapped to ``width`` columns if a width is given."""
    known = configs.known()
    column = max(map(len, known), default=0) + 4
    for folder, names in itertools.groupby(known, lambda name: known[name].parent.name):
        yield f"{folder}: {_TITLES[folder]}" if folder in _TITLES else folder
        for name in names:
            text = configs.summary(known[name])
            first, *more = textwrap.wrap(text, max(30, width - column)) if width else [text]
            yield f"  {name:<{column - 2}}{first}"
            yield from (" " * column + line for line in more)
    yield from ("", f"Folder: {configs.folder()}. `copy NAME` writes a config into a file of yours to edit.")
