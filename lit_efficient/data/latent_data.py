"""Any images as latents of any autoencoder, encoded in each step or once and for all.

    batch, cached: {"mean", "logvar" [B, c, h, w] or "latents", "index", "variant", "labels", "captions", ...}
    batch, live:   {"images" [B, C, H, W], "index", "variant", "labels", "captions"}, encoded in the task by ``codec``

Both are batches of the same keys (index, variant) in the same order, so training on one is training on the other. A
cached posterior is sampled at each step by the task, and each epoch takes another of the K crop and flip variants.

Saves: the encoders' forwards in each step (autoencoder, captions' encoder, teacher)
Costs: one pass over all images and variants by `cache-latents`; disk: 16 kB a variant for 256 x 256 pixels at SD's
    shape in float16, 4 kB in int8
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_efficient.data.images.image_module import KeyedModule
from lit_efficient.data.images.image_source import ImageSource
from lit_efficient.data.latents.latent_format import Format, Moments, StoredDtype, normalize_item
from lit_efficient.data.latents.latent_store import COMMAND, VERSION, LatentStore, read_manifest, refuse_other
from lit_efficient.data.latents.latent_writer import Encoders, build_latents, device_of
from lit_efficient.data.latents.teacher_features import TeacherFeatures, stored_features
from lit_efficient.errors import ConfigurationError, check_choice, refusal
from lit_efficient.files.cache import cache_root, digest_of
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.latent_codec import AutoencoderOnDisk, LatentCodec, find_autoencoder
from lit_efficient.models.libraries.text_encoder import TextEncoder, TextEncoderConfig
from lit_efficient.models.networks.autoencoder import AutoencoderConfig

MEASURED_IMAGES = 256
IMAGES_AT_ONCE = 32
_WAY_OUT = (
    "Put the settings back, give another folder, or make the cache again: " + COMMAND + " --overwrite; cached: false "
    "encodes in each step."
)


class LatentData(KeyedModule):
    """Images of a source as latents, cached or encoded live; the data module of ``LatentDiffusion``.

    The cache is never made in passing: ``python -m lit_efficient cache-latents --config X`` writes it, X being the very
    config that ``fit`` runs, and any difference between what it was made from and what a run asks for is an error that
    names it. Batch size, workers and the seed of the order are the source's.

    Args:
        images: An image source: ``DigitImages``, ``PhotoCrops``, ``ImageData``, or another ``ImageSource``.
        autoencoder: A model of diffusers; the path of a checkpoint of ``Autoencoding``; or the shape of ours, with
            random weights (always the same ones).
        text_encoder: The encoder of captions; None: batches have captions only as text, if any.
        features: A frozen encoder whose features come with each batch, for ``HiddenAlignment(teacher=None)``.
        folder: Where the cache is. None: named by what it is made from, in LIT_EFFICIENT_CACHE or
            ~/.cache/lit_efficient.
        format: ``posterior``: mean and log-variance, sampled at each step. ``int8``: the mean alone, a byte a number.
        dtype: Number format of ``posterior``. float32 trains exactly as live; float16 takes half, and rounds by 2^-11.
        statistics: Channels' mean and deviation by which latents are normalised: ``measured`` on the training part
            (for the cache on all of it, without one on 256 images), or ``declared`` by the model's configuration.
        cached: False encodes in each step.
        build: Make the cache in ``prepare_data`` if it is not there.

    Raises:
        ConfigurationError: For an argument that cannot work, and for a cache that is missing, damaged or another's.
    """

    batches: ClassVar[str] = "latents"

    def __init__(
        self,
        images: LightningDataModule,
        autoencoder: AutoencoderConfig | DiffusersModelConfig | str,
        text_encoder: TextEncoderConfig | None = None,
        features: TeacherFeatures | None = None,
        folder: str | None = None,
        format: Format = "posterior",
        dtype: StoredDtype = "float32",
        statistics: Literal["measured", "declared"] = "measured",
        cached: bool = True,
        build: bool = False,
    ) -> None:
        super().__init__()
        check_choice("LatentData", "format", format, get_args(Format))
        check_choice("LatentData", "dtype", dtype, get_args(StoredDtype))
        check_choice("LatentData", "statistics", statistics, ("measured", "declared"))
        if not isinstance(images, ImageSource):
            allowed = "an ImageSource (DigitImages, PhotoCrops, ImageData, ...)"
            raise refusal("LatentData", "images", allowed, type(images).__name__)
        if build and not cached:
            raise refusal("LatentData", "build", "false with cached: false, which reads no cache", build)
        self.images: Any = images
        self.autoencoder = autoencoder
        self.text_encoder_config = text_encoder
        self.features = features
        self.folder = folder
        self.format: Format = format
        self.dtype: StoredDtype = dtype
        self.statistics = statistics
        self.cached = cached
        self.build = build
        self.codec: LatentCodec
        self.text_encoder: TextEncoder | None = None
        self._encoders: Encoders | None = None
        self._identity: dict[str, str] | None = None
        self._store: LatentStore | None = None
        self._bucket = (0, 0)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a latent; with several buckets, of the one with the most training images."""
        height, width = self._bucket
        return self.codec.latent_channels, height // self.codec.factor, width // self.codec.factor

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if images have no label."""
        return int(self.images.num_classes)

    @property
    def source(self) -> Any:
        """The images, whose parts, order and batches are those of the latents."""
        return self.images

    @property
    def items(self) -> Any:
        """What the cache holds, normalised; without one the images."""
        if self._store is None:
            return self.images.dataset
        return NormalizedLatents(self._store, self.codec.mean, self.codec.std)

    @property
    def class_names(self) -> list[str]:
        """Name of each class."""
        return list(self.images.class_names)

    @property
    def variants(self) -> int:
        """Crop and flip variants of each image."""
        return int(self.images.variants)

    @property
    def judge(self) -> Any:
        """The source's network that judges images, if it has one: ``HiddenAlignment(teacher="data.judge")``."""
        return getattr(self.images, "judge", None)

    @property
    def judges_samples(self) -> bool:
        """Whether the source has a judge."""
        return hasattr(self.images, "score_samples") and getattr(self.images, "judges_samples", True)

    def score_samples(self, images: Tensor, labels: Tensor | None = None) -> dict[str, float]:
        """The source's judgement of images [M, C, H, W] in [-1, 1]; nothing of a source without a judge."""
        score = getattr(self.images, "score_samples", None)
        return {} if score is None else dict(score(images, labels))

    def prepare_data(self) -> None:
        """Check the whole cache, or make it; one process does it."""
        self.images.prepare_data()
        if self.cached:
            self.images.setup("fit")
            if self.build:
                rank_zero_info(f"LatentData: the latent cache is {self.cache_folder()}")
                self.write_cache()
            else:
                self._open(thorough=True)

    def setup(self, stage: str) -> None:
        self.images.setup(stage)
        encoders = self.encoders()
        self.text_encoder = encoders.text
        if self.cached:
            self._store = self._open(thorough=False)
        self.codec = self._codec(self._store)
        buckets = Counter(self.images.bucket_of(index) for index in self.images.train_index)
        self._bucket = max(sorted(buckets), key=lambda bucket: buckets[bucket])

    def write_cache(self, **options: Any) -> dict[str, Any]:
        """Make the cache, or go on with it, after ``images.setup``; return its manifest.

        Args:
            **options: ``batch_size``, ``num_workers``, ``device``, ``shard_rows``, ``overwrite``, ``progress`` of
                `build_latents`.
        """
        # By as many as the task encodes at once when it trains on images: a convolution's rounding depends on it.
        options.setdefault("batch_size", min(self.images.batch_size, IMAGES_AT_ONCE))
        names = {
            "autoencoder": described(self.autoencoder),
            "text_encoder": described(self.text_encoder_config),
            "teacher": described(None if self.features is None else self.features.teacher),
        }
        encoders = self.encoders()
        made = build_latents(self.cache_folder(), self.images, encoders, self.identity(), about=names, **options)
        if isinstance(encoders.codec.held, AutoencoderOnDisk) and encoders.codec.held.loaded:
            self._codec(self._open(thorough=False)).fingerprint()  # a checkpoint would load it for that alone
        return made

    def _codec(self, store: LatentStore | None) -> LatentCodec:
        held = self.encoders().codec.held
        if self.statistics == "declared":
            return LatentCodec.declared(held)
        return LatentCodec(held, *(self._measured() if store is None else store.statistics))

    def cache_folder(self) -> Path:
        """Where the cache is."""
        if self.folder is not None:
            return Path(self.folder).expanduser()
        return cache_root() / "latents" / digest_of(self.identity())[:16]

    def identity(self) -> dict[str, str]:
        """All that the cache's content depends on, by name; hashed once."""
        if self._identity is None:
            encoders = self.encoders()
            parts = (self.images.train_index, self.images.val_index, self.images.test_index)
            images = {"variants": str(self.images.variants)} | self.images.identity()
            images.pop("split", None)  # said below, of any source
            self._identity = {
                "version": VERSION,
                "autoencoder": encoders.codec.fingerprint(),
                "text_encoder": "none" if encoders.text is None else encoders.text.fingerprint(),
                **({} if encoders.teacher is None or not self.features else self.features.identity(encoders.teacher)),
                "format": self.format,
                "dtype": "uint8" if self.format == "int8" else self.dtype,
                "split": digest_of(parts),
                **{f"images.{name}": value for name, value in images.items()},
            }
        return self._identity

    def encoders(self) -> Encoders:
        """Autoencoder, text encoder and teacher, found once; the two first wait on disk if they are large and known."""
        if self._encoders is None:
            autoencoder = find_autoencoder(self.autoencoder)
            channels = autoencoder.latent_channels
            self._encoders = Encoders(
                LatentCodec(autoencoder, torch.zeros(channels), torch.ones(channels)),
                None if self.text_encoder_config is None else TextEncoder.find(self.text_encoder_config),
                None if self.features is None else self.features.find(self.images),
                self.format,
                self.dtype,
                "float16" if self.features is None else self.features.dtype,
            )
        return self._encoders

    def _open(self, thorough: bool) -> LatentStore:
        folder = self.cache_folder()
        refuse_other(folder, read_manifest(folder)["identity"], self.identity(), _WAY_OUT)
        return LatentStore(folder, thorough)

    def _measured(self) -> tuple[Tensor, Tensor]:
        """Without a cache: of one that would be it if it is there, else of some images."""
        try:
            return self._open(thorough=False).statistics
        except ConfigurationError:
            pass
        train, dataset = self.images.train_index, self.images.dataset
        count = min(len(train), MEASURED_IMAGES)
        rank_zero_info(f"LatentData: no cache tells the channels' statistics: measuring them on {count} images.")
        codec, device, parts = self.encoders().codec, device_of("auto"), []
        for i in range(count):
            images = dataset[train[i * len(train) // count], 0]["images"]
            parts.append(Moments.of(*codec.moments(images[None].to(device))))
        # Four digits: a device that rounds otherwise gives the same latent space, so a checkpoint still fits.
        mean, std = ([float(f"{value:.4g}") for value in values] for values in Moments.join(parts).mean_and_std())
        return torch.tensor(mean), torch.tensor(std)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Live, the teacher's features of a batch; cached, they are in it."""
        teacher = self.encoders().teacher
        if teacher is None or "features" in batch:
            return batch
        teacher.to(batch["images"].device)
        assert self.features is not None
        return {**batch, "features": stored_features(teacher, batch["images"], self.features.dtype).float()}


@dataclass(eq=False)
class NormalizedLatents:
    """The items of a cache, of mean 0 and variance 1 in each channel."""

    store: LatentStore  # the cache
    mean: Tensor  # of each channel, [c]
    std: Tensor  # of each channel, [c]

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, key: Key) -> dict[str, Any]:
        return normalize_item(self.store[key], self.mean, self.std)


def described(spec: Any) -> str:
    """A model's name where it has one, else its class."""
    if spec is None or isinstance(spec, str):
        return spec or "none"
    return str(getattr(spec, "name_or_path", None) or type(spec).__name__)
