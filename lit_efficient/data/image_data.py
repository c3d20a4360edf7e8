"""Your own images: folders, local Hugging Face data sets and parquet files, as batches of one shape each.

    encoded bytes -> upright, opaque, 8 bits -> the largest crop of the bucket's aspect -> resampled, in [-1, 1]

Sizes and hashes of all images are found out once. Every item is a pure function of (index, variant): batches are the
same with any number of workers and after any interruption, and what is computed from them can be cached by key.

Saves: aspect buckets keep what a square crop throws away; variants make crops and flips that a cache can hold.
Costs: reading every image once; later starts list the files, compare their sizes and times, and read labels and
    captions (of a folder: metadata, or the files beside the images) anew
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_efficient.data.images.aspect_buckets import AspectBuckets, Shape, nearest_shapes
from lit_efficient.data.images.image_columns import AUTO, Columns
from lit_efficient.data.images.image_folder import FolderTable
from lit_efficient.data.images.image_judge import ImageJudge
from lit_efficient.data.images.image_module import ImageModule, check_choice, check_integer, hold_out
from lit_efficient.data.images.image_pixels import Channels, Crop, Resample, UnreadableImage, View
from lit_efficient.data.images.image_store import StoredImages
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key


class KeyedImageFiles:
    """Images of several stores under one numbering, by (index, variant).

    Args:
        stores: where they lie.
        shapes: height and width of each as an item.
        view: how they are looked at.
        variants: how many variants each has.
        labels: number of each one's class.
        captions: each one's.
    """

    def __init__(
        self,
        stores: Sequence[StoredImages],
        shapes: Sequence[Shape],
        view: View,
        variants: int,
        labels: Sequence[int] | None,
        captions: Sequence[str] | None,
    ) -> None:
        self.stores = list(stores)
        self.shapes = shapes
        self.view = view
        self.variants = variants
        self.labels = labels
        self.captions = captions
        self._ends = np.cumsum([len(store) for store in stores])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, key: Key) -> dict[str, Any]:
        index, variant = key
        if not 0 <= variant < self.variants:
            raise ConfigurationError(f"ImageData: the variant must be in [0, {self.variants}), not {variant!r}.")
        if not 0 <= index < len(self):
            raise IndexError(f"ImageData holds {len(self)} images, there is no number {index}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        store, at = self.stores[number], index - (int(self._ends[number - 1]) if number else 0)
        try:
            images = self.view(store.read(at), *self.shapes[index], index, variant)
        except UnreadableImage as error:
            raise ConfigurationError(
                f"ImageData: {store.place(at)} cannot be read: {error}. Mend it, or leave out what is damaged with "
                "skip_unreadable: true."
            ) from error
        item: dict[str, Any] = {"images": images, "index": index, "variant": variant}
        if self.labels is not None:
            item["labels"] = self.labels[index]
        if self.captions is not None:
            item["captions"] = self.captions[index]
        return item


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
        split: Split of ``train``, where a data set has several.
        val_split: Split of ``val``.
        test_split: Split of ``test``.
        image_column: Column of the images; ``auto`` is the only one that holds some, or the usual name.
        label_column: Column of the labels, numbers or names; ``auto`` is the usual name, or subfolders; null is none.
        caption_column: Column of the captions; ``auto`` is the usual name, or .txt files; null is none.
        resolution: Height and width in pixels, a multiple of 8; with buckets the square root of the area.
        channels: ``rgb`` or ``grey``.
        buckets: Batches of several aspect ratios: true for steps of 64 pixels and aspects up to 2, or a description.
        crop: Where the covering crop of variants other than 0 lies.
        horizontal_flip: Mirror odd variants.
        variants: Looks at each image, of which an epoch shows one: 1 for a center crop without flip, 2 with flip, any
            number of at least 2 for random crops. Variant 0 is the center crop, unflipped; validation sees it alone.
        resample: Kernel of resampling, antialiased.
        val_fraction: Share of ``train`` held out for validation if ``val`` is null, by a hash of each image's content.
        test_fraction: Likewise for the test.
        skip_unreadable: Decode all images once and leave out those that cannot be, with a warning. Otherwise a damaged
            one is an error that names it.
        judge: Folder, name or ``config.json`` of a transformers vision model, whose features compare generated images
            with real ones; null gives no scores.
        judge_images: Training images to compare with.
        batch_size: Images a batch, for each process.
        num_workers: Worker processes a loader.
        seed: Seed of the split, of the order, of the variants and of random crops.
        cache_dir: Where sizes and hashes are kept. Default: LIT_EFFICIENT_CACHE, else ~/.cache/lit_efficient.
    """

    def __init__(
        self,
        train: str | list[str],
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        split: str = "train",
        val_split: str = "validation",
        test_split: str = "test",
        image_column: str = AUTO,
        label_column: str | None = AUTO,
        caption_column: str | None = AUTO,
        resolution: int = 256,
        channels: Channels = "rgb",
        buckets: bool | AspectBuckets = False,
        crop: Crop = "center",
        horizontal_flip: bool = False,
        variants: int = 1,
        resample: Resample = "lanczos",
        val_fraction: float = 0.05,
        test_fraction: float = 0.0,
        skip_unreadable: bool = False,
        judge: str | None = None,
        judge_images: int = 1000,
        batch_size: int = 16,
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, seed, variants)
        check_integer("ImageData", "resolution", resolution, 8)
        check_integer("ImageData", "judge_images", judge_images, 2)
        check_choice("ImageData", "channels", channels, ("rgb", "grey"))
        check_choice("ImageData", "crop", crop, ("center", "random"))
        check_choice("ImageData", "resample", resample, ("lanczos", "bicubic"))
        if resolution % 8:
            raise ConfigurationError(f"ImageData: resolution must be a multiple of 8, not {resolution}.")
        most = None if crop == "random" else 2 if horizontal_flip else 1
        if variants < (most or 2) or (most is not None and variants > most):
            raise ConfigurationError(
                f"ImageData: variants must be {most or 'at least 2'} for crop: {crop} "
                f"{'with' if horizontal_flip else 'without'} horizontal_flip, not {variants}."
            )
        for name, value in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0.0 <= value < 1.0:
                raise ConfigurationError(f"ImageData: {name} must be in [0, 1), not {value!r}.")
        if val is None and val_fraction == 0.0:
            raise ConfigurationError("ImageData: val_fraction must be above 0 unless val names images.")
        if val_fraction + test_fraction >= 1.0:
            raise ConfigurationError("ImageData: val_fraction + test_fraction must be below 1: nothing would be left.")
        self.buckets = buckets
        self._bucket_shapes = _shapes(buckets, resolution)
        self.train, self.val, self.test = train, val, test
        self.split, self.val_split, self.test_split = split, val_split, test_split
        self.image_column, self.label_column, self.caption_column = image_column, label_column, caption_column
        self.resolution = resolution
        self.channels = channels
        self.crop = crop
        self.horizontal_flip = horizontal_flip
        self.resample = resample
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.skip_unreadable = skip_unreadable
        self.judge = judge
        self.judge_images = judge_images
        self.cache_dir = cache_dir
        self._stores: list[StoredImages] = []
        self._judge: ImageJudge | None = None

    def prepare_data(self) -> None:
        """Read every image once, unless that was done, and say what was found. Runs in one process a machine."""
        self._open()
        for store in self._stores:
            store.say()
        self._say_shapes()
        if self.judge is not None:
            ImageJudge(self.judge, "ImageData")  # what it cannot load, it should refuse now

    def setup(self, stage: str) -> None:
        """Open what was found, in every process; no randomness."""
        self._open()

    def bucket_of(self, index: int) -> tuple[int, int]:
        """Height and width of an image as an item."""
        return self._opened().shapes[index]

    def identity(self) -> dict[str, str]:
        """What items depend on, each by a name of its own; ``data`` and ``annotations`` are hashes of the contents."""
        dataset = self._opened()
        digests = b"".join(store.digests.tobytes() for store in self._stores)
        annotations = json.dumps([self.class_names, dataset.labels, dataset.captions])
        shapes = self.buckets if isinstance(self.buckets, AspectBuckets) else AspectBuckets()
        return {
            "data": hashlib.sha256(digests).hexdigest(),
            "annotations": hashlib.sha256(annotations.encode()).hexdigest(),
            "split": self._split_digest(),
            "transform": dataset.view.describe(),
            "resolution": f"{self.resolution}x{self.resolution}",
            "buckets": f"step {shapes.step}, max_aspect {shapes.max_aspect:g}" if self.buckets else "none",
            "variants": str(self.variants),
            "seed": str(self.seed) if self.crop == "random" else "not used",
        }

    @property
    def judges_samples(self) -> bool:
        """Whether there is a judge."""
        return self.judge is not None

    def score_samples(self, images: Tensor, labels: Tensor | None = None) -> dict[str, float]:
        """Distances to training images in the judge's features.

        Args:
            images: Generated images [M, C, H, W] in [-1, 1], M >= 2.
            labels: Not used: the judge knows no classes.

        Returns:
            ``frechet_distance`` and ``kernel_distance``, lower is better; nothing without a judge.
        """
        if self.judge is None:
            return {}
        dataset = self._opened()
        if self._judge is None:
            self._judge = ImageJudge(self.judge, "ImageData")
            count = min(self.judge_images, len(self.train_index))
            places = np.linspace(0, len(self.train_index) - 1, count).round().astype(int)
            self._judge.show(dataset[(self.train_index[place], 0)]["images"] for place in places)
        return self._judge.distances(images)

    def _open(self) -> None:
        if self._stores:
            return
        columns = Columns(self.image_column, self.label_column, self.caption_column)
        named = {"train": (self.train, self.split), "val": (self.val, self.val_split)}
        named["test"] = (self.test, self.test_split)
        stores = {
            part: [StoredImages(n, split, columns, self.skip_unreadable, self.cache_dir) for n in _listed(names)]
            for part, (names, split) in named.items()
        }
        every = [store for listed in stores.values() for store in listed]
        _forget_lone_class(every)
        labels, self.class_names = _classes(stores)
        captions = _together(every, "captions")
        sizes = np.concatenate([store.sizes for store in every])
        shapes = [self._bucket_shapes[number] for number in nearest_shapes(sizes, self._bucket_shapes).tolist()]
        view = View(self.channels, self.crop, self.horizontal_flip, self.resample, self.seed)
        self.dataset = KeyedImageFiles(every, shapes, view, self.variants, labels, captions)
        self.train_index, self.val_index, self.test_index = self._parts(stores)
        self._stores = every  # all of it is well

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


