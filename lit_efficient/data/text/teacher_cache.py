"""A teacher's likeliest tokens on disk: computed once, found again by what a row says, in whatever order rows come.

A row is known by the hash of its tokens, positions and which of them are learned; never by a step or by its place in a
batch, so that shuffling, several workers and a resumed run cannot give it another row's answers. The folder's name is
the hash of the teacher's weights, the settings and all rows of the data set: other ones are another folder.
Shards are written whole, one after the other; a run that was interrupted goes on after the last one.

Costs: 8 k + 4 bytes for each token that is learned; reading the data set once, and the shards' hashes, at every start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.cache import read_json, write_json
from lit_efficient.files.sums import sha256_of
from lit_efficient.files.tensors import load_tensors, map_tensors, save_tensors
from lit_efficient.losses.next_token import IGNORE, targets_of

MANIFEST = "manifest.json"
FORMAT = 1  # of the files; another one is another key
SHARD_BATCHES = 64
ROW = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask")
"""What of a batch a row is known by."""

Batch = Mapping[str, Tensor]
Answer = Callable[[Batch], tuple[Tensor, Tensor]]
"""A batch to ids ``[n, k]`` and log-probabilities ``[n, k + 1]`` of its n learned tokens, row by row."""


def row_keys(batch: Batch) -> list[bytes]:
    """16 bytes for each row of a batch on the CPU; filling (where ``attention_mask`` is 0) does not count."""
    learned, mask = targets_of(batch) != IGNORE, batch.get("attention_mask")
    parts = [batch[name].long() for name in ("input_ids", "position_ids") if name in batch] + [learned]
    keys = []
    for row in range(len(learned)):
        real = slice(None) if mask is None else mask[row].bool()
        key = hashlib.blake2b(digest_size=16)
        for part in parts:
            key.update(part[row][real].contiguous().numpy().tobytes())
        keys.append(key.digest())
    return keys


def cache_key(teacher: str, settings: Mapping[str, Any], batches: Iterable[Batch]) -> str:
    """The name of the folder, from the hash of the teacher's weights, what else decides what is kept, and all of the
    data.
    """
    rows = hashlib.sha256()
    for batch in batches:
        rows.update(b"".join(row_keys(batch)))
    content = json.dumps([FORMAT, SHARD_BATCHES, teacher, settings, rows.hexdigest()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def write_top_k(folder: Path, batches: Iterable[Batch], answer: Answer) -> None:
    """Ask the teacher about all rows, unless ``folder`` is complete; what was asked before an interruption stays.

    The batches are those that `cache_key` named the folder by, in the same order.
    """
    from filelock import FileLock

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not (folder / MANIFEST).exists():
                _write_shards(folder, iter(batches), answer)
    except OSError as error:
        raise ConfigurationError(
            f"The cache folder {folder} cannot be written: {error}. Set cache_dir or LIT_EFFICIENT_CACHE to a folder "
            "that can."
        ) from error


def _write_shards(folder: Path, batches: Iterator[Batch], answer: Answer) -> None:
    number = 0
    while shard := list(islice(batches, SHARD_BATCHES)):
        path = folder / f"shard-{number:06d}.safetensors"
        number += 1
        with suppress(CheckpointError):  # of a run that was interrupted: its shards were moved there in one step
            load_tensors(path)
            continue
        save_tensors(path, _answered(shard, answer))
    names = [f"shard-{index:06d}.safetensors" for index in range(number)]
    write_json(folder / MANIFEST, {"files": {name: sha256_of(folder / name) for name in names}})


def _answered(shard: list[Batch], answer: Answer) -> dict[str, Tensor]:
    keys = b"".join(key for batch in shard for key in row_keys(batch))
    answers = [answer(batch) for batch in shard]
    return {
        "keys": torch.frombuffer(bytearray(keys), dtype=torch.uint8).view(-1, 16),
        "counts": torch.cat([(targets_of(batch) != IGNORE).sum(1) for batch in shard]),
        "ids": torch.cat([ids.int().cpu() for ids, _ in answers]),
        "log_probs": torch.cat([log_probs.float().cpu() for _, log_probs in answers]),
    }


class TopKCache:
    """A complete cache, mapped into memory.

    Args:
        folder: that `write_top_k` has filled.
        thorough: compare the files with their hashes.

    Raises:
        ConfigurationError: if something is missing or altered.
    """

    def __init__(self, folder: Path, thorough: bool = True) -> None:
        mend = f"Delete the folder {folder} and run again: it is made again."
        try:
            files: dict[str, str] = read_json(folder / MANIFEST)["files"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigurationError(f"The cache's manifest {folder / MANIFEST} cannot be read. {mend}") from error
        self.folder = folder
        self._shards: list[Any] = []
        self._places: dict[bytes, tuple[int, int, int]] = {}  # of a row: shard, first token, number of them
        for name, expected in files.items():
            path = folder / name
            if not path.is_file() or (thorough and sha256_of(path) != expected):
                raise ConfigurationError(f"The cache file {path} is missing or corrupt. {mend}")
            shard = map_tensors(path)
            counts = shard.get_tensor("counts")
            starts = counts.cumsum(0) - counts
            keys = shard.get_tensor("keys").numpy().tobytes()
            for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
                self._places[keys[16 * row : 16 * row + 16]] = (len(self._shards), start, count)
            self._shards.append(shard)

    def __len__(self) -> int:
        return len(self._places)

    def __deepcopy__(self, memo: object) -> TopKCache:
        return self

    def find(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the teacher said of a batch, as `Answer` gave it: ids int32, log-probabilities float32.

        Raises:
            ConfigurationError: for a row that it was not asked about.
        """
        found = []
        for number, key in enumerate(row_keys(batch)):
            if key not in self._places:
                raise ConfigurationError(
                    f"The teacher's cache {self.folder} does not know row {number} of this batch: the training data "
                    "are not the same every time they are read (augmentation, random crops, filling without an "
                    "attention_mask). Make them so, or let the teacher answer live (cache_top_k null)."
                )
            shard, start, count = self._places[key]
            found.append([self._shards[shard].get_slice(name)[start : start + count] for name in ("ids", "log_probs")])
        return torch.cat([ids for ids, _ in found]), torch.cat([log_probs for _, log_probs in found])
