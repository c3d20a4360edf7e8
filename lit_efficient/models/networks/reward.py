"""A scalar for a whole text from a causal language model: its last hidden state, read by one linear layer.

    R(x) = w . h_t(x),    t the last token of x that is no filling

t is found from the attention mask: a search for the padding token goes wrong where it is the end of turn as well.
Source: https://arxiv.org/abs/2009.01325.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.models.networks.gpt import GPT


def last_positions(attention_mask: Tensor) -> Tensor:
    """Where the last token that counts stands ``[B]``, for ``[B, T]`` filled up on either side."""
    return attention_mask.shape[1] - 1 - attention_mask.flip(1).long().argmax(1)


def last_hidden_states(network: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """What the network makes of the last token that counts, ``[B, D]``; our `GPT` takes filling on the right only."""
    if isinstance(network, GPT):
        hidden = network.features(input_ids)
    else:
        body = network.base_model
        hidden = body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    return hidden[torch.arange(len(hidden), device=hidden.device), last_positions(attention_mask)]


def hidden_size(network: Any) -> int:
    """D."""
    return int(network.config.dim if isinstance(network, GPT) else network.config.get_text_config().hidden_size)


def drop_head(network: Any) -> None:
    """Take the layer off that gives logits, in place: it would hold memory and never learn."""
    if isinstance(network, GPT):
        network.head = nn.Identity()  # type: ignore[assignment]
    else:
        network.set_output_embeddings(nn.Identity())
