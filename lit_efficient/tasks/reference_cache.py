"""Cache of a reference's log-probabilities on disk. They are computed once and found by the content of a pair.

A pair is identified by the hash of the tokens of both answers and of their mask, and never by a step or its place in a
batch. The name of the folder is the hash of the reference's weights, the settings and all pairs of the data set.

Costs: 72 bytes for each pair; reading the data set and hashing the weights once at every start.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.data.text.teacher_cache import row_keys
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import cache_folder, prepared_folder, seal
from lit_efficient.files.file_hashes import broken_seal
from lit_efficient.files.tensors import bytes_of, load_tensors, save_tensors
from lit_efficient.mechanisms.adapters.base import added_names

_FILE = "log_probs.safetensors"
# Part of every key; raise it when the meaning of the files changes.
FORMAT = 1
_SIDES = ("chosen", "rejected")

Batch = Mapping[str, Tensor]


def pair_keys(batch: Batch) -> list[bytes]:
    """Return 32 bytes for each pair of a batch. Padding does not count."""
    sides = []
    for side in _SIDES:
        names = ("input_ids", "labels", "attention_mask")
        own = {name: batch[f"{side}_{name}"].cpu() for name in names if f"{side}_{name}" in batch}
        sides.append(row_keys(own))
    return [chosen + rejected for chosen, rejected in zip(*sides)]


def weights_digest(network: nn.Module, originals: Mapping[str, Tensor]) -> str:
    """Return a hash of the weights of a network without adapters; ``originals`` replace weights that train."""
    named = dict(network.named_parameters())
    added = added_names(network, [*named])
    digest = hashlib.sha256()
    for name in sorted(named.keys() - added):
        tensor = originals.get(name, named[name])
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor).data)
    return digest.hexdigest()


class ReferenceCache:
    """Log-probabilities of a reference for all pairs of a data set.

    Args:
        folder: Folder that :func:`prepare` has filled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = load_tensors(folder / _FILE)
        keys = found["keys"].numpy().tobytes()
        self._places = {keys[32 * row : 32 * row + 32]: row for row in range(len(found["keys"]))}
        self._log_probs = found["log_probs"]

    def __len__(self) -> int:
        return len(self._places)

    def __deepcopy__(self, memo: object) -> "ReferenceCache":
        return self

    def find(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return the log-probabilities of chosen and rejected answers ``[B]``; ``None`` if a pair is unknown."""
        places = [self._places.get(key) for key in pair_keys(batch)]
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            return None
        chosen, rejected = self._log_probs[known].to(batch["chosen_input_ids"].device).unbind(1)
        return chosen, rejected


def prepare(
    weights: str,
    settings: Mapping[str, Any],
    batches: Callable[[], Iterator[Batch]],
    answer: Callable[[Batch], tuple[Tensor, Tensor]],
) -> ReferenceCache:
    """Find or make the cache of a data set.

    Args:
        weights: Hash of the reference's weights.
        settings: All else that decides the log-probabilities, as JSON.
        batches: Function that yields all batches of the data set, in the same order each time.
        answer: Function that returns the reference's log-probabilities of chosen and rejected answers ``[B]``.

    Raises:
        ConfigurationError: If the cache is damaged or cannot be written.
    """
    keys = [key for batch in batches() for key in pair_keys(batch)]
    if not keys:
        raise ConfigurationError("Preference: cache_reference: the training data has no pairs")
    rows = hashlib.sha256(b"".join(keys)).hexdigest()
    made_from = {"format": FORMAT, "weights": weights, "settings": dict(settings), "rows": rows}

    def build(target: Path) -> None:
        found = [torch.stack([side.float().cpu() for side in answer(batch)], 1) for batch in batches()]
        table = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(-1, 32)
        save_tensors(target / _FILE, {"keys": table, "log_probs": torch.cat(found)})
        seal(target, FORMAT, {"made_from": made_from})

    folder = cache_folder(None, "reference", made_from)
    return ReferenceCache(prepared_folder(folder, build, lambda path: broken_seal(path, FORMAT, True)))
