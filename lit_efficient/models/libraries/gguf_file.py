"""GGUF files of llama.cpp in the place of a model's folder. transformers turns the weights into floats.

transformers does not read all that a file says. `stored_config` adds the size of heads, biases, bounds of logits, the
scale of Gemma's queries and two kinds of scaled rotary positions, and refuses a file whose further scaling would be
ignored. `read_model` warns about weights that the model has no place for. `read_tokenizer` adds a way of splitting
texts before tokens are merged, and warns about ways that transformers replaces by that of GPT-2.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lit_efficient.errors import ConfigurationError, check_installed
from lit_efficient.files.sums import check_sums
from lit_efficient.internals.hugging_face import bars_on_terminals, gguf_header, gguf_places, gguf_splits

# Pre-tokenizers that split off each digit and then split as GPT-2 does.
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_AS_GPT2 = ("default", "gpt-2", "gpt2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "roberta-bpe", "trillion")
# Numbers of blocks of the models whose queries llama.cpp scales by hidden size / heads, not by the size of heads (27B).
_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# Tensors with a factor for each rotary frequency.
_SCALED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def is_gguf(name: object) -> bool:
    """Return whether a model's name is that of a GGUF file."""
    return isinstance(name, str) and name.lower().endswith(".gguf")


def located(name: str, who: str = "CausalLMConfig") -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` reads a model by name, from a folder or from a GGUF file.

    Raises:
        ConfigurationError: If there is no such file, or a package to read it is missing.
    """
    if not is_gguf(name):
        return {"pretrained_model_name_or_path": name}
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigurationError(f"{who}: there is no file {name} (looked for {path.absolute()})")
    check_installed(f"{who}: {path.name}", "gguf", "accelerate")
    check_sums(path)
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def stored_config(name: str, fields: Iterable[str] = ()) -> dict[str, Any]:
    """Return the configuration in a GGUF file as transformers' fields, with ``model_type``.

    Args:
        name: The file.
        fields: Fields that the caller replaces.

    Raises:
        ConfigurationError: If the model's rotary positions are scaled in a way that no field is known for.
        OSError, ValueError: If the file cannot be read.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    stored, _ = PretrainedConfig.get_config_dict(**located(name))
    stored = {key: value for key, value in stored.items() if not key.startswith("_")}  # drops the name of another model
    header, tensors = gguf_header(name)
    kind = CONFIG_MAPPING[stored["model_type"]]
    known = getattr(kind, "__dataclass_fields__", {})
    found = _from_header(header, tensors)
    usual = getattr(kind(), "rope_parameters", None) or {}
    if "rope_parameters" in found and "full_attention" in usual:  # layers with a window have positions of their own
        found["rope_parameters"] = usual | {"full_attention": found["rope_parameters"]}
    scaled = [tensor for tensor in tensors if tensor in _SCALED]
    if scaled and not {"rope_parameters", "rope_scaling"} & {*fields}:
        raise ConfigurationError(
            f"CausalLMConfig: name_or_path: {name} has scaled rotary positions ({scaled[0]}), which transformers does "
            "not read from it: set config_fields.rope_parameters as in the config.json of the original model"
        )
    return stored | {key: value for key, value in found.items() if key in known}


def _from_header(header: Mapping[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that transformers does not read."""
    kind = header["general.architecture"]
    found: dict[str, Any] = {
        "attention_bias": any(name.endswith("attn_q.bias") for name in tensors),
        "mlp_bias": any(name.endswith("ffn_down.bias") for name in tensors),
    }
    if f"{kind}.attention.key_length" in header:
        found["head_dim"] = header[f"{kind}.attention.key_length"]
    if f"{kind}.expert_feed_forward_length" in header:
        found["moe_intermediate_size"] = header[f"{kind}.expert_feed_forward_length"]
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if f"{kind}.{name}" in header:
            found[name] = header[f"{kind}.{name}"]
    if kind in _BY_WIDTH and "head_dim" in found:
        found["query_pre_attn_scalar"] = found["head_dim"]
        if header[f"{kind}.block_count"] == _BY_WIDTH[kind]:
            found["query_pre_attn_scalar"] = (
                header[f"{kind}.embedding_length"] // header[f"{kind}.attention.head_count"]
            )
    scaling = f"{kind}.rope.scaling"
    if header.get(f"{scaling}.type") in ("linear", "yarn"):
        rope = {"rope_type": header[f"{scaling}.type"], "factor": header[f"{scaling}.factor"]}
        rope["rope_theta"] = header[f"{kind}.rope.freq_base"]
        names = {"original_context_length": "original_max_position_embeddings", "attn_factor": "attention_factor"}
        names |= {"yarn_attn_factor": "attention_factor"}
        names |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        rope |= {field: header[f"{scaling}.{key}"] for key, field in names.items() if f"{scaling}.{key}" in header}
        found["rope_parameters"] = rope
    return found


def read_model(kind: Any, name: str, **options: object) -> Any:
    """Call ``kind.from_pretrained`` for a name, a folder or a GGUF file. A file's model becomes an ordinary one.

    Raises:
        ConfigurationError: If a GGUF file lacks weights of the model.
    """
    from transformers import AutoConfig

    with bars_on_terminals():
        if not is_gguf(name):
            return kind.from_pretrained(name, **options)
        if "config" not in options:
            options["config"] = AutoConfig.for_model(**stored_config(name))
        model, info = kind.from_pretrained(**located(name), **options, output_loading_info=True)
    if info["missing_keys"]:
        lost = sorted(info["missing_keys"])
        raise ConfigurationError(f"{name} lacks {len(lost)} weights of {type(model).__name__}, first {lost[0]!r}")
    _warn_of_unread(model, name)
    model.hf_quantizer.remove_quantization_config(model)  # the weights are floats, and are saved as such
    model.config.name_or_path = model.name_or_path = name
    return model


def _warn_of_unread(model: Any, name: str) -> None:
    """Warn about weights of a file that transformers leaves out, because the model has no place for them."""
    header, tensors = gguf_header(name)
    places = gguf_places(model, header["general.architecture"])
    # The experts of a layer are one tensor in the file and several in the model. Rotary frequencies are no weights.
    elsewhere = ("_exps.", "attn_rot_embd.")
    unread = [one for one in tensors if one not in places and one not in _SCALED]
    unread = [one for one in unread if not any(part in one for part in elsewhere)]
    if places and unread:
        warnings.warn(
            f"{name}: {len(unread)} weights of this file are not used, because {type(model).__name__} of transformers "
            f"has no place for them (first {unread[0]!r}), so the model may compute other logits than llama.cpp",
            stacklevel=2,
        )


def read_tokenizer(name: str, **options: object) -> Any:
    """Return the tokenizer of a name, a folder or a GGUF file of transformers.

    Raises:
        OSError, ValueError, ImportError: If the tokenizer cannot be read.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(**located(name, "tokenizer"), trust_remote_code=False, **options)
    if is_gguf(name):
        header, _ = gguf_header(name)
        tokenizer.name_or_path = name
        _split(tokenizer, header, name)
        length = header.get(f"{header['general.architecture']}.context_length")
        if length:
            tokenizer.model_max_length = length
    return tokenizer


def _split(tokenizer: Any, header: Mapping[str, Any], name: str) -> None:
    """Let a tokenizer split texts as its file says, or warn."""
    kind = header.get("tokenizer.ggml.pre", "default")
    if header.get("tokenizer.ggml.model") != "gpt2" or kind in (*_AS_GPT2, *gguf_splits()):
        return
    if kind not in DIGITS:
        warnings.warn(
            f"{name}: transformers does not know the pre-tokenizer {kind!r} of this file and splits texts as GPT-2 "
            "does, so token ids may differ from those of the original tokenizer. Set data.tokenizer to its folder",
            stacklevel=2,
        )
        return
    tokenizer.backend_tokenizer.pre_tokenizer = digits_apart()


def digits_apart() -> Any:
    """Return a pre-tokenizer of the tokenizers library that makes each digit a word, and else splits as GPT-2 does."""
    from tokenizers import pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
