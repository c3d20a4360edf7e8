"""The groups of arguments of the text data modules: each is a block in YAML, and is checked where it is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from lit_efficient.data.text.chat_formats import KEYS, Format
from lit_efficient.data.text.chat_tokenizer import SMALLEST_VOCABULARY
from lit_efficient.data.text.chat_tokens import OnUntrainedEnd
from lit_efficient.data.text.pair_formats import StringsAs
from lit_efficient.data.text.text_files import EXCLUDE
from lit_efficient.data.text.truncation import Side, TooLong
from lit_efficient.data.text.turn_spans import TrainOn
from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal


@dataclass(frozen=True)
class RowsArguments:
    """Which rows of the sources are read.

    Args:
        columns: own names of keys, {key of the format: key in the rows}.
        max_rows: read at most so many rows of each source.
        max_malformed: share of malformed rows that is left out with a warning; more are refused. In [0, 1].
        split: split of a Hugging Face data set to train on.
        val_split: split of one in ``val``.
        subset: configuration of a Hugging Face data set.
    """

    owner: ClassVar[str]
    keys: ClassVar[Sequence[str]]  # that ``columns`` may name

    columns: dict[str, str] | None = None
    max_rows: int | None = None
    max_malformed: float = 0.01
    split: str = "train"
    val_split: str = "validation"
    subset: str | None = None

    def __post_init__(self) -> None:
        check_number(self.owner, "rows.max_rows", self.max_rows, least=1, whole=True, null=True)
        check_number(self.owner, "rows.max_malformed", self.max_malformed, least=0, most=1)
        for name in self.columns or {}:
            if name not in self.keys:
                raise ConfigurationError(f"{self.owner}: rows.columns may name {', '.join(self.keys)}, got {name!r}")


@dataclass(frozen=True)
class LanguageRows(RowsArguments):
    """Which rows `LanguageData` reads.

    Args:
        format: of the rows; ``auto`` recognises it by their keys and says so.
    """

    owner = "LanguageData"
    keys = sorted({key for keys in KEYS.values() for key in keys} | {"input", "system", "tools"})

    format: Literal["auto"] | Format = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.owner, "rows.format", self.format, ("auto", *get_args(Format)))


@dataclass(frozen=True)
class PreferenceRows(RowsArguments):
    """Which rows `PreferenceData` reads.

    Args:
        strings_as: whether prompts and answers that are texts are a ``text``, or ``turns`` for the chat template.
    """

    owner = "PreferenceData"
    keys = ("prompt", "chosen", "rejected", "system", "tools")

    strings_as: StringsAs = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.owner, "rows.strings_as", self.strings_as, get_args(StringsAs))


@dataclass(frozen=True)
class ChatArguments:
    """How rows become tokens.

    Args:
        template: Jinja, a file of it, or ``chatml``, instead of the tokenizer's own chat template.
        vocab_size: ids of the tokenizer that is trained if none is given: a byte-level BPE with a ChatML template.
        untrained_end: what to do if the template leaves the end-of-turn token out of what is learned.
    """

    owner: ClassVar[str]

    template: str | None = None
    vocab_size: int = 2048
    untrained_end: OnUntrainedEnd = "refuse"

    def __post_init__(self) -> None:
        check_number(self.owner, "chat.vocab_size", self.vocab_size, least=SMALLEST_VOCABULARY, whole=True)
        check_choice(self.owner, "chat.untrained_end", self.untrained_end, get_args(OnUntrainedEnd))


@dataclass(frozen=True)
class LanguageChat(ChatArguments):
    """How rows of `LanguageData` become tokens.

    Args:
        train_on: ``assistant`` learns the assistant's turns, ``completion`` the last one (of a prompt with a
            completion both learn the completion), ``all`` everything.
        truncation: where a conversation longer than ``max_length`` is cut; ``drop`` leaves it out. Texts are cut into
            pieces.
    """

    owner = "LanguageData"

    train_on: TrainOn = "assistant"
    truncation: Side = "right"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.owner, "chat.train_on", self.train_on, get_args(TrainOn))
        check_choice(self.owner, "chat.truncation", self.truncation, get_args(Side))


@dataclass(frozen=True)
class PreferenceChat(ChatArguments):
    """How pairs become tokens.

    Args:
        too_long: ``drop`` leaves pairs longer than ``max_length`` out, ``left`` cuts both prompts by the same number
            of tokens.
    """

    owner = "PreferenceData"

    too_long: TooLong = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.owner, "chat.too_long", self.too_long, get_args(TooLong))


@dataclass(frozen=True)
class LanguageStream:
    """Whether `LanguageData` reads ``train`` while training on it.

    Args:
        enabled: read ``train`` over and over, without a cache; needs ``tokenizer`` and ``val``.
        epoch_batches: batches of an epoch, for each process.
        buffer: documents that are packed and shuffled together.
    """

    enabled: bool = False
    epoch_batches: int = 1000
    buffer: int = 1000

    def __post_init__(self) -> None:
        check_number("LanguageData", "stream.epoch_batches", self.epoch_batches, least=1, whole=True)
        check_number("LanguageData", "stream.buffer", self.buffer, least=1, whole=True)


@dataclass(frozen=True)
class CorpusFiles:
    """Which files `PythonCorpus` reads.

    Args:
        paths: folders and files of UTF-8 text; None is the standard library. Files are taken whatever their suffix.
        suffixes: what the names of files in folders end with.
        exclude: names of folders passed over, with all that is below them; hidden folders always are.
    """

    paths: list[str] | None = None
    suffixes: Sequence[str] = (".py",)
    exclude: Sequence[str] = EXCLUDE

    def __post_init__(self) -> None:
        for name, texts in (("suffixes", self.suffixes), ("exclude", self.exclude)):
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
                raise refusal("PythonCorpus", f"files.{name}", "a list of texts", texts)
        if self.paths is not None and not self.paths:
            raise refusal("PythonCorpus", "files.paths", "null, or at least one file or folder", self.paths)
