"""Subcommands, and the names of options as people write them."""

from collections.abc import Sequence

RUNS = ("fit", "validate", "test", "predict")


def plain(name: str) -> str:
    """Return the name of an option with ``_`` alone: ``-`` and ``_`` are the same in it."""
    if not name.startswith("--"):
        return name
    return "--" + name[2:].replace("-", "_")


def spelt(words: Sequence[str]) -> list[str]:
    """Return words in which the names of options have ``_`` alone."""
    result = []
    for word in words:
        name, equals, value = word.partition("=")
        result.append(f"{plain(name)}{equals}{value}")
    return result
