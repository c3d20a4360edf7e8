"""Pairs of a preferred and a rejected answer: from files or the Hub to padded batches for `Preference`.

    rows -> recognised format -> chat template of the tokenizer -> tokens, with a loss on the two answers only
         -> memory-mapped cache -> both sides padded to one length

Saves: tokenising (once for each content and setting).
Costs: reading and hashing the sources at every start; padding: pairs are not packed.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_efficient.data.text.arguments import PreferenceChat, PreferenceRows
from lit_efficient.data.text.chat_data import ChatDataModule
from lit_efficient.data.text.collate import padded_batch
from lit_efficient.data.text.document_store import Documents
from lit_efficient.data.text.reading import PairReader, Reader
from lit_efficient.data.text.rows import STDLIB_PREFERENCES, Source
from lit_efficient.data.text.truncation import Counts, TooLong, cut_pairs
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import map_numbers
from lit_efficient.mechanisms.order.keyed_batch_sampler import loading, no_loaders

Side = tuple[np.ndarray, np.ndarray]
PairRow = tuple[Side, Side, float | None]
"""Chosen and rejected answer, and the margin between them."""


class PairRows:
    """Pairs of a split: item i is (chosen, rejected, margin). The answers are ids and labels [n].

    The numbers of what is left, and of what `cut_pairs` cuts, are added to ``counts``.
    """

    def __init__(self, folder: Path, split: str, max_length: int, too_long: TooLong, counts: Counts) -> None:
        sides = [Documents(folder, f"{split}.{name}") for name in ("chosen", "rejected")]
        pieces = cut_pairs(sides[0].facts, sides[1].facts, max_length, too_long)
        self._sides = list(zip(sides, pieces))
        self.margins = map_numbers(folder / f"{split}.margin.bin", np.float64)[pieces[0].document]
        """Margin of each pair, or NaN."""
        counts.documents = len(self)
        counts.dropped = len(sides[0].facts) - len(self)
        counts.truncated = int((pieces[0].start > 0).sum())
        counts.tokens = sum(int(left.lengths.sum()) for left in pieces)
        counts.trained = sum(documents.count_trained(left) for documents, left in self._sides)

    def __len__(self) -> int:
        return len(self._sides[0][1])

    def __getitem__(self, index: int) -> PairRow:
        (ids, labels, _), (other_ids, other_labels, _) = (side.piece(pieces, index) for side, pieces in self._sides)
        margin = float(self.margins[index])
        return (ids, labels), (other_ids, other_labels), None if math.isnan(margin) else margin


class PreferenceData(ChatDataModule):
    """DataModule of pairs of a chosen and a rejected answer, for `Preference` and `RewardModeling`.

    Batches have ``chosen_`` and ``rejected_`` with ``input_ids``, ``labels`` and ``attention_mask``, all [B, T], and
    ``margin`` [B] if the rows tell how much better the chosen answer is. Rows have ``prompt``, ``chosen`` and
    ``rejected``, as texts or as lists of messages; conversations may lack ``prompt``. Conversations may share any
    beginning: all assistant turns after it, with the tokens that end them, contribute to the loss. Labels are not
    shifted. Malformed rows are counted and shown. Testing uses the validation pairs.

    Args:
        train: Files (.jsonl, .json, .csv, .tsv, .parquet; compressed with .gz, .bz2 or .xz), folders of such files or
            of ``save_to_disk``, names on the Hugging Face hub, or ``stdlib-preferences`` (2,000 functions of Python's
            standard library, each with its own body and that of another function).
        val: Sources for validation, named in the same way. null: ``val_fraction`` of the prompts is held out.
        tokenizer: Tokenizer of the model: folder or name of a Hugging Face tokenizer, a ``tokenizer.json``, or a
            checkpoint of `LanguageModeling`. null: a byte-level BPE with a ChatML template is trained on the pairs.
        max_length: Largest number of tokens of a prompt with an answer.
        batch_size: Pairs in a training batch, for each process.
        val_batch_size: Pairs in a validation batch. null: ``batch_size``.
        val_fraction: Share of the prompts held out for validation if ``val`` is null, at least 0 and below 1. 0: train
            on all pairs, without validation.
        num_workers: Worker processes of a loader. 0 is fastest for memory-mapped tokens.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
        seed: Seed of the choice of the prompts held out.
        cache_dir: Folder of the cache of tokens. null: ``$LIT_EFFICIENT_CACHE``, or ``~/.cache/lit_efficient``.
        rows: Choice of the rows.
        chat: Conversion of rows to tokens.
    """

    batches: ClassVar[str] = "pairs"

    kind = "preference"
    parts = (".chosen", ".rejected")
    columns = ("margin",)
    rows: PreferenceRows
    chat: PreferenceChat

    def __init__(
        self,
        *,
        train: str | list[str] = STDLIB_PREFERENCES,
        val: str | list[str] | None = None,
        tokenizer: str | None = None,
        max_length: int = 1024,
        batch_size: int = 4,
        val_batch_size: int | None = None,
        val_fraction: float = 0.05,
        num_workers: int = 0,
        pin_memory: bool = True,
        seed: int = 0,
        cache_dir: str | None = None,
        rows: PreferenceRows = PreferenceRows(),  # noqa: B008 (frozen)
        chat: PreferenceChat = PreferenceChat(),  # noqa: B008 (frozen)
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
        self.train_pairs: PairRows | None = None
        self.val_pairs: PairRows | None = None
        self.has_margins = False
        """True if batches have margins; known after `setup`."""

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_pairs, self.batch_size, training=True)

    def val_dataloader(self) -> Any:
        if not self.val_pairs:
            return no_loaders(self)
        return self._loader(self.val_pairs, self.val_batch_size, training=False)

    def summary(self, counts: dict[str, int]) -> str:
        return (
            f"{counts['documents']:,} pairs, {counts['tokens']:,} tokens, "
            f"{counts['trained'] / max(counts['tokens'], 1):.1%} of them answers; longer than {self.max_length}: "
            f"{counts['dropped']:,} left out, {counts['truncated']:,} with the prompt cut"
        )

    def reader(self, sources: list[Source]) -> Reader:
        return PairReader(sources, self.rows.strings_as, self.rows.columns, self.rows.max_rows, self.rows.margin)

    def _loader(self, pairs: PairRows | None, batch_size: int, *, training: bool) -> DataLoader[Any]:
        assert pairs is not None
        collate = partial(pair_batch, pad_id=self.pad_id, most=self.max_length)
        rows: Any = pairs
        return DataLoader(rows, batch_size, shuffle=training, drop_last=training, collate_fn=collate, **loading(self))

    def _cut(self, folder: Path, split: str, counts: Counts) -> PairRows:
        return PairRows(folder, split, self.max_length, self.chat.too_long, counts)

    def _adopt(self, found: dict[str, PairRows]) -> None:
        wanted = [("train", "train (batch_size)", self.batch_size)]
        if self.validates:
            wanted.append(("val", "validate", 1))
        for split, use, needed in wanted:
            if len(found[split]) < needed:
                raise ConfigurationError(
                    f"PreferenceData: at least {needed} pairs are needed to {use} on, got {len(found[split])}: the "
                    f"others are malformed, or too long for max_length = {self.max_length}."
                )
        lacking = sum(int(np.isnan(pairs.margins).sum()) for pairs in found.values())
        count = sum(map(len, found.values()))
        if 0 < lacking < count:
            raise ConfigurationError(
                f"PreferenceData: {lacking} of {count} pairs have no margin, and the others have one. Complete the "
                "rows, or set rows.margin to none."
            )
        self.has_margins = lacking == 0
        self.train_pairs = found["train"]
        self.val_pairs = found["val"]


def pair_batch(pairs: Sequence[PairRow], pad_id: int = 0, most: int | None = None) -> dict[str, Tensor]:
    """Collate pairs of ids and unshifted labels [n]. All rows of both sides are padded on the right to one length.

    Args:
        pairs: The pairs.
        pad_id: Id of the padding.
        most: Largest length of a row.

    Returns:
        ``chosen_`` and ``rejected_`` with ``input_ids``, ``labels`` and ``attention_mask``, [B, T] int64; and
        ``margin`` [B] float32, if all pairs have one.
    """
    # One length for both sides lets a task run them as one batch.
    rows = padded_batch([chosen for chosen, _, _ in pairs] + [rejected for _, rejected, _ in pairs], pad_id, most)
    batch = {}
    margins = [margin for _, _, margin in pairs if margin is not None]
    if len(margins) == len(pairs):
        batch["margin"] = torch.tensor(margins)
    for name, values in rows.items():
        batch[f"chosen_{name}"] = values[: len(pairs)]
        batch[f"rejected_{name}"] = values[len(pairs) :]
    return batch
