"""The recipes of README and docs as one file for the type checker: ``python -m tests.recipes`` writes it."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / "build" / "readme_recipes.py"
GIVEN = """\
from lightning.pytorch import LightningDataModule, LightningModule

your_module = LightningModule()
your_data = LightningDataModule()
"""


def text() -> str:
    """What a recipe takes for granted, then each recipe in a function of its own."""
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    recipes = [
        each for path in documents for each in re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL)
    ]
    assert recipes
    bodies = ["".join(f"    {line}\n" for line in recipe.splitlines()) for recipe in recipes]
    return GIVEN + "".join(f"\n\ndef recipe_{number}() -> None:\n{body}" for number, body in enumerate(bodies))


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")
