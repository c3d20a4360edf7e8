"""Base of DataModules of plain texts, which a tokenizer writes without a chat template."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from lit_efficient.data.text.arguments import ChatArguments, RowsArguments
from lit_efficient.data.text.chat_data import ChatDataModule
from lit_efficient.data.text.chat_tokenizer import load_chat_tokenizer
from lit_efficient.data.text.plain_texts import TextRows, TextTokens
from lit_efficient.data.text.truncation import Counts
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.order.keyed_batch_sampler import loading, no_loaders


@dataclass(frozen=True)
class _NoChat(ChatArguments):
    """Arguments of conversations, which these DataModules do not have."""

    owner = "plain texts"


class PlainTextDataModule(ChatDataModule):
    """Base of `LabelledTextData` and `EmbeddingData`."""

    encoder = TextTokens

    def __init__(self, *, tokenizer: str, rows: RowsArguments, **arguments: Any) -> None:
        super().__init__(tokenizer=tokenizer, rows=rows, chat=_NoChat(), **arguments)
        self.train_rows: TextRows | None = None
        self.val_rows: TextRows | None = None

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        set_padding(self.chat_tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer."""
        if self.chat_tokenizer is None:
            self.chat_tokenizer = load_chat_tokenizer(str(self.tokenizer_name))
        return len(self.chat_tokenizer)

    @property
    def stop_ids(self) -> list[int]:
        """Ids at which generation stops; none."""
        return []

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_rows, self.batch_size, training=True)

    def val_dataloader(self) -> Any:
        if not self.val_rows:
            return no_loaders(self)
        return self._loader(self.val_rows, self.val_batch_size, training=False)

    def encoding(self) -> dict[str, Any]:
        return {"max_length": self.max_length}

    def summary(self, counts: dict[str, int]) -> str:
        cut = counts["turns"] - counts["ended"]
        return (
            f"{counts['documents']:,} rows, {counts['tokens']:,} tokens; {cut:,} of {counts['turns']:,} texts are "
            f"longer than {self.max_length} tokens and cut"
        )

    @abstractmethod
    def collate(self, rows: list[Any]) -> dict[str, Tensor]:
        """Return the batch of rows of `TextRows`."""

    def _loader(self, rows: Any, batch_size: int, *, training: bool) -> DataLoader[Any]:
        options = loading(self)
        return DataLoader(rows, batch_size, shuffle=training, drop_last=training, collate_fn=self.collate, **options)

    def _cut(self, folder: Path, split: str, counts: Counts) -> TextRows:
        rows = TextRows(folder, split, self.parts, self.columns)
        counts.documents = len(rows)
        counts.tokens = rows.tokens
        return rows

    def _adopt(self, found: dict[str, TextRows]) -> None:
        wanted = [("train", "train (batch_size)", self.batch_size)]
        if self.validates:
            wanted.append(("val", "validate", 1))
        for split, use, needed in wanted:
            if len(found[split]) < needed:
                raise ConfigurationError(
                    f"{self.owner}: at least {needed} rows are needed to {use} on, got {len(found[split])}: the others "
                    "are malformed."
                )
        self.train_rows = found["train"]
        self.val_rows = found["val"]


def set_padding(tokenizer: Any) -> None:
    """Let a tokenizer pad on the right, with the token that ends a text if it has no token for padding, in place."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    tokenizer.padding_side = "right"


def types_of(rows: list[np.ndarray], tokenizer: Any) -> list[np.ndarray] | None:
    """Return the types of tokens, if the model of a tokenizer reads them."""
    if "token_type_ids" not in tokenizer.model_input_names:
        return None
    return [marks.astype(np.int64) for marks in rows]
