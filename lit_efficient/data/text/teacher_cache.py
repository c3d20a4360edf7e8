"""Cache of a teacher's most likely tokens on disk. They are computed once and found by the content of a row.

A row is identified by the hash of its tokens, positions and the mask of tokens with loss, and never by a step or its
place in a batch. So shuffling, several workers and a resumed run cannot give it the answers of another row. The name of
the folder is the hash of the teacher's weights, the settings and all rows of the data set. Shards are written
atomically, one after the other, and an interrupted run continues after the last one.

Costs: 8 k + 4 bytes for each token with loss; reading the data set once, and the hashes of the shards, at every start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from lit_efficient.mechanisms.progress import Progress

MANIFEST = "manifest.json"
# Part of every key; raise it when the meaning of the files changes.
FORMAT = 1
SHARD_BATCHES = 64
ROW = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask")
"""Entries of a batch that may identify a row."""

Batch = Mapping[str, Tensor]
Answer = Callable[[Batch], tuple[Tensor, Tensor]]
"""Return ids [n, k] and log-probabilities [n, k + 1] for the n tokens with loss of a batch, row by row."""


def row_keys(batch: Batch) -> list[bytes]:
    """Return 16 bytes for each row of a batch on the CPU. Padding (where ``attention_mask`` is 0) does not count."""
    # The mask is enough: a label with a loss is the next token, which is hashed already.
    has_loss = targets_of(batch) != IGNORE
    parts = [batch[name].long() for name in ("input_ids", "position_ids") if name in batch]
    parts.append(has_loss)
    mask = batch.get("attention_mask")
    keys = []
    for row in range(len(has_loss)):
        key = hashlib.blake2b(digest_size=16)
        for part in parts:
            values = part[row] if mask is None else part[row][mask[row].bool()]
            key.update(values.contiguous().numpy().tobytes())
        keys.append(key.digest())
    return keys


def cache_key(teacher: str, settings: Mapping[str, Any], batches: Iterable[Batch]) -> str:
    """Return the name of the folder: a hash of the teacher's weights, the settings and all rows of the data set.

    Args:
        teacher: Hash of the teacher's weights.
        settings: All else that decides the answers, as JSON.
        batches: All batches of the data set.
    """
    rows = hashlib.sha256()
    for batch in batches:
        rows.update(b"".join(row_keys(batch)))
    content = json.dumps([FORMAT, SHARD_BATCHES, teacher, settings, rows.hexdigest()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def write_top_k(folder: Path, batches: Iterable[Batch], answer: Answer, rows: int | None = None) -> None:
    """Write the teacher's answers for all rows, unless ``folder`` is complete. Existing shards are kept.

    Args:
        folder: Folder of the cache.
        batches: The batches that `cache_key` was given, in the same order.
        answer: The teacher.
        rows: Number of rows in all batches, for lines of progress.

    Raises:
        ConfigurationError: If the folder cannot be written.
    """
    from filelock import FileLock

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not (folder / MANIFEST).exists():
                with Progress("running the teacher", "rows", rows) as progress:
                    _write_shards(folder, iter(batches), answer, progress)
    except OSError as error:
        raise ConfigurationError(
            f"The cache folder {folder} cannot be written: {error}. Set cache_dir or LIT_EFFICIENT_CACHE to a writable "
            "folder."
        ) from error


def _write_shards(folder: Path, batches: Iterator[Batch], answer: Answer, progress: Progress) -> None:
    names: list[str] = []
    while True:
        shard = list(islice(batches, SHARD_BATCHES))
        if not shard:
            break
        names.append(f"shard-{len(names):06d}.safetensors")
        if _is_whole(folder / names[-1]):
            progress.skip(sum(len(targets_of(batch)) for batch in shard))
        else:
            save_tensors(folder / names[-1], _answered(shard, answer, progress))
    write_json(folder / MANIFEST, {"files": {name: sha256_of(folder / name) for name in names}})


def _is_whole(path: Path) -> bool:
    """Return whether an interrupted run has written a shard, and it matches the hash in it."""
    try:
        load_tensors(path)
    except CheckpointError:
        return False
    return True


def _answered(shard: list[Batch], answer: Answer, progress: Progress) -> dict[str, Tensor]:
    """Return the tensors of a shard."""
    keys = b"".join(key for batch in shard for key in row_keys(batch))
    answers = []
    for batch in shard:
        answers.append(answer(batch))
        progress.update(len(targets_of(batch)))
    return {
        "keys": torch.frombuffer(bytearray(keys), dtype=torch.uint8).view(-1, 16),
        "counts": torch.cat([(targets_of(batch) != IGNORE).sum(1) for batch in shard]),
        "ids": torch.cat([ids.int().cpu() for ids, _ in answers]),
        "log_probs": torch.cat([log_probs.float().cpu() for _, log_probs in answers]),
    }


class TopKCache:
    """Complete cache, memory-mapped.

    Args:
        folder: Folder that `write_top_k` filled.
        thorough: Compare the files with their hashes.

    Raises:
        ConfigurationError: If a file is missing or altered.
    """

    def __init__(self, folder: Path, thorough: bool = True) -> None:
        hint = f"Delete the folder {folder} and run again: the cache is made again."
        try:
            files: dict[str, str] = read_json(folder / MANIFEST)["files"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigurationError(f"The cache's manifest {folder / MANIFEST} cannot be read. {hint}") from error
        self.folder = folder
        self._shards: list[Any] = []
        # Shard, first token and number of tokens of each row.
        self._places: dict[bytes, tuple[int, int, int]] = {}
        for name, expected in files.items():
            path = folder / name
            if not path.is_file() or (thorough and sha256_of(path) != expected):
                raise ConfigurationError(f"The cache file {path} is missing or corrupt. {hint}")
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
        """Return the teacher's answers for a batch, as of `Answer`: ids int32, log-probabilities float32.

        Raises:
            ConfigurationError: If a row is not in the cache.
        """
        ids = []
        log_probs = []
        for number, key in enumerate(row_keys(batch)):
            if key not in self._places:
                raise ConfigurationError(
                    f"The teacher's cache {self.folder} does not hold row {number} of this batch: the training data "
                    "differs from one reading to the next (augmentation, random crops, padding without an "
                    "attention_mask). Make it deterministic, or call the teacher live (cache_top_k: null)."
                )
            shard, start, count = self._places[key]
            ids.append(self._shards[shard].get_slice("ids")[start : start + count])
            log_probs.append(self._shards[shard].get_slice("log_probs")[start : start + count])
        return torch.cat(ids), torch.cat(log_probs)
