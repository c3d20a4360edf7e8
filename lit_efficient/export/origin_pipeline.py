"""Export of a trained network into a copy of the pipeline from which it came.

    copy = files of the pipeline, byte for byte, but for the network and text encoders that trained

Flux, Sana, Qwen-Image and Z-Image are exported in this way: their pipelines count timesteps, scale latents and encode
prompts as the training did, because the training took these settings from the same folder.

Costs: the disk of the whole pipeline; only the network and trained text encoders are in memory
Source: https://huggingface.co/docs/diffusers/main/en/using-diffusers/loading.
"""

import inspect
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.export.diffusers_text_pipelines import tokenizer_of
from lit_efficient.models.libraries.config_fields import files_variant
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.live_text import LiveText
from lit_efficient.models.libraries.pipeline_folder import pipeline_index, pipeline_root

if TYPE_CHECKING:
    from lit_efficient.models.libraries.text_encoder import TextEncoder
    from lit_efficient.tasks.latent_diffusion import LatentDiffusion

_INDEX = "model_index.json"
# Settings with which a network no longer fits the other parts of its pipeline.
_UNLIKE = ("prediction_type", "schedule", "vae_scaling", "text_encoder")


@dataclass(frozen=True)
class OriginPipeline:
    """The pipeline of a trained network."""

    folder: Path
    part: str  # subfolder of the network
    kind: Any  # class of the pipeline
    index: dict[str, Any]  # content of model_index.json

    def write(self, folder: Path, network: Any, trained: dict[str, Any]) -> None:
        """Write a copy with another network, and with trained parts such as text encoders by their names in it."""
        for name, described in self.index.items():
            if isinstance(described, list) and described[0] is not None and name not in (self.part, *trained):
                shutil.copytree(self.folder / name, folder / name, ignore=shutil.ignore_patterns(".*"))
        shutil.copyfile(self.folder / _INDEX, folder / _INDEX)
        for name, part in {self.part: network, **trained}.items():
            part.save_pretrained(folder / name)

    def call(self, module: "LatentDiffusion", network: Any) -> str:
        """Return the arguments, as Python, with which the pipeline samples like the run."""
        known = inspect.signature(self.kind.__call__).parameters
        guidance = module.guidance_scale
        words = ['"a caption"']
        if "true_cfg_scale" in known:  # guidance_scale is an input of distilled networks
            if network.config.guidance_embeds:
                words.append(f"guidance_scale={module.origin.guidance}")  # type: ignore[union-attr]
            if guidance > 1:
                words += [f"true_cfg_scale={guidance}", 'negative_prompt=""']
        elif self.kind.__name__.startswith("ZImage"):  # its scale is that of the difference alone
            words.append(f"guidance_scale={guidance - 1}")
        else:
            words.append(f"guidance_scale={guidance}")
        words.append(f"num_inference_steps={module.sampling_steps}")
        if module.latent_size is not None and module.codec is not None:
            height, width = (module.codec.factor * side for side in module.latent_size)
            words += [f"height={height}", f"width={width}"]
        if "use_resolution_binning" in known:
            words.append("use_resolution_binning=False")
        return ", ".join(words)


def origin_pipeline(module: "LatentDiffusion", network: Any) -> OriginPipeline:
    """Return the pipeline of a module's network.

    Raises:
        ConfigurationError: If the network came from no pipeline, or no longer fits its other parts.
    """
    import diffusers

    origin = module.origin
    name = type(network).__name__
    index = None
    revision = None
    if isinstance(origin, DiffusersModelConfig) and origin.name_or_path is not None and origin.config is None:
        root, part = pipeline_root(origin.place, origin.subfolder)
        revision = origin.revision
        index = pipeline_index(root, revision)
    if index is None or not part:
        raise ConfigurationError(
            f"export: {name} is exported into a copy of the pipeline that backbone.name_or_path names, and this run "
            "named none: use format safetensors for the weights alone"
        )
    unlike = [setting for setting in _UNLIKE if setting in module.settings.override]
    if unlike:
        raise ConfigurationError(
            f"export: the run has override: [{', '.join(unlike)}], so that {name} no longer fits the pipeline {root}: "
            "use format safetensors for the weights alone"
        )
    folder = Path(root).expanduser()
    if not folder.is_dir():
        folder = Path(diffusers.DiffusionPipeline.download(root, revision=revision))
    variants = [one for one in index if (folder / one).is_dir() and files_variant(folder / one, "export")]
    if variants:
        raise ConfigurationError(
            f"export: {folder} has {', '.join(variants)} only in a variant such as fp16, which a pipeline with new "
            "weights cannot mix: write the pipeline without variants first (from_pretrained with variant, then "
            "save_pretrained)"
        )
    return OriginPipeline(folder, part, getattr(diffusers, str(index["_class_name"])), index)


def trained_parts(encoder: "TextEncoder | None", words: bool) -> dict[str, Any]:
    """Return text encoders that trained by their names in a pipeline, and their tokenizers if they have new words."""
    found: dict[str, Any] = {}
    if isinstance(encoder, LiveText):
        for name, part in encoder.trained.items():
            found[name] = part.network.cpu()
            if words:
                found[name.replace("text_encoder", "tokenizer")] = tokenizer_of(part.tokens)
    return found
