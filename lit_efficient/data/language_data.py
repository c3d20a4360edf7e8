"""Instructions, conversations and texts for language models: from files or the Hub to packed batches.

    rows -> recognised format -> the tokenizer's own chat template -> tokens, with only the answers learned
         -> a memory-mapped cache -> rows packed by best-fit-decreasing, documents kept apart

Saves: padding (packing fills 99 % and more of a batch), and tokenising (once for each content and setting).
Costs: hashing the sources at every start (those above 64 MB once); tokenising 1,000 short conversations a CPU-second,
    once, in a process for each processor where there are thousands.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_efficient.data.text.arguments import LanguageChat, LanguageRows, LanguageStream
from lit_efficient.data.text.chat_cache import SPLITS
from lit_efficient.data.text.chat_data import ChatDataModule
from lit_efficient.data.text.chat_tokens import ChatTokens
from lit_efficient.data.text.collate import packed_batch, padded_batch
from lit_efficient.data.text.document_store import Documents
from lit_efficient.data.text.packing import Bins, pack_lengths
from lit_efficient.data.text.reading import Reader
from lit_efficient.data.text.rows import STDLIB_INSTRUCTIONS, Source, open_sources
from lit_efficient.data.text.streamed import StreamedRows, StreamLoader
from lit_efficient.data.text.truncation import Counts, Pieces, cut
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.mechanisms.order.keyed_batch_sampler import loading


@dataclass(eq=False)
class PackedDocuments(Dataset[list[tuple[np.ndarray, np.ndarray, int]]]):
    """Rows of a packed batch: item i holds the pieces of bin i, as ids, labels and bytes of text."""

    documents: Documents  # the tokens
    pieces: Pieces  # what of them is left
    bins: Bins  # numbers of the pieces of each row

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
        return [self.documents.piece(self.pieces, number) for number in self.bins[index].tolist()]


class LanguageData(ChatDataModule):
    """Conversations, instructions and texts as batches for causal language models; labels are not shifted.

    Packed batches are ``{"input_ids", "labels", "position_ids"}``, padded ones ``{"input_ids", "labels",
    "attention_mask"}``, all ``[B, T]``; those for validation also have ``num_bytes`` ``[B]``, the bytes of text that
    the labels of a row stand for. What keeps packed documents apart differs between models, and some have nothing: our
    tasks find it or refuse, see :mod:`lit_efficient.mechanisms.documents`. Testing uses the validation rows.

    Args:
        train: files (.jsonl, .json, .csv, .tsv, .parquet, texts; .gz, .bz2 or .xz after it), folders of them or of
            ``save_to_disk``, names on the Hugging Face hub, ``stdlib-instructions`` (2,000 functions to write, from
            the modules of Python's own library) or ``stdlib-packages`` (the sources of its packages, other files than
            those of the functions).
        val: the same for validation; null holds out ``val_fraction`` of the training rows, of a single text its end.
        tokenizer: folder or name of a Hugging Face tokenizer, or a ``tokenizer.json``; null trains a byte-level BPE
            with a ChatML template on the training rows.
        max_length: tokens of a packed row, and of the longest document.
        pack: put several documents into a row; without, there is one in each, padded.
        batch_size: rows a training batch, for each process.
        val_batch_size: rows a validation batch; null means ``batch_size``.
        val_fraction: share of the rows held out if ``val`` is null, in (0, 1).
        num_workers: processes that load batches; 0 is right for memory-mapped tokens.
        pin_memory: whether batches for a CUDA device lie in pinned memory, from which they are copied beside its work.
        seed: another seed holds out other rows.
        cache_dir: where the tokens are kept; null is ``$LIT_EFFICIENT_CACHE``, else ``~/.cache/lit_efficient``.
        rows: which rows are read.
        chat: how they become tokens.
        stream: whether ``train`` is read while training on it.
    """

    batches: ClassVar[str] = "tokens"

    kind = "language"
    rows: LanguageRows
    chat: LanguageChat

    def __init__(
        self,
        *,
        train: str | list[str] = STDLIB_INSTRUCTIONS,
        val: str | list[str] | None = None,
        tokenizer: str | None = None,
        max_length: int = 1024,
        pack: bool = True,
        batch_size: int = 4,
        val_batch_size: int | None = None,
        val_fraction: float = 0.05,
        num_workers: int = 0,
        pin_memory: bool = True,
        seed: int = 0,
        cache_dir: str | None = None,
        rows: LanguageRows = LanguageRows(),  # noqa: B008 (frozen)
        chat: LanguageChat = LanguageChat(),  # noqa: B008 (frozen)
        stream: LanguageStream = LanguageStream(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(
            train=train,
            val=val,
            tokenizer=tokenizer,
            max_length=max_length,
            batch_size=batch_size,
            val_batch_size=val_batch_size,
            val_fraction=val_fraction,
            num_workers=num_workers,
            seed=seed,
            cache_dir=cache_dir,
            rows=rows,
            chat=chat,
            pin_memory=pin_memory,
        )
        if stream.enabled and (tokenizer is None or val is None):
            raise ConfigurationError(
                "LanguageData: stream.enabled needs a tokenizer and val: neither can be made of a stream"
            )
        self.pack = pack
        self.stream = stream
        self.train_on = chat.train_on
        self.cached = ("val",) if stream.enabled else SPLITS
        self.train_rows: PackedDocuments | StreamedRows | None = None
        self.val_rows: PackedDocuments | None = None

    def train_dataloader(self) -> DataLoader[Any] | StreamLoader:
        assert self.train_rows is not None
        collate = partial(collate_rows, pack=self.pack, length=self.max_length, pad_id=self.pad_id)
        if isinstance(self.train_rows, StreamedRows):
            loader = DataLoader(self.train_rows, self.batch_size, collate_fn=collate, **loading(self))
            return StreamLoader(loader, self.stream.epoch_batches)
        return DataLoader(
            self.train_rows,
            self.batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=collate,
            **loading(self),
        )

    def val_dataloader(self) -> DataLoader[Any]:
        assert self.val_rows is not None
        collate = partial(collate_rows, pack=self.pack, length=self.max_length, pad_id=self.pad_id, count_bytes=True)
        return DataLoader(self.val_rows, self.val_batch_size, collate_fn=collate, **loading(self))

    def fill(self, split: str = "train") -> float:
        """Share of the tokens of packed rows that are no filling; 1 if rows are padded to the longest of a batch."""
        rows = self.train_rows if split == "train" else self.val_rows
        assert isinstance(rows, PackedDocuments)
        return float(rows.pieces.lengths.sum() / (len(rows) * self.max_length)) if self.pack else 1.0

    def summary(self, counts: dict[str, int]) -> str:
        parts = [f"{counts['documents']:,} documents of {counts['rows']:,} rows, {counts['tokens']:,} tokens"]
        parts.append(f"{counts['trained'] / max(counts['tokens'], 1):.1%} of them trained")
        if counts["truncated"]:
            share = counts["truncated"] / max(counts["rows"], 1)
            parts.append(f"{counts['truncated']:,} rows truncated ({share:.1%}), {counts['tokens_lost']:,} tokens lost")
        if counts["dropped"]:
            parts.append(f"{counts['dropped']:,} dropped with nothing left to learn")
        if counts["cut_into_pieces"]:
            parts.append(f"{counts['cut_into_pieces']:,} texts cut into pieces")
        if counts["turns"]:
            parts.append(f"end of turn trained in {counts['ended'] / counts['turns']:.1%} of {counts['turns']:,} turns")
        return "; ".join(parts)

    def reader(self, sources: list[Source]) -> Reader:
        return Reader(sources, self.rows.format, self.rows.columns, self.rows.max_rows)

    def _cut(self, folder: Path, split: str, counts: Counts) -> PackedDocuments:
        documents = Documents(folder, split)
        pieces = cut(documents.facts, self.max_length, self.chat.truncation, counts)
        counts.trained += documents.count_trained(pieces)
        alone = Bins(np.arange(len(pieces)), np.arange(len(pieces) + 1))
        return PackedDocuments(documents, pieces, pack_lengths(pieces.lengths, self.max_length) if self.pack else alone)

    def _adopt(self, found: dict[str, PackedDocuments]) -> None:
        for split in self.cached:
            if not len(found[split]):
                raise ConfigurationError(
                    f"LanguageData: nothing is left to {'train' if split == 'train' else 'validate'} on: all "
                    f"{self.report['counts'][split]['rows']} rows are malformed or were dropped (max_length = "
                    f"{self.max_length})."
                )
        if not self.stream.enabled and len(found["train"]) < self.batch_size:
            allowed = f"at most the number of rows to train on, {len(found['train'])}"
            raise refusal("LanguageData", "batch_size", allowed, self.batch_size)
        self.train_rows, self.val_rows = (self._stream() if self.stream.enabled else found["train"]), found["val"]

    def _stream(self) -> StreamedRows:
        sources = [
            source
            for entry in self.train
            for source in open_sources(entry, split=self.rows.split, subset=self.rows.subset, streaming=True)
        ]
        reader = self.reader(sources)
        for sentence in reader.formats:
            rank_zero_info(f"LanguageData: {sentence}, streamed")
        encoder = ChatTokens(self.chat_tokenizer, self.chat.train_on, self.chat.untrained_end)
        if self.chat_tokenizer.chat_template is not None and (wrong := encoder.check_end_of_turn()):
            rank_zero_warn(f"LanguageData: {wrong}: a model trained on it may never stop")
        rows = self.max_length, self.chat.truncation, self.pack
        return StreamedRows(reader, encoder, *rows, self.stream.buffer, self.rows.max_malformed, self.seed)


def collate_rows(
    rows: list[list[tuple[np.ndarray, np.ndarray, int]]],
    pack: bool,
    length: int,
    pad_id: int,
    count_bytes: bool = False,
) -> dict[str, Tensor]:
    """Batch the items of `PackedDocuments`: the documents of each row, a single one unless ``pack``."""
    documents = [[(ids, labels) for ids, labels, _ in row] for row in rows]
    batch = packed_batch(documents, length, pad_id) if pack else padded_batch([row[0] for row in documents], pad_id)
    if count_bytes:
        batch["num_bytes"] = torch.tensor([sum(size for _, _, size in row) for row in rows])
    return batch
