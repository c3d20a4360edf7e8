"""Cache of encoded images on disk, memory-mapped, and found by (dataset index, variant).

    shards/00000.safetensors  keys [R, 3] (index, variant, label), mean and logvar [R, c, h, w] or latents (in int8 with
                              scale and zero [c]), features [R, N, D], mask and hole [R, 1, h, w],
                              condition [R, C, H, W] uint8 or condition_latents and condition_logvar [R, c, h, w],
                              captions as bytes, C for each row, and the end of each caption
    text/00000.safetensors    digests [U, 16] of distinct captions, hidden [U, L, D], mask [U, L], pooled [U, P]
    index.safetensors         places [N, K, 2] (shard, row) and captions [N, K, C] (row of the text); -1: none
    manifest.json             settings and contents that the cache was made from, statistics of the channels, and the
                              hashes of all files

The latents of a shard have one shape. A shard also holds the keys of its rows, and every read compares a row with its
key, so a latent never comes with the label of another image. Variant v of an image has the crop v mod K and the caption
v // K. All workers map the same pages. A file is opened when it
is first read.

Costs: opening reads the index (8 bytes for each key); a thorough check reads all files, about 1 s for 1 GB; above 1 GiB
    only once
"""

import hashlib
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_efficient.data.latents.latent_format import decode_pixels, decode_row
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import read_json
from lit_efficient.files.file_hashes import altered_file
from lit_efficient.files.tensors import map_tensors
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key

VERSION = "1"
"""Entry of every identity. Raise it when the meaning of the files changes."""
MANIFEST = "manifest.json"
INDEX = "index.safetensors"
COMMAND = "python -m lit_efficient cache-latents --config CONFIG"
_ENTRIES = {"identity", "files", "count", "statistics", "labels", "text_rows"}  # required in a manifest
# Characters of an entry in an error.
_SHOWN = 60


class LatentStore:
    """A complete cache, read-only. It can be pickled, and several processes can read it.

    Args:
        folder: Folder that `build_latents` filled.
        thorough: Compare all files with their hashes, not only their sizes.

    Raises:
        ConfigurationError: If there is no cache, or a file of it is missing or altered.
    """

    def __init__(self, folder: Path, thorough: bool = False) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        files = {name: (int(size), str(digest)) for name, (size, digest) in self.manifest["files"].items()}
        fault = altered_file(folder, files, thorough)
        if fault:
            raise ConfigurationError(
                f"The latent cache {folder} is damaged: {fault} Make it again: {COMMAND} --overwrite"
            )
        # Files are opened on demand: a worker may never need most of them.
        self._opened: dict[str, dict[str, Tensor]] = {}

    def __getstate__(self) -> dict[str, object]:
        # Memory maps belong to one process.
        return {**self.__dict__, "_opened": {}}

    def __len__(self) -> int:
        return int(self.manifest["count"])

    @property
    def statistics(self) -> tuple[Tensor, Tensor]:
        """Measured mean and standard deviation [c] of the sampled latents of the training part."""
        measured = self.manifest["statistics"]
        return torch.tensor(measured["mean"]), torch.tensor(measured["std"])

    def __getitem__(self, key: Key) -> dict[str, Any]:
        """Return the stored item of an image.

        Returns:
            ``mean`` and ``logvar``, or ``latents``, [c, h, w] float32, as the autoencoder gave them (not normalised);
            ``index`` and ``variant``. If they are stored: ``labels``, ``captions``, ``text`` [L, D], ``text_mask`` [L],
            ``pooled`` [P], ``features`` [N, D], ``mask`` [1, h, w] and ``condition`` [C, H, W] float32. Text has the
            number format of its encoder.

        Raises:
            ConfigurationError: If the key was not encoded.
        """
        index, variant = key
        opened = self._open(INDEX)
        # NumPy reads a single number ten times faster than torch.
        places = opened["places"].numpy()
        texts = opened["captions"].numpy()
        crop = variant % places.shape[1]
        number = variant // places.shape[1]
        if not _holds(places, index, crop) or not 0 <= number < texts.shape[2]:
            raise ConfigurationError(
                f"The latent cache {self.folder} has no image (index {index}, variant {variant}): it holds "
                f"{places.shape[0]} images, {places.shape[1]} variants of the training images and variant 0 of the "
                f"others. Make it again for these settings: {COMMAND} --overwrite"
            )
        shard, row = places[index, crop].tolist()
        stored = read_row(self._open(shard_name(shard)), row)
        # The key is stored beside each row: a mixed-up index would pair a latent with the label of another image.
        *found, label = stored["keys"].tolist()
        self._check_same(found, [index, crop], f"row {row} of shard {shard}")
        item: dict[str, Any] = {**decode_row(stored), "index": index, "variant": variant}
        if self.manifest["labels"]:
            item["labels"] = label
        for name in ("sizes", "mask", "hole"):
            if name in stored:
                item[name] = stored[name]
        if "condition" in stored:
            item["condition"] = decode_pixels(stored["condition"])
        if "features" in stored:
            item["features"] = stored["features"].float()
        if "captions" in stored:
            item["captions"] = stored["captions"][number]
            item |= self._text(item["captions"], int(texts[index, crop, number]))
        return item

    def _text(self, caption: str, number: int) -> dict[str, Tensor]:
        """Return the embeddings of a caption, which is the ``number``-th of the distinct ones; -1: there are none."""
        if number < 0:
            return {}
        shard, row = divmod(number, int(self.manifest["text_rows"]))
        stored = read_row(self._open(text_name(shard)), row)
        self._check_same(stored["digests"].tolist(), list(caption_digest(caption)), f"text {number}")
        names = {"hidden": "text", "mask": "text_mask", "pooled": "pooled"}
        return {ours: stored[theirs] for theirs, ours in names.items() if theirs in stored}

    def _check_same(self, found: list[int], wanted: list[int], where: str) -> None:
        if found != wanted:
            raise ConfigurationError(
                f"The latent cache {self.folder} is damaged: {where} belongs to {found}, not to {wanted}. Make it "
                f"again: {COMMAND} --overwrite"
            )

    def _open(self, name: str) -> dict[str, Tensor]:
        if name not in self._opened:
            self._opened[name] = open_shard(self.folder / name)
        return self._opened[name]


