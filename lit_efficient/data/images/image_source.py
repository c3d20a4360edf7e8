"""What a source of images offers, so that who encodes, caches or trains on them need not know where they lie.

    dataset[(index, variant)] -> {"images": [C, H, W] float32 in [-1, 1], "index", "variant", "labels", "captions"}
    batch                     -> {"images": [B, C, H, W], "index": [B], "variant": [B], "labels": [B], "captions": list}

An item is a pure function of its key and of the constructor's arguments. No global generator is involved: whatever is
computed from it can be cached under its key, by any number of processes, in any order.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lit_efficient.mechanisms.order.keyed_batch_sampler import Key


class KeyedImages(Protocol):
    """A data set whose items are found by (index, variant)."""

    def __len__(self) -> int:
        """Number of images, of all parts together, each counted once."""

    def __getitem__(self, key: Key, /) -> Any:
        """The item of a key, as above: labels and captions if the source has them, [H, W] is ``bucket_of(index)``."""


@runtime_checkable
class ImageSource(Protocol):
    """A ``LightningDataModule`` of images. ``isinstance`` holds from its construction on.

    What is no constructor argument is there after ``prepare_data()`` and ``setup()``. ``ImageData`` and ``PhotoCrops``
    train on the batches of ``KeyedBatchSampler(train_index, batch_size, bucket_of, variants, seed)``, which any source
    can be asked for. Batches for validation, test and prediction are in order and of variant 0, the plain one.

    A source that can judge images also has ``score_samples(images [M, C, H, W] in [-1, 1], labels [M] or None) ->
    {name: value}``.
    """

    variants: int
    """Crop and flip variants of each image; 1: there is one look at it, variant 0."""
    batch_size: int
    num_workers: int
    seed: int

    @property
    def dataset(self) -> Any:
        """The :class:`KeyedImages` of all parts."""

    @property
    def train_index(self) -> list[int]:
        """Indices of the images to train on."""

    @property
    def val_index(self) -> list[int]:
        """Indices of those for validation."""

    @property
    def test_index(self) -> list[int]:
        """Indices of those for the test; the same as for validation where there are no others."""

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if images have no label."""

    @property
    def class_names(self) -> list[str]:
        """Name of each class."""

    def bucket_of(self, index: int) -> tuple[int, int]:
        """Height and width that the image has as an item, in pixels, in every variant."""

    def identity(self) -> dict[str, str]:
        """What items depend on, by name: ``data`` (a hash of the contents), ``transform``, ``resolution``, ...

        Who stores what was computed from items stores this with it, and compares it name by name.
        """

    def prepare_data(self) -> None:
        """Do what one process of a machine does for all."""

    def setup(self, stage: str) -> None:
        """Open what is there, in every process."""


def collate_images(items: list[Any]) -> dict[str, Any]:
    """Lay items of one shape, with the same names, into a batch.

    Returns:
        ``images`` [B, C, H, W] float32 and other tensors stacked, ``index``, ``variant`` and ``labels`` [B] int64,
        ``sizes`` [B, 6] int64 (of `Condition`), ``captions`` a list of B strings.
    """
    batch: dict[str, Any] = {}
    for name, first in items[0].items():
        values = [item[name] for item in items]
        if isinstance(first, Tensor):
            batch[name] = torch.stack(values)
        else:
            batch[name] = torch.tensor(values) if isinstance(first, int) else values
    return batch
