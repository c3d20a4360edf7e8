"""``python -m lit_efficient configs``: list the configs of the package, by folder, or recipes that fit on a device."""

import argparse
import itertools
import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from lit_efficient.errors import parse_bytes
from lit_efficient.files import configs
from lit_efficient.files.image_recipes import ImageRecipe, fitting_images
from lit_efficient.files.recipes import USABLE, Recipe, fitting, recipes

_TITLES = {
    "tasks": "complete runs",
    "techniques": "overlays to append to a run: -c language_model -c ema",
    "loggers": "overlays",
}


def run(argv: Sequence[str]) -> int:
    """Run ``configs``."""
    parser = argparse.ArgumentParser(
        "lit_efficient configs",
        description="List the configs of the package. `fit -c NAME` runs one, `copy NAME` writes one into a file.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print a mapping of names to summaries and paths")
    parser.add_argument(
        "--for",
        dest="memory",
        metavar="24GB",
        help="list recipes of pretrained language models and image models that fit in this much device memory, with "
        "their command lines",
    )
    options = parser.parse_args(argv)
    if options.memory is not None:
        memory = parse_bytes(options.memory, "configs", "--for")
        found = fitting(memory)
        images = fitting_images(memory)
        if options.json:
            every: list[Recipe | ImageRecipe] = [*found, *images]
            print(json.dumps([{**vars(recipe), "command": command(recipe)} for recipe in every], indent=2))
        else:
            print("\n".join([*recipe_lines(found, options.memory), "", *image_lines(images, options.memory)]))
    elif options.json:
        entries = {
            name: {"summary": configs.summary(path), "path": str(path)} for name, path in configs.known().items()
        }
        print(json.dumps(entries, indent=2))
    else:
        print("\n".join(lines(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)))
    return 0


def command(recipe: Recipe | ImageRecipe) -> str:
    """Return the command that trains a recipe."""
    return shlex.join(["python", "-m", "lit_efficient", "fit", *recipe.options()])


def recipe_lines(found: Sequence[Recipe], memory: str) -> Iterator[str]:
    """Yield the lines of a list of recipes that fit on a device."""
    if not found:
        yield f"no recipe fits in {memory}; `plan -c llm/recipe` plans other models, row lengths and techniques"
        return
    planned = {(recipe.model, recipe.method) for recipe in recipes()}
    for (family, model), group in itertools.groupby(found, lambda recipe: (recipe.family, recipe.model)):
        yield f"{family}: {model}"
        for recipe in group:
            rows = f"{recipe.batch_size} x {recipe.max_length:,} tokens"
            yield f"  {recipe.method:<6} {rows:<18} planned peak {recipe.peak / 1e9:.1f} GB"
            yield f"    {command(recipe)}"
        if (model, "qlora") not in planned:
            yield "  qlora  not planned: its experts are floats until QuantizeBase(experts=True) quantises them"
    yield ""
    yield "full: all weights; lora: adapters; qlora: adapters on a base in 4 bits. Write your rows to data/train.jsonl,"
    yield f"or add --data.train PATH. Planned peaks are at most {USABLE:.0%} of the memory. With `plan` for `fit`,"
    yield "--solve max_length and --solve train_batch_size search for the largest values that fit."


def image_lines(found: Sequence[ImageRecipe], memory: str) -> Iterator[str]:
    """Yield the lines of a list of recipes of image models that fit on a device."""
    if not found:
        yield f"no recipe of an image model fits in {memory}"
        return
    for model, group in itertools.groupby(found, lambda recipe: recipe.model):
        yield model
        for recipe in group:
            images = f"{recipe.batch_size} x {recipe.resolution} pixels"
            yield f"  {recipe.config:<27} {recipe.rung:<16} {images:<16} planned peak {recipe.peak / 1e9:.1f} GB"
            yield f"    {command(recipe)}"
    yield ""
    yield "See docs/fine_tuning_diffusion.md, What fits on a card. Without your photographs (--data.images.train, or a"
    yield "copy of the config) these commands train on 15 small ones. Planned peaks are those of training steps, not of"
    yield "the cache of latents and of samples."


def lines(width: int | None) -> Iterator[str]:
    """Yield the lines of the list, wrapped to ``width`` columns if a width is given."""
    known = configs.known()
    column = max(map(len, known), default=0) + 4
    for folder, names in itertools.groupby(known, lambda name: known[name].parent.name):
        yield f"{folder}: {_TITLES[folder]}" if folder in _TITLES else folder
        for name in names:
            text = configs.summary(known[name])
            first, *more = textwrap.wrap(text, max(30, width - column)) if width else [text]
            yield f"  {name:<{column - 2}}{first}"
            yield from (" " * column + line for line in more)
    yield from ("", f"Folder: {configs.folder()}. `copy NAME` writes a config into a file of yours to edit.")
