"""Rows of plain texts for encoders and embeddings, as a tokenizer writes them: with its special tokens, no template.

    class, number    {"text": ..., "label": ...}, perhaps with "text_pair"
    classes          the same, and the label is a list of classes, which may be empty
    tags             {"tokens": [word, ...], "tags": [label, ...]}: the label of a word belongs to its first token
    embedding        {"anchor": ..., "positive": ...}, perhaps with "negative": a text or a list of texts

A row that does not match its format raises `MalformedRow`, as in `chat_formats`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lit_efficient.data.text.arrow_rows import ClassNumber
from lit_efficient.data.text.chat_formats import MalformedRow, Row, check_keys, keys_shown, unread
from lit_efficient.data.text.chat_tokens import Encoded, SplitRow
from lit_efficient.data.text.collate import padded_length
from lit_efficient.data.text.document_store import Documents
from lit_efficient.data.text.pair_formats import Texts, finite_number
from lit_efficient.data.text.reading import Reader
from lit_efficient.data.text.rows import Source
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import map_numbers
from lit_efficient.internals.hugging_face import encodes_alone
from lit_efficient.losses.next_token import IGNORE

Labels = Literal["class", "classes", "number", "tags"]
TextFormat = Literal["class", "classes", "number", "tags", "embedding"]
TEXT_KEYS: dict[str, tuple[str, ...]] = {
    "class": ("text", "label"),
    "classes": ("text", "label"),
    "number": ("text", "label"),
    "tags": ("tokens", "tags"),
    "embedding": ("anchor", "positive"),
}
FURTHER_TEXT_KEYS: dict[str, tuple[str, ...]] = {
    "class": ("text_pair",),
    "classes": ("text_pair",),
    "number": ("text_pair",),
    "tags": (),
    "embedding": ("negative",),
}

_MOST = 999_999


@dataclass
class LabelIds:
    """Numbers of the labels of rows.

    Without names those that the data sets declare are taken. Other texts are numbered in the order in which they occur.
    """

    given: Sequence[str] | None = None  # names of the classes in order
    found: dict[str, int] = field(default_factory=dict)
    most: int = -1  # largest label that is a number

    def id_of(self, value: object, name: str) -> int:
        """Return the number of a label.

        Raises:
            MalformedRow: If the label is none of the given names, or of another kind than the others.
        """
        if isinstance(value, ClassNumber):
            if self.given is None and self.most < 0 and not self.found:
                self.given = value.names
            if self.given is not None and value.names[value] in self.given:
                return self.given.index(value.names[value])
        number = _whole(value)
        if number is not None and self.given is None and isinstance(value, str):
            number = None  # a name of digits
        if number is None and not (isinstance(value, str) and value.strip()):
            raise MalformedRow(f"{name} is {value!r}, neither a text nor a whole number of at least 0")
        if self.given is not None:
            if value in self.given:
                return self.given.index(str(value))
            if number is not None and number < len(self.given):
                return number
            raise MalformedRow(f"{name} is {value!r}, none of the {len(self.given)} names")
        if number is not None:
            if self.found:
                raise MalformedRow(f"{name} is the number {value!r}, and other labels are texts")
            if number > _MOST:
                raise MalformedRow(f"{name} is {value!r}, above {_MOST:,}, the largest number of a class")
            self.most = max(self.most, number)
            return number
        if self.most >= 0:
            raise MalformedRow(f"{name} is the text {value!r}, and other labels are numbers")
        return self.found.setdefault(str(value), len(self.found))

    def names(self) -> list[str]:
        """Return the names by number. Numbers are their own names."""
        if self.given is not None:
            return list(self.given)
        return list(self.found) or [str(number) for number in range(self.most + 1)]


def _whole(value: object) -> int | None:
    """Return a whole number of at least 0, which may be a text, as in tables; None for another value."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, int | float) and value >= 0 and math.isfinite(value) and value == int(value):
        return int(value)
    return None


def separate_words(tokenizer: Any) -> str | None:
    """Let a byte-level tokenizer write a space before each word of a list, as it does in a text, in place.

    Tokenizers like RoBERTa's join the words of a list without it (``add_prefix_space`` is false).

    Returns:
        A warning if the tokenizer joins words nevertheless.
    """
    from tokenizers import pre_tokenizers

    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    if isinstance(splitter, pre_tokenizers.ByteLevel) and not splitter.add_prefix_space:
        splitter.add_prefix_space = True
        tokenizer.backend_tokenizer.pre_tokenizer = splitter
        tokenizer.add_prefix_space = True
        tokenizer.init_kwargs["add_prefix_space"] = True  # read when it is loaded again
    words = ["a", "b"]
    if tokenizer(words, is_split_into_words=True).input_ids == tokenizer(" ".join(words)).input_ids:
        return None
    return f"{type(tokenizer).__name__} writes the words of a row without the spaces that a text has between words"


