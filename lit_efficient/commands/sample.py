"""``python -m lit_efficient sample --ckpt FILE ... --output FILE.png | DIR``: sample images from diffusion models."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from lit_efficient.commands.prompts import add_model_options, check_ckpt, load_model, prompts_of
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
    image: Path | None = None  # image that the network sees
    mask: Path | None = None  # part of it to fill in, for inpainting


@dataclass
class Column:
    """Images of one model for each row of the grid: for each subject, one image a seed."""

    name: str  # of the checkpoint; "" if there is only one
    images: list[list[Any]]  # of each subject, for each seed: [C, H, W] uint8


def run(argv: Sequence[str]) -> int:
    """Run ``sample``."""
    parser = argparse.ArgumentParser(
        "lit_efficient sample",
        description="Sample images with the models of checkpoints. Adapters are applied, and the averaged weights of "
        "EMA or CheckpointAverage are used if the run kept them. The grid has a row per class or prompt and a column "
        "per seed and checkpoint. An image depends only on its class or prompt, its seed and the settings.",
    )
    add_model_options(parser, "checkpoints of LatentDiffusion", several=True)
    parser.add_argument(
        "--output", required=True, help="FILE.png for the grid, or a folder for the grid and all images"
    )
    parser.add_argument(
        "--classes", metavar="0,3,7", help="class numbers, also as ranges such as 0-9 (default: the first ten)"
    )
    texts = "texts, or one file with a text per line (default: the texts of the run)"
    parser.add_argument("--prompts", nargs="+", metavar="TEXT", help=texts)
    parser.add_argument("--negative", metavar="TEXT", help="negative prompt of all images (default: the run's)")
    seen = "images that the network sees (ControlNet, inpainting, editing): files or folders; each with each prompt"
    parser.add_argument("--images", nargs="+", metavar="PATH", help=seen)
    masks = "for inpainting: a mask for each image, white where it is filled in; files, or a folder with the same names"
    parser.add_argument("--masks", nargs="+", metavar="PATH", help=masks)
    parser.add_argument("--seeds", default="0-3", metavar="0,1,2", help="seeds, also as ranges (default: 0-3)")
    parser.add_argument("--guidance", type=float, help="guidance scale, 1 is none (default: the run's)")
    parser.add_argument("--steps", type=int, help="steps of the sampler (default: the run's)")
    names = "builtin, ddim, euler, heun, dpmsolver++ or a scheduler class of diffusers (default: the run's)"
    parser.add_argument("--sampler", help=names)
    options = "arguments of the scheduler class, such as use_karras_sigmas=true"
    parser.add_argument("--sampler_options", nargs="+", default=[], metavar="NAME=VALUE", help=options)
    before = "first draw the images of the network before training: the pretrained one, without adapters"
    parser.add_argument("--before", action="store_true", help=before)
    parser.add_argument("--batch_size", type=int, default=16, help="images at a time; does not change the images")
    arguments = parser.parse_args(argv)
    check_ckpt(arguments, "sample")
    seeds = numbers("--seeds", arguments.seeds)
    if arguments.classes is None:
        classes = None
    else:
        classes = numbers("--classes", arguments.classes)
    if arguments.prompts is None:
        prompts = None
    else:
        prompts = prompts_of(arguments.prompts, "sample", "only texts are supported")
    options_of(arguments.sampler_options)
    output = Path(arguments.output)
    grid = _grid_file(output)
    check_number("sample", "--batch_size", arguments.batch_size, least=1, whole=True)
    folder = grid.parent if grid != output else None
    subjects: list[Subject] = []
    columns: list[Column] = []
    settings: dict[str, Any] = {}
    files = _names(arguments.ckpt)
    for number, (ckpt, name) in enumerate(zip(arguments.ckpt, files)):
        model, about = _loaded(arguments, ckpt)
        if not subjects:  # the same for all checkpoints
            pictures = pictures_of(model, arguments.images, arguments.masks)
            subjects = [with_picture for one in subjects_of(model, classes, prompts) for with_picture in pictures(one)]
        settings = about if len(files) == 1 else {**about, "checkpoint": ", ".join(arguments.ckpt)}
        drawing = _Drawing(model, subjects, seeds, arguments, folder)
        if arguments.before and number == 0:
            with model.before_training():
                columns.append(drawing.column("before", {**about, "weights": "before training"}))
        columns.append(drawing.column(name, about))
        sizes = [list(column.images[0][0].shape) for column in columns]
        if sizes[-1] != sizes[0]:
            allowed = f"checkpoints whose images have one size ({sizes[0]} as those of {arguments.ckpt[0]})"
            raise refusal("sample", "--ckpt", allowed, f"{sizes[-1]} of {ckpt}")
    _write_grid(columns, subjects, seeds, grid, settings)
    count = len(columns) * len(subjects) * len(seeds)
    print(f"Wrote {grid}" if folder is None else f"Wrote {grid} and {count} images in the same folder")
    return 0


def _loaded(arguments: argparse.Namespace, ckpt: str) -> tuple[Any, dict[str, Any]]:
    """Return the model of a checkpoint with the settings of the command line, and all settings."""
    from lit_efficient.tasks.loading import load_latent_diffusion

    model, about = load_model(load_latent_diffusion, arguments, ckpt)
    if arguments.before:
        model.check_before_training()
    return model, about | _set(model, arguments)


def _names(ckpts: Sequence[str]) -> list[str]:
    """Return a short name of each checkpoint: the shortest ends of their paths that differ; "" for a single one."""
    if len(ckpts) == 1:
        return [""]
    parts = [Path(ckpt).absolute().with_suffix("").parts for ckpt in ckpts]
    if len(set(parts)) < len(parts):
        raise refusal("sample", "--ckpt", "different checkpoints", list(ckpts))
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def options_of(given: Sequence[str]) -> dict[str, bool | int | float | str]:
    """Return the options of a scheduler from texts such as ``use_karras_sigmas=true``, with their types.

    Raises:
        ConfigurationError: If a text has another form.
    """
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise refusal("sample", "--sampler_options", "NAME=VALUE, such as use_karras_sigmas=true", text)
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = {"True": True, "False": False}.get(value, value)
    return found


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
    given = prompts or dict.fromkeys(model.usual_prompts(_SHOWN))
    texts = [Subject(text or "(empty)", f"prompt_{i}", prompt=text) for i, text in enumerate(given)]
    if classes is None:  # the label after the last class means "no class"
        if count:
            return [replace(text, label=count) for text in texts]
        return texts
    both = [(one, text) for text in texts for one in by_class]
    return [replace(one, name=f"{one.name}: {t.name}", stem=f"{one.stem}_{t.stem}", prompt=t.prompt) for one, t in both]


def pictures_of(
    model: Any, images: Sequence[str] | None, masks: Sequence[str] | None
) -> Callable[[Subject], list[Subject]]:
    """Return a function that returns a row of the grid with each of the images that the network sees.

    Args:
        model: A ``LatentDiffusion``.
        images: Files or folders.
        masks: A folder with files of the same names, or a file for each image.

    Raises:
        ConfigurationError: If the network sees no images, or images or masks are missing.
    """
    condition = model.image_condition
    if condition is None:
        for option, given in (("--images", images), ("--masks", masks)):
            if given is not None:
                raise refusal("sample", option, "left out for a model without image_condition", list(given))
        return lambda subject: [subject]
    if images is None:
        allowed = f"files or folders of images, which the network sees (image_condition.kind {condition.kind})"
        raise refusal("sample", "--images", allowed, None)
    files = _image_files("--images", images)
    pairs: list[Path | None] = [None] * len(files)
    if condition.kind == "inpaint":
        if masks is None:
            raise refusal("sample", "--masks", "a mask for each image, because the network fills in a part", None)
        held = _image_files("--masks", masks)
        by_name = {path.stem: path for path in held}
        pairs = [by_name.get(path.stem) for path in files]
        if len(masks) == len(files) == len(held) and None in pairs:
            pairs = [*held]
        missing = [path.name for path, mask in zip(files, pairs) if mask is None]
        if missing:
            raise refusal("sample", "--masks", f"a mask for each image ({missing[0]} has none)", list(masks))
    elif masks is not None:
        raise refusal("sample", "--masks", f"left out for image_condition.kind {condition.kind}", list(masks))

    def with_pictures(subject: Subject) -> list[Subject]:
        rows = []
        for path, mask in zip(files, pairs):
            name = f"{path.stem}: {subject.name}" if subject.name else path.stem
            rows.append(replace(subject, name=name, stem=f"{path.stem}_{subject.stem}", image=path, mask=mask))
        return rows

    return with_pictures


def _image_files(option: str, paths: Sequence[str]) -> list[Path]:
    from PIL import Image

    found = []
    for path in map(Path, paths):
        if path.is_dir():
            known = Image.registered_extensions()
            found += sorted(one for one in path.iterdir() if one.suffix.lower() in known)
        elif path.is_file():
            found.append(path)
        else:
            raise refusal("sample", option, "files or folders that exist", str(path))
    if not found:
        raise refusal("sample", option, "at least one image", list(paths))
    stems = [path.stem for path in found]
    twice = [stem for stem in stems if stems.count(stem) > 1]
    if twice:
        raise refusal("sample", option, f"images of different names ({twice[0]} occurs twice)", list(paths))
    return found


def _pictures(model: Any, subjects: Sequence[Subject]) -> dict[str, Any]:
    """Return images and masks of rows, cropped to the size of the trained images."""
    import torch

    from lit_efficient.data.images.image_pixels import UnreadableImage
    from lit_efficient.data.images.image_view import ImageView

    if subjects[0].image is None:
        return {}
    size = tuple(model.codec.factor * side for side in model.latent_size)
    view = ImageView(channels="grey" if model.codec.image_channels == 1 else "rgb")

    def read(path: Path, look: Callable[..., Any]) -> Any:
        try:
            return look(path.read_bytes(), size, (0, 0), 0)
        except UnreadableImage as error:
            raise refusal("sample", "--images and --masks", f"images that can be read ({error})", str(path)) from error

    found = {"pictures": torch.stack([read(one.image, view.look) for one in subjects if one.image is not None])}
    masks = [read(one.mask, view.look_mask) for one in subjects if one.mask is not None]
    if masks:
        found["masks"] = torch.stack(masks)
    return found


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

    sampler = model.sampler
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
    name = arguments.sampler
    options = options_of(arguments.sampler_options)
    if name is not None:
        if not name.endswith("Scheduler"):
            check_choice("sample", "--sampler", name, get_args(SamplerName))
        sampler = model.settings.sampler(replace(sampler, name=name, options=None), model.process)
    if options:
        if not sampler.names_class:
            allowed = "left out unless the sampler is a scheduler class of diffusers, such as UniPCMultistepScheduler"
            raise refusal("sample", "--sampler_options", allowed, arguments.sampler_options)
        sampler = replace(sampler, options={**(sampler.options or {}), **options})
    check_sampler(model.process, sampler, model.prediction)
    check_steps(model.process, sampler, model.sampling_steps, model.prediction)
    model.sampler = sampler
    if arguments.negative is not None:
        unused = not model.shape.takes_text or model.guidance_scale == 1
        if unused:
            allowed = "left out for a network without text, and without guidance (--guidance 1)"
            raise refusal("sample", "--negative", allowed, arguments.negative)
    model.check_sample_images()
    return {"sampler": sampler.name, "guidance": model.guidance_scale, "steps": model.sampling_steps}


class _Drawing:
    """Draws the images of a model, and writes each into a folder if one is given."""

    def __init__(
        self,
        model: Any,
        subjects: Sequence[Subject],
        seeds: Sequence[int],
        arguments: argparse.Namespace,
        folder: Path | None,
    ) -> None:
        self.model = model
        self.subjects = subjects
        self.seeds = seeds
        self.negative = arguments.negative
        self.at_once = arguments.batch_size
        self.folder = folder

    def column(self, name: str, about: dict[str, Any]) -> Column:
        """Draw all images. ``name`` is that of the checkpoint, and ``about`` its settings."""
        asked = [(subject, seed) for subject in self.subjects for seed in self.seeds]
        images: list[Any] = []
        for start in range(0, len(asked), self.at_once):
            some = asked[start : start + self.at_once]
            labels = [subject.label for subject, _ in some]
            prompts = [subject.prompt for subject, _ in some]
            images += self.model.draw_images(
                [seed for _, seed in some],
                labels=None if None in labels else labels,
                captions=None if None in prompts else prompts,
                negative=self.negative,
                **_pictures(self.model, [subject for subject, _ in some]),
            )
            for (subject, seed), image in zip(some, images[start:]):
                self._write(image, subject, seed, name, about)
            if sys.stderr.isatty():
                print(f"\r{name} {len(images)} of {len(asked)} images", end="", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        count = len(self.seeds)
        return Column(name, [images[start : start + count] for start in range(0, len(images), count)])

    def _write(self, image: Any, subject: Subject, seed: int, name: str, about: dict[str, Any]) -> None:
        if self.folder is None:
            return
        from lit_efficient.files.pictures import draw_grid, write_picture

        seen = None if subject.image is None else str(subject.image)
        notes = {
            "class": subject.label,
            "image": seen,
            "prompt": subject.prompt,
            "seed": seed,
            "negative": self.negative,
        }
        notes = about | {key: value for key, value in notes.items() if value is not None}
        ending = f"_{name.replace('/', '_')}" if name else ""
        write_picture(draw_grid(image[None], 1), self.folder / f"{subject.stem}_seed_{seed}{ending}.png", notes)


def _write_grid(
    columns: Sequence[Column], subjects: Sequence[Subject], seeds: Sequence[int], grid: Path, about: Any
) -> None:
    """Write a row for each subject. Images of one seed by all checkpoints are beside each other."""
    import torch

    from lit_efficient.files.pictures import draw_grid, write_picture

    images = []
    for row in range(len(subjects)):
        for place in range(len(seeds)):
            images += [column.images[row][place] for column in columns]
    heads = []
    for seed in seeds:
        for column in columns:
            words = [column.name or ("trained" if len(columns) > 1 else "")]
            if len(columns) == 1 or len(seeds) > 1:
                words.append(f"seed {seed}")
            heads.append(", ".join(word for word in words if word))
    zoom = max(1, -(-_LEGIBLE // max(images[0].shape[1:])))
    names = [subject.name for subject in subjects if subject.name]
    write_picture(draw_grid(torch.stack(images), len(heads), zoom, rows=names, heads=heads), grid, about)
