"""Instructions, conversations and texts for language models: from files or the Hub to packed batches.

    rows -> recognised format -> chat template of the tokenizer -> tokens, with a loss on the answers only
         -> memory-mapped cache -> rows packed by best-fit-decreasing, with separate documents

Saves: padding (packing fills 99 % and more of a batch), and tokenising (once for each content and setting).
Costs: hashing the sources at every start (those above 64 MB once); tokenising 1,000 short conversations a CPU-second,
    once, in a process for each processor where there are thousands.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
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
from lit_efficient.data.text.chat_formats import Document
from lit_efficient.data.text.chat_tokens import ChatTokens
from lit_efficient.data.text.collate import packed_batch, padded_batch
from lit_efficient.data.text.document_store import Documents
from lit_efficient.data.text.image_texts import ImageTexts
from lit_efficient.data.text.mixture import LanguageMixture, MixtureSource, share_text
from lit_efficient.data.text.packing import Bins, PackedRow, joined, pack_lengths
from lit_efficient.data.text.reading import Reader
from lit_efficient.data.text.rows import STDLIB_INSTRUCTIONS, Source, beginning
from lit_efficient.data.text.streamed import StreamedRows, StreamMixture
from lit_efficient.data.text.truncation import Counts, Pieces, cut
from lit_efficient.errors import ConfigurationError, listed, refusal
from lit_efficient.files.cache import read_manifest
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.mechanisms.order.keyed_batch_sampler import data_parallel_part, loading, no_loaders
from lit_efficient.mechanisms.order.length_sampler import LengthSampler
from lit_efficient.mechanisms.order.mixture_sampler import MixtureSampler, schedule_mean
from lit_efficient.mechanisms.order.stream_loader import StreamLoader


@dataclass(eq=False)
class PackedDocuments(Dataset[PackedRow]):
    """Rows of packed batches: item i holds the pieces of bin i, each as ids, labels and bytes of text."""

    documents: Documents
    pieces: Pieces  # pieces of the documents that are left
    bins: Bins  # numbers of the pieces of each row; the rows of a source are side by side
    sizes: list[int]  # number of rows of each source
    rows: list[int]  # number of documents of each source
    tokens: list[int]  # number of tokens of each source

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> PackedRow:
        row = PackedRow(self.documents.piece(self.pieces, number) for number in self.bins[index].tolist())
        row.source = bisect_right(self._ends, index)
        row.pictured = self.documents.pictured(int(self.pieces.document[self.bins[index][0]]))
        return row

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row [N], for rows of one piece each."""
        return self.pieces.lengths[self.bins.items]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.sizes))


