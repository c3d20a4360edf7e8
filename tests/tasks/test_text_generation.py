"""Continuing a text: what stands at the join, and what must not stand before it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lit_efficient import CausalLMConfig
from lit_efficient.errors import ConfigurationError
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.models.libraries.causal_lm import build
from lit_efficient.tasks import text_generation
from tests.models.libraries.test_causal_lm import FAMILIES

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
        return torch.tensor([next(drawn)])

    drawn = iter([4, 5, 1])
    network = build(CausalLMConfig(config_fields=FAMILIES["llama"]))
    network.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    monkeypatch.setattr("lit_efficient.models.generation.batched.drawn", words)
    text = text_generation.continuations(
        network,
        _tokenizer(),
        ["on the"],
        max_new_tokens=5,
        sampling=Sampling(1.0, 1.0),
        seeds=[0],
        stop=set(),
        device=torch.device("cpu"),
    )
    assert text == [(" cat sat", True)]
    assert [[2, 3]] in [ids.tolist() for ids in seen]
    assert [[2, 3, 1]] not in [ids.tolist() for ids in seen]  # the end that the tokenizer puts behind every text


PROMPTS = ["the cat", "a dog sat on the mat, and", "on"]


def writer() -> tuple[Any, Any]:
    """A network with random weights and a tokenizer of bytes and their pairs, of which one token is no whole word."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "</s>"]
    kind = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat, and a dog sat on the cat; naïve übermut"] * 20, kind)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", padding_side="left")
    torch.manual_seed(0)
    fields = {**FAMILIES["llama"], "vocab_size": len(tokenizer), "initializer_range": 0.3}
    network = build(CausalLMConfig(config_fields=fields)).eval()
    network.generation_config.eos_token_id = None
    return network, tokenizer


def chat_writer() -> tuple[Any, Any]:
    """The same with an end of texts and a chat template."""
    network, tokenizer = writer()
    tokenizer.eos_token = "</s>"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return network, tokenizer


@pytest.fixture(scope="module")
def written() -> tuple[Any, Any]:
    return writer()


def _continued(written: tuple[Any, Any], prompts: list[str], how: Sampling, **options: Any) -> list[str]:
    network, tokenizer = written
    given = {"max_new_tokens": 16, "seeds": range(len(prompts)), "stop": set(), "device": torch.device("cpu")} | options
    return [text for text, _ in text_generation.continuations(network, tokenizer, prompts, sampling=how, **given)]


def _theirs(written: tuple[Any, Any], prompts: list[str], **options: Any) -> list[str]:
    network, tokenizer = written
    read = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": tokenizer.pad_token_id} | options
    return tokenizer.batch_decode(network.generate(**read, **options)[:, read["input_ids"].shape[1] :])


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_each_of_a_batch_is_what_transformers_writes_alone_and_in_a_padded_batch(
    written: tuple[Any, Any], penalty: float
) -> None:
    ours = _continued(written, PROMPTS, Sampling(0.0, repetition_penalty=penalty))
    assert len(set(ours)) == 3
    assert ours == [text for prompt in PROMPTS for text in _theirs(written, [prompt], repetition_penalty=penalty)]
    if penalty == 1.0:  # which counts the padding of a batch as tokens that were there
        assert ours == _theirs(written, PROMPTS)


def test_texts_end_before_the_first_ending_wherever_the_tokens_end(written: tuple[Any, Any]) -> None:
    tokenizer, endings = written[1], set()
    for prompt, text in zip(PROMPTS, _continued(written, PROMPTS, Sampling(0.0))):
        pieces = [tokenizer.decode([token]) for token in tokenizer(text)["input_ids"]]
        across = [one[-1:] + two[:1] for one, two in pairwise(pieces) if "\ufffd" not in one + two]
        for ending in across[:4]:
            endings.add(ending)
            (ours,) = _continued(written, [prompt], Sampling(0.0), endings=["never this", ending])
            (theirs,) = _theirs(written, [prompt], stop_strings=["never this", ending], tokenizer=tokenizer)
            assert ours == text[: text.index(ending)] == theirs[: theirs.index(ending)]
            assert ending in theirs
    assert len(endings) > 5


def test_the_same_seed_writes_the_same_whatever_the_batch(written: tuple[Any, Any]) -> None:
    how = Sampling(1.5, 0.9, 40, 0.01, 1.2)
    together = _continued(written, PROMPTS, how, endings=["zz"])
    assert together == _continued(written, PROMPTS, how, endings=["zz"], batch_size=1)
    for i, prompt in enumerate(PROMPTS):
        assert _continued(written, [prompt], how, endings=["zz"], seeds=[i]) == together[i : i + 1]
    assert together != _continued(written, PROMPTS, how, seeds=[9, 10, 11])


@pytest.mark.parametrize("endings", ["\n", [""], [1]])
def test_an_ending_is_a_text(written: tuple[Any, Any], endings: Any) -> None:
    with pytest.raises(ConfigurationError, match="generate_text: stop must be a list of non-empty texts"):
        _continued(written, PROMPTS, Sampling(), endings=endings)
