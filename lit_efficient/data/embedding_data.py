"""Texts that belong together: from files or the Hub to padded batches for `TextEmbedding`.

    rows -> tokens, as the tokenizer writes them -> memory-mapped cache -> batches padded on the right

Saves: tokenising (once for each content and setting).
Costs: reading and hashing the sources at every start; padding: texts are not packed.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lit_efficient.data.text.arguments import EmbeddingRows
from lit_efficient.data.text.plain_data import PlainTextDataModule, types_of
from lit_efficient.data.text.plain_texts import LabelIds, TextReader, padded
from lit_efficient.data.text.rows import Source


class EmbeddingData(PlainTextDataModule):
    """DataModule of anchors with a text that belongs to each, and texts that do not, for `TextEmbedding`.

    Batches have ``input_ids``, ``attention_mask`` and, if the tokenizer's model reads them, ``token_type_ids``, all
    [B, 2 + n, T]: the anchor, the positive and the n negatives of each row. Rows have ``anchor``, ``positive`` and,
    with ``rows.negatives``, ``negative`` (a text or a list). Texts are tokenised as ``tokenizer(text,
    truncation=True)`` does. All rows with one anchor are on one side of the split. Testing uses the validation rows.

    Args:
        train: Files (.jsonl, .json, .csv, .tsv, .parquet; compressed with .gz, .bz2 or .xz), folders of such files or
            of ``save_to_disk``, names on the Hugging Face hub, or ``stdlib-docstrings`` (functions of Python's standard
            library: the docstring and the body of each).
        tokenizer: Tokenizer of the model: folder or name of a Hugging Face tokenizer, or a ``tokenizer.json``.
        val: Sources for validation, named in the same way. null: ``val_fraction`` of the anchors is held out.
        max_length: Largest number of tokens of a text. Longer texts are cut as the tokenizer does.
        batch_size: Rows in a training batch, for each process. Each anchor is compared with the texts of all of them.
        val_batch_size: Rows in a validation batch. null: ``batch_size``. It changes the figures.
        val_fraction: Share of the anchors held out for validation if ``val`` is null, at least 0 and below 1. 0: train
            on all rows, without validation.
        num_workers: Worker processes of a loader. 0 is fastest for memory-mapped tokens.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
        seed: Seed of the choice of the anchors held out.
        cache_dir: Folder of the cache of tokens. null: ``$LIT_EFFICIENT_CACHE``, or ``~/.cache/lit_efficient``.
        rows: Choice of the rows, and number of negatives.
    """

    batches: ClassVar[str] = "embedded texts"

    kind = "embedding"
    rows: EmbeddingRows

    def __init__(
        self,
        *,
        train: str | list[str],
        tokenizer: str,
        val: str | list[str] | None = None,
        max_length: int = 256,
        batch_size: int = 64,
        val_batch_size: int | None = None,
        val_fraction: float = 0.05,
        num_workers: int = 0,
        pin_memory: bool = True,
        seed: int = 0,
        cache_dir: str | None = None,
        rows: EmbeddingRows = EmbeddingRows(),  # noqa: B008 (frozen)
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
            pin_memory=pin_memory,
        )
        self.parts = (".anchor", ".positive", *(f".negative{number}" for number in range(rows.negatives)))

    def reader(self, sources: list[Source]) -> TextReader:
        return TextReader(sources, "embedding", LabelIds(), self.rows.negatives, self.rows.columns, self.rows.max_rows)

    def collate(self, rows: list[Any]) -> dict[str, Tensor]:
        """Return the padded batch of rows."""
        texts = [text for row, _ in rows for text in row]
        ids = [one for one, _ in texts]
        most = self.max_length
        found = {"input_ids": padded(ids, self.pad_id, most)}
        found["attention_mask"] = padded([np.ones_like(one) for one in ids], 0, most)
        types = types_of([marks for _, marks in texts], self.chat_tokenizer)
        if types is not None:
            found["token_type_ids"] = padded(types, 0, most)
        shape = (len(rows), len(self.parts), -1)
        return {name: torch.from_numpy(array).view(shape) for name, array in found.items()}
