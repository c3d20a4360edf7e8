"""``python -m lit_efficient sample --ckpt FILE --output FILE.png | DIR``: sample images from a diffusion model."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from lit_efficient.commands.prompts import add_model_options, load_model, prompts_of
from lit_efficient.errors import check_choice, check_number, refusal

_SHOWN = 10  # default number of classes and of prompts
_LEGIBLE = 96  # smallest side of an image in the grid, in pixels
_MOST = 100_000  # largest count of numbers in one option


@dataclass(frozen=True)
class Subject:
    """Condition of a row of the grid: its caption, the stem of its files, and the model's inputs."""

    name: str
    stem: str
    label: int | None = None
    prompt: str | None = None


def run(argv: Sequence[str]) -> int:
    """Run ``sample``."""
    parser = argparse.ArgumentParser(
        "lit_efficient sample",
        description="Sample images with the model of a checkpoint. Adapters are applied, and the averaged weights of "
        "EMA or CheckpointAverage are used if the run kept them. The grid has a row per class or prompt and a column "
        "per seed. An image depends only on its class or prompt, its seed and the settings.",
    )
    add_model_options(parser, "a checkpoint of LatentDiffusion")
    parser.add_argument(
        "--output", required=True, help="FILE.png for the grid, or a folder for the grid and all images"
    )
    parser.add_argument(
        "--classes", metavar="0,3,7", help="class numbers, also as ranges such as 0-9 (default: the first ten)"
    )
    texts = "texts, or one file with a text per line (default: the texts of the run)"
    parser.add_argument("--prompts", nargs="+", metavar="TEXT", help=texts)
    parser.add_argument("--seeds", default="0-3", metavar="0,1,2", help="seeds, also as ranges (default: 0-3)")
    parser.add_argument("--guidance", type=float, help="guidance scale, 1 is none (default: the run's)")
    parser.add_argument("--steps", type=int, help="steps of the sampler (default: the run's)")
    parser.add_argument("--sampler", help="builtin, ddim, euler, heun or dpmsolver++ (default: the run's)")
    parser.add_argument("--batch_size", type=int, default=16, help="images at a time; does not change the images")
    arguments = parser.parse_args(argv)
    seeds = numbers("--seeds", arguments.seeds)
    if arguments.classes is None:
        classes = None
    else:
        classes = numbers("--classes", arguments.classes)
    if arguments.prompts is None:
        prompts = None
    else:
        prompts = prompts_of(arguments.prompts, "sample", "only texts are supported")
    output = Path(arguments.output)
    grid = _grid_file(output)
    check_number("sample", "--batch_size", arguments.batch_size, least=1, whole=True)
    from lit_efficient.tasks.loading import load_latent_diffusion

    model, about = load_model(load_latent_diffusion, arguments)
    about |= _set(model, arguments)
    subjects = subjects_of(model, classes, prompts)
    folder = grid.parent if grid != output else None
    images = _draw(model, subjects, seeds, arguments.batch_size, folder, about)
    _write_grid(images, subjects, seeds, grid, about)
    print(f"Wrote {grid}" if folder is None else f"Wrote {grid} and {len(images)} images in the same folder")
    return 0


def numbers(option: str, text: str) -> list[int]:
    """Return the numbers in a text such as ``0,3,7-9``.

    Raises:
        ConfigurationError: If the text has another form or too many numbers; the message names the option.
    """
    found: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part)
        first = int(span[1]) if span else 1
        last = int(span[2] or span[1]) if span else 0  # without a match: an empty range, which is refused
        if last < first or last - first + len(found) >= _MOST:
            raise refusal("sample", option, f"numbers and ranges such as 0,3,7 or 0-9, at most {_MOST:,}", text)
        found += range(first, last + 1)
    return found


