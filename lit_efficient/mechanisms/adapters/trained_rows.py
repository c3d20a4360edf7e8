"""Training of single rows of frozen embeddings and output heads, such as the rows of new tokens.

    embedding:  y = rows[i] for the id that is number i of the trained ids, else W[id]
    head:       y[id] = rows[i] . x,                                        else W[id] . x

The rows replace those of the weight, as in peft's ``trainable_token_indices``. Layers that share a weight share the
rows.

Costs: n rows of each weight in float32; a head computes n logits twice
Source: https://huggingface.co/docs/peft/package_reference/trainable_tokens
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.internals.torch_modules import FollowsWeight
from lit_efficient.mechanisms.adapters.disabled import Switchable
from lit_efficient.mechanisms.adapters.low_rank import LowRank, taken_by
from lit_efficient.mechanisms.adapters.quantized import is_quantized
from lit_efficient.surgery import NEW_ROWS, home_of, mix_in, mix_out

NEW = "new"
ROWS = "trained_rows"


class TrainedRows(FollowsWeight, Switchable):
    """Base of the mix-ins of a layer in which some rows of the weight are replaced by trained ones."""

    float32 = (ROWS,)
    weight: Tensor
    trained_rows: nn.Parameter  # [n, width]
    row_ids: tuple[int, ...]

    @property
    def made_of_weight(self) -> tuple[str, ...]:
        """Name of the rows, which start as those of the weight."""
        return (ROWS,)

    @torch.no_grad()
    def follow_weight(self) -> None:
        """Start again from the rows of the present weight."""
        self.trained_rows.copy_(self.weight[list(self.row_ids)])

    def _ids(self, device: torch.device) -> Tensor:
        return torch.tensor(self.row_ids, device=device)


class _EmbeddingRows(TrainedRows):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)  # type: ignore[misc]
        if self.adapter_off:
            return y
        ids = self._ids(x.device)
        order = ids.argsort()
        place = order[torch.searchsorted(ids, x, sorter=order).clamp(max=len(ids) - 1)]
        # Gemma's embeddings scale the rows that they look up.
        rows = getattr(self, "embed_scale", 1.0) * F.embedding(place, self.trained_rows)
        return torch.where((ids[place] == x)[..., None], rows.to(y.dtype), y)


class _HeadRows(TrainedRows):
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)  # type: ignore[misc]
        if self.adapter_off:
            return y
        ids = self._ids(y.device)
        own = F.linear(taken_by(self.trained_rows, x), self.trained_rows)
        if self.bias is not None:
            own = own + self.bias[ids]
        return y.index_copy(-1, ids, own.to(y.dtype))


def new_rows(module: nn.Module) -> list[tuple[str, Any, list[int]]]:
    """Return the networks in a module that have rows of new tokens: name, network and ids."""
    found = [(name, part, part.__dict__.get(NEW_ROWS)) for name, part in module.named_modules()]
    return [(name, part, list(ids)) for name, part, ids in found if ids]


def frozen_new_rows(module: nn.Module, trainable: Iterable[nn.Parameter]) -> list[int]:
    """Return the ids of new tokens whose row of the embeddings or of the output head would not train.

    Args:
        module: Root module.
        trainable: The parameters that will train.
    """
    wanted = {id(parameter) for parameter in trainable}
    left: set[int] = set()
    for _, network, ids in new_rows(module):
        for layer in _tables(network):
            if isinstance(layer, TrainedRows):
                left |= {*ids} - {*layer.row_ids}
            elif not any(id(parameter) in wanted for parameter in layer.parameters()):
                left |= {*ids}
    return sorted(left)


def add_trained_rows(module: nn.Module, ids: Sequence[int] | str, who: str) -> list[nn.Parameter]:
    """Let rows of the embeddings and of the output head train, in place.

    Args:
        module: Root module with a model of transformers.
        ids: Ids of the tokens; ``new`` for those that ``resize_vocabulary`` added and those that the data calls new.
        who: Argument, for messages.

    Returns:
        The rows: one parameter [n, width] for each different weight.

    Raises:
        ConfigurationError: If there is no such row, or an adapter changes the layer already.
    """
    if ids == NEW:
        chosen = [(network, own) for _, network, own in new_rows(module)]
        if not chosen:
            raise ConfigurationError(
                f"{who}: the model has no new token. Tokens are new if resize_vocabulary added a row for them, if "
                "chat.new_tokens of the data names them, or if the tokenizer in the model's folder lacks them. Give a "
                "list of ids for others"
            )
    else:
        models = transformers_in(module)
        if not models:
            raise ConfigurationError(
                f"{who}: {type(module).__name__} has no model of transformers, whose rows could train"
            )
        chosen = [(models[0], [int(i) for i in ids])]
    rows: dict[int, nn.Parameter] = {}
    for network, own in chosen:
        for layer in _tables(network):
            _check_layer(layer, own, who)
            known = rows.get(id(layer.weight))
            if known is None:
                dtype = torch.promote_types(layer.weight.dtype, torch.float32)
                empty = torch.empty(len(own), layer.weight.shape[1], dtype=dtype, device=home_of(layer.weight))
                known = rows[id(layer.weight)] = nn.Parameter(empty)
            layer.trained_rows = known
            mix_in(layer, _EmbeddingRows if isinstance(layer, nn.Embedding) else _HeadRows, row_ids=tuple(own))
            if not layer.weight.is_meta:  # otherwise the rows start when the weight is read
                layer.follow_weight()
    return list(rows.values())


def transformers_in(module: nn.Module) -> list[nn.Module]:
    """Return the models of transformers in a module, the outermost one first."""
    return [part for part in module.modules() if hasattr(part, "get_input_embeddings") and hasattr(part, "config")]


def fold_rows(layer: Any) -> None:
    """Write the trained rows into the weight, and remove them from the layer, in place."""
    with torch.no_grad():
        layer.weight[list(layer.row_ids)] = layer.trained_rows.to(layer.weight.dtype)
    del layer.trained_rows, layer.row_ids
    mix_out(layer, TrainedRows)


def _tables(network: Any) -> list[Any]:
    """Return the embeddings and the output head of a model, and other layers that share one of their weights."""
    head = network.get_output_embeddings()
    ends = [part for part in (network.get_input_embeddings(), head) if hasattr(part, "weight")]
    weights = {id(part.weight) for part in ends}
    return [part for part in network.modules() if id(getattr(part, "weight", None)) in weights]


def _check_layer(layer: Any, ids: Sequence[int], who: str) -> None:
    rows = layer.weight.shape[0]
    if len(set(ids)) < len(ids) or not all(0 <= i < rows for i in ids):
        raise refusal(who, "the ids", f"different numbers from 0 to {rows - 1}", list(ids))
    if not isinstance(layer, nn.Embedding | nn.Linear) or is_quantized(layer):
        raise ConfigurationError(f"{who}: rows of a {type(layer).__name__} cannot train. Use modules_to_save")
    if isinstance(layer, LowRank | TrainedRows):
        raise ConfigurationError(
            f"{who}: the embeddings or the output head already have an adapter. Leave them out of targets"
        )
