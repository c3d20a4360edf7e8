"""Subcommands of ``python -m lit_efficient`` that are not Lightning's: each file has ``run(argv) -> int``."""
