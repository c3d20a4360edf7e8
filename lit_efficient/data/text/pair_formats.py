"""Rows of preference data sets, recognised by their keys, as pairs of documents that differ in the last answer only.

    prompt          {"prompt": ..., "chosen": ..., "rejected": ...}: texts, lists of messages, or a mixture
    conversations   {"chosen": [..., answer], "rejected": [..., answer]}: the same turns before two answers

A source has one format, and a row that does not match it raises `MalformedRow`, as in `chat_formats`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lit_efficient.data.text.chat_formats import (
    FURTHER,
    Document,
    MalformedRow,
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


@dataclass(frozen=True)
class Pair:
    """Chosen and rejected document with a common prompt: all turns but the last, or the first part of a text."""

    chosen: Document
    rejected: Document

    @property
    def documents(self) -> tuple[Document, ...]:
        """Documents of a row: the chosen and the rejected one."""
        return self.chosen, self.rejected

    @property
    def prompt(self) -> Any:
        """Prompt of both documents: messages or a text."""
        if self.chosen.messages:
            return self.chosen.messages[:-1]
        return self.chosen.text[: self.chosen.given]

    @property
    def identity(self) -> list[Any]:
        """Content that must not occur on both sides of a split."""
        return [self.prompt]

    def texts(self) -> Iterator[str]:
        """Yield all texts of the pair, those of the prompt once."""
        yield from self.chosen.texts()
        if self.rejected.messages:
            yield self.rejected.messages[-1]["content"]
        else:
            yield self.rejected.text[self.rejected.given :]


Example = Document | Pair
"""Content of a row."""


def recognise_pairs(
    rows: Iterable[Row], where: str, hint: str = "", strings_as: StringsAs = "text"
) -> tuple[PairFormat, str]:
    """Return the format that most of a source's first rows match, and a sentence with its keys.

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
    return kind, sentence + unread(seen, PAIR_KEYS[kind] + (FURTHER if turns else ()))


def read_pair(row: Row, kind: PairFormat, strings_as: StringsAs = "text") -> Pair:
    """Return the pair of a row.

    Args:
        row: The row.
        kind: Its format.
        strings_as: Meaning of a prompt and answers that are texts: a ``text``, or ``turns`` of a user and an assistant
            (after the row's ``system``, if it has one).

    Raises:
        MalformedRow: If the row does not match the format, or there is no difference between the answers.
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
    # The loss compares the two answers under one prompt.
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise MalformedRow("chosen and rejected differ before the last turn, so their answers cannot be compared")
    if chosen.messages and all(message["role"] == "system" for message in chosen.messages[:-1]):
        raise MalformedRow("there is no turn before the answers")
    return Pair(chosen, rejected)


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
