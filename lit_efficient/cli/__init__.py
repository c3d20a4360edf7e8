"""The command line: Lightning's own, made safe, with errors that can be read and optimizers that see what trains.

Differences from ``lightning.pytorch.cli.LightningCLI``:

* classes outside of an allow-list are not imported;
* our classes have short names, in YAML and on the command line;
* a misspelt name is answered before torch is imported;
* ``optimizer`` and ``lr_scheduler`` are built inside ``configure_optimizers``;
* a checkpoint given as ``--ckpt_path`` is checked first, and never overrides the config;
* an error is a few lines that say what to do.

One run, in the order of the files:

1. :mod:`.arguments` reads the words: configs and options become one tree (:mod:`.tree`), merged by its rules.
2. :mod:`.names` compares the names in the tree with the sources (:mod:`.signatures`). Torch is not imported yet.
3. :mod:`.command_line` is the run from here on. :mod:`.parsing` lets jsonargparse check the tree, safely.
4. :mod:`.preflight` refuses what cannot work on this machine; :mod:`.checkpoint` reads ``--ckpt_path``.
5. :mod:`.run_folder` makes the run's folder; :mod:`.defaults` adds the parts that every run gets.
6. :mod:`.optimizers` plans the optimizer; :mod:`.rehearsal` runs all compatibility checks without data.
7. ``Trainer.fit`` trains. :mod:`.resumed` lets the config win over the checkpoint; :mod:`.run_events` records events.
8. :mod:`.next_steps` prints the last lines. :mod:`.errors` turns an error into a few lines; :mod:`.secrets` masks
   secrets in everything that is written.

Other programs use parts of this: :mod:`.fits` builds the fit of a config for the commands, :mod:`.evaluate` validates
checkpoints.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lit_efficient.cli.secrets import print_error
from lit_efficient.errors import ConfigurationError

if TYPE_CHECKING:
    from lit_efficient.cli.arguments import Command
    from lit_efficient.cli.command_line import LitEfficientCLI as LitEfficientCLI


def run(argv: Sequence[str]) -> int:
    """Run the command line.

    Args:
        argv: The words after the program's name. ``--debug``, or ``LIT_EFFICIENT_DEBUG=1``, shows the traceback of an
            error. ``--quiet`` shows errors, warnings and the last lines alone.

    Returns:
        An exit code of :mod:`lit_efficient.errors`, or 128 + n after signal n. Errors that the user can correct are
        printed. A bug raises.
    """
    words = [word for word in argv if word not in ("--debug", "--quiet")]
    debug = "--debug" in argv or os.environ.get("LIT_EFFICIENT_DEBUG", "") not in ("", "0")
    try:
        command = check_names(words)
    except ConfigurationError as error:
        if debug:
            raise
        return print_error(str(error), error.exit_code)
    from lit_efficient.cli.command_line import run_words

    return run_words(words, "--quiet" in argv, debug, command)


def check_names(words: Sequence[str]) -> "Command":
    """Read a command line and its configs, and check the names in them, without importing torch.

    Args:
        words: A subcommand and its words.

    Returns:
        What the words say.

    Raises:
        ConfigurationError: For a config that cannot be read, or an unknown name.
    """
    from lit_efficient.cli.arguments import read_command
    from lit_efficient.cli.names import check_command

    command = read_command(words)
    check_command(command)
    _check_model(command)
    return command


def _check_model(command: "Command") -> None:
    """Check that the config of a run has a model.

    Raises:
        ConfigurationError: If it has none. The message names the configs to begin with.
    """
    if "model" in command.tree or command.rest:  # as --help
        return
    from lit_efficient.files.configs import known, summary

    lines = ["a run needs a model: name a config by -c, and overlays by further -c. Begin with one of these:"]
    for name in ("language_model", "latent_diffusion", "autoencoder"):
        lines.append(f"  python -m lit_efficient {command.subcommand} -c {name:<16}  {summary(known()[name])}")
    raise ConfigurationError("\n".join([*lines, "`python -m lit_efficient configs` lists all configs"]))


@contextmanager
def explained(words: Sequence[str]) -> Iterator[None]:
    """Check the names in the words of a fit; then raise an error inside as one that says what to do.

    Raises:
        ConfigurationError: For bad input.
        OutOfMemoryError: If memory ran out inside.
    """
    check_names(["fit", *words])
    from lit_efficient.cli.errors import readable_errors

    with readable_errors():
        yield


def __getattr__(name: str) -> object:
    if name == "LitEfficientCLI":  # imports torch and Lightning
        from lit_efficient.cli.command_line import LitEfficientCLI

        return LitEfficientCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
