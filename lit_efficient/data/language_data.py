"""Instructions, conversations and texts for language models: from files or the Hub to packed batches.

    rows -> recognised format -> the tokenizer's own chat template -> tokens, with only the answers learned
         -> a memory-mapped cache -> rows packed by best-fit-decreasing, documents kept apart

Saves: padding (packing fills 99 % and more of a batch), and tokenising (once for each content and setting).
Costs: reading and hashing the sources at every start; tokenising 1,000 short conversations a CPU-second, once.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_efficient.data.text import document_store
from lit_efficient.data.text.chat_data import ChatDataModule
from lit_efficient.data.text.chat_formats import KEYS, Format
from lit_efficient.data.text.chat_tokenizer import SMALLEST_VOCABULARY, load_chat_tokenizer
from lit_efficient.data.text.chat_tokens import ChatTokens, OnUntrainedEnd, TrainOn
from lit_efficient.data.text.collate import packed_batch, padded_batch
from lit_efficient.data.text.document_store import Documents
from lit_efficient.data.text.language_cache import Recipe, prepare, say
from lit_efficient.data.text.packing import Bins, pack_lengths
from lit_efficient.data.text.reading import Reader
from lit_efficient.data.text.rows import STDLIB_INSTRUCTIONS, open_sources
from lit_efficient.data.text.streamed import StreamedRows, StreamLoader
from lit_efficient.data.text.truncation import Side
from lit_efficient.errors import ConfigurationError

if TYPE_CHECKING:
    pass


class PackedDocuments(Dataset[list[tuple[np.ndarray, np.ndarray, int]]]):
    """Rows of a packed batch: item i holds the documents of bin i, as ids, labels and bytes of text.

    Args:
        documents: the tokens.
        bins: numbers of the documents of each row.
    """

    def __init__(self, documents: Documents, bins: Bins) -> None:
        self.documents = documents
        self.bins = bins

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
        return [
            (*self.documents[number], int(self.documents.num_bytes[number])) for number in self.bins[index].tolist()
        ]


class LanguageData(ChatDataModule):
    """Conversations, instructions and texts as batches for causal language models; labels are not shifted.

    Packed batches are ``{"input_ids", "labels", "position_ids"}``, padded ones ``{"input_ids", "labels",
    "attention_mask"}``, all ``[B, T]``; those for validation also have ``num_bytes`` ``[B]``, the bytes of text that
    the labels of a row stand for. Packed documents are kept apart by ``position_ids``: a Hugging Face model needs
    ``use_cache=False`` for that, see :mod:`lit_efficient.data.text.collate`. Testing uses the validation rows.

    Args:
        train: files (.jsonl, .json, .parquet; any other suffix is text), folders of them or of ``save_to_disk``, names
            on the Hugging Face hub, ``stdlib-instructions`` (2,000 functions to write, from the modules of Python's own
            library) or ``stdlib-packages`` (the sources of its packages, other files than those of the functions).
        val: the same for validation; null holds out ``val_fraction`` of the training rows.
        format: of the rows; ``auto`` recognises it by their keys and says so.
        columns: own names of keys, {key of the format: key in the rows}.
        tokenizer: folder or name of a Hugging Face tokenizer, or a ``tokenizer.json``; null trains a byte-level BPE
            with a ChatML template on the training rows.
        vocab_size: ids of the BPE that is trained.
        chat_template: Jinja, a file of it, or ``chatml``, instead of the tokenizer's own.
        train_on: ``assistant`` learns the assistant's turns, ``completion`` the last one (of a prompt with a
            completion both learn the completion), ``all`` everything.
        untrained_end: what to do if the template leaves the end-of-turn token out of what is learned.
        max_length: tokens of a packed row, and of the longest document.
        truncation: where a conversation that is longer is cut; ``drop`` leaves it out. Texts are cut into pieces.
        pack: put several documents into a row; without, there is one in each, padded.
        batch_size: rows a training batch, for each process.
        val_batch_size: rows a validation batch; null means ``batch_size``.
        num_workers: processes that load batches; 0 is right for memory-mapped tokens.
        val_fraction: share of the rows held out if ``val`` is null, in (0, 1).
        max_rows: read at most so many rows of each source.
        max_malformed: share of malformed rows that is left out with a warning; more are refused. In [0, 1].
        split: split of a Hugging Face data set to train on.
        val_split: split of one in ``val``.
        subset: configuration of a Hugging Face data set.
        streaming: read ``train`` while training on it, over and over, without a cache; needs ``tokenizer`` and ``val``.
        epoch_batches: batches of an epoch of a stream, for each process.
        buffer: documents of a stream that are packed and shuffled together.
        cache_dir: where the tokens are kept; null is ``$LIT_EFFICIENT_CACHE``, else ``~/.cache/lit_efficient``.
        seed: another seed holds out other rows.
    """

    def __init__(
        self,
        *,
        train: str | list[str] = STDLIB_INSTRUCTIONS,
        val: str | list[str] | None = None,
        format: Literal["auto"] | Format = "auto",
        columns: dict[str, str] | None = None,
        tokenizer: str | None = None,
        vocab_size: int = 2048,
        chat_template: str | None = None,
        train_on: TrainOn = "assistant",
        untrained_end: OnUntrainedEnd = "refuse",
        max_length: int = 1024,
        truncation: Side = "right",
        pack: bool = True,
        batch_size: int = 4,
        val_batch_size: int | None = None,
        num_workers: int = 0,
        val_fraction: float = 0.05,
        max_rows: int | None = None,
        max_malformed: float = 0.01,
        split: str = "train",
        val_split: str = "validation",
        subset: str | None = None,
        streaming: bool = False,
        epoch_batches: int = 1000,
        buffer: int = 1000,
        cache_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(vocab_size)
        least = {"max_length": 2, "batch_size": 1, "val_batch_size": 1, "num_workers": 0, "max_rows": 1}
        least |= {"epoch_batches": 1, "buffer": 1}
        given = {"max_length": max_length, "batch_size": batch_size, "num_workers": num_workers}
        given |= {
            "val_batch_size": batch_size if val_batch_size is None else val_batch_size,
            "max_rows": 1 if max_rows is None else max_rows,
        }
        given |= {"epoch_batches": epoch_batches, "buffer": buffer}
        for name, value in given.items():
            if value < least[name]:
                raise ConfigurationError(f"LanguageData: {name} must be at least {least[name]}, got {value}.")
        if tokenizer is None and vocab_size < SMALLEST_VOCABULARY:
            raise ConfigurationError(
                f"LanguageData: vocab_size must be at least {SMALLEST_VOCABULARY}, got {vocab_size}."
            )
        if not 0 < val_fraction < 1:
            raise ConfigurationError(f"LanguageData: val_fraction must be between 0 and 1, got {val_fraction}.")
        if not 0 <= max_malformed <= 1:
            raise ConfigurationError(f"LanguageData: max_malformed must be in [0, 1], got {max_malformed}.")
        known = sorted({key for keys in KEYS.values() for key in keys} | {"input", "system", "tools"})
        for name in columns or {}:
            if name not in known:
                raise ConfigurationError(f"LanguageData: columns may name {', '.join(known)}, got {name!r}.")
        if tokenizer is None and chat_template is not None:
            raise ConfigurationError("LanguageData: chat_template needs a tokenizer; the one trained here has ChatML.")
        if streaming and (tokenizer is None or val is None):
            raise ConfigurationError(
                "LanguageData: streaming needs a tokenizer and val: neither can be made of a stream."
            )
        if not train or (val is not None and not val):
            raise ConfigurationError("LanguageData: train and val must name at least one source (or val be null).")
        self.train = [train] if isinstance(train, str) else list(train)
        self.val = [val] if isinstance(val, str) else val
        self.format = format
        self.columns = dict(columns or {})
        self.tokenizer_name = tokenizer
        self.chat_template = chat_template
        self.train_on = train_on
        self.untrained_end = untrained_end
        self.max_length = max_length
        self.truncation = truncation
        self.pack = pack
        self.batch_size = batch_size
        self.val_batch_size = given["val_batch_size"]
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.max_rows = max_rows
        self.max_malformed = max_malformed
        self.split = split
        self.val_split = val_split
        self.subset = subset
        self.streaming = streaming
        self.epoch_batches = epoch_batches
        self.buffer = buffer
        self.cache_dir = cache_dir
        self.seed = seed
        self.train_rows: PackedDocuments | StreamedRows | None = None
        self.val_rows: PackedDocuments | None = None
        self._folder: Path | None = None

    def prepare_data(self) -> None:
        """Make the cache, or check all of it, and say what it holds. Runs in one process a machine."""
        self._folder = self._prepare(thorough=True)
        say(self._folder, self.max_malformed)

    def setup(self, stage: str | None = None) -> None:
        """Open the cache and pack, in every process."""
        if self.train_rows is not None:
            return
        folder = self._folder or self._prepare(thorough=False)
        report = document_store.read_manifest(folder)
        documents = {split: Documents(folder, split) for split in (("val",) if self.streaming else ("train", "val"))}
        for split, found in documents.items():
            if not len(found):
                raise ConfigurationError(
                    f"LanguageData: nothing is left to {'train' if split == 'train' else 'validate'} on: all "
                    f"{report['counts'][split]['rows']} rows are malformed or were dropped (max_length = "
                    f"{self.max_length})."
                )
        rows = {split: PackedDocuments(found, self._bins(found)) for split, found in documents.items()}
        if not self.streaming and len(rows["train"]) < self.batch_size:
            raise ConfigurationError(
                f"LanguageData: batch_size must be at most the number of rows to train on, {len(rows['train'])}, got "
                f"{self.batch_size}."
            )
        self._folder, self.report = folder, report
        self.chat_tokenizer = load_chat_tokenizer(str(folder / "tokenizer"))
        self.train_rows, self.val_rows = (self._stream() if self.streaming else rows["train"]), rows["val"]

    def train_dataloader(self) -> DataLoader[Any] | StreamLoader:
        """Shuffled rows; an incomplete last batch is dropped."""
        assert self.train_rows is not None
        collate = partial(collate_rows, pack=self.pack, length=self.max_length, pad_id=self.pad_id)
        if isinstance(self.train_rows, StreamedRows):
            loader = DataLoader(self.train_rows, self.batch_size, num_workers=self.num_workers, collate_fn=collate)
            return StreamLoader(loader, self.epoch_batches)
        return DataLoader(
            self.train_rows,
            self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.num_workers,
            collate_fn=collate,
        )

    def val_dataloader(self) -> DataLoader[Any]:
        """All rows held out, in order."""
        assert self.val_rows is not None
        collate = partial(collate_rows, pack=self.pack, length=self.max_length, pad_id=self.pad_id, count_bytes=True)
        return DataLoader(self.val_rows, self.val_batch_size, num_workers=self.num_workers, collate_fn=collate)

    def test_dataloader(self) -> DataLoader[Any]:
        """The validation rows: there is no third split."""
        return self.val_dataloader()

    def fill(self, split: str = "train") -> float:
        """Share of the tokens of packed rows that are no filling; 1 if rows are padded to the longest of a batch."""
        rows = self.train_rows if split == "train" else self.val_rows
        assert isinstance(rows, PackedDocuments)
        return float(rows.documents.lengths.sum() / (len(rows) * self.max_length)) if self.pack else 1.0

    def _stream(self) -> StreamedRows:
        sources = [
            source
            for entry in self.train
            for source in open_sources(entry, split=self.split, subset=self.subset, streaming=True)
        ]
        reader = Reader(sources, self.format, self.columns, self.max_rows)
        for sentence in reader.formats:
            rank_zero_info(f"LanguageData: {sentence}, streamed")
        encoder = ChatTokens(self.chat_tokenizer, self.train_on, self.untrained_end)
        if self.chat_tokenizer.chat_template is not None and (wrong := encoder.check_end_of_turn()):
            rank_zero_warn(f"LanguageData: {wrong}: a model trained on it may never stop")
        side, seed = self.truncation, self.seed
        return StreamedRows(reader, encoder, self.max_length, side, self.pack, self.buffer, self.max_malformed, seed)

    def _bins(self, documents: Documents) -> Bins:
        if self.pack:
            return pack_lengths(documents.lengths, self.max_length)
        return Bins(np.arange(len(documents)), np.arange(len(documents) + 1))

    def _prepare(self, thorough: bool) -> Path:
        given = None if self.tokenizer_name is None else load_chat_tokenizer(self.tokenizer_name, self.chat_template)
        wanted = {} if self.streaming else {"train": (self.train, self.split)}
        if self.val:
            wanted["val"] = (self.val, self.val_split)
        sources = {
            name: [source for entry in listed for source in open_sources(entry, split=split, subset=self.subset)]
            for name, (listed, split) in wanted.items()
        }
        recipe = Recipe(
            format=self.format,
            columns=tuple(sorted(self.columns.items())),
            max_rows=self.max_rows,
            train_on=self.train_on,
            untrained_end=self.untrained_end,
            max_length=self.max_length,
            truncation=self.truncation,
            vocab_size=self._vocab_size if given is None else None,
            val_fraction=None if self.val else self.val_fraction,
            seed=self.seed,
        )
        return prepare(recipe, sources, given, self.cache_dir, thorough)


def collate_rows(
    rows: list[list[tuple[np.ndarray, np.ndarray, int]]],
    pack: bool,
    length: int,
    pad_id: int,
    count_bytes: bool = False,
) -> dict[str, Tensor]:
    """Batch the items of `PackedDocuments`.

    Args:
        rows: the documents of each row; a single one unless ``pack``.
        pack: whether to make a packed batch or a padded one.
        length: tokens of a packed row.
        pad_id: id of the filling.
        count_bytes: add ``num_bytes`` ``[B]``.
    """
    documents = [[(ids, labels) for ids, labels, _ in row] for row in rows]
    batch = packed_batch(documents, length, pad_id) if pack else padded_batch([row[0] for row in documents], pad_id)
    if count_bytes:
        batch["num_bytes"] = torch.tensor([sum(size for _, _, size in row) for row in rows])
    return batch