def _listed(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or [])


def _shapes(buckets: bool | AspectBuckets, resolution: int) -> list[Shape]:
    if buckets is False:
        return [(resolution, resolution)]
    return (AspectBuckets() if buckets is True else buckets).shapes(resolution)


def _forget_lone_class(stores: list[StoredImages]) -> None:
    """All images in one subfolder, as kohya's scripts have them: that is no class."""
    tables = [store.table for store in stores if isinstance(store.table, FolderTable) and store.table.by_subfolder]
    if len({label for table in tables for label in table.labels or []}) == 1:
        for table in tables:
            table.labels = None


def _together(stores: list[StoredImages], kind: Literal["labels", "captions"]) -> list[Any] | None:
    """Labels or captions of all stores; None if none has them.

    Raises:
        ConfigurationError: If some have and others have not.
    """
    found = {store.table.name: store.of_readable(getattr(store.table, kind)) for store in stores}
    lacking = [name for name, values in found.items() if values is None]
    if len(lacking) == len(found):
        return None
    if lacking:
        having = next(name for name, values in found.items() if values is not None)
        raise ConfigurationError(
            f"ImageData: {having} has {kind}, {lacking[0]} has none. Add them, or set {kind[:-1]}_column: null."
        )
    return [value for store in stores for value in store.of_readable(getattr(store.table, kind)) or []]


