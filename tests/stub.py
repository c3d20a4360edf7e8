"""What type checkers and editors read: ``python -m tests.stub`` writes the stub from the list of public names."""

from lit_efficient import PUBLIC
from lit_efficient.catalog import PACKAGE

STUB = PACKAGE / "__init__.pyi"


def text() -> str:
    lines = [f"from lit_efficient.{module} import {name} as {name}" for name, module in PUBLIC.items()]
    head = "# The names of __init__.py for type checkers; written by: python -m tests.stub"
    return "\n".join([head, *lines, "", "PUBLIC: dict[str, str]", "__version__: str", ""])


if __name__ == "__main__":
    STUB.write_text(text(), encoding="utf-8")
