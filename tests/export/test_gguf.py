"""GGUF files hold the model that was trained: transformers reads equal weights, equal outputs and equal token ids."""

from __future__ import annotations

import importlib.util
import json
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_efficient import CausalLMConfig, LoRA
from lit_efficient.data.text.chat_tokenizer import load_chat_tokenizer
from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.export.check import Reference, check_gguf, outputs_of
from lit_efficient.export.gguf_model import FAMILIES, context_length, family_of, write_model
from lit_efficient.export.gguf_tokenizer import PROBE, pre_tokenizer, write_tokenizer
from lit_efficient.files.sums import check_sums
from lit_efficient.models.libraries.causal_lm import build
from tests.data.text.chat_kit import TURNS
from tests.data.text.model_tokenizers import make
from tests.export.test_fields import base_of, trained
from tests.support_cli import export

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "norm_topk_prob": True}
# A model type of transformers, its tokenizer, and fields. transformers reads no size of Qwen3's heads and experts from
# a file, and takes its defaults.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama-3.1", {}),
    "smollm2": ("llama", "smollm2", {"tie_word_embeddings": True}),
    "mistral": ("mistral", "mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", "qwen2.5", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 128}),
    "qwen3_moe": ("qwen3_moe", "qwen3", {**EXPERTS, "head_dim": 32}),
    "smollm3": ("smollm3", "smollm2", {"pad_token_id": 2}),
    "gemma2": ("gemma2", "gemma", {"query_pre_attn_scalar": 256, "head_dim": 256, "num_hidden_layers": 3}),
    "gemma3": ("gemma3_text", "gemma", {"query_pre_attn_scalar": 256, "head_dim": 256, "num_hidden_layers": 7}),
}


def model(kind: str, tokenizer: Any, **fields: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, "vocab_size": len(tokenizer) + 3, **fields})
    made: Any = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, mean=0.5)
    return made


def written(case: str, type: str, folder: Path, **fields: Any) -> tuple[Any, Any, Path]:
    """Return a model, its tokenizer and its GGUF file."""
    kind, name, own = CASES[case]
    tokenizer = make(name)
    network = model(kind, tokenizer, **own, **fields)
    tokenizer.save_pretrained(folder / "tokenizer")
    network.config.save_pretrained(folder / "tokenizer")
    keys = partial(write_tokenizer, folder=folder / "tokenizer", rows=network.config.vocab_size, stop=[])
    path = folder / "model.gguf"
    write_model(network, path, type, family_of(network.config), "toy", keys)
    return network, tokenizer, path


