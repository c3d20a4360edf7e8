"""Reward models leave as what transformers and peft load for sequence classification, with equal scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lit_efficient import CausalLMConfig, LoRA, PreferenceData, PreferenceRows, RewardModeling
from lit_efficient.data.text.chat_tokenizer import train_chat_tokenizer
from tests.support import QUIET
from tests.support_cli import export

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "qwen3": {**SIZES, "head_dim": 8},
    "gpt_neox": SIZES,
    "gemma": {**SIZES, "head_dim": 8, "tie_word_embeddings": True},
    "qwen2": SIZES,
    "mistral": SIZES,
    "phi": SIZES,
    "phi3": SIZES,
    "gemma2": {**SIZES, "head_dim": 8, "tie_word_embeddings": True},
    "gemma3_text": {**SIZES, "head_dim": 8, "tie_word_embeddings": True},
    "opt": {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "max_position_embeddings": 64, "word_embed_proj_dim": 16},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gptj": {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4, "n_positions": 64},
    "mixtral": {**SIZES, "num_local_experts": 2},
    "qwen3_moe": {**SIZES, "head_dim": 8, "num_experts": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 1},
    "stablelm": SIZES,
    "starcoder2": SIZES,
    "smollm3": {**SIZES, "pad_token_id": 0},
}  # fmt: skip
COLUMNS_FROM_THE_LEFT = ("gpt2", "opt")  # families whose positions transformers counts without the mask


def trained(folder: Path, family: str, adapters: bool, texts: bool) -> RewardModeling:
    """Train on rows of a file with the base's tokenizer, which pads with the token that ends a text."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = train_chat_tokenizer([f"def f{i}(x): return x + {i}" for i in range(80)], 300)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**ends, "vocab_size": len(tokenizer), **FAMILIES[family]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rows = [{"prompt": f"{i} ?", "chosen": "yes " * (i % 3 + 1), "rejected": "no"} for i in range(12)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = PreferenceData(
        train=str(folder / "pairs.jsonl"), tokenizer=str(folder / "base"), max_length=64, batch_size=4,
        val_fraction=0.2, cache_dir=str(folder / "cache"), rows=PreferenceRows(strings_as="text" if texts else "turns"),
    )  # fmt: skip
    task = RewardModeling(CausalLMConfig(str(folder / "base")), learning_rate=0.05, warmup_steps=0)
    callbacks: Any = [LoRA(rank=2, modules_to_save=["score"])] if adapters else []
    run = Trainer(callbacks=callbacks, **{**QUIET, "max_steps": 6})
    run.fit(task, datamodule=data)
    run.save_checkpoint(folder / "run.ckpt")
    return task.eval()


@pytest.mark.turns(12, always=("llama-True",))
@pytest.mark.filterwarnings("ignore")  # of transformers, about the head that a base lacks
@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers_for_padding_on_either_side(
    family: str, adapters: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    task = trained(tmp_path, family, adapters, texts=family == "gpt2")
    formats = ["merged", "safetensors", *(["peft"] if adapters else [])]
    for format in formats:
        arguments = [str(tmp_path / "run.ckpt"), "--format", format, "--output", str(tmp_path / format)]
        assert export(arguments) == 0
        said = capsys.readouterr().err
        assert "not checked" not in said
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.padding_side == "right"
    ends = [f"1 ? {'yes ' * n}{tokenizer.eos_token}" for n in (1, 3, 7)]  # as the texts that were trained
    models = [AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")]
    if adapters:
        models.append(AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "peft", num_labels=1))
        models[1].config.pad_token_id = models[0].config.pad_token_id
        assert AutoTokenizer.from_pretrained(tmp_path / "peft").pad_token_id == tokenizer.pad_token_id
    alone = torch.cat([task(tokenizer(text, return_tensors="pt").input_ids) for text in ends])
    assert alone.std() > 1e-4
    for side in ("right", "left"):
        batch = tokenizer(ends, padding=True, return_tensors="pt", padding_side=side)
        with torch.no_grad():
            ours = task(batch.input_ids.clamp(max=task.network.config.vocab_size - 1), batch.attention_mask)  # type: ignore[union-attr]
        torch.testing.assert_close(ours, alone, rtol=1e-3, atol=1e-5)
        options = {}
        if side == "left" and family in COLUMNS_FROM_THE_LEFT:
            options["position_ids"] = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
        for model in models:
            with torch.no_grad():
                theirs = model.eval()(batch.input_ids, attention_mask=batch.attention_mask, **options).logits[:, 0]
            torch.testing.assert_close(theirs, alone, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["granite", "bert"])
def test_a_family_without_a_classifier_in_transformers_is_refused(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """BERT's head has further layers, which no loss reads: with gradients, they would stop DDP."""
    monkeypatch.setitem(FAMILIES, family, SIZES | ({"is_decoder": True} if family == "bert" else {}))
    network: Any = trained(tmp_path, family, adapters=False, texts=False).network
    trainable = [name for name, p in network.named_parameters() if p.requires_grad]
    assert [name for name in trainable if not name.startswith(f"{network.base_model_prefix}.")] == ["score.weight"]
    arguments = [str(tmp_path / "run.ckpt"), "--output", str(tmp_path / "out"), "--format"]
    assert export([*arguments, "merged"]) == 2
    assert f"{type(network).__name__} of transformers has no 'score.weight'" in capsys.readouterr().err
    assert export([*arguments, "safetensors"]) == 0
