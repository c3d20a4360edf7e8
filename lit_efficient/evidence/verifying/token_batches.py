"""What the tokens of a batch are: which something predicts, which are filling, where documents begin."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_trees import tree_leaves, tree_map_only
from lit_efficient.losses.next_token import IGNORE, targets_of

NO_TOKENS = "the batches hold no tokens with labels that are these or the next ones"


@dataclass(frozen=True)
class Kinds:
    """What each token of a batch is."""

    trained: Tensor  # ``[B, T]`` bool: something predicts it
    padded: Tensor  # ``[B, T]`` bool: it fills the row up
    starts: Tensor  # ``[B, T]`` bool: a document begins with it


def kinds_of(batch: Mapping[str, Tensor]) -> Kinds:
    """Tell the tokens of a batch apart.

    Args:
        batch: ``input_ids`` and ``labels`` (shifted by one or not) or ``shift_labels`` ``[B, T]``, with
            ``position_ids`` if it is packed or ``attention_mask`` if it is padded.

    Raises:
        ConfigurationError: If the labels are neither the tokens nor those that follow.
    """
    ids, labels = batch["input_ids"], batch["labels" if "labels" in batch else "shift_labels"]
    counts = labels != IGNORE
    trained = counts.clone()
    if "labels" not in batch or not torch.equal(labels[counts], ids[counts]):
        if not torch.equal(labels[:, :-1][counts[:, :-1]], ids[:, 1:][counts[:, :-1]]):
            raise ConfigurationError("preview: the labels are neither the tokens nor those that follow each.")
        trained = torch.cat((torch.zeros_like(counts[:, :1]), counts[:, :-1]), dim=1)
    starts = torch.zeros_like(counts)
    starts[:, 0] = True
    padded = torch.zeros_like(counts)
    if "attention_mask" in batch:
        padded = batch["attention_mask"] == 0
    elif "position_ids" in batch:
        positions = batch["position_ids"]
        starts[:, 1:] = positions.diff(dim=1) != 1
        # The filling is a last document in which nothing is learned; every real one learns something.
        document = starts.cumsum(1)
        for row in range(len(ids)):
            last = document[row] == document[row, -1]
            padded[row] = last & ~trained[row, last].any() & bool(document[row, -1] > 1)
    return Kinds(trained, padded, starts & ~padded)


@dataclass(frozen=True)
class TokenBatch:
    """A batch from which the next token is learned."""

    batch: Any  # the batch itself
    ids: Tensor  # its tokens ``[B, T]``
    labels: Tensor  # its labels ``[B, T]``, as they stand in it
    targets: Tensor  # what each position is to predict ``[B, T]``, `IGNORE` where nothing counts
    kinds: Kinds  # what the tokens are
    positions: Tensor | None  # where a token stands in its document ``[B, T]``, if the batch says it

    def with_ids(self, ids: Tensor) -> Any:
        """The batch with other tokens and the labels that it has."""
        return tree_map_only(Tensor, lambda leaf: ids if leaf is self.ids else leaf, self.batch)

    def with_labels(self, labels: Tensor) -> Any:
        """The batch with other labels."""
        return tree_map_only(Tensor, lambda leaf: labels if leaf is self.labels else leaf, self.batch)

    def part(self, row: int, begin: int, end: int) -> Any:
        """Some tokens of a row as a batch of their own."""
        rows, length = self.ids.shape

        def taken(leaf: Tensor) -> Tensor:
            if leaf.shape[:2] == (rows, length):
                return leaf[row : row + 1, begin:end]
            return leaf[row : row + 1] if leaf.ndim and leaf.shape[0] == rows else leaf

        return tree_map_only(Tensor, taken, self.batch)

    def documents(self, row: int) -> list[tuple[int, int]]:
        """Where the documents of a row begin and end, the filling left out."""
        begins = self.kinds.starts[row].nonzero()[:, 0].tolist()
        padded = self.kinds.padded[row].nonzero()[:, 0].tolist()
        return list(zip(begins, [*begins[1:], padded[0] if padded else self.ids.shape[1]]))


def token_batch(batch: Any) -> TokenBatch | None:
    """A batch from which the next token is learned, under whatever names; ``None`` if it is none."""
    named: dict[str, Tensor] = {}
    if isinstance(batch, Mapping) and "input_ids" in batch:
        named = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.ndim == 2}
    else:
        whole = [
            leaf
            for leaf in tree_leaves(batch)
            if isinstance(leaf, Tensor) and leaf.ndim == 2 and not (leaf.is_floating_point() or leaf.is_complex())
        ]
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
    ids, labels = named["input_ids"], named[label]
    shifted = label == "shift_labels" or _ahead(ids, labels) == 1
    targets = labels if shifted else targets_of({"labels": labels})
    return TokenBatch(batch, ids, labels, targets, kinds, named.get("position_ids"))


def _ahead(ids: Tensor, labels: Tensor) -> int | None:
    """By how many tokens labels are ahead of the tokens, 0 or 1."""
    counts = labels != IGNORE
    if not counts.any():
        return None
    if torch.equal(labels[counts], ids[counts]):
        return 0
    return 1 if torch.equal(labels[:, :-1][counts[:, :-1]], ids[:, 1:][counts[:, :-1]]) else None
