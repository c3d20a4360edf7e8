"""Choices about conversations: template variables, system prompts, thoughts and tags of turns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_efficient.data.text.arguments import LanguageChat
from lit_efficient.data.text.chat_formats import Document, MalformedRow, read_row
from lit_efficient.data.text.chat_tokens import ChatTokens, Encoded
from lit_efficient.data.text.pair_formats import read_pair
from lit_efficient.data.text.turn_choices import TurnChoices
from lit_efficient.errors import ConfigurationError
from tests.data.test_language_data import language_data, ready, write_rows
from tests.data.text.chat_kit import CHATML, PLAIN, TURNS, tokenizer
from tests.data.text.model_tokenizers import make
from tests.data.text.test_chat_tokens import learned

ASK, ANSWER, MORE, LAST = TURNS[1:]
SWITCHED = CHATML.replace(
    "{% generation %}",
    "{% if enable_thinking is defined and not enable_thinking %}<think> </think>{% endif %}{% generation %}",
).replace(
    "assistant\n' }}{% endif %}",
    "assistant\n' }}{% if enable_thinking == false %}<think> </think>{% endif %}{% endif %}",
)


def encode(made: Any, *documents: Document, train_on: str = "assistant", **choices: Any) -> list[Encoded]:
    encoder = ChatTokens(made, train_on, "train", choices=TurnChoices(**choices))  # type: ignore[arg-type]
    found = encoder.encode(documents)
    assert all(isinstance(one, Encoded) for one in found), found
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("family", ["marked", "qwen3", "glm-4.5"])
def test_variables_of_a_template_are_those_of_transformers(family: str, value: bool) -> None:
    made = tokenizer(SWITCHED) if family == "marked" else make(family)
    own = made.apply_chat_template(TURNS, return_dict=True, enable_thinking=value, return_assistant_tokens_mask=True)
    other = made.apply_chat_template(TURNS, return_dict=True, enable_thinking=not value)
    of_row = read_row({"messages": TURNS, "chat_template_kwargs": {"enable_thinking": value}}, "messages")
    (run,) = encode(made, Document(tuple(TURNS)), template_kwargs={"enable_thinking": value})
    (row,) = encode(made, of_row, template_kwargs={"enable_thinking": not value})
    for found in (run, row):
        stop = len(own["input_ids"])
        assert found.ids.tolist()[:stop] == own["input_ids"]
        if family == "marked":
            assert found.trained.astype(int).tolist() == own["assistant_masks"]
            assert own["input_ids"] != other["input_ids"]


def test_what_the_prompt_writes_without_thinking_is_not_learned() -> None:
    made = make("qwen3")
    encoder = ChatTokens(made, choices=TurnChoices({"enable_thinking": False}), untrained_end="train")
    (found,) = encoder.encode([Document((ASK, ANSWER))])
    assert isinstance(found, Encoded)
    prompt = made.apply_chat_template([ASK], add_generation_prompt=True, enable_thinking=False)["input_ids"]
    assert made.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert found.ids[: len(prompt)].tolist() == prompt
    assert learned(found, encoder) == ["Four.<|im_end|>"]
    assert np.flatnonzero(found.trained)[0] == len(prompt)


def test_a_variable_that_no_template_reads_is_refused_and_one_of_a_row_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"names enable_thought, which .* does not read. It reads .*thinking"):
        encode(make("qwen3"), Document(tuple(TURNS)), template_kwargs={"enable_thought": False})
    row = {"messages": TURNS, "chat_template_kwargs": json.dumps({"messages": [], "mood": "good"})}
    (found,) = encode(tokenizer(), read_row(row, "messages"))
    assert found.left_out == {"the variable 'messages'": 1, "the variable 'mood'": 1}
    pair = read_pair({"prompt": [ASK], "chosen": [ANSWER], "rejected": [LAST], **row}, "prompt")
    assert pair.chosen.template_kwargs == pair.rejected.template_kwargs == {"messages": [], "mood": "good"}


def test_system_prompts_are_added_or_replaced() -> None:
    made = tokenizer(PLAIN)
    without = Document((ASK, ANSWER))
    given = Document((ASK, ANSWER, MORE, LAST), given_turns=2)
    both = (without, Document(tuple(TURNS)), given)

    def texts(**choices: Any) -> list[str]:
        return [made.decode(found.ids).partition("<|im_start|>user")[0] for found in encode(made, *both, **choices)]

    added = "<|im_start|>system\nCount.<|im_end|>\n"
    own = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert texts() == ["", own, ""]
    assert texts(system="Count.") == [added, own, added]
    assert texts(system="Count.", replace_system=True) == [added] * 3
    assert texts(system="", replace_system=True) == ["", "", ""]
    encoder = ChatTokens(made, choices=TurnChoices(system="Count."))
    (found,) = encoder.encode([given])
    assert isinstance(found, Encoded)
    assert learned(found, encoder) == ["Yes, of course.<|im_end|>"]


THOUGHTFUL = {**ANSWER, "reasoning_content": "I add them"}
INSIDE = {**ANSWER, "content": "<think>\nI add them\n</think>\n\nFour."}


@pytest.mark.parametrize("message", [THOUGHTFUL, INSIDE, {**ANSWER, "thinking": "I add them"}])
def test_thoughts_are_kept_or_dropped(message: dict[str, Any]) -> None:
    plain, qwen = tokenizer(), make("qwen3")
    kept = [plain.decode(encode(plain, Document((ASK, message)), reasoning="keep")[0].ids)]
    kept.append(qwen.decode(encode(qwen, Document((ASK, message)), reasoning="keep")[0].ids))
    for text in kept:
        assert text.endswith("assistant\n<think>\nI add them\n</think>\n\nFour.<|im_end|>\n")
    for made in (plain, qwen):
        (dropped,) = encode(made, Document((ASK, message)), reasoning="drop")
        (bare,) = encode(made, Document((ASK, ANSWER)))
        assert dropped.ids.tolist() == bare.ids.tolist()
        assert not dropped.left_out


def test_thoughts_that_a_template_omits_are_not_kept_in_silence() -> None:
    document = Document((ASK, THOUGHTFUL, MORE, LAST))  # Qwen3 writes the thoughts after the last question only
    encoder = ChatTokens(make("qwen3"), untrained_end="train", choices=TurnChoices(reasoning="keep"))
    (found,) = encoder.encode([document])
    assert isinstance(found, MalformedRow)
    assert "omits the thoughts of turn 2" in str(found)
    (as_template,) = encode(make("qwen3"), document)
    assert as_template.left_out == {"'reasoning_content'": 1}


@pytest.mark.parametrize("tag", [{"train": False}, {"training": False}, {"weight": 0}])
@pytest.mark.parametrize("template", [CHATML, PLAIN])
def test_turns_are_learned_by_their_tags(template: str, tag: dict[str, Any]) -> None:
    encoder = ChatTokens(tokenizer(template))
    row = {"conversations": [{**ASK, "train": False}, {**ANSWER, **tag}, MORE, {**LAST, "train": True}]}
    document = read_row(row, "sharegpt")
    (found,) = encoder.encode([document])
    assert isinstance(found, Encoded)
    assert learned(found, encoder) == ["Yes, of course.<|im_end|>"]
    assert not found.left_out
    (refused,) = ChatTokens(tokenizer(template), "all").encode([document])
    assert str(refused) == "turn 2 is marked as one without loss, and train_on is all"


def test_choices_change_the_cache_and_need_a_conversation(tmp_path: Path) -> None:
    first = ready(language_data(tmp_path, chat=LanguageChat(system="Count.")))
    assert all(
        "Count." in first.tokenizer.decode(row[0][0].tolist()) for row in map(first.train_rows.__getitem__, [0, 1])
    )
    assert first._folder != ready(language_data(tmp_path))._folder
    (tmp_path / "text.jsonl").write_text('{"text": "a b"}\n{"text": "c d"}\n')
    data = language_data(tmp_path, train=str(tmp_path / "text.jsonl"), chat=LanguageChat(system="Count."))
    with pytest.raises(ConfigurationError, match=r"chat.system: no row is a conversation"):
        data.prepare_data()
    for wrong in ({"replace_system": True}, {"system": " "}, {"reasoning": "some"}):
        with pytest.raises(ConfigurationError, match="LanguageData"):
            LanguageChat(**wrong)  # type: ignore[arg-type]
    write_rows(tmp_path / "data.jsonl")
