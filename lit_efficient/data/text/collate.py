"""Documents as batches, packed or padded. Labels are not shifted, as in the models of Hugging Face.

    packed:  input_ids, labels, position_ids [B, T]      positions begin at 0 in every document
    padded:  input_ids, labels, attention_mask [B, T]    one document a row

A packed batch has no attention mask on purpose. Most models of transformers separate documents by their positions if
they get no mask **and no key-value cache** (``use_cache=False``). Many models do not, and raise no error. Our tasks
test the model: see :mod:`lit_efficient.mechanisms.documents`, which also finds the arguments for your own module.

The first label of every document is `IGNORE`, so that no token is predicted from another document, no matter where the
labels are shifted.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import IGNORE

_MULTIPLE = 8

TokensAndLabels = tuple[np.ndarray, np.ndarray]
"""Ids and unshifted labels [n] of a document."""


def packed_batch(rows: Sequence[Sequence[TokensAndLabels]], length: int, pad_id: int = 0) -> dict[str, Tensor]:
    """Place the documents of each row side by side.

    The rest of a row is a separate document of ``pad_id`` without labels.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids`` [B, length] int64.

    Raises:
        ConfigurationError: If the documents of a row have more than ``length`` tokens.
    """
    ids = np.full((len(rows), length), pad_id, dtype=np.int64)
    labels = np.full_like(ids, IGNORE)
    positions = np.empty_like(ids)
    for row, documents in enumerate(rows):
        begin = 0
        for tokens, targets in documents:
            end = begin + len(tokens)
            if end > length:
                raise ConfigurationError(f"packed_batch: the documents of a row must have at most {length} tokens.")
            ids[row, begin:end] = tokens
            labels[row, begin:end] = targets
            labels[row, begin : begin + 1] = IGNORE
            positions[row, begin:end] = np.arange(end - begin)
            begin = end
        # Padding gets positions of its own, so that a model takes it for one more document.
        positions[row, begin:] = np.arange(length - begin)
    return _tensors(input_ids=ids, labels=labels, position_ids=positions)


def padded_length(longest: int, most: int | None) -> int:
    """Return the length of a padded batch: a multiple of 8, which is faster on GPUs, if it does not exceed ``most``."""
    length = -(-longest // _MULTIPLE) * _MULTIPLE
    return length if most is None else max(longest, min(length, most))


def padded_batch(documents: Sequence[TokensAndLabels], pad_id: int = 0, most: int | None = None) -> dict[str, Tensor]:
    """Pad documents on the right to one length.

    Args:
        documents: Ids and labels of the documents.
        pad_id: Id of the padding.
        most: Largest length of a row, as a model may have no positions for more. ``None``: any.

    Returns:
        ``input_ids``, ``labels`` and ``attention_mask`` (1 for tokens) [B, T] int64, T by :func:`padded_length`.
    """
    length = padded_length(max(len(tokens) for tokens, _ in documents), most)
    ids = np.full((len(documents), length), pad_id, dtype=np.int64)
    labels = np.full_like(ids, IGNORE)
    mask = np.zeros_like(ids)
    for row, (tokens, targets) in enumerate(documents):
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = targets
        mask[row, : len(tokens)] = 1
    labels[:, 0] = IGNORE
    return _tensors(input_ids=ids, labels=labels, attention_mask=mask)


def _tensors(**arrays: np.ndarray) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
