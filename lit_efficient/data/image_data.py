"""Your own images: folders, local Hugging Face data sets, parquet files and tars, as batches of one shape each.

    encoded bytes -> upright, opaque, 8 bits -> the largest crop with the bucket's aspect ratio -> resampled, in [-1, 1]

Sizes and hashes of all images are computed once. Every item is a pure function of (index, variant): batches are the
same with any number of workers and after any interruption, and results computed from an item can be cached by its key.

Saves: aspect buckets keep what a square crop throws away; variants make crops and flips that a cache can hold.
Costs: reading every image once; later starts list the files, compare their sizes and times, and read labels and
    captions (of a folder: metadata, or the files beside the images) again
"""

import hashlib
import json
from typing import ClassVar

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_efficient.data.images.aspect_buckets import nearest_shapes
from lit_efficient.data.images.image_columns import ImageColumns
from lit_efficient.data.images.image_judge import ImageJudge, ImageScores
from lit_efficient.data.images.image_module import ImageModule, hold_out
from lit_efficient.data.images.image_store import StoredImages
from lit_efficient.data.images.image_tables import ImageSplits
from lit_efficient.data.images.image_view import ImageView
from lit_efficient.data.images.keyed_images import KeyedImageFiles, classes_of, collected, drop_single_class, repeats_of
from lit_efficient.errors import ConfigurationError, check_number


