"""What datamodules share whose batches come from a chat tokenizer: sources, cache, tokenizer, and a report."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_efficient.data.text.arguments import ChatArguments, RowsArguments
from lit_efficient.data.text.chat_cache import SPLITS, Recipe, prepare
from lit_efficient.data.text.chat_tokenizer import load_chat_tokenizer
from lit_efficient.data.text.reading import Reader, check_malformed
from lit_efficient.data.text.rows import Source, halves, open_sources
from lit_efficient.data.text.truncation import Counts
from lit_efficient.data.text.turn_spans import TrainOn
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.files.cache import read_manifest

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ChatDataModule(LightningDataModule):
    """Base of datamodules with a chat tokenizer; what it knows, it knows after ``setup``.

    It takes the arguments that `LanguageData` and `PreferenceData` have in common.
    """

    kind: str
    """Name of the folder of its caches."""
    train_on: TrainOn = "completion"
    parts: tuple[str, ...] = ("",)
    """What the names of the files of a row's documents end with."""

    def __init__(
        self,
        *,
        train: str | list[str],
        val: str | list[str] | None,
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
    ) -> None:
        super().__init__()
        owner = self.owner = rows.owner
        check_number(owner, "max_length", max_length, least=2, whole=True)
        check_number(owner, "batch_size", batch_size, least=1, whole=True)
        check_number(owner, "val_batch_size", val_batch_size, least=1, whole=True, null=True)
        check_number(owner, "val_fraction", val_fraction, above=0, below=1)
        check_number(owner, "num_workers", num_workers, least=0, whole=True)
        if tokenizer is None and chat.template is not None:
            raise ConfigurationError(f"{owner}: chat.template needs a tokenizer; the one trained here has ChatML")
        if not train or (val is not None and not val):
            raise ConfigurationError(f"{owner}: train and val must name at least one source (or val be null)")
        self.train = [train] if isinstance(train, str) else list(train)
        self.val = [val] if isinstance(val, str) else val
        self.tokenizer_name = tokenizer
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
        """The tokenizer as transformers knows it, with its chat template; known after `setup`."""
        self.report: dict[str, Any] = {}
        """What the sources held and lost; known after `setup`."""
        self._folder: Path | None = None
        self._is_set_up = False
        self.cached: tuple[str, ...] = SPLITS

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer without its template; known after `setup`."""
        if self.chat_tokenizer is None:
            raise RuntimeError(f"{type(self).__name__}: call prepare_data() and setup() first.")
        return self.chat_tokenizer.backend_tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids, the added ones included; known after `setup`."""
        return self.chat.vocab_size if self.chat_tokenizer is None else len(self.chat_tokenizer)

    @property
    def stop_ids(self) -> list[int]:
        """The ids that end a text or a turn: where generation stops; known after `setup`."""
        return sorted({self.chat_tokenizer.eos_token_id, self.report["end_of_turn"]} - {None})

    @property
    def pad_id(self) -> int:
        """The id of what fills a row up; it is never learned."""
        pad = self.chat_tokenizer.pad_token_id
        return int(self.chat_tokenizer.eos_token_id if pad is None else pad)

    def check_model(self) -> None:
        """Refuse rows that the run's model cannot read."""
        check_length(self, "max_length", self.max_length)

    def prepare_data(self) -> None:
        self.check_model()
        self._folder = self._prepare(thorough=True)
        _, report = self._open(self._folder)
        for sentence in report["formats"]:
            rank_zero_info(f"{self.owner}: {sentence}")
        for name, found in report["malformed"].items():
            bad = check_malformed(name, **found, most=self.rows.max_malformed)
            if bad:
                rank_zero_warn(f"{self.owner}: {bad}")
        if report["end_warning"]:
            rank_zero_warn(f"{self.owner}: {report['end_warning']}: a model trained on it may never stop")
        if report["left_out"]:
            parts = ", ".join(f"{part} ({count:,} turns)" for part, count in report["left_out"].items())
            rank_zero_warn(f"{self.owner}: the chat template does not write all that the rows hold: {parts}")
        for split, counts in report["counts"].items():
            if counts["rows"]:
                rank_zero_info(f"{self.owner}: {split}: {self.summary(counts)}")
        rank_zero_info(f"{self.owner}: cache {self._folder}")

    def setup(self, stage: str | None = None) -> None:
        if self._is_set_up:
            return
        self._folder = self._folder or self._prepare(thorough=False)
        found, self.report = self._open(self._folder)
        self.chat_tokenizer = load_chat_tokenizer(str(self._folder / "tokenizer"))
        self._adopt(found)
        self._is_set_up = True

    def test_dataloader(self) -> Any:
        """The rows for validation: there is no third split."""
        return self.val_dataloader()

    @abstractmethod
    def summary(self, counts: dict[str, int]) -> str:
        """One line about a split."""

    @abstractmethod
    def reader(self, sources: list[Source]) -> Reader:
        """Read sources."""

    @abstractmethod
    def _cut(self, folder: Path, split: str, counts: Counts) -> Any:
        """The rows of a split, as long as they may be; what is left and what is lost is added to ``counts``."""

    @abstractmethod
    def _adopt(self, found: dict[str, Any]) -> None:
        """Check the rows of both splits and keep them."""

    def _sources(self, name: str, split: str) -> list[Source]:
        return open_sources(name, split=split, subset=self.rows.subset)

    def _open(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        report = read_manifest(folder)
        counts = {split: Counts() for split in SPLITS}
        rows = {split: self._cut(folder, split, counts[split]) for split in SPLITS}
        return rows, report | {"counts": {split: report["counts"][split] | asdict(counts[split]) for split in SPLITS}}

    def _prepare(self, thorough: bool) -> Path:
        wanted = {"train": (self.train, self.rows.split), "val": (self.val or [], self.rows.val_split)}
        rows = asdict(self.rows)
        for name in ("max_malformed", "split", "val_split", "subset"):  # no row depends on it but by its content
            del rows[name]
        tokenizer = self.chat.vocab_size
        if self.tokenizer_name is not None:
            tokenizer = load_chat_tokenizer(self.tokenizer_name, self.chat.template)
        sources = {
            name: [source for entry in listed for source in self._sources(entry, split)]
            for name, (listed, split) in wanted.items()
            if listed and name in self.cached
        }
        if list(sources) == ["train"] and len(sources["train"]) == 1:
            parts = halves(sources["train"][0], self.val_fraction)
            sources = sources if parts is None else {"train": [parts[0]], "val": [parts[1]]}
        recipe = Recipe(
            owner=self.owner,
            sources=sources,
            reader=self.reader,
            settings=rows,
            parts=self.parts,
            tokenizer=tokenizer,
            train_on=self.train_on,
            untrained_end=self.chat.untrained_end,
            val_fraction=self.val_fraction,
            seed=self.seed,
        )
        return prepare(recipe, self.kind, self.cache_dir, thorough)


def check_length(data: LightningDataModule, name: str, length: int) -> None:
    """Refuse rows (of the length that the argument ``name`` says) above the ``max_length`` of a run's model, before
    anything is tokenised.
    """
    module = data.trainer.lightning_module if data.trainer is not None else None
    most = getattr(module, "max_length", None)
    if isinstance(most, int) and length > most:
        allowed = f"at most what the model reads, max_length = {most} of {type(module).__name__}'s model"
        raise refusal(type(data).__name__, name, allowed, length)
