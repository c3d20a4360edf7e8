"""``python -m lit_efficient copy NAME [FILE]``: copy a config of the package into a file of yours."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lit_efficient.errors import ConfigurationError
from lit_efficient.files import configs


def run(argv: Sequence[str]) -> int:
    """Run ``copy``."""
    parser = argparse.ArgumentParser(
        "lit_efficient copy",
        description="Write a config of the package into a file to edit. `configs` lists the names.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="the config's name, as in `fit -c NAME`")
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="a file or a folder (default: NAME.yaml in this folder)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    options = parser.parse_args(argv)
    source = Path(configs.find(options.name))
    target = Path(options.file or source.name)
    target = target / source.name if target.is_dir() else target
    try:
        with target.open("wb" if options.force else "xb") as file:
            file.write(source.read_bytes())
    except FileExistsError as error:
        raise ConfigurationError(f"copy: {target} exists already; name another FILE, or add --force") from error
    print(f"Wrote {target}. Use it with -c {target}")
    return 0
