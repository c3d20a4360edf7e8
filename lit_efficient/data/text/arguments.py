"""Groups of arguments of the text DataModules. Each group is a block in YAML, and checks its values when it is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from lit_efficient.data.text.chat_formats import FURTHER, KEYS, TOKEN_KEYS, Format
from lit_efficient.data.text.chat_tokenizer import SMALLEST_VOCABULARY
from lit_efficient.data.text.chat_tokens import OnUntrainedEnd
from lit_efficient.data.text.pair_formats import MARGIN_KEYS, Margin, StringsAs
from lit_efficient.data.text.text_files import EXCLUDE
from lit_efficient.data.text.truncation import Side, TooLong
from lit_efficient.data.text.turn_choices import Reasoning, TurnChoices
from lit_efficient.data.text.turn_spans import TrainOn
from lit_efficient.errors import ConfigurationError, check_choice, check_list, check_number, checks_types, refusal


@checks_types
@dataclass(frozen=True)
class RowsArguments:
    """Choice of the rows of the sources.

    Args:
        columns: Names of the keys in your rows, {key of the format: key in the rows}.
        max_rows: Largest number of rows to read of each source. null: all rows.
        max_malformed: Largest share of malformed rows, in [0, 1]. They are left out with a warning; a larger share is
            an error.
        split: Split of Hugging Face data sets in ``train``.
        val_split: Split of Hugging Face data sets in ``val``.
        subset: Configuration of Hugging Face data sets.
    """

    owner: ClassVar[str]
    keys: ClassVar[Sequence[str]]  # keys that ``columns`` may map

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


@checks_types
@dataclass(frozen=True)
class LanguageRows(RowsArguments):
    """Choice of the rows that `LanguageData` reads.

    Args:
        format: Format of the rows. ``auto`` recognises it by the keys and logs it.
        image_folder: Folder of the images that rows name by their paths. null: the folder of the file with the rows.
    """

    owner = "LanguageData"
    keys = sorted({key for keys in KEYS.values() for key in keys} | {"input", *FURTHER, *TOKEN_KEYS})

    format: Literal["auto"] | Format = "auto"
    image_folder: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.owner, "rows.format", self.format, ("auto", *get_args(Format)))


@checks_types
@dataclass(frozen=True)
class PreferenceRows(RowsArguments):
    """Choice of the rows that `PreferenceData` reads.

    Args:
        strings_as: Meaning of prompts and answers that are texts: a ``text``, or ``turns`` for the chat template.
        margin: Amount by which the chosen answer is better: the key ``margin`` of rows that have it; ``scores``, the
            difference of the keys ``score_chosen`` and ``score_rejected``; or ``none``.
    """

    owner = "PreferenceData"
    keys = ("prompt", "chosen", "rejected", *sorted(FURTHER), *MARGIN_KEYS["margin"], *MARGIN_KEYS["scores"])

    strings_as: StringsAs = "text"
    margin: Margin = "margin"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.owner, "rows.strings_as", self.strings_as, get_args(StringsAs))
        check_choice(self.owner, "rows.margin", self.margin, get_args(Margin))


@checks_types
@dataclass(frozen=True)
class UnpairedRows(RowsArguments):
    """Choice of the rows that `UnpairedPreferenceData` reads."""

    owner = "UnpairedPreferenceData"
    keys = ("prompt", "completion", "messages", "conversations", "instruction", "output", "input", "label", *FURTHER)


@checks_types
@dataclass(frozen=True)
class LabelledRows(RowsArguments):
    """Choice of the rows that `LabelledTextData` reads.

    Args:
        names: Names of the classes in order, for labels that are these names or their numbers. null: the names that the
            data set declares (``ClassLabel``), else the sorted labels of the rows. Labels that are numbers, not texts
            of digits, are the numbers of their classes.
    """

    owner = "LabelledTextData"
    keys = ("text", "text_pair", "label", "tokens", "tags")

    names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_list(self.owner, "rows.names", self.names, "a list of different names", null=True)
        if self.names is not None and len({*self.names}) < len(self.names):
            raise refusal(self.owner, "rows.names", "a list of different names", self.names)


@checks_types
@dataclass(frozen=True)
class EmbeddingRows(RowsArguments):
    """Choice of the rows that `EmbeddingData` reads.

    Args:
        negatives: Number of texts that are read from ``negative`` in each row. Rows with fewer are malformed.
    """

    owner = "EmbeddingData"
    keys = ("anchor", "positive", "negative")

    negatives: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.owner, "rows.negatives", self.negatives, least=0, whole=True)


@checks_types
@dataclass(frozen=True)
class ChatArguments:
    """Conversion of rows to tokens.

    Args:
        template: Chat template that replaces the tokenizer's own: Jinja, a file of it, or ``chatml``.
        vocab_size: Number of ids of the tokenizer that is trained if none is given, a byte-level BPE with a ChatML
            template.
        untrained_end: Reaction to a chat template whose end-of-turn token does not contribute to the loss: ``refuse``
            raises an error, ``warn`` goes on with a warning, ``train`` lets the token contribute.
        new_tokens: Tokens that the model does not know yet, such as ``<tool>``. Texts and messages may contain them,
            each as one id. Those that the tokenizer lacks are added (see ``resize_vocabulary`` of the model).
        rendered: true: texts hold the chat template already. Their control tokens become ids, as of
            ``tokenizer(text, add_special_tokens=False)``, nothing is added, and a long text is cut as a conversation.
            false: control tokens in texts are tokenised as text. null: also, but a warning reports them, and more than
            ``rows.max_malformed`` of the texts with control tokens are an error. Conversations are rendered here in
            each case.
        template_kwargs: Further variables for the chat template, such as ``{enable_thinking: false}``. A row may have
            its own under the key ``chat_template_kwargs``, which take precedence.
        system: System prompt of conversations that have none. null: they get none here.
        replace_system: Let ``system`` replace the system prompts of the rows, too. With an empty ``system`` they are
            removed.
        reasoning: Treatment of the assistant's thoughts, in fields (``reasoning_content``, ``reasoning``, ``thinking``)
            or between ``<think>`` and ``</think>``. ``as_template``: the chat template decides, and a warning counts
            what it omits. ``drop``: they are removed. ``keep``: rows whose thoughts the template omits are malformed,
            and a template that reads no such field gets them in the content.
    """

    owner: ClassVar[str]

    template: str | None = None
    vocab_size: int = 2048
    untrained_end: OnUntrainedEnd = "refuse"
    new_tokens: Sequence[str] = ()
    rendered: bool | None = None
    template_kwargs: dict[str, bool | int | float | str | list[str] | None] | None = None
    system: str | None = None
    replace_system: bool = False
    reasoning: Reasoning = "as_template"

    @property
    def choices(self) -> TurnChoices:
        """Choices about conversations."""
        return TurnChoices(dict(self.template_kwargs or {}), self.system, self.replace_system, self.reasoning)

    def __post_init__(self) -> None:
        named = self.new_tokens
        if isinstance(named, str) or not all(isinstance(token, str) and token.strip() for token in named):
            raise refusal(self.owner, "chat.new_tokens", "a list of texts that are not empty", named)
        if len({*named}) < len(named):
            raise refusal(self.owner, "chat.new_tokens", "different tokens", named)
        check_number(self.owner, "chat.vocab_size", self.vocab_size, least=SMALLEST_VOCABULARY, whole=True)
        check_choice(self.owner, "chat.untrained_end", self.untrained_end, get_args(OnUntrainedEnd))
        check_choice(self.owner, "chat.reasoning", self.reasoning, get_args(Reasoning))
        if self.system is None and self.replace_system:
            raise ConfigurationError(f"{self.owner}: chat.replace_system needs chat.system, which may be empty.")
        if self.system is not None and not self.system.strip() and not self.replace_system:
            raise refusal(self.owner, "chat.system", "a text that is not empty, unless replace_system", self.system)


@checks_types
@dataclass(frozen=True)
class LanguageChat(ChatArguments):
    """Conversion of the rows of `LanguageData` to tokens.

    Args:
        train_on: Parts that contribute to the loss. ``assistant``: all assistant turns. ``completion``: the last
            assistant turn. ``all``: all tokens. Of a prompt with a completion, the first two mean the completion.
        truncation: Side at which a conversation longer than ``max_length`` is cut. ``drop`` leaves it out. Texts are
            cut into pieces instead.
    """

    owner = "LanguageData"

    train_on: TrainOn = "assistant"
    truncation: Side = "right"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.owner, "chat.train_on", self.train_on, get_args(TrainOn))
        check_choice(self.owner, "chat.truncation", self.truncation, get_args(Side))


@checks_types
@dataclass(frozen=True)
class PreferenceChat(ChatArguments):
    """Conversion of pairs to tokens.

    Args:
        too_long: Treatment of pairs longer than ``max_length``. ``drop`` leaves them out. ``left`` cuts the beginning
            of both prompts by the same number of tokens.
    """

    owner = "PreferenceData"

    too_long: TooLong = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.owner, "chat.too_long", self.too_long, get_args(TooLong))


@checks_types
@dataclass(frozen=True)
class UnpairedChat(ChatArguments):
    """Conversion of judged answers to tokens.

    Args:
        too_long: Treatment of rows longer than ``max_length``. ``drop`` leaves them out. ``left`` cuts the beginning of
            the prompt.
    """

    owner = "UnpairedPreferenceData"

    too_long: TooLong = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.owner, "chat.too_long", self.too_long, get_args(TooLong))


@checks_types
@dataclass(frozen=True)
class LanguageStream:
    """Streaming of the training data of `LanguageData`.

    Several sources, and the files of a folder, are interleaved in proportion to their numbers of rows, so that they end
    together. Rows in lines are counted, from the first 64 MB of a larger file. A data set of the hub that does not
    state its size counts like the average of the others.

    Args:
        enabled: Read ``train`` during training, again and again, without a cache. Needs ``tokenizer`` and ``val``.
        epoch_batches: Batches of an epoch, for each process.
        buffer: Number of documents that are packed and shuffled together.
    """

    enabled: bool = False
    epoch_batches: int = 1000
    buffer: int = 1000

    def __post_init__(self) -> None:
        check_number("LanguageData", "stream.epoch_batches", self.epoch_batches, least=1, whole=True)
        check_number("LanguageData", "stream.buffer", self.buffer, least=1, whole=True)


@checks_types
@dataclass(frozen=True)
class CorpusFiles:
    """Choice of the files that `PythonCorpus` reads.

    Args:
        paths: Folders and files of UTF-8 text. null: Python's standard library. Named files are read whatever their
            suffix is.
        suffixes: Suffixes of the files that are read in folders.
        exclude: Names of folders that are left out with everything below them. Hidden folders are always left out.
    """

    paths: list[str] | None = None
    suffixes: Sequence[str] = (".py",)
    exclude: Sequence[str] = EXCLUDE

    def __post_init__(self) -> None:
        for name in ("suffixes", "exclude"):
            texts = getattr(self, name)
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
                raise refusal("PythonCorpus", f"files.{name}", "a list of texts", texts)
        if self.paths is not None and not self.paths:
            raise refusal("PythonCorpus", "files.paths", "null, or at least one file or folder", self.paths)
