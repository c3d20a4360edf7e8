"""Base of DataModules whose batches come from a chat tokenizer: sources, cache, tokenizer and a report."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_efficient.data.text.arguments import ChatArguments, RowsArguments
from lit_efficient.data.text.chat_cache import SPLITS, Recipe, prepare
from lit_efficient.data.text.chat_tokenizer import add_new_tokens, load_chat_tokenizer
from lit_efficient.data.text.chat_tokens import ChatTokens
from lit_efficient.data.text.mixture import MixtureSource, as_sources
from lit_efficient.data.text.reading import Empty, Reader, RowCount
from lit_efficient.data.text.rendered import TextCount
from lit_efficient.data.text.rows import Source, open_sources, split_single_text
from lit_efficient.data.text.truncation import Counts
from lit_efficient.data.text.turn_spans import TrainOn
from lit_efficient.errors import ChecksTypes, ConfigurationError, check_number, refusal
from lit_efficient.files.cache import read_manifest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lit_efficient.data.text.image_texts import ImageTexts

_FEW = 10  # rows held out, below which a message says so


class ChatDataModule(ChecksTypes, LightningDataModule):
    """Base of DataModules with a chat tokenizer. Most attributes are known after ``setup``.

    Its arguments are those that `LanguageData` and `PreferenceData` have in common.
    """

    kind: str
    """Name of the folder of its caches."""
    train_on: TrainOn = "completion"
    parts: tuple[str, ...] = ("",)
    """Suffixes of the file names of a row's documents."""
    columns: tuple[str, ...] = ()
    """Names of the numbers that are stored with a row."""
    encoder: Any = ChatTokens
    """Class that tokenises rows."""

    def __init__(
        self,
        *,
        train: str | Sequence[str | MixtureSource],
        val: str | Sequence[str | MixtureSource] | None,
        tokenizer: str | None,
        max_length: int,
        batch_size: int,
        val_batch_size: int | None,
        val_fraction: float,
        num_workers: int,
        seed: int,
        cache_dir: str | None,
        rows: RowsArguments,
        chat: ChatArguments,
        pin_memory: bool,
        processor: str | None = None,
    ) -> None:
        super().__init__()
        self.owner = rows.owner
        check_number(self.owner, "max_length", max_length, least=2, whole=True)
        check_number(self.owner, "batch_size", batch_size, least=1, whole=True)
        check_number(self.owner, "val_batch_size", val_batch_size, least=1, whole=True, null=True)
        check_number(self.owner, "val_fraction", val_fraction, least=0, below=1)
        check_number(self.owner, "num_workers", num_workers, least=0, whole=True)
        if processor is not None and tokenizer is not None:
            raise refusal(self.owner, "tokenizer", "null with a processor, which has its own", tokenizer)
        trains = tokenizer is None and processor is None
        if trains and chat.template is not None:
            raise ConfigurationError(
                f"{self.owner}: chat.template needs a tokenizer. The tokenizer that is trained here uses ChatML."
            )
        if trains and chat.rendered:
            raise ConfigurationError(
                f"{self.owner}: chat.rendered needs the tokenizer whose control tokens the texts hold."
            )
        if not train or (val is not None and not val):
            raise ConfigurationError(f"{self.owner}: train and val must name at least one source (or val be null)")
        self.train, self.mixes = as_sources(self.owner, "train", train)
        self.val: list[MixtureSource] | None = None
        self._names_val = self.mixes
        if val is not None:
            self.val, self._names_val = as_sources(self.owner, "val", val)
            if any(source.weight is not None for source in self.val):
                raise ConfigurationError(f"{self.owner}: val: a source has a weight, and validation reads all rows.")
        self.tokenizer_name = tokenizer
        self.processor_name = processor
        self.processor: ImageTexts | None = None
        """Processor of images and text; known after `setup`."""
        self.max_length = max_length
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size or batch_size
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.seed = seed
        self.cache_dir = cache_dir
        self.rows = rows
        self.chat = chat
        self.chat_tokenizer: Any = None
        """Tokenizer of transformers, with its chat template; known after `setup`."""
        self.report: dict[str, Any] = {}
        """Numbers of rows and tokens that the sources hold, and that were lost; known after `setup`."""
        self._folder: Path | None = None
        self._is_set_up = False
        self.cached: tuple[str, ...] = SPLITS

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer without its template; known after `setup`."""
        if self.chat_tokenizer is None:
            raise RuntimeError(f"{type(self).__name__}: call prepare_data() and setup() first.")
        return self.chat_tokenizer.backend_tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids with the added ones; known after `setup`."""
        return self.chat.vocab_size if self.chat_tokenizer is None else len(self.chat_tokenizer)

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end a text or a turn, at which generation stops; known after `setup`."""
        return sorted({self.chat_tokenizer.eos_token_id, self.report["end_of_turn"]} - {None})

    @property
    def new_ids(self) -> list[int]:
        """Ids of ``chat.new_tokens``; known after `setup`."""
        return [int(self.chat_tokenizer.convert_tokens_to_ids(token)) for token in self.chat.new_tokens]

    @property
    def pad_id(self) -> int:
        """Id that pads rows, without loss."""
        pad = self.chat_tokenizer.pad_token_id
        return int(self.chat_tokenizer.eos_token_id if pad is None else pad)

    @property
    def validates(self) -> bool:
        """False if all rows are to train on."""
        return self.val is not None or self.val_fraction > 0

    def check_model(self) -> None:
        """Raise an error if the model of the run cannot read rows of this length."""
        check_length(self, "max_length", self.max_length)
        module: Any = None if self.trainer is None else self.trainer.lightning_module
        if self.processor_name is not None and getattr(module, "reads_images", True) is False:
            raise ConfigurationError(
                f"{self.owner}: processor is {self.processor_name}, of a model of images and text, and the model of "
                f"{type(module).__name__} reads text only. Name one model for both, or a tokenizer"
            )

    def prepare_data(self) -> None:
        self.check_model()
        self._folder = self._prepare(thorough=True)
        _, report = self._open(self._folder)
        for sentence in report["formats"]:
            rank_zero_info(f"{self.owner}: {sentence}")
        for name, found in report["empty"].items():
            if found["count"]:
                rank_zero_info(f"{self.owner}: {Empty(**found).message(name)}")
        for name, found in report["malformed"].items():
            message = RowCount(**found).check(name, self.rows.max_malformed)
            if message:
                rank_zero_warn(f"{self.owner}: {message}")
        warning = TextCount(**report["texts"]).check(self.owner, self.chat.rendered, self.rows.max_malformed)
        if warning:
            rank_zero_warn(f"{self.owner}: {warning}")
        if report["end_warning"]:
            rank_zero_warn(f"{self.owner}: {report['end_warning']}: a model trained on it may never stop")
        if report["left_out"]:
            parts = ", ".join(f"{part} ({count:,} turns)" for part, count in report["left_out"].items())
            rank_zero_warn(f"{self.owner}: the chat template does not write all that the rows hold: {parts}")
        for split, counts in report["counts"].items():
            if counts["rows"]:
                rank_zero_info(f"{self.owner}: {split}: {self.summary(counts)}")
        held_out = report["counts"]["val"]["rows"]
        every = held_out + report["counts"]["train"]["rows"]
        if self.val is None and 0 < held_out < _FEW and every > 2:  # a single text is cut into two rows
            rank_zero_info(
                f"{self.owner}: only {held_out} of {every} rows {'is' if held_out == 1 else 'are'} held out for "
                f"validation (val_fraction: {self.val_fraction:g}), so val/loss depends on the choice of the rows, and "
                "so does a checkpoint that is chosen by it. Set data.val, or a larger data.val_fraction"
            )
        rank_zero_info(f"{self.owner}: cache {self._folder}")

    def setup(self, stage: str | None = None) -> None:
        if self._is_set_up:
            return
        self._folder = self._folder or self._prepare(thorough=False)
        found, self.report = self._open(self._folder)
        self.chat_tokenizer = load_chat_tokenizer(str(self._folder / "tokenizer"))
        for rows in found.values():
            rows.contents = self._folder.name  # a hash of sources and settings, which ExactResume compares
        self._adopt(found)
        self._is_set_up = True

    def test_dataloader(self) -> Any:
        """Return the loader of the validation rows: there is no third split."""
        return self.val_dataloader()

    def encoding(self) -> dict[str, Any]:
        """Return the arguments of `ChatTokens` after the tokenizer."""
        return {
            "train_on": self.train_on,
            "untrained_end": self.chat.untrained_end,
            "new_tokens": list(self.chat.new_tokens),
            "rendered": bool(self.chat.rendered),
            "choices": self.chat.choices,
            **({} if self.processor is None else {"processor": self.processor}),
        }

    def further(self) -> dict[str, Any]:
        """Return further entries of the report, which are known after the rows have been read."""
        return {}

    @abstractmethod
    def summary(self, counts: dict[str, int]) -> str:
        """Return one line about a split."""

    @abstractmethod
    def reader(self, sources: list[Source]) -> Reader:
        """Return the reader of sources."""

    @abstractmethod
    def _cut(self, folder: Path, split: str, counts: Counts) -> Any:
        """Return the rows of a split, cut to the length, and add the numbers of what is left and lost to ``counts``."""

    @abstractmethod
    def _adopt(self, found: dict[str, Any]) -> None:
        """Check the rows of both splits and keep them."""

    def _open(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the rows of each split, and the report."""
        report = read_manifest(folder)
        rows = {}
        for split in SPLITS:
            counts = Counts()
            rows[split] = self._cut(folder, split, counts)
            report["counts"][split] |= asdict(counts)
        return rows, report

    def _open_sources(self) -> dict[str, list[Source]]:
        """Return the sources of each split that is cached. A single text is cut in two."""
        sources: dict[str, list[Source]] = {}
        for name, entries, split in (
            ("train", self.train, self.rows.split),
            ("val", self.val or [], self.rows.val_split),
        ):
            if entries and name in self.cached:
                sources[name] = []
                for number, entry in enumerate(entries):
                    sources[name] += self._open_entry(entry, number, split)
        # A book is one row: held-out rows would leave nothing to train on.
        if self.validates and list(sources) == ["train"] and len(sources["train"]) == 1:
            parts = split_single_text(sources["train"][0], self.val_fraction)
            if parts is not None:
                return {"train": [parts[0]], "val": [parts[1]]}
        return sources

    def _open_entry(self, entry: MixtureSource, number: int, split: str, streaming: bool = False) -> list[Source]:
        """Return the sources of an entry of ``train`` or ``val``."""
        found: list[Source] = []
        for path in entry.paths:
            subset = entry.subset or self.rows.subset
            found += open_sources(path, split=entry.split or split, subset=subset, streaming=streaming)
        return [replace(source, entry=number) for source in found]

    def source_names(self, split: str) -> list[str]:
        """Return the names of the sources whose numbers the batches of a split have as ``source``; none without."""
        if split == "train" or self.val is None:
            return [source.label for source in self.train] if self.mixes else []
        return [source.label for source in self.val] if self._names_val else []

    def _prepare(self, thorough: bool) -> Path:
        settings = asdict(self.rows)
        # These arguments change only which rows are read, and the hash of the content covers the rows.
        for name in ("max_malformed", "split", "val_split", "subset"):
            del settings[name]
        tokenizer = self._load_tokenizer()
        recipe = Recipe(
            owner=self.owner,
            sources=self._open_sources(),
            reader=self.reader,
            settings=settings,
            parts=self.parts,
            columns=self.columns,
            tokenizer=tokenizer,
            encoding=self.encoding(),
            val_fraction=self.val_fraction,
            seed=self.seed,
            encoder=self.encoder,
            further=self.further,
        )
        return prepare(recipe, self.kind, self.cache_dir, thorough)

    def _load_tokenizer(self) -> Any:
        """Return the tokenizer with its new tokens, or the number of ids of the one to train. Load the processor."""
        if self.processor_name is not None:
            from lit_efficient.data.text.image_texts import (
                ImageTexts,
                pack_processor,
                read_processor,
                unwritten_beginning,
            )

            processor = read_processor(self.processor_name, self.chat.template)
            begin = unwritten_beginning(processor)
            if begin:
                rank_zero_warn(
                    f"{self.owner}: the chat template does not write {begin}, and rows begin without it, as in TRL. "
                    "Processors of transformers add it to prompts: to train with it, write it in chat.template"
                )
            add_new_tokens(processor.tokenizer, self.chat.new_tokens)
            self.processor = ImageTexts(pack_processor(processor, self.processor_name))
            return processor.tokenizer
        if self.tokenizer_name is None:
            return self.chat.vocab_size
        tokenizer = load_chat_tokenizer(self.tokenizer_name, self.chat.template)
        add_new_tokens(tokenizer, self.chat.new_tokens)
        return tokenizer


def check_length(data: LightningDataModule, name: str, length: int) -> None:
    """Raise an error if rows are longer than the model of a run can read, before anything is tokenised.

    Args:
        data: The DataModule.
        name: Argument of the DataModule that sets the length of its rows.
        length: Tokens of a row.
    """
    # Tokenising takes minutes, and the mismatch would otherwise show at the first batch.
    module = data.trainer.lightning_module if data.trainer is not None else None
    most = getattr(module, "max_length", None)
    if isinstance(most, int) and length > most:
        allowed = f"at most what the model reads, max_length = {most} of {type(module).__name__}'s model"
        raise refusal(type(data).__name__, name, allowed, length)
    rotary = getattr(module, "rotary_length", None)
    if isinstance(rotary, int) and length > rotary:
        rank_zero_warn(
            f"{type(data).__name__}: {name} is {length}, and the rotary positions of {type(module).__name__}'s model "
            f"are made for {rotary} (max_position_embeddings). A trained model has not learned later positions, and "
            f"other programs refuse or cut longer texts. Set {name} to at most {rotary}, or extend the model with "
            f"config_fields: {{max_position_embeddings: {length}}} and rope_parameters that scale a trained model"
        )
