"""Rows of preference data sets, recognised by their keys, as pairs of documents that differ in the last answer only.

    prompt          {"prompt": ..., "chosen": ..., "rejected": ...}: texts, or lists of messages, or a mixture
    conversations   {"chosen": [..., answer], "rejected": [..., answer]}: the same turns before two answers

As for other rows, one source has one format, and a row that does not hold what its format promises is counted.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lit_efficient.data.text.chat_formats import Document, MalformedRow, keys_shown, read_row
from lit_efficient.errors import ConfigurationError

PairFormat = Literal["prompt", "conversations"]
StringsAs = Literal["text", "turns"]
PAIR_KEYS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "chosen", "rejected"),
    "conversations": ("chosen", "rejected"),
}


@dataclass(frozen=True)
class Pair:
    """Two documents with the same beginning: of conversations all turns but the last, of texts what is given."""

    chosen: Document
    rejected: Document

    @property
    def documents(self) -> tuple[Document, ...]:
        """What is tokenised of a row."""
        return self.chosen, self.rejected

    @property
    def prompt(self) -> Any:
        """What both have in common."""
        document = self.chosen
        return document.messages[:-1] if document.messages else document.text[: document.given]

    @property
    def identity(self) -> list[Any]:
        """What must not stand on both sides of a split."""
        return [self.prompt]

    def texts(self) -> Iterator[str]:
        """All text in it, the prompt once."""
        if not self.chosen.messages:
            yield from (self.chosen.text, self.rejected.text[self.rejected.given :])
            return
        yield from (message["content"] for message in (*self.chosen.messages, self.rejected.messages[-1]))


def recognise_pairs(rows: Iterable[Mapping[str, Any]], where: str, hint: str = "") -> tuple[PairFormat, str]:
    """The format that most of a source's first rows have, and a sentence that says by which keys.

    Raises:
        ConfigurationError: If no row has the keys of any format.
    """
    seen: dict[str, None] = {}
    both = prompts = 0
    for row in rows:
        seen.update(dict.fromkeys(row))
        if all(row.get(key) is not None for key in PAIR_KEYS["conversations"]):
            both += 1
            prompts += row.get("prompt") is not None
    if not both:
        raise ConfigurationError(
            f"{where}: pairs have the keys chosen and rejected, and prompt unless these are whole conversations; got "
            f"{keys_shown(seen)}. Name yours by columns, as in columns: {{prompt: question, chosen: answer}}.{hint}"
        )
    kind: PairFormat = "prompt" if 2 * prompts >= both else "conversations"
    return kind, f"{where}: pairs, format {kind}, by the keys {', '.join(PAIR_KEYS[kind])}"


def read_pair(row: Mapping[str, Any], kind: PairFormat, strings_as: StringsAs = "text") -> Pair:
    """Turn a row into a pair.

    A prompt and answers that are texts are what ``strings_as`` says: a ``text``, or ``turns`` of a user and an
    assistant (after the row's ``system``, if it has one).

    Raises:
        MalformedRow: If the row does not hold what the format promises, or there is nothing to prefer.
    """
    missing = [key for key in PAIR_KEYS[kind] if row.get(key) is None]
    if missing:
        raise MalformedRow(f"no {' and no '.join(missing)}")
    prompt = row["prompt"] if kind == "prompt" else None
    chosen, rejected = (_side(row, side, prompt, strings_as) for side in ("chosen", "rejected"))
    if bool(chosen.messages) != bool(rejected.messages):
        raise MalformedRow("chosen and rejected must be of one kind, texts or lists of turns")
    if chosen == rejected:
        raise MalformedRow("chosen and rejected are the same")
    for name, one in (("chosen", chosen), ("rejected", rejected)):
        if one.messages and one.messages[-1]["role"] != "assistant":
            raise MalformedRow(f"the last turn of {name} is not the assistant's")
        if one.messages and not one.messages[-1]["content"].strip():
            raise MalformedRow(f"the last turn of {name} is empty")
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise MalformedRow("chosen and rejected differ before the last turn: there is no answer to compare")
    if chosen.messages and len(chosen.messages) == 1:
        raise MalformedRow("there is no turn before the answers")
    return Pair(chosen, rejected)


def _side(row: Mapping[str, Any], side: str, prompt: Any, strings_as: StringsAs) -> Document:
    answer = row[side]
    if isinstance(answer, str) and isinstance(prompt, str) and strings_as == "text":
        try:
            return read_row({"prompt": prompt, "completion": answer}, "completion")
        except MalformedRow as reason:
            raise MalformedRow(str(reason).replace("completion", side)) from None
    if isinstance(answer, str):
        if prompt is None:
            raise MalformedRow(f"{side} is a text, and there is no prompt: only conversations go without")
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list):
        raise MalformedRow(f"{side} is a {type(answer).__name__}, neither a text nor a list of turns")
    turns = _before(row, prompt, answer) + answer
    try:
        return read_row({"messages": turns, "tools": row.get("tools")}, "messages")
    except MalformedRow as reason:
        raise MalformedRow(f"{side}: {reason}") from None


def _before(row: Mapping[str, Any], prompt: Any, answer: list[Any]) -> list[Any]:
    """The turns before an answer, if it does not bring them along itself."""
    system = row.get("system")
    first = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    if prompt is None:
        return []
    if isinstance(prompt, list):
        return [] if answer[: len(prompt)] == prompt else prompt
    if not isinstance(prompt, str):
        raise MalformedRow(f"prompt is a {type(prompt).__name__}, neither a text nor a list of turns")
    if len(answer) == 1:
        return [*first, {"role": "user", "content": prompt}]
    said = [turn.get("content", turn.get("value")) for turn in answer if isinstance(turn, Mapping)]
    if not any(isinstance(text, str) and text.strip() == prompt.strip() for text in said):
        raise MalformedRow("the prompt is none of the conversation's turns")
    return []
