"""What data modules of images share: keyed loaders over three parts of one data set."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lit_efficient.data.images.image_source import KeyedImages, collate_images
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key, module_loader
from lit_efficient.mechanisms.preloaded import Preloaded


class NoImages:
    """The data set of a module that is not set up."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, key: Key) -> Any:
        raise ConfigurationError("This data module holds no images yet: call prepare_data() and setup('fit') first.")


class KeyedModule(LightningDataModule):
    """A data module of three parts, whose items are found by key, in orders that depend on (seed, epoch) alone.

    A subclass has what an :class:`~lit_efficient.data.images.image_source.ImageSource` has, or a ``source`` that does.
    """

    _kept: Preloaded | None = None  # where the source says `preload`

    @property
    def source(self) -> Any:
        """Where parts, order and batches are described."""
        return self

    @property
    def items(self) -> Any:
        """The data set that is loaded."""
        return self.source.dataset

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.source.train_index, training=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.source.val_index)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.source.test_index)

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.test_dataloader()

    def _loader(self, index: list[int], training: bool = False) -> DataLoader[Any]:
        source, items = self.source, self.items
        if getattr(source, "preload", False):
            devices = getattr(self.trainer, "num_devices", 1)
            if self._kept is None or self._kept.dataset is not items:
                self._kept = Preloaded(items, type(source).__name__, devices)
            items = self._kept
            items.add([(i, variant) for i in index for variant in range(source.variants if training else 1)])
        return module_loader(
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
        )


class ImageModule(KeyedModule):
    """An :class:`~lit_efficient.data.images.image_source.ImageSource` whose subclass fills in what ``setup`` finds out.

    Args:
        batch_size: Images a batch, for each process.
        num_workers: Worker processes a loader.
        seed: Seed of everything that is drawn.
        variants: Crop and flip variants of each image.
        pin_memory: Whether batches for a CUDA device lie in pinned memory, from which they are copied beside its work.
    """

    preload = False  # whether all items are read once and kept

    def __init__(self, batch_size: int, num_workers: int, seed: int, variants: int, pin_memory: bool = True) -> None:
        super().__init__()
        least = {"batch_size": (batch_size, 1), "num_workers": (num_workers, 0), "seed": (seed, 0)}
        for name, (value, smallest) in {**least, "variants": (variants, 1)}.items():
            check_number(type(self).__name__, name, value, least=smallest, whole=True)
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
        """Number of classes, 0 without labels."""
        return len(self.class_names)

    def bucket_of(self, index: int) -> tuple[int, int]:
        """Height and width of an image as an item."""
        raise NotImplementedError

    def _split_digest(self) -> str:
        parts = (self.train_index, self.val_index, self.test_index)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def hold_out(digests: Sequence[bytes], seed: int, fractions: Sequence[float]) -> list[list[int]]:
    """Split by content: each part gets about its fraction, equal contents fall into one part, additions move nothing.

    Fractions are of all parts but the last one, which gets the rest. Each part with one above 0 gets at least one
    image, if there are as many different ones as parts.
    """
    distinct = {digest: mix_seed(seed, int.from_bytes(digest[:8])) / 2**63 for digest in digests}
    ranked = sorted(distinct, key=distinct.__getitem__)
    wanted = [part for part, fraction in enumerate(fractions) if fraction > 0]
    edges = np.cumsum(fractions)
    part_of = {digest: int(np.searchsorted(edges, distinct[digest], side="right")) for digest in ranked}
    for place, part in enumerate(wanted):  # few images: the lowest ranks are given to the parts that have none
        if part not in part_of.values() and len(ranked) > len(wanted):
            part_of[ranked[place]] = part
    parts: list[list[int]] = [[] for _ in range(len(fractions) + 1)]
    for index, digest in enumerate(digests):
        parts[part_of[digest]].append(index)
    return parts
