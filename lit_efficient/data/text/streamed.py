"""Streams: data that is read, tokenised and packed during training, without a cache, and resumed exactly.

    sources are interleaved in proportion to their numbers of rows; a part (rank, worker) takes every row of a source
    whose number equals its own modulo ranks * workers; a buffer collects documents; a full buffer is packed by
    best-fit-decreasing, and the packed rows are shuffled

A stream starts again at its end, so it never ends. An epoch is a number of batches, the same on every rank, so no rank
waits for another at the end of an epoch. Everything is a function of the sources and the seed, so the state is one
number.

Saves: the disk and the time for a cache.
Costs: tokenising in every run; a resumed run reads and tokenises again what it had seen (this is what makes it exact).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import IterableDataset, get_worker_info

from lit_efficient.data.text.chat_formats import MalformedRow
from lit_efficient.data.text.chat_tokens import ChatTokens, Encoded
from lit_efficient.data.text.document_store import labels_of
from lit_efficient.data.text.interleaving import interleave
from lit_efficient.data.text.mixture import By, Stop
from lit_efficient.data.text.packing import PackedRow, pack_lengths
from lit_efficient.data.text.pair_formats import Example
from lit_efficient.data.text.reading import Empty, Reader, RowCount
from lit_efficient.data.text.rendered import TextCount
from lit_efficient.data.text.truncation import Counts, Side, cut, facts
from lit_efficient.distributed.ranks import place_among_ranks
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.order.mixture_sampler import schedule_at

# Rows from which on the share of malformed rows is checked.
_ENOUGH_ROWS = 100

Waiting = tuple[str, Example, int]
"""Place of a row, its content, and the number of its source."""


@dataclass(frozen=True)
class StreamMixture:
    """Shares of the sources of a stream, their unit, and what happens when a source ends.

    Args:
        shares: Share of each source at K places of a schedule [K, S]; K is 1 without a schedule.
        by: Unit of the shares.
        stop: What happens when a source ends.
        rows: Number of rows of a process from the beginning to the end of the schedule.
    """

    shares: np.ndarray
    by: By
    stop: Stop
    rows: float

    def shares_at(self, rows: float) -> np.ndarray:
        """Return the shares [S] after a number of rows of a process."""
        return schedule_at(self.shares, np.array([rows / self.rows]))[0]


class StreamedRows(IterableDataset[PackedRow]):
    """Endless rows of packed (or padded) batches, as `PackedDocuments` gives them.

    Args:
        readers: Reader of the sources, or of each source of a mixture.
        encoder: Tokeniser of documents.
        max_length: Largest number of tokens of a row.
        truncation: Side at which a long conversation is cut.
        pack: Pack several documents into a row.
        buffer: Number of documents that are packed and shuffled together, in each worker.
        max_malformed: Largest share of malformed rows. With a larger share the stream raises an error.
        seed: Seed of the order.
        rendered: Choice of the user about control tokens in texts, as in `TextCount.check`.
        mixture: Shares of the sources of a mixture; None without one.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        encoder: ChatTokens,
        max_length: int,
        truncation: Side,
        pack: bool,
        buffer: int,
        max_malformed: float,
        seed: int,
        rendered: bool | None = None,
        mixture: StreamMixture | None = None,
    ) -> None:
        self.readers = readers
        for reader in readers:
            _ = reader.estimates  # counted here, and not in every worker
        self.mixture = mixture
        self.encoder = encoder
        self.max_length = max_length
        self.truncation = truncation
        self.pack = pack
        self.buffer = buffer
        self.max_malformed = max_malformed
        self.seed = seed
        self.rendered = rendered
        # Rank and ranks, set by the main process: workers may not know.
        self.place: tuple[int, int] | None = None
        self.counts = Counts()
        self._rows_read = RowCount()  # of this pass over the stream
        self._texts = TextCount()  # of this pass
        self._has_warned = False

    def __iter__(self) -> Iterator[PackedRow]:
        rank, ranks = self.place or place_among_ranks()
        worker = get_worker_info()
        workers = worker.num_workers if worker else 1
        part = rank * workers + (worker.id if worker else 0)
        parts = ranks * workers
        if self.mixture is not None:
            yield from self._mixed(part, parts, workers, self.mixture)
            return
        for number in count():
            yielded = 0
            for waiting in self._buffers(part, parts):
                rows = self._packed(waiting, mix_seed(self.seed, number, yielded, part))
                yielded += len(rows)
                # The last buffer: the whole stream is read.
                if len(waiting) < self.buffer:
                    self._report()
                    if not yielded:
                        raise ConfigurationError(
                            f"LanguageData: the stream holds nothing to learn for part {part + 1} of {parts} (process, "
                            "worker). Use fewer workers, or more data."
                        )
                yield from rows

    def _mixed(self, part: int, parts: int, workers: int, mixture: StreamMixture) -> Iterator[PackedRow]:
        """Yield the rows of a mixture.

        The next row is one of the source that has the smallest number of rows or tokens for its share. The tokens of a
        row are known when its buffer is tokenised; until then it counts like the average row of its source. With a
        schedule each buffer has the shares of its middle, if it is as long as the one before, and counts from there.
        """
        sources = mixture.shares.shape[1]
        passes = [self._own_rows(source, part, parts) for source in range(sources)]
        rows = np.zeros(sources)
        tokens = np.zeros(sources)
        start = np.zeros(sources)  # what should have been used of each source at the beginning of the buffer
        shares = mixture.shares_at(0)
        yielded = 0  # rows of this worker
        last = 0  # those of the buffer before
        ended: set[int] = set()  # sources that were read to their ends
        for number in count():
            waiting: list[Waiting] = []
            tokenised = rows.copy()
            if len(mixture.shares) > 1:
                used = tokens if mixture.by == "tokens" else rows
                # What one buffer has used too much or too little of a source, the next one makes up for.
                start = start + shares * (used.sum() - start.sum())
                shares = mixture.shares_at((yielded + last / 2) * workers)
            while len(waiting) < self.buffer:
                used = rows
                if mixture.by == "tokens":
                    average = tokens.sum() / max(tokenised.sum(), 1) or 1.0
                    mean = np.where(tokens > 0, tokens / np.maximum(tokenised, 1), average)
                    used = tokens + (rows - tokenised) * mean
                # A source without a share now has an infinite use of it.
                source = int(np.argmin(np.divide(used - start, shares, out=np.full(sources, np.inf), where=shares > 0)))
                found = next(passes[source], None)
                if found is None and mixture.stop == "first_exhausted":
                    passes = [self._own_rows(one, part, parts) for one in range(sources)]
                    ended.add(source)
                elif found is None:
                    passes[source] = self._own_rows(source, part, parts)
                    ended.add(source)
                else:
                    waiting.append((*found, source))
                    rows[source] += 1
            packed = self._packed(waiting, mix_seed(self.seed, number, part))
            for row in packed:
                tokens[row.source] += sum(len(ids) for ids, _, _ in row)
            for source in ended:
                if not tokens[source]:
                    raise ConfigurationError(
                        f"LanguageData: source {source + 1} of the mixture holds nothing to learn for part {part + 1} "
                        f"of {parts} (process, worker). Use fewer workers, or more data."
                    )
            # Rows of one buffer are shuffled, so that the shares change from buffer to buffer only.
            if not yielded and len(mixture.shares) > 1 and 4 * len(packed) * workers > mixture.rows:
                rank_zero_warn(
                    f"LanguageData: the schedule of weights ends after {mixture.rows:g} rows, and changes only every "
                    f"{len(packed) * workers} rows, the length of stream.buffer ({self.buffer}) in each worker. Set a "
                    "smaller stream.buffer."
                )
            last = len(packed)
            yielded += last
            yield from packed

    def _own_rows(self, source: int, part: int, parts: int) -> Iterator[tuple[str, Example]]:
        """Yield the examples of this part in a pass over a source of a mixture."""
        yielded = False
        for is_ours, (place, row) in interleave(self.readers[source], part, parts):
            self._rows_read.rows += 1
            if isinstance(row, MalformedRow):
                self._rows_read.refuse(place, row)
            elif is_ours:
                yielded = True
                yield place, row
        self._report()
        if not yielded:
            raise ConfigurationError(
                f"LanguageData: source {source + 1} of the mixture holds no row for part {part + 1} of {parts} "
                "(process, worker). Use fewer workers, or more data."
            )

    def _buffers(self, part: int, parts: int) -> Iterator[list[Waiting]]:
        """Yield the examples of this part in lists of ``buffer``, and at the end a shorter list, which may be empty."""
        self._rows_read = RowCount()
        self._texts = TextCount()
        (reader,) = self.readers
        reader.empty = Empty()
        waiting: list[Waiting] = []
        # Every process reads the whole stream and keeps its part, so no row is lost or read twice.
        for is_ours, (place, row) in interleave(reader, part, parts):
            self._rows_read.rows += 1
            if isinstance(row, MalformedRow):
                self._rows_read.refuse(place, row)
            elif is_ours:
                waiting.append((place, row, 0))
            if len(waiting) == self.buffer:
                yield waiting
                waiting = []
        yield waiting

    def _report(self) -> None:
        """After a pass over the stream, refuse too many malformed rows, and warn once about losses."""
        if not self._rows_read.rows:
            return
        messages = [self._rows_read.check("train", self.max_malformed)]
        messages.append(self._texts.check("LanguageData", self.rendered, self.max_malformed))
        for reader in self.readers:
            if reader.empty.count:
                messages.append(reader.empty.message("train"))
        if self.counts.truncated:
            messages.append(f"{self.counts.truncated} documents were truncated (max_length = {self.max_length})")
        if self.counts.dropped:
            messages.append(f"{self.counts.dropped} documents were dropped (max_length = {self.max_length})")
        if not self._has_warned:
            for message in filter(None, messages):
                rank_zero_warn(f"LanguageData: {message}")
        self._has_warned = True

    def _packed(self, waiting: list[Waiting], seed: int) -> list[PackedRow]:
        """Return the shuffled rows of a buffer. A row holds documents of one source."""
        documents: list[Encoded] = []
        sources: list[int] = []
        for (place, _, source), found in zip(waiting, self.encoder.encode_rows([row for _, row, _ in waiting])):
            if isinstance(found, MalformedRow):
                self._rows_read.refuse(place, found)
            else:
                documents += found
                sources += [source] * len(found)
                self._texts.add(place, found)
        about = np.array([facts(document) for document in documents], np.int64).reshape(-1, 5)
        pieces = cut(about, self.max_length, self.truncation, self.counts)
        if self._rows_read.rows >= _ENOUGH_ROWS:
            self._rows_read.check("train", self.max_malformed)
        if self._texts.texts >= _ENOUGH_ROWS and not self.rendered:
            self._texts.check("LanguageData", self.rendered, self.max_malformed)
        items: dict[int, PackedRow] = {}
        for number, start, stop in zip(pieces.document.tolist(), pieces.start.tolist(), pieces.stop.tolist()):
            document = documents[number]
            of_source = items.setdefault(sources[number], PackedRow())
            of_source.append((document.ids[start:stop], labels_of(document, start, stop), 0))
        rows = [row for source in sorted(items) for row in self._rows_of(source, items[source])]
        # Packed rows are sorted by length, and would otherwise come in this order.
        return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]

    def _rows_of(self, source: int, items: PackedRow) -> Iterator[PackedRow]:
        """Yield the rows of the pieces of a source."""
        bins: Iterable[Iterable[int]] = [[number] for number in range(len(items))]
        if self.pack:
            bins = pack_lengths([len(ids) for ids, _, _ in items], self.max_length)
        for numbers in bins:
            row = PackedRow(items[number] for number in numbers)
            row.source = source
            yield row
