"""Latents of any images and any autoencoder, encoded in each step or once into a cache.

    batch with a cache:  {"mean", "logvar" [B, c, h, w] or "latents", "index", "variant", "labels", "captions", ...}
    batch without:       {"images" [B, C, H, W], "index", "variant", "labels", "captions"}; the task encodes the images

Both have the same keys (index, variant) in the same order, so training on the cache equals training on the images. The
task samples a cached posterior at each step, and each epoch takes another of the K crop and flip variants.

Saves: the encoders' forwards in each step (autoencoder, captions' encoder, teacher)
Costs: one pass over all images and variants by `cache-latents`; disk: 16 kB a variant for 256 x 256 pixels at SD's
    shape in float16, 4 kB in int8
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_efficient.data.images.image_module import KeyedModule
from lit_efficient.data.images.image_source import ImageSource
from lit_efficient.data.latents.latent_format import (
    Format,
    Moments,
    StoredCondition,
    StoredDtype,
    decode_pixels,
    normalize_item,
)
from lit_efficient.data.latents.latent_store import COMMAND, VERSION, LatentStore, read_manifest, refuse_other
from lit_efficient.data.latents.latent_writer import Encoders, build_latents, device_of
from lit_efficient.data.latents.model_scaling import pipeline_encoders, pipeline_scaling
from lit_efficient.data.latents.teacher_features import TeacherFeatures, stored_features
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.files.cache import cache_root, digest_of
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key
from lit_efficient.mechanisms.progress import Progress
from lit_efficient.models.libraries.autoencoders import build_autoencoder
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.latent_codec import AutoencoderOnDisk, LatentCodec, find_autoencoder
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig
from lit_efficient.models.networks.autoencoder import AutoencoderConfig

MEASURED_IMAGES = 256
IMAGES_AT_ONCE = 32
_HINT = f"Restore the settings, give another folder, or make the cache again: {COMMAND} --overwrite. "
_HINT += "cached: false encodes in each step."


class LatentData(KeyedModule):
    """DataModule of ``LatentDiffusion``: the images of a source as latents, cached or encoded live.

    ``python -m lit_efficient cache-latents --config X`` writes the cache, where X is the config that ``fit`` runs. If
    the cache was made from other settings or contents than a run asks for, the run stops with an error that names each
    difference. Batch size, workers and the seed of the order are those of ``images``.

    Args:
        images: Source of the images: ``DigitImages``, ``PhotoCrops``, ``ImageData``, or another ``ImageSource``.
        autoencoder: A model of diffusers; the path of a checkpoint of ``Autoencoding``; or the configuration of this
            package's autoencoder, with random weights that are always the same. null takes the autoencoder of the
            pipeline from which the trained network comes, and its text encoders unless ``text_encoder`` names others:
            frozen ones in the number format of the network.
        text_encoder: Encoder of the captions. null beside an ``autoencoder``: batches hold the captions as text, if
            there are any.
        features: Frozen encoder whose features come with each batch, for ``HiddenAlignment(teacher=None)``.
        folder: Folder of the cache. null: a folder in LIT_EFFICIENT_CACHE or ~/.cache/lit_efficient whose name is the
            hash of all that the cache is made from.
        format: ``posterior`` stores mean and log-variance, which are sampled at each step. ``int8`` stores the mean
            alone, one byte for each number.
        dtype: Number format of ``posterior``. float32 trains exactly as without a cache; float16 takes half of the
            disk and rounds by 2^-11.
        statistics: Mean and standard deviation of each channel that normalise the latents: ``measured`` on the training
            part (with a cache on all images, without on 256), or ``declared`` by the configuration of the autoencoder.
            null takes those of the pipeline from which the trained network comes, and measures them for other networks.
        condition: What a cache stores of conditions of ``ImageData``: ``pixels``, as ControlNet takes them, or
            ``latents`` in the format of the images, as editing models and ``DiffusionPreference`` take them. ``masked``
            stores the latents of the images without their masked part, for inpainting with the masks of the data.
        cached: Train on a cache. false encodes in each step.
        cached_text: Store the embeddings of captions in the cache. false stores the captions alone, which the task
            encodes in each step, as ``text_training`` requires.
        build: Make the cache in ``prepare_data`` if it does not exist.

    Raises:
        ConfigurationError: If an argument is invalid, or the cache is missing, damaged or made from something else.
    """

    batches: ClassVar[str] = "latents"

    def __init__(
        self,
        images: LightningDataModule,
        autoencoder: AutoencoderConfig | DiffusersModelConfig | str | None = None,
        text_encoder: TextEncoderConfig | None = None,
        features: TeacherFeatures | None = None,
        folder: str | None = None,
        format: Format = "posterior",
        dtype: StoredDtype = "float32",
        statistics: Literal["measured", "declared"] | None = None,
        condition: StoredCondition = "pixels",
        cached: bool = True,
        build: bool = False,
        cached_text: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(images, ImageSource):
            allowed = "an ImageSource (DigitImages, PhotoCrops, ImageData, ...)"
            raise refusal("LatentData", "images", allowed, type(images).__name__)
        if build and not cached:
            raise refusal("LatentData", "build", "false with cached: false, which reads no cache", build)
        if cached and getattr(getattr(images, "stream", None), "enabled", False):
            raise refusal("LatentData", "cached", "false for streamed images, which have no numbers", cached)
        self.images: Any = images
        self.autoencoder = autoencoder
        self.text_encoder_config = text_encoder
        self.features = features
        self.folder = folder
        self.format: Format = format
        self.dtype: StoredDtype = dtype
        self.statistics = statistics
        self.condition: StoredCondition = condition
        self.cached = cached
        self.build = build
        self.backbone: DiffusersModelConfig | None = None  # the trained network, for commands without a trainer
        self.cached_text = cached_text
        self.codec: LatentCodec
        self.text_encoder: TextEncoder | None = None
        self._encoders: Encoders | None = None
        self._identity: dict[str, str] | None = None
        self._store: LatentStore | None = None
        self._bucket = (0, 0)
        self._planned = False  # encoders have shapes alone, and no cache is read or written

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a latent; with several buckets, of the bucket with most training images."""
        height, width = self._bucket
        return self.codec.latent_channels, height // self.codec.factor, width // self.codec.factor

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if the images have no labels."""
        return int(self.images.num_classes)

    @property
    def caches_text(self) -> bool:
        """True if batches hold stored embeddings of captions."""
        return self.cached and self.cached_text and self.text_encoder_config is not None

    @property
    def source(self) -> Any:
        """Images, whose parts, order and batches the latents share."""
        return self.images

    @property
    def items(self) -> Any:
        """Normalised items of the cache; without a cache the images."""
        if self._store is None:
            return self.images.dataset
        return NormalizedLatents(self._store, self.codec.mean, self.codec.std)

    @property
    def class_names(self) -> list[str]:
        """Name of each class."""
        return list(self.images.class_names)

    @property
    def variants(self) -> int:
        """Number of crop and flip variants of each image."""
        return int(self.images.variants)

    @property
    def judge(self) -> object:
        """Network of the source that judges images, or None: ``HiddenAlignment(teacher="data.judge")`` uses it."""
        return getattr(self.images, "judge", None)

    @property
    def judges_samples(self) -> bool:
        """True if the source has a judge."""
        return hasattr(self.images, "score_samples") and getattr(self.images, "judges_samples", True)

    def score_samples(
        self, images: Tensor, labels: Tensor | None = None, captions: list[str] | None = None
    ) -> dict[str, float]:
        """Return the scores of the source for images [M, C, H, W] in [-1, 1]; nothing without a judge."""
        score = getattr(self.images, "score_samples", None)
        if score is None:
            return {}
        return dict(score(images, labels, captions))

    def prepare_data(self) -> None:
        """Check the whole cache, or make it. One process does it."""
        self.tell_network()
        self.images.prepare_data()
        if not self.cached or self._planned:
            return
        self.images.setup("fit")
        if self.build:
            rank_zero_info(f"LatentData: the latent cache is {self.cache_folder()}")
            self.write_cache(progress=partial(Progress, "encoding", "images"))
        else:
            self._open(thorough=True)

    def tell_network(self) -> None:
        """Tell the images which network is trained: its pipeline makes their class images."""
        if hasattr(self.images, "network"):
            trained = None if self.trainer is None else getattr(self.trainer.lightning_module, "backbone", None)
            self.images.network = self.backbone or trained

    def setup(self, stage: str) -> None:
        self.tell_network()
        self.images.setup(stage)
        self.encoders()
        if self.cached and not self._planned:
            self._store = self._open(thorough=False)
        self.codec = self._codec(self._store)
        if getattr(self.images, "streamed", None) is not None:
            shapes = self.images.view.shapes()
            self._bucket = min(shapes, key=lambda shape: abs(shape[0] - shape[1]))
            return
        # sorted() makes the choice between two equally common buckets independent of the order of the images.
        buckets = Counter(self.images.bucket_of(index) for index in self.images.train_index)
        self._bucket = max(sorted(buckets), key=lambda bucket: buckets[bucket])

    def write_cache(self, **options: Any) -> dict[str, object]:
        """Make the cache, or resume an unfinished one, after ``images.setup``. Return its manifest.

        Args:
            **options: ``batch_size``, ``num_workers``, ``device``, ``shard_rows``, ``overwrite``, ``progress`` and
                ``ranks`` of `build_latents`.
        """
        # The batch size of a task that encodes live, because the rounding of a convolution depends on it.
        options.setdefault("batch_size", min(self.images.batch_size, IMAGES_AT_ONCE))
        encoders = self.encoders()
        about = {
            "autoencoder": described(self.autoencoder),
            "text_encoder": described(self.text_encoder_config),
            "teacher": described(self.features and self.features.teacher),
        }
        manifest = build_latents(self.cache_folder(), self.images, encoders, self.identity(), about=about, **options)
        if isinstance(encoders.codec.held, AutoencoderOnDisk) and encoders.codec.held.loaded:
            # Note the fingerprint while the weights are in memory: a checkpoint would load them for it alone.
            self._codec(self._open(thorough=False)).fingerprint()
        return manifest

    def _codec(self, store: LatentStore | None) -> LatentCodec:
        autoencoder = self.encoders().codec.held
        if self.statistics == "declared":
            return LatentCodec.declared(autoencoder)
        scaling = pipeline_scaling(self, autoencoder.latent_channels)
        if self.statistics is None and scaling is not None:
            return LatentCodec(autoencoder, *scaling)
        if self._planned:
            return self.encoders().codec
        mean, std = self._measured() if store is None else store.statistics
        return LatentCodec(autoencoder, mean, std)

    def cache_folder(self) -> Path:
        """Return the folder of the cache."""
        if self.folder is not None:
            return Path(self.folder).expanduser()
        return cache_root() / "latents" / digest_of(self.identity())[:16]

    def identity(self) -> dict[str, str]:
        """Return all that the content of the cache depends on, by name. It is computed once."""
        # The hashes of large encoders take seconds.
        if self._identity is None:
            encoders = self.encoders()
            # Repeats are no content.
            parts = (sorted(set(self.images.train_index)), self.images.val_index, self.images.test_index)
            self._identity = {
                "version": VERSION,
                "autoencoder": encoders.codec.fingerprint(),
                "text_encoder": "none" if encoders.text is None else encoders.text.fingerprint(),
                "format": self.format,
                "dtype": "uint8" if self.format == "int8" else self.dtype,
                "split": digest_of(parts),
            }
            if self.condition != "pixels":
                self._identity["condition"] = self.condition
            if self.features is not None and encoders.teacher is not None:
                self._identity |= self.features.identity(encoders.teacher)
            for name, value in ({"variants": str(self.images.variants)} | self.images.identity()).items():
                # The entry "split" above holds for any source.
                if name != "split":
                    self._identity[f"images.{name}"] = value
        return self._identity

    def encoders(self) -> Encoders:
        """Return autoencoder, text encoder and teacher, found once.

        The weights of large encoders that were used before stay on disk until they are needed.
        """
        if self._encoders is None:
            if self.autoencoder is None:
                self.autoencoder, text = pipeline_encoders(self, self.backbone)
                self.text_encoder_config = self.text_encoder_config or text
            autoencoder = find_autoencoder(self.autoencoder)
            channels = autoencoder.latent_channels
            codec = LatentCodec(autoencoder, torch.zeros(channels), torch.ones(channels))
            encoders = Encoders(codec, format=self.format, dtype=self.dtype, condition=self.condition)
            if self.text_encoder_config is not None:
                self.text_encoder = TextEncoder.find(self.text_encoder_config)
                if self.cached_text:
                    encoders.text = self.text_encoder
            if self.features is not None:
                encoders.teacher = self.features.find(self.images)
                encoders.feature_dtype = self.features.dtype
            self._encoders = encoders
        return self._encoders

    def build_encoders(self, without_values: Callable[[], AbstractContextManager[None]]) -> None:
        """Build the encoders for a plan, which needs neither their weights nor a cache, and no class images.

        Only models of diffusers and transformers without a teacher are built in this way.

        Args:
            without_values: Context in which tensors have shapes alone.
        """
        if hasattr(self.images, "planned"):
            self.images.planned = True
        if self.features is not None:
            return
        text = self.text_encoder_config
        autoencoder = self.autoencoder
        if autoencoder is None:
            autoencoder, pipeline_text = pipeline_encoders(self, self.backbone)
            text = text or pipeline_text
        if not isinstance(autoencoder, DiffusersModelConfig):
            return
        self.autoencoder = autoencoder
        self.text_encoder_config = text
        with without_values():
            built = build_autoencoder(autoencoder)
            if text is not None:
                self.text_encoder = TextEncoder.load(text)
        channels = built.latent_channels
        codec = LatentCodec(built, torch.zeros(channels), torch.ones(channels))
        self._encoders = Encoders(codec, format=self.format, dtype=self.dtype, condition=self.condition)
        self._planned = True

    def encoded_without_values(self, batch: Any, without_values: Callable[[], AbstractContextManager[None]]) -> Any:
        """Return a batch of images as the cache would hold it, in a plan without that cache."""
        if not (self._planned and self.cached):
            return batch
        with without_values():
            rows = self.encoders().encode(batch, torch.device("cpu"))
            if self.format == "int8":
                rows["latents"] = rows.pop("mean")
                rows.pop("logvar", None)
            if "condition" in rows:
                rows["condition"] = decode_pixels(rows["condition"])
            if self.text_encoder is not None and self.cached_text:
                found = self.text_encoder.encode(batch["captions"])
                rows |= {"text": found.hidden, "text_mask": found.mask}
                if found.pooled is not None:
                    rows["pooled"] = found.pooled
                self.text_encoder.remember_empty()
        return rows

    def _open(self, thorough: bool) -> LatentStore:
        folder = self.cache_folder()
        refuse_other(folder, read_manifest(folder)["identity"], self.identity(), _HINT)
        return LatentStore(folder, thorough)

    def _measured(self) -> tuple[Tensor, Tensor]:
        """Return the statistics for a run that does not use a cache.

        They come from the cache on disk that has these settings, if there is one. Otherwise they are measured on a few
        training images.
        """
        # A run without a cache is to train in the latent space of the cached runs, so that their checkpoints fit.
        try:
            return self._open(thorough=False).statistics
        except ConfigurationError:
            pass
        streamed = getattr(self.images, "streamed", None)
        train = self.images.train_index
        count = MEASURED_IMAGES if streamed is not None else min(len(train), MEASURED_IMAGES)
        rank_zero_info(f"LatentData: measuring the statistics of the channels on {count} images, as there is no cache.")
        codec = self.encoders().codec
        device = device_of("auto")
        parts = []
        if streamed is not None:
            items = streamed.first_items(count)
        else:
            items = (self.images.dataset[train[i * len(train) // count], 0] for i in range(count))
        for item in items:
            images = item["images"]
            found = codec.moments(images[None].to(device))
            codec.note_finite(*found)
            reason = codec.explain_not_finite()
            if reason is not None:
                raise ConfigurationError(f"LatentData: the statistics of the latents cannot be measured: {reason}")
            parts.append(Moments.of(*found))
        mean, std = Moments.join(parts).mean_and_std()
        return _rounded(mean), _rounded(std)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> object:
        """Add the features of the teacher to a live batch. A cached batch holds them already."""
        teacher = self.encoders().teacher
        if teacher is None or "features" in batch:
            return batch
        teacher.to(batch["images"].device)
        assert self.features is not None
        return {**batch, "features": stored_features(teacher, batch["images"], self.features.dtype).float()}


@dataclass(eq=False)
class NormalizedLatents:
    """Items of a cache, with mean 0 and variance 1 in each channel."""

    store: LatentStore  # the cache
    mean: Tensor  # of each channel, [c]
    std: Tensor  # of each channel, [c]

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, key: Key) -> dict[str, Any]:
        return normalize_item(self.store[key], self.mean, self.std)


def described(spec: object) -> str:
    """Return the name of a model if it has one, else the name of its class."""
    if spec is None or isinstance(spec, str):
        return spec or "none"
    return str(getattr(spec, "name_or_path", None) or type(spec).__name__)


def _rounded(values: list[float]) -> Tensor:
    # Four digits: a device that rounds differently gives the same statistics, so that a checkpoint fits.
    return torch.tensor([float(f"{value:.4g}") for value in values])
