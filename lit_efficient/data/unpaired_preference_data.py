"""Answers that are good or bad: from files or the Hub to padded batches for `UnpairedPreference`.

    rows -> recognised format -> chat template of the tokenizer -> tokens, with a loss on the answer only
         -> memory-mapped cache -> answers, and each prompt with the answer to another one

Saves: tokenising (once for each content and setting).
Costs: reading and hashing the sources at every start; padding: rows are not packed.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_efficient.data.text.arguments import UnpairedChat, UnpairedRows
from lit_efficient.data.text.chat_data import ChatDataModule
from lit_efficient.data.text.collate import TokensAndLabels, padded_batch
from lit_efficient.data.text.document_store import Documents
from lit_efficient.data.text.reading import JudgedReader
from lit_efficient.data.text.rows import STDLIB_JUDGED, Source
from lit_efficient.data.text.truncation import Counts, cut
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.files.cache import map_numbers
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.mechanisms.order.keyed_batch_sampler import loading, no_loaders

JudgedRow = tuple[np.ndarray, np.ndarray, bool, TokensAndLabels | None]
"""Ids and unshifted labels [n] of a prompt with its answer, whether the answer is good, and the tokens of the row whose
answer the prompt also gets, if it is fixed."""


class JudgedRows:
    """Judged answers of a split. The numbers of what is left, and of what is cut, are added to ``counts``.

    Args:
        folder: Folder of the cache.
        split: Name of the split.
        max_length: Largest number of tokens of a row.
        too_long: Treatment of longer rows.
        counts: Numbers of rows and tokens.
        seed: Seed of the pairs of prompts and other answers, or ``None`` if batches decide these.
    """

    def __init__(
        self, folder: Path, split: str, max_length: int, too_long: str, counts: Counts, seed: int | None
    ) -> None:
        self._documents = Documents(folder, split)
        side: Any = "left" if too_long == "left" else "drop"
        pieces = cut(self._documents.facts, max_length, side, counts)
        # A prompt must keep a token, which predicts the first one of the answer.
        first = self._documents.facts[pieces.document, 1]
        kept = np.flatnonzero(first > pieces.start)
        self._pieces = type(pieces)(pieces.document[kept], pieces.start[kept], pieces.stop[kept])
        self.desirable = map_numbers(folder / f"{split}.desirable.bin", np.float64)[self._pieces.document] == 1
        """Whether each answer is good."""
        counts.trained += self._documents.count_trained(self._pieces)
        self._others: np.ndarray | None = None  # number of the row whose answer each prompt also gets
        if seed is not None:
            order = np.random.default_rng(seed).permutation(len(self))
            self._others = np.empty_like(order)
            self._others[order] = np.roll(order, 1)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> JudgedRow:
        ids, labels, _ = self._documents.piece(self._pieces, index)
        other = None
        if self._others is not None:
            other = self._documents.piece(self._pieces, int(self._others[index]))[:2]
        return ids, labels, bool(self.desirable[index]), other


class UnpairedPreferenceData(ChatDataModule):
    """DataModule of answers that are good or bad, for `UnpairedPreference`.

    Batches have ``input_ids``, ``labels`` and ``attention_mask`` [B, T], the same with the prefix ``kl_`` for each
    prompt with the answer to another one (of the row before it in the batch, unless ``fixed_others``), and
    ``desirable`` [B]. Rows have ``prompt`` and
    ``completion`` (texts or lists of messages), or ``messages``, and a ``label``: true for a good answer. Only the
    answer, with the token that ends it, contributes to the loss. Labels are not shifted. Malformed rows are counted and
    shown. Testing uses the validation rows.

    Args:
        train: Files (.jsonl, .json, .csv, .tsv, .parquet; compressed with .gz, .bz2 or .xz), folders of such files or
            of ``save_to_disk``, names on the Hugging Face hub, or ``stdlib-judged`` (2,000 functions of Python's
            standard library, each with its own body or that of another function).
        val: Sources for validation, named in the same way. null: ``val_fraction`` of the rows is held out.
        tokenizer: Tokenizer of the model: folder or name of a Hugging Face tokenizer, a ``tokenizer.json``, or a
            checkpoint of `LanguageModeling`. null: a byte-level BPE with a ChatML template is trained on the rows.
        max_length: Largest number of tokens of a prompt with an answer. Prompts with other answers are cut to it.
        batch_size: Rows in a training batch, for each process, at least 2. The divergence is estimated over a batch.
        val_batch_size: Rows in a validation batch. null: ``batch_size``.
        val_fraction: Share of the rows held out for validation if ``val`` is null, at least 0 and below 1. 0: train on
            all rows, without validation.
        num_workers: Worker processes of a loader. 0 is fastest for memory-mapped tokens.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
        seed: Seed of the choice of the rows held out.
        cache_dir: Folder of the cache of tokens. null: ``$LIT_EFFICIENT_CACHE``, or ``~/.cache/lit_efficient``.
        fixed_others: Pair each prompt with the same answer to another prompt in each epoch, drawn once by ``seed``, as
            ``cache_reference`` of `UnpairedPreference` needs it. false: with that of the row before it in the batch.
        rows: Choice of the rows.
        chat: Conversion of rows to tokens.
    """

    batches: ClassVar[str] = "judged answers"

    kind = "unpaired"
    columns = ("desirable",)
    rows: UnpairedRows
    chat: UnpairedChat

    def __init__(
        self,
        *,
        train: str | list[str] = STDLIB_JUDGED,
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
        fixed_others: bool = False,
        rows: UnpairedRows = UnpairedRows(),  # noqa: B008 (frozen)
        chat: UnpairedChat = UnpairedChat(),  # noqa: B008 (frozen)
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
        if batch_size < 2 and not fixed_others:
            allowed = "at least 2, because the divergence is estimated from answers to other prompts of the batch"
            raise refusal("UnpairedPreferenceData", "batch_size", allowed, batch_size)
        self.fixed_others = fixed_others
        self.train_rows: JudgedRows | None = None
        self.val_rows: JudgedRows | None = None

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_rows, self.batch_size, training=True)

    def val_dataloader(self) -> Any:
        if not self.val_rows:
            return no_loaders(self)
        return self._loader(self.val_rows, self.val_batch_size, training=False)

    def summary(self, counts: dict[str, int]) -> str:
        return (
            f"{counts['documents']:,} answers, {counts['tokens']:,} tokens, "
            f"{counts['trained'] / max(counts['tokens'], 1):.1%} of them answers; longer than {self.max_length}: "
            f"{counts['dropped']:,} left out, {counts['truncated'] - counts['dropped']:,} with the prompt cut"
        )

    def reader(self, sources: list[Source]) -> JudgedReader:
        return JudgedReader(sources, "auto", self.rows.columns, self.rows.max_rows)

    def _loader(self, rows: Any, batch_size: int, *, training: bool) -> DataLoader[Any]:
        collate = partial(judged_batch, max_length=self.max_length, pad_id=self.pad_id)
        return DataLoader(rows, batch_size, shuffle=training, drop_last=training, collate_fn=collate, **loading(self))

    def _cut(self, folder: Path, split: str, counts: Counts) -> JudgedRows:
        seed = self.seed if self.fixed_others else None
        return JudgedRows(folder, split, self.max_length, self.chat.too_long, counts, seed)

    def _adopt(self, found: dict[str, JudgedRows]) -> None:
        wanted = [("train", "train (batch_size)", self.batch_size)]
        if self.validates:
            wanted.append(("val", "validate", 1))
        for split, use, needed in wanted:
            if len(found[split]) < needed:
                raise ConfigurationError(
                    f"UnpairedPreferenceData: at least {needed} rows are needed to {use} on, got {len(found[split])}: "
                    f"the others are malformed, or too long for max_length = {self.max_length}."
                )
        self.train_rows = found["train"]
        self.val_rows = found["val"]


def judged_batch(rows: Sequence[JudgedRow], max_length: int, pad_id: int = 0) -> dict[str, Tensor]:
    """Collate judged answers, and each prompt with another answer, cut to a length.

    The other answer is that of the row before it in the batch, unless the row has one.

    Returns:
        ``input_ids``, ``labels`` and ``attention_mask`` [B, T] int64, the same with the prefix ``kl_``, and
        ``desirable`` [B] bool.
    """
    batch = padded_batch([(ids, labels) for ids, labels, _, _ in rows], pad_id, max_length)
    others: list[TokensAndLabels] = []
    for number, (ids, labels, _, other) in enumerate(rows):
        other_ids, other_labels = rows[number - 1][:2] if other is None else other
        first = _first_trained(labels)
        answer = _first_trained(other_labels)
        joined_ids = np.concatenate((ids[:first], other_ids[answer:]))
        joined_labels = np.concatenate((labels[:first], other_labels[answer:]))
        others.append((joined_ids[:max_length], joined_labels[:max_length]))
    batch |= {f"kl_{name}": value for name, value in padded_batch(others, pad_id, max_length).items()}
    return {**batch, "desirable": torch.tensor([desirable for _, _, desirable, _ in rows])}


def _first_trained(labels: np.ndarray) -> int:
    return int(np.argmax(labels != IGNORE))
