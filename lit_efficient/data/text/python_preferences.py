"""A small preference set that every machine has: the body of a function of Python's standard library, or another's.

    prompt: signature and docstring;   chosen: the function's own body;   rejected: the next function's body

Made from :mod:`lit_efficient.data.text.python_instructions`, the same on every machine with the same Python. Every
body is preferred once and rejected once, so that no body is right or wrong by itself: only the docstring tells.
"""

import functools
from typing import Any

from lit_efficient.data.text.python_instructions import instructions

STDLIB_PREFERENCES = "stdlib-preferences"


@functools.cache
def preferences() -> list[dict[str, Any]]:
    """The rows, as ``{"prompt": [user], "chosen": [assistant], "rejected": [assistant]}``."""
    rows = [row["messages"] for row in instructions()]
    return [
        {"prompt": [user], "chosen": [answer], "rejected": [other]}
        for (user, answer), (_, other) in zip(rows, rows[1:] + rows[:1])
    ]
