"""Tables of images, opened: the size and the hash of every image are found out once and kept.

    folder = hash(contents of all files, image column, thoroughness)
    sizes.npy [N, 2], digests.npy [N, 32], unreadable.json

Whatever is damaged is found here, before training.

Costs: reading every image once; of parquet files a second copy of the images on disk.
"""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_efficient.data.images.image_columns import ImageColumns
from lit_efficient.data.images.image_pixels import UnreadableImage, upright_size
from lit_efficient.data.images.image_tables import ImageTable, open_table
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import cache_root, prepared_folder, read_json, write_json
from lit_efficient.files.file_hashes import altered_file, hash_files
from lit_efficient.files.sums import sha256_of

FORMAT = 1  # part of every key: raise it when the files' meaning changes
_MANIFEST = "manifest.json"
_SHOWN = 5


class StoredImages:
    """The readable images of a table (see :func:`~lit_efficient.data.images.image_tables.open_table`), by number.

    ``skip_unreadable`` leaves out images that cannot be decoded, after decoding all of them once, and keeps the
    findings; otherwise one that is seen to be damaged is an error.

    Raises:
        ConfigurationError: If there is no such table, or an image of it cannot be read.
    """

    def __init__(
        self, name: str, split: str, columns: ImageColumns, skip_unreadable: bool, cache_dir: str | None
    ) -> None:
        self.table: ImageTable = open_table(name, split, columns, cache_dir)
        root = Path(name).expanduser()
        content = hash_files(root, self.table.files, cache_dir)
        # Names, because they decide the order; of files elsewhere the last part alone, so that a folder can be moved.
        named = [file.relative_to(root).as_posix() if root in file.parents else file.name for file in self.table.files]
        key = json.dumps([FORMAT, list(zip(named, content)), self.table.image, skip_unreadable])
        digest = hashlib.sha256(key.encode()).hexdigest()
        folder = cache_root(cache_dir) / "images" / digest[:32]
        prepared_folder(folder, partial(_examine, table=self.table, skip=skip_unreadable), _problem)
        self.unreadable: list[tuple[int, str]] = [(row, why) for row, why in _json(folder / "unreadable.json")]
        bad = {row for row, _ in self.unreadable}
        self.rows = np.array([row for row in range(len(self.table)) if row not in bad], dtype=np.int64)
        self.sizes: np.ndarray = np.load(folder / "sizes.npy")[self.rows]
        self.digests: np.ndarray = np.load(folder / "digests.npy")[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, number: int) -> str:
        """Where to find an image again."""
        return self.table.place(int(self.rows[number]))

    def read(self, number: int) -> bytes:
        """An encoded image.

        Raises:
            ConfigurationError: If it is not the one that was found, a millisecond's work for 1 MB.
        """
        content = self.table.read(int(self.rows[number]))
        if hashlib.sha256(content).digest() != self.digests[number].tobytes():
            raise ConfigurationError(
                f"ImageData: {self.place(number)} has changed since the data was opened: what was computed from it "
                "would not be what it says it is. Start again."
            )
        return content

    def of_readable(self, values: list[Any] | None) -> list[Any] | None:
        """Labels or captions of the table, without those of unreadable images."""
        return values if values is None or not self.unreadable else [values[row] for row in self.rows]

    def say(self) -> None:
        """Log what was recognised and what was left out."""
        rank_zero_info(f"ImageData: {self.table.note}")
        if self.unreadable:
            rank_zero_warn(f"ImageData: left out {_listed(self.table, self.unreadable)}")


def _examine(folder: Path, table: ImageTable, skip: bool) -> None:
    """Read every image once and write down what was found."""
    rank_zero_info(f"ImageData: reading the {len(table):,} images of {table.name} once.")
    sizes = np.zeros((len(table), 2), dtype=np.int32)
    digests = np.zeros((len(table), 32), dtype=np.uint8)
    unreadable: list[tuple[int, str]] = []
    for row in range(len(table)):
        content = table.read(row)
        digests[row] = np.frombuffer(hashlib.sha256(content).digest(), dtype=np.uint8)
        try:
            sizes[row] = upright_size(content, thorough=skip)
        except UnreadableImage as error:
            unreadable.append((row, str(error)))
    if unreadable and not skip:
        raise ConfigurationError(
            f"ImageData: {_listed(table, unreadable)}\nMend them, or leave them out with skip_unreadable: true."
        )
    if len(unreadable) == len(table):
        raise ConfigurationError(f"ImageData: nothing is left: {_listed(table, unreadable)}")
    np.save(folder / "sizes.npy", sizes)
    np.save(folder / "digests.npy", digests)
    (folder / "unreadable.json").write_text(json.dumps(unreadable))
    files = {path.name: [path.stat().st_size, sha256_of(path)] for path in sorted(folder.iterdir())}
    write_json(folder / _MANIFEST, files)


def _listed(table: ImageTable, unreadable: list[tuple[int, str]]) -> str:
    lines = [f"  {table.place(row)}: {why}" for row, why in unreadable[:_SHOWN]]
    more = [f"  and {len(unreadable) - _SHOWN} more"] if len(unreadable) > _SHOWN else []
    return "\n".join([f"{len(unreadable)} of {len(table)} images that cannot be read:", *lines, *more])


def _problem(folder: Path) -> str | None:
    try:
        recorded = {name: (size, digest) for name, (size, digest) in read_json(folder / _MANIFEST).items()}
    except (OSError, ValueError, AttributeError) as error:
        return f"{_MANIFEST} cannot be read ({error})."
    return altered_file(folder, recorded, thorough=True)


def _json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
