"""Models of transformers, built small from their real configurations: what they compute, load and refuse."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lit_efficient import CausalLMConfig, ConfigurationError, QuantizeBase
from lit_efficient.mechanisms.adapters.quantized import is_quantized
from lit_efficient.models.libraries import causal_lm
from lit_efficient.models.libraries.causal_lm import build, resolve
from lit_efficient.models.libraries.teachers import find_teacher
from lit_efficient.models.libraries.text_network import CaptionReading, TextEncoderConfig, TextNetwork

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    name: {"model_type": name, **SMALL} for name in ("llama", "qwen3", "mistral", "gemma2", "gemma3_text")
}
FAMILIES["gpt2"] = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97}
FAMILIES["gpt2"] |= {"eos_token_id": 1, "bos_token_id": 0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
FAMILIES["mixtral"] = {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "output_router_logits": True}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(1)
    build(CausalLMConfig(config_fields=FAMILIES["llama"])).save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


def test_a_folder_gives_its_weights_and_its_name_alone_random_ones(folder: str) -> None:
    torch.manual_seed(0)
    loaded, again = build(CausalLMConfig(folder)), build(CausalLMConfig(folder))
    random = build(CausalLMConfig(folder, random_weights=True))
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), again.state_dict().values()))
    assert random.config.hidden_size == 32
    assert not torch.equal(random.lm_head.weight, loaded.lm_head.weight)


def test_fields_replace_the_folders_and_leave_derived_ones_consistent(folder: str) -> None:
    config = resolve(CausalLMConfig(folder, config_fields={"num_hidden_layers": 1}))
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (1, 32, 97)
    gemma = CausalLMConfig(config_fields={**FAMILIES["gemma2"], "num_hidden_layers": 3})
    assert len(resolve(gemma).layer_types) == 3


def test_random_weights_take_the_datas_token_ids_unless_told(folder: str) -> None:
    from_data = {"vocab_size": 50, "eos_token_id": 7}
    fields = {key: value for key, value in FAMILIES["llama"].items() if key not in ("vocab_size", "eos_token_id")}
    config = resolve(CausalLMConfig(config_fields=fields), from_data)
    assert (config.vocab_size, config.eos_token_id) == (50, 7)
    assert resolve(CausalLMConfig(config_fields=FAMILIES["llama"]), from_data).vocab_size == 97
    assert resolve(CausalLMConfig(folder), from_data).vocab_size == 97


@pytest.mark.parametrize("avx512bf16", [False, True])
@pytest.mark.parametrize(("quantize", "bytes_each"), [("nf4", 0.6), ("int8", 1.1)])
def test_quantised_loading_keeps_the_head_and_the_function(
    folder: str, quantize: Any, bytes_each: float, avx512bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any processor: those with AVX512-BF16 would repack the weights for an evaluation."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: avx512bf16)
    ids = torch.arange(12)[None]
    plain, small = build(CausalLMConfig(folder)), build(CausalLMConfig(folder, quantize=quantize))
    layer = small.model.layers[0].mlp.up_proj.weight
    assert layer.numel() * layer.element_size() / (32 * 64) <= bytes_each
    assert type(small.lm_head) is torch.nn.Linear
    with torch.no_grad():
        expected, got = (m.eval()(ids, use_cache=False).logits for m in (plain, small))
    assert (got - expected).norm() < 0.25 * expected.norm()


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_layers_that_a_network_reads_instead_of_calling_stay_floats(quantize: Any, tmp_path: Path) -> None:
    """Mamba multiplies by ``dt_proj.weight``, its kernels take ``out_proj.weight``: codes are no weights there."""
    fields: Any = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    torch.manual_seed(0)
    plain = build(CausalLMConfig(config_fields=fields))
    plain.save_pretrained(tmp_path)
    small = build(CausalLMConfig(str(tmp_path), quantize=quantize))
    whole = copy.deepcopy(plain)
    QuantizeBase("int4").transform(whole)
    network: Any
    for network in (small, whole):
        mixer = network.backbone.layers[1].mixer
        assert type(mixer.dt_proj) is type(mixer.out_proj) is type(network.lm_head) is torch.nn.Linear
        assert is_quantized(mixer.in_proj)
        ids = torch.arange(12)[None]
        with torch.no_grad():
            expected, got = (m.eval()(ids, use_cache=False).logits for m in (plain, network))
        assert (got - expected).norm() < 0.25 * expected.norm()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "name_or_path must be"),
        ({"config_fields": {"hidden_size": 8}}, "name_or_path must be .* has no model_type, got None"),
        ({"config_fields": {"model_type": "llama"}, "quantize": "nf4"}, "add QuantizeBase"),
        ({"config_fields": {"model_type": "llama"}, "dtype": "auto"}, "dtype must be a format by name"),
        ({"name_or_path": "x", "dtype": "int8"}, "dtype must be one of float32, .*, got 'int8'"),
        ({"name_or_path": "x", "quantize": "int3"}, "quantize must be one of nf4, int8 or null, got 'int3'"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CausalLMConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config_fields": {"model_type": "lama"}}, "got 'lama'"),
        (
            {"config_fields": {**FAMILIES["llama"], "num_layers": 2}},
            "'num_layers', which is.*num_hidden_layers",
        ),
        ({"config_fields": {**FAMILIES["llama"], "hidden_size": 30}}, "do not make a llama"),
        ({"config_fields": {**FAMILIES["llama"], "num_hidden_layers": -7}}, r"fields\.num_hidden_layers must be .*-7"),
        ({"config_fields": {**FAMILIES["llama"], "rms_norm_eps": float("nan")}}, r"rms_norm_eps must be .* got nan"),
        ({"config_fields": {**FAMILIES["llama"], "intermediate_size": 0}}, r"is empty \(intermediate_size: 0"),
        ({"config_fields": {**FAMILIES["llama"], "head_dim": 0}}, r"cannot be built: .* \(head_dim: 0"),
        ({"config_fields": {"modeltype": "llama"}}, "did you mean 'model_type'"),
        ({"name_or_path": "no/such-model-anywhere"}, "has no configuration"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_what_cannot_be_built_is_said(arguments: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigurationError, match=message):
        build(CausalLMConfig(**arguments))


def test_too_many_token_ids_are_refused(folder: str) -> None:
    for spec in (CausalLMConfig(config_fields=FAMILIES["llama"], resize_vocabulary=True), CausalLMConfig(folder)):
        with pytest.raises(ConfigurationError, match=r"the data has 98 token ids, the model 97.*set resize_vocabulary"):
            build(spec, {"vocab_size": 98})


@pytest.mark.parametrize(("field", "asked"), [("num_hidden_layers", 2**30), ("vocab_size", 2**40)])
def test_a_configuration_that_asks_for_far_more_than_its_files_is_refused(folder: str, field: str, asked: int) -> None:
    """Before memory or hours are spent on it."""
    file = Path(folder, "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), field: asked}))
    for read in (lambda: build(CausalLMConfig(folder)), lambda: find_teacher(folder, [""], who="FeatureMatching")):
        with pytest.raises(ConfigurationError, match=r"asks for [\d,]{13,} (layers|parameters).*not belong"):
            read()


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", "wide"), ("hidden_act", "none"), ("num_attention_heads", 0), ("dtype", "fl/at")],
)
def test_a_value_that_makes_no_model_is_refused_with_the_folders_name(folder: str, field: str, value: Any) -> None:
    """Whatever its family raises over it."""
    file = Path(folder, "config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    encoder = TextEncoderConfig(folder, max_length=8, captions=CaptionReading("bytes"))
    for read in (
        lambda: build(CausalLMConfig(folder)),
        lambda: find_teacher(folder, [""], who="FeatureMatching"),
        lambda: TextNetwork.load(encoder),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(folder)):
            read()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])  # an own head, a tied one, logits that are capped
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_added_tokens_get_the_mean_row_and_change_nothing_else(tmp_path: Path, family: str, dtype: Any) -> None:
    torch.manual_seed(0)
    build(CausalLMConfig(config_fields=FAMILIES[family], dtype=dtype)).save_pretrained(tmp_path)
    plain = build(CausalLMConfig(str(tmp_path), dtype=dtype)).eval()
    grown = build(CausalLMConfig(str(tmp_path), dtype=dtype, resize_vocabulary=True), {"vocab_size": 100}).eval()
    tied = [m.get_input_embeddings().weight is m.get_output_embeddings().weight for m in (plain, grown)]
    assert tied[0] == tied[1] == (family != "llama")
    assert grown.config.vocab_size == 100
    for old, new in zip(
        (plain.get_input_embeddings(), plain.get_output_embeddings()),
        (grown.get_input_embeddings(), grown.get_output_embeddings()),
    ):
        assert torch.equal(new.weight[:97], old.weight)
        mean = old.weight.float().mean(0).to(old.weight.dtype)
        assert all(torch.equal(row, mean) for row in new.weight[97:])
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(grown(ids).logits[..., :97], plain(ids).logits)
        grown(ids + 88)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma4_text", "glm4_moe"])
def test_fields_that_a_model_reads_are_fields_whether_declared_or_not(kind: str) -> None:
    fields = {key: value for key, value in SMALL.items() if key != "vocab_size"} | {"model_type": kind}
    config = resolve(CausalLMConfig(config_fields=fields), {"vocab_size": 50})
    assert config.to_dict()["head_dim"] == 8
    with pytest.raises(ConfigurationError, match="'haed_dim', which is not a field"):
        resolve(CausalLMConfig(config_fields={**fields, "haed_dim": 8}))


def test_ids_of_the_data_that_a_family_does_not_have_are_left_out() -> None:
    fields: Any = {"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 1}
    config = resolve(CausalLMConfig(config_fields=fields), {"vocab_size": 50, "eos_token_id": 3, "pad_token_id": 3})
    assert (config.vocab_size, config.eos_token_id) == (50, 3)
    assert getattr(config, "pad_token_id", None) is None


def test_a_model_that_is_built_wider_than_its_files_says_so(tmp_path: Path) -> None:
    fields: Any = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    spec = CausalLMConfig(config_fields={**fields, "num_attention_heads": 1, "vocab_size": 9})
    assert causal_lm.format_advice(spec) is None
    build(spec).bfloat16().save_pretrained(tmp_path)
    named = CausalLMConfig(str(tmp_path))
    assert causal_lm.format_advice(named) == (
        f"{tmp_path} holds bfloat16, and the model is built in float32, which takes twice the memory: set dtype: auto "
        "to keep the format"
    )
    assert causal_lm.format_advice(replace(named, dtype="auto")) is None
    assert build(replace(named, dtype="auto")).dtype == torch.bfloat16


def test_a_network_that_a_checkpoint_fills_is_tied_from_the_start_and_not_drawn() -> None:
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "llama", **fields, "num_key_value_heads": 2, "vocab_size": 50, "tie_word_embeddings": True}
    state = torch.get_rng_state()
    empty = causal_lm.from_json(config)
    assert torch.equal(torch.get_rng_state(), state)
    assert empty.get_input_embeddings().weight is empty.get_output_embeddings().weight
    drawn = causal_lm.from_json(config, whole=False)
    assert not torch.equal(torch.get_rng_state(), state)
    empty.load_state_dict(drawn.state_dict())
    tokens = torch.arange(6)[None]
    assert torch.equal(empty.eval()(tokens).logits, drawn.eval()(tokens).logits)


def test_weights_of_one_variant_are_found_by_their_files(tmp_path: Path) -> None:
    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes)).half()
    theirs.save_pretrained(tmp_path, variant="fp16")
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.fp16.safetensors"]
    ours = build(CausalLMConfig(name_or_path=str(tmp_path))).state_dict()
    assert all(torch.equal(tensor.float(), ours[name].float()) for name, tensor in theirs.state_dict().items())


def test_an_infinite_field_of_a_checkpoint_is_read_as_it_was() -> None:
    config = transformers.Mamba2Config(hidden_size=16, num_heads=4, head_dim=8, num_hidden_layers=1, vocab_size=32)
    read = causal_lm.read_config(config.to_json_string(use_diff=False))
    assert read["time_step_limit"] == [0.0, float("inf")]
    with torch.device("meta"):
        assert tuple(causal_lm.from_json(read).config.time_step_limit) == tuple(config.time_step_limit)
