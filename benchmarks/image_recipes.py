"""Plan the recipes of image models for cards of 8 to 24 GB, and write the table that `configs --for 12GB` prints.

    python -m benchmarks.image_recipes            plans what the table lacks
    python -m benchmarks.image_recipes --again    plans all

Each config climbs a ladder of overlays (`lit_efficient/files/image_recipes.py`) until it fits in the smallest card. The
configurations of the pipelines are in `records/pipeline_shapes.json`: the fields of the published ones that differ from
the defaults of diffusers and transformers, and the number of parameters of the trained network. Schedulers and classes
are those of `tiny:FAMILY`, and so are the tokenizers, whose captions have the same length.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.recipes import write_rows
from lit_efficient.cli.fits import ConfigFit
from lit_efficient.evidence.planning.plan import Plan, plan
from lit_efficient.files.image_recipes import (
    CARDS,
    TABLE,
    TRAINED,
    ImageRecipe,
    image_recipes,
    ladder,
)
from lit_efficient.files.recipes import USABLE
from lit_efficient.mechanisms.trials.steps import quiet
from lit_efficient.models.libraries.tiny_pipelines import local_name

SHAPES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "records" / "pipeline_shapes.json").read_text())
BATCHES = (1, 4)
LEAST = {"adapters": 2.0, "branch": 9.5, "all": 16.0}
"""What trains, and the fewest bytes of a parameter of the pipeline's network before rungs that save bytes of it."""
LIKE = {"diffusion/dreambooth_sdxl": "diffusion/lora_sdxl", "diffusion/dreambooth_flux": "diffusion/lora_flux"}
"""Configs whose peaks are those of others: the same step, apart from one weight for each image, and fewer adapters."""
_GROWTH = 0.9  # least share of the activations of one image that each further image needs
_MODELS = {shape["family"]: name for name, shape in SHAPES.items()}
_FAMILIES = {config: config.rpartition("_")[2] for config in TRAINED}
_FAMILIES |= {"diffusion/textual_inversion": "sd15", "diffusion/inpaint": "sd15"}


def write_pipeline(name: str, folder: Path) -> None:
    """Write a pipeline's folder without weights."""
    import diffusers

    shape = SHAPES[name]
    tiny = local_name(f"tiny:{shape['family']}")
    assert tiny is not None
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    for part, fields in shape["parts"].items():
        file = folder / part / "config.json"
        written = json.loads(file.read_text())
        kept = {key: written[key] for key in ("_class_name", "architectures", "model_type") if key in written}
        if "_class_name" in kept:  # diffusers writes the defaults, too
            defaults = inspect.signature(getattr(diffusers, kept["_class_name"]).__init__).parameters
            kept = {key: one.default for key, one in defaults.items() if key != "self"} | kept
        file.write_text(json.dumps(kept | fields))


def planned(recipe: ImageRecipe) -> Plan:
    """Return the plan of a recipe on a GPU."""
    with tempfile.TemporaryDirectory() as folder, quiet(warns=False):
        write_pipeline(recipe.model, Path(folder))
        options = [*replace(recipe, model=folder).options(), "--trainer.accelerator=cpu"]
        return plan(ConfigFit(options, folder, "meta"), device="cuda")


def climb(config: str, known: dict[tuple[str, str, int], int]) -> list[ImageRecipe]:
    """Return the rows of a config: each rung that is the first one to fit in some card, and the rungs below it.

    Args:
        config: Name of the config.
        known: Peaks of rows that are planned already, by config, rung and batch size. New ones are added.
    """
    model = _MODELS[_FAMILIES[config]]
    shape = SHAPES[model]
    left = [int(USABLE * card * 1e9) for card in CARDS]  # cards in which no rung fits so far
    rows = []
    for rung in ladder(config):
        each = math.inf  # bytes of an image, at least; of rows of the table, larger batches were tried before
        for batch in BATCHES:
            row = ImageRecipe(config, model, rung, shape["resolution"], batch, 0)
            key = (config, rung, batch)
            least = LEAST[TRAINED[config]] * shape["parameters"]
            if batch > 1:
                least = rows[-1].peak + each * (batch - rows[-1].batch_size)
            elif {"quantize_base", "low_bit_optimizer"} & {*row.overlays()}:
                least = 0.0
            if key not in known:
                if least > max(left):
                    break
                plan = planned(row)
                print(*key, f"{plan.peak / 1e9:.2f} GB", flush=True)
                known[key] = plan.peak
                each = _GROWTH * plan.kinds["activations"] / batch
            rows.append(replace(row, peak=known[key]))
        fits = [row.peak for row in rows if row.rung == rung and row.batch_size == 1]
        left = [size for size in left if not fits or fits[0] > size]
        if not left:
            break
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan the recipes of image models.")
    parser.add_argument("--again", action="store_true", help="also plan what the table has")
    parser.add_argument("--only", nargs="*", metavar="CONFIG", help="plan these configs, and keep the rows of others")
    options = parser.parse_args()
    rows = image_recipes() if TABLE.is_file() else []
    known = {} if options.again else {(row.config, row.rung, row.batch_size): row.peak for row in rows}
    for config in options.only or TRAINED:
        found = [replace(row, config=config) for row in climb(LIKE.get(config, config), known)]
        rows = [row for row in (image_recipes() if TABLE.is_file() else []) if row.config != config] + found
        rows.sort(key=lambda row: list(TRAINED).index(row.config))  # stable: rungs and batches keep their order
        write_rows(TABLE, [vars(row) for row in rows])


if __name__ == "__main__":
    main()
