"""Texts with labels and texts that belong together: tokens as the tokenizer's own, labels by name, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from lit_efficient import (
    ConfigurationError,
    EmbeddingData,
    EmbeddingRows,
    LabelledRows,
    LabelledTextData,
    PreferenceChat,
    PreferenceData,
    UnpairedChat,
    UnpairedPreferenceData,
)
from tests.tasks.text_kit import labelled, saved, sentence, written


def _labelled(folder: Path, content: list[dict[str, Any]], family: str = "bert", **options: Any) -> LabelledTextData:
    source = written(folder / "rows.jsonl", content)
    options = {"val": source, "batch_size": 2, "cache_dir": str(folder / "cache"), **options}
    data = LabelledTextData(train=source, tokenizer=saved(folder, family), **options)
    data.prepare_data()
    data.setup()
    return data


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2"])
def test_batches_are_those_of_the_tokenizer_itself(family: str, pairs: bool, tmp_path: Path) -> None:
    rows = labelled("class", 7, pairs)
    data = _labelled(tmp_path, rows, family, max_length=8, val_batch_size=7)
    (batch,) = data.val_dataloader()
    texts = [[row[key] for row in rows] for key in ("text", "text_pair")[: 1 + pairs]]
    own = data.chat_tokenizer(
        *texts, truncation=True, max_length=8, padding=True, pad_to_multiple_of=8, return_tensors="pt"
    )
    assert batch.keys() == {*own, "labels"}
    for name, value in own.items():
        assert torch.equal(batch[name], value), name
    assert [data.label_names[i] for i in batch["labels"]] == [row["label"] for row in rows]  # type: ignore[index]
    assert data.label_names == ["x", "y", "z"]
    counts = data.report["counts"]["val"]
    longer = [len(ids) > 8 for ids in data.chat_tokenizer(*texts).input_ids]
    assert counts["turns"] - counts["ended"] == sum(longer)


def test_padding_does_not_exceed_the_length_that_the_model_reads(tmp_path: Path) -> None:
    """Lengths are multiples of 8 else, and a table of 12 positions has no entry for a thirteenth."""
    long = sentence(1, 30)
    data = _labelled(tmp_path, [{"text": long, "label": name} for name in "xy"], max_length=12)
    assert next(iter(data.val_dataloader()))["input_ids"].shape == (2, 12)
    source = written(tmp_path / "more.jsonl", [{"anchor": long, "positive": f"{long} {i}"} for i in range(2)])
    options: dict[str, Any] = {"max_length": 12, "batch_size": 2, "cache_dir": str(tmp_path / "c")}
    texts = EmbeddingData(train=source, val=source, tokenizer=saved(tmp_path, "bert"), **options)
    rows = [{"prompt": long, "completion": "cat", "chosen": "dog", "rejected": "cat", "label": i} for i in range(2)]
    source = written(tmp_path / "rows.jsonl", rows)
    options |= {"tokenizer": saved(tmp_path, "gpt2"), "train": source, "val": source}
    pairs = PreferenceData(chat=PreferenceChat(too_long="left"), **options)
    judged = UnpairedPreferenceData(chat=UnpairedChat(too_long="left"), **options)
    for other, name in ((texts, "input_ids"), (pairs, "chosen_input_ids"), (judged, "kl_input_ids")):
        other.prepare_data()
        other.setup()
        assert next(iter(other.val_dataloader()))[name].shape[-1] == 12, name


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_first_token_of_a_word_has_its_label(family: str, tmp_path: Path) -> None:
    rows = labelled("tags", 3)
    rows[0]["tags"][0] = -100
    data = _labelled(tmp_path, rows, family, labels="tags", val_batch_size=3)
    assert data.label_names == ["A", "B", "C"]
    (batch,) = data.val_dataloader()
    for row, ids, labels in zip(rows, batch["input_ids"], batch["labels"]):
        words = [data.label_names[label] for label in labels if label != -100]
        assert words == [tag for tag in row["tags"] if tag != -100]
        own = data.chat_tokenizer(row["tokens"], is_split_into_words=True)
        assert ids[: len(own.input_ids)].tolist() == own.input_ids
        places = [i for i, w in enumerate(own.word_ids()) if w is not None and w != ([None, *own.word_ids()][i])]
        assert [i for i, label in enumerate(labels) if label != -100] == [
            p for p, t in zip(places, row["tags"]) if t != -100
        ]
    assert (batch["labels"][0] != -100).sum() == len(rows[0]["tags"]) - 1


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "RobertaTokenizer", "PreTrainedTokenizerFast"])
def test_words_have_the_spaces_that_a_text_has(kind: str, tmp_path: Path) -> None:
    """Byte-level tokenizers join the words of a list to one word."""
    import transformers
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["<s>", "</s>", "<pad>", "<unk>", "<mask>", *letters])}
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    if kind == "PreTrainedTokenizerFast":
        model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **special)
    else:
        made = getattr(transformers, kind)(vocab=vocabulary, merges=[], bos_token="<s>", **special)
    made.save_pretrained(tmp_path / "bytes")
    rows = [{"tokens": ["a", "cat"], "tags": ["A", "B"]}] * 2
    source = written(tmp_path / "rows.jsonl", rows)
    data = LabelledTextData(
        train=source,
        val=source,
        tokenizer=str(tmp_path / "bytes"),
        labels="tags",
        batch_size=2,
        cache_dir=str(tmp_path),
    )
    data.prepare_data()
    data.setup()
    batch = next(iter(data.val_dataloader()))
    read = data.chat_tokenizer  # read from the cache, as from an export
    assert read.decode(batch["input_ids"][0], skip_special_tokens=True) == " a cat"
    assert batch["input_ids"][0, : batch["attention_mask"][0].sum()].tolist() == read("a cat").input_ids
    assert [read.decode(i) for i in batch["input_ids"][0][batch["labels"][0] >= 0]] == [" ", " "]


def test_names_order_the_classes_and_numbers_are_ids(tmp_path: Path) -> None:
    rows = [{"text": sentence(i), "label": i % 3} for i in range(6)]
    data = _labelled(tmp_path, rows, val_batch_size=6)
    assert data.label_names == ["0", "1", "2"]
    (batch,) = data.val_dataloader()
    assert batch["labels"].tolist() == [0, 1, 2] * 2
    named = _labelled(tmp_path, rows, val_batch_size=6, rows=LabelledRows(names=["low", "mid", "high", "none"]))
    assert named.label_names == ["low", "mid", "high", "none"]
    texts = [{**row, "label": ["high", "low", "mid"][row["label"]]} for row in rows]
    (tmp_path / "more").mkdir()
    named = _labelled(tmp_path / "more", texts, val_batch_size=6, rows=LabelledRows(names=["low", "mid", "high"]))
    (batch,) = named.val_dataloader()
    assert batch["labels"].tolist() == [2, 0, 1] * 2
    texts = [{"text": sentence(i), "label": ["10", "9", "x", "01", "1"][i % 5]} for i in range(10)]
    codes = _labelled(tmp_path / "more", texts, val_batch_size=5)
    assert codes.label_names == ["01", "1", "9", "10", "x"]  # texts are names, also those of digits
    assert next(iter(codes.val_dataloader()))["labels"].tolist() == [3, 2, 4, 0, 1]
    with pytest.raises(ConfigurationError, match="label is 1000000000, above 999,999, the largest number of a class"):
        _labelled(tmp_path, [*rows, {"text": "cat", "label": 10**9}])
    numbers = _labelled(
        tmp_path, [{"text": sentence(i), "label": i / 4} for i in range(6)], labels="number", val_batch_size=6
    )
    (batch,) = numbers.val_dataloader()
    assert batch["labels"].tolist() == [i / 4 for i in range(6)]


@pytest.mark.parametrize("kind", ["folder", "parquet"])
@pytest.mark.parametrize("labels", ["class", "tags"])
def test_names_that_a_data_set_declares_are_those_of_the_classes(kind: str, labels: Any, tmp_path: Path) -> None:
    """In the declared order, and with classes that no row has. Numbers alone would be exported as their own names."""
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["spam", "ham", "eggs"])
    columns: dict[str, list[Any]] = {"text": [sentence(i) for i in range(6)], "label": [1, 0] * 3}
    features = {"text": datasets.Value("string"), "label": names}
    if labels == "tags":
        columns = {"tokens": [["a", "cat"]] * 6, "tags": [[1, 0]] * 6}
        features = {"tokens": datasets.List(datasets.Value("string")), "tags": datasets.List(names)}
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    source = tmp_path / "rows"
    if kind == "folder":
        table.save_to_disk(source)
    else:
        source.mkdir()
        table.to_parquet(source / "rows.parquet")
    data = LabelledTextData(
        train=str(source),
        val=str(source),
        tokenizer=saved(tmp_path, "bert"),
        labels=labels,
        batch_size=2,
        cache_dir=str(tmp_path / "cache"),
    )
    data.prepare_data()
    data.setup()
    assert data.label_names == ["spam", "ham", "eggs"]
    found = next(iter(data.val_dataloader()))["labels"]
    assert found[found >= 0].tolist() == [1, 0] * (2 if labels == "tags" else 1)


def test_a_text_may_have_several_classes_or_none(tmp_path: Path) -> None:
    lists = [["b"], [], ["c", "a"], ["a", "b", "c"]]
    rows = [{"text": sentence(i), "label": found} for i, found in enumerate(lists)]
    data = _labelled(tmp_path, rows, labels="classes", val_batch_size=4)
    assert data.label_names == ["a", "b", "c"]
    (batch,) = data.val_dataloader()
    assert batch["labels"].tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 1]]
    (tmp_path / "none").mkdir()
    empty = [{**row, "label": []} for row in rows]
    data = _labelled(tmp_path / "none", empty, labels="classes", rows=LabelledRows(names=["a", "b"]))
    assert next(iter(data.val_dataloader()))["labels"].tolist() == [[0, 0], [0, 0]]


@pytest.mark.filterwarnings("ignore:.*are malformed")
def test_the_same_rows_as_classes_and_as_numbers(tmp_path: Path) -> None:
    """One kind of labels does not read the cache of another one."""
    rows = [{"text": sentence(i), "label": i % 2 + (0.5 if i == 399 else 0)} for i in range(400)]
    lenient = LabelledRows(max_malformed=0.1)
    for kind, count in (("number", 400), ("class", 399), ("number", 400)):
        data = _labelled(tmp_path, rows, labels=kind, rows=lenient, val_batch_size=400)
        (batch,) = data.val_dataloader()
        assert len(batch["labels"]) == count
        assert batch["labels"].tolist() == [row["label"] for row in rows[:count]]


@pytest.mark.parametrize(
    ("labels", "change", "reason"),
    [
        ("class", {"label": -1}, "label is -1, neither a text nor a whole number of at least 0"),
        ("class", {"label": 3}, "label is the number 3, and other labels are texts"),
        ("class", {"text": " "}, "text is empty"),
        ("class", {"text": None}, "no text"),
        ("class", {"label": float("inf")}, "label is inf, neither"),
        ("classes", {"label": "x"}, "label is 'x', not a list of classes"),
        ("classes", {"label": ["x", "y", "x"]}, "label is .* which names a class twice"),
        ("classes", {"label": ["x", 3]}, r"label\[1\] is the number 3, and other labels are texts"),
        ("number", {"label": "many"}, "label is 'many', not a finite number"),
        ("tags", {"tags": ["A"]}, r"tags is no list of \d labels, one for each of the tokens"),
        ("tags", {"tokens": "a text"}, "tokens is no list of words"),
    ],
)
def test_malformed_rows_are_counted_and_shown(labels: Any, change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    rows = labelled(labels, 6)
    rows[5] |= change
    with pytest.raises(ConfigurationError, match=rf"1 of 6 rows for train are malformed(.|\n)*rows.jsonl:6: {reason}"):
        _labelled(tmp_path, rows, labels=labels)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no row has the keys text and label; got question, label"):
        _labelled(tmp_path, [{"question": "a", "label": 1}])
    with pytest.raises(ConfigurationError, match="at least 2 classes are needed"):
        _labelled(tmp_path, [{"text": sentence(i), "label": "same"} for i in range(4)])
    with pytest.raises(ConfigurationError, match=r"rows.names are names of classes, and labels is number"):
        _labelled(tmp_path, labelled("number"), labels="number", rows=LabelledRows(names=["a", "b"]))
    with pytest.raises(ConfigurationError, match=r"rows.names must be a list of different names, got \['a', 'a'\]"):
        LabelledRows(names=["a", "a"])
    with pytest.raises(ConfigurationError, match="labels must be one of class, classes, number, tags, got 'entity'"):
        _labelled(tmp_path, labelled("class"), labels="entity")


def test_anchors_with_positives_and_negatives(tmp_path: Path) -> None:
    rows = [
        {"anchor": sentence(i, 3), "positive": sentence(i, 6), "negative": [sentence(i + 1), "cat"]} for i in range(4)
    ]
    source = written(tmp_path / "rows.jsonl", rows)
    options: dict[str, Any] = {"tokenizer": saved(tmp_path, "bert"), "batch_size": 4, "cache_dir": str(tmp_path / "c")}
    data = EmbeddingData(train=source, val=source, rows=EmbeddingRows(negatives=2), **options)
    data.prepare_data()
    data.setup()
    (batch,) = data.val_dataloader()
    assert batch["input_ids"].shape[:2] == (4, 4)
    for row, ids, mask in zip(rows, batch["input_ids"], batch["attention_mask"]):
        texts = [row["anchor"], row["positive"], *row["negative"]]
        own = [data.chat_tokenizer(text).input_ids for text in texts]
        assert [one[m == 1].tolist() for one, m in zip(ids, mask)] == own
    with pytest.raises(ConfigurationError, match=r"2 negatives, and rows\.negatives is 3"):
        EmbeddingData(train=source, val=source, rows=EmbeddingRows(negatives=3), **options).prepare_data()
