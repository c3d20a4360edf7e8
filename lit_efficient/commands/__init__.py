"""Subcommands that need no trainer: one file each, with ``run(argv) -> int``."""
