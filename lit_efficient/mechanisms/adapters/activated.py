"""Activated LoRA: an adapter that acts from the last invocation of a row on, and leaves the tokens before to the base.

    y_t = W x_t + s B A x_t    for t >= start of the last occurrence of the invocation tokens in the row, else W x_t

Keys and values of the tokens before the invocation are those of the base, so that another program can share them
between the base and several adapters.

Costs: generation in this package reads the whole row for each token
Source: Greenewald et al. (2025), https://arxiv.org/abs/2504.12397
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError

ACTIVATED = "alora"  # the variant of LoRA


def activated(ids: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return which positions of rows an adapter acts on, [rows, positions].

    Args:
        ids: Ids of tokens, [rows, positions].
        tokens: Ids of the invocation. Rows without it are left to the base.
    """
    wanted = torch.tensor(tokens, device=ids.device)
    positions = torch.arange(ids.shape[1], device=ids.device)
    if ids.shape[1] < len(tokens):
        return torch.zeros_like(ids, dtype=torch.bool)
    found = (ids.unfold(1, len(tokens), 1) == wanted).all(-1)
    starts = torch.where(found, positions[: found.shape[1]], -1).amax(1, keepdim=True)
    return (starts >= 0) & (positions >= starts)


class Invocation:
    """The positions of the present batch on which adapters act. The layers and two hooks of the network share it."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        self.mask: Tensor | None = None
        self.inside = False  # the network runs
        self.masks = 0  # different masks since blocks were recomputed last
        self.recomputed = True
        self.trained = False  # a batch has been searched in training

    def follow(self, network: nn.Module) -> None:
        """Read the ids of each batch of a network of transformers."""
        network.register_forward_pre_hook(self._begin, with_kwargs=True)
        network.register_forward_hook(self._end, always_call=True)

    def _begin(self, network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            raise ConfigurationError(
                f"LoRA: variant={ACTIVATED!r} searches input_ids [rows, positions] for its invocation, and the network "
                "got none"
            )
        past = kwargs.get("past_key_values")
        if past is not None and past.get_seq_length():
            raise ConfigurationError(
                f"LoRA: variant={ACTIVATED!r} searches whole rows for its invocation, and the network got the rest of "
                "rows whose beginnings are in a cache. Generate without a cache"
            )
        mask = activated(ids, self.tokens)
        if network.training and torch.is_grad_enabled() and not self.trained:
            self.trained = True
            if not mask.any():  # most often the ids are those of the text in another context
                rank_zero_warn(
                    f"LoRA: no row of the first batch has invocation_tokens={[*self.tokens]}, and rows without them do "
                    "not train the adapter. Compare them with the ids of the tokenizer in the chat template, and raise "
                    "max_length if rows are cut before them"
                )
        if torch.is_grad_enabled() and self.recomputed:  # the previous backward pass is over
            self.masks = 1
            self.recomputed = False
        elif self.mask is None or not torch.equal(self.mask, mask):
            self.masks += 1
        self.mask = mask
        self.inside = True

    def _end(self, *_: object) -> None:
        self.inside = False

    def of(self, y: Tensor, layer: str) -> Tensor:
        """Return the mask for an output of a layer, with a last dimension of size 1.

        Raises:
            ConfigurationError: If the output does not have the positions of the batch, and if a block is recomputed
                after another batch.
        """
        if not self.inside:  # a block is recomputed in the backward pass
            self.recomputed = True
            if self.masks > 1:
                raise ConfigurationError(
                    f"LoRA: variant={ACTIVATED!r}: {layer!r} is recomputed after the network has read another batch, "
                    "whose invocations are elsewhere. Leave out activation checkpointing"
                )
        mask = self.mask
        if mask is not None and y.shape[:-1] == (mask.numel(),):
            return mask.view(-1, 1)
        if mask is None or y.shape[:-1] != mask.shape:
            raise ConfigurationError(
                f"LoRA: variant={ACTIVATED!r}: {layer!r} returns {list(y.shape)}, which has no dimensions for the rows "
                "and positions of the batch. Leave the layer out of targets"
            )
        return mask[..., None]
