"""Cache of a reference's log-probabilities on disk. They are computed once and found by the content of a row.

A row has one answer or two, such as the chosen and the rejected one. It is identified by the hash of the tokens of its
answers and of their mask, and never by a step or its place in a batch. The name of the folder is the hash of the
reference's weights, the settings and all rows of the data set.

Costs: 36 or 72 bytes for each row; reading the data set and hashing the weights once at every start.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from lit_efficient.data.text.teacher_cache import row_keys
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import cache_folder, prepared_folder, seal
from lit_efficient.files.file_hashes import broken_seal
from lit_efficient.files.tensors import bytes_of, load_tensors, save_tensors
from lit_efficient.mechanisms.adapters.base import added_names

_FILE = "log_probs.safetensors"
# Part of every key; raise it when the meaning of the files changes.
FORMAT = 2

Batch = Mapping[str, Tensor]


def answer_keys(batch: Batch, prefixes: Sequence[str]) -> list[bytes]:
    """Return 16 bytes of each answer for each row of a batch. Padding does not count."""
    sides = []
    for prefix in prefixes:
        names = ("input_ids", "labels", "attention_mask")
        own = {name: batch[f"{prefix}{name}"].cpu() for name in names if f"{prefix}{name}" in batch}
        sides.append(row_keys(own))
    return [b"".join(keys) for keys in zip(*sides)]


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
    """Log-probabilities of a reference for all rows of a data set.

    Args:
        folder: Folder that :func:`prepare` has filled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = load_tensors(folder / _FILE)
        self._places = {row.tobytes(): place for place, row in enumerate(found["keys"].numpy())}
        self._log_probs = found["log_probs"]

    def __len__(self) -> int:
        return len(self._places)

    def __deepcopy__(self, memo: object) -> "ReferenceCache":
        return self

    def find(self, keys: Sequence[bytes]) -> tuple[Tensor, ...] | None:
        """Return the log-probabilities of each answer ``[B]`` on the CPU; ``None`` if a row is unknown.

        Args:
            keys: :func:`answer_keys` of the rows.
        """
        places = [self._places.get(key) for key in keys]
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            return None
        return self._log_probs[known].unbind(1)


def prepare(
    weights: str,
    settings: Mapping[str, Any],
    batches: Callable[[str], Iterator[Batch]],
    prefixes: Sequence[str],
    answer: Callable[[Batch], tuple[Tensor, ...]],
) -> ReferenceCache:
    """Find or make the cache of a data set.

    Args:
        weights: Hash of the reference's weights.
        settings: All else that decides the log-probabilities, as JSON.
        batches: Function that yields all batches of the data set, in the same order each time. Its argument names the
            work, for lines of progress; "" prints none.
        prefixes: Prefixes of the tensors of each answer.
        answer: Function that returns the reference's log-probabilities of each answer ``[B]``.

    Raises:
        ConfigurationError: If there are no rows, or the cache is damaged or cannot be written.
    """
    main = rank_zero_only.rank == 0  # type: ignore[attr-defined]  # of a function
    keys = [key for batch in batches("reading data" if main else "") for key in answer_keys(batch, prefixes)]
    if not keys:
        raise ConfigurationError("cache_reference: the data has no rows")
    rows = hashlib.sha256(b"".join(keys)).hexdigest()
    made_from = {"format": FORMAT, "weights": weights, "settings": dict(settings), "rows": rows}

    def build(target: Path) -> None:
        found = []
        for batch in batches("running the reference"):  # in one of the processes
            found.append(torch.stack([side.float().cpu() for side in answer(batch)], 1))
        table = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(len(keys), -1)
        save_tensors(target / _FILE, {"keys": table, "log_probs": torch.cat(found)})
        seal(target, FORMAT, {"made_from": made_from})

    folder = cache_folder(None, "reference", made_from)
    return ReferenceCache(prepared_folder(folder, build, lambda path: broken_seal(path, FORMAT, True)))