def subjects_of(model: Any, classes: Sequence[int] | None, prompts: Sequence[Any] | None) -> list[Subject]:
    """Return the conditions of the grid's rows; for a model with classes and text, each prompt with each class.

    Args:
        model: A ``LatentDiffusion``.
        classes: Class numbers, or None for the default.
        prompts: Texts, or None for the default.

    Raises:
        ConfigurationError: If the model does not take classes or text, or has fewer classes.
    """
    count = model.shape.num_classes
    name = model.shape.name
    if classes is not None and not count:
        raise refusal("sample", "--classes", f"left out for {name}, which takes no classes", list(classes))
    if prompts is not None and not model.shape.takes_text:
        raise refusal("sample", "--prompts", f"left out for {name}, which takes no text", list(prompts))
    if classes is not None and max(classes) >= count:
        raise refusal("sample", "--classes", f"in 0 to {count - 1}", max(classes))
    names = {i: model.class_label(i) for i in classes or range(min(count, _SHOWN))}
    by_class = [Subject(f"class {i}" if name == str(i) else name, f"class_{i}", i) for i, name in names.items()]
    if not model.shape.takes_text:
        return by_class or [Subject("", "image")]
    given = prompts or dict.fromkeys(model.in_turn(_SHOWN)["captions"])
    texts = [Subject(text or "(empty)", f"prompt_{i}", prompt=text) for i, text in enumerate(given)]
    if classes is None:  # the label after the last class means "no class"
        if count:
            return [replace(text, label=count) for text in texts]
        return texts
    both = [(one, text) for text in texts for one in by_class]
    return [replace(one, name=f"{one.name}: {t.name}", stem=f"{one.stem}_{t.stem}", prompt=t.prompt) for one, t in both]


def _grid_file(output: Path) -> Path:
    from PIL import Image

    if output.suffix.lower() == ".png" and not output.is_dir():
        return output
    if output.is_file() or output.suffix.lower() in Image.registered_extensions():
        raise refusal("sample", "--output", "a file that ends in .png, or a folder", str(output))
    return output / "grid.png"


def _set(model: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Set the options of the command line on the model and check them; return all settings."""
    from lit_efficient.losses.diffusers_sampling import check_sampler, check_steps
    from lit_efficient.losses.diffusion_sampling import SamplerName

    if arguments.guidance is not None:
        check_number("sample", "--guidance", arguments.guidance, least=0)
        unguided = None
        if not model.shape.conditions:
            unguided = f"{model.shape.name}, which takes no conditions"
        elif not model.label_dropout:
            unguided = "a network that was trained with label_dropout 0"
        if unguided and arguments.guidance != 1.0:
            raise refusal("sample", "--guidance", f"1 for {unguided}", arguments.guidance)
        model.guidance_scale = arguments.guidance
    if arguments.steps is not None:
        check_number("sample", "--steps", arguments.steps, least=1, whole=True)
        model.sampling_steps = arguments.steps
    if arguments.sampler is not None:
        check_choice("sample", "--sampler", arguments.sampler, get_args(SamplerName))
        model.sampler = replace(model.sampler, name=arguments.sampler)
    check_sampler(model.process, model.sampler, model.prediction)
    check_steps(model.process, model.sampler, model.sampling_steps)
    model.check_sample_images()
    return {"sampler": model.sampler.name, "guidance": model.guidance_scale, "steps": model.sampling_steps}


def _draw(
    model: Any, subjects: Sequence[Subject], seeds: Sequence[int], at_once: int, folder: Path | None, about: Any
) -> list[Any]:
    """Return all images row by row, each [C, H, W] uint8; write each into ``folder``, if one is given."""
    from lit_efficient.files.pictures import draw_grid, write_picture

    asked = [(subject, seed) for subject in subjects for seed in seeds]
    images: list[Any] = []
    for start in range(0, len(asked), at_once):
        some = asked[start : start + at_once]
        labels = [subject.label for subject, _ in some]
        prompts = [subject.prompt for subject, _ in some]
        images += model.draw_images(
            [seed for _, seed in some],
            labels=None if None in labels else labels,
            captions=None if None in prompts else prompts,
        )
        for (subject, seed), image in zip(some, images[start:]):
            if folder is None:
                break
            notes = {"class": subject.label, "prompt": subject.prompt, "seed": seed}
            notes = about | {name: value for name, value in notes.items() if value is not None}
            write_picture(draw_grid(image[None], 1), folder / f"{subject.stem}_seed_{seed}.png", notes)
        if sys.stderr.isatty():
            print(f"\r{len(images)} of {len(asked)} images", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return images


def _write_grid(images: list[Any], subjects: Sequence[Subject], seeds: Sequence[int], grid: Path, about: Any) -> None:
    import torch

    from lit_efficient.files.pictures import draw_grid, write_picture

    zoom = max(1, -(-_LEGIBLE // max(images[0].shape[1:])))
    names = [subject.name for subject in subjects if subject.name]
    heads = [f"seed {seed}" for seed in seeds]
    write_picture(draw_grid(torch.stack(images), len(seeds), zoom, rows=names, heads=heads), grid, about)
