"""Base classes of DataModules of images: keyed loaders over three parts of one data set."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from lit_efficient.data.images.image_source import KeyedImages, collate_images
from lit_efficient.errors import ChecksTypes, ConfigurationError, check_number
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key, module_loader, no_loaders
from lit_efficient.mechanisms.order.resumable_sampler import mix_seed
from lit_efficient.mechanisms.order.stream_loader import StreamLoader
from lit_efficient.mechanisms.preloaded import Preloaded

ROLES = ("loss_weight", "mask", "condition")
"""Optional entries of batches that weight the loss or condition the network."""


class NoImages:
    """Data set of a DataModule that is not set up."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, key: Key) -> Any:
        raise ConfigurationError("This data module holds no images yet: call prepare_data() and setup('fit') first.")


class KeyedModule(ChecksTypes, LightningDataModule):
    """DataModule of three parts. Items are found by key, and their order depends on (seed, epoch) alone.

    A subclass has the attributes of an `ImageSource`, or a ``source`` that has them.
    """

    _kept: Preloaded | None = None  # the items in memory, if the source has ``preload``

    @property
    def source(self) -> Any:
        """Object that has the data set, the indices of the parts and the batch size: here this module itself."""
        return self

    @property
    def items(self) -> Any:
        """Data set that is loaded."""
        return self.source.dataset

    def train_dataloader(self) -> Any:
        stream = getattr(self.source, "streamed", None)
        if stream is not None:
            refuse_unread(stream.roles, self.trainer)
            return stream_loader(stream, self.source)
        return self._loader(self.source.train_index, training=True)

    def val_dataloader(self) -> Any:
        return self._loader_of_part(self.source.val_index)

    def test_dataloader(self) -> object:
        return self._loader_of_part(self.source.test_index)

    def predict_dataloader(self) -> object:
        return self.test_dataloader()

    def _loader_of_part(self, index: list[int]) -> Any:
        if index:
            return self._loader(index)
        return no_loaders(self)

    def _loader(self, index: list[int], training: bool = False) -> DataLoader[Any]:
        source = self.source
        items = self.items
        if getattr(source, "preload", False):
            devices = getattr(self.trainer, "num_devices", 1)
            # Training and validation share one store of items, and count against one limit of memory.
            if self._kept is None or self._kept.dataset is not items:
                self._kept = Preloaded(items, type(source).__name__, devices)
            items = self._kept
            variants = source.variants if training else 1
            items.add([(i, variant) for i in index for variant in range(variants)])
        weights = getattr(source, "loss_weights", None) if training else None
        reads = reads_of(self.trainer)
        if training:
            refuse_unread(getattr(source, "roles", ()), self.trainer)
        contents = getattr(source, "contents_of", None) if training else None
        loader = module_loader(
            self.trainer,
            items,
            index,
            collate_images,
            source.batch_size,
            training=training,
            bucket_of=source.bucket_of,
            variants=source.variants,
            seed=source.seed,
            num_workers=source.num_workers,
            pin_memory=getattr(source, "pin_memory", True),
            weighted=training and "loss_weight" in reads,
            weights=weights,
            contents="" if contents is None else contents(index),
        )
        uneven = loader.sampler.uneven_weights() if training else None  # type: ignore[attr-defined]
        if uneven:
            rank_zero_info(f"{type(source).__name__}: {uneven}")
        return loader


def reads_of(trainer: Any) -> Sequence[str]:
    """Return the optional entries of batches that the task reads, ``loss_weight``, ``mask`` and ``condition``.

    Without a trainer, as for ``preview``, these are all.
    """
    module = getattr(trainer, "lightning_module", None)
    if module is None:
        return ROLES
    return tuple(getattr(module, "reads", ()))


def refuse_unread(roles: Iterable[str], trainer: Any) -> None:
    """Refuse data with optional entries that a task of this package would ignore.

    Raises:
        ConfigurationError: Naming the entries.
    """
    module = getattr(trainer, "lightning_module", None)
    unread = sorted(set(roles) - set(reads_of(trainer)))
    # Modules of other packages do not declare what they read.
    if unread and hasattr(module, "trains_on"):
        raise ConfigurationError(
            f"ImageData: batches have {' and '.join(unread)}, which {type(module).__name__} does not use. Leave the "
            "masks, conditions, weights or class images of the sets out."
        )


class ImageModule(KeyedModule):
    """Base of an `ImageSource`. A subclass sets the data set, the parts and the class names in ``setup``.

    Args:
        batch_size: Images in a batch, for each process.
        num_workers: Worker processes of a loader.
        seed: Seed of all random draws.
        variants: Number of crop and flip variants of each image.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
    """

    # Read all items once and keep them.
    preload = False

    def __init__(self, batch_size: int, num_workers: int, seed: int, variants: int, pin_memory: bool = True) -> None:
        super().__init__()
        owner = type(self).__name__
        check_number(owner, "batch_size", batch_size, least=1, whole=True)
        check_number(owner, "num_workers", num_workers, least=0, whole=True)
        check_number(owner, "seed", seed, least=0, whole=True)
        check_number(owner, "variants", variants, least=1, whole=True)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.variants = variants
        self.pin_memory = pin_memory
        self.dataset: KeyedImages = NoImages()
        self.train_index: list[int] = []
        self.val_index: list[int] = []
        self.test_index: list[int] = []
        self.class_names: list[str] = []

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 without labels."""
        return len(self.class_names)

    def bucket_of(self, index: int) -> tuple[int, int]:
        """Return height and width of an image as an item."""
        raise NotImplementedError

    def _split_digest(self) -> str:
        parts = (self.train_index, self.val_index, self.test_index)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def stream_loader(stream: Any, source: Any) -> StreamLoader:
    """Return the loader of the training images of a DataModule that are streamed."""
    loader: DataLoader[Any] = DataLoader(
        stream,
        batch_size=None,
        num_workers=source.num_workers,
        pin_memory=source.pin_memory and torch.cuda.is_available(),
    )
    return StreamLoader(loader, stream.stream.epoch_batches, type(source).__name__, stream.batch_size)


def hold_out(digests: Sequence[bytes], seed: int, fractions: Sequence[float]) -> list[list[int]]:
    """Split images by their content.

    Images with equal content are in one part, and adding images moves no other image.

    Args:
        digests: Hash of the content of each image.
        seed: Seed of the split.
        fractions: Share of each part but the last part, which gets the rest.

    Returns:
        Indices of the images of each part. A part with a fraction above 0 has at least one image, if there are more
        distinct images than such parts.
    """
    rank_of = {digest: mix_seed(seed, int.from_bytes(digest[:8])) / 2**63 for digest in digests}
    edges = np.cumsum(fractions)
    part_of = {digest: int(np.searchsorted(edges, rank, side="right")) for digest, rank in rank_of.items()}
    # With few images a part may be empty: it gets one of the images with the lowest ranks.
    ranked = sorted(rank_of, key=rank_of.__getitem__)
    wanted = [part for part, fraction in enumerate(fractions) if fraction > 0]
    for place, part in enumerate(wanted):
        if part not in part_of.values() and len(ranked) > len(wanted):
            part_of[ranked[place]] = part
    parts: list[list[int]] = [[] for _ in range(len(fractions) + 1)]
    for index, digest in enumerate(digests):
        parts[part_of[digest]].append(index)
    return parts