def shard_name(number: int) -> str:
    """Return the name of a file of latents in a cache."""
    return f"shards/{number:05d}.safetensors"


def text_name(number: int) -> str:
    """Return the name of a file of caption embeddings in a cache."""
    return f"text/{number:05d}.safetensors"


def open_shard(path: Path) -> dict[str, Tensor]:
    """Return the memory-mapped tensors of a file. A page is read when a number on it is used."""
    file = map_tensors(path)
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def read_row(shard: Mapping[str, Tensor], row: int) -> dict[str, Any]:
    """Return a copy of one row of a shard. ``scale`` and ``zero`` are those of all rows; ``captions`` are texts."""
    stored: dict[str, object] = {}
    for name, values in shard.items():
        if name in ("scale", "zero"):
            stored[name] = values
        elif name == "captions":
            ends = shard["caption_ends"]
            several = len(ends) // len(shard["keys"])
            first = row * several
            edges = [int(ends[first - 1]) if first else 0, *ends[first : first + several].tolist()]
            stored[name] = [values[a:b].numpy().tobytes().decode() for a, b in itertools.pairwise(edges)]
        elif name != "caption_ends":
            stored[name] = values[row].clone()
    return stored


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a cache.

    Raises:
        ConfigurationError: If there is no cache, or its manifest cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigurationError(f"There is no latent cache in {folder}. Make it: {COMMAND}")
    try:
        manifest = read_json(path)
        missing = _ENTRIES - manifest.keys()
        if missing:
            raise KeyError(*sorted(missing))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error!r}). Make it again: {COMMAND} --overwrite") from error
    return manifest


def refuse_other(folder: Path, found: Mapping[str, str], wanted: Mapping[str, str], way_out: str) -> None:
    """Compare the settings and contents that a cache was made from with those of a run.

    Raises:
        ConfigurationError: If an entry differs. The message names all of them, with both values, and ``way_out``.
    """
    lines = []
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            has = _short(found.get(name))
            asks = _short(wanted.get(name))
            lines.append(f"  {name}: the cache has {has}, this run asks for {asks}")
    if lines:
        raise ConfigurationError(
            "\n".join([f"The latent cache {folder} was made from something else:", *lines, way_out])
        )


def caption_digest(caption: str) -> bytes:
    """Return the 16 bytes that identify a caption."""
    return hashlib.blake2b(caption.encode(), digest_size=16).digest()


def _holds(places: np.ndarray, index: int, variant: int) -> bool:
    """Return whether a key was encoded, by ``places`` [N, K, 2]."""
    count, variants, _ = places.shape
    return 0 <= index < count and 0 <= variant < variants and places[index, variant, 0] >= 0


def _short(value: str | None) -> str:
    """Return an entry for an error message, cut to a readable length."""
    if value is None:
        return "no such entry"
    length = 12 if re.fullmatch("[0-9a-f]{40,}", value) else _SHOWN  # 12 digits of a hash are enough
    if len(value) > length:
        value = value[:length] + "..."
    return repr(value)