def logits(network: Any) -> torch.Tensor:
    ids = torch.randint(0, 250, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        result: torch.Tensor = network.eval()(input_ids=ids).logits
    return result


def read(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.mark.turns(3, always=("smollm2",))
@pytest.mark.parametrize("case", [case for case in CASES if case != "smollm3"])
def test_transformers_computes_the_same_from_the_file(case: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    network, tokenizer, path = written(case, "f32", tmp_path)
    torch.testing.assert_close(logits(read(path)), logits(network), rtol=1e-5, atol=1e-5)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    text = unicodedata.normalize("NFC", PROBE)  # which Qwen's tokenizer does to each text, and llama.cpp does not
    assert theirs(text)["input_ids"] == tokenizer(text)["input_ids"]
    if case not in ("gemma2", "gemma3"):  # whose template refuses system prompts
        whole = tokenizer.apply_chat_template(TURNS, tokenize=False)
        assert theirs.apply_chat_template(TURNS, tokenize=False) == whole
        assert theirs(whole)["input_ids"] == tokenizer(whole)["input_ids"]


def test_weights_are_rounded_once_to_the_format(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    for type in ("f16", "bf16", "q8_0"):
        (tmp_path / type).mkdir()
        network, _, path = written("llama", type, tmp_path / type, num_hidden_layers=1)
        found = read(path).state_dict()
        for name, weight in network.state_dict().items():
            if weight.ndim == 1:
                expected, allowed = weight, torch.zeros(())
            elif type == "q8_0":
                blocks = weight.unflatten(-1, (-1, 32))
                scale = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
                expected = weight
                allowed = (scale * 0.57).expand_as(blocks).flatten(-2)
            else:
                expected = weight.to({"f16": torch.float16, "bf16": torch.bfloat16}[type]).float()
                allowed = torch.zeros(())
            assert bool(((found[name] - expected).abs() <= allowed).all()), (type, name)


def test_a_trained_adapter_becomes_a_file_for_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a base with Llama 3's scaled positions, which transformers does not read from such files."""
    gguf = pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    tokenizer = base_of("llama-3.1", tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_parameters": LLAMA3}))
    checkpoint = trained(tmp_path, "llama-3.1", [LoRA(rank=2)])
    arguments = [str(checkpoint), "--format", "gguf", "--output", str(tmp_path / "out"), "--gguf_type", "f32"]
    assert export(arguments) == 0
    said = capsys.readouterr().err
    assert "f32 changes outputs by" in said
    assert "which ignores rope_parameters, attention_bias of the file and needs them in its config, token ids" in said
    path = tmp_path / "out" / "model-f32.gguf"
    check_sums(path)
    export_checkpoint(checkpoint, tmp_path / "merged", "merged", check=False)
    merged = build(CausalLMConfig(str(tmp_path / "merged")))
    again = build(CausalLMConfig(str(path), config_fields={"rope_parameters": LLAMA3}))
    torch.testing.assert_close(logits(again), logits(merged), rtol=1e-4, atol=1e-4)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert theirs(PROBE)["input_ids"] == tokenizer(PROBE)["input_ids"]
    assert load_chat_tokenizer(str(path)).chat_template == tokenizer.chat_template
    reader = gguf.GGUFReader(str(path))
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.architecture"] == "llama"
    assert keys["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    factors = next(tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight").data
    assert factors[0] == 1.0
    assert factors[-1] == 8.0


def test_a_token_of_the_base_without_a_row_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma 3's small models have none for the token of images in their tokenizer."""
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    tokenizer = base_of("qwen2.5", tmp_path / "base")
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(tmp_path / "base")
    checkpoint = trained(tmp_path, "qwen2.5", [LoRA(rank=2)])
    assert export([str(checkpoint), "--format", "gguf", "--output", str(tmp_path / "out")]) == 0
    assert "token ids of" in capsys.readouterr().err
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model-f16.gguf")
    assert len(theirs) == rows
    assert len(AutoTokenizer.from_pretrained(tmp_path / "base")) == rows + 1


def test_a_token_that_takes_the_spaces_around_it_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tokenizers import AddedToken

    tokenizer = make("smollm2")
    tokenizer.add_tokens([AddedToken("<left>", lstrip=True)])
    network = model("llama", tokenizer)
    tokenizer.save_pretrained(tmp_path)
    network.config.save_pretrained(tmp_path)
    keys = partial(write_tokenizer, folder=tmp_path, rows=network.config.vocab_size, stop=[])
    with pytest.raises(ConfigurationError, match="lstrip, rstrip or single_word, as '<left>' of the tokenizer is"):
        write_model(network, tmp_path / "a.gguf", "f16", FAMILIES["llama"], "toy", keys)


def test_the_check_finds_other_weights_and_other_ids(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    for name in ("llama", "smollm3"):
        (tmp_path / name).mkdir()
        network, tokenizer, path = written(name, "f32", tmp_path / name)
        batch = {"input_ids": torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(1))}
        outputs = outputs_of(network, batch)
        check = partial(check_gguf, path.parent, path.name, config=network.config)
        samples = {PROBE: tokenizer(PROBE)["input_ids"]}
        finding = check(Reference(batch, outputs, 1e-4), samples=samples)
        if name == "smollm3":  # transformers reads no such file
            assert "not checked: transformers does not read such files (GGUF model with architecture smollm3" in finding
            continue
        assert "token ids of 1 texts are equal" in finding
        with pytest.raises(CheckpointError, match="the file holds another model than was trained: outputs of"):
            check(Reference(batch, outputs + outputs.flip(-1), 1e-4), samples=samples)
        with pytest.raises(CheckpointError, match=r"the tokenizer in model.gguf gives other ids, first for 'Hello"):
            check(Reference(batch, outputs, 1e-4), samples={"Hello": [1]})


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("gpt2", {}, r"writes the model types llama, mistral, .*gemma3_text, and this one is gpt2"),
    "narrow": ("qwen2", {"head_dim": 32}, r"qwen2 has no head_dim=32 \(only 128\)"),
    "activation": ("llama", {"hidden_act": "gelu"}, r"llama.cpp's llama has no hidden_act='gelu' \(only 'silu'"),
    "biases": ("qwen3", {"attention_bias": True}, r"qwen3 has no attention_bias=True"),
    "scale": ("gemma2", {"query_pre_attn_scalar": 100}, r"gemma2 has no query_pre_attn_scalar=100 \(only 256\)"),
    "bound": ("gemma2", {"attn_logit_softcapping": None}, r"gemma2 has no attn_logit_softcapping=None \(only 'a num"),
    "head": ("gemma2", {"tie_word_embeddings": False}, r"gemma2 has no tie_word_embeddings=False"),
    "experts": ("qwen3_moe", {"norm_topk_prob": False}, r"qwen3moe has no norm_topk_prob=False"),
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        r"llama has no rope_type='dynamic'",
    ),
    "yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": 3.0}},
        r"llama has no rope_parameters.attention_factor=3.0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_llama_cpp_would_compute_otherwise_is_refused(case: str) -> None:
    from transformers import AutoConfig

    kind, fields, message = WRONG[case]
    with pytest.raises(ConfigurationError, match=message):
        family_of(AutoConfig.for_model(kind, **fields))


def test_a_window_that_llama_cpp_does_not_know_bounds_the_context() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("mistral", max_position_embeddings=32768, sliding_window=4096)
    assert context_length(config, FAMILIES["mistral"]) == 4096
    config = AutoConfig.for_model("qwen2", max_position_embeddings=32768, use_sliding_window=False)
    assert context_length(config, FAMILIES["qwen2"]) == 32768


def test_the_pre_tokenizer_is_named_by_what_it_does() -> None:
    from tokenizers import Regex, pre_tokenizers

    from lit_efficient.internals.hugging_face import gguf_splits
    from lit_efficient.models.libraries.gguf_file import digits_apart

    tokenizer = make("smollm2")
    split = tokenizer.backend_tokenizer
    assert pre_tokenizer(tokenizer, {}) == "gpt-2"
    split.pre_tokenizer = digits_apart()
    assert pre_tokenizer(tokenizer, {}) == "smollm"
    after = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name in ("llama-bpe", "qwen2", "tekken", "gpt-4o"):
        words = pre_tokenizers.Split(Regex(gguf_splits()[name]), behavior="isolated")
        split.pre_tokenizer = pre_tokenizers.Sequence([words, after])
        assert pre_tokenizer(tokenizer, {"normalizer": {"type": "NFC"}}) == name
    with pytest.raises(ConfigurationError, match="in a way that format gguf has no name for"):
        pre_tokenizer(tokenizer, {"normalizer": {"type": "Lowercase"}})
    split.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ConfigurationError, match="in a way that format gguf has no name for"):
        pre_tokenizer(tokenizer, {})


def test_a_weight_that_f16_cannot_hold_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    network = model("llama", make("smollm2"))
    torch.nn.init.constant_(network.model.layers[0].mlp.up_proj.weight, 1e5)
    with pytest.raises(ConfigurationError, match=r"blk.0.ffn_up.weight has weights above 65,504, .*: use bf16"):
        write_model(network, tmp_path / "a.gguf", "f16", FAMILIES["llama"], "toy", lambda writer: None)


def test_a_missing_package_and_a_wrong_argument_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base_of("llama-3.1", tmp_path / "base")
    checkpoint = str(trained(tmp_path, "llama-3.1", []))
    assert export([checkpoint, "--format", "merged", "--output", str(tmp_path / "a"), "--gguf_type", "f16"]) == 2
    assert "--gguf_type does not belong to --format merged" in capsys.readouterr().err
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "gguf" else found(name))
    with pytest.raises(ConfigurationError, match="export: format gguf needs gguf: pip install"):
        export_checkpoint(checkpoint, tmp_path / "b", "gguf")
    assert not (tmp_path / "b").exists()
