"""Documents of sources, with an account of every row that is none."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, TypeVar

from lit_efficient.data.text.chat_formats import Document, Format, MalformedRow, read_row, recognise
from lit_efficient.data.text.pair_formats import Pair, StringsAs, read_pair, recognise_pairs
from lit_efficient.data.text.rows import Source
from lit_efficient.errors import ConfigurationError

SHOWN = 20  # malformed rows that are kept to be shown
_PEEKED = 100  # rows by which a format is recognised

T = TypeVar("T")
Example = Document | Pair
"""What a row is read as."""


class Reader:
    """Reads sources from their beginning, each in its own format; ``auto`` recognises it by the keys.

    ``columns`` has own names of keys, {key of the format: key in the rows}; ``max_rows`` are read of each source at
    most.

    Raises:
        ConfigurationError: If no row of a source has the keys of any format.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        kind: Format | Literal["auto"] = "auto",
        columns: Mapping[str, str] | None = None,
        max_rows: int | None = None,
    ) -> None:
        self._columns = dict(columns or {})
        self._max_rows = max_rows
        self._sources = [(source, *self._recognised(source, kind)) for source in sources]
        self.rows = 0
        self.malformed = 0
        self.shown: list[tuple[str, str]] = []

    @property
    def formats(self) -> list[str]:
        """What was recognised, a sentence a source."""
        return [sentence for _, _, sentence in self._sources]

    def __iter__(self) -> Iterator[tuple[str, Example]]:
        """Yield the place of every row that can be read, and what it holds."""
        self.rows, self.malformed, self.shown = 0, 0, []
        for source, kind, _ in self._sources:
            for place, row in islice(source.rows(), self._max_rows):
                self.rows += 1
                try:
                    if isinstance(row, str):
                        raise MalformedRow(row)
                    found = self._read(self._renamed(row), kind)
                except MalformedRow as reason:
                    self.refuse(place, str(reason))
                    continue
                yield place, found

    def refuse(self, place: str, reason: str) -> None:
        """Count a row that turned out to be malformed later."""
        self.malformed += 1
        if len(self.shown) < SHOWN:
            self.shown.append((place, reason))

    def _recognised(self, source: Source, kind: Any) -> tuple[Any, str]:
        if source.is_text or any(True for _ in source.rows()):
            return self._format(source, kind)
        return None, f"{source.name}: no rows"  # a shard may be empty where others are not

    def _read(self, row: Mapping[str, Any], kind: Any) -> Example:
        return read_row(row, kind)

    def _format(self, source: Source, kind: Any) -> tuple[Any, str]:
        if source.is_text:
            return "text", f"{source.name}: text, one document a file"
        if kind == "auto":
            return recognise(self._first_rows(source), source.name, source.hint)
        if source.hint:  # its columns are known: rows of another format come no more
            recognise(self._first_rows(source), source.name, source.hint, [kind])
        return kind, f"{source.name}: format {kind}, as asked"

    def _first_rows(self, source: Source) -> list[dict[str, Any]]:
        first = islice((row for _, row in source.rows() if isinstance(row, dict)), _PEEKED)
        return [self._renamed(row) for row in first]

    def _renamed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if not self._columns:
            return dict(row)
        taken = set(self._columns.values())
        kept = {key: value for key, value in row.items() if key not in taken}
        return kept | {key: row[name] for key, name in self._columns.items() if name in row}


class PairReader(Reader):
    """Reads pairs."""

    def __init__(
        self,
        sources: Sequence[Source],
        strings_as: StringsAs = "text",
        columns: Mapping[str, str] | None = None,
        max_rows: int | None = None,
    ) -> None:
        self._strings_as: StringsAs = strings_as
        super().__init__(sources, "auto", columns, max_rows)

    def _read(self, row: Mapping[str, Any], kind: Any) -> Example:
        return read_pair(row, kind, self._strings_as)

    def _format(self, source: Source, kind: Any) -> tuple[Any, str]:
        if source.is_text:
            raise ConfigurationError(f"{source.name} is a text; pairs come as .jsonl, .json, .csv, .tsv or .parquet.")
        return recognise_pairs(self._first_rows(source), source.name, source.hint)


def check_malformed(what: str, rows: int, malformed: int, shown: Sequence[Sequence[str]], most: float) -> str | None:
    """Refuse a source in which the share of malformed rows is above ``most``; return a sentence about them, or None."""
    if not malformed:
        return None
    listed = [f"  {place}: {reason}" for place, reason in shown[:5]]
    rest = [f"  and {malformed - len(listed)} more"] if malformed > len(listed) else []
    text = "\n".join([f"{malformed} of {rows} rows for {what} are malformed ({malformed / rows:.2%}):", *listed, *rest])
    if malformed > most * rows:
        raise ConfigurationError(
            f"{text}\nmax_malformed allows {most:.2%}: mend the rows, or raise it to leave them out."
        )
    return text


def in_chunks(values: Iterator[T], size: int) -> Iterator[list[T]]:
    """Lists of up to ``size`` values."""
    while chunk := list(islice(values, size)):
        yield chunk
