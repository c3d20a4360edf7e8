"""Latents that somebody else has encoded, as batches: imagenet.int8, cosmos-imagenet, fast-DiT's and REPA's features.

    latents = (zero + scale * stored - mean) / std

Whatever the files are, a batch is that of `LatentData`'s cache, its keys (row, 0) in the order of the same sampler; a
row's label is read with its latents, by one number.

    imagenet.int8     fields {latents: vae_output, label: label, caption: label_as_text},
                      numbers {scale: 24/255, zero: -12, shape: [4, 32, 32]}                 (SDXL's VAE, not scaled)
    cosmos-imagenet   files imagenet_ci8x8.safetensors, val_files imagenet_ci8x8_val.safetensors,
                      numbers {scale: 16/255}                                                  (Cosmos-Tokenizer CI8x8)
    EDM2, REPA        numbers {content: mean_std}: the standard deviation behind the mean, as further channels
    fast-DiT          fields {latents: imagenet256_features, label: imagenet256_labels}

Saves: downloading the images, and encoding them
"""

from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_efficient.data.images.image_module import KeyedModule
from lit_efficient.data.latents.encoded_dataset import EncodedRows
from lit_efficient.data.latents.encoded_fields import ChannelScaling, EncodedFields, EncodedNumbers
from lit_efficient.data.latents.encoded_sources import EncodedSource, Layout, check_fields, open_encoded
from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.models.libraries.autoencoders import build_autoencoder
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.networks.autoencoder import AutoencoderConfig
from lit_efficient.surgery import own_draws


