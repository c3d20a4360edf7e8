"""Your own images: folders, local Hugging Face data sets and parquet files, as batches of one shape each.

    encoded bytes -> upright, opaque, 8 bits -> the largest crop of the bucket's aspect -> resampled, in [-1, 1]

Sizes and hashes of all images are found out once. Every item is a pure function of (index, variant): batches are the
same with any number of workers and after any interruption, and what is computed from them can be cached by key.

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
from lit_efficient.data.images.keyed_images import KeyedImageFiles, classes_of, forget_lone_class, together
from lit_efficient.errors import ConfigurationError, check_number, refusal


class ImageData(ImageModule):
    """Images of your own, with class labels, captions or both.

    A folder's labels are its subfolders, or a column of ``metadata.jsonl`` or ``metadata.csv`` (Hugging Face's
    ImageFolder: ``file_name`` and further columns); its captions such a column, or a .txt file beside each image (as
    kohya's scripts have it). Batches are {"images" [B, C, H, W] float32 in [-1, 1], "index" [B], "variant" [B], and if
    the data has them "labels" [B] and "captions", a list}.

    Args:
        train: Folder of images, or of one for each split; folder of ``save_to_disk``, .arrow or .parquet files; one
            such file; or several of all.
        val: The same for validation; null holds out ``val_fraction`` of ``train``.
        test: The same for the test; null holds out ``test_fraction``, and if that is 0 the test uses the validation's.
        splits: Which splits these are, of data sets that have several.
        columns: Which columns hold images, labels and captions.
        view: Size, crops and flips.
        skip_unreadable: Decode all images once and leave out those that cannot be, with a warning. Otherwise a damaged
            one is an error that names it.
        scores: What generated images are compared with real ones by.
        val_fraction: Share of ``train`` held out for validation if ``val`` is null, by a hash of each image's content.
        test_fraction: The same for the test.
        batch_size: Images a batch, for each process.
        num_workers: Worker processes a loader.
        seed: Seed of the split, of the order, of the variants and of random crops.
        cache_dir: Where sizes and hashes are kept. Default: LIT_EFFICIENT_CACHE, else ~/.cache/lit_efficient.
        pin_memory: Whether batches for a CUDA device lie in pinned memory, from which they are copied beside its work.
        preload: Whether all items are read once, before the first epoch, and kept in memory: it is refused, with both
            numbers, where they do not fit.
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
        for name, value in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            check_number("ImageData", name, value, least=0, below=1)
        if val is None and val_fraction == 0.0:
            raise refusal("ImageData", "val_fraction", "above 0 unless val names images", val_fraction)
        check_number("ImageData", "val_fraction + test_fraction", val_fraction + test_fraction, below=1)
        self.train, self.val, self.test = train, val, test
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
            store.say()
        self._say_shapes()
        if self.scores.judge is not None:
            ImageJudge(self.scores.judge, "ImageData")  # what it cannot load, it should refuse now

    def setup(self, stage: str) -> None:
        self._open()

    def bucket_of(self, index: int) -> tuple[int, int]:
        return self._opened().shapes[index]

    def identity(self) -> dict[str, str]:
        """What items depend on, each by a name of its own; ``data`` and ``annotations`` are hashes of the contents."""
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
        """Whether there is a judge."""
        return self.scores.judge is not None

    def score_samples(self, images: Tensor, labels: Tensor | None = None) -> dict[str, float]:
        """``frechet_distance`` and ``kernel_distance`` of images [M, C, H, W] in [-1, 1] to training images, for the
        judge; nothing without one. It knows no classes.
        """
        if self.scores.judge is None:
            return {}
        dataset = self._opened()
        if self._judge is None:
            self._judge = ImageJudge(self.scores.judge, "ImageData")
            count = min(self.scores.images, len(self.train_index))
            places = np.linspace(0, len(self.train_index) - 1, count).round().astype(int)
            self._judge.show(dataset[(self.train_index[place], 0)]["images"] for place in places)
        return self._judge.distances(images)

    def _open(self) -> None:
        if self._stores:
            return
        stores = {part: self._stored(part) for part in ("train", "val", "test")}
        every = [store for listed in stores.values() for store in listed]
        forget_lone_class(every)
        labels, self.class_names = classes_of(stores)
        captions = together(every, "captions")
        sizes = np.concatenate([store.sizes for store in every])
        offered = self.view.shapes()
        shapes = [offered[number] for number in nearest_shapes(sizes, offered).tolist()]
        self.dataset = KeyedImageFiles(every, shapes, self.view, self.seed, labels, captions)
        self.train_index, self.val_index, self.test_index = self._parts(stores)
        self._stores = every  # all of it is well

    def _stored(self, part: str) -> list[StoredImages]:
        names = getattr(self, part)
        split, folders = getattr(self.splits, part), [names] if isinstance(names, str) else names or []
        return [StoredImages(name, split, self.columns, self.skip_unreadable, self.cache_dir) for name in folders]

    def _parts(self, stores: dict[str, list[StoredImages]]) -> tuple[list[int], list[int], list[int]]:
        counts = {part: sum(len(store) for store in listed) for part, listed in stores.items()}
        digests = [digest.tobytes() for store in stores["train"] for digest in store.digests]
        fractions = [0.0 if self.val else self.val_fraction, 0.0 if self.test else self.test_fraction]
        val, test, train = hold_out(digests, self.seed, fractions)
        given = np.arange(counts["train"], sum(counts.values())).tolist()
        val = given[: counts["val"]] or val
        for part, index in (("train", train), ("validate", val)):
            if not index:
                raise ConfigurationError(
                    f"ImageData: no image is left to {part} on: {counts['train']} images, of which "
                    f"{len(set(digests))} differ, are too few to hold some out. Name others as val."
                )
        return train, val, given[counts["val"] :] or test or list(val)

    def _say_shapes(self) -> None:
        shapes, sizes = self._opened().shapes, np.concatenate([store.sizes for store in self._stores])
        ratios = np.array(shapes) / sizes
        kept, enlarged = (ratios.min(axis=1) / ratios.max(axis=1)).mean(), int((ratios.max(axis=1) > 1).sum())
        rank_zero_info(
            f"ImageData: {len(ratios):,} images, {len(self.train_index):,} to train and {len(self.val_index):,} to "
            f"validate on, in {len(set(shapes))} shapes; crops keep {kept:.1%} of them"
            + (f"; {enlarged:,} are smaller than they are shown, and enlarged" if enlarged else "")
            + (f"; {self.num_classes} classes" if self.num_classes else "")
        )

    def _opened(self) -> KeyedImageFiles:
        if not isinstance(self.dataset, KeyedImageFiles):
            raise ConfigurationError("ImageData is not set up: call prepare_data() and setup('fit') first.")
        return self.dataset
