"""A trained autoencoder with the statistics of its latents: what turns a diffusion model's output back into images.

    normalised = (latent - mean) / std    for each channel

A diffusion model wants inputs of zero mean and unit variance. Autoencoders do not give them (standard deviations of 0.9
to 2.0 and means of -0.2 to 1.1 were measured on the digits; SD's: about 5.5), so each channel is shifted and
scaled, as measured on the user's own images or as the model's configuration declares.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import CheckpointError, refusal
from lit_efficient.files.cache import digest_of
from lit_efficient.files.known_facts import content_key, known_facts, note_facts
from lit_efficient.internals.torch_tensors import version
from lit_efficient.models.libraries.autoencoders import (
    AutoencoderSpec,
    DiffusersAutoencoder,
    ImageAutoencoder,
    build_autoencoder,
    declared_statistics,
    description,
    empty_autoencoder,
    stored_config,
    whole_config,
)
from lit_efficient.models.libraries.channel_statistics import ChannelStatistics
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.networks.autoencoder import AutoencoderConfig, check_images, sample_posterior
from lit_efficient.surgery import moved, own_draws

EMBEDDED_BYTES = 32 * 2**20  # weights of at most this size are copied into each checkpoint, larger ones named


class AutoencoderOnDisk:
    """An autoencoder of more than 32 MB of which all is known but the weights: they are loaded when they are needed.

    Its facts, under a key of `content_key`: ``shape`` (channels of images and latents, factor) and ``declared``
    statistics.
    """

    def __init__(self, spec: DiffusersModelConfig | str, key: str, facts: dict[str, Any]) -> None:
        self.source, self.key = spec, key
        self.image_channels, self.latent_channels, self.factor = facts["shape"]
        self.declared = torch.tensor(facts["declared"][0]), torch.tensor(facts["declared"][1])
        self._loaded: Any = None

    @property
    def loaded(self) -> bool:
        """Whether its weights are in memory."""
        return self._loaded is not None

    def load(self) -> Any:
        """The model, frozen; loaded once. Draws no random number."""
        if self._loaded is None:
            with own_draws(0):
                self._loaded = _frozen(build_autoencoder(self.source))
        return self._loaded


def find_autoencoder(spec: AutoencoderSpec) -> ImageAutoencoder | AutoencoderOnDisk:
    """The autoencoder that is described; one that is large, and was met before, waits on disk.

    Raises:
        ConfigurationError: If it cannot be built.
    """
    key = _key_of(spec)
    facts = known_facts(key)
    if key is None or not {"bytes", "shape", "declared"} <= facts.keys():
        with own_draws(0):
            built = build_autoencoder(spec)
        shape = built.image_channels, built.latent_channels, built.factor
        statistics = [part.tolist() for part in declared_statistics(built)]
        facts = {"bytes": _size(built), "shape": shape, "declared": statistics}
        note_facts(key, facts)
        if key is None or facts["bytes"] <= EMBEDDED_BYTES:
            return built
        waits = AutoencoderOnDisk(spec, key, facts)  # type: ignore[arg-type]
        waits._loaded = _frozen(built)
        return waits
    if facts["bytes"] <= EMBEDDED_BYTES:
        with own_draws(0):
            return build_autoencoder(spec)
    return AutoencoderOnDisk(spec, key, facts)  # type: ignore[arg-type]


def _key_of(spec: AutoencoderSpec) -> str | None:
    if isinstance(spec, str):
        return content_key("checkpoint", [Path(spec)], ["diffusers"]) if Path(spec).is_file() else None
    if isinstance(spec, AutoencoderConfig) or spec.draws_weights or not Path(spec.name_or_path or "").is_dir():
        return None
    folder = Path(spec.name_or_path or "", spec.subfolder)
    about = {name: value for name, value in asdict(spec).items() if name != "name_or_path"}
    return content_key(["autoencoder", about], [folder], ["diffusers"])


def _frozen(autoencoder: Any) -> Any:
    """In evaluation mode; weights that would overflow in their format in float32."""
    autoencoder.eval().requires_grad_(False)
    return autoencoder.float() if _overflows(autoencoder) else autoencoder


class LatentCodec:
    """Frozen autoencoder plus per-channel mean and standard deviation of its sampled latents.

    Deliberately no ``nn.Module``: a LightningModule that holds one neither trains it nor counts, averages, quantises or
    shards it, and its checkpoint's ``state_dict`` is the diffusion model's alone.

    It computes in the format of the autoencoder's weights whatever autocast is around it, so that latents encoded in a
    training step are those of a cache; inputs and outputs are float32. Weights in float16 of a model that says
    ``force_upcast`` (its activations overflow) become float32.

    Args:
        autoencoder: The trained model, which is frozen and put in evaluation mode, or one that waits on disk.
        mean: Per-channel mean of sampled latents, [c].
        std: Per-channel standard deviation of sampled latents, [c], above 0.

    Raises:
        ConfigurationError: If the statistics do not fit the latents.
    """

    def __init__(self, autoencoder: "ImageAutoencoder | AutoencoderOnDisk", mean: Tensor, std: Tensor) -> None:
        self.held: Any = autoencoder if isinstance(autoencoder, AutoencoderOnDisk) else _frozen(autoencoder)
        self._fingerprints: dict[tuple[str, int], str] = {}
        self.image_channels, self.latent_channels = autoencoder.image_channels, autoencoder.latent_channels
        self.factor = autoencoder.factor  # pixels per latent position, on each side
        self.mean = mean.detach().float().cpu()
        self.std = std.detach().float().cpu()
        expected = (autoencoder.latent_channels,)
        if self.mean.shape != expected or self.std.shape != expected or not bool((self.std > 0).all()):
            allowed = f"{expected[0]} values each, as many as the latents' channels, and std above 0"
            raise refusal("LatentCodec", "mean and std", allowed, (self.mean.tolist(), self.std.tolist()))

    @property
    def autoencoder(self) -> Any:
        """The model; one that waits on disk is loaded now."""
        return self.held.load() if isinstance(self.held, AutoencoderOnDisk) else self.held

    @classmethod
    def declared(cls, autoencoder: "ImageAutoencoder | AutoencoderOnDisk") -> "LatentCodec":
        """With the statistics that the model's configuration states: see `declared_statistics`."""
        if isinstance(autoencoder, AutoencoderOnDisk):
            return cls(autoencoder, *autoencoder.declared)
        return cls(autoencoder, *declared_statistics(autoencoder))

    @classmethod
    def measured(cls, autoencoder: ImageAutoencoder, images: Iterable[Tensor], seed: int = 0) -> "LatentCodec":
        """With the statistics of latents that are sampled for some images.

        Of samples, not of posterior means: the diffusion model sees samples.

        Args:
            autoencoder: The trained model.
            images: Batches [B, C, H, W] in [-1, 1], on the device to encode on, of any sizes.
            seed: Seed of the samples.

        Raises:
            ConfigurationError: Without images, and for a channel that never varies.
        """
        channels = autoencoder.latent_channels
        codec = cls(autoencoder, torch.zeros(channels), torch.ones(channels))
        statistics, generator = ChannelStatistics(channels), torch.Generator().manual_seed(seed)
        for batch in images:
            statistics.update(sample_posterior(*codec.moments(batch), generator))
        return cls(autoencoder, statistics.mean, statistics.std)

    @torch.no_grad()
    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Images [B, C, H, W] in [-1, 1] to the posterior's mean and logvar (or None), not normalised, float32."""
        check_images(images, self.held, "LatentCodec")
        with torch.autocast(images.device.type, enabled=False):
            mean, logvar = self.autoencoder.to(images.device).encode(images.float())
        # In the usual order in memory: noise that is drawn "like" channels-last latents would fall on other places.
        return mean.float().contiguous(), None if logvar is None else logvar.float().contiguous()

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Images [B, C, H, W] in [-1, 1] to mean and logvar (or None) of the normalised latents, float32.

        Raises:
            ConfigurationError: For images of other channels, or whose sides are no multiples of ``factor``.
        """
        return self.normalize(*self.moments(images))

    def normalize(self, mean: Tensor, logvar: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Posterior moments [B, c, h, w] of the autoencoder to those of the normalised latents; None stays None."""
        shift, scale = self._statistics(mean)
        return (mean - shift) / scale, None if logvar is None else logvar - 2.0 * scale.log()

    def denormalize(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, c, h, w] to those of the autoencoder."""
        shift, scale = self._statistics(latents)
        return latents * scale + shift

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents [B, c, h, w] to images [B, C, H, W], float32, clamped to [-1, 1]."""
        latents = self.denormalize(latents.float())
        with torch.autocast(latents.device.type, enabled=False):
            images: Tensor = self.autoencoder.to(latents.device).decode(latents)
        return images.float().clamp(-1.0, 1.0)

    def fingerprint(self) -> str:
        """SHA-256 of weights, statistics and what else decides the result: codecs with the same share a latent space.

        Of diffusers' models the class, and the fields of the configuration that are not the class's defaults. It is
        computed once; of an autoencoder in files once for these files.
        """
        statistics = digest_of([self.mean.tolist(), self.std.tolist()])
        waits = isinstance(self.held, AutoencoderOnDisk)
        if waits and (known := known_facts(self.held.key).get(statistics)):
            return str(known)
        weights = self.autoencoder.state_dict().values()
        which = statistics, sum(0 if tensor.is_inference() else version(tensor) for tensor in weights)
        if which not in self._fingerprints:
            self._fingerprints[which] = self._digest()
            if waits:
                note_facts(self.held.key, {statistics: self._fingerprints[which]})
        return self._fingerprints[which]

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted({**self.autoencoder.state_dict(), "mean": self.mean, "std": self.std}.items()):
            digest.update(name.encode())
            # As bytes: NumPy has no bfloat16.
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        digest.update(description(stored_config(self.autoencoder)).encode())
        return digest.hexdigest()

    def state_dict(self, embed: bool | None = None) -> dict[str, Any]:
        """Primitives and tensors only: it loads with ``weights_only=True``.

        Args:
            embed: Whether it holds the weights. Otherwise it holds what the autoencoder was built from (folder, hub
                name, checkpoint) and the fingerprint, and loading builds it again from there. None: weights of more
                than 32 MB are not copied if they can be found again.

        Raises:
            ConfigurationError: If weights shall not be held that are nowhere else.
        """
        source = self.held.source
        statistics = {"mean": self.mean, "std": self.std}
        if embed is None:
            waits = isinstance(self.held, AutoencoderOnDisk)  # which only large ones do
            embed = source is None or (not waits and _size(self.autoencoder) <= EMBEDDED_BYTES)
        if embed:
            weights = {name: tensor.detach().cpu() for name, tensor in self.autoencoder.state_dict().items()}
            stored = stored_config(self.autoencoder)
            kind = "diffusers" if "_class_name" in stored else "config"
            return {kind: stored, "weights": weights, **statistics}
        if source is None:
            allowed = "true for an autoencoder of no folder, hub or checkpoint, whose weights are nowhere else"
            raise refusal("LatentCodec", "embed", allowed, embed)
        named = source if isinstance(source, str) else asdict(source)
        return {"source": named, "fingerprint": self.fingerprint(), **statistics}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "LatentCodec":
        """The codec that ``state_dict`` was taken from. Draws no random number.

        Raises:
            ConfigurationError: If the weights are not in it, nor where they came from.
            CheckpointError: If other ones are there now.
        """
        if "source" in state:
            return _from_source(cls, state)
        stored = state["diffusers"] if "diffusers" in state else state["config"]
        autoencoder = empty_autoencoder(stored, state["weights"], "the weights of the codec")
        return cls(autoencoder, state["mean"], state["std"])

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (moved(part.view(1, -1, 1, 1), like.device, like.dtype) for part in (self.mean, self.std))
        return mean, std


def _from_source(cls: type[LatentCodec], state: dict[str, Any]) -> LatentCodec:
    source = state["source"]
    spec = source if isinstance(source, str) else DiffusersModelConfig(**source)
    codec = cls(find_autoencoder(spec), state["mean"], state["std"])
    if codec.fingerprint() != state["fingerprint"]:
        described = spec if isinstance(spec, str) else spec.described
        raise CheckpointError(
            f"The autoencoder of {described!r} is no longer the one that the latents are of (fingerprint "
            f"{codec.fingerprint()[:12]}, expected {state['fingerprint'][:12]}): give back the original weights, or "
            "name the hub's commit as revision."
        )
    return codec


def _size(module: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())


def _overflows(autoencoder: ImageAutoencoder) -> bool:
    if not isinstance(autoencoder, DiffusersAutoencoder):
        return False
    half = next(autoencoder.network.parameters()).dtype == torch.float16
    return half and bool(whole_config(autoencoder.network).get("force_upcast"))
