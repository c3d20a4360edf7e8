"""Count the work between the command line and ``Trainer.fit``: calls of the package, and moves from file to file.

    python -m benchmarks.config_moves                          fit -c language_model
    python -m benchmarks.config_moves --top 20                 also the pairs of files with the most moves
    python -m benchmarks.config_moves -- fit -c latent_diffusion

Counting begins at ``lit_efficient.__main__.main`` and ends where ``Trainer.fit`` begins. A call counts if its code is
in the package. A move is a call from a function in one file of the package to a function in another one. Code of other
libraries between the two is skipped: a callback from jsonargparse is a move from the file that called jsonargparse.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType

import lit_efficient

PACKAGE = f"{Path(lit_efficient.__file__).parent}{os.sep}"


class _Reached(BaseException):
    """Raised where ``Trainer.fit`` begins, so that nothing is trained."""


def count(argv: list[str]) -> tuple[int, Counter[tuple[str, str]], set[str]]:
    """Run a command up to ``Trainer.fit``.

    Args:
        argv: Words of the command, as after ``python -m lit_efficient``.

    Returns:
        The number of calls, the moves by (calling file, called file), and the files that ran code.
    """
    calls = 0
    moves: Counter[tuple[str, str]] = Counter()
    files: set[str] = set()

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        # The bodies of modules and classes run once per import. They are not steps of a command.
        if not code.co_flags & CO_OPTIMIZED:
            return
        calls += 1
        file = code.co_filename.removeprefix(PACKAGE)
        files.add(file)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None:
            origin = caller.f_code.co_filename.removeprefix(PACKAGE)
            if origin != file:
                moves[origin, file] += 1

    from lightning.pytorch import Trainer

    from lit_efficient.__main__ import main

    def reached(*_: object, **__: object) -> None:
        sys.setprofile(None)
        raise _Reached

    Trainer.fit = reached  # type: ignore[method-assign]
    sys.setprofile(on_call)
    try:
        main(argv)
    except _Reached:
        pass
    finally:
        sys.setprofile(None)
    return calls, moves, files


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--top", type=int, default=0, help="pairs of files to list")
    parser.add_argument("words", nargs="*", default=["fit", "-c", "language_model"], help="the command")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        calls, moves, files = count(arguments.words)
    print(f"{len(files)} files, {calls:,} calls, {moves.total():,} moves between files before Trainer.fit")
    for (origin, file), number in moves.most_common(arguments.top):
        print(f"{number:6,}  {origin} -> {file}")
    return 0


if __name__ == "__main__":
    sys.exit(run())
