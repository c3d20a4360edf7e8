"""GGUF files for llama.cpp and programs on top of it, written from a model of transformers.

    keys:     sizes, rotary positions, the tokenizer
    tensors:  llama.cpp's names; matrices in f32, f16, bf16 or q8_0, vectors in f32

q8_0 stores blocks of 32 weights as whole numbers of 8 bits with one scale: 8.5 bits a weight. A matrix whose rows are
not divisible into such blocks is stored in f16. Llama's rotary positions turn neighbouring rows of a head in llama.cpp,
and rows that are half a head apart in transformers, so that rows are reordered. Gemma's norms are stored plus one.

Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.hugging_face_loading import empty_from_config

TYPES = ("f16", "q8_0", "bf16", "f32")
_F16_MOST = 65504.0


@dataclass(frozen=True)
class Family:
    """Architecture of llama.cpp for a model type of transformers.

    Args:
        name: Name in llama.cpp.
        pairs: Whether rotary positions turn neighbouring rows of a head.
        norm: Number that is added to the weights of norms.
        biases: Whether projections may have biases.
        activation: Activation of the feed-forward layers.
        is_tied: Whether the head is always the embeddings.
        period: Number of layers after which one attends to all tokens; None if all layers do.
    """

    name: str
    pairs: bool = False
    norm: float = 0.0
    biases: bool = False
    activation: tuple[str, ...] = ("silu", "swish")
    is_tied: bool = False
    period: int | None = None


_GELU = ("gelu_pytorch_tanh",)
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", pairs=True, biases=True),
    "mistral": Family("llama", pairs=True, biases=True),
    "smollm3": Family("smollm3", pairs=True),
    "qwen2": Family("qwen2", biases=True),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3moe"),
    "gemma": Family("gemma", norm=1.0, activation=_GELU, is_tied=True),
    "gemma2": Family("gemma2", norm=1.0, activation=_GELU, is_tied=True, period=2),
    "gemma3_text": Family("gemma3", norm=1.0, activation=_GELU, is_tied=True, period=6),
}


def family_of(config: Any) -> Family:
    """Return the architecture of llama.cpp that computes what a model of transformers computes.

    Raises:
        ConfigurationError: If there is none, naming the model types that work, or the field that llama.cpp cannot hold.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigurationError(
            f"export: format gguf writes the model types {', '.join(FAMILIES)}, and this one is {kind}: use format "
            "merged, and convert_hf_to_gguf.py of llama.cpp"
        )
    family = FAMILIES[kind]
    for name, value, expected in _fixed(config, family):
        if value not in expected:
            allowed = " or ".join(map(repr, expected))
            raise ConfigurationError(
                f"export: llama.cpp's {family.name} has no {name}={value!r} (only {allowed}): use format merged"
            )
    return family


def _fixed(config: Any, family: Family) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield fields with their value and the values that llama.cpp can compute."""
    get = lambda name: getattr(config, name, None)  # noqa: E731
    yield "hidden_act", get("hidden_activation") or config.hidden_act, family.activation
    if not family.biases:
        yield "attention_bias", bool(get("attention_bias")), (False,)
        yield "mlp_bias", bool(get("mlp_bias")), (False,)
    if family.is_tied:
        yield "tie_word_embeddings", config.tie_word_embeddings, (True,)
        yield "use_bidirectional_attention", bool(get("use_bidirectional_attention")), (False,)
    head = head_dim(config)
    if family.name == "qwen2":
        yield "head_dim", head, (config.hidden_size // config.num_attention_heads,)
    if get("query_pre_attn_scalar") is not None:
        largest = {"gemma2": 46, "gemma3": 62}[family.name]  # layers of the model of 27B, whose scale is another one
        scalar = config.hidden_size // config.num_attention_heads if config.num_hidden_layers == largest else head
        yield "query_pre_attn_scalar", config.query_pre_attn_scalar, (scalar,)
    if family.name == "gemma2":
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if get(name) is None:  # llama.cpp takes the bounds of the released models
                yield name, None, ("a number",)
    if family.name == "smollm3":
        layers = [int((i + 1) % 4 != 0) for i in range(config.num_hidden_layers)]
        yield "no_rope_layers", config.no_rope_layers, (layers,)
        yield "use_sliding_window", bool(get("use_sliding_window")), (False,)
    if family.name == "qwen3moe":
        yield "norm_topk_prob", config.norm_topk_prob, (True,)
        yield "decoder_sparse_step", config.decoder_sparse_step, (1,)
        yield "mlp_only_layers", config.mlp_only_layers, ([],)
    for rope in _ropes(config).values():
        allowed = ("default", "linear", "yarn", *(["llama3"] if family.pairs else []))
        yield "rope_type", rope.get("rope_type", "default"), allowed
        yield "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,)
        if rope.get("rope_type") == "yarn":
            for name in ("attention_factor", "mscale", "mscale_all_dim"):
                yield f"rope_parameters.{name}", rope.get(name), (None,)
            yield "rope_parameters.truncate", rope.get("truncate", True), (True,)
    kinds = get("layer_types")
    if family.period is not None and kinds is not None:
        pattern = ["sliding_attention"] * (family.period - 1) + ["full_attention"]
        expected = [pattern[i % family.period] for i in range(config.num_hidden_layers)]
        yield "layer_types", kinds, (expected,)
    if family.name == "gemma3" and "sliding_attention" in _ropes(config):
        yield "rope_type of sliding layers", _ropes(config)["sliding_attention"].get("rope_type"), ("default",)


def head_dim(config: Any) -> int:
    """Return the size of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _ropes(config: Any) -> dict[str, Any]:
    """Return descriptions of rotary positions by the kind of layer."""
    rope = config.rope_parameters
    if "full_attention" in rope:
        return rope
    return {"full_attention": rope}


