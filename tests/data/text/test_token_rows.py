"""Rows of ids that somebody has tokenised, with the labels and masks of other programs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_efficient.data.text.arguments import LanguageChat
from lit_efficient.data.text.chat_formats import Document, MalformedRow
from lit_efficient.data.text.chat_tokens import ChatTokens, Encoded
from lit_efficient.data.text.token_rows import read_tokens
from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import IGNORE
from tests.data.test_language_data import language_data, ready
from tests.data.text.chat_kit import TURNS, tokenizer
from tests.data.text.model_tokenizers import make

MASKED = [IGNORE, IGNORE, 12, 13]


@pytest.mark.parametrize(
    "row",
    [
        {"labels": MASKED},
        {"loss_mask": [0, 0, 1, 1]},
        {"assistant_masks": [0, 0, 1, 1], "labels": [10, 11, 12, 13]},
        {"completion_mask": [0, 0, 1, 1], "loss_mask": [1, 1, 1, 1], "position_ids": [0, 1, 2, 3]},
    ],
)
def test_columns_of_other_programs_have_one_meaning(row: dict[str, Any]) -> None:
    found = read_tokens({"input_ids": [10, 11, 12, 13], **row})
    assert (found.ids, found.trained) == ((10, 11, 12, 13), (False, False, True, True))


def test_padding_is_taken_off_at_both_ends() -> None:
    row = {"input_ids": [0, 10, 11, 0, 0], "labels": [IGNORE, IGNORE, 11, IGNORE, IGNORE]}
    row |= {"attention_mask": [0, 1, 1, 0, 0], "position_ids": [1, 0, 1, 1, 1]}
    assert read_tokens(row) == Document(ids=(10, 11), trained=(False, True))
    assert all(read_tokens({"input_ids": [1, 2]}).trained)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": "1 2"}, "no list of whole numbers"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries, and input_ids 2"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, IGNORE]}, r"labels\[0\] is the next token"),
        ({"input_ids": [1, 2, 3], "labels": [1, 9, 3]}, r"labels\[1\] is 9, neither input_ids\[1\] = 2 nor -100"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "between tokens"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "0 for all"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask holds 2"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}, "start again at token 2"),
    ],
)
def test_columns_that_contradict_each_other_are_malformed(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedRow, match=reason):
        read_tokens(row)


def test_rows_of_transformers_give_the_batches_of_transformers(tmp_path: Path) -> None:
    """The masks of `apply_chat_template`, padded on the left, have the loss of a model on the same rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tokenizer()
    rows = []
    for length in (3, 5):
        own = made.apply_chat_template(TURNS[:length], return_dict=True, return_assistant_tokens_mask=True)
        rows.append({"input_ids": own["input_ids"], "assistant_masks": own["assistant_masks"]})
    longest = max(len(row["input_ids"]) for row in rows)
    for row in rows:
        padding = longest - len(row["input_ids"])
        masks = row.pop("assistant_masks")
        row["labels"] = [IGNORE] * padding + [i if m else IGNORE for i, m in zip(row["input_ids"], masks)]
        row["attention_mask"] = [0] * padding + [1] * len(row["input_ids"])
        row["input_ids"] = [made.pad_token_id] * padding + row["input_ids"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ready(
        language_data(tmp_path, train=str(tmp_path / "rows.jsonl"), val_fraction=0, pack=False, max_length=128)
    )
    (batch,) = data.train_dataloader()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(made), **sizes))
    theirs = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    theirs["position_ids"] = (theirs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(model(**theirs).loss.item(), abs=1e-6)
    assert data.stop_ids == [made.eos_token_id]


def test_labels_stay_unless_all_tokens_are_to_be_learned() -> None:
    document = read_tokens({"input_ids": [10, 11, 12, 13], "labels": MASKED})
    for train_on, expected in (("completion", [False, False, True, True]), ("all", [True] * 4)):
        (found,) = ChatTokens(tokenizer(), train_on).encode([document])
        assert isinstance(found, Encoded)
        assert found.trained.tolist() == expected
        assert found.ids.tolist() == [10, 11, 12, 13]


def test_ids_of_another_tokenizer_are_malformed(tmp_path: Path) -> None:
    count = len(tokenizer())
    (found,) = ChatTokens(tokenizer()).encode([read_tokens({"input_ids": [1, count]})])
    assert str(found) == f"the tokenizer has {count} ids, and input_ids holds {count}"
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"input_ids": [1, 2, 3]}) + "\n" + json.dumps({"input_ids": [4, 5]})
    )
    data = language_data(tmp_path, train=str(tmp_path / "rows.jsonl"), tokenizer=None, chat=LanguageChat())
    with pytest.raises(ConfigurationError, match="rows of input_ids need the tokenizer"):
        data.prepare_data()


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma", "smollm2"])
def test_bytes_of_ids_are_those_of_their_text(family: str) -> None:
    encoder = ChatTokens(make(family))
    text = "What is the weather in Paris? Zwölf 四 😀\n\n<think>"
    (as_text,) = encoder.encode([Document(text=text)])
    assert isinstance(as_text, Encoded)
    (as_ids,) = encoder.encode([read_tokens({"input_ids": as_text.ids.tolist()})])
    assert isinstance(as_ids, Encoded)
    # SentencePiece writes a space before the first word.
    assert as_ids.num_bytes.sum() - len(text.encode()) in (0, 1)
    assert np.array_equal(as_ids.ids, as_text.ids)
