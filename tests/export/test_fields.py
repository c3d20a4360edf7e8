"""Each field of each file of an exported folder is the base's, unless training or the user meant to change it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lit_efficient import CausalLMConfig, LanguageChat, LanguageData, LanguageModeling, LoRA
from lit_efficient.data.text.chat_tokenizer import (
    declare_class,
    fingerprint,
    load_chat_tokenizer,
    pack_tokenizer,
    unpack_tokenizer,
)
from lit_efficient.data.text.chat_tokenizer import save_tokenizer as write
from lit_efficient.errors import ConfigurationError
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.export.padding import pad_tokenizer
from lit_efficient.models.libraries.causal_lm import build, build_empty
from tests.data.text.model_tokenizers import FAMILIES, make
from tests.mechanisms.adapters.decoders import SIZES, Language
from tests.support import QUIET

GENERATION: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "max_new_tokens": 64,
}
# Model of a tokenizer, with fields that are not the defaults of its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5": ("Qwen2", {"use_sliding_window": False, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    "llama-3.1": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "attention_bias": True}),
    "gemma": ("Gemma2", {"final_logit_softcapping": 20.0, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 10.0}),
    "mistral": ("Mistral", {"sliding_window": 32, "initializer_range": 0.05, "use_cache": False}),
    "phi-3": ("Phi3", {"resid_pdrop": 0.0, "partial_rotary_factor": 0.5}),
    "olmo-2": ("Olmo2", {"attention_dropout": 0.0}),
    "granite": ("Granite", {"embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    "command-r": ("Cohere", {"logit_scale": 0.1, "use_qk_norm": True}),
    "smollm2": ("GPT2", {"resid_pdrop": 0.0, "activation_function": "gelu"}),
}
QUICK = ("qwen2.5", "llama-3.1")


def fields(path: Path) -> Any:
    """Return the content of a file: JSON, or a text."""
    text = path.read_text("utf-8")
    return json.loads(text) if path.suffix == ".json" else text


def differences(base: Path, folder: Path, names: list[str]) -> dict[str, Any]:
    """Return the fields of files that differ, with both values."""
    found = {}
    for name in names:
        ours = fields(folder / name)
        theirs = fields(base / name)
        if not isinstance(ours, dict):
            ours, theirs = {"text": ours}, {"text": theirs}
        for key in {*ours, *theirs}:
            if ours.get(key) != theirs.get(key):
                found[f"{name}: {key}"] = theirs.get(key), ours.get(key)
    return found


def tokenizer_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "token" in path.name or path.suffix == ".jinja")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tokenizer_leaves_a_checkpoint_as_it_was(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make(name).save_pretrained(tmp_path / "base")
    loaded = load_chat_tokenizer(str(tmp_path / "base"))
    packed = pack_tokenizer(loaded, [1])
    torch.save(packed, tmp_path / "packed")
    packed = torch.load(tmp_path / "packed", weights_only=True)
    write(packed, tmp_path / "out")
    assert differences(tmp_path / "base", tmp_path / "out", tokenizer_files(tmp_path / "base")) == {}
    assert tokenizer_files(tmp_path / "out") == tokenizer_files(tmp_path / "base")
    again = unpack_tokenizer(packed)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "base")
    for other in (again, AutoTokenizer.from_pretrained(tmp_path / "out")):
        assert type(other) is type(theirs)
        assert other.init_kwargs.keys() == theirs.init_kwargs.keys()
        assert other("What is <tool> ä?")["input_ids"] == theirs("What is <tool> ä?")["input_ids"]
        assert other.all_special_ids == theirs.all_special_ids
        assert other.padding_side == theirs.padding_side
    assert fingerprint(again) == fingerprint(theirs)


def test_a_setting_that_changes_no_id_is_another_tokenizer() -> None:
    tokenizer = make("qwen2.5")
    before = fingerprint(tokenizer)
    tokenizer.padding_side = "right"
    assert fingerprint(tokenizer) != before


def test_a_checkpoint_cannot_write_outside_of_the_folder(tmp_path: Path) -> None:
    packed = pack_tokenizer(make("qwen2.5"))
    packed["files"]["../outside.txt"] = "x"
    with pytest.raises(ConfigurationError, match="leads out of its folder"):
        write(packed, tmp_path / "out")
    assert not (tmp_path / "outside.txt").exists()


def base_of(name: str, folder: Path, eos: Any = None) -> Any:
    """Write a base model with its tokenizer, as transformers does, and return the tokenizer."""
    import transformers

    kind, changed = MODELS[name]
    tokenizer = make(name)
    tokenizer.save_pretrained(folder)
    sizes = SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    sizes |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    sizes["pad_token_id"] = tokenizer.pad_token_id
    if kind == "GPT2":
        renamed = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 512}
        sizes = {key: value for key, value in sizes.items() if key.endswith(("token_id", "vocab_size"))} | renamed
    config = getattr(transformers, f"{kind}Config")(**sizes, **changed, origin_of_the_data="a field of its own")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    own = [tokenizer.eos_token_id, 7] if eos is None else eos
    model.generation_config = transformers.GenerationConfig(**GENERATION, eos_token_id=own, pad_token_id=3)
    model.save_pretrained(folder)
    return tokenizer


def trained(folder: Path, name: str, callbacks: list[Any]) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Yes."}]} for i in range(9)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = str(folder / "base")
    data = LanguageData(
        train=str(folder / "rows.jsonl"),
        tokenizer=base,
        chat=LanguageChat(untrained_end="train"),
        max_length=128,
        batch_size=1,
        pack=False,
        cache_dir=str(folder / "cache"),
    )
    run = Trainer(callbacks=callbacks, **{**QUIET, "max_steps": 1})
    run.fit(LanguageModeling(CausalLMConfig(base), warmup_steps=1), datamodule=data)
    run.save_checkpoint(folder / "run.ckpt")
    return folder / "run.ckpt"


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.nightly) for n in MODELS if n not in QUICK)]
)
def test_an_export_is_the_base_with_other_weights(name: str, lora: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = base_of(name, tmp_path / "base")
    checkpoint = trained(tmp_path, name, [LoRA(rank=2)] if lora else [])
    files = tokenizer_files(tmp_path / "base")
    export_checkpoint(checkpoint, tmp_path / "merged", "merged", check=False)
    found = differences(tmp_path / "base", tmp_path / "merged", [*files, "config.json", "generation_config.json"])
    # The template may end a turn with a token at which the base does not stop.
    stops = found.pop("generation_config.json: eos_token_id", None)
    assert found == {}
    if stops is not None:
        assert stops[1][: len(stops[0])] == stops[0]
    assert tokenizer.eos_token_id in GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id
    if lora:
        export_checkpoint(checkpoint, tmp_path / "peft", "peft", check=False)
        assert differences(tmp_path / "base", tmp_path / "peft", files) == {}
        text = "What is <tool>  ä?"
        ours, theirs = (AutoTokenizer.from_pretrained(tmp_path / name)(text) for name in ("peft", "base"))
        assert ours["input_ids"] == theirs["input_ids"]
        named = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
        assert named["base_model_name_or_path"] == str(tmp_path / "base")
        assert named["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize("declared", ["Qwen2Tokenizer", "OwnTokenizer", "BertJapaneseTokenizer", "GemmaTokenizer"])
@pytest.mark.parametrize("with_config", [False, True], ids=["peft", "merged"])
def test_the_class_of_the_base_is_declared_only_where_it_loads_the_same(
    declared: str, with_config: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = make("qwen2.5")
    for name in ("base", "out"):
        write(pack_tokenizer(tokenizer), tmp_path / name)
        if with_config:
            (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    path = tmp_path / "base" / "tokenizer_config.json"
    path.write_text(json.dumps(fields(path) | {"tokenizer_class": declared}))
    out = tmp_path / "out" / "tokenizer_config.json"
    out.write_text(json.dumps(fields(out) | {"tokenizer_class": "TokenizersBackend"}))
    declare_class(tmp_path / "out", str(tmp_path / "base"))
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("What is <tool> ä?")["input_ids"]
    assert ids == tokenizer("What is <tool> ä?")["input_ids"]


def test_another_padding_token_changes_no_other_setting(tmp_path: Path) -> None:
    """As of an exported reward model, which pads with a token that ends no text, on the right."""
    tokenizer = make("smollm2")
    for name in ("base", "out"):
        write(pack_tokenizer(tokenizer), tmp_path / name)
    pad_tokenizer(tmp_path / "out", tokenizer.bos_token_id)
    found = differences(tmp_path / "base", tmp_path / "out", tokenizer_files(tmp_path / "base"))
    assert found.keys() <= {"tokenizer_config.json: pad_token", "tokenizer_config.json: padding_side"}
    assert found["tokenizer_config.json: pad_token"] == (tokenizer.pad_token, tokenizer.bos_token)


def test_a_model_whose_weights_are_read_later_has_the_settings_of_its_base(tmp_path: Path) -> None:
    """As with FSDP, where each process reads its shards."""
    base_of("llama-3.1", tmp_path / "base")
    spec = CausalLMConfig(str(tmp_path / "base"))
    waiting = build_empty(spec)
    assert waiting is not None
    assert waiting.generation_config.to_dict() == build(spec).generation_config.to_dict()
    assert waiting.generation_config.temperature == GENERATION["temperature"]


def test_settings_that_transformers_would_not_write_are_kept(tmp_path: Path) -> None:
    """Older bases set a temperature without sampling, which transformers loads and refuses to save."""
    base_of("llama-3.1", tmp_path / "base")
    path = tmp_path / "base" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": False}))
    checkpoint = trained(tmp_path, "llama-3.1", [])
    export_checkpoint(checkpoint, tmp_path / "merged", "merged", check=False)
    found = differences(tmp_path / "base", tmp_path / "merged", ["generation_config.json"])
    assert found.keys() <= {"generation_config.json: do_sample"}  # False is the default, which is not written


@pytest.mark.parametrize("save_base", [False, True])
def test_a_model_in_a_module_of_the_user_keeps_its_settings(save_base: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base_of("llama-3.1", tmp_path / "base", eos=5)
    module = Language(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    run = Trainer(callbacks=[LoRA(rank=2, save_base=save_base)], **{**QUIET, "max_steps": 1})
    run.fit(module)
    run.save_checkpoint(tmp_path / "run.ckpt")
    export_checkpoint(tmp_path / "run.ckpt", tmp_path / "merged", "merged", check=False)
    assert differences(tmp_path / "base", tmp_path / "merged", ["config.json", "generation_config.json"]) == {}
