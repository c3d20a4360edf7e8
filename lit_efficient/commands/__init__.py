"""Subcommands of ``python -m lit_efficient`` that are not Lightning's: each file has ``run(argv) -> exit code``.

``argv`` is what follows the subcommand's name. Errors are raised: the caller prints those that the user can mend.
"""

RUNS = ("fit", "validate", "test", "predict")
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
    "generate",
    "sample",
    "tokenizer",
    "write-data",
    "completion",
    "schema",
    "check",
    "plan",
    "verify",
    "compare",
    "tune",
)
