"""Latents that somebody else has encoded, as batches: imagenet.int8, cosmos-imagenet and other published data sets.

    latents = (zero + scale * stored - mean) / std

A batch has the same entries as a batch of `LatentData` with a cache, whatever the file format is. Items are found by
the key (row, 0), and the sampler is the same. Labels are read together with their latents.

    imagenet.int8     fields {latents: vae_output, label: label, caption: label_as_text},
                      numbers {scale: 24/255, zero: -12, shape: [4, 32, 32]}        (VAE of SDXL, not scaled)
    cosmos-imagenet   files imagenet_ci8x8.safetensors, val_files imagenet_ci8x8_val.safetensors,
                      numbers {scale: 16/255}                                       (Cosmos-Tokenizer CI8x8)
    EDM2, REPA        numbers {content: mean_std}: the standard deviation is stored behind the mean, in more channels

Convert NumPy's files (.npy, .npz) once to safetensors, with ``safetensors.numpy.save_file``.

Saves: downloading the images, and encoding them
"""

from pathlib import Path
from typing import ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_efficient.data.images.image_module import KeyedModule
from lit_efficient.data.latents.encoded_dataset import EncodedRows
from lit_efficient.data.latents.encoded_fields import ChannelScaling, EncodedFields, EncodedNumbers
from lit_efficient.data.latents.encoded_sources import EncodedSource, Layout, check_fields, open_encoded
from lit_efficient.data.latents.model_scaling import pipeline_scaling
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.models.libraries.autoencoders import build_autoencoder
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.latent_codec import LatentCodec
from lit_efficient.models.networks.autoencoder import AutoencoderConfig
from lit_efficient.surgery import own_draws


