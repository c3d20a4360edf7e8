"""How many tokens a network of Hugging Face has positions for, where these are a table that is learned (GPT-2, OPT).

Behind the table's end there are none, and a lookup dies; angles (Llama) and slopes (BLOOM) go on.
"""

from typing import Any

import torch
from torch import nn

from lit_efficient.internals.hugging_face import causal_model_of, from_config
from lit_efficient.models.libraries.causal_lm import CausalLMConfig, resolve

_KEPT = 2  # rows of a table, at most, that no token's position is in: OPT's first two, RoBERTa's for padding


def positions_of(spec: CausalLMConfig) -> int | None:
    """Those of the network that is asked for, which is built without weights if its configuration leaves it open."""
    config = resolve(spec)
    text: Any = config.get_text_config()
    kind = causal_model_of(config)
    if kind is None or getattr(text, "max_position_embeddings", None) is None or getattr(text, "rope_parameters", None):
        return None
    with torch.device("meta"):
        return learned_positions(from_config(kind, config))


def learned_positions(network: Any) -> int | None:
    """Those of a network: the rows of its table that a token may be in; ``None`` if it has none.

    Example:
        >>> from transformers import OPTConfig, OPTForCausalLM
        >>> sizes = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 8, "num_hidden_layers": 1}
        >>> learned_positions(OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=1, max_position_embeddings=16)))
        16
    """
    most = getattr(network.config.get_text_config(), "max_position_embeddings", None)
    words = network.get_input_embeddings()
    if most is None:
        return None
    for part in network.modules():
        if isinstance(part, nn.Embedding) and part is not words and 0 <= part.num_embeddings - most <= _KEPT:
            kept = 0 if part.padding_idx is None else part.padding_idx + 1
            return part.num_embeddings - int(getattr(part, "offset", kept))
    return None
