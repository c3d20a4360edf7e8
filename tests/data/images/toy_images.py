"""Small image source for tests, with variants, buckets, labels and captions."""

import hashlib
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from lit_efficient.data.images.image_source import collate_images
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key, KeyedBatchSampler, keyed_loader


class ToyImages(LightningDataModule):
    """Images of noise. The label is the index modulo ten; variant 1 is flipped, and further variants are shifted."""

    class_names = tuple(f"class {i}" for i in range(10))
    num_classes = 10

    def __init__(
        self,
        count: int = 24,
        size: int = 8,
        variants: int = 1,
        captions: bool = False,
        buckets: bool = False,
        batch_size: int = 4,
        num_workers: int = 0,
        seed: int = 0,
        content: int = 0,
        channels: int = 1,
        labels: bool = True,
    ) -> None:
        super().__init__()
        self.count, self.size, self.variants, self.captions, self.buckets = count, size, variants, captions, buckets
        self.batch_size, self.num_workers, self.seed, self.content = batch_size, num_workers, seed, content
        self.channels, self.labels = channels, labels
        held = max(2, count // 6)
        self.train_index = list(range(count - 2 * held))
        self.val_index = list(range(count - 2 * held, count - held))
        self.test_index = list(range(count - held, count))
        self.dataset = ToyDataset(self)

    def bucket_of(self, index: int) -> tuple[int, int]:
        return (self.size, 2 * self.size) if self.buckets and index % 3 == 0 else (self.size, self.size)

    def identity(self) -> dict[str, str]:
        data = hashlib.sha256(repr((self.count, self.content)).encode()).hexdigest()
        return {"data": data, "transform": "flip, shift", "resolution": f"{self.size}", "seed": str(self.seed)}

    def score_samples(self, images: Tensor, labels: Tensor | None, captions: Any = None) -> dict[str, float]:
        return {"brightness": images.mean().item()}

    def train_dataloader(self) -> Any:
        return self._loader(self.train_index, self.variants, shuffle=True)

    def val_dataloader(self) -> Any:
        return self._loader(self.val_index, 1, shuffle=False)

    def test_dataloader(self) -> Any:
        return self._loader(self.test_index, 1, shuffle=False)

    def _loader(self, index: list[int], variants: int, shuffle: bool) -> Any:
        sampler = KeyedBatchSampler(index, self.batch_size, self.bucket_of, variants, self.seed, shuffle)
        return keyed_loader(self.dataset, sampler, collate_images, self.num_workers)


class ToyDataset:
    def __init__(self, owner: ToyImages) -> None:
        self.owner = owner

    def __len__(self) -> int:
        return self.owner.count

    def __getitem__(self, key: Key) -> dict[str, Any]:
        (index, variant), owner = key, self.owner
        generator = torch.Generator().manual_seed(1000 * owner.content + index)
        images = torch.rand((owner.channels, *owner.bucket_of(index)), generator=generator) * 2 - 1
        images = images.flip(-1) if variant == 1 else images.roll(variant, dims=-1)
        item: dict[str, Any] = {"images": images, "index": index, "variant": variant}
        if owner.labels:
            item["labels"] = index % 10
        if owner.captions:
            item["captions"] = self.caption_of(index)
        return item

    @staticmethod
    def caption_of(index: int) -> str:
        return "" if index == 2 else f"a field of gräss, no. {index % 5}"
