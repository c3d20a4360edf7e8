"""What datamodules share whose batches come from a chat tokenizer: the tokenizer, and the ids that mean something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ChatDataModule(LightningDataModule):
    """Base of datamodules with a chat tokenizer; what it knows, it knows after ``setup``.

    Args:
        vocab_size: ids of a tokenizer that is trained on the rows, until it is there.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self.chat_tokenizer: Any = None
        """The tokenizer as transformers knows it, with its chat template; known after `setup`."""
        self.report: dict[str, Any] = {}
        """What the sources held and lost (the cache's manifest); known after `setup`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer without its template; known after `setup`."""
        if self.chat_tokenizer is None:
            raise RuntimeError(f"{type(self).__name__}: call prepare_data() and setup() first.")
        return self.chat_tokenizer.backend_tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids, the added ones included; known after `setup`."""
        return self._vocab_size if self.chat_tokenizer is None else len(self.chat_tokenizer)

    @property
    def stop_ids(self) -> list[int]:
        """The ids that end a text or a turn: where generation stops; known after `setup`."""
        return sorted({self.chat_tokenizer.eos_token_id, self.report["end_of_turn"]} - {None})

    @property
    def pad_id(self) -> int:
        """The id of what fills a row up; it is never learned."""
        pad = self.chat_tokenizer.pad_token_id
        return int(self.chat_tokenizer.eos_token_id if pad is None else pad)
