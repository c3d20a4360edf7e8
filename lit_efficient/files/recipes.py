"""Recipes: pretrained models and methods of training with the memory that ``plan`` predicts, and their command lines.

``recipes.json`` holds one row for each model, method and batch size. `python -m benchmarks.recipes` writes it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).parents[1] / "recipes.json"
ROWS_OF_STEP = 16  # rows of an optimizer step
USABLE = 0.9  # share of a device's memory; the rest is for CUDA's context and for scratch memory, which plans lack
CONFIGS: Mapping[str, tuple[str, ...]] = {
    "full": ("llm/recipe", "llm/recipe_full"),
    "lora": ("llm/recipe",),
    "qlora": ("llm/recipe", "quantize_base"),
}
"""Configs of each method, most general first."""


@dataclass(frozen=True)
class Recipe:
    """A way to train a model.

    Args:
        model: Name on the Hugging Face hub.
        family: Name of the model's family.
        method: ``full``, ``lora`` or ``qlora``.
        max_length: Tokens of a row.
        batch_size: Rows of a batch.
        peak: Planned peak of device memory in bytes.
        frozen: Parts that do not train, such as the vision tower of a model that reads texts alone.
    """

    model: str
    family: str
    method: str
    max_length: int
    batch_size: int
    peak: int
    frozen: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """Return the options of ``fit``, ``plan`` and ``preview``."""
        words = [word for name in CONFIGS[self.method] for word in ("-c", name)]
        settings: dict[str, object] = {"model.model.name_or_path": self.model, "data.tokenizer": self.model}
        if self.frozen:
            settings["model.model.frozen"] = json.dumps(self.frozen)
        if self.batch_size > 1:
            settings["data.batch_size"] = self.batch_size
            settings["trainer.accumulate_grad_batches"] = ROWS_OF_STEP // self.batch_size
        for name, value in settings.items():
            words += [f"--{name}", str(value)]
        return words


def recipes() -> list[Recipe]:
    """Return all recipes, sorted by family, size of the model, method and batch size."""
    rows = json.loads(TABLE.read_text("utf-8"))
    return [Recipe(**{**row, "frozen": tuple(row.get("frozen", ()))}) for row in rows]


def fitting(memory: int) -> list[Recipe]:
    """Return for each model and method the recipe with the largest batch that fits in ``memory`` bytes."""
    found: dict[tuple[str, str], Recipe] = {}
    for recipe in recipes():
        if recipe.peak <= USABLE * memory:
            found[recipe.model, recipe.method] = recipe
    return list(found.values())
