"""Handwritten digits of scikit-learn: 1,797 greyscale images that every installation has, enlarged and split.

    batch: {"images": [B, 1, S, S] in [-1, 1], "labels": [B], "index": [B]}

Source: the test part of the UCI optical digits (Kaynak 1995), 8x8 pixels with 17 grey levels; scikit-learn ships them.
"""

import hashlib
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lit_efficient.errors import ChecksTypes, check_number, refusal
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key, loading

# Images for validation, and as many for the test: a tenth each.
HELD_OUT = 180
TRANSFORM = "bicubic enlargement, grey levels to [-1, 1]"


def load_digit_images(size: int) -> tuple[Tensor, Tensor]:
    """Return all digits, enlarged to ``size``, [1797, 1, size, size] float32 in [-1, 1], and labels [1797] int64."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = (digits.images * (255 / 16)).astype(np.uint8)
    large = [np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC)) for image in grey]
    images = torch.from_numpy(np.stack(large)[:, None].astype(np.float32)) / 127.5 - 1.0
    return images, torch.from_numpy(digits.target.astype(np.int64))


def digest(*tensors: Tensor) -> str:
    """Return the SHA-256 of the bytes of CPU tensors, in order."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().numpy().tobytes())
    return sha.hexdigest()


def stratified_split(labels: Tensor, held_out: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Return sorted indices for training, validation and test, in each of which every class has its natural share.

    Args:
        labels: Class of each image [N].
        held_out: Number of images for validation, and for the test.
        seed: Seed of the split.
    """
    from sklearn.model_selection import train_test_split

    y = labels.numpy()
    train, rest = train_test_split(np.arange(len(y)), test_size=2 * held_out, random_state=seed, stratify=y)
    val, test = train_test_split(rest, test_size=held_out, random_state=seed, stratify=y[rest])
    return sorted(train.tolist()), sorted(val.tolist()), sorted(test.tolist())


class TensorDictDataset(Dataset[dict[str, Tensor]]):
    """Named tensors [N, ...] of equal length. Item i is row i of each tensor."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}


class KeyedTensors(TensorDictDataset):
    """Tensors whose rows are found by their number, or by the key (number, 0): there is one variant."""

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        # The loaders of `DigitImages` index by number, and `KeyedBatchSampler` by key.
        if isinstance(key, int):
            return super().__getitem__(key)
        index, variant = key
        if variant != 0:
            raise refusal("KeyedTensors", "the variant", "0, the only variant", variant)
        return {**super().__getitem__(index), "variant": torch.tensor(0)}


class DigitsDataModule(ChecksTypes, LightningDataModule):
    """Base of the DataModules of the digits, with the split and the loaders. A subclass sets ``dataset`` in ``setup``.

    Args:
        batch_size: Images in a batch, for each process.
        num_workers: Worker processes of a loader. The data is in memory, so 0 is fastest.
        seed: Seed of the split into training, validation and test.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
    """

    num_classes = 10

    def __init__(self, batch_size: int = 64, num_workers: int = 0, seed: int = 0, pin_memory: bool = True) -> None:
        super().__init__()
        owner = type(self).__name__
        check_number(owner, "batch_size", batch_size, least=1, whole=True)
        check_number(owner, "num_workers", num_workers, least=0, whole=True)
        check_number(owner, "seed", seed, least=0, whole=True)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.seed = seed
        self.dataset = TensorDictDataset({"index": torch.arange(0)})  # empty until setup()
        self.train_index: list[int] = []
        self.val_index: list[int] = []
        self.test_index: list[int] = []

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        data = Subset(self.dataset, self.train_index)
        return DataLoader(data, batch_size=self.batch_size, shuffle=True, **loading(self))

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._in_order(self.val_index)

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._in_order(self.test_index)

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._in_order(self.test_index)

    def _in_order(self, index: list[int]) -> DataLoader[dict[str, Tensor]]:
        # A loader draws the base seed of its workers when it starts. With the global generator validation would change
        # the training that follows.
        generator = torch.Generator().manual_seed(self.seed)
        return DataLoader(
            Subset(self.dataset, index),
            batch_size=self.batch_size,  # by name: Lightning's rebuilding of a loader fails otherwise
            generator=generator,
            **loading(self),
        )


class DigitImages(DigitsDataModule):
    """DataModule of the digits as images, for ``Autoencoding``; an `ImageSource`.

    Args:
        image_size: Height and width in pixels, a multiple of 4.
        batch_size: Images in a batch, for each process.
        num_workers: Worker processes of a loader. The data is in memory, so 0 is fastest.
        seed: Seed of the split into training, validation and test.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
    """

    batches: ClassVar[str] = "images"

    variants = 1

    def __init__(
        self,
        image_size: int = 32,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        pin_memory: bool = True,
    ) -> None:
        super().__init__(batch_size, num_workers, seed, pin_memory)
        self.image_size = checked_image_size(type(self).__name__, image_size)
        self.class_names = [str(digit) for digit in range(self.num_classes)]

    def setup(self, stage: str) -> None:
        images, labels = load_digit_images(self.image_size)
        self.dataset = KeyedTensors({"images": images, "labels": labels, "index": torch.arange(len(labels))})
        self.train_index, self.val_index, self.test_index = stratified_split(labels, HELD_OUT, self.seed)

    def bucket_of(self, index: int) -> tuple[int, int]:
        """Return height and width of an image, which are the same for all."""
        return self.image_size, self.image_size

    def identity(self) -> dict[str, str]:
        """Return all that the images depend on, by name, after ``setup()``."""
        rows = self.dataset.tensors
        parts = [torch.tensor(part) for part in (self.train_index, self.val_index, self.test_index)]
        return {
            "data": digest(rows["images"], rows["labels"]),
            "split": digest(*parts),
            "transform": TRANSFORM,
            "resolution": f"{self.image_size}x{self.image_size}",
            "variants": "1",
        }


def checked_image_size(owner: str, image_size: int) -> int:
    """Return ``image_size`` if the autoencoder can halve it twice and the judge can read it.

    Raises:
        ConfigurationError: If the size is below 8 or not a multiple of 4.
    """
    check_number(owner, "image_size", image_size, least=8, whole=True)
    if image_size % 4:
        raise refusal(owner, "image_size", "a multiple of 4", image_size)
    return image_size
