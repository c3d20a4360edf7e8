"""Kinds of the tokens of a batch: tokens that are predicted, padding, and first tokens of documents."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_trees import tree_leaves, tree_map_only
from lit_efficient.losses.next_token import IGNORE, targets_of

NO_TOKENS = "the batches hold no tokens whose labels are the same or the next tokens"


@dataclass(frozen=True)
class Kinds:
    """Kind of each token of a batch."""

    trained: Tensor  # ``[B, T]`` bool: it is predicted by another token
    padded: Tensor  # ``[B, T]`` bool: it is padding
    starts: Tensor  # ``[B, T]`` bool: it is the first token of a document


def kinds_of(batch: Mapping[str, Tensor]) -> Kinds:
    """Determine the kinds of the tokens of a batch.

    Args:
        batch: ``input_ids`` and ``labels`` (shifted by one or not) or ``shift_labels`` ``[B, T]``, with
            ``position_ids`` if it is packed or ``attention_mask`` if it is padded.

    Raises:
        ConfigurationError: If the labels are neither the tokens nor the next tokens.
    """
    ids = batch["input_ids"]
    labels = batch["labels" if "labels" in batch else "shift_labels"]
    trained = labels != IGNORE
    if "labels" not in batch or not _are_tokens(ids, labels):
        if not _are_next_tokens(ids, labels):
            raise ConfigurationError("preview: the labels are neither the tokens nor the next tokens.")
        trained = torch.cat((torch.zeros_like(trained[:, :1]), trained[:, :-1]), dim=1)
    starts = torch.zeros_like(trained)
    starts[:, 0] = True
    padded = torch.zeros_like(trained)
    if "attention_mask" in batch:
        padded = batch["attention_mask"] == 0
    elif "position_ids" in batch:
        starts[:, 1:] = batch["position_ids"].diff(dim=1) != 1
        # Padding is a last document without labels. Every real document has labels.
        document = starts.cumsum(1)
        for row in range(len(ids)):
            last = document[row] == document[row, -1]
            padded[row] = last & ~trained[row, last].any() & bool(document[row, -1] > 1)
    return Kinds(trained, padded, starts & ~padded)


@dataclass(frozen=True)
class TokenBatch:
    """A batch for the prediction of next tokens."""

    batch: object  # the batch itself
    ids: Tensor  # tokens ``[B, T]``
    labels: Tensor  # labels ``[B, T]`` as they are in the batch
    targets: Tensor  # token that each position predicts ``[B, T]``; `IGNORE` if it predicts none
    kinds: Kinds  # kinds of the tokens
    positions: Tensor | None  # position of each token in its document ``[B, T]``, if the batch has positions

    def with_ids(self, ids: Tensor) -> object:
        """Return the batch with other tokens and the same labels."""
        return tree_map_only(Tensor, lambda leaf: ids if leaf is self.ids else leaf, self.batch)

    def with_labels(self, labels: Tensor) -> object:
        """Return the batch with other labels."""
        return tree_map_only(Tensor, lambda leaf: labels if leaf is self.labels else leaf, self.batch)

    def part(self, row: int, begin: int, end: int) -> Any:
        """Return the tokens ``begin`` to ``end`` of a row as a batch."""
        rows, length = self.ids.shape

        def taken(leaf: Tensor) -> Tensor:
            if leaf.shape[:2] == (rows, length):
                return leaf[row : row + 1, begin:end]
            if leaf.ndim and leaf.shape[0] == rows:
                return leaf[row : row + 1]
            return leaf

        return tree_map_only(Tensor, taken, self.batch)

    def documents(self, row: int) -> list[tuple[int, int]]:
        """Return the first place and the end of each document of a row, without padding."""
        begins = self.kinds.starts[row].nonzero()[:, 0].tolist()
        padding = self.kinds.padded[row].nonzero()[:, 0].tolist()
        end = [*padding, self.ids.shape[1]][0]
        return list(zip(begins, [*begins[1:], end]))


def token_batch(batch: object) -> TokenBatch | None:
    """Return a batch for the prediction of next tokens, whatever its names; ``None`` if it is none."""
    named: dict[str, Tensor] = {}
    if isinstance(batch, Mapping) and "input_ids" in batch:
        named = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.ndim == 2}
    else:
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim == 2]
        whole = [leaf for leaf in leaves if not (leaf.is_floating_point() or leaf.is_complex())]
        # Names of the batch are unknown, so pairs of tensors are compared.
        for ids in whole:
            for labels in whole:
                if labels is not ids and labels.shape == ids.shape and _ahead(ids, labels) == 1:
                    named = {"input_ids": ids, "shift_labels": labels}
    label = "labels" if "labels" in named else "shift_labels"
    if not {"input_ids", label} <= named.keys() or named["input_ids"].shape != named[label].shape:
        return None
    try:
        kinds = kinds_of(named)
    except ConfigurationError:
        return None
    ids = named["input_ids"]
    labels = named[label]
    targets = labels
    if label == "labels" and _ahead(ids, labels) != 1:
        targets = targets_of({"labels": labels})
    return TokenBatch(batch, ids, labels, targets, kinds, named.get("position_ids"))


def _ahead(ids: Tensor, labels: Tensor) -> int | None:
    """Return 0 if labels are the tokens and 1 if they are the next tokens; ``None`` if neither, or without labels."""
    if (labels == IGNORE).all():
        return None
    if _are_tokens(ids, labels):
        return 0
    if _are_next_tokens(ids, labels):
        return 1
    return None


def _are_tokens(ids: Tensor, labels: Tensor) -> bool:
    counts = labels != IGNORE
    return torch.equal(labels[counts], ids[counts])


def _are_next_tokens(ids: Tensor, labels: Tensor) -> bool:
    return _are_tokens(ids[:, 1:], labels[:, :-1])
