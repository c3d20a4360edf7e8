"""Image autoencoders behind one interface: ours, and diffusers' AutoencoderKL, Tiny, DC and KLQwenImage.

    encode: images [B, C, H, W] in [-1, 1] -> mean, logvar [B, c, H / f, W / f];    logvar None: a deterministic encoder
    decode: latents [B, c, h, w] -> images [B, C, f h, f w], about in [-1, 1]

AutoencoderTiny imitates another VAE: it encodes to, and decodes from, that VAE's *scaled* latents.

Costs: the model's memory; `encode` and `decode` process the whole batch, so the caller splits it as memory allows.
Source: Rombach et al. (2022), https://arxiv.org/abs/2112.10752 (KL); https://github.com/madebyollin/taesd (Tiny); Chen
    et al. (2024), https://arxiv.org/abs/2410.10733 (DC).
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from lit_efficient.errors import CheckpointError, ConfigurationError, check_choice
from lit_efficient.models.libraries.diffusers_model import (
    DiffusersModelConfig,
    build,
    from_fields,
    model_class,
    resolve,
)
from lit_efficient.models.libraries.pipeline_folder import declared_scaling, in_pipeline
from lit_efficient.models.networks.autoencoder import Autoencoder, AutoencoderConfig, check_images, sample_posterior

AutoencoderSpec = AutoencoderConfig | DiffusersModelConfig | str
StoredConfig: TypeAlias = Mapping[str, Any]
CHECKPOINT_KEY = "autoencoding"  # key of the `stored_config` in checkpoints of `Autoencoding`
_KINDS = ("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC", "AutoencoderKLQwenImage")
_WITH_POSTERIOR = ("AutoencoderKL", "AutoencoderKLQwenImage")
_OF_VIDEOS = ("AutoencoderKLQwenImage",)  # [B, C, frames, H, W]; an image is one frame
# Fields that describe the use of latents, and do not change the results of encoder and decoder.
_USAGE = {"scaling_factor", "shift_factor", "latents_mean", "latents_std", "sample_size", "force_upcast"}


@runtime_checkable
class ImageAutoencoder(Protocol):
    """Interface of an ``nn.Module`` that maps images to latents and back."""

    image_channels: int
    latent_channels: int
    factor: int  # pixels per latent position, on each side
    source: DiffusersModelConfig | str | None  # description from which it can be built again, with its weights

    def encode(self, x: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """Map images [B, C, H, W] in [-1, 1] to mean and log-variance of the posterior; None for a deterministic
        encoder.
        """

    def decode(self, z: Tensor, /) -> Tensor:
        """Map latents [B, c, h, w] to images [B, C, factor h, factor w]."""


class DiffusersAutoencoder(nn.Module):
    """Image autoencoder of diffusers. Parameters are named ``network.<diffusers' names>``.

    Args:
        network: An ``AutoencoderKL``, ``AutoencoderTiny``, ``AutoencoderDC`` or ``AutoencoderKLQwenImage``.

    Raises:
        ConfigurationError: For another model, and one whose decoder does not undo the encoder's shape.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        config = whole_config(network)
        self.network = network
        self.source: DiffusersModelConfig | str | None = None
        self.image_channels, self.latent_channels, self.factor = _shape(config)

    @property
    def deterministic(self) -> bool:
        """Return whether the encoder returns no variance."""
        return _kind(self.network).__name__ not in _WITH_POSTERIOR

    @property
    def of_videos(self) -> bool:
        """Return whether the network's images are videos of one frame."""
        return _kind(self.network).__name__ in _OF_VIDEOS

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map images [B, C, H, W] in [-1, 1] to mean and logvar (or None) [B, c, H / factor, W / factor]."""
        check_images(x, self, _kind(self.network).__name__)
        self._check_checkpointing()
        if self.of_videos:
            x = x.unsqueeze(2)
        encoded = self.network.encode(self._as_weights(x), return_dict=False)[0]
        if self.deterministic:
            return encoded, None
        if self.of_videos:
            return encoded.mean.squeeze(2), encoded.logvar.squeeze(2)
        return encoded.mean, encoded.logvar

    def decode(self, z: Tensor) -> Tensor:
        """Map latents [B, c, h, w] to images [B, C, factor h, factor w], about in [-1, 1] (not clamped)."""
        if self.of_videos:
            return self.network.decode(self._as_weights(z.unsqueeze(2)), return_dict=False)[0].squeeze(2)
        return self.network.decode(self._as_weights(z), return_dict=False)[0]

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the reconstruction from one posterior sample, mean, and logvar or None of images."""
        mean, logvar = self.encode(x)
        return self.decode(sample_posterior(mean, logvar, generator)), mean, logvar

    def _check_checkpointing(self) -> None:
        """Refuse a Tiny encoder with gradient checkpointing: diffusers then computes another function."""
        encoder = self.network.encoder
        if _kind(encoder).__name__ == "EncoderTiny" and encoder.gradient_checkpointing and torch.is_grad_enabled():
            raise ConfigurationError(
                "AutoencoderTiny: enable_gradient_checkpointing() is not for training its encoder: diffusers "
                "leaves out the step from [-1, 1] to [0, 1] there. Set network.encoder.gradient_checkpointing = False."
            )

    def _as_weights(self, x: Tensor) -> Tensor:
        """Convert ``x`` to the weights' format, unless autocast chooses a format for each operation."""
        device = x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return x
        return x.to(next(self.network.parameters()).dtype)


