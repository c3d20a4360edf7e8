"""Rows of preference data sets, recognised by their keys, as pairs of documents with a common beginning.

    prompt          {"prompt": ..., "chosen": ..., "rejected": ...}: texts, lists of messages, or a mixture
    conversations   {"chosen": [..., answer], "rejected": [..., answer]}: the same turns before different answers

The turns that both conversations share are the prompt. All assistant turns after them are the answers, and contribute
to the loss. A row may also tell how much better the chosen answer is:

    margin          {"margin": 1.5}
    scores          {"score_chosen": 8.0, "score_rejected": 6.5}: the margin is their difference

A source has one format, and a row that does not match it raises `MalformedRow`, as in `chat_formats`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lit_efficient.data.text.chat_formats import (
    FURTHER,
    Document,
    MalformedRow,
    Message,
    Row,
    check_keys,
    holds_turns,
    keys_shown,
    read_row,
    turns_in,
    unread,
)
from lit_efficient.errors import ConfigurationError

PairFormat = Literal["prompt", "conversations"]
StringsAs = Literal["text", "turns"]
PAIR_KEYS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "chosen", "rejected"),
    "conversations": ("chosen", "rejected"),
}
Margin = Literal["margin", "scores", "none"]
"""Origin of the margins of pairs."""
MARGIN_KEYS: dict[str, tuple[str, ...]] = {
    "margin": ("margin",),
    "scores": ("score_chosen", "score_rejected"),
    "none": (),
}


@dataclass(frozen=True)
class Pair:
    """Chosen and rejected document with a common prompt: the turns that both share, or the first part of a text."""

    chosen: Document
    rejected: Document
    margin: float | None = None  # amount by which the chosen answer is better, if the row tells it

    @property
    def documents(self) -> tuple[Document, ...]:
        """Documents of a row: the chosen and the rejected one."""
        return self.chosen, self.rejected

    @property
    def prompt(self) -> Any:
        """Prompt of both documents: messages or a text."""
        if self.chosen.messages:
            return self.chosen.messages[: self.chosen.given_turns]
        return self.chosen.text[: self.chosen.given]

    @property
    def identity(self) -> list[Any]:
        """Content that must not occur on both sides of a split."""
        return [self.prompt]

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers that are stored with the row: its margin, or NaN."""
        return (math.nan if self.margin is None else self.margin,)

    def texts(self) -> Iterator[str]:
        """Yield all texts of the pair, those of the prompt once."""
        yield from self.chosen.texts()
        if self.rejected.messages:
            for message in self.rejected.messages[self.rejected.given_turns :]:
                yield message["content"]
        else:
            yield self.rejected.text[self.rejected.given :]


