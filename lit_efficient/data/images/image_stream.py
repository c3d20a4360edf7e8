"""Images that are read during training, without a cache, an index or all of them in memory, and resumed exactly.

    pass n:  shards in an order drawn from (seed, n);  a part (rank, worker) takes every row whose number in the pass
             equals its own modulo ranks * workers;  a buffer of rows is shuffled;  a batch is filled for each shape

Each pass shows each row once, in a random order as far as the buffer reaches. A stream starts again at its end. An
epoch is a number of batches, the same on every rank. Everything is a function of the files and the seed, so the state
is the number of batches. Crops, flips and captions are variants of a row as they are for images that are not streamed;
each pass shows another one.

Training begins without the pass over all images and without the copy of tars and parquet files.

Costs: each worker reads the headers of all shards; after a resume the rows before it are passed over again. Their
images are only read with buckets, which need their sizes, or with ``skip_unreadable``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import IterableDataset, get_worker_info

from lit_efficient.data.images.aspect_buckets import Shape, nearest_shapes
from lit_efficient.data.images.caption_rules import CaptionRules
from lit_efficient.data.images.image_columns import ImageColumns, check_caption, check_weight
from lit_efficient.data.images.image_pixels import UnreadableImage, decode_mask, unreadable, upright_size
from lit_efficient.data.images.image_set import ALPHA, ImageSet, roles_of
from lit_efficient.data.images.image_source import collate_images
from lit_efficient.data.images.image_store import alike, other_aspect
from lit_efficient.data.images.image_view import ImageView
from lit_efficient.data.images.streamed_rows import Row, Shard, shards_of
from lit_efficient.distributed.ranks import place_among_ranks
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_number, checks_types, refusal


@checks_types
@dataclass(frozen=True)
class ImageStream:
    """Reading of the training images during training.

    Args:
        enabled: Stream ``train``: .tar (WebDataset) or .parquet files, a folder of MDS, or a data set of the hub.
        epoch_batches: Batches of an epoch, for each process.
        buffer: Rows that are shuffled together, in each worker.
        classes: Number of classes of labels, which must be numbers. 0: labels are not read.
    """

    enabled: bool = False
    epoch_batches: int = 1000
    buffer: int = 1000
    classes: int = 0

    def __post_init__(self) -> None:
        check_number("ImageData", "stream.epoch_batches", self.epoch_batches, least=1, whole=True)
        check_number("ImageData", "stream.buffer", self.buffer, least=1, whole=True)
        check_number("ImageData", "stream.classes", self.classes, least=0, whole=True)


@dataclass
class _Kept:
    """A row in the buffer."""

    row: Row
    source: int
    index: int  # number that draws depend on
    shown: int  # number of times that it was shown before


class StreamedImages(IterableDataset[dict[str, Any]]):
    """Endless batches of images, as `KeyedImageFiles` gives them.

    Args:
        sets: The sets, each with its view and rules of captions.
        split: Split of data sets that have several.
        columns: Names of the columns.
        stream: Length of the buffer, and number of classes.
        batch_size: Images in a batch.
        seed: Seed of all draws.
        skip_unreadable: Leave out images that cannot be decoded, with a warning.

    Raises:
        ConfigurationError: If a set cannot be streamed.
    """

    def __init__(
        self,
        sets: Sequence[ImageSet],
        split: str,
        columns: ImageColumns,
        stream: ImageStream,
        batch_size: int,
        seed: int,
        skip_unreadable: bool,
    ) -> None:
        self.sets = list(sets)
        self.stream = stream
        self.batch_size = batch_size
        self.seed = seed
        self.skip_unreadable = skip_unreadable
        self.views = [one.view or ImageView() for one in sets]
        self.rules = [one.caption_rules or CaptionRules() for one in sets]
        self.pixel_variants = max(view.variants for view in self.views)
        self.place: tuple[int, int] | None = None  # rank and ranks, set by the main process: workers may not know
        self.skipped = 0  # batches that an earlier run has yielded
        if not stream.classes:
            columns = replace(columns, label=None)
        self.shards: list[tuple[int, int, int, Shard]] = []  # source, number of its copy, first place, shard
        for source, one in enumerate(sets):
            _check_set(one)
            named = {"mask": one.mask, "condition": one.condition}
            beside = {kind: name for kind, name in named.items() if name not in (None, ALPHA)}
            found = shards_of(str(one.images), split, columns, beside)
            first = len(self.shards)
            for copy in range(one.repeats):
                self.shards += [(source, copy, first + place, shard) for place, shard in enumerate(found)]
        weighted = columns.weight is not None or any(one.weight != 1 for one in sets)
        self.roles = roles_of(sets, weighted)
        self._columns = columns
        self._has_warned = False
        self._captioned: bool | None = None  # whether the rows have captions, once the first one is known

    @property
    def settings(self) -> dict[str, int]:
        """Settings that the order of the rows depends on, for a checkpoint."""
        return {"seed": self.seed, "buffer": self.stream.buffer, "shards": len(self.shards)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, ranks = self.place or place_among_ranks()
        worker = get_worker_info()
        workers = worker.num_workers if worker else 1
        # The loader takes batches of its workers in turn, beginning with the first one, also after a resume.
        own = ((worker.id if worker else 0) + self.skipped) % workers
        left = len(range(own, self.skipped, workers))
        for batch in self._batches(rank * workers + own, ranks * workers):
            if left:
                left -= 1
                continue
            yield collate_images([self._item(*kept) for kept in batch])

    def first_items(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield items of the beginning of the stream, which do not depend on the rank."""
        made = 0
        for batch in self._batches(0, 1):
            for kept in batch:
                yield self._item(*kept)
                made += 1
                if made == number:
                    return

    def _batches(self, part: int, parts: int) -> Iterator[list[tuple[_Kept, Shape]]]:
        """Yield the rows of each batch of a part, with their shapes."""
        waiting: dict[Shape, list[tuple[_Kept, Shape]]] = {}
        for kept in self._shuffled(part, parts):
            shape = self._shape(kept)
            if shape is None:
                continue
            batch = waiting.setdefault(shape, [])
            batch.append((kept, shape))
            if len(batch) == self.batch_size:
                yield waiting.pop(shape)

    def _shuffled(self, part: int, parts: int) -> Iterator[_Kept]:
        """Yield the rows of a part, pass after pass, shuffled within each pass."""
        for passes in count():
            draw = np.random.default_rng(mix_seed(self.seed, passes, part, parts))
            buffer: list[_Kept] = []
            for kept in self._rows(passes, part, parts):
                if len(buffer) < self.stream.buffer:
                    buffer.append(kept)
                    continue
                place = int(draw.integers(len(buffer)))
                drawn = buffer[place]
                buffer[place] = kept
                yield drawn
            for place in draw.permutation(len(buffer)).tolist():
                yield buffer[place]

    def _rows(self, passes: int, part: int, parts: int) -> Iterator[_Kept]:
        """Yield the rows of a part in a pass."""
        order = np.random.default_rng(mix_seed(self.seed, passes)).permutation(len(self.shards))
        number = 0  # of the row in this pass
        found = False
        for place in order.tolist():
            source, copy, base, shard = self.shards[place]
            for row in shard.rows((part - number) % parts, parts):
                if number % parts == part and row is not None:
                    found = True
                    shown = passes * self.sets[source].repeats + copy
                    yield _Kept(row, source, mix_seed(base, row.number), shown)
                number += 1
        if not found:
            raise ConfigurationError(
                f"ImageData: the stream of {number} images holds none for part {part + 1} of {parts} (process, "
                "worker). Use fewer workers, or more images."
            )

    def _size(self, kept: _Kept) -> tuple[int, int]:
        """Return the size of an image. With ``skip_unreadable`` it and its mask and condition are decoded."""
        size = upright_size(kept.row.read(), thorough=self.skip_unreadable)
        if self.skip_unreadable:
            for kind, read in kept.row.beside.items():
                if kind == "mask":
                    decode_mask(read())
                else:
                    upright_size(read(), thorough=True)
        return size

    def _shape(self, kept: _Kept) -> Shape | None:
        """Return the shape of an image as an item; None for one that is left out."""
        offered = self.views[kept.source].shapes()
        if len(offered) == 1 and not self.skip_unreadable:
            return offered[0]
        try:
            size = self._size(kept)
        except UnreadableImage as error:
            if not self.skip_unreadable:
                raise unreadable(kept.row.place, error) from error
            if not self._has_warned:
                rank_zero_warn(f"ImageData: left out {kept.row.place}: {error} (further images without a warning)")
            self._has_warned = True
            return None
        return offered[int(nearest_shapes(np.array([size]), offered)[0])]

    def _item(self, kept: _Kept, shape: Shape) -> dict[str, Any]:
        view = self.views[kept.source]
        rules = self.rules[kept.source]
        about = self.sets[kept.source]
        variants = self.pixel_variants * max(one.variants for one in self.rules)
        variant = (mix_seed(self.seed, kept.index) + kept.shown) % variants
        seen = (kept.index, variant % self.pixel_variants % view.variants)
        row = kept.row
        files = {"images": (row.read(), row.place)}
        files |= {kind: (read(), f"the {kind} of {row.place}") for kind, read in row.beside.items()}
        sizes = {}
        for content, place in files.values():
            try:
                sizes[place] = upright_size(content)
            except UnreadableImage as error:
                raise unreadable(place, error) from error
            if not alike(sizes[row.place], sizes[place]):
                raise other_aspect(place, sizes[place], sizes[row.place])
        item: dict[str, Any] = {"index": kept.index, "variant": variant}
        item |= view.sees(files, sizes[row.place], shape, seen, self.seed, about.mask == ALPHA)
        if "mask" in self.roles:
            item.setdefault("mask", torch.ones(1, *shape))
        if "loss_weight" in self.roles:
            weight = about.weight
            if self._columns.weight is not None:
                weight *= check_weight(row.weight, row.place, self._columns.weight)
            item["loss_weight"] = torch.tensor(weight)
        if self.stream.classes:
            label = row.label
            if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < self.stream.classes:
                allowed = f"a number from 0 to {self.stream.classes - 1} (stream.classes is {self.stream.classes})"
                raise refusal(f"ImageData: {row.place}", "the label", allowed, label)
            item["labels"] = label
        captions = self._captions(row, about, rules)
        if captions:
            number = variant // self.pixel_variants
            item["captions"] = rules.caption(captions, about.trigger, kept.index, number, self.seed)
        return item

    def _captions(self, row: Row, about: ImageSet, rules: CaptionRules) -> list[str]:
        """Return the captions of a row; none if no row has any.

        Raises:
            ConfigurationError: If they are no texts, more than the variants, or missing in some rows.
        """
        caption = row.caption
        if caption is None:
            caption = about.prompt
        if caption is None and about.trigger is not None:
            caption = ""
        found = [] if caption is None else check_caption(caption, row.place, "caption")
        if self._captioned is None:
            self._captioned = bool(found)
        if self._captioned != bool(found):
            has, others = ("a", "none") if found else ("no", "one")
            raise ConfigurationError(
                f"ImageData: {row.place} has {has} caption, and rows before it have {others}. Add the missing ones, "
                "give the set a prompt, or set columns.caption: null."
            )
        if len(found) > rules.variants:
            allowed = f"at least {len(found)}, the number of captions of {row.place}"
            raise refusal("ImageData", "caption_rules.variants", allowed, rules.variants)
        return found


def _check_set(one: ImageSet) -> None:
    """Refuse what a stream of images does not have."""
    for name, usual in (("role", "train"), ("captions", None)):
        if getattr(one, name) != usual:
            raise refusal("ImageData", f"train.{name}", f"{usual} for a stream", getattr(one, name))
