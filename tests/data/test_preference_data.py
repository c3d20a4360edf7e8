"""Pairs: recognised and read, cut without touching an answer, held out by prompt, batched side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_efficient import ConfigurationError, PreferenceData
from lit_efficient.data.text.chat_formats import MalformedRow
from lit_efficient.data.text.chat_tokens import Encoded
from lit_efficient.data.text.pair_cache import fit_pair
from lit_efficient.data.text.pair_formats import read_pair, recognise_pairs
from lit_efficient.data.text.python_preferences import preferences
from tests.data.text.chat_kit import tokenizer


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ASK = [_user("What is two plus two?")]
SAME_PAIR: list[dict[str, Any]] = [
    {"prompt": ASK, "chosen": [_says("Four.")], "rejected": [_says("Five.")]},
    {"prompt": ASK, "chosen": "Four.", "rejected": "Five."},
    {"prompt": ASK[0]["content"], "chosen": [_says("Four.")], "rejected": [_says("Five.")]},
    {"prompt": ASK[0]["content"], "chosen": [*ASK, _says("Four.")], "rejected": [*ASK, _says("Five.")]},
    {"prompt": ASK, "chosen": [*ASK, _says("Four.")], "rejected": [*ASK, _says("Five.")]},
    {"chosen": [*ASK, _says("Four.")], "rejected": [*ASK, _says("Five.")], "prompt_id": 3},
    {
        "chosen": [{"from": "human", "value": ASK[0]["content"]}, {"from": "gpt", "value": "Four."}],
        "rejected": [{"from": "human", "value": ASK[0]["content"]}, {"from": "gpt", "value": "Five."}],
    },
]


@pytest.mark.parametrize("row", SAME_PAIR)
def test_the_forms_that_data_sets_have_are_one_pair(row: dict[str, Any]) -> None:
    kind, sentence = recognise_pairs([row], "data.jsonl")
    assert sentence.startswith(f"data.jsonl: pairs, format {kind}, by the keys")
    pair = read_pair(row, kind)
    assert pair.chosen.messages == (*ASK, _says("Four."))
    assert pair.rejected.messages == (*ASK, _says("Five."))
    assert pair.prompt == tuple(ASK)


def test_texts_are_texts_or_turns() -> None:
    row = {"system": "Be brief.", "prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    text = read_pair(row, "prompt")
    assert (text.chosen.text, text.rejected.text, text.prompt) == ("2 + 2 = 4", "2 + 2 = 5", "2 + 2 =")
    turns = read_pair(row, "prompt", "turns")
    assert turns.chosen.messages == ({"role": "system", "content": "Be brief."}, _user("2 + 2 ="), _says(" 4"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, "no rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "rejected is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "rejected is a int, neither a text nor a list of turns"),
        ({"prompt": 1, "chosen": "b", "rejected": "c"}, "prompt is a int"),
        (
            {"prompt": ASK, "chosen": [_says("b")], "rejected": [_says("a"), _user("c")]},
            "last turn of rejected is not the assist",
        ),
        (
            {"prompt": ASK, "chosen": [_says("b")], "rejected": [{"role": "x", "content": "c"}]},
            r"rejected: messages\[1",
        ),
        ({"prompt": "z", "chosen": [*ASK, _says("b")], "rejected": [*ASK, _says("c")]}, "none of the conversation's"),
        (
            {"prompt": ASK, "chosen": [_says("a"), _user("b"), _says("c")], "rejected": [_says("d")]},
            "differ before the last turn",
        ),
    ],
)
def test_rows_that_are_no_pairs(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedRow, match=reason):
        read_pair(row, "prompt")


def test_conversations_need_a_beginning_and_texts_a_prompt() -> None:
    with pytest.raises(MalformedRow, match="no turn before the answers"):
        read_pair({"chosen": [_says("a")], "rejected": [_says("b")]}, "conversations")
    with pytest.raises(MalformedRow, match="chosen is a text, and there is no prompt"):
        read_pair({"chosen": "a", "rejected": "b"}, "conversations")


def _encoded(given: int, length: int) -> Encoded:
    trained = np.arange(length) >= given
    return Encoded(np.arange(length), trained, np.ones(length, dtype=np.int64))


def test_long_pairs_are_dropped_or_lose_the_same_beginning() -> None:
    pair = _encoded(6, 10), _encoded(6, 8)
    assert fit_pair(pair, 10, "drop") is pair
    assert fit_pair(pair, 9, "drop") is None
    cut = fit_pair(pair, 7, "left")
    assert cut is not None
    assert [one.ids.tolist() for one in cut] == [[3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7]]
    assert [int(one.trained.sum()) for one in cut] == [4, 2]
    assert fit_pair(pair, 5, "left") is not None  # one token of the prompt stays
    assert fit_pair(pair, 4, "left") is None


def _file(folder: Path, rows: list[Any]) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def _rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": [_user(f"What is {i} plus two?")], "chosen": "Four, of course." + "!" * (i % 5), "rejected": "Two"}
        for i in range(count)
        for _ in range(2)
    ]


@pytest.fixture
def words(tmp_path: Path) -> str:
    tokenizer().save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


def test_batches_hold_both_answers_and_learn_them_with_their_end(tmp_path: Path, words: str) -> None:
    data = PreferenceData(
        train=_file(tmp_path, _rows(20)), tokenizer=words, batch_size=3, val_fraction=0.2, cache_dir=str(tmp_path)
    )
    data.prepare_data()
    data.setup()
    batch = next(iter(data.train_dataloader()))
    shapes = {tuple(tensor.shape) for tensor in batch.values()}
    assert len(shapes) == 1
    assert shapes.pop()[0] == 3
    read = data.chat_tokenizer
    for side, answers in (("chosen", "Four, of course."), ("rejected", "Two")):
        ids, labels, mask = (batch[f"{side}_{name}"] for name in ("input_ids", "labels", "attention_mask"))
        assert torch.equal(labels[labels != -100], ids[labels != -100])
        for row in range(3):
            learned = read.decode(labels[row][labels[row] != -100])
            assert learned.rstrip("<|im_end|>").rstrip("!") == answers  # noqa: B005 (none of these end an answer)
            assert learned.endswith("<|im_end|>")
            whole = read.decode(ids[row][mask[row] == 1])
            assert whole.startswith("<|im_start|>user\nWhat is")
    prompts = [
        {pairs.chosen[i][0][pairs.chosen[i][1] == -100].tobytes() for i in range(len(pairs))}
        for pairs in (data.train_pairs, data.val_pairs)
        if pairs is not None
    ]
    assert len(prompts) == 2
    assert not prompts[0] & prompts[1]  # every prompt came twice
    assert sum(map(len, prompts)) == 20


def test_malformed_rows_are_counted_shown_and_refused_above_the_threshold(tmp_path: Path, words: str) -> None:
    source = _file(tmp_path, [*_rows(6), "no json", {"prompt": "a", "chosen": "b", "rejected": "b"}])
    options: dict[str, Any] = {"train": source, "tokenizer": words, "batch_size": 2, "cache_dir": str(tmp_path)}
    with pytest.raises(ConfigurationError, match=r"2 of 14 rows(.|\n)*pairs.jsonl:13: no JSON(.|\n)*:14: .*the same"):
        PreferenceData(**options).prepare_data()
    with pytest.warns(UserWarning, match="2 of 14 rows for train are malformed"):
        PreferenceData(**options, max_malformed=0.2).prepare_data()


def test_own_names_of_keys_and_a_source_for_validation(tmp_path: Path, words: str) -> None:
    rows = [{"question": f"Is {i} two?", "yes": "Of course.", "no": "Done."} for i in range(4)]
    source = _file(tmp_path, rows)
    columns = {"prompt": "question", "chosen": "yes", "rejected": "no"}
    data = PreferenceData(
        train=source, val=source, columns=columns, tokenizer=words, batch_size=2, cache_dir=str(tmp_path)
    )
    data.prepare_data()
    data.setup()
    assert data.train_pairs is not None
    assert data.val_pairs is not None
    assert len(data.train_pairs) == len(data.val_pairs) == 4
    ids, labels = data.train_pairs.rejected[0]
    assert data.chat_tokenizer.decode(ids).startswith("Is 0 two?Done.")
    assert data.chat_tokenizer.decode(labels[labels != -100]) == "Done.<|endoftext|>"
    with pytest.raises(ConfigurationError, match="pairs have the keys chosen and rejected"):
        PreferenceData(train=source, tokenizer=words, cache_dir=str(tmp_path)).prepare_data()


def test_the_librarys_pairs_prefer_and_reject_every_body_once() -> None:
    rows = preferences()
    assert len(rows) == 2000
    chosen = [row["chosen"][0]["content"] for row in rows]
    assert sorted(chosen) == sorted(row["rejected"][0]["content"] for row in rows)
    assert all(row["chosen"] != row["rejected"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"vocab_size": 100}, "vocab_size must be at least 259, got 100"),
        ({"val_fraction": 1.0}, "val_fraction must be between 0 and 1, got 1.0"),
        ({"max_malformed": 2.0}, r"max_malformed must be in \[0, 1\], got 2.0"),
        ({"too_long": "right"}, "too_long must be drop or left, got 'right'"),
        ({"strings_as": "chat"}, "strings_as must be text or turns, got 'chat'"),
        ({"columns": {"question": "q"}}, "columns may name prompt, chosen, rejected, system, tools, got 'question'"),
        ({"chat_template": "chatml"}, "chat_template needs a tokenizer"),
        ({"train": []}, "must name at least one source"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PreferenceData(**arguments)