class LanguageData(ChatDataModule):
    """DataModule of conversations, instructions and texts for causal language models.

    Packed batches are ``{"input_ids", "labels", "position_ids"}``, padded batches ``{"input_ids", "labels",
    "attention_mask"}``, all [B, T]. Labels are not shifted. Validation batches also have ``num_bytes`` [B], the bytes
    of text that the labels of a row stand for. Testing uses the validation rows. Models differ in how they separate
    packed documents, and some cannot: our tasks find the way or raise an error, see
    :mod:`lit_efficient.mechanisms.documents`.

    Args:
        train: Files (.jsonl, .json, .csv, .tsv, .parquet, or texts; compressed with .gz, .bz2 or .xz), folders of such
            files or of ``save_to_disk``, names on the Hugging Face hub, ``stdlib-instructions`` (2,000 functions to
            write, from the modules of Python's standard library) or ``stdlib-packages`` (the sources of the packages in
            the standard library, without the files of those functions).
        val: Sources for validation, named in the same way. null: ``val_fraction`` of the training rows is held out; of
            a single text its end.
        tokenizer: Folder or name of a Hugging Face tokenizer, or a ``tokenizer.json``. null: a byte-level BPE with a
            ChatML template is trained on the training rows.
        processor: Folder or name of a model of images and text, in the place of ``tokenizer``. Conversations may then
            hold images, and their tokens count. Needs ``pack: false`` and ``chat.truncation: drop``.
        max_length: Tokens of a packed row, and of the longest document.
        pack: Pack several documents into a row. false: one padded document in each row.
        by_length: Form training batches of rows with similar lengths, which need less padding. Needs ``pack: false``.
        batch_size: Rows in a training batch, for each process.
        val_batch_size: Rows in a validation batch. null: ``batch_size``.
        val_fraction: Share of the rows held out for validation if ``val`` is null, at least 0 and below 1. 0: train on
            all rows, without validation.
        num_workers: Worker processes of a loader. 0 is fastest for memory-mapped tokens.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
        seed: Seed of the choice of the rows held out.
        cache_dir: Folder of the cache of tokens. null: ``$LIT_EFFICIENT_CACHE``, or ``~/.cache/lit_efficient``.
        rows: Choice of the rows.
        chat: Conversion of rows to tokens.
        stream: Reading of ``train`` during training.
        mixture: Shares of the sources in ``train``, if these are given as ``{path, weight, name, split, subset}``.
            Batches then have ``source`` [B], and the loss of each source is logged as ``train/loss/NAME`` and
            ``val/loss/NAME``.
    """

    batches: ClassVar[str] = "tokens"

    kind = "language"
    rows: LanguageRows
    chat: LanguageChat

    def __init__(
        self,
        *,
        train: str | list[str | MixtureSource] = STDLIB_INSTRUCTIONS,
        val: str | list[str | MixtureSource] | None = None,
        tokenizer: str | None = None,
        processor: str | None = None,
        max_length: int = 1024,
        pack: bool = True,
        by_length: bool = False,
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
        mixture: LanguageMixture = LanguageMixture(),  # noqa: B008 (frozen)
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
            processor=processor,
        )
        if processor is not None:
            self._check_processor(pack, stream)
        # A stream is read once and in order: a tokenizer or a split would need a pass before training.
        if stream.enabled and (tokenizer is None or (val is None and val_fraction)):
            raise ConfigurationError(
                "LanguageData: stream.enabled needs a tokenizer and val, because neither comes from a stream. Set "
                "both, or val_fraction: 0 in the place of val to train without validation."
            )
        if mixture != LanguageMixture() and not self.mixes:
            raise ConfigurationError(
                "LanguageData: mixture needs sources with names or weights, as in train: [{path: a.jsonl, weight: 2}, "
                "{path: b.jsonl, weight: 1}]."
            )
        if by_length and (pack or self.mixes or stream.enabled):
            allowed = "false with packed rows, which have no padding, with a mixture and with a stream"
            raise refusal("LanguageData", "by_length", allowed, by_length)
        self.pack = pack
        self.by_length = by_length
        self.mixture = mixture
        self.stream = stream
        self.train_on = chat.train_on
        self.cached = ("val",) if stream.enabled else SPLITS
        self.train_rows: PackedDocuments | StreamedRows | None = None
        self.val_rows: PackedDocuments | None = None

    def _check_processor(self, pack: bool, stream: LanguageStream) -> None:
        """Raise an error for arguments that rows with images do not allow."""
        for name, value, allowed in (
            ("stream.enabled", stream.enabled, "false with a processor, because rows with images are not streamed"),
            ("pack", pack, "false with a processor, because rows with images are not packed"),
            ("chat.rendered", bool(self.chat.rendered), "null with a processor, which reads messages"),
        ):
            if value:
                raise refusal("LanguageData", name, allowed, value)
        if self.chat.truncation != "drop":
            allowed = "drop with a processor, because a cut may remove a part of an image"
            raise refusal("LanguageData", "chat.truncation", allowed, self.chat.truncation)

    def train_dataloader(self) -> DataLoader[Any] | StreamLoader:
        assert self.train_rows is not None
        collate = partial(
            collate_rows,
            pack=self.pack,
            length=self.max_length,
            pad_id=self.pad_id,
            name_source=self.mixes,
            processor=self.processor,
        )
        if isinstance(self.train_rows, StreamedRows):
            loader = DataLoader(self.train_rows, self.batch_size, collate_fn=collate, **loading(self))
            return StreamLoader(loader, self.stream.epoch_batches, "LanguageData")
        order: dict[str, Any] = {"shuffle": True}
        if self.mixes:
            place = data_parallel_part(self.trainer)
            epochs = self.mixture.epochs
            sampler = MixtureSampler(self.train_rows.sizes, self._passes(), self.seed, **place, epochs=epochs)
            order = {"sampler": sampler}
        elif self.by_length:
            place = data_parallel_part(self.trainer)
            order = {"sampler": LengthSampler(self.train_rows.lengths, self.batch_size, self.seed, **place)}
        return DataLoader(
            self.train_rows,
            self.batch_size,
            drop_last=True,
            collate_fn=collate,
            **order,
            **loading(self),
        )

    def val_dataloader(self) -> Any:
        assert self.val_rows is not None
        if not len(self.val_rows):
            return no_loaders(self)
        collate = partial(
            collate_rows,
            pack=self.pack,
            length=self.max_length,
            pad_id=self.pad_id,
            count_bytes=True,
            name_source=bool(self.source_names("val")),
            processor=self.processor,
        )
        return DataLoader(self.val_rows, self.val_batch_size, collate_fn=collate, **loading(self))

    def example_prompt(self) -> tuple[str, bool]:
        """Return a prompt from the first training row, and whether it is a user's turn of a conversation."""
        found = self._first_row()
        if self.chat.rendered and not found.messages:
            return "", True  # the text holds the marks of a template
        text = found.text[: found.given] or found.text
        if found.messages:
            text = next(str(message["content"]) for message in found.messages if message["role"] == "user")
        elif found.ids:
            text = self.tokenizer.decode(found.ids[:8], skip_special_tokens=True)
        return beginning(text), bool(found.messages)

    def example_images(self) -> list[str]:
        """Return the files of the images of the first training row. The list is empty if an image is no file."""
        images = self._first_row().images
        return list(images) if all(isinstance(image, str) for image in images) else []

    def _first_row(self) -> Document:
        sources = self._open_entry(self.train[0], 0, self.rows.split, streaming=True)
        return next(row for _, row in self.reader(sources) if isinstance(row, Document))

    def _mixed_sizes(self) -> list[int]:
        """Return the number of rows or tokens of each source."""
        assert isinstance(self.train_rows, PackedDocuments)
        if self.mixture.by == "tokens":
            return self.train_rows.tokens
        return self.train_rows.rows

    def _passes(self) -> list[list[float]]:
        """Return the number of passes over each source in an epoch, at each point of the schedule."""
        return self.mixture.passes(self.train, self._mixed_sizes()).tolist()

    def _describe_mixture(self) -> None:
        """Log the share of each source and the number of its passes in an epoch."""
        shares = self.mixture.shares(self.train, self._mixed_sizes())
        means = schedule_mean(np.array(self._passes()))
        for number, source in enumerate(self.train):
            share = share_text(shares[:, number])
            passes = f"{means[number]:.3g} passes in an epoch"
            if len(shares) > 1:
                passes += ", in the mean over the schedule"
            rank_zero_info(f"LanguageData: {source.label}: {share} of the {self.mixture.by}, {passes}")

    def fill(self, split: str = "train") -> float:
        """Return the share of the tokens of packed rows that are no padding; 1 for rows that are not packed."""
        rows = self.train_rows if split == "train" else self.val_rows
        assert isinstance(rows, PackedDocuments)
        if not self.pack:
            return 1.0
        return float(rows.pieces.lengths.sum() / (len(rows) * self.max_length))

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
        images = self.processor_name is not None
        rows = self.rows
        return Reader(sources, rows.format, rows.columns, rows.max_rows, images, rows.image_folder)

    def _cut(self, folder: Path, split: str, counts: Counts) -> PackedDocuments:
        documents = Documents(folder, split)
        pieces = cut(documents.facts, self.max_length, self.chat.truncation, counts)
        counts.trained += documents.count_trained(pieces)
        last = [0] * max(1, len(self.source_names(split)))
        if self.source_names(split):
            for entry, number in read_manifest(folder)["entries"][split]:
                last[entry] = number
        else:
            last = [len(documents.facts)]
        ends = np.searchsorted(pieces.document, np.cumsum(last)).tolist()
        bins = []
        begin = 0
        for end in ends:
            found = self._bins(pieces.lengths[begin:end])
            bins.append(Bins(found.items + begin, found.starts))
            begin = end
        parts = [slice(begin, end) for begin, end in zip([0, *ends], ends)]
        return PackedDocuments(
            documents,
            pieces,
            joined(bins),
            sizes=[len(found) for found in bins],
            rows=[len(np.unique(pieces.document[part])) for part in parts],
            tokens=[int(pieces.lengths[part].sum()) for part in parts],
        )

    def _bins(self, lengths: np.ndarray) -> Bins:
        """Return the rows of documents of these lengths."""
        if self.pack:
            return pack_lengths(lengths, self.max_length)
        return Bins(np.arange(len(lengths)), np.arange(len(lengths) + 1))  # one piece in each row

    def _adopt(self, found: dict[str, PackedDocuments]) -> None:
        for split in self.cached:
            if not len(found[split]) and (split == "train" or self.validates):
                use = "train" if split == "train" else "validate"
                raise ConfigurationError(
                    f"LanguageData: nothing is left to {use} on: all {self.report['counts'][split]['rows']} rows are "
                    f"malformed or were dropped (max_length = {self.max_length})."
                )
        self.val_rows = found["val"]
        if self.stream.enabled:
            self.train_rows = self._stream()
            return
        if len(found["train"]) < self.batch_size:
            allowed = f"at most the number of rows to train on, {len(found['train'])}"
            raise refusal("LanguageData", "batch_size", allowed, self.batch_size)
        self.train_rows = found["train"]
        if self.mixes:
            for source, size in zip(self.train, self.train_rows.sizes):
                if not size:
                    raise ConfigurationError(
                        f"LanguageData: nothing is left to train on in {source.label}: it holds no row, or all of its "
                        f"rows are malformed, held out or were dropped (max_length = {self.max_length})."
                    )
            self._describe_mixture()

    def _stream(self) -> StreamedRows:
        opened = []
        for number, entry in enumerate(self.train):
            opened.append(self._open_entry(entry, number, self.rows.split, streaming=True))
        if not self.mixes:
            opened = [[source for sources in opened for source in sources]]
        readers = [self.reader(sources) for sources in opened]
        for reader in readers:
            for sentence in reader.formats:
                rank_zero_info(f"LanguageData: {sentence}, streamed")
        mixture = None
        if self.mixes:
            if self.mixture.by == "tokens" and self.train[0].weight is None:
                raise ConfigurationError(
                    "LanguageData: mixture.by: tokens needs a weight for each source of a stream, because the number "
                    "of its tokens is not known before it is read."
                )
            shares = self.mixture.shares(self.train, [max(1.0, sum(reader.estimates)) for reader in readers])
            rows = self.mixture.epochs * self.stream.epoch_batches * self.batch_size
            mixture = StreamMixture(shares, self.mixture.by, self.mixture.stop, rows)
            for number, source in enumerate(self.train):
                share = share_text(shares[:, number])
                rank_zero_info(f"LanguageData: {source.label}: {share} of the {self.mixture.by}, streamed")
        encoder = ChatTokens(self.chat_tokenizer, **self.encoding())
        if self.chat_tokenizer.chat_template is not None:
            problem = encoder.check_end_of_turn()
            if problem:
                rank_zero_warn(f"LanguageData: {problem}: a model trained on it may never stop")
        return StreamedRows(
            readers,
            encoder,
            self.max_length,
            self.chat.truncation,
            self.pack,
            self.stream.buffer,
            self.rows.max_malformed,
            self.seed,
            self.chat.rendered,
            mixture,
        )


