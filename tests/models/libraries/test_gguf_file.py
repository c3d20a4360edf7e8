"""A GGUF file in the place of a model's folder: the weights, the configuration and the tokenizer that it holds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lit_efficient import CausalLMConfig, LanguageModeling, LoRA
from lit_efficient.data.text.chat_tokenizer import load_chat_tokenizer
from lit_efficient.errors import ConfigurationError
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.models.libraries.causal_lm import build
from lit_efficient.models.libraries.gguf_file import digits_apart
from lit_efficient.tasks.loading import load_hugging_face
from tests.data.text.chat_kit import TURNS
from tests.data.text.model_tokenizers import make
from tests.support import QUIET

YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 16}
TEXT = "In 1984, It's 12 degrees  ä 🦙\n<think> done"


def model(**fields: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": len(make("smollm2")), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, **fields)
    made = LlamaForCausalLM(config).eval()
    for name, bias in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(bias)
    return made


def gemma(**fields: Any) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": len(make("smollm2")), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12, "query_pre_attn_scalar": 12}
    fields = heads | {"sliding_window": 16, "max_position_embeddings": 64} | fields
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **fields)).eval()


def write(path: Path, network: Any, **keys: Any) -> str:
    """Write a network as llama.cpp would, in float32, with the tokenizer of SmolLM2. ``None`` leaves a tensor out."""
    import gguf

    config = network.config
    kind = "gemma3" if config.model_type == "gemma3_text" else "llama"
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_name("another name")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    tokenizer = make("smollm2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(keys.get("pre", "smollm"))
    writer.add_token_list([tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))])
    added = tokenizer.added_tokens_decoder
    writer.add_token_types([1 if i not in added else 3 if added[i].special else 4 for i in range(len(tokenizer))])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    arch = gguf.MODEL_ARCH.GEMMA3 if kind == "gemma3" else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in network.state_dict().items():
        if name == keys.get("without") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if kind == "gemma3":
            stored = tensor + 1 if name.endswith("norm.weight") else tensor
        elif ".q_proj." in name or ".k_proj." in name:  # halves of a head's rows become even and odd rows
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            stored = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        else:
            stored = tensor
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), stored.contiguous().numpy())
    if "extra" in keys:
        writer.add_tensor(keys["extra"], torch.ones(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def logits(network: Any, rows: int = 40) -> torch.Tensor:
    ids = torch.randint(0, 250, (2, rows), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result: torch.Tensor = network.eval()(input_ids=ids).logits
    return result


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "heads": {"head_dim": 12},
    "biases": {"attention_bias": True},
    "yarn": {"rope_parameters": YARN},
}


@pytest.mark.parametrize("case", CASES)
def test_the_model_computes_what_the_file_holds(case: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    network = model(**CASES[case])
    path = write(tmp_path / "model.gguf", network)
    built: Any = build(CausalLMConfig(path))
    assert built.training
    torch.testing.assert_close(logits(built), logits(network), rtol=1e-5, atol=1e-5)
    assert built.config.tie_word_embeddings == network.config.tie_word_embeddings
    assert built.config.name_or_path == path
    built.save_pretrained(tmp_path / "saved")  # which transformers refuses for its own model of a GGUF file


LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    "fields", [{}, {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}}], ids=["plain", "scaled"]
)
def test_layers_with_a_window_keep_their_positions(fields: dict[str, Any], tmp_path: Path) -> None:
    """Gemma 3 scales the positions of layers without a window only, and queries by the size of heads."""
    pytest.importorskip("gguf")
    network = gemma(**fields)
    built: Any = build(CausalLMConfig(write(tmp_path / "model.gguf", network)))
    torch.testing.assert_close(logits(built), logits(network), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("extra", ["blk.0.attn_q_norm.weight", "blk.1.attn_output.bias", "output.bias"])
def test_weights_without_a_place_in_the_model_are_named(extra: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = write(tmp_path / "model.gguf", model(), extra=extra)
    with pytest.warns(UserWarning, match=f"1 weights of this file are not used.*'{extra}'"):
        build(CausalLMConfig(path))


def test_the_tokenizer_gives_the_ids_of_the_original(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = write(tmp_path / "model.gguf", model())
    original = make("smollm2")
    original.backend_tokenizer.pre_tokenizer = digits_apart()  # as llama.cpp splits for the pre-tokenizer "smollm"
    tokenizer = load_chat_tokenizer(path)
    assert tokenizer(TEXT)["input_ids"] == original(TEXT)["input_ids"]
    assert tokenizer.apply_chat_template(TURNS, tokenize=False) == original.apply_chat_template(TURNS, tokenize=False)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (original.bos_token, original.eos_token)
    assert tokenizer.model_max_length == 64


def test_an_unknown_way_of_splitting_texts_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = write(tmp_path / "model.gguf", model(), pre="bloom")
    with pytest.warns(UserWarning, match="does not know the pre-tokenizer 'bloom'"):
        load_chat_tokenizer(path)


def test_what_transformers_would_ignore_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = write(tmp_path / "model.gguf", model(), extra="rope_freqs.weight")
    with pytest.raises(ConfigurationError, match=r"has scaled rotary positions \(rope_freqs.weight\)"):
        build(CausalLMConfig(path))
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    built: Any = build(CausalLMConfig(path, config_fields={"rope_parameters": rope}))
    torch.testing.assert_close(logits(built), logits(model(rope_parameters=rope)), rtol=1e-5, atol=1e-5)


def test_a_missing_weight_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = write(tmp_path / "model.gguf", model(), without="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ConfigurationError, match=r"lacks 1 weights of LlamaForCausalLM, first 'model.layers.1.mlp.up"):
        build(CausalLMConfig(path))


@pytest.mark.turns(6, family="slow")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
def test_adapters_of_such_a_base_are_exported(tmp_path: Path) -> None:
    """The base is named by the checkpoint, or given again as a GGUF file."""
    pytest.importorskip("gguf")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = model()
    path = write(tmp_path / "model.gguf", base)
    module = LanguageModeling(CausalLMConfig(path), learning_rate=0.1, warmup_steps=1)
    module.tokenizer_state = load_hugging_face(CausalLMConfig(path)).tokenizer_state
    ids = torch.randint(3, 30, (2, 8), generator=torch.Generator().manual_seed(0))
    rows = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ids], 2)
    run = Trainer(callbacks=[LoRA(rank=2)], **{**QUIET, "max_steps": 2})
    run.fit(module, rows, rows)
    run.save_checkpoint(tmp_path / "run.ckpt", weights_only=True)
    expected = logits(module.network)
    assert not torch.allclose(expected, logits(base), atol=1e-2)
    for format in ("merged", "peft"):
        export_checkpoint(tmp_path / "run.ckpt", tmp_path / format, format, base=path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    ours = AutoTokenizer.from_pretrained(tmp_path / "merged")(TEXT)["input_ids"]
    assert ours == module.tokenizer(TEXT)["input_ids"]
    adapted = PeftModel.from_pretrained(base, tmp_path / "peft")
    torch.testing.assert_close(logits(adapted), expected, rtol=1e-4, atol=1e-4)


def test_a_missing_file_or_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no file nowhere.gguf"):
        build(CausalLMConfig("nowhere.gguf"))
    with pytest.raises(ConfigurationError, match="quantize must be null for a GGUF file; add QuantizeBase"):
        CausalLMConfig("nowhere.gguf", quantize="int8")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "gguf" else found(name))
    for read in (lambda name: build(CausalLMConfig(name)), load_chat_tokenizer):
        with pytest.raises(ConfigurationError, match=r"model.gguf needs gguf: pip install"):
            read(str(tmp_path / "model.gguf"))
