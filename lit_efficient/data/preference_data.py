"""Pairs of a preferred and a rejected answer: from files or the Hub to padded batches for `Preference`.

    rows -> recognised format -> the tokenizer's own chat template -> tokens, with only the two answers learned
         -> a memory-mapped cache -> both sides padded to one length

Saves: tokenising (once for each content and setting).
Costs: reading and hashing the sources at every start; padding: pairs are not packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lit_efficient.data.text import document_store
from lit_efficient.data.text.chat_data import ChatDataModule
from lit_efficient.data.text.chat_tokenizer import SMALLEST_VOCABULARY, load_chat_tokenizer
from lit_efficient.data.text.chat_tokens import OnUntrainedEnd
from lit_efficient.data.text.collate import padded_batch
from lit_efficient.data.text.pair_cache import PairRecipe, PairRows, TooLong, prepare_pairs
from lit_efficient.data.text.pair_formats import StringsAs
from lit_efficient.data.text.python_preferences import STDLIB_PREFERENCES, preferences
from lit_efficient.data.text.reading import check_malformed
from lit_efficient.data.text.rows import Source, open_sources, source_of_rows
from lit_efficient.errors import ConfigurationError

if TYPE_CHECKING:
    pass

_COLUMNS = ("prompt", "chosen", "rejected", "system", "tools")


class PreferenceData(ChatDataModule):
    """Pairs as batches ``chosen_`` and ``rejected_`` with ``input_ids``, ``labels`` and ``attention_mask``, ``[B, T]``.

    Rows have ``prompt``, ``chosen`` and ``rejected``, as texts or as lists of messages; conversations may leave
    ``prompt`` out. Only the last answer is learned, with the token that ends it. Labels are not shifted. Rows that are
    no pairs are counted and shown. Testing uses the validation pairs.

    Args:
        train: files (.jsonl, .json, .parquet), folders of them or of ``save_to_disk``, names on the Hugging Face hub,
            or ``stdlib-preferences`` (2,000 functions of Python's own library, each with its own body and another's).
        val: the same for validation; null holds out ``val_fraction`` of the prompts.
        columns: own names of keys, {key of the format: key in the rows}.
        strings_as: whether prompts and answers that are texts are a ``text``, or ``turns`` for the chat template.
        tokenizer: folder or name of a Hugging Face tokenizer, a ``tokenizer.json``, or a checkpoint of
            `LanguageModeling`: the model's own; null trains a byte-level BPE with a ChatML template on the pairs.
        vocab_size: ids of the BPE that is trained.
        chat_template: Jinja, a file of it, or ``chatml``, instead of the tokenizer's own.
        untrained_end: what to do if the template leaves the end-of-turn token out of what is learned.
        max_length: most tokens of a prompt with an answer.
        too_long: ``drop`` leaves longer pairs out, ``left`` cuts both prompts by the same number of tokens.
        batch_size: pairs a training batch, for each process.
        val_batch_size: pairs a validation batch; null means ``batch_size``.
        num_workers: processes that load batches; 0 is right for memory-mapped tokens.
        val_fraction: share of the prompts held out if ``val`` is null, in (0, 1).
        max_rows: read at most so many rows of each source.
        max_malformed: share of malformed rows that is left out with a warning; more are refused. In [0, 1].
        split: split of a Hugging Face data set to train on.
        val_split: split of one in ``val``.
        subset: configuration of a Hugging Face data set.
        cache_dir: where the tokens are kept; null is ``$LIT_EFFICIENT_CACHE``, else ``~/.cache/lit_efficient``.
        seed: another seed holds out other prompts.
    """

    def __init__(
        self,
        *,
        train: str | list[str] = STDLIB_PREFERENCES,
        val: str | list[str] | None = None,
        columns: dict[str, str] | None = None,
        strings_as: StringsAs = "text",
        tokenizer: str | None = None,
        vocab_size: int = 2048,
        chat_template: str | None = None,
        untrained_end: OnUntrainedEnd = "refuse",
        max_length: int = 1024,
        too_long: TooLong = "drop",
        batch_size: int = 4,
        val_batch_size: int | None = None,
        num_workers: int = 0,
        val_fraction: float = 0.05,
        max_rows: int | None = None,
        max_malformed: float = 0.01,
        split: str = "train",
        val_split: str = "validation",
        subset: str | None = None,
        cache_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(vocab_size)
        least = {"max_length": 2, "batch_size": 1, "val_batch_size": 1, "num_workers": 0, "max_rows": 1}
        given = {"max_length": max_length, "batch_size": batch_size, "num_workers": num_workers}
        given |= {"val_batch_size": batch_size if val_batch_size is None else val_batch_size}
        given |= {"max_rows": 1 if max_rows is None else max_rows}
        for name, value in given.items():
            if value < least[name]:
                raise ConfigurationError(f"PreferenceData: {name} must be at least {least[name]}, got {value}.")
        if tokenizer is None and vocab_size < SMALLEST_VOCABULARY:
            raise ConfigurationError(
                f"PreferenceData: vocab_size must be at least {SMALLEST_VOCABULARY}, got {vocab_size}."
            )
        if tokenizer is None and chat_template is not None:
            raise ConfigurationError(
                "PreferenceData: chat_template needs a tokenizer; the one trained here has ChatML."
            )
        if not 0 < val_fraction < 1:
            raise ConfigurationError(f"PreferenceData: val_fraction must be between 0 and 1, got {val_fraction}.")
        if not 0 <= max_malformed <= 1:
            raise ConfigurationError(f"PreferenceData: max_malformed must be in [0, 1], got {max_malformed}.")
        choices = {"strings_as": (strings_as, ("text", "turns")), "too_long": (too_long, ("drop", "left"))}
        for name, (choice, allowed) in choices.items():
            if choice not in allowed:
                raise ConfigurationError(f"PreferenceData: {name} must be {' or '.join(allowed)}, got {choice!r}.")
        for name in columns or {}:
            if name not in _COLUMNS:
                raise ConfigurationError(f"PreferenceData: columns may name {', '.join(_COLUMNS)}, got {name!r}.")
        if not train or (val is not None and not val):
            raise ConfigurationError("PreferenceData: train and val must name at least one source (or val be null).")
        self.train = [train] if isinstance(train, str) else list(train)
        self.val = [val] if isinstance(val, str) else val
        self.columns = dict(columns or {})
        self.strings_as: StringsAs = strings_as
        self.tokenizer_name = tokenizer
        self.chat_template = chat_template
        self.untrained_end: OnUntrainedEnd = untrained_end
        self.max_length = max_length
        self.too_long: TooLong = too_long
        self.batch_size = batch_size
        self.val_batch_size = given["val_batch_size"]
        self.num_workers = num_workers
        self.val_fraction = val_fraction
        self.max_rows = max_rows
        self.max_malformed = max_malformed
        self.split = split
        self.val_split = val_split
        self.subset = subset
        self.cache_dir = cache_dir
        self.seed = seed
        self.train_pairs: PairRows | None = None
        self.val_pairs: PairRows | None = None
        self._folder: Path | None = None

    def prepare_data(self) -> None:
        """Make the cache, or check all of it, and say what it holds. Runs in one process a machine."""
        self._folder = self._prepare(thorough=True)
        report = document_store.read_manifest(self._folder)
        for sentence in report["formats"]:
            rank_zero_info(f"PreferenceData: {sentence}")
        for name, found in report["malformed"].items():
            bad = check_malformed(name, found["rows"], found["malformed"], found["shown"], self.max_malformed)
            if bad:
                rank_zero_warn(f"PreferenceData: {bad}")
        if report["end_warning"]:
            rank_zero_warn(f"PreferenceData: {report['end_warning']}: a model trained on it may never stop")
        for split, counts in report["counts"].items():
            rank_zero_info(
                f"PreferenceData: {split}: {counts['pairs']:,} pairs, {counts['tokens']:,} tokens, "
                f"{counts['trained'] / max(counts['tokens'], 1):.1%} of them answers; longer than {self.max_length}: "
                f"{counts['left_out']:,} left out, {counts['cut']:,} with the prompt cut"
            )

    def setup(self, stage: str | None = None) -> None:
        """Open the cache, in every process."""
        if self.train_pairs is not None:
            return
        folder = self._folder or self._prepare(thorough=False)
        pairs = {split: PairRows(folder, split) for split in ("train", "val")}
        needed = {"train": self.batch_size, "val": 1}
        for split, found in pairs.items():
            if len(found) < needed[split]:
                raise ConfigurationError(
                    f"PreferenceData: at least {needed[split]} pairs are needed to "
                    f"{'train (batch_size)' if split == 'train' else 'validate'} on, got {len(found)}: the others are "
                    f"malformed, or too long for max_length = {self.max_length}."
                )
        self._folder, self.report = folder, document_store.read_manifest(folder)
        self.chat_tokenizer = load_chat_tokenizer(str(folder / "tokenizer"))
        self.train_pairs, self.val_pairs = pairs["train"], pairs["val"]

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled pairs; an incomplete last batch is dropped."""
        return self._loader(self.train_pairs, self.batch_size, training=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """All pairs held out, in order."""
        return self._loader(self.val_pairs, self.val_batch_size, training=False)

    def test_dataloader(self) -> DataLoader[Any]:
        """The validation pairs: there is no third split."""
        return self.val_dataloader()

    def _loader(self, pairs: PairRows | None, batch_size: int, *, training: bool) -> DataLoader[Any]:
        assert pairs is not None
        collate = partial(pair_batch, pad_id=self.pad_id)
        rows: Any = pairs
        return DataLoader(
            rows, batch_size, shuffle=training, drop_last=training, num_workers=self.num_workers, collate_fn=collate
        )

    def _prepare(self, thorough: bool) -> Path:
        given = None if self.tokenizer_name is None else load_chat_tokenizer(self.tokenizer_name, self.chat_template)
        wanted = {"train": (self.train, self.split)}
        if self.val:
            wanted["val"] = (self.val, self.val_split)
        sources = {
            name: [source for entry in listed for source in self._open(entry, split)]
            for name, (listed, split) in wanted.items()
        }
        recipe = PairRecipe(
            columns=tuple(sorted(self.columns.items())),
            strings_as=self.strings_as,
            max_rows=self.max_rows,
            untrained_end=self.untrained_end,
            max_length=self.max_length,
            too_long=self.too_long,
            vocab_size=self._vocab_size if given is None else None,
            val_fraction=None if self.val else self.val_fraction,
            seed=self.seed,
        )
        return prepare_pairs(recipe, sources, given, self.cache_dir, thorough)

    def _open(self, name: str, split: str) -> list[Source]:
        if name != STDLIB_PREFERENCES:
            return open_sources(name, split=split, subset=self.subset)
        return [source_of_rows(name, preferences())]


Side = tuple[np.ndarray, np.ndarray]


def pair_batch(pairs: Sequence[tuple[Side, Side]], pad_id: int = 0) -> dict[str, Tensor]:
    """Batch pairs, all rows of both sides filled up on the right to one length.

    Args:
        pairs: chosen and rejected, each as ids and unshifted labels ``[n]``.
        pad_id: id of the filling.

    Returns:
        ``chosen_`` and ``rejected_`` with ``input_ids``, ``labels`` and ``attention_mask``, ``[B, T]`` int64.
    """
    rows = padded_batch([pair[0] for pair in pairs] + [pair[1] for pair in pairs], pad_id)
    sides = {"chosen": slice(0, len(pairs)), "rejected": slice(len(pairs), None)}
    return {f"{side}_{name}": rows[name][part] for side, part in sides.items() for name in rows}