def _classes(stores: dict[str, list[StoredImages]]) -> tuple[list[int] | None, list[str]]:
    """Number of each image's class, and the classes' names.

    Raises:
        ConfigurationError: If numbers and names are mixed, or a class is met that is not trained on.
    """
    every = [store for listed in stores.values() for store in listed]
    labels = _together(every, "labels")
    if labels is None:
        return None, []
    trained = [label for store in stores["train"] for label in store.of_readable(store.table.labels) or []]
    declared = {tuple(store.table.label_names) for store in every if store.table.label_names}
    if len({type(label) for label in labels}) > 1 or len(declared) > 1:
        raise ConfigurationError("ImageData: labels must be all numbers or all names, of the same classes everywhere.")
    if isinstance(labels[0], int):
        names = list(declared.pop()) if declared else [str(number) for number in range(max(trained) + 1)]
        number_of: dict[Any, int] = {number: number for number in range(len(names))}
    else:
        names = sorted(set(trained), key=(int if all(name.isdigit() for name in trained) else str))
        number_of = {name: number for number, name in enumerate(names)}
    strange = next((label for label in labels if label not in number_of), None)
    if strange is not None:
        raise ConfigurationError(
            f"ImageData: the label {strange!r} is not among the {len(names)} classes that are trained on "
            f"({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})."
        )
    return [number_of[label] for label in labels], names
