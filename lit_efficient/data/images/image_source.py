"""Interface of a source of images, for code that encodes, caches or trains on them.

    dataset[(index, variant)] -> {"images": [C, H, W] float32 in [-1, 1], "index", "variant", "labels", "captions"}
    batch                     -> {"images": [B, C, H, W], "index": [B], "variant": [B], "labels": [B], "captions": list}

An item is a pure function of its key and of the arguments of the constructor. It uses no global generator, so results
computed from it can be cached under its key, by any number of processes and in any order.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lit_efficient.mechanisms.order.keyed_batch_sampler import Key


class KeyedImages(Protocol):
    """Data set whose items are found by (index, variant)."""

    def __len__(self) -> int:
        """Return the number of images of all parts, each counted once."""

    def __getitem__(self, key: Key, /) -> Any:
        """Return the item of a key, as above. [H, W] is ``bucket_of(index)``; labels and captions are optional."""


@runtime_checkable
class ImageSource(Protocol):
    """A ``LightningDataModule`` of images. ``isinstance`` holds after its construction.

    All attributes but the arguments of the constructor are set by ``prepare_data()`` and ``setup()``. ``ImageData`` and
    ``PhotoCrops`` train on the batches of ``KeyedBatchSampler(train_index, batch_size, bucket_of, variants, seed)``.
    Batches for validation, test and prediction are in order, and of variant 0.

    A source that can judge images also has ``score_samples(images [M, C, H, W] in [-1, 1], labels [M] or None,
    captions or None) -> {name: value}``.
    """

    variants: int
    """Number of crop and flip variants of each image; 1: variant 0 alone."""
    batch_size: int
    num_workers: int
    seed: int

    @property
    def dataset(self) -> Any:
        """Data set of all parts, a `KeyedImages`."""

    @property
    def train_index(self) -> list[int]:
        """Indices of the images for training."""

    @property
    def val_index(self) -> list[int]:
        """Indices of the images for validation."""

    @property
    def test_index(self) -> list[int]:
        """Indices of the images for the test; those for validation if there are no others."""

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if the images have no labels."""

    @property
    def class_names(self) -> list[str]:
        """Name of each class."""

    def bucket_of(self, index: int) -> tuple[int, int]:
        """Return height and width in pixels of an image as an item, the same in every variant."""

    def identity(self) -> dict[str, str]:
        """Return all that items depend on, by name: ``data`` (hash of the contents), ``transform``, ``resolution``, ...

        A cache of results that were computed from items stores this mapping and compares it entry by entry.
        """

    def prepare_data(self) -> None:
        """Prepare files. One process of a machine does it for all."""

    def setup(self, stage: str) -> None:
        """Open the prepared files, in every process."""


def collate_images(items: list[Any]) -> dict[str, Any]:
    """Collate items of one shape, with the same names, into a batch.

    Returns:
        ``images`` [B, C, H, W] float32 and other tensors, stacked; ``index``, ``variant`` and ``labels`` [B] int64;
        ``sizes`` [B, 6] int64 (of `Condition`); ``captions``, a list of B strings.
    """
    batch: dict[str, Any] = {}
    for name, first in items[0].items():
        values = [item[name] for item in items]
        if isinstance(first, Tensor):
            batch[name] = torch.stack(values)
        elif isinstance(first, int):
            batch[name] = torch.tensor(values)
        else:
            batch[name] = values
    return batch
