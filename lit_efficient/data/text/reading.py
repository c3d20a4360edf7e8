"""Reading of sources as documents or pairs, and an account of malformed rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from lit_efficient.data.text.chat_formats import Document, Format, MalformedRow, Row, read_row, recognise
from lit_efficient.data.text.message_images import UnplacedImage, resolve_image
from lit_efficient.data.text.pair_formats import Example, Margin, StringsAs, read_pair, recognise_pairs
from lit_efficient.data.text.rows import Source
from lit_efficient.data.text.token_rows import read_tokens
from lit_efficient.errors import ConfigurationError

# Malformed rows that are kept for messages.
_SHOWN = 20
# Rows that decide the format of a source.
_PEEKED = 100

# Place of a row, and its example or the reason why it has none.
Found = tuple[str, Example | MalformedRow]


@dataclass
class Empty:
    """Number of texts without content, and the place of the first one."""

    count: int = 0
    first: str = ""

    def add(self, place: str) -> None:
        """Count a text."""
        self.count += 1
        self.first = self.first or place

    def message(self, what: str) -> str:
        """Return a message about the texts. ``what`` is their purpose, "train" or "val"."""
        return f"{self.count:,} empty texts for {what} are left out, the first is {self.first}"


class Reader:
    """Rows of sources as examples, from the beginning at each iteration.

    Args:
        sources: The sources. Each has its own format.
        kind: Format of the rows. ``auto`` recognises it by the keys.
        columns: Names of the keys in the rows: {key of the format: key in the rows}.
        max_rows: Largest number of rows to read of each source. None: all.
        images: Read images in the messages of conversations.
        image_folder: Folder to which the paths of images are relative. None: that of the source.

    Raises:
        ConfigurationError: If no row of a source has the keys of any format.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        kind: Format | Literal["auto"] = "auto",
        columns: Mapping[str, str] | None = None,
        max_rows: int | None = None,
        images: bool = False,
        image_folder: str | None = None,
    ) -> None:
        self._images = images
        self._image_folder = None if image_folder is None else Path(image_folder).expanduser()
        self._columns = dict(columns or {})
        self._max_rows = max_rows
        self.formats: list[str] = []
        """Sentences about the recognised formats, one for each source."""
        self.empty = Empty()
        """Texts without content that the last iteration has left out."""
        self._sources: list[tuple[Source, Any]] = []
        for source in sources:
            if source.is_text or any(True for _ in source.rows()):
                found, sentence = self._format(source, kind)
            else:  # one shard of several may be empty
                found, sentence = None, f"{source.name}: no rows"
            self._sources.append((source, found))
            self.formats.append(sentence)

    def __iter__(self) -> Iterator[Found]:
        for _, found in self.numbered():
            yield found

    def numbered(self) -> Iterator[tuple[int, Found]]:
        """Yield the rows of all sources, one source after another, each with the entry that its source belongs to.

        Raises:
            ConfigurationError: If all rows are texts without content.
        """
        self.empty = Empty()
        yielded = False
        for index in range(len(self._sources)):
            for found in self.read(index):
                yielded = True
                yield self._sources[index][0].entry, found
        if self.empty.count and not yielded:
            raise ConfigurationError(
                f"{self.empty.first}: the text is empty, and so are all {self.empty.count} texts. Name others."
            )

    def read(self, index: int) -> Iterator[Found]:
        """Yield the rows of a source.

        Texts without content are left out and counted: folders of files and data sets of lines usually hold some.
        """
        source, kind = self._sources[index]
        for place, row in islice(source.rows(), self._max_rows):
            if isinstance(row, str):
                yield place, MalformedRow(row)
                continue
            renamed = self._renamed(row)
            if kind == "text" and _is_blank(renamed.get("text")):
                self.empty.add(place)
                continue
            try:
                found: Example | MalformedRow = self._read(renamed, kind)
                if isinstance(found, Document) and found.images:
                    found = self._with_files(found, source)
            except MalformedRow as reason:
                found = reason
            yield place, found

    @cached_property
    def estimates(self) -> list[float]:
        """Estimated number of rows of each source. A source of unknown size counts like the average of the others."""
        counts = []
        for source, _ in self._sources:
            count = source.count()
            if count is not None and self._max_rows is not None:
                count = min(count, self._max_rows)
            counts.append(count)
        known = [count for count in counts if count is not None]
        average = sum(known) / len(known) if known else 1.0
        return [average if count is None else float(count) for count in counts]

    def _read(self, row: Row, kind: Any) -> Example:
        if kind == "tokens" and not self._images:
            return read_tokens(row)
        return read_row(row, kind, self._images)

    def _with_files(self, document: Document, source: Source) -> Document:
        """Return a conversation whose images are paths of files, or bytes."""
        folder = self._image_folder or source.folder
        try:
            return replace(document, images=tuple(resolve_image(image, folder) for image in document.images))
        except UnplacedImage as reason:
            raise MalformedRow(str(reason)) from reason

    def _format(self, source: Source, kind: Any) -> tuple[Any, str]:
        """Return the format of a source, and a sentence about it."""
        if source.is_text:
            return "text", f"{source.name}: text, one document a file"
        if kind == "auto":
            return recognise(self._first_rows(source), source.name, source.hint)
        # A table: if its columns lack the keys, all of its rows do.
        if source.hint:
            recognise(self._first_rows(source), source.name, source.hint, [kind])
        return kind, f"{source.name}: format {kind}, as asked"

    def _first_rows(self, source: Source) -> list[dict[str, Any]]:
        rows = (row for _, row in source.rows() if isinstance(row, dict))
        return [self._renamed(row) for row in islice(rows, _PEEKED)]

    def _renamed(self, row: Row) -> dict[str, Any]:
        """Return a row with the keys of the format."""
        if not self._columns:
            return dict(row)
        # A column that is mapped to another key must not also count under its own name.
        renamed = set(self._columns.values())
        result = {key: value for key, value in row.items() if key not in renamed}
        for key, name in self._columns.items():
            if name in row:
                result[key] = row[name]
        return result


