"""Trained autoencoder with the statistics of its latents, which encodes images for a diffusion model and decodes its
output.

    normalised = (latent - mean) / std    for each channel

A diffusion model needs inputs of zero mean and unit variance. Latents of autoencoders are different: standard
deviations of 0.9 to 2.0 and means of -0.2 to 1.1 were measured on the digits, and about 5.5 for Stable Diffusion's.
Each channel is therefore shifted and scaled, by statistics measured on the user's images or declared by the model's
configuration.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import CheckpointError, ConfigurationError, refusal
from lit_efficient.files.cache import digest_of
from lit_efficient.files.known_facts import content_key, known_facts, note_facts
from lit_efficient.internals.torch_dispatch import has_values
from lit_efficient.internals.torch_tensors import version, widest_float
from lit_efficient.models.libraries.autoencoders import (
    AutoencoderSpec,
    DiffusersAutoencoder,
    ImageAutoencoder,
    build_autoencoder,
    check_kind,
    declared_statistics,
    description,
    empty_autoencoder,
    stored_config,
    whole_config,
)
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.pipeline_folder import in_pipeline
from lit_efficient.models.networks.autoencoder import AutoencoderConfig, check_images, sample_posterior
from lit_efficient.surgery import moved, own_draws

EMBEDDED_BYTES = 32 * 2**20  # weights up to this size are copied into each checkpoint; larger ones are named


class ChannelStatistics:
    """Running mean and standard deviation of each channel of tensors [B, c, ...], as if all had come at once.

        n = a + b;    mean = mean_a + (mean_b - mean_a) b / n;    M = M_a + M_b + (mean_b - mean_a)^2 a b / n

    M is the sum of squared distances from the mean, and the variance is M / (n - 1). Sums are kept in float64: the
    result does not depend on the division into pieces, to about 1e-15, and large means cost no digits of the variance.

    Source: Chan, Golub and LeVeque (1979), http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.
    """

    def __init__(self, channels: int) -> None:
        self.count = 0  # elements of each channel
        self.mean = torch.zeros(channels, dtype=torch.float64)
        self._squares = torch.zeros(channels, dtype=torch.float64)

    def update(self, values: Tensor) -> None:
        """Add a piece [B, c, ...]."""
        wide = values.detach().to(widest_float(values.device))
        columns = wide.transpose(0, 1).flatten(1)  # [c, elements]
        added = columns.shape[1]
        if added == 0:
            return
        mean = columns.mean(1)
        squares = (columns - mean[:, None]).square().sum(1).cpu().double()
        delta = mean.cpu() - self.mean
        total = self.count + added
        self._squares += squares + delta.square() * (self.count * added / total)
        self.mean += delta * (added / total)
        self.count = total

    @property
    def std(self) -> Tensor:
        """Return the standard deviation [c], float64.

        Raises:
            ConfigurationError: For fewer than two elements, and for a channel that is constant or not finite.
        """
        if self.count < 2:
            raise ConfigurationError(
                f"ChannelStatistics: at least two elements per channel are needed, got {self.count}"
            )
        std = (self._squares / (self.count - 1)).sqrt()
        resolution = torch.finfo(torch.float32).eps * self.mean.abs()  # a smaller deviation is rounding
        unusable = (~(std > resolution) | ~std.isfinite()).nonzero().flatten().tolist()
        if unusable:
            raise ConfigurationError(
                f"ChannelStatistics: channels {unusable} are constant or not finite (standard deviations "
                f"{std[unusable].tolist()}): they cannot be normalised"
            )
        return std


class AutoencoderOnDisk:
    """Autoencoder of more than 32 MB whose weights are loaded when they are needed. All else is known from an earlier
    run.

    Args:
        spec: Description of the autoencoder.
        key: Key of `content_key` under which its facts are stored.
        facts: ``shape`` (channels of images and latents, factor) and ``declared`` statistics.
    """

    def __init__(self, spec: DiffusersModelConfig | str, key: str, facts: dict[str, Any]) -> None:
        self.source = spec
        self.key = key
        self.image_channels, self.latent_channels, self.factor = facts["shape"]
        self.declared = torch.tensor(facts["declared"][0]), torch.tensor(facts["declared"][1])
        self._loaded: Any = None

    @property
    def loaded(self) -> bool:
        """Return whether the weights are in memory."""
        return self._loaded is not None

    def load(self) -> Any:
        """Return the model, frozen, and load it at the first call. No random number is drawn."""
        if self._loaded is None:
            with own_draws(0):
                self._loaded = _frozen(build_autoencoder(self.source))
        return self._loaded


def find_autoencoder(spec: AutoencoderSpec) -> ImageAutoencoder | AutoencoderOnDisk:
    """Return the described autoencoder. A large one that an earlier run has loaded stays on disk until it is needed.

    Raises:
        ConfigurationError: If it cannot be built.
    """
    if isinstance(spec, DiffusersModelConfig):
        spec = in_pipeline(spec, ("vae",))
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
        if not Path(spec).is_file():
            return None
        return content_key("checkpoint", [Path(spec)], ["diffusers"])
    if isinstance(spec, AutoencoderConfig) or spec.draws_weights or not Path(spec.name_or_path or "").is_dir():
        return None
    folder = Path(spec.name_or_path or "", spec.subfolder)
    about = {name: value for name, value in asdict(spec).items() if name != "name_or_path"}
    return content_key(["autoencoder", about], [folder], ["diffusers"])


def _frozen(autoencoder: Any) -> Any:
    """Freeze an autoencoder and put it into evaluation mode; convert it to float32 if its format would overflow."""
    autoencoder.eval().requires_grad_(False)
    if _overflows(autoencoder):
        return autoencoder.float()
    return autoencoder


class LatentCodec:
    """Frozen autoencoder with per-channel mean and standard deviation of its sampled latents.

    It is deliberately not an ``nn.Module``: a LightningModule that holds one does not train, count, average, quantise
    or shard it, and the ``state_dict`` of its checkpoint is that of the diffusion model only.

    It computes in the format of the autoencoder's weights, independent of autocast, so that latents encoded in a
    training step equal those in a cache. Inputs and outputs are float32. float16 weights of a model that declares
    ``force_upcast`` (its activations overflow) are converted to float32.

    Args:
        autoencoder: The trained model, which is frozen and put into evaluation mode, or one on disk.
        mean: Per-channel mean of sampled latents, [c].
        std: Per-channel standard deviation of sampled latents, [c], above 0.

    Raises:
        ConfigurationError: If the statistics do not fit the latents.
    """

    def __init__(self, autoencoder: "ImageAutoencoder | AutoencoderOnDisk", mean: Tensor, std: Tensor) -> None:
        self.held: Any = autoencoder if isinstance(autoencoder, AutoencoderOnDisk) else _frozen(autoencoder)
        self._finite: Tensor | None = None  # whether the last encoded moments were
        self._drawn: Tensor | None = None  # whether the last decoded images were, or their latents were not
        self._fingerprints: dict[tuple[str, int], str] = {}
        self.image_channels = autoencoder.image_channels
        self.latent_channels = autoencoder.latent_channels
        self.factor = autoencoder.factor  # pixels per latent position, on each side
        self.mean = mean.detach().float().cpu()
        self.std = std.detach().float().cpu()
        expected = (autoencoder.latent_channels,)
        if self.mean.shape != expected or self.std.shape != expected or not bool((self.std > 0).all()):
            allowed = f"{expected[0]} values each, as many as the latents' channels, and std above 0"
            raise refusal("LatentCodec", "mean and std", allowed, (self.mean.tolist(), self.std.tolist()))

    @property
    def keeps_pixels(self) -> bool:
        """Return whether normalised latents are the pixels in [-1, 1] themselves."""
        return self.factor == 1 and not self.mean.any() and bool((self.std == 1).all())

    @property
    def autoencoder(self) -> Any:
        """Return the model; one on disk is loaded."""
        if isinstance(self.held, AutoencoderOnDisk):
            return self.held.load()
        return self.held

    def shrink_mask(self, mask: Tensor) -> Tensor:
        """Return a mask of pixels [B, 1, H, W] as one of latents [B, 1, h, w], each the mean of its pixels."""
        return F.avg_pool2d(mask.float(), self.factor)

    def sample_mask(self, mask: Tensor) -> Tensor:
        """Return a mask of pixels [B, 1, H, W] as one of latents [B, 1, h, w], each a pixel, as inpainting sees it."""
        return F.interpolate(mask, (mask.shape[2] // self.factor, mask.shape[3] // self.factor))

    @classmethod
    def declared(cls, autoencoder: "ImageAutoencoder | AutoencoderOnDisk") -> "LatentCodec":
        """Return a codec with the statistics that the model's configuration declares: see `declared_statistics`."""
        if isinstance(autoencoder, AutoencoderOnDisk):
            return cls(autoencoder, *autoencoder.declared)
        return cls(autoencoder, *declared_statistics(autoencoder))

    @classmethod
    def measured(cls, autoencoder: ImageAutoencoder, images: Iterable[Tensor], seed: int = 0) -> "LatentCodec":
        """Return a codec with the statistics of latents sampled for some images.

        Latents are sampled from the posterior, because the diffusion model sees samples and not means.

        Args:
            autoencoder: The trained model.
            images: Batches [B, C, H, W] in [-1, 1], on the device to encode on, of any sizes.
            seed: Seed of the samples.

        Raises:
            ConfigurationError: Without images, and for a channel that never varies.
        """
        channels = autoencoder.latent_channels
        codec = cls(autoencoder, torch.zeros(channels), torch.ones(channels))
        statistics = ChannelStatistics(channels)
        generator = torch.Generator().manual_seed(seed)
        for batch in images:
            statistics.update(sample_posterior(*codec.moments(batch), generator))
        return cls(autoencoder, statistics.mean, statistics.std)

    @torch.no_grad()
    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map images [B, C, H, W] in [-1, 1] to mean and logvar (or None) of the posterior, not normalised, float32."""
        check_images(images, self.held, "LatentCodec")
        with torch.autocast(images.device.type, enabled=False):
            mean, logvar = self.autoencoder.to(images.device).encode(images.float())
        # Contiguous, because noise that is drawn "like" channels-last latents would have other values at each place.
        if logvar is not None:
            logvar = logvar.float().contiguous()
        return mean.float().contiguous(), logvar

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map images [B, C, H, W] in [-1, 1] to mean and logvar (or None) of the normalised latents, float32.

        Raises:
            ConfigurationError: For images of other channels, or whose sides are no multiples of ``factor``.
        """
        return self.normalize(*self.moments(images))

    def note_finite(self, mean: Tensor, logvar: Tensor | None) -> None:
        """Remember whether encoded moments are finite, without waiting for the device."""
        finite = mean.isfinite().all()
        if logvar is not None:
            finite = finite & logvar.isfinite().all()
        self._finite = finite

    def explain_not_finite(self) -> str | None:
        """Return a clause that names the autoencoder if its last latents were not finite, else None."""
        if self._finite is None or not has_values(self._finite) or bool(self._finite):
            return None
        return self._overflow("latents")

    def check_decoded(self) -> None:
        """Raise ConfigurationError if the last decoded images were not finite although their latents were."""
        if self._drawn is not None and has_values(self._drawn) and not bool(self._drawn):
            raise ConfigurationError(f"These images cannot be shown or scored: {self._overflow('images')}")

    def _overflow(self, what: str) -> str:
        network = getattr(self.autoencoder, "network", self.autoencoder)
        dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
        advice = "" if dtype == "float32" else f": {dtype} overflows in it, so set autoencoder.dtype to float32"
        return f"the frozen autoencoder {type(network).__name__} returned {what} that are not finite{advice}"

    def normalize(self, mean: Tensor, logvar: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Map posterior moments [B, c, h, w] of the autoencoder to those of the normalised latents; None stays None."""
        shift, scale = self._statistics(mean)
        if logvar is not None:
            logvar = logvar - 2.0 * scale.log()
        return (mean - shift) / scale, logvar

    def denormalize(self, latents: Tensor) -> Tensor:
        """Map normalised latents [B, c, h, w] to latents of the autoencoder."""
        shift, scale = self._statistics(latents)
        return latents * scale + shift

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Map normalised latents [B, c, h, w] to images [B, C, H, W], float32, clamped to [-1, 1].

        `check_decoded` says whether the autoencoder overflowed.
        """
        latents = self.denormalize(latents.float())
        with torch.autocast(latents.device.type, enabled=False):
            images: Tensor = self.autoencoder.to(latents.device).decode(latents)
        self._drawn = images.isfinite().all() | ~latents.isfinite().all()
        return images.float().clamp(-1.0, 1.0)

    def fingerprint(self) -> str:
        """Return a SHA-256 digest. Codecs with the same digest share a latent space.

        It covers weights, statistics and, for models of diffusers, the class and the configuration fields that differ
        from its defaults. It is computed once, and for an autoencoder in files once for these files.
        """
        statistics = digest_of([self.mean.tolist(), self.std.tolist()])
        on_disk = isinstance(self.held, AutoencoderOnDisk)
        if on_disk:
            known = known_facts(self.held.key).get(statistics)
            if known:
                return str(known)
        weights = self.autoencoder.state_dict().values()
        which = statistics, sum(0 if tensor.is_inference() else version(tensor) for tensor in weights)
        if which not in self._fingerprints:
            self._fingerprints[which] = self._digest()
            if on_disk:
                note_facts(self.held.key, {statistics: self._fingerprints[which]})
        return self._fingerprints[which]

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted({**self.autoencoder.state_dict(), "mean": self.mean, "std": self.std}.items()):
            digest.update(name.encode())
            # The digest is that of the bytes, because NumPy has no bfloat16.
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        digest.update(description(stored_config(self.autoencoder)).encode())
        return digest.hexdigest()

    def state_dict(self, embed: bool | None = None) -> dict[str, Any]:
        """Return primitives and tensors, which load with ``weights_only=True``.

        Args:
            embed: Whether to include the weights. Otherwise the result names the source of the autoencoder (folder, hub
                name, checkpoint) with the fingerprint, and loading builds it from there. None: weights of more than 32
                MB are left out if they have a source.

        Raises:
            ConfigurationError: If ``embed`` is false and the weights have no source.
        """
        source = self.held.source
        statistics = {"mean": self.mean, "std": self.std}
        if embed is None:
            on_disk = isinstance(self.held, AutoencoderOnDisk)  # only large ones are: they need not be loaded here
            embed = source is None or (not on_disk and _size(self.autoencoder) <= EMBEDDED_BYTES)
        if embed:
            weights = {name: tensor.detach().cpu() for name, tensor in self.autoencoder.state_dict().items()}
            stored = stored_config(self.autoencoder)
            kind = "diffusers" if "_class_name" in stored else "config"
            return {kind: stored, "weights": weights, **statistics}
        if source is None:
            allowed = "true for an autoencoder that was not loaded from a folder, hub or checkpoint"
            raise refusal("LatentCodec", "embed", allowed, embed)
        named = source if isinstance(source, str) else asdict(source)
        return {"source": named, "fingerprint": self.fingerprint(), **statistics}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "LatentCodec":
        """Return the codec that ``state_dict`` was called on. No random number is drawn.

        Raises:
            ConfigurationError: If the weights are neither included nor available at their source.
            CheckpointError: If the source holds other weights now.
        """
        if "source" in state:
            return _from_source(cls, state)
        stored = state.get("diffusers") or state["config"]
        autoencoder = empty_autoencoder(stored, state["weights"], "the weights of the codec")
        return cls(autoencoder, state["mean"], state["std"])

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean = moved(self.mean.view(1, -1, 1, 1), like.device, like.dtype)
        std = moved(self.std.view(1, -1, 1, 1), like.device, like.dtype)
        return mean, std


def _from_source(cls: type[LatentCodec], state: dict[str, Any]) -> LatentCodec:
    source = state["source"]
    spec = source if isinstance(source, str) else DiffusersModelConfig(**source)
    codec = cls(find_autoencoder(spec), state["mean"], state["std"])
    if codec.fingerprint() != state["fingerprint"]:
        described = spec if isinstance(spec, str) else spec.described
        raise CheckpointError(
            f"The autoencoder of {described!r} is not the one that has encoded the latents (fingerprint "
            f"{codec.fingerprint()[:12]}, expected {state['fingerprint'][:12]}): restore the original weights, or "
            "set revision to the hub's commit."
        )
    return codec


def _size(module: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())


def _overflows(autoencoder: ImageAutoencoder) -> bool:
    if not isinstance(autoencoder, DiffusersAutoencoder):
        return False
    half = next(autoencoder.network.parameters()).dtype == torch.float16
    return half and bool(whole_config(autoencoder.network).get("force_upcast"))


class PreviewDecoder:
    """Fast decoder of a codec's normalised latents: AutoencoderTiny (TAESD) in place of the autoencoder that it
    imitates.

        images = tiny.decode((latents std + mean - declared mean) / declared std)

    A Tiny decodes latents *as diffusers' pipelines scale them*, by the statistics that the model's configuration
    declares. The codec may use others, measured ones: latents are converted. It is no ``nn.Module``, for
    `LatentCodec`'s reasons.

    Saves: most of the decoder's compute and memory: 1.2 million parameters in place of Stable Diffusion's 49.5 million
    Costs: fine detail; the scores of a validation use the real decoder
    Source: https://github.com/madebyollin/taesd

    Args:
        codec: Codec of the latents.
        preview: AutoencoderTiny that imitates the codec's autoencoder.

    Raises:
        ConfigurationError: If it is another kind of model, or has other channels or another size.
    """

    def __init__(self, codec: LatentCodec, preview: DiffusersModelConfig) -> None:
        kind = check_kind(preview)
        if kind != "AutoencoderTiny":
            raise refusal("preview", f"the _class_name of {preview.described!r}", "AutoencoderTiny", kind)
        with own_draws():  # a preview must not change the run's random numbers
            tiny = build_autoencoder(preview)
        assert isinstance(tiny, DiffusersAutoencoder)
        for name in ("image_channels", "latent_channels", "factor"):
            ours = getattr(tiny, name)
            theirs = getattr(codec, name)
            if ours != theirs:
                raise ConfigurationError(
                    f"preview: {preview.described!r} has {name} {ours}, and the autoencoder that it is to imitate "
                    f"{theirs}."
                )
        self.codec = codec
        # The Tiny decodes scaled latents. It declares a factor of 1 itself, so that its own codec does not scale again.
        self._tiny = LatentCodec.declared(tiny)
        self._declared = declared_statistics(codec.autoencoder)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Map normalised latents [B, c, h, w] to images [B, C, H, W], float32, clamped to [-1, 1]."""
        mean, std = (statistic.view(1, -1, 1, 1).to(latents.device) for statistic in self._declared)
        return self._tiny.decode((self.codec.denormalize(latents.float()) - mean) / std)

    def check_decoded(self) -> None:
        """Raise ConfigurationError if the last decoded images were not finite although their latents were."""
        self._tiny.check_decoded()


def hole_of(mask: Tensor) -> Tensor:
    """Return the part that inpainting fills in, 0 or 1 for each pixel of a mask [B, 1, H, W] in [0, 1]."""
    return (mask >= 0.5).float()
