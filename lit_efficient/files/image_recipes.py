"""Recipes of image models for cards: a config, the first rung of a ladder of overlays that fits, and the planned peak.

``image_recipes.json`` holds one row for each config, rung and batch size. `python -m benchmarks.image_recipes` writes
it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lit_efficient.files.recipes import USABLE

TABLE = Path(__file__).parents[1] / "image_recipes.json"
CARDS = (8, 12, 16, 24)  # gigabytes
_MIXED = ("--trainer.precision", "bf16-mixed")
LADDERS: Mapping[str, Mapping[str, str | None]] = {
    "adapters": {
        "bfloat16": None,
        "checkpointing": "activation_checkpointing",
        "4-bit base": "quantize_base",
        "block swap": "block_swap",
    },
    "branch": {
        "bfloat16": None,
        "checkpointing": "activation_checkpointing",
        "8-bit AdamW": "low_bit_optimizer",
        "bfloat16 weights": "stochastic_rounding",
        "4-bit base": "quantize_base",
        "block swap": "block_swap",
    },
    "all": {
        "bfloat16": None,
        "checkpointing": "activation_checkpointing",
        "8-bit AdamW": "low_bit_optimizer",
        "bfloat16 weights": "stochastic_rounding",
    },
}
"""For what trains: the rungs and the overlay that each of them adds to those of the rungs before it."""
TRAINED: Mapping[str, str] = {
    "diffusion/lora_sd15": "adapters",
    "diffusion/textual_inversion": "adapters",
    "diffusion/inpaint": "all",
    "diffusion/lora_sdxl": "adapters",
    "diffusion/dreambooth_sdxl": "adapters",
    "diffusion/controlnet_sdxl": "branch",
    "diffusion/lora_sd3": "adapters",
    "diffusion/lora_flux": "adapters",
    "diffusion/dreambooth_flux": "adapters",
}
"""Configs, and what trains in them."""


@dataclass(frozen=True)
class ImageRecipe:
    """A way to train an image model.

    Args:
        config: Name of the config.
        model: Name of the pipeline on the Hugging Face hub.
        rung: Name of a rung of the ladder. It includes the rungs before it.
        resolution: Side of an image in pixels.
        batch_size: Images of a batch.
        peak: Planned peak of device memory in bytes.
    """

    config: str
    model: str
    rung: str
    resolution: int
    batch_size: int
    peak: int

    def overlays(self) -> list[str]:
        """Return the overlays of the rung and of those before it."""
        found = []
        for rung, overlay in ladder(self.config).items():
            if overlay is not None:
                found.append(overlay)
            if rung == self.rung:
                break
        return found

    def options(self) -> list[str]:
        """Return the options of ``fit``, ``plan`` and ``preview``."""
        words = [word for name in (self.config, *self.overlays()) for word in ("-c", name)]
        if "stochastic_rounding" not in self.overlays():  # which sets bf16-true
            words += _MIXED
        settings: dict[str, object] = {"model.backbone.name_or_path": self.model}
        if TRAINED[self.config] != "all":
            settings["model.backbone.dtype"] = "bfloat16"  # of the frozen base
        settings["data.images.view.resolution"] = self.resolution
        settings["data.images.batch_size"] = self.batch_size
        for name, value in settings.items():
            words += [f"--{name}", str(value)]
        return words


def ladder(config: str) -> Mapping[str, str | None]:
    """Return the rungs of a config, and the overlay that each of them adds."""
    return LADDERS[TRAINED[config]]


def image_recipes() -> list[ImageRecipe]:
    """Return all recipes, in the order of configs, rungs and batch sizes."""
    return [ImageRecipe(**row) for row in json.loads(TABLE.read_text("utf-8"))]


def fitting_images(memory: int, among: list[ImageRecipe] | None = None) -> list[ImageRecipe]:
    """Return for each config the first rung that fits in ``memory`` bytes, with the largest batch that fits there."""
    found: dict[str, ImageRecipe] = {}
    for recipe in image_recipes() if among is None else among:
        first = found.setdefault(recipe.config, recipe) if recipe.peak <= USABLE * memory else None
        if first is not None and first.rung == recipe.rung:
            found[recipe.config] = recipe
    return list(found.values())
