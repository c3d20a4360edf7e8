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
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_efficient.data.images.aspect_buckets import nearest_shapes
from lit_efficient.data.images.caption_rules import CaptionRules
from lit_efficient.data.images.class_images import stand_ins
from lit_efficient.data.images.image_columns import ImageColumns
from lit_efficient.data.images.image_judge import CaptionJudge, ImageJudge, ImageScores
from lit_efficient.data.images.image_module import ImageModule, hold_out
from lit_efficient.data.images.image_set import ALPHA, ImageSet, roles_of
from lit_efficient.data.images.image_store import StoredSet, open_set
from lit_efficient.data.images.image_stream import ImageStream, StreamedImages
from lit_efficient.data.images.image_tables import ImageSplits
from lit_efficient.data.images.image_view import ImageView
from lit_efficient.data.images.keyed_images import (
    KeyedImageFiles,
    classes_of,
    collected,
    drop_single_class,
    repeats_of,
    weights_of,
)
from lit_efficient.errors import ConfigurationError, check_number, refusal


class ImageData(ImageModule):
    """DataModule of your own images, with class labels, captions or both.

    The labels of a folder are its subfolders, or a column of ``metadata.jsonl`` or ``metadata.csv`` (ImageFolder of
    Hugging Face: ``file_name`` and further columns). Its captions are such a column, or a .txt file beside each image
    (as kohya's scripts write them). Batches are {"images" [B, C, H, W] float32 in [-1, 1], "index" [B], "variant" [B]},
    and if the data has them "labels" [B] and "captions", a list. Sets may add "loss_weight" [B], "mask" [B, 1, H, W] in
    [0, 1], and "condition" [B, C, H, W] in [-1, 1].

    Args:
        train: Folder of images, or of one folder for each split; folder of ``save_to_disk``, .arrow, .parquet or .tar
            (WebDataset) files; one such file; or a list of several, each of which may be an ``ImageSet``, with role,
            repeats, weight, prompt, masks and conditions. ``tiny:photos`` is 15 small photographs, which need no
            download.
        val: Images for validation, named in the same way. null: ``val_fraction`` of ``train`` is held out.
        test: Images for the test, named in the same way. null: ``test_fraction`` of ``train`` is held out; if it is 0,
            the test uses the validation images.
        splits: Names of the splits of data sets that have several.
        columns: Columns of images, labels and captions.
        view: Size, crops and flips.
        caption_rules: Variants of captions: shuffled tags, several captions, empty captions.
        skip_unreadable: Decode all images, masks and conditions once, and leave out images that cannot be decoded, or
            whose mask or condition cannot, with a warning. false: a damaged image stops the run with an error that
            names it.
        scores: Network and real images that generated images are compared with.
        val_fraction: Share of ``train`` held out for validation if ``val`` is null, by a hash of each image's content:
            an image that is in several sets is held out of all of them. 0: train on all images, without validation.
        test_fraction: Share of ``train`` held out for the test if ``test`` is null.
        batch_size: Images in a batch, for each process.
        num_workers: Worker processes of a loader.
        seed: Seed of the split, of the order, of the variants and of random crops.
        cache_dir: Folder of the cache of sizes and hashes. null: LIT_EFFICIENT_CACHE, or ~/.cache/lit_efficient.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
        preload: Read all items once before the first epoch and keep them in memory. Raise an error if they do not fit.
        stream: Read ``train`` during training instead of examining it before.
    """

    batches: ClassVar[str] = "images"

    def __init__(
        self,
        train: str | list[str | ImageSet],
        val: str | list[str | ImageSet] | None = None,
        test: str | list[str | ImageSet] | None = None,
        splits: ImageSplits = ImageSplits(),  # noqa: B008 (frozen)
        columns: ImageColumns = ImageColumns(),  # noqa: B008 (frozen)
        view: ImageView = ImageView(),  # noqa: B008 (frozen)
        caption_rules: CaptionRules = CaptionRules(),  # noqa: B008 (frozen)
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
        stream: ImageStream = ImageStream(),  # noqa: B008 (frozen)
    ) -> None:
        named = [*_sets_of(train), *_sets_of(val), *_sets_of(test)]
        views = [one.view or view for one in named] or [view]
        rules = [one.caption_rules or caption_rules for one in named] or [caption_rules]
        self.pixel_variants = max(one.variants for one in views)
        variants = self.pixel_variants * max(one.variants for one in rules)
        super().__init__(batch_size, num_workers, seed, variants, pin_memory)
        if len({one.channels for one in views}) > 1:
            raise refusal("ImageData", "view.channels", "the same for all sets", [one.channels for one in views])
        for name, part in (("val", val), ("test", test)):
            for one in _sets_of(part):
                if (one.role, one.repeats, one.weight) != ("train", 1, 1.0):
                    allowed = "without role, repeats and weight, which are for training alone"
                    raise refusal("ImageData", f"a set of {name}", allowed, one)
        if all(one.role == "prior" for one in _sets_of(train)):
            raise refusal("ImageData", "train", "at least one set with role: train", train)
        check_number("ImageData", "val_fraction", val_fraction, least=0, below=1)
        check_number("ImageData", "test_fraction", test_fraction, least=0, below=1)
        check_number("ImageData", "val_fraction + test_fraction", val_fraction + test_fraction, below=1)
        if stream.enabled:
            for name, value, allowed in (
                ("val_fraction", 0.0 if val else val_fraction, "0 for a stream without val"),
                ("test_fraction", 0.0 if test else test_fraction, "0 for a stream"),
                ("preload", preload, "false for a stream"),
                ("scores.judge", val is None and scores.judge, "null for a stream without val, the real images"),
            ):
                if value:
                    raise refusal("ImageData", name, allowed, value)
        self.stream = stream
        self.streamed: StreamedImages | None = None
        self.train = train
        self.val = val
        self.test = test
        self.splits = splits
        self.columns = columns
        self.view = view
        self.caption_rules = caption_rules
        self.skip_unreadable = skip_unreadable
        self.scores = scores
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.cache_dir = cache_dir
        self.preload = preload
        self.roles: tuple[str, ...] = ()
        self.loss_weights: np.ndarray | None = None
        self.network: object = None  # description of the trained network, whose pipeline makes class images
        self.planned = False  # black images take the place of class images that do not exist
        self._sets: list[StoredSet] = []
        self._judge: ImageJudge | None = None
        self._caption_judge: CaptionJudge | None = None

    def prepare_data(self) -> None:
        self._open(makes=True)
        for one in self._sets:
            for store in one.stores.values():
                store.log_findings()
        if self._sets:
            self._log_shapes()
        if self.scores.judge is not None:
            # A model that cannot be loaded raises an error now.
            ImageJudge(self.scores.judge, "ImageData", self.scores.pixels)
        if self.scores.clip is not None:
            CaptionJudge(self.scores.clip, "ImageData")

    def setup(self, stage: str) -> None:
        self._open()

    def bucket_of(self, index: int) -> tuple[int, int]:
        return self._opened().shapes[index]

    def identity(self) -> dict[str, str]:
        """Return all that items depend on, by name. ``data`` and ``annotations`` are hashes of the contents."""
        dataset = self._opened()
        captions = [self.captions_of(index) for index in range(len(dataset))]
        annotations = json.dumps([self.class_names, dataset.labels, captions])
        found = {
            "data": self._digest("images"),
            "annotations": hashlib.sha256(annotations.encode()).hexdigest(),
            "split": self._split_digest(),
            **self.view.identity(self.seed),
        }
        if "mask" in self.roles:
            found["masks"] = self._digest("masks")
        if "condition" in self.roles:
            found["conditions"] = self._digest("conditions")
        own = [None if one.about.view is None else one.about.view.identity(self.seed) for one in self._sets]
        found["variants"] = str(self.pixel_variants)
        if any(own):
            found["views"] = json.dumps(own)
        return found

    def contents_of(self, index: list[int]) -> str:
        """Return a hash of the images of an index and of their shapes, on which the order of an epoch depends."""
        dataset = self._opened()
        digests = np.concatenate([one.images.digests for one in self._sets])[index]
        shapes = np.array(dataset.shapes)[index]
        return hashlib.sha256(digests.tobytes() + shapes.tobytes()).hexdigest()

    def captions_of(self, index: int) -> list[str]:
        """Return all variants of the captions of an image; none without captions."""
        dataset = self._opened()
        if dataset.captions is None:
            return []
        return [dataset.caption(index, number) for number in range(dataset.caption_variants)]

    def _digest(self, kind: Literal["images", "masks", "conditions"]) -> str:
        """Return a hash of the contents of all images, masks or conditions."""
        parts = []
        for one in self._sets:
            store = getattr(one, kind)
            opacity = kind == "masks" and one.about.mask == ALPHA
            parts.append([opacity, None if store is None else store.digests.tobytes().hex()])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def judges_samples(self) -> bool:
        """True if there is a judge of images or of captions."""
        return self.scores.judge is not None or self.scores.clip is not None

    def score_samples(
        self, images: Tensor, labels: Tensor | None = None, captions: list[str] | None = None
    ) -> dict[str, float]:
        """Return distances between images [M, C, H, W] in [-1, 1] and training images in the features of the judge.

        Labels are ignored.

        Returns:
            ``frechet_distance`` and ``kernel_distance`` (with a network from a file ``fid`` and ``kid``), and
            ``clip_score`` with captions; nothing without a judge.
        """
        found: dict[str, float] = {}
        if self.scores.clip is not None and captions is not None:
            if self._caption_judge is None:
                self._caption_judge = CaptionJudge(self.scores.clip, "ImageData")
            found["clip_score"] = self._caption_judge.score(images, captions)
        if self.scores.judge is None:
            return found
        dataset = self._opened()
        if self._judge is None:
            self._judge = ImageJudge(self.scores.judge, "ImageData", self.scores.pixels)
            real = self._real_index
            count = min(self.scores.images, len(real))
            # Evenly spaced images, because folders are sorted by class.
            places = np.linspace(0, len(real) - 1, count).round().astype(int)
            self._judge.set_real_images(dataset[(real[place], 0)]["images"] for place in places)
        return found | self._judge.distances(images)

    def _open(self, makes: bool = False) -> None:
        """Open all images. ``makes`` makes the class images that do not exist."""
        if self._sets or self.streamed is not None:
            return
        streamed = self._opened_stream() if self.stream.enabled else None
        sets = {part: self._sets_of_part(part, makes) for part in ("train", "val", "test")}
        if streamed is not None and not any(sets.values()):
            self.roles = streamed.roles
            self.streamed = streamed
            return
        every = [one for listed in sets.values() for one in listed]
        # Over all parts together: with one class in each of train and val there are still two classes.
        drop_single_class(every)
        labels, self.class_names = classes_of(sets, self.stream.classes if self.stream.enabled else None)
        captions = collected(every, "captions")
        if captions is None and self.variants > self.pixel_variants:
            raise refusal("ImageData", "caption_rules.variants", "1 for images without captions", self.caption_rules)
        shapes = []
        for one in every:
            offered = (one.about.view or self.view).shapes()
            shapes += [offered[number] for number in nearest_shapes(one.images.sizes, offered).tolist()]
        self.dataset = KeyedImageFiles(every, shapes, self.view, self.seed, labels, captions)
        self._split(sets)
        if sets["train"]:
            self.loss_weights = weights_of(sets["train"], self.train_index)
        named = [one.about for one in every]
        weighted = self.loss_weights is not None
        if streamed is not None:
            named = [*streamed.sets, *named]
            weighted = "loss_weight" in streamed.roles
        self.roles = roles_of(named, weighted)
        # Set last, so that after an error everything is opened again.
        self._sets = every
        self.streamed = streamed

    def _sets_of_part(self, part: str, makes: bool) -> list[StoredSet]:
        """Open the images of "train", "val" or "test"."""
        found: list[StoredSet] = []
        if part == "train" and self.stream.enabled:
            return found
        for named in _sets_of(getattr(self, part)):
            about = replace(named, caption_rules=named.caption_rules or self.caption_rules)
            opened = []
            if about.images is not None:
                opened.append(self._opened_set(replace(about, generate=None), part))
            missing = 0 if about.generate is None else about.generate.number - sum(map(len, opened))
            if missing > 0:
                opened.append(self._opened_set(self._with_class_images(about, missing, makes), part))
            found += opened
        return found

    def _opened_stream(self) -> StreamedImages:
        sets = [
            replace(one, view=one.view or self.view, caption_rules=one.caption_rules or self.caption_rules)
            for one in _sets_of(self.train)
        ]
        return StreamedImages(
            sets, self.splits.train, self.columns, self.stream, self.batch_size, self.seed, self.skip_unreadable
        )

    def _opened_set(self, about: ImageSet, part: str) -> StoredSet:
        columns = self.columns if part == "train" else replace(self.columns, weight=None)
        return open_set(about, getattr(self.splits, part), columns, self.skip_unreadable, self.cache_dir)

    def _with_class_images(self, about: ImageSet, number: int, makes: bool) -> ImageSet:
        """Return a set of class images from a pipeline. ``makes`` makes those that do not exist."""
        assert about.generate is not None
        assert about.prompt is not None
        side = (about.view or self.view).resolution
        if self.planned:
            return replace(about, images=stand_ins(number, side, self.cache_dir), captions=None, generate=None)
        trained = self.network or getattr(getattr(self.trainer, "lightning_module", None), "backbone", None)
        folder = about.generate.folder(trained, about.prompt, side, self.cache_dir)
        if makes:
            about.generate.make(folder, number, trained, about.prompt, side)
        return replace(about, images=str(folder), captions=None, generate=replace(about.generate, number=number))

    def _split(self, sets: dict[str, list[StoredSet]]) -> None:
        """Set the indices of the three parts."""
        digests = [digest.tobytes() for one in sets["train"] for digest in one.images.digests]
        prior = [one.about.role == "prior" for one in sets["train"] for _ in range(len(one))]
        own = [index for index, is_prior in enumerate(prior) if not is_prior]
        fractions = [0.0 if self.val else self.val_fraction, 0.0 if self.test else self.test_fraction]
        # Equal images must not be in two parts, so the split is by content.
        own_digests = [digests[index] for index in own]
        parts = hold_out(own_digests, self.seed, fractions)
        val, test, train = ([own[place] for place in part] for part in parts)
        val_end = len(digests) + sum(len(one) for one in sets["val"])
        test_end = val_end + sum(len(one) for one in sets["test"])
        repeats = repeats_of(sets["train"])
        # Class images would be compared with generated images as if they were real.
        self._real_index = [index for index in train for _ in range(repeats[index])]
        held_out = {digests[index] for index in [*val, *test]}
        class_images = [index for index, is_prior in enumerate(prior) if is_prior]
        kept = [index for index in class_images if digests[index] not in held_out]
        if len(kept) < len(class_images):
            count = len(class_images) - len(kept)
            rank_zero_info(f"ImageData: {count} class images are not trained on, because they are held out of train.")
        train = sorted([*train, *kept])
        self.train_index = [index for index in train for _ in range(repeats[index])]
        trained = {digests[index] for index in train}
        for part in ("val", "test"):
            named = [digest.tobytes() for one in sets[part] for digest in one.images.digests]
            both = sum(digest in trained for digest in named)
            if both:
                rank_zero_info(f"ImageData: {both} of {len(named)} images of {part} are trained on, too.")
        self.val_index = list(range(len(digests), val_end)) or val
        self.test_index = list(range(val_end, test_end)) or test or list(self.val_index)
        needed = [] if self.stream.enabled else [("train", self._real_index)]
        if self.stream.enabled:
            self._real_index = self.val_index
        if self.val or self.val_fraction:
            needed.append(("validate", self.val_index))
        for use, index in needed:
            if not index:
                raise ConfigurationError(
                    f"ImageData: no image is left to {use} on: {len(own)} images, of which {len(set(own_digests))} "
                    "differ, are too few to hold some out. Name other images as val, or set val_fraction: 0."
                )
        if self.scores.judge is not None and len(set(self._real_index)) < 2:
            allowed = "null for fewer than 2 different images to compare with"
            raise refusal("ImageData", "scores.judge", allowed, self.scores.judge)

    def _log_shapes(self) -> None:
        shapes = self._opened().shapes
        sizes = np.concatenate([one.images.sizes for one in self._sets])
        ratios = np.array(shapes) / sizes
        kept = (ratios.min(axis=1) / ratios.max(axis=1)).mean()
        enlarged = int((ratios.max(axis=1) > 1).sum())
        count = len(set(shapes))
        text = (
            f"ImageData: {len(ratios):,} images, {len(self.train_index):,} to train and {len(self.val_index):,} to "
            f"validate on, in {count} shape{'s' if count > 1 else ''}; crops keep {kept:.1%} of them"
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


def _sets_of(named: str | list[str | ImageSet] | None) -> list[ImageSet]:
    """Return the sets that an argument names."""
    listed = [named] if isinstance(named, str) else named or []
    return [one if isinstance(one, ImageSet) else ImageSet(one) for one in listed]
