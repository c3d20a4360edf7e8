"""Prompts with whatever their rewards need: from files or the Hub to batches for `PolicyOptimization`.

    rows -> a text, or the messages of a conversation, and the row itself

Costs: all rows are kept in memory.
"""

import json
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lit_efficient.data.text.chat_tokenizer import load_chat_tokenizer
from lit_efficient.data.text.rows import beginning, open_sources
from lit_efficient.errors import ChecksTypes, ConfigurationError, check_number, refusal
from lit_efficient.mechanisms.order.keyed_batch_sampler import no_loaders

Prompt = dict[str, Any]


def arithmetic_rows(count: int = 1000, most: int = 20) -> list[Prompt]:
    """Return sums of two numbers below ``most``, as rows with ``prompt`` and ``answer``."""
    pairs = torch.randint(most, (count, 2), generator=torch.Generator("cpu").manual_seed(0), device="cpu").tolist()
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


BUILT_IN = {"arithmetic": arithmetic_rows}


class PromptData(ChecksTypes, LightningDataModule):
    """DataModule of prompts, for `PolicyOptimization`.

    Batches have ``prompts``, a list of texts or of lists of messages, and ``rows``, the rows that rewards get. A row
    has a ``prompt``, or ``messages`` whose last assistant turn is left out. The prompt of rows without ``messages`` may
    be a list of messages, too.

    Args:
        train: File (.jsonl, .json, .csv, .tsv, .parquet; compressed with .gz, .bz2 or .xz), folder of such files or of
            ``save_to_disk``, name on the Hugging Face hub, ``stdlib-instructions``, or ``arithmetic`` (1,000 sums with
            ``answer``).
        tokenizer: Tokenizer of the model: folder or name of a Hugging Face tokenizer, a ``tokenizer.json``, or a
            checkpoint of `LanguageModeling`.
        val: Source for validation, named in the same way. null: ``val_fraction`` of the rows is held out.
        batch_size: Prompts in a training batch, for each process. Each is answered several times.
        val_batch_size: Prompts in a validation batch. null: ``batch_size``.
        val_fraction: Share of the rows held out for validation if ``val`` is null, at least 0 and below 1.
        seed: Seed of the choice of the rows held out.
    """

    batches: ClassVar[str] = "prompts"

    def __init__(
        self,
        *,
        train: str,
        tokenizer: str,
        val: str | None = None,
        batch_size: int = 8,
        val_batch_size: int | None = None,
        val_fraction: float = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_number("PromptData", "batch_size", batch_size, least=1, whole=True)
        check_number("PromptData", "val_batch_size", val_batch_size, least=1, whole=True, null=True)
        check_number("PromptData", "val_fraction", val_fraction, least=0, below=1)
        self.train = train
        self.val = val
        self.tokenizer_name = tokenizer
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size or batch_size
        self.val_fraction = val_fraction
        self.seed = seed
        self.chat_tokenizer: Any = None
        """Tokenizer of transformers; known after `setup`."""
        self.train_rows: list[Prompt] = []
        self.val_rows: list[Prompt] = []

    @property
    def tokenizer(self) -> Any:
        """Tokenizer without its template; known after `setup`."""
        return self.chat_tokenizer.backend_tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids of the tokenizer."""
        if self.chat_tokenizer is None:
            self.chat_tokenizer = load_chat_tokenizer(self.tokenizer_name)
        return len(self.chat_tokenizer)

    @property
    def stop_ids(self) -> list[int]:
        """Ids at which generation stops: the token that ends a text, and ``<|im_end|>`` if there is one."""
        ids = [self.chat_tokenizer.eos_token_id, self.chat_tokenizer.get_vocab().get("<|im_end|>")]
        return [token for token in ids if token is not None]

    @property
    def has_conversations(self) -> bool:
        """True if a prompt is a list of messages; known after `setup`."""
        return has_conversations([*self.train_rows, *self.val_rows])

    def setup(self, stage: str | None = None) -> None:
        if self.train_rows:
            return
        if self.chat_tokenizer is None:
            self.chat_tokenizer = load_chat_tokenizer(self.tokenizer_name)
        rows = read_prompts(self.train)
        if self.val is not None:
            self.val_rows = read_prompts(self.val)
        elif self.val_fraction:
            held_out = max(1, int(len(rows) * self.val_fraction))
            draw = torch.Generator("cpu").manual_seed(self.seed)
            order = torch.randperm(len(rows), generator=draw, device="cpu").tolist()
            self.val_rows = [rows[i] for i in sorted(order[:held_out])]
            rows = [rows[i] for i in sorted(order[held_out:])]
        if len(rows) < self.batch_size:
            allowed = (
                f"at most {len(rows)}, the number of prompts for training ({len(self.val_rows)} are for validation)"
            )
            raise refusal("PromptData", "batch_size", allowed, self.batch_size)
        self.train_rows = rows

    def example_prompt(self) -> tuple[str, bool]:
        """Return a line of the first training prompt, and whether it is a user's turn of a conversation."""
        prompt = self.train_rows[0]["prompt"]
        task: Any = None if self.trainer is None else self.trainer.lightning_module
        is_chat = bool(task is not None and task.rollout.chat)
        if not isinstance(prompt, str):
            prompt = prompt[-1]["content"]
            is_chat = True
        return beginning(str(prompt)), is_chat

    def train_dataloader(self) -> DataLoader[Any]:
        rows: Any = self.train_rows
        return DataLoader(rows, self.batch_size, shuffle=True, drop_last=True, collate_fn=prompt_batch)

    def val_dataloader(self) -> Any:
        if not self.val_rows:
            return no_loaders(self)
        rows: Any = self.val_rows
        return DataLoader(rows, self.val_batch_size, collate_fn=prompt_batch)

    def test_dataloader(self) -> Any:
        """Return the loader of the validation rows: there is no third split."""
        return self.val_dataloader()


def prompt_batch(rows: list[Prompt]) -> dict[str, Any]:
    """Return a batch with the ``prompts`` of rows, and the ``rows``."""
    return {"prompts": [row["prompt"] for row in rows], "rows": rows}


def has_conversations(rows: Iterable[Prompt]) -> bool:
    """Return whether a prompt of rows is a list of messages."""
    return any(not isinstance(row["prompt"], str) for row in rows)


def read_prompts(name: str) -> list[Prompt]:
    """Return the rows of a source, each with a ``prompt``.

    Raises:
        ConfigurationError: For a row without one, and for a source without rows.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    found = []
    for source in open_sources(name):
        for place, row in source.rows():
            prompt = None if isinstance(row, str) else _prompt_of(row)
            if prompt is None or isinstance(row, str):
                raise ConfigurationError(
                    f"PromptData: {place}: a row needs a prompt (a text, or a list of messages with role and "
                    "content), or messages with a user's turn, got "
                    f"{json.dumps(row, ensure_ascii=False, default=str)[:200]}"
                )
            found.append({**row, "prompt": prompt})
    if not found:
        raise ConfigurationError(f"PromptData: {name} holds no rows")
    return found


def _prompt_of(row: dict[str, Any]) -> Any:
    prompt = row.get("prompt")
    if prompt is None and isinstance(row.get("messages"), list):
        prompt = row["messages"]
        while prompt and isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant":
            prompt = prompt[:-1]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(map(_is_turn, prompt)) and prompt[-1].get("content"):
        return prompt
    return None


def _is_turn(turn: Any) -> bool:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        return False
    return isinstance(turn.get("content"), str | list) or bool(turn.get("tool_calls"))
