"""Scalar reward of a whole text from a causal language model: its last hidden state, mapped by one linear layer.

    R(x) = w . h_t(x),    t the last token of x that is not padding

t is found from the attention mask. A search for the padding token would fail where that token also ends a turn.
Source: https://arxiv.org/abs/2009.01325.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.internals.hugging_face import classifier_of, from_config
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.surgery import weights_wait


def padded_right(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and mask ``[B, T]`` in which padding on the left has been moved to the right.

    Networks that count positions from the first column, such as GPT-2, then compute the same for either side.
    """
    length = attention_mask.shape[1]
    first = attention_mask.long().argmax(1, keepdim=True)
    places = (torch.arange(length, device=first.device) + first) % length
    return input_ids.gather(1, places), attention_mask.gather(1, places)


def last_positions(attention_mask: Tensor) -> Tensor:
    """Return the position of the last token that is not padding ``[B]``, for a mask ``[B, T]`` with padding on either
    side.
    """
    return attention_mask.shape[1] - 1 - attention_mask.flip(1).long().argmax(1)


def last_hidden_states(network: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the hidden state of the last token that is not padding, ``[B, D]``, for padding on either side."""
    input_ids, attention_mask = padded_right(input_ids, attention_mask)
    if isinstance(network, GPT):
        hidden = network.features(input_ids)
    else:
        body = network.base_model
        hidden = body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    return hidden[torch.arange(len(hidden), device=hidden.device), last_positions(attention_mask)]


def with_score(network: Any) -> nn.Module:
    """Return the network with a layer ``score``, which is zero, in the place of the layer that computes logits.

    A causal model of transformers becomes its family's model for sequence classification, around the same body, so that
    an export is what transformers loads. If the family has none of this structure, the network keeps its class.
    """
    if isinstance(network, GPT):
        network.head = nn.Identity()  # type: ignore[assignment]
        width = network.config.dim
    else:
        width = int(network.config.get_text_config().hidden_size)
        head = nn.Identity()
        head.register_parameter("bias", None)  # families such as BERT take over the bias of the new layer
        network.set_output_embeddings(head)
    device = None
    if not weights_wait(network):
        device = next(network.parameters()).device
    score = nn.Linear(width, 1, bias=False, device=device)
    nn.init.zeros_(score.weight)
    if not isinstance(network, GPT):
        network = _as_classifier(network) or network
        # Heads of encoders consist of more layers, which no loss reads.
        used = set(network.base_model.parameters())
        for parameter in set(network.parameters()) - used:
            parameter.requires_grad_(False)
    network.score = score
    return network


def is_classifier(network: Any) -> bool:
    """Return whether a network is a model of transformers for sequence classification with one score."""
    kind = classifier_of(getattr(network, "config", None))
    return kind is not None and isinstance(network, kind) and network.config.num_labels == 1


def _as_classifier(network: Any) -> Any:
    """Return the model for sequence classification with the network's body; None if the family has no such model."""
    kind = classifier_of(network.config)
    prefix = network.base_model_prefix
    if kind is None or kind.base_model_prefix != prefix:
        return None
    network.config.num_labels = 1
    with torch.device("meta"):
        empty = from_config(kind, network.config)
    tensors = [*network.base_model.named_parameters(), *network.base_model.named_buffers()]
    own = {f"{prefix}.{name}" for name, _ in tensors}
    beside = {name for name, _ in empty.named_parameters()} - own
    if beside != {"score.weight"}:
        return None
    setattr(empty, prefix, network.base_model)
    for name, value in vars(network).items():  # such as marks of a quantised network
        empty.__dict__.setdefault(name, value)
    empty.config = network.config
    return empty.train(network.training)