def context_length(config: Any, family: Family) -> int:
    """Return the number of tokens for which llama.cpp computes what transformers computes.

    llama.cpp knows sliding windows for Gemma alone. A shorter text never leaves the window.
    """
    most = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None)
    if family.period is not None or window is None or not getattr(config, "use_sliding_window", True):
        return most
    return min(most, int(window))


def write_keys(writer: Any, config: Any, family: Family) -> None:
    """Write the sizes and the rotary positions of a model."""
    import gguf

    writer.add_context_length(context_length(config, family))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    ropes = _ropes(config)
    rope = ropes["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(
            rope.get("original_max_position_embeddings") or config.max_position_embeddings
        )
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                getattr(writer, f"add_rope_scaling_yarn_{name}")(rope[name])
    if family.period is not None:
        writer.add_sliding_window(config.sliding_window)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            getattr(writer, f"add_{name}")(getattr(config, name))
    if family.name == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def tensors(model: Any, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model in float32, with the names and the order of rows of llama.cpp.

    Raises:
        ConfigurationError: If llama.cpp's architecture has no such tensor.
    """
    import gguf

    config = model.config
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == family.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    if _ropes(config)["full_attention"].get("rope_type") == "llama3":
        yield "rope_freqs.weight", _frequency_factors(config)
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for name, part in _split_experts(key, tensor):
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise ConfigurationError(f"export: llama.cpp's {family.name} has no tensor for {key!r}")
            stored = part.float()
            count = next((number for of, number in heads.items() if of in name), None)
            if family.pairs and count is not None:
                stored = stored.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
            if name.endswith("norm.weight"):
                stored = stored + family.norm
            yield found, stored.contiguous()


def _split_experts(key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the gate and the projection of stacked experts apart, and other tensors as they are."""
    if key.endswith(".experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        stem = key.removesuffix("gate_up_proj")
        yield f"{stem}gate_proj.weight", gate
        yield f"{stem}up_proj.weight", up
    elif key.endswith(".experts.down_proj"):
        yield f"{key}.weight", tensor
    else:
        yield key, tensor


def _frequency_factors(config: Any) -> Tensor:
    """Return the factors by which Llama 3 divides its rotary frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = head_dim(config)
    base = _ropes(config)["full_attention"]["rope_theta"]
    plain = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    factors: Tensor = plain / scaled
    return factors


def stored_type(name: str, tensor: Tensor, kind: str) -> str:
    """Return the number format of a tensor in a file of the format ``kind``."""
    if tensor.ndim == 1 or name.endswith(("_norm.weight", "ffn_gate_inp.weight")):
        return "f32"
    if kind == "q8_0" and tensor.shape[-1] % 32:
        return "f16"
    return kind


def write_model(
    model: Any, path: Path, kind: str, family: Family, name: str, write_tokenizer: Callable[[Any], object]
) -> None:
    """Write a model as a GGUF file.

    Args:
        model: Causal language model of transformers with float weights.
        path: The file.
        kind: One of :data:`TYPES`.
        family: Result of :func:`family_of`.
        name: Name of the model for people.
        write_tokenizer: Function that writes the keys of the tokenizer.

    Raises:
        ConfigurationError: If a weight is too large for f16.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), family.name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(_file_type(kind))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_keys(writer, model.config, family)
    write_tokenizer(writer)
    for key, tensor in tensors(model, family):
        stored = stored_type(key, tensor, kind)
        if stored == "f16" and tensor.abs().max() > _F16_MOST:
            raise ConfigurationError(f"export: {key} has weights above {_F16_MOST:,.0f}, the largest f16: use bf16")
        format = gguf.GGMLQuantizationType[stored.upper()]
        writer.add_tensor(key, gguf.quants.quantize(tensor.numpy(), format), raw_dtype=format)
    total, shared, experts, count = writer.get_total_parameter_count()
    writer.add_size_label(gguf.size_label(total, shared, experts, count))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _file_type(kind: str) -> int:
    import gguf

    name = "ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"
    return int(gguf.LlamaFileType[name])


@torch.no_grad()
def rounded(model: Any, kind: str) -> Any:
    """Return a copy of a model in float32 and evaluation mode, with weights that are rounded as in its GGUF file.

    Rows are rounded alone, so that their order does not matter.
    """
    import gguf

    made = empty_from_config(type(model), model.config, dtype=torch.float32)
    made.load_state_dict(model.state_dict())
    for name, parameter in made.named_parameters():
        is_exact = "norm" in name or name.endswith("mlp.gate.weight")
        stored = "f32" if is_exact else stored_type(name, parameter, kind)
        if stored != "f32":
            format = gguf.GGMLQuantizationType[stored.upper()]
            codes = gguf.quants.quantize(parameter.numpy(), format)
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(codes, format)))
    return made.eval()