def collate_rows(
    rows: list[PackedRow],
    pack: bool,
    length: int,
    pad_id: int,
    count_bytes: bool = False,
    name_source: bool = False,
    processor: ImageTexts | None = None,
) -> dict[str, Tensor]:
    """Collate items of `PackedDocuments` into a batch.

    Args:
        rows: The documents of each row; a single one unless ``pack``.
        pack: Return a packed batch, else a padded one.
        length: Tokens of a packed row, and the most of a padded one.
        pad_id: Id of the padding.
        count_bytes: Add ``num_bytes`` [B].
        name_source: Add ``source`` [B], the number of the source of each row.
        processor: Processor that makes the inputs of rows with images.
    """
    documents = [[(ids, labels) for ids, labels, _ in row] for row in rows]
    if processor is not None:
        batch = pictured_batch(rows, processor)
    elif pack:
        batch = packed_batch(documents, length, pad_id)
    else:
        batch = padded_batch([row[0] for row in documents], pad_id, length)
    if count_bytes:
        batch["num_bytes"] = torch.tensor([sum(size for _, _, size in row) for row in rows])
    if name_source:
        batch["source"] = torch.tensor([row.source for row in rows])
    return batch


def pictured_batch(rows: list[PackedRow], processor: ImageTexts) -> dict[str, Tensor]:
    """Return a batch of conversations with images: the outputs of the processor, and labels.

    Raises:
        ConfigurationError: If the tokens of a row are not those of the cache, because an image has another size now.
    """
    pictured = [row.pictured for row in rows if row.pictured is not None]
    batch = processor.batch(pictured)
    labels = torch.full_like(batch["input_ids"], IGNORE)
    for index, ((ids, targets, _),) in enumerate(rows):
        found = batch["input_ids"][index][batch["attention_mask"][index] == 1]
        if found.tolist() != ids.tolist():
            files = [image for image in pictured[index].images if isinstance(image, str)]
            raise ConfigurationError(
                "LanguageData: the tokens of a row have changed since they were counted, perhaps because an image was "
                f"replaced ({listed(files, 3)}). Delete the cache and run again."
            )
        labels[index, : len(ids)] = torch.from_numpy(targets)
    return batch | {"labels": labels}