class TextReader(Reader):
    """Rows of sources as plain texts.

    Args:
        sources: The sources.
        text_format: Format of all sources.
        ids: Numbers of the labels, which are shared by all sources.
        negatives: Number of negatives in each row.
        columns: As in `Reader`.
        max_rows: As in `Reader`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        text_format: TextFormat,
        ids: LabelIds,
        negatives: int = 0,
        columns: Mapping[str, str] | None = None,
        max_rows: int | None = None,
    ) -> None:
        self._kind: TextFormat = text_format
        self._ids = ids
        self._negatives = negatives
        super().__init__(sources, "auto", columns, max_rows)

    def _format(self, source: Source, kind: Any) -> tuple[Any, str]:
        keys = TEXT_KEYS[self._kind]
        rows = [] if source.is_text else self._first_rows(source)
        seen: dict[str, None] = {}
        for row in rows:
            seen.update(dict.fromkeys(row))
        if not any(all(row.get(key) is not None for key in keys) for row in rows):
            raise ConfigurationError(
                f"{source.name}: no row has the keys {' and '.join(keys)}; got "
                f"{', '.join(keys_shown(seen)) or 'a text'}. Map your keys with rows.columns, as in columns: "
                f"{{{keys[0]}: sentence}}.{source.hint}"
            )
        further = FURTHER_TEXT_KEYS[self._kind]
        return self._kind, f"{source.name}: format {self._kind}, by the keys {', '.join(keys)}" + unread(
            seen, (*keys, *further)
        )

    def _read(self, row: Row, kind: Any) -> Texts:
        check_keys(row, TEXT_KEYS[self._kind])
        if self._kind == "tags":
            return self._words(row)
        if self._kind == "embedding":
            return Texts(((_text(row, "anchor"),), (_text(row, "positive"),), *self._negatives_of(row)))
        texts: tuple[str, ...] = (_text(row, "text"),)
        if row.get("text_pair") is not None:
            texts = (*texts, _text(row, "text_pair"))
        if self._kind == "number":
            return Texts((texts,), label=finite_number(row, "label"))
        if self._kind == "classes":
            return Texts((texts,), classes=self._classes(row["label"]))
        return Texts((texts,), label=float(self._ids.id_of(row["label"], "label")))

    def _classes(self, value: object) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise MalformedRow(f"label is {value!r}, not a list of classes")
        ids = [self._ids.id_of(one, f"label[{i}]") for i, one in enumerate(value)]
        if len({*ids}) < len(ids):
            raise MalformedRow(f"label is {value!r}, which names a class twice: it is a list of classes")
        return tuple(ids)

    def _words(self, row: Row) -> Texts:
        words = row["tokens"]
        tags = row["tags"]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words) or not words:
            raise MalformedRow("tokens is no list of words")
        if not isinstance(tags, list) or len(tags) != len(words):
            raise MalformedRow(f"tags is no list of {len(words)} labels, one for each of the tokens")
        ids = [IGNORE if tag == IGNORE else self._ids.id_of(tag, f"tags[{i}]") for i, tag in enumerate(tags)]
        return Texts((tuple(words),), tags=tuple(ids))

    def _negatives_of(self, row: Row) -> Iterator[tuple[str]]:
        if not self._negatives:
            return
        value = row.get("negative")
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or len(found) < self._negatives:
            count = 0 if not isinstance(found, list) else len(found)
            raise MalformedRow(f"{count} negatives, and rows.negatives is {self._negatives}")
        for number in range(self._negatives):
            yield (_text({"negative": found[number]}, "negative"),)


def _text(row: Row, key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise MalformedRow(f"{key} is a {type(value).__name__}, not text")
    if not value.strip():
        raise MalformedRow(f"{key} is empty")
    return value


class TextTokens:
    """Tokenises texts as the tokenizer itself does, cut to a length.

    Args:
        tokenizer: Fast tokenizer of transformers.
        max_length: Largest number of tokens of a text, with special tokens.
    """

    end_of_turn = None

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length

    def encode_chunk(self, chunk: Sequence[SplitRow]) -> list[list[Encoded] | MalformedRow]:
        """Return the tokens of each text of a row, and the labels of its tokens or its classes if it has such.

        ``trained`` is true for tokens of the second text of a pair, and for tokens with a label.
        """
        wanted: dict[tuple[int, bool], list[tuple[str, ...]]] = {}
        for one in chunk:
            if isinstance(one.row, Texts):
                for group in one.row.groups:
                    key = self._key(one.row, group)
                    wanted.setdefault(key, []).append(group)
        found = {key: iter(self._encodings(groups, key)) for key, groups in wanted.items()}
        results: list[list[Encoded] | MalformedRow] = []
        for one in chunk:
            if isinstance(one.row, MalformedRow):
                results.append(one.row)
                continue
            assert isinstance(one.row, Texts)
            encoded: list[Encoded] = []
            for group in one.row.groups:
                encoding = next(found[self._key(one.row, group)])
                encoded.append(_encoded(encoding.ids, np.array(encoding.type_ids) == 1, not encoding.overflowing))
                if one.row.tags is not None:
                    encoded.append(_tagged(encoding.word_ids, one.row.tags))
                if one.row.classes is not None:
                    classes = one.row.classes
                    encoded.append(_encoded(classes, np.ones(len(classes), dtype=bool), True))
            results.append(encoded)
        return results

    def _key(self, row: Texts, group: tuple[str, ...]) -> tuple[int, bool]:
        """Return the number of texts in a group, and whether these are words of a text."""
        return (0, True) if row.tags is not None else (len(group), False)

    def _encodings(self, groups: list[tuple[str, ...]], key: tuple[int, bool]) -> list[Any]:
        length, words = key
        encode = partial(self.tokenizer, truncation=True, max_length=self.max_length, return_attention_mask=False)
        if words:
            return list(encode([list(group) for group in groups], is_split_into_words=True).encodings)
        texts: list[Any] = [group[0] for group in groups]
        pairs = [group[1] for group in groups] if length == 2 else None
        if not encodes_alone(self.tokenizer):
            return list(encode(texts, pairs).encodings)
        encode(texts[:1])  # sets the length at which the Rust tokenizer cuts, which is faster without places
        return list(self.tokenizer.backend_tokenizer.encode_batch_fast(groups if pairs else texts))


def _encoded(ids: Sequence[int], marks: np.ndarray, is_whole: bool) -> Encoded:
    numbers = np.array(ids, dtype=np.int64)
    return Encoded(numbers, marks, np.zeros(len(numbers), dtype=np.int64), turns=1, ended=int(is_whole))


def _tagged(word_ids: Sequence[int | None], tags: Sequence[int]) -> Encoded:
    """Return the label of each token: that of its word for the first token of a word."""
    labels = np.zeros(len(word_ids), dtype=np.int64)
    marks = np.zeros(len(word_ids), dtype=bool)
    before = None
    for place, word in enumerate(word_ids):
        if word is not None and word != before and tags[word] != IGNORE:
            labels[place] = tags[word]
            marks[place] = True
        before = word
    return Encoded(labels, marks, np.zeros(len(labels), dtype=np.int64))


class TextRows:
    """Texts of a split: item i is the tokens and marks of each text of row i, and its label.

    Args:
        folder: Folder of the cache.
        split: Name of the split.
        parts: Suffixes of the files of the texts.
        columns: Names of the numbers; none or ``label``.
    """

    def __init__(self, folder: Path, split: str, parts: Sequence[str], columns: Sequence[str]) -> None:
        self.texts = [Documents(folder, f"{split}{part}") for part in parts]
        self.labels: np.ndarray | None = None
        if columns:
            self.labels = map_numbers(folder / f"{split}.label.bin", np.float64)

    def __len__(self) -> int:
        return len(self.texts[0].facts)

    def __getitem__(self, index: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], float]:
        label = math.nan if self.labels is None else float(self.labels[index])
        return [documents.whole(index) for documents in self.texts], label

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(int(documents.facts[:, 0].sum()) for documents in self.texts)


def padded(rows: Sequence[np.ndarray], value: int, most: int) -> np.ndarray:
    """Return rows [n] of at most ``most`` numbers as one array [B, T], padded on the right."""
    length = padded_length(max(map(len, rows)), most)
    found = np.full((len(rows), length), value, dtype=np.int64)
    for number, row in enumerate(rows):
        found[number, : len(row)] = row
    return found