@dataclass(frozen=True)
class Texts:
    """Plain texts of a row. Each group is one text, two texts that are written as a pair, or the words of a text."""

    groups: tuple[tuple[str, ...], ...]
    label: float | None = None
    tags: tuple[int, ...] | None = None  # label of each word of the only group
    classes: tuple[int, ...] | None = None  # classes of the only group

    @property
    def documents(self) -> tuple[Document, ...]:
        """Conversations and texts with a loss; none."""
        return ()

    @property
    def identity(self) -> list[Any]:
        """Content that must not occur on both sides of a split: the first text."""
        return [self.groups[0]]

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers that are stored with the row: its label, if it has one."""
        return () if self.label is None else (self.label,)

    def texts(self) -> Iterator[str]:
        """Yield all texts."""
        for group in self.groups:
            yield from group


Example = Document | Pair | Texts
"""Content of a row."""


def recognise_pairs(
    rows: Iterable[Row], where: str, hint: str = "", strings_as: StringsAs = "text", margin: Margin = "margin"
) -> tuple[PairFormat, str]:
    """Return the format that most of a source's first rows match, and a sentence with its keys.

    Args:
        rows: First rows of the source.
        where: Name of the source, for messages.
        hint: Sentence for the error, about a likely mistake.
        strings_as: As in `read_pair`.
        margin: As in `read_pair`.

    Raises:
        ConfigurationError: If no row has the keys of any format.
    """
    seen: dict[str, None] = {}
    pairs = 0
    prompts = 0
    turns = strings_as == "turns"  # as opposed to texts, for which no chat template is used
    for row in rows:
        seen.update(dict.fromkeys(row))
        if all(row.get(key) is not None for key in PAIR_KEYS["conversations"]):
            pairs += 1
            prompts += row.get("prompt") is not None
            turns = turns or holds_turns(row["chosen"]) or holds_turns(row.get("prompt"))
    if not pairs:
        raise ConfigurationError(
            f"{where}: pairs have the keys chosen and rejected, and prompt unless these are whole conversations; got "
            f"{keys_shown(seen)}. Map your keys with columns, as in columns: {{prompt: ask, chosen: answer}}.{hint}"
        )
    kind: PairFormat = "prompt" if 2 * prompts >= pairs else "conversations"
    sentence = f"{where}: pairs, format {kind}, by the keys {', '.join(PAIR_KEYS[kind])}"
    read = [key for key in MARGIN_KEYS[margin] if key in seen]
    if read:
        sentence += f", with a margin of {' and '.join(read)}"
    return kind, sentence + unread(seen, (*PAIR_KEYS[kind], *read, *(FURTHER if turns else ())))


def read_pair(row: Row, kind: PairFormat, strings_as: StringsAs = "text", margin: Margin = "margin") -> Pair:
    """Return the pair of a row.

    Args:
        row: The row.
        kind: Its format.
        strings_as: Meaning of a prompt and answers that are texts: a ``text``, or ``turns`` of a user and an assistant
            (after the row's ``system``, if it has one).
        margin: Origin of the margin. A row without ``margin`` has none. ``scores`` needs both scores.

    Raises:
        MalformedRow: If the row does not match the format, there is no difference between the answers, or the scores
            contradict the choice.
    """
    check_keys(row, PAIR_KEYS[kind])
    prompt = turns_in(row["prompt"], "prompt") if kind == "prompt" else None
    chosen = _side(row, "chosen", prompt, strings_as)
    rejected = _side(row, "rejected", prompt, strings_as)
    if bool(chosen.messages) != bool(rejected.messages):
        raise MalformedRow("chosen and rejected must be of one kind, texts or lists of turns")
    if chosen == rejected:
        raise MalformedRow("chosen and rejected are the same")
    for name, document in (("chosen", chosen), ("rejected", rejected)):
        if not document.messages:
            continue
        last = document.messages[-1]
        if last["role"] != "assistant":
            raise MalformedRow(f"the last turn of {name} is not the assistant's")
        if not (last["content"].strip() or last.get("tool_calls")):
            raise MalformedRow(f"the last turn of {name} is empty")
    if chosen.messages:
        shared = _shared_turns(chosen.messages, rejected.messages)
        chosen = replace(chosen, given_turns=shared)
        rejected = replace(rejected, given_turns=shared)
    return Pair(chosen, rejected, _margin(row, margin))


def _shared_turns(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> int:
    """Return the number of turns at the beginning of both conversations that are the same."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    sides = (("chosen", chosen), ("rejected", rejected))
    for name, messages in sides:
        if shared == len(messages):
            raise MalformedRow(f"{name} is the beginning of the other conversation, so it has no answer of its own")
    for name, messages in sides:
        role = messages[shared]["role"]
        # The loss compares answers under one prompt.
        if role != "assistant":
            raise MalformedRow(
                f"chosen and rejected first differ at turn {shared + 1}, which is of the role {role} in {name}, so "
                "their answers cannot be compared"
            )
    if all(message["role"] == "system" for message in chosen[:shared]):
        raise MalformedRow("there is no turn before the answers")
    return shared


def _margin(row: Row, kind: Margin) -> float | None:
    """Return the margin of a row, if it has one."""
    if kind == "none" or (kind == "margin" and row.get("margin") is None):
        return None
    numbers = [finite_number(row, key) for key in MARGIN_KEYS[kind]]
    if kind == "margin":
        return numbers[0]
    better, worse = numbers
    if better < worse:
        raise MalformedRow(
            f"score_chosen is {better:g} and score_rejected {worse:g}: the rejected answer is the better one"
        )
    return better - worse


def finite_number(row: Row, key: str) -> float:
    """Return a finite number, which may be a text, as in tables.

    Raises:
        MalformedRow: If the value is no such number.
    """
    value = row.get(key)
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise MalformedRow(f"{key} is {value!r}, not a finite number")
    return number


def _side(row: Row, side: str, prompt: object, strings_as: StringsAs) -> Document:
    """Return the document of one answer, with the prompt before it."""
    answer = turns_in(row[side], side)
    if isinstance(answer, str) and isinstance(prompt, str) and strings_as == "text":
        try:
            return read_row({"prompt": prompt, "completion": answer}, "completion")
        except MalformedRow as reason:
            raise MalformedRow(str(reason).replace("completion", side)) from None
    if isinstance(answer, str):
        if prompt is None:
            raise MalformedRow(f"{side} is a text, and there is no prompt: only conversations need none")
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list):
        raise MalformedRow(f"{side} is a {type(answer).__name__}, neither a text nor a list of turns")
    turns = _turns_before(row, prompt, answer) + answer
    try:
        about = {key: row.get(key) for key in FURTHER}
        return read_row({"messages": turns, **about}, "messages")
    except MalformedRow as reason:
        raise MalformedRow(f"{side}: {reason}") from None


def _turns_before(row: Row, prompt: object, answer: list[Any]) -> list[Any]:
    """Return the turns before an answer; nothing if the answer is a whole conversation."""
    if prompt is None:
        return []
    if isinstance(prompt, list):
        return [] if answer[: len(prompt)] == prompt else prompt
    if not isinstance(prompt, str):
        raise MalformedRow(f"prompt is a {type(prompt).__name__}, neither a text nor a list of turns")
    if len(answer) == 1:
        return [{"role": "user", "content": prompt}]
    # A conversation may include the prompt already. If it does not, it belongs to another prompt.
    for turn in answer:
        content = turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else None
        if isinstance(content, str) and content.strip() == prompt.strip():
            return []
    raise MalformedRow("the prompt is none of the conversation's turns")
