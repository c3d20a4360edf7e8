"""Scalar reward of a whole text from a causal language model: its last hidden state, mapped by one linear layer.

    R(x) = w . h_t(x),    t the last token of x that is not padding

t is found from the attention mask. A search for the padding token would fail where that token also ends a turn.
Source: https://arxiv.org/abs/2009.01325.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.models.networks.gpt import GPT


def last_positions(attention_mask: Tensor) -> Tensor:
    """Return the position of the last token that is not padding ``[B]``, for a mask ``[B, T]`` with padding on either
    side.
    """
    return attention_mask.shape[1] - 1 - attention_mask.flip(1).long().argmax(1)


def last_hidden_states(network: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the hidden state of the last token that is not padding, ``[B, D]``.

    Our `GPT` needs the padding on the right.
    """
    if isinstance(network, GPT):
        hidden = network.features(input_ids)
    else:
        body = network.base_model
        hidden = body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    return hidden[torch.arange(len(hidden), device=hidden.device), last_positions(attention_mask)]


def hidden_size(network: Any) -> int:
    """Return the width D of the hidden states."""
    if isinstance(network, GPT):
        return network.config.dim
    return int(network.config.get_text_config().hidden_size)


def drop_head(network: Any) -> None:
    """Replace the layer that computes logits by an identity, in place: it would hold memory and never train."""
    if isinstance(network, GPT):
        network.head = nn.Identity()  # type: ignore[assignment]
    else:
        network.set_output_embeddings(nn.Identity())