class EncodedData(KeyedModule):
    """DataModule of a local folder of latents, for ``LatentDiffusion``.

    Args:
        folder: Folder of the files.
        layout: ``safetensors``, ``mds`` (MosaicML streaming), ``webdataset`` (.tar) or ``parquet``. ``auto`` detects
            the layout by the names of the files.
        files: Pattern of the names of the training files; with ``mds``, of the shards.
        val_files: Pattern of the names of the validation files, or another folder with the same layout, relative to
            ``folder``. These files are not trained on. null holds out ``held_out`` rows instead.
        fields: Names of the fields.
        numbers: Meaning of the stored numbers.
        statistics: Mean and standard deviation that normalise the latents: ``measured`` on up to 4096 rows,
            ``declared`` by the configuration of the autoencoder, ``none`` if the latents have mean 0 and variance 1
            already, or given numbers. null takes those of the pipeline from which the trained network comes, and
            measures them for other networks.
        autoencoder: Autoencoder that decodes the latents, as in ``LatentData``. null: no samples are shown.
        num_classes: Number of classes. null: the largest label plus 1; all rows are read once to find it.
        held_out: Number of rows held out for validation if ``val_files`` is null.
        batch_size: Rows in a batch, for each process.
        num_workers: Worker processes of a loader.
        seed: Seed of the order, and of the choice of the rows held out.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
        preload: Read all items once before the first epoch and keep them in memory. Raise an error if they do not fit.

    Raises:
        ConfigurationError: If a folder, field or number is invalid.
    """

    batches: ClassVar[str] = "latents"

    variants = 1
    bucket_of = None  # all latents have one shape

    def __init__(
        self,
        folder: str,
        layout: Layout = "auto",
        files: str = "*",
        val_files: str | None = None,
        fields: EncodedFields = EncodedFields(),  # noqa: B008 (frozen)
        numbers: EncodedNumbers = EncodedNumbers(),  # noqa: B008 (frozen)
        statistics: Literal["measured", "declared", "none"] | ChannelScaling | None = None,
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
        if not isinstance(statistics, ChannelScaling) and statistics not in (None, "measured", "declared", "none"):
            raise refusal("EncodedData", "statistics", "measured, declared, none, or a mean and std", statistics)
        if statistics == "declared" and autoencoder is None:
            raise ConfigurationError(
                "EncodedData: statistics: declared needs the autoencoder that declares them. Set autoencoder."
            )
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
        self.latent_scaling: tuple[list[float], list[float]] | None = None
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
        """Rows for the test: the validation rows."""
        return self.val_index

    def prepare_data(self) -> None:
        """Open the files once, so that a single process copies the tables."""
        self._open_sources()

    def setup(self, stage: str) -> None:
        """Open the files, split the rows and measure the statistics. The result is the same in every process."""
        if hasattr(self, "dataset"):
            return
        sources = self._open_sources()
        rows = EncodedRows(sources, self.fields, self.numbers)
        self.train_index, self.val_index = self._split([len(source) for source in sources])
        if self.classes is None and self.fields.label is not None:
            self.classes = max(rows.labels(range(len(rows)))) + 1
            rank_zero_info(
                f"EncodedData: found {self.classes} classes. Set num_classes: {self.classes} to skip this search."
            )
        # From here on each label is checked when it is read: a wrong one would fail on the GPU without a message.
        rows.num_classes = self.num_classes
        autoencoder = None
        if self.autoencoder is not None:
            # Building a network draws random numbers, which must not change the draws of the run.
            with own_draws(0):
                autoencoder = build_autoencoder(self.autoencoder)
            if autoencoder.latent_channels != rows.shape[0]:
                raise ConfigurationError(
                    f"EncodedData: the latents have {rows.shape[0]} channels, but the autoencoder has "
                    f"{autoencoder.latent_channels}. Name the autoencoder that the data set was encoded with."
                )
        if self.statistics == "declared":
            assert autoencoder is not None
            declared = LatentCodec.declared(autoencoder)
            rows.mean = declared.mean
            rows.std = declared.std
        elif self.statistics != "none":
            rows.mean, rows.std = self._statistics(rows)
        if autoencoder is not None:
            self.codec = LatentCodec(autoencoder, rows.mean, rows.std)
        self.latent_scaling = None if self.statistics == "none" else (rows.mean.tolist(), rows.std.tolist())
        self.dataset = rows

    def _open_sources(self) -> list[EncodedSource]:
        """Open the training files and, if they are named, the validation files."""
        root = Path(self.folder).expanduser()
        sources = [open_encoded(root, self.layout, self.files, self.val_files)]
        if self.val_files is not None:
            other = root / Path(self.val_files).expanduser()
            if other.is_dir():
                sources.append(open_encoded(other, self.layout))
            else:
                sources.append(open_encoded(root, self.layout, self.val_files))
        for source in sources:
            check_fields(source, self.fields.named(), root)
        return sources

    def _split(self, lengths: list[int]) -> tuple[list[int], list[int]]:
        """Return the rows for training and validation."""
        # Validation files come after the training files, in one numbering of the rows.
        if len(lengths) == 2:
            return list(range(lengths[0])), list(range(lengths[0], sum(lengths)))
        if not 1 <= self.held_out < lengths[0]:
            allowed = f"at least 1 and below {lengths[0]}, the number of rows, unless val_files is set"
            raise refusal("EncodedData", "held_out", allowed, self.held_out)
        generator = torch.Generator().manual_seed(self.seed)
        # The generator is local and on the CPU, so that every process of any device chooses the same rows.
        order = torch.randperm(lengths[0], generator=generator, device="cpu").tolist()
        return sorted(order[self.held_out :]), sorted(order[: self.held_out])

    def _statistics(self, rows: EncodedRows) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of each channel [c], as given or as measured."""
        channels = rows.shape[0]
        scaling = pipeline_scaling(self, channels)
        if self.statistics is None and scaling is not None:
            mean, std = scaling
        elif isinstance(self.statistics, ChannelScaling):
            mean = torch.tensor(self.statistics.mean)
            std = torch.tensor(self.statistics.std)
        else:
            mean, std = rows.measured(self.train_index)
        if mean.shape != (channels,) or std.shape != (channels,) or not bool((std > 0).all()):
            allowed = f"{channels} means and {channels} standard deviations above 0, one for each channel"
            raise refusal("EncodedData", "statistics", allowed, (mean.tolist(), std.tolist()))
        return mean, std
