"""Export of a latent diffusion checkpoint as a pipeline that diffusers loads without this package.

    model_index.json   transformer/ or unet/   vae/ (LDMPipeline: vqvae/)   scheduler/   text_encoder/   tokenizer/
    README.md: how to load and call the pipeline
    ControlNet: its own files alone, for ControlNetModel.from_pretrained

Everything else that the run computed becomes part of weights: the statistics of latents are folded into the
autoencoder, the null label into the table of labels, and adapters into the adapted weights (or they become a file in
diffusers' format).
Source: https://huggingface.co/docs/diffusers/main/en/using-diffusers/loading.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lit_efficient.application.recorded import arguments_behind, converters
from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.distributed.weight_slices import built_empty
from lit_efficient.errors import CheckpointError, ConfigurationError, check_choice, refusal
from lit_efficient.export.check import check_tensors, digests, refuse_own_layers
from lit_efficient.export.learned_embeddings import new_words, write_embeddings
from lit_efficient.files.atomic_file import check_new_folder, write_folder
from lit_efficient.files.checkpoints import Checkpoint
from lit_efficient.files.sums import write_sums
from lit_efficient.internals.hugging_face import bars_on_terminals
from lit_efficient.mechanisms.adapters.added_rows import without_added_rows
from lit_efficient.mechanisms.adapters.diffusers_lora import write_diffusers_lora, write_several
from lit_efficient.mechanisms.adapters.merge import dequantize_layers, merge_adapters, whole_state, without_adapters
from lit_efficient.mechanisms.adapters.peft_folder import diffusers_class
from lit_efficient.mechanisms.adapters.peft_format import to_peft
from lit_efficient.mechanisms.restore import Asked, Weights, take_weights, wanted_weights
from lit_efficient.models.libraries.image_condition import ControlledUNet
from lit_efficient.surgery import WAITS, own_draws, unmixed

if TYPE_CHECKING:
    from lit_efficient.models.libraries.latent_codec import LatentCodec
    from lit_efficient.models.libraries.text_encoder import TextEncoder
    from lit_efficient.tasks.latent_diffusion import LatentDiffusion

Lora = Literal["merged", "diffusers"]

_NETWORK = "network."


def export_pipeline(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    weights: Asked | None = None,
    lora: Lora = "merged",
    base: str | os.PathLike[str] | None = None,
    check: bool = True,
) -> Path:
    """Write a pipeline of diffusers.

    Args:
        path: A checkpoint of ``LatentDiffusion`` on latents of a diffusers autoencoder.
        output: A new or empty folder.
        weights: ``average`` (or ``ema``): the average that the run kept; ``raw``: the trained weights. ``auto`` or
            None: the average if there is one.
        lora: ``merged``: adapters are merged into the weights. ``diffusers``: the pipeline has the weights without
            adapters, and ``pytorch_lora_weights.safetensors`` is for ``pipeline.load_lora_weights(folder)``.
        base: A checkpoint or safetensors file with the frozen weights below adapters, such as a model's
            ``diffusion_pytorch_model.safetensors``. Needed if the checkpoint does not contain them
            (``save_base=True``) and its backbone does not name an existing model.
        check: Let diffusers load the folder in a new process and compare the network's tensors.

    Returns:
        The folder, which contains hashes of its files.

    Raises:
        ConfigurationError: If an argument is out of range or no pipeline of diffusers can hold the model.
        CheckpointError: If a file cannot be read or lacks the requested weights.
    """
    weights = wanted_weights("export", weights)
    check_choice("export", "lora", lora, ("merged", "diffusers"))
    check_new_folder(Path(output), "export")
    checkpoint = read_checkpoint(Path(path))
    converters(checkpoint, "diffusers")
    if "latent_diffusion" not in checkpoint:
        raise ConfigurationError(
            f"export: format diffusers is for checkpoints of LatentDiffusion, and {path} is another one"
        )
    run = _restored(checkpoint, path, weights, None if base is None else read_checkpoint(Path(base))["state_dict"])
    if isinstance(run.module.network, ControlledUNet) and lora == "diffusers":
        raise refusal("export", "lora", "merged for a ControlNet, whose adapters no pipeline loads", lora)
    words = new_words(checkpoint)
    rows = run.module.state_dict() if words is not None else {}
    network = _network(run.module, keep_adapters=lora == "merged")
    expected = digests(network.state_dict()) if check else {}
    if isinstance(run.module.network, ControlledUNet):
        return _write_controlnet(Path(output), network, run, expected if check else None)
    made = _pipeline(run.module, network, keep_adapters=lora == "merged", words=words is not None)
    if check and made.folded:
        expected |= digests({name: network.get_parameter(name) for name in made.folded})
    adapters = _adapters(run, made.kind) if lora == "diffusers" else None

    for note in made.notes:
        print(f"note: {note}", file=sys.stderr)

    def write(folder: Path) -> None:
        with bars_on_terminals():
            made.save(folder)
        if adapters is not None:
            tensors, config = adapters
            networks = checkpoint["lit_efficient"]["adapters"]["networks"]
            if len(networks) > 1:
                write_several(folder, tensors, config, networks)
            else:
                write_diffusers_lora(folder, tensors, config)
        if words is not None and lora == "diffusers":
            write_embeddings(folder, rows, words)
        (folder / "README.md").write_text(_readme(made, run.held, adapters is not None))
        write_sums(folder)
        finding = check_tensors(folder, "diffusers", expected, made.part) if check else "not checked"
        print(f"{run.held} weights; {finding}", file=sys.stderr)

    return write_folder(Path(output), write, sums=False)  # write() adds the hashes before the check


@dataclass(frozen=True)
class _Run:
    """A rebuilt module, its checkpoint, and the kind of its weights ("raw" or the name of an average)."""

    module: "LatentDiffusion"
    checkpoint: Checkpoint
    held: str


def _restored(checkpoint: Checkpoint, path: object, weights: Weights, base: Mapping[str, Tensor] | None) -> _Run:
    from lit_efficient.tasks.loading import latent_diffusion_of

    described = checkpoint["latent_diffusion"]["backbone"]
    if base is not None and described is not None:  # the model that the backbone names may be gone
        arguments = {**checkpoint["hyper_parameters"], "backbone": described}
        checkpoint = {**checkpoint, "hyper_parameters": arguments}
    with own_draws():
        module = latent_diffusion_of(checkpoint, path)
        module.configure_model()
    if base is not None:
        _load_base(module, base)
    module.on_load_checkpoint(checkpoint)
    try:
        held = take_weights(module, checkpoint, weights)
    except CheckpointError as error:
        raise CheckpointError(f"export: {error}") from error
    return _Run(module, checkpoint, held)


def _load_base(module: nn.Module, base: Mapping[str, Tensor]) -> None:
    """Load frozen weights from the state dict of a checkpoint or of a network that diffusers wrote."""
    if not any(name.startswith(_NETWORK) for name in base):
        base = {f"{_NETWORK}{name}": tensor for name, tensor in base.items()}
    try:
        missing = module.load_state_dict(base, strict=False).missing_keys
    except RuntimeError as error:
        raise ConfigurationError(f"export: base does not fit this network: {' '.join(str(error).split())}") from error
    if len(missing) == len(module.state_dict()):
        raise ConfigurationError("export: base has no weight of this network")


def _network(module: "LatentDiffusion", keep_adapters: bool) -> Any:
    """Return a plain model of diffusers in evaluation mode, with adapters merged or left out."""
    from lit_efficient.models.libraries.dit_to_diffusers import convert
    from lit_efficient.models.networks.dit import DiT

    network: Any = module.network
    place = _NETWORK
    if isinstance(network, ControlledUNet):
        network = network.controlnet
        place = f"{_NETWORK}controlnet."
    refuse_own_layers(network)
    own = {
        name.removeprefix(place): tensor
        for name, tensor in _floats(module, keep_adapters).items()
        if name.startswith(place)
    }
    if isinstance(network, DiT):
        with torch.device("meta"):
            wanted = DiT(network.config).state_dict().keys()
        return convert({name: tensor for name, tensor in own.items() if name in wanted}, network.config)
    kind: Any = unmixed(network)
    with own_draws():
        fresh: Any = built_empty(lambda: kind.from_config(network.config))
    del fresh.__dict__[WAITS]  # the weights are loaded below
    wanted = fresh.state_dict().keys()
    fresh.load_state_dict({name: tensor for name, tensor in own.items() if name in wanted}, assign=True)
    size = module.latent_size
    if size is not None and type(fresh).__name__.startswith("UNet"):  # a UNet has no fixed size, but pipelines need one
        fresh.register_to_config(sample_size=size[0])  # sizes that are not square are refused later
    return fresh.eval()


def _write_controlnet(output: Path, network: Any, run: _Run, expected: Mapping[str, str] | None) -> Path:
    """Write a ControlNet alone, which pipelines of its base take. ``expected``: digests of its tensors, to check it."""
    pipeline = "StableDiffusionControlNetPipeline"
    if network.config.addition_embed_type is not None:
        pipeline = "StableDiffusionXLControlNetPipeline"

    def write(folder: Path) -> None:
        with bars_on_terminals():
            network.save_pretrained(folder)
        (folder / "README.md").write_text(_controlnet_readme(pipeline, run))
        write_sums(folder)
        finding = "not checked" if expected is None else check_tensors(folder, "diffusers", expected)
        print(f"{run.held} weights; {finding}", file=sys.stderr)

    return write_folder(output, write, sums=False)


def _floats(module: nn.Module, keep_adapters: bool) -> dict[str, Tensor]:
    """Return all weights of a module as floats, with adapters merged or left out."""
    if keep_adapters:
        return whole_state(dequantize_layers(merge_adapters(module)))
    return without_adapters(module)


@dataclass(frozen=True)
class _Made:
    """A pipeline that can be written."""

    save: Callable[[Path], object]  # write it into a folder
    kind: Any  # its class
    part: str  # subfolder of the network
    call: str  # arguments, as Python, with which it samples like the run
    absent: tuple[str, ...] = ()  # parts without which it is loaded
    notes: tuple[str, ...] = ()  # remaining differences from the run, for people
    folded: tuple[str, ...] = ()  # names of weights that were changed


def _pipeline(module: "LatentDiffusion", network: Any, keep_adapters: bool, words: bool) -> _Made:
    from lit_efficient.export.diffusers_parts import Parts
    from lit_efficient.export.diffusers_pipelines import has_maker, pipeline_for
    from lit_efficient.export.origin_pipeline import origin_pipeline, trained_parts

    text = _text_encoder(module, keep_adapters)
    if not has_maker(network):
        origin = origin_pipeline(module, network)
        trained = trained_parts(text, words)
        save = partial(origin.write, network=network, trained=trained)
        return _Made(save, origin.kind, origin.part, origin.call(module, network))
    parts = Parts(
        network=network,
        vae=_autoencoder(module.codec),
        text_encoder=text,
        process=module.process,
        prediction=module.prediction,
        sampler=module.sampler if module.latent_size is None else module.sampler_at(module.latent_size),
        guidance_scale=module.guidance_scale,
        steps=module.sampling_steps,
        size=module.latent_size,
    )
    made = pipeline_for(parts)
    pipeline = made.pipeline
    # SD3 loads without T5 only if both are named.
    absent = tuple(name for name in ("text_encoder_3", "tokenizer_3") if getattr(pipeline, name, "") is None)
    part = "unet" if hasattr(pipeline, "unet") else "transformer"
    return _Made(pipeline.save_pretrained, type(pipeline), part, made.call, absent, made.notes, made.folded)


def _text_encoder(module: "LatentDiffusion", keep_adapters: bool) -> "TextEncoder | None":
    """Return the text encoders as they were trained, or without adapters and new words."""
    live = module.live_text
    if live is None or not keep_adapters:
        return module.text_encoder
    for part in live.trained.values():
        network = part.network
        network.config.vocab_size = network.get_input_embeddings().num_embeddings
        network.requires_grad_(False)
    return live


def _autoencoder(codec: "LatentCodec | None") -> Any:
    from lit_efficient.models.libraries.autoencoders import DiffusersAutoencoder
    from lit_efficient.models.libraries.folding import fold_statistics

    if codec is None:
        raise ConfigurationError("export: the checkpoint has no autoencoder, which a pipeline needs")
    if not isinstance(codec.autoencoder, DiffusersAutoencoder):
        raise ConfigurationError(
            "export: diffusers has no class for this package's autoencoder: train on latents of an AutoencoderKL, by "
            "name or as DiffusersModelConfig(config_fields={'_class_name': 'AutoencoderKL', ...}), or use format "
            "safetensors for the network alone"
        )
    return fold_statistics(codec.autoencoder.network.cpu(), codec.mean, codec.std)


def _adapters(run: _Run, kind: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an adapter's tensors and configuration in the format of diffusers' pipelines."""
    recorded = arguments_behind(run.checkpoint, "adapters")
    if recorded is None:
        raise ConfigurationError("export: lora=diffusers is for checkpoints of LoRA, and this one has no adapter")
    if not hasattr(kind, "load_lora_weights"):
        raise ConfigurationError(f"export: {kind.__name__} cannot load adapters: use lora=merged")
    network: Any = run.module.network
    arguments = {**recorded, "bias": "none", "modules_to_save": None}  # biases and saved modules are part of the base
    tensors, config = to_peft(
        without_added_rows(whole_state(run.module)), run.checkpoint["lit_efficient"]["adapters"], arguments
    )
    return tensors, config | {"auto_mapping": diffusers_class(network)}


def _controlnet_readme(pipeline: str, run: _Run) -> str:
    call = f'"a caption", image=picture, guidance_scale={run.module.guidance_scale}'
    return f"""A ControlNet of [diffusers](https://github.com/huggingface/diffusers), with {run.held} weights.

```python
from diffusers import ControlNetModel, {pipeline}

controlnet = ControlNetModel.from_pretrained("FOLDER")
pipeline = {pipeline}.from_pretrained("BASE", controlnet=controlnet)
images = pipeline({call}).images
```
"""


def _readme(made: _Made, held: str, lora: bool) -> str:
    notes = "".join(f"\nNote: {note}.\n" for note in made.notes)
    loads = '\npipeline.load_lora_weights("FOLDER")' if lora else ""
    without = "".join(f", {name}=None" for name in made.absent)
    return f"""A pipeline of [diffusers](https://github.com/huggingface/diffusers), with the {held} weights of training.

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("FOLDER"{without}){loads}
images = pipeline({made.call}).images
```
{notes}"""
