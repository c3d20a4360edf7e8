"""Data that is never whole: read, tokenised and packed while it is trained on, and resumed where it stopped.

    part (rank, worker) takes every row whose number is its own modulo ranks * workers; documents wait in a buffer,
    which is packed by best-fit-decreasing when it is full, and its rows are shuffled

A stream begins again when it is through and never ends: an epoch is a number of batches, the same on every rank, so no
rank waits for another at its end. All of it is a function of the sources and the seed, so the state is one number.

Saves: the disk and the time for a cache.
Costs: tokenising in every run; a resumed run reads and tokenises again what it had seen (this is what makes it exact).
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lit_efficient.data.text.chat_tokens import ChatTokens, Encoded
from lit_efficient.data.text.document_store import labels_of
from lit_efficient.data.text.packing import pack_lengths
from lit_efficient.data.text.reading import Example, Reader, check_malformed
from lit_efficient.data.text.truncation import Counts, Side, cut, facts
from lit_efficient.distributed.ranks import place_among_ranks
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError

_ENOUGH_ROWS = 100  # from here on a share of malformed rows is telling

PackedRow = list[tuple[np.ndarray, np.ndarray, int]]


class StreamedRows(IterableDataset[PackedRow]):
    """Rows of packed (or padded) batches without an end, as `PackedDocuments` gives them.

    ``buffer`` documents are packed and shuffled together; each worker holds so many. Above a share of malformed rows it
    stops with an error.
    """

    def __init__(
        self,
        reader: Reader,
        encoder: ChatTokens,
        max_length: int,
        truncation: Side,
        pack: bool,
        buffer: int,
        max_malformed: float,
        seed: int,
    ) -> None:
        self.reader = reader
        self.encoder = encoder
        self.max_length = max_length
        self.truncation = truncation
        self.pack = pack
        self.buffer = buffer
        self.max_malformed = max_malformed
        self.seed = seed
        self.place: tuple[int, int] | None = None  # rank and ranks, set by the main process: workers may not know
        self.counts = Counts()
        self._said = False

    def __iter__(self) -> Iterator[PackedRow]:
        rank, ranks = self.place or place_among_ranks()
        worker = get_worker_info()
        workers = worker.num_workers if worker else 1
        part, parts = rank * workers + (worker.id if worker else 0), ranks * workers
        for number in count():
            yielded = 0
            waiting: list[tuple[str, Example]] = []
            for index, found in enumerate(self.reader):
                if index % parts == part:
                    waiting.append(found)
                if len(waiting) == self.buffer:
                    rows = self._rows(waiting, mix_seed(self.seed, number, yielded, part))
                    yielded += len(rows)
                    waiting = []
                    yield from rows
            rows = self._rows(waiting, mix_seed(self.seed, number, yielded, part))
            self._report()
            if not rows and not yielded:
                raise ConfigurationError(
                    f"LanguageData: the stream holds nothing to learn for part {part + 1} of {parts} (process, worker)."
                )
            yield from rows

    def _report(self) -> None:
        """After a whole pass: refuse too many malformed rows however short the stream, and say once what was lost."""
        if not self.reader.rows:
            return
        found = check_malformed("train", self.reader.rows, self.reader.malformed, self.reader.shown, self.max_malformed)
        counts, self._said, said = self.counts, True, self._said
        lost = [
            f"{number} documents were {what} (max_length = {self.max_length})"
            for number, what in ((counts.truncated, "truncated"), (counts.dropped, "dropped"))
            if number
        ]
        for sentence in () if said else filter(None, (found, *lost)):
            rank_zero_warn(f"LanguageData: {sentence}")

    def _rows(self, waiting: list[tuple[str, Example]], seed: int) -> list[PackedRow]:
        documents = []
        encoded = self.encoder.encode([document for _, row in waiting for document in row.documents])
        for (place, _), found in zip(waiting, encoded):
            if isinstance(found, Encoded):
                documents.append(found)
            else:
                self.reader.refuse(place, str(found))
        about = np.array([facts(document) for document in documents], np.int64).reshape(-1, 5)
        pieces = cut(about, self.max_length, self.truncation, self.counts)
        if self.reader.rows >= _ENOUGH_ROWS:
            check_malformed("train", self.reader.rows, self.reader.malformed, self.reader.shown, self.max_malformed)
        bins = pack_lengths(pieces.lengths, self.max_length) if self.pack else [[i] for i in range(len(pieces))]
        left = list(zip(pieces.document.tolist(), pieces.start.tolist(), pieces.stop.tolist()))
        items = [(documents[of].ids[start:stop], labels_of(documents[of], start, stop), 0) for of, start, stop in left]
        rows = [[items[i] for i in numbers] for numbers in bins]
        return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]


class StreamLoader:
    """Batches of a stream, in epochs of a given length, resumed where they stopped: after an epoch and after a crash.

    It has a length on purpose: of a loader without one Lightning fetches a batch ahead, and a checkpoint would count a
    batch that nobody has trained on.
    """

    def __init__(self, loader: DataLoader[Any], batches: int) -> None:
        self.loader = loader
        self.batches = batches
        self._yielded = 0
        self._stream: Iterator[Any] | None = None

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.batches):
            if self._stream is None:
                if isinstance(self.loader.dataset, StreamedRows):
                    self.loader.dataset.place = place_among_ranks()
                self._stream = iter(self.loader)
                for _ in range(self._yielded):
                    next(self._stream)
            batch = next(self._stream)
            self._yielded += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """How many batches were yielded, and what they depend on."""
        return {"batches": self._yielded, **self._layout()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on after that many batches.

        Raises:
            ConfigurationError: If the batches would be others.
        """
        for name, value in self._layout().items():
            if state_dict[name] != value:
                raise ConfigurationError(
                    f"LanguageData: a stream is resumed with the same {name}: {state_dict[name]} in the checkpoint, "
                    f"{value} now."
                )
        self._yielded, self._stream = int(state_dict["batches"]), None

    def _layout(self) -> dict[str, int]:
        return {
            "processes": place_among_ranks()[1],
            "num_workers": self.loader.num_workers,
            "batch_size": int(self.loader.batch_size or 0),
        }
