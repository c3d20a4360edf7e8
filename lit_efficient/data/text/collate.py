"""Documents -> batches, packed or padded; labels are not shifted (the convention of Hugging Face's models).

    packed:  input_ids, labels, position_ids [B, T]      positions begin at 0 in every document
    padded:  input_ids, labels, attention_mask [B, T]    one document a row

A packed batch has no attention mask on purpose. Most models of transformers keep documents apart by their positions,
if they get no mask **and no key-value cache** (``use_cache=False``); many do not, silently. Our tasks ask the model:
see :mod:`lit_efficient.mechanisms.documents`, which finds the arguments for a module of your own as well.
The first label of every document is `IGNORE`, so nothing is predicted across a boundary, wherever the shift is done.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import IGNORE

TokensAndLabels = tuple[np.ndarray, np.ndarray]
"""Ids and unshifted labels ``[n]`` of a document."""


def packed_batch(rows: Sequence[Sequence[TokensAndLabels]], length: int, pad_id: int = 0) -> dict[str, Tensor]:
    """Documents side by side, as ``input_ids``, ``labels`` and ``position_ids``, ``[B, T]`` int64.

    What is left over at the end of a row is a document of ``pad_id`` of its own without labels.

    Raises:
        ConfigurationError: If a row is too long.
    """
    ids = np.full((len(rows), length), pad_id, dtype=np.int64)
    labels = np.full_like(ids, IGNORE)
    positions = np.empty_like(ids)
    for row, documents in enumerate(rows):
        at = 0
        for tokens, targets in documents:
            end = at + len(tokens)
            if end > length:
                raise ConfigurationError(f"packed_batch: the documents of a row must have at most {length} tokens.")
            ids[row, at:end] = tokens
            labels[row, at:end] = targets
            labels[row, at : at + 1] = IGNORE
            positions[row, at:end] = np.arange(end - at)
            at = end
        positions[row, at:] = np.arange(length - at)
    return {
        name: torch.from_numpy(v) for name, v in (("input_ids", ids), ("labels", labels), ("position_ids", positions))
    }


def padded_batch(documents: Sequence[TokensAndLabels], pad_id: int = 0, multiple: int = 8) -> dict[str, Tensor]:
    """Documents filled up on the right: ``input_ids``, ``labels``, ``attention_mask`` (1 for tokens), ``[B, T]`` int64.

    T is the longest length rounded up to a ``multiple``, which kernels like.
    """
    length = -(-max(len(tokens) for tokens, _ in documents) // multiple) * multiple
    ids = np.full((len(documents), length), pad_id, dtype=np.int64)
    labels = np.full_like(ids, IGNORE)
    mask = np.zeros_like(ids)
    for row, (tokens, targets) in enumerate(documents):
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = targets
        mask[row, : len(tokens)] = 1
    labels[:, 0] = IGNORE
    return {name: torch.from_numpy(v) for name, v in (("input_ids", ids), ("labels", labels), ("attention_mask", mask))}