class ImageData(ImageModule):
    """DataModule of your own images, with class labels, captions or both.

    The labels of a folder are its subfolders, or a column of ``metadata.jsonl`` or ``metadata.csv`` (ImageFolder of
    Hugging Face: ``file_name`` and further columns). Its captions are such a column, or a .txt file beside each image
    (as kohya's scripts write them). Batches are {"images" [B, C, H, W] float32 in [-1, 1], "index" [B], "variant" [B]},
    and if the data has them "labels" [B] and "captions", a list.

    Args:
        train: Folder of images, or of one folder for each split; folder of ``save_to_disk``, .arrow, .parquet or .tar
            (WebDataset) files; one such file; or a list of several. ``tiny:photos`` is 15 small photographs, which need
            no download.
        val: Images for validation, named in the same way. null: ``val_fraction`` of ``train`` is held out.
        test: Images for the test, named in the same way. null: ``test_fraction`` of ``train`` is held out; if it is 0,
            the test uses the validation images.
        splits: Names of the splits of data sets that have several.
        columns: Columns of images, labels and captions.
        view: Size, crops and flips.
        skip_unreadable: Decode all images once, and leave out those that cannot be decoded, with a warning. false: a
            damaged image stops the run with an error that names it.
        scores: Network and real images that generated images are compared with.
        val_fraction: Share of ``train`` held out for validation if ``val`` is null, by a hash of each image's content.
            0: train on all images, without validation.
        test_fraction: Share of ``train`` held out for the test if ``test`` is null.
        batch_size: Images in a batch, for each process.
        num_workers: Worker processes of a loader.
        seed: Seed of the split, of the order, of the variants and of random crops.
        cache_dir: Folder of the cache of sizes and hashes. null: LIT_EFFICIENT_CACHE, or ~/.cache/lit_efficient.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
        preload: Read all items once before the first epoch and keep them in memory. Raise an error if they do not fit.
    """

    batches: ClassVar[str] = "images"

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        splits: ImageSplits = ImageSplits(),  # noqa: B008 (frozen)
        columns: ImageColumns = ImageColumns(),  # noqa: B008 (frozen)
        view: ImageView = ImageView(),  # noqa: B008 (frozen)
        skip_unreadable: bool = False,
        scores: ImageScores = ImageScores(),  # noqa: B008 (frozen)
        val_fraction: float = 0.05,
        test_fraction: float = 0.0,
        batch_size: int = 16,
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str | None = None,
        pin_memory: bool = True,
        preload: bool = False,
    ) -> None:
        super().__init__(batch_size, num_workers, seed, view.variants, pin_memory)
        check_number("ImageData", "val_fraction", val_fraction, least=0, below=1)
        check_number("ImageData", "test_fraction", test_fraction, least=0, below=1)
        check_number("ImageData", "val_fraction + test_fraction", val_fraction + test_fraction, below=1)
        self.train = train
        self.val = val
        self.test = test
        self.splits = splits
        self.columns = columns
        self.view = view
        self.skip_unreadable = skip_unreadable
        self.scores = scores
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.cache_dir = cache_dir
        self.preload = preload
        self._stores: list[StoredImages] = []
        self._judge: ImageJudge | None = None

    def prepare_data(self) -> None:
        self._open()
        for store in self._stores:
            store.log_findings()
        self._log_shapes()
        if self.scores.judge is not None:
            # A model that cannot be loaded raises an error now.
            ImageJudge(self.scores.judge, "ImageData")

    def setup(self, stage: str) -> None:
        self._open()

    def bucket_of(self, index: int) -> tuple[int, int]:
        return self._opened().shapes[index]

    def identity(self) -> dict[str, str]:
        """Return all that items depend on, by name. ``data`` and ``annotations`` are hashes of the contents."""
        dataset = self._opened()
        digests = b"".join(store.digests.tobytes() for store in self._stores)
        annotations = json.dumps([self.class_names, dataset.labels, dataset.captions])
        return {
            "data": hashlib.sha256(digests).hexdigest(),
            "annotations": hashlib.sha256(annotations.encode()).hexdigest(),
            "split": self._split_digest(),
            **self.view.identity(self.seed),
        }

    @property
    def judges_samples(self) -> bool:
        """True if there is a judge."""
        return self.scores.judge is not None

    def score_samples(self, images: Tensor, labels: Tensor | None = None) -> dict[str, float]:
        """Return distances between images [M, C, H, W] in [-1, 1] and training images in the features of the judge.

        Labels are ignored.

        Returns:
            ``frechet_distance`` and ``kernel_distance``; nothing without a judge.
        """
        if self.scores.judge is None:
            return {}
        dataset = self._opened()
        if self._judge is None:
            self._judge = ImageJudge(self.scores.judge, "ImageData")
            count = min(self.scores.images, len(self.train_index))
            # Evenly spaced images, because folders are sorted by class.
            places = np.linspace(0, len(self.train_index) - 1, count).round().astype(int)
            self._judge.set_real_images(dataset[(self.train_index[place], 0)]["images"] for place in places)
        return self._judge.distances(images)

    def _open(self) -> None:
        if self._stores:
            return
        stores = {part: self._stores_of(part) for part in ("train", "val", "test")}
        every = [store for listed in stores.values() for store in listed]
        # Over all parts together: with one class in each of train and val there are still two classes.
        drop_single_class(every)
        labels, self.class_names = classes_of(stores)
        captions = collected(every, "captions")
        sizes = np.concatenate([store.sizes for store in every])
        offered = self.view.shapes()
        shapes = [offered[number] for number in nearest_shapes(sizes, offered).tolist()]
        self.dataset = KeyedImageFiles(every, shapes, self.view, self.seed, labels, captions)
        self._split(stores)
        # Set last, so that after an error everything is opened again.
        self._stores = every

    def _stores_of(self, part: str) -> list[StoredImages]:
        """Open the images of "train", "val" or "test"."""
        names = getattr(self, part) or []
        if isinstance(names, str):
            names = [names]
        split = getattr(self.splits, part)
        return [StoredImages(name, split, self.columns, self.skip_unreadable, self.cache_dir) for name in names]

    def _split(self, stores: dict[str, list[StoredImages]]) -> None:
        """Set the indices of the three parts."""
        digests = [digest.tobytes() for store in stores["train"] for digest in store.digests]
        fractions = [0.0 if self.val else self.val_fraction, 0.0 if self.test else self.test_fraction]
        # Equal images must not be in two parts, so the split is by content.
        val, test, train = hold_out(digests, self.seed, fractions)
        val_end = len(digests) + sum(len(store) for store in stores["val"])
        test_end = val_end + sum(len(store) for store in stores["test"])
        repeats = repeats_of(stores["train"])
        self.train_index = [index for index in train for _ in range(repeats[index])]
        self.val_index = list(range(len(digests), val_end)) or val
        self.test_index = list(range(val_end, test_end)) or test or list(self.val_index)
        needed = [("train", self.train_index)]
        if self.val or self.val_fraction:
            needed.append(("validate", self.val_index))
        for use, index in needed:
            if not index:
                raise ConfigurationError(
                    f"ImageData: no image is left to {use} on: {len(digests)} images, of which {len(set(digests))} "
                    "differ, are too few to hold some out. Name other images as val, or set val_fraction: 0."
                )

    def _log_shapes(self) -> None:
        shapes = self._opened().shapes
        sizes = np.concatenate([store.sizes for store in self._stores])
        ratios = np.array(shapes) / sizes
        kept = (ratios.min(axis=1) / ratios.max(axis=1)).mean()
        enlarged = int((ratios.max(axis=1) > 1).sum())
        text = (
            f"ImageData: {len(ratios):,} images, {len(self.train_index):,} to train and {len(self.val_index):,} to "
            f"validate on, in {len(set(shapes))} shapes; crops keep {kept:.1%} of them"
        )
        if enlarged:
            text += f"; {enlarged:,} are smaller than their shape, and enlarged"
        if self.num_classes:
            text += f"; {self.num_classes} classes"
        rank_zero_info(text)

    def _opened(self) -> KeyedImageFiles:
        if not isinstance(self.dataset, KeyedImageFiles):
            raise ConfigurationError("ImageData is not set up: call prepare_data() and setup('fit') first.")
        return self.dataset