class EncodedData(KeyedModule):
    """A local folder of latents, as the data module of ``LatentDiffusion``.

    Args:
        folder: Where the files are.
        layout: ``arrays`` (.safetensors, .npy, .npz), ``dataset_json``, ``mds``, ``webdataset`` or ``parquet``;
            ``auto`` by the files' names.
        files: Pattern for the names of the training files (``arrays``, ``webdataset``, ``parquet``), of the listed ones
            (``dataset_json``) or of shards (``mds``).
        val_files: Pattern for those of validation, or another folder of the same layout, relative to ``folder``; they
            are not trained on. None: ``held_out`` rows.
        fields: Names of the fields.
        numbers: What the stored numbers mean.
        statistics: By which latents are normalised: ``measured`` on up to 4096 rows, ``declared`` by the autoencoder's
            configuration, ``none`` if they are of mean 0 and variance 1 already, or given.
        autoencoder: What decodes the latents, as in ``LatentData``; None: nothing does, so no samples are shown.
        num_classes: Number of classes; None: one more than the largest label, for which all rows are read once.
        held_out: Rows that are kept for validation where there are no ``val_files``.
        batch_size: Rows a batch.
        num_workers: Worker processes a loader.
        seed: Seed of the order, and of which rows are held out.
        pin_memory: Whether batches for a CUDA device lie in pinned memory, from which they are copied beside its work.
        preload: Whether all items are read once, before the first epoch, and kept in memory: it is refused, with both
            numbers, where they do not fit.

    Raises:
        ConfigurationError: For a folder, field or number that cannot be.
    """

    batches: ClassVar[str] = "latents"

    variants = 1
    bucket_of = None  # all have one shape

    def __init__(
        self,
        folder: str,
        layout: Layout = "auto",
        files: str = "*",
        val_files: str | None = None,
        fields: EncodedFields = EncodedFields(),  # noqa: B008 (frozen)
        numbers: EncodedNumbers = EncodedNumbers(),  # noqa: B008 (frozen)
        statistics: Literal["measured", "declared", "none"] | ChannelScaling = "measured",
        autoencoder: AutoencoderConfig | DiffusersModelConfig | str | None = None,
        num_classes: int | None = None,
        held_out: int = 256,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        pin_memory: bool = True,
        preload: bool = False,
    ) -> None:
        super().__init__()
        given = {"num_classes": num_classes, "held_out": held_out, "num_workers": num_workers, "seed": seed}
        for name, value in given.items():
            check_number("EncodedData", name, value, least=0, whole=True, null=name == "num_classes")
        check_number("EncodedData", "batch_size", batch_size, least=1, whole=True)
        check_choice("EncodedData", "layout", layout, get_args(Layout))
        if not isinstance(statistics, ChannelScaling) and statistics not in ("measured", "declared", "none"):
            raise refusal("EncodedData", "statistics", "measured, declared, none, or a mean and std", statistics)
        if statistics == "declared" and autoencoder is None:
            raise ConfigurationError("EncodedData: statistics: declared needs the autoencoder that declares them.")
        self.folder = folder
        self.layout: Layout = layout
        self.files = files
        self.val_files = val_files
        self.fields = fields
        self.numbers = numbers
        self.statistics = statistics
        self.autoencoder = autoencoder
        self.classes = num_classes
        self.held_out = held_out
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.preload = preload
        self.seed = seed
        self.codec: LatentCodec | None = None
        self.class_names: list[str] = []
        self.text_encoder = None
        self.dataset: EncodedRows
        self.train_index: list[int]
        self.val_index: list[int]

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a latent."""
        channels, height, width = self.dataset.shape
        return channels, height, width

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 without labels."""
        return self.classes or 0

    @property
    def test_index(self) -> list[int]:
        """Those for validation: there are no others."""
        return self.val_index

    def prepare_data(self) -> None:
        """Open the files: what has to be copied is copied by one process."""
        self._opened()

    def setup(self, stage: str) -> None:
        """Open the files, choose what is held out, measure; the same in every process, no random number is drawn."""
        if hasattr(self, "dataset"):
            return
        sources = self._opened()
        rows = EncodedRows(sources, self.fields, self.numbers)
        self.train_index, self.val_index = self._split([len(source) for source in sources])
        if self.classes is None and self.fields.label is not None:
            self.classes = max(rows.labels(range(len(rows)))) + 1
            rank_zero_info(f"EncodedData: {self.classes} classes; num_classes: {self.classes} saves looking for it.")
        rows.num_classes = self.num_classes
        autoencoder = None
        if self.autoencoder is not None:
            with own_draws(0):
                autoencoder = build_autoencoder(self.autoencoder)
        mean, std = self._statistics(rows, autoencoder)
        if autoencoder is not None:
            self.codec = LatentCodec(autoencoder, mean, std)
        rows.mean, rows.std = mean, std
        self.dataset = rows

    def _opened(self) -> list[EncodedSource]:
        root = Path(self.folder).expanduser()
        sources = [open_encoded(root, self.layout, self.files, self.val_files)]
        if self.val_files is not None:
            other = root / Path(self.val_files).expanduser()
            chosen = (other, self.layout) if other.is_dir() else (root, self.layout, self.val_files)
            sources.append(open_encoded(*chosen))
        for source in sources:
            check_fields(source, self.fields.asked(), root)
        return sources

    def _split(self, lengths: list[int]) -> tuple[list[int], list[int]]:
        if len(lengths) == 2:
            return list(range(lengths[0])), list(range(lengths[0], sum(lengths)))
        if not 1 <= self.held_out < lengths[0]:
            allowed = f"at least 1 and below {lengths[0]}, the number of rows, unless there are val_files"
            raise refusal("EncodedData", "held_out", allowed, self.held_out)
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(lengths[0], generator=generator, device="cpu").tolist()
        return sorted(order[self.held_out :]), sorted(order[: self.held_out])

    def _statistics(self, rows: EncodedRows, autoencoder: Any) -> tuple[Tensor, Tensor]:
        channels = rows.shape[0]
        if autoencoder is not None and autoencoder.latent_channels != channels:
            raise ConfigurationError(
                f"EncodedData: the latents have {channels} channels, those of the autoencoder "
                f"{autoencoder.latent_channels}."
            )
        if self.statistics == "none":
            return torch.zeros(channels), torch.ones(channels)
        if self.statistics == "declared":
            codec = LatentCodec.declared(autoencoder)
            return codec.mean, codec.std
        if isinstance(self.statistics, ChannelScaling):
            mean, std = torch.tensor(self.statistics.mean), torch.tensor(self.statistics.std)
        else:
            mean, std = rows.measured(self.train_index)
        if mean.shape != (channels,) or std.shape != (channels,) or not bool((std > 0).all()):
            allowed = f"{channels} means and {channels} deviations above 0, as many as channels"
            raise refusal("EncodedData", "statistics", allowed, (mean.tolist(), std.tolist()))
        return mean, std
