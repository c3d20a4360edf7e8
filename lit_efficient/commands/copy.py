"""``python -m lit_efficient copy NAME [FILE]``: a config of the installed version as a file of one's own."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lit_efficient.errors import ConfigurationError
from lit_efficient.files import configs


def run(argv: Sequence[str]) -> int:
    """Copy a config."""
    parser = argparse.ArgumentParser(
        "lit_efficient copy",
        description="Write a config that comes along into a file, to edit it; `configs` lists their names.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="the config's name, as in `fit -c NAME`")
    parser.add_argument("file", nargs="?", metavar="FILE", help="a file or a folder; default: NAME.yaml, here")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    options = parser.parse_args(argv)
    source = Path(configs.find(options.name))
    target = Path(options.file or source.name)
    target = target / source.name if target.is_dir() else target
    try:
        with target.open("wb" if options.force else "xb") as file:
            file.write(source.read_bytes())
    except FileExistsError as error:
        raise ConfigurationError(f"copy: {target} is there already; name another FILE, or add --force") from error
    print(f"Wrote {target}. Use it as -c {target}")
    return 0
