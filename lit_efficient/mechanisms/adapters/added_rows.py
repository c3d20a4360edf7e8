"""Embeddings of new tokens beyond a table of embeddings, which train while all rows of the table stay as they are.

    y = rows[i] for the id that is number i of the new ids, else W[id]

The table itself does not grow: its weight keeps its shape, and a checkpoint holds the new rows alone.

Source: textual inversion, Gal et al. (2022), https://arxiv.org/abs/2208.01618
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_modules import FollowsWeight, StaysFloat32
from lit_efficient.mechanisms.adapters.base import ADDED_ROWS
from lit_efficient.mechanisms.adapters.low_rank import LowRank
from lit_efficient.mechanisms.adapters.trained_rows import TrainedRows
from lit_efficient.surgery import home_of, mix_in, mix_out, moved


class AddedRows(FollowsWeight, StaysFloat32):
    """Mix-in of an ``nn.Embedding`` with rows for ids that its weight does not have."""

    float32 = (ADDED_ROWS,)
    weight: Tensor
    added_rows: nn.Parameter  # [n, width]
    added_ids: tuple[int, ...]
    added_from: tuple[int | None, ...]  # id of the token whose row a new one starts as; None: random
    added_seed: int

    @property
    def made_of_weight(self) -> tuple[str, ...]:
        """Name of the rows, which start as others or with the deviation of the table."""
        return (ADDED_ROWS,)

    @torch.no_grad()
    def follow_weight(self) -> None:
        """Start again from the present weight."""
        self.added_rows.copy_(initial_rows(self.weight, self.added_from, self.added_seed))

    def forward(self, x: Tensor) -> Tensor:
        ids = moved(torch.tensor(self.added_ids, device="cpu"), x.device)
        y: Tensor = super().forward(x.clamp(max=len(self.weight) - 1))  # type: ignore[misc]
        order = ids.argsort()
        place = order[torch.searchsorted(ids, x, sorter=order).clamp(max=len(ids) - 1)]
        rows = F.embedding(place, self.added_rows)
        return torch.where((ids[place] == x)[..., None], rows.to(y.dtype), y)


def initial_rows(weight: Tensor, starts: Sequence[int | None], seed: int) -> Tensor:
    """Return the first values of new rows [n, width]: rows of a table, or random ones with its deviation.

    Args:
        weight: The table, [ids, width].
        starts: For each new row the id whose row it starts as, or None for random numbers.
        seed: Seed of the random numbers.
    """
    table = weight.float()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(len(starts), table.shape[1], generator=generator, device="cpu").to(table.device)
    rows = drawn * table.std()
    for number, start in enumerate(starts):
        if start is not None:
            rows[number] = table[start]
    return rows


def add_rows(network: Any, ids: Sequence[int], starts: Sequence[int | None], seed: int, who: str) -> nn.Parameter:
    """Give the embeddings of a network rows for new ids, in place, and return the rows, which train.

    Args:
        network: Model of transformers. Layers that share the table of its embeddings, as in T5, share the rows.
        ids: The ids, which no other token of the tokenizer has.
        starts: As in :func:`initial_rows`.
        seed: As in :func:`initial_rows`.
        who: Argument, for messages.

    Raises:
        ConfigurationError: If the layer is no plain embedding.
    """
    table = network.get_input_embeddings()
    if not isinstance(table, nn.Embedding) or isinstance(table, LowRank | TrainedRows | AddedRows):
        raise ConfigurationError(f"{who}: the embeddings are a {type(table).__name__}, to which no rows can be added")
    weight = table.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    rows = nn.Parameter(torch.empty(len(ids), weight.shape[1], dtype=dtype, device=home_of(weight)))
    for layer in [part for part in network.modules() if isinstance(part, nn.Embedding) and part.weight is weight]:
        layer.register_parameter(ADDED_ROWS, rows)
        mix_in(layer, AddedRows, added_ids=tuple(ids), added_from=tuple(starts), added_seed=seed)
        if not weight.is_meta:  # otherwise the rows start when the weight is read
            layer.follow_weight()  # type: ignore[operator]
    return rows


def add_words(
    parts: Mapping[str, Any], words: Mapping[str, Sequence[str]], starts: Mapping[str, str | None], seed: int, who: str
) -> list[nn.Parameter]:
    """Add tokens to tokenizers, and rows to the embeddings of their text encoders. Return the rows, which train.

    Args:
        parts: Text encoders with their tokenizers (`TextNetwork`) by name.
        words: For each new word the tokens that it stands for, the first of which is the word itself.
        starts: For each new word the words as whose embeddings its tokens start, in turn; None: random numbers.
        seed: Seed of the random numbers.
        who: Argument, for messages.

    Raises:
        ConfigurationError: If a tokenizer has a token already, or knows nothing of the words to start from.
    """
    rows = []
    for name, part in parts.items():
        known = part.tokens
        part.add_words(words, who)
        ids: list[int] = []
        first: list[int | None] = []
        for word, tokens in words.items():
            start = starts[word]
            found = [None] if start is None else known.ids_of(start)
            if not found:
                raise ConfigurationError(f"{who}: {word!r} must start from words or null, and {start!r} has no token")
            ids += [part.tokens.id_of(token) for token in tokens]
            first += [found[number % len(found)] for number in range(len(tokens))]
        rows.append(add_rows(part.network, ids, first, seed, f"{who} ({name})"))
    return rows


def without_added_rows(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict without the rows of new tokens."""
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != ADDED_ROWS}


@torch.no_grad()
def fold_added_rows(layer: Any) -> None:
    """Let the table grow by the rows of new tokens, in place, as ``resize_token_embeddings`` does."""
    size = max(len(layer.weight), max(layer.added_ids) + 1)
    grown = layer.weight.new_zeros(size, layer.weight.shape[1])
    grown[: len(layer.weight)] = layer.weight
    grown[list(layer.added_ids)] = layer.added_rows.to(grown.dtype)
    layer.weight = nn.Parameter(grown, requires_grad=layer.weight.requires_grad)
    layer.num_embeddings = size
    del layer.added_rows, layer.added_ids, layer.added_from, layer.added_seed
    mix_out(layer, AddedRows)
