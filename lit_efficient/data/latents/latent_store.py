"""Encoded images on disk, mapped into memory and found by (dataset index, variant), never by a step or batch.

    shards/00000.safetensors  keys [R, 3] (index, variant, label), mean and logvar [R, c, h, w] or latents (with scale
                              and zero [c] in int8), features [R, N, D], captions as bytes and where each ends
    text/00000.safetensors    digests [U, 16] of captions, each once, hidden [U, L, D], mask [U, L], pooled [U, P]
    index.safetensors         places [N, K, 2] (shard, row) and captions [N, K] (row of the text), -1: there is none
    manifest.json             what all of it was made from, entry by entry, the channels' statistics, all files' hashes

A shard holds one shape; it holds the keys of its rows, too, and a row is compared with its key whenever it is read. So
a latent cannot come with another image's label. Workers map the same pages; nothing is opened before it is read.

Costs: opening reads the index (8 bytes a key); a thorough check reads everything, about 1 s a GB; above 1 GiB once.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_efficient.data.latents.latent_format import decode_row
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import read_json
from lit_efficient.files.file_hashes import altered_file
from lit_efficient.files.tensors import map_tensors
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key

VERSION = "1"
"""An entry of every identity: raise it when the files' meaning changes."""
MANIFEST = "manifest.json"
INDEX = "index.safetensors"
COMMAND = "python -m lit_efficient cache-latents --config CONFIG"
_SHOWN = 60  # characters of an entry in an error


class LatentStore:
    """A complete cache, read-only. It can be pickled, and read by several processes at once.

    Args:
        folder: That `build_latents` has filled.
        thorough: Compare all files with their hashes, not only their sizes.

    Raises:
        ConfigurationError: If there is none, or something in it is missing or altered.
    """

    def __init__(self, folder: Path, thorough: bool = False) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        files = {name: (int(size), str(digest)) for name, (size, digest) in self.manifest["files"].items()}
        if fault := altered_file(folder, files, thorough):
            raise ConfigurationError(
                f"The latent cache {folder} is damaged: {fault} Make it again: {COMMAND} --overwrite"
            )
        self._opened: dict[str, dict[str, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}  # maps and handles are a process's own

    def __len__(self) -> int:
        return int(self.manifest["count"])

    @property
    def identity(self) -> dict[str, str]:
        """What the cache was made from, by name."""
        return dict(self.manifest["identity"])

    @property
    def statistics(self) -> tuple[Tensor, Tensor]:
        """Measured mean and standard deviation [c] of the training part's sampled latents."""
        measured = self.manifest["statistics"]
        return torch.tensor(measured["mean"]), torch.tensor(measured["std"])

    def __getitem__(self, key: Key) -> dict[str, Any]:
        """What is stored of an image.

        Returns:
            ``mean`` and ``logvar`` or ``latents`` [c, h, w] float32, as the autoencoder gave them (not normalised);
            ``index`` and ``variant``; ``labels``, ``captions``, ``text`` [L, D], ``text_mask`` [L] bool, ``pooled`` [P]
            and ``features`` [N, D] where there are some: text as its encoder gave it, features in float32.

        Raises:
            ConfigurationError: For a key that was not encoded.
        """
        index, variant = key
        places, texts = self._index
        if not (0 <= index < places.shape[0] and 0 <= variant < places.shape[1]) or places[index, variant, 0] < 0:
            raise ConfigurationError(
                f"The latent cache {self.folder} has no image (index {index}, variant {variant}): it holds "
                f"{places.shape[0]} images, {places.shape[1]} variants of those for training, variant 0 of the others."
            )
        shard, row = (int(number) for number in places[index, variant])
        stored = _row(self._open(f"shards/{shard:05d}.safetensors"), row)
        *found, label = stored["keys"].tolist()
        self._same(found, [index, variant], f"row {row} of shard {shard}")
        item: dict[str, Any] = {**decode_row(stored), "index": index, "variant": variant}
        if self.manifest["labels"]:
            item["labels"] = label
        if "sizes" in stored:  # caches that were made before have none
            item["sizes"] = stored["sizes"]
        if "features" in stored:
            item["features"] = stored["features"].float()
        if "captions" in stored:
            item["captions"] = stored["captions"]
            item |= self._text(stored["captions"], int(texts[index, variant]))
        return item

    def _text(self, caption: str, number: int) -> dict[str, Tensor]:
        if number < 0:
            return {}
        shard, row = divmod(number, int(self.manifest["text_rows"]))
        stored = _row(self._open(f"text/{shard:05d}.safetensors"), row)
        self._same(stored["digests"].tolist(), list(caption_digest(caption)), f"text {number}")
        names = {"hidden": "text", "mask": "text_mask", "pooled": "pooled"}
        return {ours: stored[theirs] for theirs, ours in names.items() if theirs in stored}

    def _same(self, found: list[int], wanted: list[int], where: str) -> None:
        if found != wanted:
            raise ConfigurationError(
                f"The latent cache {self.folder} is damaged: {where} belongs to {found}, not to {wanted}. Make it "
                f"again: {COMMAND} --overwrite"
            )

    @property
    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """Places [N, K, 2] and captions [N, K]; NumPy finds a single number ten times faster than torch."""
        opened = self._open(INDEX)
        return opened["places"].numpy(), opened["captions"].numpy()

    def _open(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file, mapped: a page of it is read when a number on it is."""
        if name not in self._opened:
            file = map_tensors(self.folder / name)
            self._opened[name] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        return self._opened[name]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a cache.

    Raises:
        ConfigurationError: If there is no cache, or its manifest cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigurationError(f"There is no latent cache in {folder}. Make it: {COMMAND}")
    try:
        manifest = read_json(path)
        if missing := {"identity", "files", "count", "statistics", "labels", "text_rows"} - manifest.keys():
            raise KeyError(*sorted(missing))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error!r}). Make it again: {COMMAND} --overwrite") from error
    return manifest


def refuse_other(folder: Path, found: Mapping[str, str], wanted: Mapping[str, str], way_out: str) -> None:
    """Compare what a cache was made from with what a run asks for.

    Raises:
        ConfigurationError: Naming every entry that differs, with both values.
    """
    names = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    if names:
        lines = [
            f"  {n}: the cache has {_short(found.get(n))}, this run asks for {_short(wanted.get(n))}" for n in names
        ]
        raise ConfigurationError(
            "\n".join([f"The latent cache {folder} was made from something else:", *lines, way_out])
        )


def caption_digest(caption: str) -> bytes:
    """16 bytes by which a caption's embedding is known."""
    return hashlib.blake2b(caption.encode(), digest_size=16).digest()


def _row(shard: Mapping[str, Tensor], row: int) -> dict[str, Any]:
    """A copy of one row of every tensor of a shard; what it has once for all rows as it is, the caption as text."""
    stored: dict[str, Any] = {}
    for name, values in shard.items():
        if name in ("scale", "zero"):
            stored[name] = values
        elif name == "captions":
            ends = shard["caption_ends"]
            begin, end = int(ends[row - 1]) if row else 0, int(ends[row])
            stored[name] = values[begin:end].numpy().tobytes().decode()
        elif name != "caption_ends":
            stored[name] = values[row].clone()
    return stored


def _short(value: str | None) -> str:
    if value is None:
        return "nothing of the kind"
    length = 12 if re.fullmatch("[0-9a-f]{40,}", value) else _SHOWN
    return repr(value if len(value) <= length else value[:length] + "...")
