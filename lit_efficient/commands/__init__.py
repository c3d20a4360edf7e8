"""Subcommands of ``python -m lit_efficient``. Each file has ``run(argv) -> exit code``.

``argv`` holds the words after the subcommand's name. Commands raise errors, and the caller prints user errors.
"""

from lit_efficient.cli.words import RUNS as RUNS

COMMANDS = (
    "techniques",
    "configs",
    "copy",
    "report",
    "preview",
    "cache-latents",
    "average",
    "convert",
    "ema-sweep",
    "export",
    "evaluate",
    "generate",
    "sample",
    "tokenizer",
    "write-data",
    "select-data",
    "completion",
    "schema",
    "new-technique",
    "check",
    "plan",
    "verify",
    "compare",
    "tune",
    "sweep",
)
