"""Tests of PreferenceData: pairs are recognised, cut without touching an answer, held out by prompt and batched."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_efficient import ConfigurationError, PreferenceData
from lit_efficient.data.text.arguments import PreferenceChat, PreferenceRows
from lit_efficient.data.text.chat_formats import MalformedRow
from lit_efficient.data.text.chat_tokens import Encoded
from lit_efficient.data.text.pair_formats import read_pair, recognise_pairs
from lit_efficient.data.text.python_instructions import preferences
from lit_efficient.data.text.truncation import TooLong, cut_pairs, facts
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
            {"prompt": ASK, "chosen": [_says("a"), _user("b"), _says("c")], "rejected": [_says("a")]},
            "rejected is the beginning of the other conversation",
        ),
        (
            {
                "prompt": ASK,
                "chosen": [_says("a"), _user("b"), _says("c")],
                "rejected": [_says("a"), _user("d"), _says("c")],
            },
            "first differ at turn 3, which is of the role user in chosen",
        ),
        (
            {"prompt": ASK, "chosen": [_says("a")], "rejected": [_user("b"), _says("c")]},
            "first differ at turn 2, which is of the role user in rejected",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "high"}, "margin is 'high', not a finite number"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": math.nan}, "margin is nan, not a finite number"),
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


def test_scores_give_a_margin_and_must_not_contradict_the_choice() -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": "8.5", "score_rejected": 6, "margin": 1}
    assert read_pair(row, "prompt").margin == 1.0
    assert read_pair(row, "prompt", margin="scores").margin == 2.5
    assert read_pair(row, "prompt", margin="none").margin is None
    assert read_pair({**row, "score_rejected": 8.5}, "prompt", margin="scores").margin == 0.0
    with pytest.raises(
        MalformedRow, match=r"score_chosen is 8\.5 and score_rejected 9: the rejected answer is the better"
    ):
        read_pair({**row, "score_rejected": 9}, "prompt", margin="scores")
    with pytest.raises(MalformedRow, match="score_rejected is None, not a finite number"):
        read_pair({**row, "score_rejected": None}, "prompt", margin="scores")
    _, sentence = recognise_pairs([row], "data.jsonl", margin="scores")
    assert sentence.endswith("with a margin of score_chosen and score_rejected; not read: margin")


def _encoded(given: int, length: int) -> Encoded:
    trained = np.arange(length) >= given
    return Encoded(np.arange(length), trained, np.ones(length, dtype=np.int64))


def test_long_pairs_are_dropped_or_lose_the_same_beginning() -> None:
    chosen, rejected = (np.array([facts(_encoded(6, length)), facts(_encoded(2, 3))]) for length in (10, 8))

    def left(max_length: int, too_long: TooLong) -> list[list[tuple[int, int, int]]]:
        found = cut_pairs(chosen, rejected, max_length, too_long)
        return [list(zip(side.document.tolist(), side.start.tolist(), side.stop.tolist())) for side in found]

    assert left(10, "drop") == [[(0, 0, 10), (1, 0, 3)], [(0, 0, 8), (1, 0, 3)]]
    assert left(9, "drop") == [[(1, 0, 3)], [(1, 0, 3)]]
    assert left(7, "left") == [[(0, 3, 10), (1, 0, 3)], [(0, 3, 8), (1, 0, 3)]]
    assert left(5, "left")[0] == [(0, 5, 10), (1, 0, 3)]  # one token of the prompt stays
    assert left(4, "left")[0] == [(1, 0, 3)]


def test_conversations_that_share_a_beginning_learn_all_later_answers(tmp_path: Path, words: str) -> None:
    """The loss is on the assistant's turns only: the user's turns among them are no answers."""
    begin = [*ASK, _says("Four."), _user("Is it?")]
    rows = [
        {
            "chosen": [*begin, _says(f"Yes {i}."), _user("Done?"), _says("Of course.")],
            "rejected": [*begin, _says("Done.")],
        }
        for i in range(3)
    ]
    source = _file(tmp_path, rows)
    data = PreferenceData(train=source, val=source, tokenizer=words, batch_size=3, cache_dir=str(tmp_path))
    data.prepare_data()
    data.setup()
    assert data.train_pairs is not None
    read = data.chat_tokenizer
    for index in range(3):
        (ids, labels), (other_ids, other_labels), margin = data.train_pairs[index]
        assert margin is None
        assert read.decode(labels[labels != -100]) == f"Yes {index}.<|im_end|>Of course.<|im_end|>"
        assert read.decode(other_labels[other_labels != -100]) == "Done.<|im_end|>"
        shared = int((labels != -100).argmax())
        assert np.array_equal(ids[:shared], other_ids[:shared])
        assert read.decode(ids[:shared]).endswith("Is it?<|im_end|>\n<|im_start|>assistant\n")
        both = ids[shared:][labels[shared:] == -100]
        assert "Done?" in read.decode(both)


@pytest.mark.parametrize(
    ("kind", "expected"), [("margin", [0.5, 1.5, 2.5]), ("scores", [1.0, 3.0, 5.0]), ("none", None)]
)
def test_batches_hold_the_margins_of_their_pairs(tmp_path: Path, words: str, kind: Any, expected: Any) -> None:
    rows = [
        {"prompt": f"Is {i} two?", "chosen": "Of course.", "rejected": "Done.", "margin": i + 0.5}
        | {"score_chosen": 2 * i + 1.0, "score_rejected": 0.0}
        for i in range(3)
    ]
    source = _file(tmp_path, rows)
    options: dict[str, Any] = {"val": source, "tokenizer": words, "batch_size": 3, "cache_dir": str(tmp_path)}
    data = PreferenceData(train=source, rows=PreferenceRows(margin=kind), **options)
    data.prepare_data()
    data.setup()
    assert data.has_margins is (expected is not None)
    batch = next(iter(data.train_dataloader()))
    if expected is None:
        assert "margin" not in batch
        return
    prompts = [data.chat_tokenizer.decode(ids) for ids in batch["chosen_input_ids"]]  # shuffled
    order = [int(prompt.split()[1]) for prompt in prompts]
    assert batch["margin"].tolist() == [expected[number] for number in order]
    for row in rows[1:]:
        del row["margin"]
    if kind == "margin":
        other = _file(tmp_path, rows)
        with pytest.raises(ConfigurationError, match="4 of 6 pairs have no margin, and the others have one"):
            PreferenceData(train=other, **options).setup()


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
        {ids[labels == -100].tobytes() for (ids, labels), _, _ in (pairs[i] for i in range(len(pairs)))}
        for pairs in (data.train_pairs, data.val_pairs)
        if pairs is not None
    ]
    assert len(prompts) == 2
    assert not prompts[0] & prompts[1]  # every prompt came twice
    assert sum(map(len, prompts)) == 20


def test_one_cache_serves_every_length_and_pairs_that_are_cut_lose_their_beginning(tmp_path: Path, words: str) -> None:
    rows = [
        {"prompt": [_user(f"What is {i} plus two?" + " Please." * i)], "chosen": "Four, of course.", "rejected": "Two"}
        for i in range(20)
    ]
    options: dict[str, Any] = {"train": _file(tmp_path, rows), "tokenizer": words, "batch_size": 1, "val_fraction": 0.2}
    found = {}
    for max_length, too_long in ((1000, "drop"), (60, "drop"), (60, "left")):
        chat = PreferenceChat(too_long=too_long)  # type: ignore[arg-type]
        data = PreferenceData(**options, cache_dir=str(tmp_path / "cache"), max_length=max_length, chat=chat)
        data.prepare_data()
        data.setup()
        pairs = data.train_pairs
        assert pairs is not None
        found[max_length, too_long] = [pairs[i] for i in range(len(pairs))], data.report["counts"]["train"]
    assert len([path for path in (tmp_path / "cache" / "preference").iterdir() if path.is_dir()]) == 1
    whole, counts = found[1000, "drop"]
    assert (counts["documents"], counts["dropped"], counts["truncated"]) == (len(whole), 0, 0)
    short, counts = found[60, "drop"]
    assert all(margin is None for _, _, margin in whole)
    whole, short = ([pair[:2] for pair in pairs] for pairs in (whole, short))
    fitting = [pair for pair in whole if max(len(ids) for ids, _ in pair) <= 60]
    assert 0 < len(short) == len(fitting) == len(whole) - counts["dropped"] < len(whole)
    for pair, kept in zip(fitting, short):
        assert all(np.array_equal(a, b) for one, other in zip(pair, kept) for a, b in zip(one, other))
    cut, counts = found[60, "left"]
    assert (len(cut), counts["truncated"]) == (len(whole), len(whole) - len(short))
    for pair, (*kept, _) in zip(whole, cut):
        excess = max(0, max(len(ids) for ids, _ in pair) - 60)
        assert all(np.array_equal(one[0][excess:], other[0]) for one, other in zip(pair, kept))
        assert all((one[1] >= 0).sum() == (other[1] >= 0).sum() for one, other in zip(pair, kept))


def test_malformed_rows_are_counted_shown_and_refused_above_the_threshold(tmp_path: Path, words: str) -> None:
    source = _file(tmp_path, [*_rows(6), "no json", {"prompt": "a", "chosen": "b", "rejected": "b"}])
    options: dict[str, Any] = {"train": source, "tokenizer": words, "batch_size": 2, "cache_dir": str(tmp_path)}
    with pytest.raises(ConfigurationError, match=r"2 of 14 rows(.|\n)*pairs.jsonl:13: no JSON(.|\n)*:14: .*the same"):
        PreferenceData(**options).prepare_data()
    with pytest.warns(UserWarning, match="2 of 14 rows for train are malformed"):
        PreferenceData(**options, rows=PreferenceRows(max_malformed=0.2)).prepare_data()


def test_rows_that_are_all_malformed_are_shown_before_the_split_is_refused(tmp_path: Path, words: str) -> None:
    """The split of no row says nothing about the reason."""
    turns = {
        "chosen": [*ASK, _says("a"), _user("b"), _says("c")],
        "rejected": [*ASK, _says("a"), _user("d"), _says("e")],
    }
    source = _file(tmp_path, [turns] * 6)
    with pytest.raises(ConfigurationError) as refused:
        PreferenceData(train=source, tokenizer=words, batch_size=2, cache_dir=str(tmp_path)).prepare_data()
    assert "6 of 6 rows for train are malformed" in str(refused.value)
    assert "first differ at turn 3" in str(refused.value)
    assert "The remaining 0 different rows cannot be split" in str(refused.value)


def test_own_names_of_keys_and_a_source_for_validation(tmp_path: Path, words: str) -> None:
    rows = [{"question": f"Is {i} two?", "yes": "Of course.", "no": "Done."} for i in range(4)]
    source = _file(tmp_path, rows)
    columns = {"prompt": "question", "chosen": "yes", "rejected": "no"}
    data = PreferenceData(
        train=source,
        val=source,
        rows=PreferenceRows(columns=columns),
        tokenizer=words,
        batch_size=2,
        cache_dir=str(tmp_path),
    )
    data.prepare_data()
    data.setup()
    assert data.train_pairs is not None
    assert data.val_pairs is not None
    assert len(data.train_pairs) == len(data.val_pairs) == 4
    _, (ids, labels), _ = data.train_pairs[0]
    assert data.chat_tokenizer.decode(ids).startswith("Is 0 two?Done.")
    assert data.chat_tokenizer.decode(labels[labels != -100]) == "Done.<|endoftext|>"
    with pytest.raises(ConfigurationError, match="pairs have the keys chosen and rejected"):
        PreferenceData(train=source, tokenizer=words, cache_dir=str(tmp_path)).prepare_data()


def test_the_librarys_pairs_prefer_and_reject_every_body_once() -> None:
    rows = preferences()
    assert 1900 <= len(rows) <= 2000  # Python 3.13 has no more
    chosen = [row["chosen"][0]["content"] for row in rows]
    assert sorted(chosen) == sorted(row["rejected"][0]["content"] for row in rows)
    assert all(row["chosen"] != row["rejected"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1, got 1.0"),
        ({"chat": PreferenceChat(template="chatml")}, "chat.template needs a tokenizer"),
        ({"train": []}, "must name at least one source"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PreferenceData(**arguments)


@pytest.mark.parametrize(
    ("group", "values", "sentence"),
    [
        (PreferenceRows, {"max_malformed": 2.0}, "rows.max_malformed must be at least 0 and at most 1, got 2.0"),
        (PreferenceRows, {"strings_as": "chat"}, "rows.strings_as must be one of text, turns, got 'chat'"),
        (
            PreferenceRows,
            {"columns": {"question": "q"}},
            "rows.columns may name prompt, chosen, rejected, .*, margin, score_chosen, score_rejected, got 'question'",
        ),
        (PreferenceChat, {"vocab_size": 100}, "chat.vocab_size must be a whole number of at least 259, got 100"),
        (PreferenceChat, {"too_long": "right"}, "chat.too_long must be one of drop, left, got 'right'"),
    ],
)
def test_a_group_is_checked_where_it_is_made(group: type, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=f"PreferenceData: {sentence}"):
        group(**values)