def build_autoencoder(spec: AutoencoderSpec) -> ImageAutoencoder:
    """Build the autoencoder that a specification describes, in training mode.

    Args:
        spec: The sizes of ours (random weights, from the global generator); a model of diffusers; or the path of a
            checkpoint of `Autoencoding`, with either kind. The weights are those of the checkpoint's ``state_dict``: in
            a run with `EMA` the average if the checkpoint holds weights only, and the raw weights if it is a full one.

    Raises:
        ConfigurationError: For a class that is not an image autoencoder.
        CheckpointError: For a file that is not a checkpoint of `Autoencoding`.
    """
    if isinstance(spec, AutoencoderConfig):
        return Autoencoder(spec)
    if isinstance(spec, str):
        return _from_checkpoint(spec)
    spec = in_pipeline(spec, ("vae",))
    check_kind(spec)
    autoencoder = DiffusersAutoencoder(build(spec))
    autoencoder.source = None if spec.draws_weights else spec
    return autoencoder


def check_kind(spec: DiffusersModelConfig) -> str:
    """Return the name of the model's class, which must be an image autoencoder's.

    Raises:
        ConfigurationError: If it is another class.
    """
    spec = in_pipeline(spec, ("vae",))
    name = str(resolve(spec)["_class_name"])
    check_choice("autoencoder", f"the _class_name of {spec.described!r}", name, _KINDS)
    return name


def is_deterministic(spec: AutoencoderConfig | DiffusersModelConfig) -> bool:
    """Return whether the encoder that is described returns no variance."""
    return isinstance(spec, DiffusersModelConfig) and check_kind(spec) not in _WITH_POSTERIOR


def as_spec(stored: StoredConfig) -> AutoencoderConfig | DiffusersModelConfig:
    """Return the specification that a checkpoint stores as a dictionary."""
    if "latent_channels" in stored:
        return AutoencoderConfig(**stored)
    return DiffusersModelConfig(**stored)


def whole_config(network: nn.Module) -> StoredConfig:
    """Return the configuration of a diffusers model with ``_class_name``, in types that JSON has. `from_fields`
    rebuilds the model.
    """
    kind: Any = _kind(network)
    check_choice("autoencoder", "the model", kind.__name__, _KINDS)
    config: Any = network.config
    known = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    return {"_class_name": kind.__name__, **json.loads(json.dumps({name: config[name] for name in known}))}


def stored_config(autoencoder: ImageAutoencoder) -> StoredConfig:
    """Return the configuration that checkpoints store beside the weights, for `empty_autoencoder`."""
    if isinstance(autoencoder, DiffusersAutoencoder):
        return whole_config(autoencoder.network)
    assert isinstance(autoencoder, Autoencoder)
    return asdict(autoencoder.config)


