"""Tables of images with the size and the hash of every image, which are computed once and cached.

    folder = hash(names and contents of all files, image column, skip_unreadable)
    sizes.npy [N, 2], digests.npy [N, 32], and with skip_unreadable the numbers of unreadable images in manifest.json

With skip_unreadable every image is decoded, and unreadable ones are left out. Otherwise damaged images raise an error
before training, as far as their headers and ends show it.

Costs: reading every image once; of parquet files a second copy of the images on disk.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_efficient.data.images.image_columns import ImageColumns
from lit_efficient.data.images.image_pixels import UnreadableImage, decode_mask, has_alpha, upright_size
from lit_efficient.data.images.image_set import ALPHA, ImageSet
from lit_efficient.data.images.image_tables import ImageTable, open_companions, open_table
from lit_efficient.data.images.tiny_photos import local_images
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import cache_folder, prepared_folder, read_manifest, seal
from lit_efficient.files.file_hashes import broken_seal, hash_files

# Part of every key; raise it when the meaning of the files changes.
FORMAT = 2
_SHOWN = 5
_Unreadable = list[list[Any]]  # [row, reason] of each image


class StoredImages:
    """Readable images of a table (see `open_table`), by number.

    Args:
        table: The table.
        root: Folder or file of the table.
        skip_unreadable: Decode all images once, and leave out those that cannot be decoded. Otherwise an image that is
            found to be damaged raises an error.
        cache_dir: Folder of the cache.
        masks: The images are masks.

    Raises:
        ConfigurationError: If an image cannot be read.
    """

    def __init__(
        self, table: ImageTable, root: Path, skip_unreadable: bool, cache_dir: str | None, masks: bool = False
    ) -> None:
        self.table = table
        # Names are part of the key because they decide the order. A relative name lets the folder be moved.
        names = [file.relative_to(root).as_posix() if root in file.parents else file.name for file in self.table.files]
        content = hash_files(root, self.table.files, cache_dir)
        made_from = [FORMAT, list(zip(names, content)), self.table.image, skip_unreadable, masks]
        folder = cache_folder(cache_dir, "images", made_from)
        build = partial(_examine, table=self.table, skip=skip_unreadable, masks=masks)
        prepared_folder(folder, build, lambda path: broken_seal(path, FORMAT, thorough=True))
        self.unreadable: _Unreadable = read_manifest(folder)["unreadable"]
        bad = {row for row, _ in self.unreadable}
        self.rows = np.array([row for row in range(len(self.table)) if row not in bad], dtype=np.int64)
        self.sizes: np.ndarray = np.load(folder / "sizes.npy")[self.rows]
        self.digests: np.ndarray = np.load(folder / "digests.npy")[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def keep(self, rows: np.ndarray) -> None:
        """Leave out all images but those of some rows of the table."""
        kept = np.isin(self.rows, rows)
        self.rows, self.sizes, self.digests = self.rows[kept], self.sizes[kept], self.digests[kept]

    def place(self, number: int) -> str:
        """Return the path or the row of an image, for messages."""
        return self.table.place(int(self.rows[number]))

    def read(self, number: int) -> bytes:
        """Return an encoded image.

        Raises:
            ConfigurationError: If its content has changed. The comparison takes a millisecond for 1 MB.
        """
        # The comparison at every reading costs little, and latents may be cached under the hash.
        content = self.table.read(int(self.rows[number]))
        if hashlib.sha256(content).digest() != self.digests[number].tobytes():
            raise ConfigurationError(
                f"ImageData: {self.place(number)} has changed since the data was opened, so results that were computed "
                "from it no longer match. Start again."
            )
        return content

    def of_readable(self, values: list[Any] | None) -> list[Any] | None:
        """Return labels or captions of the table without those of images that are left out."""
        if values is None or len(self) == len(self.table):
            return values
        return [values[row] for row in self.rows]

    def log_findings(self) -> None:
        """Log what was recognised and what was left out."""
        rank_zero_info(f"ImageData: {self.table.note}")
        if self.unreadable:
            rank_zero_warn(f"ImageData: left out {_listed(self.table, self.unreadable)}")


@dataclass
class StoredSet:
    """Images of a set, with their masks and conditions."""

    about: ImageSet
    images: StoredImages
    masks: StoredImages | None = None
    conditions: StoredImages | None = None

    def __len__(self) -> int:
        return len(self.images)

    @property
    def stores(self) -> dict[str, StoredImages]:
        """Images, and masks and conditions if there are any, by their names in items."""
        named = {"images": self.images, "mask": self.masks, "condition": self.conditions}
        return {name: store for name, store in named.items() if store is not None}


def open_set(
    about: ImageSet, split: str, columns: ImageColumns, skip_unreadable: bool, cache_dir: str | None
) -> StoredSet:
    """Open the images of a set, and their masks and conditions.

    Args:
        about: The set.
        split: Split to read, if there are several.
        columns: Names of the columns.
        skip_unreadable: Leave out images that cannot be decoded, or whose mask or condition cannot.
        cache_dir: Folder of the cache.

    Raises:
        ConfigurationError: If there are no such images, or one cannot be read or does not fit.
    """
    name = local_images(str(about.images), cache_dir)
    about = replace(about, images=name)
    root = Path(name).expanduser()
    table = open_table(about, split, columns, cache_dir)
    found = StoredSet(about, StoredImages(table, root, skip_unreadable, cache_dir))
    for kind, named in (("mask", about.mask), ("condition", about.condition)):
        if named is None or (kind, named) == ("mask", ALPHA):
            continue
        beside = open_companions(table, kind, local_images(named, cache_dir), about, split, columns, cache_dir)
        folder = getattr(beside, "root", root)
        setattr(found, f"{kind}s", StoredImages(beside, folder, skip_unreadable, cache_dir, kind == "mask"))
    stores = found.stores
    kept = reduce(np.intersect1d, [store.rows for store in stores.values()])
    if not len(kept):
        raise ConfigurationError(f"ImageData: no image of {name} is left whose mask and condition can be read.")
    for store in stores.values():
        store.keep(kept)
    for kind in [*stores][1:]:
        _check_sizes(found.images, stores[kind], kind)
    if about.mask == ALPHA and not any(has_alpha(found.images.read(number)) for number in range(len(found))):
        raise ConfigurationError(
            f"ImageData: mask is alpha, but no image of {about.images} has transparent pixels. Set mask: null."
        )
    return found


def _check_sizes(images: StoredImages, beside: StoredImages, kind: str) -> None:
    """Refuse masks and conditions of another aspect ratio than their images: crops would not fit."""
    wrong = [
        number
        for number, (one, other) in enumerate(zip(images.sizes.tolist(), beside.sizes.tolist()))
        if not alike(one, other)
    ]
    if wrong:
        number = wrong[0]
        place = f"the {kind} {beside.place(number)}"
        more = f", as in {len(wrong)} of {len(images)} cases"
        raise other_aspect(place, beside.sizes[number], images.sizes[number], more)


def alike(size: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two images have the same aspect ratio. A smaller copy of an image has rounded sides."""
    scale = max(other) / max(size)
    return all(abs(b - a * scale) <= 1 for a, b in zip(size, other))


