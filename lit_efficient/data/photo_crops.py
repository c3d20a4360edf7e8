"""Small RGB crops of the two photographs in scikit-learn: a temple and a dahlia, 427x640, on every machine.

    each photograph -> 3 x 5 blocks -> in each row of blocks: 3 for training, 1 for validation, 1 for the test
    crop k of a block = a square of one of a few scales at a place drawn from hash(seed, block, k), scaled down

A crop is inside one block, so no pixel is in two parts. Two photographs are enough to see that a method for natural
colour images works. They are no benchmark.

Costs: a few seconds of one CPU core once, for the network that judges samples; crops are made from 1.6 MB in memory.
Source: china.jpg by danielbuechele and flower.jpg by vultilion, both CC BY 2.0; scikit-learn ships them.
"""

import functools
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import functional as F

from lit_efficient.data.images.image_module import ImageModule
from lit_efficient.data.images.image_pixels import to_tensor
from lit_efficient.data.latents import stage_one
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import check_number, refusal
from lit_efficient.files.cache import cache_root, digest_of
from lit_efficient.files.sealed_folder import Contents, make_once, open_checked
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key
from lit_efficient.models.judges import conv_features, sample_quality
from lit_efficient.models.judges.conv_features import ConvFeatures
from lit_efficient.models.judges.sample_quality import distances_of_features

_NAMES = ("temple", "flower")
_BANDS = ("top", "middle", "bottom")
_ROWS, _COLUMNS = 3, 5
# Pixels of the shorter side of a block: 640 / 5.
_BLOCK = 128
_CAPTIONS = (
    "a photograph of a temple with tiled roofs above trees and a lake under a pale blue sky",
    "a photograph of an orange dahlia in front of dark green leaves",
)


class PhotoCrop(NamedTuple):
    """Origin of a crop: photograph, block (row, column) and square [top, top + side) x [left, left + side)."""

    photo: int
    row: int
    column: int
    top: int
    left: int
    side: int


def photo_crops(resolution: int, scales: Sequence[float], crops: int, seed: int) -> list[PhotoCrop]:
    """Return the crops of every block: a pure function of the arguments.

    Args:
        resolution: Height and width of an item in pixels.
        scales: Pixels of the photograph for each pixel of an item. The crops of a block cycle through the scales.
        crops: Number of crops of each block.
        seed: Seed of the places.
    """
    found = []
    for photo in range(len(_NAMES)):
        for row in range(_ROWS):
            for column in range(_COLUMNS):
                top, left, height, width = block_of(row, column)
                for number in range(crops):
                    # A generator for each crop: another number of crops leaves the first ones at their places.
                    draw = random.Random(mix_seed(seed, photo, row, column, number))  # noqa: S311
                    side = round(resolution * scales[number % len(scales)])
                    crop_top = top + draw.randint(0, height - side)
                    crop_left = left + draw.randint(0, width - side)
                    found.append(PhotoCrop(photo, row, column, crop_top, crop_left, side))
    return found


