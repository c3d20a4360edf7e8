"""Continuing a text: what stands at the join, and what must not stand before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lit_efficient import CausalLMConfig
from lit_efficient.models.causal_lm import build
from lit_efficient.tasks import text_generation
from tests.models.test_causal_lm import FAMILIES

WORDS = {"<unk>": 0, "</s>": 1, "▁on": 2, "▁the": 3, "▁cat": 4, "▁sat": 5}


def _tokenizer() -> Any:
    """As Llama 2's: a space is part of the word behind it, and what is decoded loses its first one."""
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def test_the_space_before_the_first_new_word_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def words(logits: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.tensor([[next(drawn)]])

    drawn = iter([4, 5, 1])
    network = build(CausalLMConfig(config_fields=FAMILIES["llama"]))
    network.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    monkeypatch.setattr("lit_efficient.models.generation.sample_token", words)
    text = text_generation.continue_texts(
        network,
        _tokenizer(),
        ["on the"],
        max_new_tokens=5,
        temperature=1.0,
        top_p=1.0,
        seed=0,
        stop=set(),
        device=torch.device("cpu"),
    )
    assert text == ["on the cat sat"]
    prompt = next(ids for ids in seen if len(ids) == 1)  # the rows before it ask whether the network goes on rightly
    assert prompt.tolist() == [[2, 3]]  # and not the end that the tokenizer puts behind every text