def other_aspect(place: str, has: Sequence[int], image: Sequence[int], more: str = "") -> ConfigurationError:
    """Return the error for a mask or a condition whose aspect ratio is not that of its image."""
    return ConfigurationError(
        f"ImageData: {place} has {has[0]} x {has[1]} pixels, which is another aspect ratio than that of its image "
        f"({image[0]} x {image[1]}){more}."
    )


def _examine(folder: Path, table: ImageTable, skip: bool, masks: bool) -> None:
    """Read every image once, and write sizes, hashes and faults into ``folder``."""
    rank_zero_info(f"ImageData: reading the {len(table):,} images of {table.name} once.")
    sizes = np.zeros((len(table), 2), dtype=np.int32)
    digests = np.zeros((len(table), 32), dtype=np.uint8)
    unreadable: _Unreadable = []
    # One image at a time: all of them may not fit into memory.
    for row in range(len(table)):
        content = table.read(row)
        digests[row] = np.frombuffer(hashlib.sha256(content).digest(), dtype=np.uint8)
        try:
            sizes[row] = upright_size(content, thorough=skip)
            if skip and masks:
                decode_mask(content)
        except UnreadableImage as error:
            unreadable.append([row, str(error)])
    if unreadable and not skip:
        raise ConfigurationError(
            f"ImageData: found {_listed(table, unreadable)}\nRepair them, or leave them out with skip_unreadable: true."
        )
    if len(unreadable) == len(table):
        raise ConfigurationError(f"ImageData: no image is left: {_listed(table, unreadable)}")
    np.save(folder / "sizes.npy", sizes)
    np.save(folder / "digests.npy", digests)
    seal(folder, FORMAT, {"unreadable": unreadable})


def _listed(table: ImageTable, unreadable: _Unreadable) -> str:
    """Return the number of unreadable images, and the places of the first ones."""
    lines = [f"{len(unreadable)} of {len(table)} images that cannot be read:"]
    for row, reason in unreadable[:_SHOWN]:
        lines.append(f"  {table.place(row)}: {reason}")
    if len(unreadable) > _SHOWN:
        lines.append(f"  and {len(unreadable) - _SHOWN} more")
    return "\n".join(lines)