class JudgedReader(Reader):
    """Rows of sources as answers that are good or bad: those of `Reader` with a "label", or a "kto_tag"."""

    def _read(self, row: Row, kind: Any) -> Example:
        value = row.get("label", row.get("kto_tag"))
        judged = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
        if str(value).lower() not in judged:
            raise MalformedRow(f"label is {value!r}, neither true (a good answer) nor false (a bad one)")
        document = read_row({key: one for key, one in row.items() if key not in ("label", "kto_tag")}, kind)
        if not document.messages and not document.given:
            raise MalformedRow("the prompt is empty")
        return replace(document, desirable=judged[str(value).lower()])

    def _format(self, source: Source, kind: Any) -> tuple[Any, str]:
        rows = self._first_rows(source)
        if source.is_text or not any({"label", "kto_tag"} & row.keys() for row in rows):
            raise ConfigurationError(
                f"{source.name}: no row has the key label (true for a good answer, false for a bad one). Pairs with "
                "chosen and rejected are for PreferenceData."
            )
        found, sentence = recognise(rows, source.name, source.hint, ("messages", "sharegpt", "alpaca", "completion"))
        return found, f"{sentence.partition(';')[0]}, with the judgement label"


def _is_blank(value: object) -> bool:
    return isinstance(value, str) and not value.strip()


class PairReader(Reader):
    """Rows of sources as pairs.

    Args:
        sources: The sources.
        strings_as: Meaning of prompts and answers that are texts, as in `read_pair`.
        columns: As in `Reader`.
        max_rows: As in `Reader`.
        margin: Origin of the margins, as in `read_pair`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        strings_as: StringsAs = "text",
        columns: Mapping[str, str] | None = None,
        max_rows: int | None = None,
        margin: Margin = "margin",
    ) -> None:
        self._strings_as: StringsAs = strings_as
        self._margin: Margin = margin
        super().__init__(sources, "auto", columns, max_rows)

    def _read(self, row: Row, kind: Any) -> Example:
        return read_pair(row, kind, self._strings_as, self._margin)

    def _format(self, source: Source, kind: Any) -> tuple[Any, str]:
        if source.is_text:
            raise ConfigurationError(
                f"{source.name} is a text, which holds no pairs. Give .jsonl, .json, .csv, .tsv or .parquet files."
            )
        return recognise_pairs(self._first_rows(source), source.name, source.hint, self._strings_as, self._margin)


@dataclass
class RowCount:
    """Numbers of rows and of malformed rows, and the first malformed ones."""

    rows: int = 0
    malformed: int = 0
    shown: list[tuple[str, str]] = field(default_factory=list)  # places and reasons

    def refuse(self, place: str, reason: object) -> None:
        """Count a malformed row."""
        self.malformed += 1
        if len(self.shown) < _SHOWN:
            self.shown.append((place, str(reason)))

    def check(self, what: str, most: float) -> str | None:
        """Return a message about malformed rows, or None without any.

        Args:
            what: Purpose of the rows, "train" or "val".
            most: Largest allowed share of malformed rows.

        Raises:
            ConfigurationError: If the share is larger.
        """
        if not self.malformed:
            return None
        message = self.described(what)
        if self.malformed > most * self.rows:
            raise ConfigurationError(
                f"{message}\nmax_malformed allows {most:.2%}: repair the rows, or raise it to leave them out."
            )
        return message

    def described(self, what: str) -> str:
        """Return the numbers of rows and of malformed rows, and the reasons of the first ones."""
        lines = [f"{self.malformed} of {self.rows} rows for {what} are malformed ({self.malformed / self.rows:.2%}):"]
        for place, reason in self.shown[:5]:
            lines.append(f"  {place}: {reason}")
        if self.malformed > 5:
            lines.append(f"  and {self.malformed - 5} more")
        return "\n".join(lines)
