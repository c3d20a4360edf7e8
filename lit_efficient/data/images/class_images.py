"""Class images of prior preservation, made once by a pipeline of diffusers.

    cache/class_images/KEY/00000.png, 00001.png, ...    KEY = hash(pipeline, prompt, size, steps, guidance, seed, dtype)

The noise of an image depends on its number and the seed alone. Images that exist are not made again, so an interrupted
run goes on, and a larger number adds images.

Costs: one run of the pipeline for each image, before training
Source: Ruiz et al. (2022), https://arxiv.org/abs/2208.12242; https://github.com/huggingface/diffusers,
    examples/dreambooth
"""

import gc
import shutil
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info

from lit_efficient.errors import ConfigurationError, check_number, checks_types, refusal
from lit_efficient.files.atomic_file import replacing
from lit_efficient.files.cache import cache_folder, prepared_folder
from lit_efficient.files.file_hashes import hash_files
from lit_efficient.internals.hugging_face import bars_on_terminals
from lit_efficient.mechanisms.order.resumable_sampler import mix_seed
from lit_efficient.models.libraries.config_fields import files_variant
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.pipeline_folder import pipeline_index, pipeline_root
from lit_efficient.surgery import own_draws


@checks_types
@dataclass(frozen=True)
class ClassImages:
    """Class images to make.

    Args:
        number: Number of class images in all. Only those that ``images`` of the set lacks are made.
        pipeline: Folder or hub name of a pipeline of diffusers, or ``tiny:FAMILY``. null: the pipeline from which the
            trained network comes.
        steps: Steps of the sampler. null: those of the pipeline.
        guidance_scale: Guidance scale. null: that of the pipeline.
        negative: Negative prompt, for pipelines that take one.
        batch_size: Images that are made together.
        seed: Seed of the noise.
        dtype: Number format of the weights.
    """

    number: int = 100
    pipeline: str | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    negative: str | None = None
    batch_size: int = 4
    seed: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self) -> None:
        check_number("ImageData", "generate.number", self.number, least=1, whole=True)
        check_number("ImageData", "generate.steps", self.steps, least=1, whole=True, null=True)
        check_number("ImageData", "generate.guidance_scale", self.guidance_scale, least=0, null=True)
        check_number("ImageData", "generate.batch_size", self.batch_size, least=1, whole=True)
        check_number("ImageData", "generate.seed", self.seed, least=0, whole=True)

    def network(self, trained: object) -> DiffusersModelConfig:
        """Return the description of the pipeline; ``trained`` is that of the trained network.

        Raises:
            ConfigurationError: If there is no pipeline.
        """
        found = trained
        if self.pipeline is not None:
            found = DiffusersModelConfig(self.pipeline)
        if isinstance(found, DiffusersModelConfig) and not found.draws_weights:
            place, _ = pipeline_root(found.place, found.subfolder)
            if pipeline_index(place, found.revision) is not None:
                return found
        raise refusal(
            "ImageData",
            "generate.pipeline",
            "the folder or name of a pipeline of diffusers, if the trained network comes from none",
            self.pipeline,
        )

    def folder(self, trained: object, prompt: str, side: int, cache_dir: str | None) -> Path:
        """Return the folder of the images of a prompt, with ``side`` squared pixels."""
        spec = self.network(trained)
        root = Path(spec.name_or_path or "").expanduser()
        made_from: list[object] = [spec.name_or_path, spec.revision, spec.variant]
        if root.exists():
            files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
            made_from = [hash_files(root, files, cache_dir)]
        settings = [self.steps, self.guidance_scale, self.negative, self.seed, self.dtype]
        return cache_folder(cache_dir, "class_images", [made_from, prompt, side, settings])

    def make(self, folder: Path, number: int, trained: object, prompt: str, side: int) -> None:
        """Make the first ``number`` images in a folder, as far as they do not exist."""
        from filelock import FileLock

        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            missing = [n for n in range(number) if not (folder / _name(n)).is_file()]
            if not missing:
                return
            rank_zero_info(f"ImageData: making {len(missing)} class images of {prompt!r} in {folder}")
            pipeline = _loaded(self.network(trained), getattr(torch, self.dtype))
            named: dict[str, Any] = {"num_inference_steps": self.steps, "guidance_scale": self.guidance_scale}
            named["negative_prompt"] = self.negative
            given = {name: value for name, value in named.items() if value is not None}
            for start in range(0, len(missing), self.batch_size):
                part = missing[start : start + self.batch_size]
                if self.negative is not None:
                    given["negative_prompt"] = [self.negative] * len(part)
                noise = [torch.Generator().manual_seed(mix_seed(self.seed, n)) for n in part]
                with own_draws(self.seed), torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of diffusers' own calls
                    images = pipeline([prompt] * len(part), generator=noise, height=side, width=side, **given).images
                for n, image in zip(part, images, strict=True):
                    with replacing(folder / _name(n)) as file:
                        image.save(file, "PNG")
            # The trained network needs the memory.
            del pipeline
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def stand_ins(number: int, side: int, cache_dir: str | None) -> str:
    """Return a folder of black images with ``side`` squared pixels, for a plan, which needs no values."""
    folder = cache_folder(cache_dir, "class_images/plan", [number, side])
    return str(prepared_folder(folder, partial(_write_black, number, side), lambda place: None))


def _write_black(number: int, side: int, folder: Path) -> None:
    from PIL import Image

    Image.new("RGB", (side, side)).save(folder / _name(0))
    for n in range(1, number):
        shutil.copyfile(folder / _name(0), folder / _name(n))


def _name(number: int) -> str:
    return f"{number:05d}.png"


def _loaded(spec: DiffusersModelConfig, dtype: torch.dtype) -> Any:
    """Return the pipeline of a description, on the accelerator if there is one."""
    import diffusers

    place, _ = pipeline_root(spec.place, spec.subfolder)
    options: dict[str, Any] = {"revision": spec.revision, "dtype": dtype}
    try:
        with bars_on_terminals():
            if spec.config is not None:
                kind = getattr(diffusers, (pipeline_index(place, spec.revision) or {})["_class_name"])
                pipeline = kind.from_single_file(spec.name_or_path, config=spec.config, dtype=dtype)
            else:
                variant = spec.variant or _variant(place)
                pipeline = diffusers.DiffusionPipeline.from_pretrained(place, variant=variant, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"ImageData: generate: the pipeline {place} cannot be loaded: {error}") from error
    # A checker would return black images, which would be trained on.
    if getattr(pipeline, "safety_checker", None) is not None:
        pipeline.safety_checker = None
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))


def _variant(place: str) -> str | None:
    """Return the only variant of the weights of a folder, such as ``fp16``; None for weights without a variant."""
    found = (files_variant(Path(place, name), "ImageData: generate") for name in ("unet", "transformer"))
    return next((variant for variant in found if variant), None)