def block_of(row: int, column: int) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a block, in pixels of a photograph."""
    tops = (0, 142, 284, 427)
    return tops[row], _BLOCK * column, tops[row + 1] - tops[row], _BLOCK


def parts_of_blocks(seed: int) -> dict[tuple[int, int, int], str]:
    """Return the part of each block (photograph, row, column): "train", "val" or "test". Each row has all parts."""
    parts = {}
    for photo in range(len(_NAMES)):
        for row in range(_ROWS):
            columns = list(range(_COLUMNS))
            random.Random(mix_seed(seed, photo, row)).shuffle(columns)  # noqa: S311
            for column, part in zip(columns, ("val", "test", "train", "train", "train"), strict=True):
                parts[photo, row, column] = part
    return parts


@dataclass(eq=False)
class PhotoCropDataset:
    """Data set of crops, found by (index, variant). Variant 1 is mirrored."""

    photos: list[np.ndarray]  # the photographs, [427, 640, 3] uint8 each
    crops: list[PhotoCrop]
    resolution: int  # height and width of an item in pixels
    classes: str  # as in `PhotoCrops`
    variants: int  # 1 or 2

    def __len__(self) -> int:
        return len(self.crops)

    def __getitem__(self, key: Key) -> dict[str, Any]:
        from PIL import Image

        index, variant = key
        if not 0 <= variant < self.variants:
            raise refusal("PhotoCrops", "the variant", f"at least 0 and below {self.variants}", variant)
        photo, row, _, top, left, side = self.crops[index]
        # Crop first: the kernel of resampling would reach beyond the crop, into another part of the split.
        square = Image.fromarray(self.photos[photo][top : top + side, left : left + side])
        shown = square.resize((self.resolution, self.resolution), Image.Resampling.LANCZOS)
        label = photo if self.classes == "photograph" else photo * _ROWS + row
        images = to_tensor(shown, flip=variant == 1)
        return {"images": images, "index": index, "variant": variant, "labels": label, "captions": _CAPTIONS[photo]}


class PhotoCrops(ImageModule):
    """DataModule of RGB crops of scikit-learn's two photographs, with labels, captions and a judge.

    Args:
        resolution: Height and width in pixels, a multiple of 8.
        scales: Pixels of the photograph for each pixel of an item. The crops of a block cycle through the scales. The
            side of a crop, ``resolution * scale``, is at most 128 pixels of the photograph.
        crops: Number of crops of each of the 30 blocks. 18 blocks are for training, 6 for validation, 6 for the test.
        classes: ``photograph``: 2 classes. ``band``: 6 classes, the top, middle and bottom of each photograph; a crop
            shows its class only roughly.
        horizontal_flip: Give each crop a mirrored variant.
        batch_size: Images in a batch, for each process.
        judge_steps: Optimizer steps of the network that judges samples. 0: no judge, and no scores.
        num_workers: Worker processes of a loader. The data is in memory, so 0 is fastest.
        seed: Seed of the places, of the split, of the order and of the judge.
        cache_dir: Folder of the cache of the judge. null: LIT_EFFICIENT_CACHE, or ~/.cache/lit_efficient.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
    """

    batches: ClassVar[str] = "images"

    def __init__(
        self,
        resolution: int = 32,
        scales: tuple[float, ...] = (1.0, 1.5, 2.0),
        crops: int = 48,
        classes: Literal["photograph", "band"] = "photograph",
        horizontal_flip: bool = False,
        batch_size: int = 64,
        judge_steps: int = 150,
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str | None = None,
        pin_memory: bool = True,
    ) -> None:
        super().__init__(batch_size, num_workers, seed, 2 if horizontal_flip else 1, pin_memory)
        check_number("PhotoCrops", "resolution", resolution, least=8, whole=True)
        check_number("PhotoCrops", "crops", crops, least=2, whole=True)
        check_number("PhotoCrops", "judge_steps", judge_steps, least=0, whole=True)
        if resolution % 8:
            raise refusal("PhotoCrops", "resolution", "a multiple of 8", resolution)
        for scale in scales or [scales]:
            name = f"scales for a resolution of {resolution}"
            check_number("PhotoCrops", name, scale, least=1, most=_BLOCK / resolution)  # a crop must fit into a block
        self.resolution = resolution
        self.scales = tuple(scales)
        self.crops = crops
        self.classes = classes
        self.horizontal_flip = horizontal_flip
        self.judge_steps = judge_steps
        self.cache_dir = cache_dir
        if classes == "photograph":
            self.class_names = list(_NAMES)
        else:
            self.class_names = [f"{band} of the {name}" for name in _NAMES for band in _BANDS]
        self.judge: ConvFeatures | None = None
        self._reference: Tensor | None = None  # features of the training crops
        self._crops: list[PhotoCrop] = []

    def prepare_data(self) -> None:
        if self.judge_steps:
            self._open()
            make_once(self._folder(), self._key(), self._train_judge)

    def setup(self, stage: str) -> None:
        """Read the photographs, and open and check the judge. No random number is drawn."""
        self._open()
        if not self.judge_steps or self.judge is not None:
            return
        files, _ = open_checked(self._folder(), self._key())
        self.judge = stage_one.load_classifier(_new_judge, files["judge.safetensors"])
        self._reference = files["reference.safetensors"]["features"]

    def bucket_of(self, index: int) -> tuple[int, int]:
        return self.resolution, self.resolution

    def identity(self) -> dict[str, str]:
        """Return all that the crops depend on, by name."""
        content = b"".join(photo.tobytes() for photo in _photographs())
        return {
            "data": hashlib.sha256(content).hexdigest(),
            "labels": self.classes,
            "split": self._split_digest(),
            "transform": f"rgb, lanczos, {self.crops} crops a block at scales {list(self.scales)}",
            "resolution": f"{self.resolution}x{self.resolution}",
            "seed": str(self.seed),
            "variants": f"{self.variants}: {'as it is, mirrored' if self.horizontal_flip else 'as it is'}",
        }

    @property
    def judges_samples(self) -> bool:
        """True if there is a judge."""
        return self.judge_steps > 0

    def score_samples(
        self, images: Tensor, labels: Tensor | None = None, captions: list[str] | None = None
    ) -> dict[str, float]:
        """Return distances of images [M, 3, H, W] to the training crops in the features of a small trained network.

        Returns:
            ``frechet_distance`` and ``kernel_distance`` (lower is better; not the FID), and with labels [M]
            ``sample_accuracy``, the share of images that the network assigns to the intended photograph. Nothing if
            ``judge_steps`` is 0.
        """
        if self.judge is None or self._reference is None:
            return {}
        with torch.no_grad():
            features = self.judge(_as_judged(images.cpu().float()))
            scores = distances_of_features(self._reference, features)
            if labels is not None:
                if self.classes == "photograph":
                    photographs = labels.cpu()
                else:
                    photographs = labels.cpu() // _ROWS
                scores["sample_accuracy"] = _accuracy(self.judge, features, photographs)
        return scores

    def _open(self) -> None:
        if self.train_index:
            return
        self._crops = photo_crops(self.resolution, self.scales, self.crops, self.seed)
        part_of = parts_of_blocks(self.seed)
        index_of: dict[str, list[int]] = {"train": [], "val": [], "test": []}
        for index, crop in enumerate(self._crops):
            index_of[part_of[crop.photo, crop.row, crop.column]].append(index)
        self.train_index = index_of["train"]
        self.val_index = index_of["val"]
        self.test_index = index_of["test"]
        self.dataset = PhotoCropDataset(_photographs(), self._crops, self.resolution, self.classes, self.variants)

    def _folder(self) -> Path:
        return cache_root(self.cache_dir) / "photo_crops" / self._key()[:16]

    def _key(self) -> str:
        """Return a hash of the crops, the settings and the code that the judge depends on."""
        code = stage_one.hashes_of_code(conv_features.__file__, sample_quality.__file__, stage_one.__file__, __file__)
        # Labels and variants do not change the crops that the judge is trained on.
        settings = {name: value for name, value in self.identity().items() if name not in ("labels", "variants")}
        return digest_of([settings, self.judge_steps, self.seed, code])

    def _train_judge(self) -> Contents:
        rank_zero_info(f"PhotoCrops: training the judge ({self.judge_steps} steps) once; a few seconds.")
        images, photographs = self._crops_of(self.train_index)
        judge = stage_one.fit_classifier(_new_judge, images, photographs, self.judge_steps, self.seed)
        held_out, truth = self._crops_of(self.val_index)
        with torch.no_grad():
            reference = torch.cat([judge(part) for part in images.split(256)])
            features = judge(held_out)
            accuracy = _accuracy(judge, features, truth)
        distances = distances_of_features(reference, features)
        rank_zero_info(
            f"PhotoCrops: the judge finds the photograph of {100 * accuracy:.1f} % of the held-out crops. Their "
            f"Fréchet distance, {distances['frechet_distance']:.2f}, is the best that samples can reach."
        )
        facts = {"judge_accuracy": accuracy, "distances_of_held_out_crops": distances}
        return {"judge.safetensors": judge.state_dict(), "reference.safetensors": {"features": reference}}, facts

    def _crops_of(self, index: list[int]) -> tuple[Tensor, Tensor]:
        """Return crops as the judge sees them, and the numbers of their photographs."""
        images = torch.stack([self.dataset[(i, 0)]["images"] for i in index])
        return _as_judged(images), torch.tensor([self._crops[i].photo for i in index])


_new_judge = functools.partial(ConvFeatures, channels=3, num_classes=len(_NAMES))


def _accuracy(judge: ConvFeatures, features: Tensor, photographs: Tensor) -> float:
    """Return the share of crops that the judge assigns to their photograph."""
    return float((judge.head(features).argmax(dim=1) == photographs).float().mean())


def _as_judged(images: Tensor) -> Tensor:
    """Scale images down to at most 32 x 32 pixels, which limits the cost of the judge."""
    if images.shape[-1] > 32:
        return F.adaptive_avg_pool2d(images, 32)
    return images


@functools.cache
def _photographs() -> list[np.ndarray]:
    from sklearn.datasets import load_sample_image

    return [np.asarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]