def description(stored: StoredConfig) -> str:
    """Return, as text, all that decides the results of a diffusers model besides its weights; empty for ours.

    Fields with the class's default are left out, because a later version of diffusers may add fields.
    """
    if "_class_name" not in stored:
        return ""
    usual = inspect.signature(model_class(stored["_class_name"]).__init__).parameters
    own = {"_class_name": stored["_class_name"]}
    for name, value in stored.items():
        if name in usual and name not in _USAGE and json.dumps(value) != json.dumps(usual[name].default):
            own[name] = value
    return json.dumps(own, sort_keys=True)


def declared_statistics(autoencoder: ImageAutoencoder) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation [c] of latents that the model's configuration declares; 0 and 1 for ours.

    AutoencoderTiny's latents are scaled already.
    """
    channels = autoencoder.latent_channels
    if not isinstance(autoencoder, DiffusersAutoencoder):
        return torch.zeros(channels), torch.ones(channels)
    mean, std = declared_scaling(whole_config(autoencoder.network))
    return torch.tensor(mean), torch.tensor(std)


def _kind(network: nn.Module) -> type:
    """Return the network's class in diffusers, without the classes that techniques and FSDP have mixed in."""
    cls = type(network)
    return next((kind for kind in cls.__mro__ if kind.__module__.startswith("diffusers.")), cls)


def _shape(config: StoredConfig) -> tuple[int, int, int]:
    """Return the channels of images, the channels of latents, and the factor of a whole configuration."""
    name = str(config["_class_name"])
    if name in _OF_VIDEOS:
        return int(config["input_channels"]), int(config["z_dim"]), int(2 ** len(config["temperal_downsample"]))
    if name == "AutoencoderKL":
        down, up = (2 ** (len(config[key]) - 1) for key in ("down_block_types", "up_block_types"))
    elif name == "AutoencoderTiny":
        down = 2 ** (len(config["encoder_block_out_channels"]) - 1)
        up = config["upsampling_scaling_factor"] ** (len(config["decoder_block_out_channels"]) - 1)
    else:
        down, up = (2 ** _halvings(config[f"{side}_layers_per_block"]) for side in ("encoder", "decoder"))
    taken = config["in_channels"]
    given = config.get("out_channels", taken)
    if (taken, down) != (given, up):
        raise ConfigurationError(
            f"{name}: the decoder must undo the encoder, which takes {taken} channels and makes them {down} times "
            f"smaller; it gives {given}, {up} times larger."
        )
    return int(taken), int(config["latent_channels"]), int(down)


def _halvings(layers: Sequence[int]) -> int:
    """Return the number of halvings in AutoencoderDC: one after each stage but the last that has layers, and one more
    in the first stage if that has none.
    """
    return sum(count > 0 for count in layers[:-1]) + (layers[0] == 0)


def empty_autoencoder(stored: StoredConfig, weights: Mapping[str, Tensor], source: str) -> ImageAutoencoder:
    """Build an autoencoder around the tensors of a file, without drawing random numbers or copying.

    Args:
        stored: Fields of an `AutoencoderConfig`, or a whole configuration with ``_class_name``.
        weights: The tensors, by name.
        source: Origin of the weights, for the error.

    Raises:
        CheckpointError: If the weights do not fit.
    """
    made: Autoencoder | DiffusersAutoencoder
    with torch.device("meta"):
        if "_class_name" in stored:
            made = DiffusersAutoencoder(from_fields(dict(stored)))
        else:
            made = Autoencoder(AutoencoderConfig(**stored))
    try:
        made.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{source} does not fit its autoencoder (adapters? merge them first: python -m lit_efficient export): "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    return made


def _from_checkpoint(path: str) -> ImageAutoencoder:
    from lit_efficient.files.checkpoints import read

    checkpoint = read(path)
    stored = checkpoint.get(CHECKPOINT_KEY)
    prefix = "autoencoder."
    weights = {k.removeprefix(prefix): t for k, t in checkpoint["state_dict"].items() if k.startswith(prefix)}
    if not isinstance(stored, dict) or not weights:
        raise CheckpointError(f"{path} is not a checkpoint of Autoencoding: it contains no autoencoder")
    autoencoder = empty_autoencoder(stored, weights, path)
    autoencoder.source = path
    return autoencoder
