"""New tokens, from the user's rows to the other program: one id each, rows that train, exports that transformers and
peft load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lit_efficient import (
    CausalLMConfig,
    ConfigurationError,
    ExactResume,
    LanguageChat,
    LanguageData,
    LanguageModeling,
    LoRA,
)
from lit_efficient.data.text.chat_tokenizer import train_chat_tokenizer
from lit_efficient.tasks.loading import load_language_model
from tests.support import QUIET, assert_equal, weights
from tests.support_cli import export
from tests.tasks.preference_kit import SaveAfter

NEW = ["<tool>", "<tool_end>"]
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip


def base(folder: Path, family: str, tied: bool, spare: int = 0) -> str:
    """A base with a tokenizer of 300 ids, and ``spare`` rows that no token has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = train_chat_tokenizer([f"def f{i}(x): return x + {i}" for i in range(80)], 300)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128} if family == "gpt2" else SIZES
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **ends, vocab_size=len(tokenizer) + spare, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return str(folder / "base")


def rows(folder: Path) -> str:
    """Messages and texts with the new tokens; a text that also spells a token of the template."""
    lines: list[Any] = []
    for i in range(12):
        lines.append({"messages": [
            {"role": "user", "content": f"What is {i}?"},
            {"role": "assistant", "content": f"<tool>add {i}<tool_end> it is {i}<tool_end>"},
        ]})  # fmt: skip
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    texts = [{"text": f"a text {i} <tool>x<tool_end> and <|im_end|> spelled"} for i in range(8)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return str(folder / "chats.jsonl")


def data_of(folder: Path, tokenizer: str, source: str, new: Any = NEW) -> LanguageData:
    return LanguageData(
        train=source, tokenizer=tokenizer, max_length=64, batch_size=2, val_fraction=0.2, pack=False,
        cache_dir=str(folder / "cache"), chat=LanguageChat(rendered=False, new_tokens=new),
    )  # fmt: skip


def fit(
    folder: Path, name: str, adapters: LoRA, *others: Any, quantize: Any = None, steps: int = 6, **more: Any
) -> Any:
    torch.manual_seed(0)
    module = LanguageModeling(
        CausalLMConfig(name, resize_vocabulary=True, quantize=quantize), learning_rate=0.05, warmup_steps=0
    )
    run = Trainer(callbacks=[adapters, *others], **{**QUIET, "max_steps": steps})
    run.fit(module, datamodule=data_of(folder, name, rows(folder)), **more)
    run.save_checkpoint(folder / "run.ckpt")
    return module.eval()


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("special", [False, True])
def test_a_new_token_is_one_id_in_messages_and_in_texts(special: bool, tmp_path: Path) -> None:
    """Also if the user's tokenizer has it already, as a special token. Others stay spelled out, or are refused."""
    from transformers import AutoTokenizer

    name = base(tmp_path, "llama", tied=False)
    if special:
        own = AutoTokenizer.from_pretrained(name)
        own.add_tokens(NEW, special_tokens=True)
        own.save_pretrained(name)
    rows(tmp_path)
    for source in ("chats.jsonl", "texts.jsonl"):
        data = data_of(tmp_path, name, str(tmp_path / source))
        data.prepare_data()
        data.setup()
        assert data.new_ids == [300, 301]
        assert data.train_rows is not None
        ids, labels, _ = data.train_rows[0][0]
        assert ids.tolist().count(301) == (2 if source == "chats.jsonl" else 1)
        assert {300, 301} <= set(labels.tolist())
        end = data.chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert (end in labels.tolist()) is (source == "chats.jsonl")
        assert data.report["counts"]["train"]["ended"] == data.report["counts"]["train"]["turns"]
    if special:
        data = data_of(tmp_path, name, str(tmp_path / "chats.jsonl"), new=())
        with pytest.raises(ConfigurationError, match=r"control token '<tool>' .*chat\.new_tokens"):
            data.prepare_data()


CASES: dict[str, tuple[str, bool, int, dict[str, Any]]] = {
    "rows_untied": ("llama", False, 0, {"trainable_token_indices": "new"}),
    "rows_tied": ("llama", True, 0, {"trainable_token_indices": "new"}),
    "rows_gemma": ("gemma", True, 0, {"trainable_token_indices": "new"}),
    "rows_gpt2": ("gpt2", True, 0, {"trainable_token_indices": [300, 301, 7]}),
    "rows_spare": ("qwen3", False, 20, {"trainable_token_indices": "new", "variant": "dora"}),
    "whole_untied": ("llama", False, 0, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "whole_tied": ("qwen3", True, 0, {"modules_to_save": ["embed_tokens"]}),
}


@pytest.mark.turns(4)
@pytest.mark.filterwarnings("ignore")  # of peft, about the embeddings that it saves
@pytest.mark.parametrize("case", CASES)
def test_new_tokens_learn_under_lora_and_leave_in_both_formats(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    family, tied, spare, options = CASES[case]
    name = base(tmp_path, family, tied, spare)
    module = fit(tmp_path, name, LoRA(rank=2, **options))
    network = module.network
    ids = torch.tensor([[5, 300, 9, 301, 40, 41]])
    expected = logits(network, ids)
    embeddings = network.get_input_embeddings()
    start = AutoModelForCausalLM.from_pretrained(name)
    moved = embeddings(torch.tensor([300, 301])) - embeddings.weight[:300].mean(0)
    assert moved.abs().min(1).values.max() > 1e-3
    if "rows" in case:  # the other rows have not changed
        assert torch.equal(embeddings.weight[:300], start.get_input_embeddings().weight[:300])
    for format in ("peft", "merged", "safetensors"):
        arguments = [str(tmp_path / "run.ckpt"), "--format", format, "--output", str(tmp_path / format)]
        assert export(arguments) == 0
        said = capsys.readouterr().err
        assert "differ by" in said
        assert "not checked" not in said
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged, ids), expected, rtol=1e-4, atol=1e-5)
    start.resize_token_embeddings(max(302, 300 + spare), mean_resizing=False)
    theirs = PeftModel.from_pretrained(start, tmp_path / "peft")
    torch.testing.assert_close(logits(theirs, ids), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft"), ids), expected, rtol=1e-4, atol=1e-5
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    prompt = tokenizer("What<tool>", return_tensors="pt")
    assert prompt.input_ids[0, -1] == 300
    written = merged.generate(**prompt, max_new_tokens=4, do_sample=False)
    torch.testing.assert_close(theirs.generate(**prompt, max_new_tokens=4, do_sample=False), written)
    ours = module.generate_text("What<tool>", max_new_tokens=4, temperature=0.0)[0]
    assert ours == tokenizer.decode(written[0], skip_special_tokens=True)
    again = LoRA(start_from=str(tmp_path / "peft"))  # and training goes on from peft's folder
    (tmp_path / "more").mkdir()
    more = fit(tmp_path, name, again, steps=0)
    torch.testing.assert_close(logits(more.network, ids), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_resumed_run_learns_the_same_rows(quantize: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = base(tmp_path, "llama", tied=quantize is None)
    save = SaveAfter(3, tmp_path / "middle.ckpt")

    def adapters() -> LoRA:
        return LoRA(rank=2, trainable_token_indices="new")

    whole = fit(tmp_path, name, adapters(), ExactResume(), save, quantize=quantize)
    resumed = fit(tmp_path, name, adapters(), ExactResume(), quantize=quantize, ckpt_path=str(tmp_path / "middle.ckpt"))
    assert_equal(weights(resumed), weights(whole))
    ids = torch.tensor([[5, 300, 9, 301]])
    again, _ = load_language_model(str(tmp_path / "run.ckpt"))
    assert torch.equal(logits(again.network, ids), logits(whole.network, ids))
    for format in ("peft", "merged"):
        assert export([str(tmp_path / "run.ckpt"), "--format", format, "--output", str(tmp_path / format)]) == 0
        assert "differ by" in capsys.readouterr().err


def test_new_rows_do_not_stay_frozen_without_a_choice(tmp_path: Path) -> None:
    name = base(tmp_path, "llama", tied=False, spare=20)
    with pytest.raises(ConfigurationError, match=r"2 new tokens, ids 300 to 301.*trainable_token_indices: new"):
        fit(tmp_path, name, LoRA(rank=2))
    with pytest.raises(ConfigurationError, match="2 new tokens"):  # the head would keep its untrained rows
        fit(tmp_path, name, LoRA(rank=2, modules_to_save=["embed_tokens"]))
    with pytest.raises(ConfigurationError, match=r"from 0 to 319, got \[320\]"):
        fit(tmp_path, name, LoRA(rank=2, trainable_token_indices=[320]))
    with pytest.raises(ConfigurationError, match="already have an adapter"):
        fit(tmp_path, name, LoRA(rank=2, targets=["lm_head"], trainable_token_indices="new"))
    with pytest.warns(UserWarning, match="rows of 2 new tokens, ids 300 to 301, stay"):
        fit(tmp_path, name, LoRA(rank=2, trainable_token_indices=[]))


@pytest.mark.turns(6, family="slow")
@pytest.mark.filterwarnings("ignore")  # of peft, about names of transformers
@pytest.mark.parametrize("tied", [False, True])
def test_tokens_added_by_hand_to_spare_rows_are_new(
    tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base has more rows than its tokenizer has ids, so nothing grows. A token for padding needs no training."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = base(tmp_path, "llama", tied, spare=20)
    own = AutoTokenizer.from_pretrained(name)
    own.add_tokens(NEW)
    own.add_special_tokens({"pad_token": "<pad>"})
    own.save_pretrained(tmp_path / "own")
    data = data_of(tmp_path, str(tmp_path / "own"), rows(tmp_path), new=())

    def fit_on(adapters: LoRA) -> LanguageModeling:
        torch.manual_seed(0)
        module = LanguageModeling(CausalLMConfig(name), learning_rate=0.05, warmup_steps=0)
        run = Trainer(callbacks=[adapters], **{**QUIET, "max_steps": 6})
        run.fit(module, datamodule=data)
        run.save_checkpoint(tmp_path / "run.ckpt")
        return module.eval()

    with pytest.raises(ConfigurationError, match=r"2 new tokens, ids 300 to 301.*trainable_token_indices: new"):
        fit_on(LoRA(rank=2))
    network = fit_on(LoRA(rank=2, trainable_token_indices="new")).network
    ids = torch.tensor([[5, 300, 9, 301, 40, 41]])
    expected = logits(network, ids)
    for format in ("peft", "merged"):
        assert export([str(tmp_path / "run.ckpt"), "--format", format, "--output", str(tmp_path / format)]) == 0
        assert "differ by" in capsys.readouterr().err
    start = AutoModelForCausalLM.from_pretrained(name)
    moved = network.get_input_embeddings()(ids[:, [1, 3]]) - start.get_input_embeddings()(ids[:, [1, 3]])  # type: ignore[operator, union-attr]
    assert moved.abs().min() > 1e-4
    theirs = PeftModel.from_pretrained(start, tmp_path / "peft")
    torch.testing.assert_close(logits(theirs, ids), expected, rtol=1e-4, atol=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged, ids), expected, rtol=1e-4, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer("x<tool>").input_ids[-1] == 300
    prompt = tokenizer("What<tool>", return_tensors="pt")
    torch.testing.assert_close(
        theirs.generate(**prompt, max_new_tokens=4, do_sample=False),
        merged.generate(**prompt, max_new_tokens=4, do_sample=False),
    )
