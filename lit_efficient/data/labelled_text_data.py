"""Texts with labels: from files or the Hub to padded batches for `TextLabelling`.

    rows -> tokens, as the tokenizer writes them -> memory-mapped cache -> batches padded on the right

Saves: tokenising (once for each content and setting).
Costs: reading and hashing the sources at every start; padding: texts are not packed.
"""

import math
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_efficient.data.text.arguments import LabelledRows
from lit_efficient.data.text.plain_data import PlainTextDataModule, types_of
from lit_efficient.data.text.plain_texts import LabelIds, Labels, TextReader, TextRows, padded, separate_words
from lit_efficient.data.text.rows import Source
from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import IGNORE


class LabelledTextData(PlainTextDataModule):
    """DataModule of texts with labels, for `TextLabelling`.

    Batches have ``input_ids``, ``attention_mask`` and, if the tokenizer's model reads them, ``token_type_ids``, all
    [B, T]; and ``labels``: a class [B], 1 for each class of a text and 0 for the others [B, C], a number [B], or the
    class of each token [B, T], -100 for tokens without one. Texts are tokenised as ``tokenizer(text, text_pair,
    truncation=True)`` does, and words as with ``is_split_into_words``: the first token of a word has its label.
    Malformed rows are counted and shown. Testing uses the validation rows.

    Args:
        train: Files (.jsonl, .json, .csv, .tsv, .parquet; compressed with .gz, .bz2 or .xz), folders of such files or
            of ``save_to_disk``, names on the Hugging Face hub, or ``stdlib-modules`` (functions of Python's standard
            library, with the module that each is from).
        tokenizer: Tokenizer of the model: folder or name of a Hugging Face tokenizer, or a ``tokenizer.json``.
        labels: Kind of the labels. ``class``: a class of each text, in the key ``label``. ``classes``: a list of
            classes of each text, in ``label``. ``number``: a number of each text, in ``label``. ``tags``: a class of
            each word, in ``tags`` beside ``tokens``.
        val: Sources for validation, named in the same way. null: ``val_fraction`` of the texts is held out.
        max_length: Largest number of tokens of a text. Longer texts are cut as the tokenizer does.
        batch_size: Rows in a training batch, for each process.
        val_batch_size: Rows in a validation batch. null: ``batch_size``.
        val_fraction: Share of the texts held out for validation if ``val`` is null, at least 0 and below 1. 0: train on
            all rows, without validation.
        num_workers: Worker processes of a loader. 0 is fastest for memory-mapped tokens.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
        seed: Seed of the choice of the texts held out.
        cache_dir: Folder of the cache of tokens. null: ``$LIT_EFFICIENT_CACHE``, or ``~/.cache/lit_efficient``.
        rows: Choice of the rows, and names of the classes.
    """

    batches: ClassVar[str] = "labelled texts"

    kind = "labelled"
    rows: LabelledRows

    def __init__(
        self,
        *,
        train: str | list[str],
        tokenizer: str,
        labels: Labels = "class",
        val: str | list[str] | None = None,
        max_length: int = 512,
        batch_size: int = 16,
        val_batch_size: int | None = None,
        val_fraction: float = 0.05,
        num_workers: int = 0,
        pin_memory: bool = True,
        seed: int = 0,
        cache_dir: str | None = None,
        rows: LabelledRows = LabelledRows(),  # noqa: B008 (frozen)
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
        if labels == "number" and rows.names is not None:
            raise ConfigurationError("LabelledTextData: rows.names are names of classes, and labels is number.")
        self.labels: Labels = labels
        self.label_names: list[str] | None = None
        """Names of the classes by number; known after `setup`. ``None`` for numbers."""
        self.kind = f"labelled-{labels}"  # the same rows can be read in several ways
        several = labels in ("classes", "tags")
        self.parts = ("", f".{labels}") if several else ("",)
        self.columns = () if several else ("label",)
        self._ids = LabelIds(rows.names)
        self._order = np.zeros(0, dtype=np.int64)  # number of each class by that in the cache

    def _load_tokenizer(self) -> Any:
        tokenizer = super()._load_tokenizer()
        if self.labels == "tags":
            problem = separate_words(tokenizer)
            if problem:
                rank_zero_warn(f"LabelledTextData: {problem}")
        return tokenizer

    def reader(self, sources: list[Source]) -> TextReader:
        return TextReader(sources, self.labels, self._ids, 0, self.rows.columns, self.rows.max_rows)

    def further(self) -> dict[str, Any]:
        return {"labels": self._ids.names(), "labels_are_texts": bool(self._ids.found)}

    def collate(self, rows: list[Any]) -> dict[str, Tensor]:
        """Return the padded batch of rows."""
        ids = [texts[0][0] for texts, _ in rows]
        most = self.max_length
        found = {"input_ids": padded(ids, self.pad_id, most)}
        found["attention_mask"] = padded([np.ones_like(one) for one in ids], 0, most)
        types = types_of([texts[0][1] for texts, _ in rows], self.chat_tokenizer)
        if types is not None:
            found["token_type_ids"] = padded(types, 0, most)
        batch = {name: torch.from_numpy(array) for name, array in found.items()}
        if self.labels == "number":
            batch["labels"] = torch.tensor([label for _, label in rows])
        elif self.labels == "class":
            batch["labels"] = torch.from_numpy(self._order[[int(label) for _, label in rows]])
        elif self.labels == "classes":
            batch["labels"] = torch.zeros(len(rows), len(self._order))
            for number, (_, (classes, _)) in enumerate(texts for texts, _ in rows):
                batch["labels"][number, self._order[classes]] = 1
        else:
            tags = [np.where(marks, self._order[classes], IGNORE) for (_, (classes, marks)), _ in rows]
            batch["labels"] = torch.from_numpy(padded(tags, IGNORE, most))
        return batch

    def _adopt(self, found: dict[str, TextRows]) -> None:
        super()._adopt(found)
        if self.labels == "number":
            return
        names: list[str] = self.report["labels"]
        if self.report["labels_are_texts"]:
            # By their numbers, if they have such: 9 before 10.
            self.label_names = sorted(names, key=lambda name: (int(name) if name.isdecimal() else math.inf, name))
        else:
            self.label_names = names
        if len(self.label_names) < 2:
            raise ConfigurationError(
                f"LabelledTextData: at least 2 classes are needed, and the rows have {self.label_names}."
            )
        self._order = np.array([self.label_names.index(name) for name in names])
