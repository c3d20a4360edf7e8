"""Every causal language model of the installed transformers, built small with all kinds of layers of its family."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)
_MOST = 6_000_000  # parameters of what is still small

# Fields with which families describe their size. Those that a family does not have are left out.
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 2,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64, "d_model": 32, "num_layers": 2, "n_layers": 2,
    "n_heads": 4, "num_heads": 4, "num_blocks": 2, "ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64,
    "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "word_embed_proj_dim": 32, "embedding_size": 32, "rotary_dim": 4, "max_position_embeddings": 512,
    "n_positions": 512, "n_ctx": 512, "max_seq_len": 512, "max_sequence_length": 512, "ffn_hidden_size": 64,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "moe_num_experts": 4, "moe_k": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_topk": 2,
    "moe_num_shared_experts": 1, "expert_ffn_hidden_size": 16, "zero_expert_num": 1, "intermediate_size_mlp": 64,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8,
    "index_block_size": 4, "index_topk_blocks": 2, "keep_window_size": 8,
    "indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 8, "state_size": 8, "mamba_n_heads": 8,
    "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "expand": 2, "mamba_d_ssm": 64, "mamba_dt_rank": 4,
    "n_mamba_heads": 2, "mamba_headdim": 8, "num_mem_blocks": 1, "mamba_ngroups": 1, "time_step_rank": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 4, "lru_width": 32, "attention_hidden_size": 32,
    "attention_window_size": 8, "sliding_window": 4, "attention_chunk_size": 512, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0, "laurel_rank": 8, "global_head_dim": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "conv_L_cache": 3,
    "block_ff_dim": 64, "block_multiple_of": 8, "num_nextn_predict_layers": 0, "is_decoder": True,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "activation_dropout": 0.0,
    "attention_dropout_prob": 0.0, "resid_dropout": 0.0, "layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "embed_dropout": 0.0, "emb_dropout": 0.0, "classifier_dropout": 0.0,
}  # fmt: skip
# Fields of families that the sizes above do not fit, or whose kinds of layers their defaults do not show.
_OWN: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"attention_hidden_size": 64, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {
        "attention_hidden_size": 64,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 8,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"num_key_value_heads": 4, "n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 32},
    "doge": {"sliding_window": None},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"]},
}


class NotSmall(Exception):
    """A family that cannot be built small from its configuration alone, and the reason."""


def small_config(family: str, vocab_size: int = 97) -> Any:
    """Return a small configuration of a family.

    Raises:
        NotSmall: If there is none.
    """
    kind: Any = CONFIG_MAPPING[family]
    try:
        default = kind()
    except Exception as error:
        raise NotSmall(str(error)) from error
    if getattr(default, "text_config", None) is not None:
        raise NotSmall("it consists of several models")
    fields = {name: value for name, value in _SIZES.items() if _has(default, name)} | {"vocab_size": vocab_size}
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = 4
    if getattr(default, "rotary_dim", None) is None:
        fields.pop("rotary_dim", None)
    own = _OWN.get(family, {})
    for name in ("layer_types", "layers_block_type"):
        kinds = list(dict.fromkeys(getattr(default, name, None) or ()))
        if name in own:
            kinds = own[name]
        elif len(kinds) < 2 or not _has(default, name) or family in _OWN:
            continue
        fields |= {name: kinds, "num_hidden_layers": len(kinds)}
        break
    kinds = list(dict.fromkeys(getattr(default, "mlp_layer_types", None) or ()))
    if kinds:
        count = fields["num_hidden_layers"]
        fields["mlp_layer_types"] = (kinds * count)[:count]
    fields |= own
    while True:
        try:
            return kind(**fields)
        except Exception as error:
            named = re.findall(r"\w+", str(error))
            refused = next((name for name in named if name in fields and name not in own), None)
            if refused is None:
                raise NotSmall(str(error)) from error
            del fields[refused]


def _has(config: Any, name: str) -> bool:
    declared = getattr(type(config), name, None)
    if isinstance(declared, property) and declared.fset is None:
        return False
    try:
        return hasattr(config, name)
    except Exception:  # fields that differ between layers cannot be read
        return False


def small_network(family: str, attention: str | None = None, vocab_size: int = 97) -> nn.Module:
    """Return a small network of a family with random weights, in float32.

    Raises:
        NotSmall: If there is none.
    """
    how = {} if attention is None else {"attn_implementation": attention}
    config = small_config(family, vocab_size)
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config, **how).parameters())
        if size > _MOST:
            raise NotSmall(f"it has {size:,} parameters")
        torch.manual_seed(0)
        network: nn.Module = AutoModelForCausalLM.from_config(small_config(family, vocab_size), **how)
        network.float()(input_ids=torch.arange(3, 19)[None], use_cache=False)
    except NotSmall:
        raise
    except Exception as error:
        raise NotSmall(f"{type(error).__name__}: {error}") from error
    return network
