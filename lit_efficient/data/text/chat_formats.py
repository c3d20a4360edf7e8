"""Rows of the data sets that people have, recognised by their keys, as one kind of document.

    messages     {"messages": [{"role": "user", "content": ...}, ...]}
    sharegpt     {"conversations": [{"from": "human", "value": ...}, ...]}
    alpaca       {"instruction": ..., "input": ... or "", "output": ...}
    completion   {"prompt": ..., "completion": ...}: two texts, or two lists of messages
    text         {"text": ...}

A row that does not hold what its format promises raises :class:`MalformedRow` with the reason; who reads the rows
counts it. Nothing is guessed row by row: one source has one format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lit_efficient.errors import ConfigurationError

Format = Literal["messages", "sharegpt", "alpaca", "completion", "text"]

# In the order in which they are tried: exports of conversations often have a rendered "text" beside them.
KEYS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
ROLES = ("system", "user", "assistant", "tool")
_ROLE_OF = {
    **{name: name for name in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "model", "bot"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response", "ipython"), "tool"),
    "developer": "system",
}


class MalformedRow(ValueError):
    """A row that does not hold what its format promises; the message is the reason."""


@dataclass(frozen=True)
class Document:
    """What one row teaches: a conversation, or a text of which the first part may be given."""

    # the turns, each with ``role`` and ``content`` at least; empty for a text. One of ``weight`` 0, as OpenAI's format
    # has it, is not learned
    messages: tuple[dict[str, Any], ...] = ()
    text: str = ""  # the text, when there are no messages
    given: int = 0  # how many characters of ``text`` are a prompt that is not learned
    # how many of ``messages`` are a prompt; the assistant's turns among them are not learned either
    given_turns: int = 0
    tools: tuple[Any, ...] = ()  # descriptions of tools, for templates that know them

    @property
    def documents(self) -> tuple[Document, ...]:
        """What is tokenised of a row: this."""
        return (self,)

    @property
    def identity(self) -> list[Any]:
        """What must not stand on both sides of a split."""
        return [self.messages, self.text]

    def texts(self) -> Iterator[str]:
        """All text in it."""
        yield from [message["content"] for message in self.messages] or [self.text]


def recognise(
    rows: Iterable[Mapping[str, Any]], where: str, hint: str = "", among: Iterable[str] = KEYS
) -> tuple[Format, str]:
    """The format of a source, from its first rows.

    That which most of them fit is taken, the earlier in `KEYS` if two are even.

    Returns:
        The format, and a sentence that says by which keys, and which other formats would have fitted.

    Raises:
        ConfigurationError: If no row has the keys of any format, with a ``hint`` at what may be wrong.
    """
    formats = {name: KEYS[name] for name in among}
    votes = dict.fromkeys(formats, 0)
    seen: dict[str, None] = {}
    for row in rows:
        seen.update(dict.fromkeys(row))
        for name, keys in formats.items():
            votes[name] += all(row.get(key) is not None for key in keys)
    best = max(votes, key=lambda name: votes[name])
    if not votes[best]:
        known = "; ".join(f"{name} ({', '.join(keys)})" for name, keys in formats.items())
        raise ConfigurationError(
            f"{where}: no format has the keys {keys_shown(seen)}. Formats and their keys: {known}. Name yours by "
            f"columns, as in columns: {{prompt: question, completion: answer}}.{hint}"
        )
    also = [name for name, count in votes.items() if count and name != best]
    sentence = f"{where}: format {best}, by the keys {', '.join(KEYS[best])}"
    return best, sentence + (f" (set format to read it as {' or '.join(also)})" if also else "")  # type: ignore[return-value]


def keys_shown(keys: Iterable[str | None]) -> list[str]:
    """Names of columns for people; what is data by mistake may be long."""
    return [key if len(key) <= 40 else f"{key[:40]}..." for key in map(str, keys)]


def read_row(row: Mapping[str, Any], kind: Format) -> Document:
    """Turn a row into a document.

    Raises:
        MalformedRow: If the row does not hold what the format promises.
    """
    assert kind in get_args(Format)
    missing = [key for key in KEYS[kind] if row.get(key) is None]
    if missing:
        raise MalformedRow(f"no {' and no '.join(missing)}")
    tools = _tools(row.get("tools"))
    if kind == "text":
        return Document(text=_text(row, "text"))
    if kind == "alpaca":
        return Document(messages=_alpaca(row))
    if kind == "completion":
        return _completion(row, tools)
    turns = row[KEYS[kind][0]]
    messages = _messages(turns, KEYS[kind][0])
    if kind == "sharegpt" and isinstance(row.get("system"), str) and row["system"] and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": row["system"]}, *messages)
    _check_turns(messages)
    return Document(messages=messages, tools=tools)


def _tools(value: Any) -> tuple[Any, ...]:
    """What a model may call, as a list or, in many sets, as the JSON text of one."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise MalformedRow(f"tools is a text that is no JSON: {error}") from error
    if value in (None, "", [], {}):
        return ()
    if not isinstance(value, list):
        raise MalformedRow(f"tools is {_kind(value)}, not a list")
    return tuple(value)


def _alpaca(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    extra = row.get("input")
    if extra is not None and not isinstance(extra, str):
        raise MalformedRow(f"input is {_kind(extra)}, not text")
    ask = _text(row, "instruction") + (f"\n\n{extra}" if extra and extra.strip() else "")
    system = row.get("system")
    first = ({"role": "system", "content": system},) if isinstance(system, str) and system.strip() else ()
    return (*first, {"role": "user", "content": ask}, {"role": "assistant", "content": _text(row, "output")})


def _completion(row: Mapping[str, Any], tools: tuple[Any, ...]) -> Document:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) != isinstance(completion, list):
        raise MalformedRow(f"prompt is {_kind(prompt)} and completion {_kind(completion)}: both must be of one kind")
    if isinstance(prompt, list):
        asked = _messages(prompt, "prompt")
        messages = (*asked, *_messages(completion, "completion"))
        _check_turns(messages)
        return Document(messages=messages, given_turns=len(asked), tools=tools)
    if not isinstance(prompt, str):
        raise MalformedRow(f"prompt is {_kind(prompt)}, not text")
    return Document(text=prompt + _text(row, "completion"), given=len(prompt))


def _messages(turns: Any, name: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(turns, list) or not turns:
        raise MalformedRow(f"{name} is {_kind(turns) if turns else 'empty'}, not a list of turns")
    return tuple(_message(turn, f"{name}[{index}]") for index, turn in enumerate(turns))


def _message(turn: Any, name: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise MalformedRow(f"{name} is {_kind(turn)}, not a turn")
    said = turn.get("role", turn.get("from"))
    if not isinstance(said, str) or said.lower() not in _ROLE_OF:
        raise MalformedRow(f"{name} has the role {said!r}; known are {', '.join(sorted(_ROLE_OF))}")
    # Arrow fills the keys that other rows have with nulls: a template would print them.
    kept = {key: value for key, value in turn.items() if key not in ("role", "from", "value") and value is not None}
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = "".join(_part(part, name) for part in content)
    if content is None and kept.get("tool_calls"):
        content = ""
    if kept.get("weight", 1) not in (0, 1):
        raise MalformedRow(f"{name} has the weight {kept['weight']!r}; a turn is learned (1) or not (0)")
    if not isinstance(content, str):
        raise MalformedRow(f"{name} has no text: its content is {_kind(content)}")
    return {**kept, "role": _ROLE_OF[said.lower()], "content": content}


def _part(part: Any, name: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise MalformedRow(f"{name} holds a part that is no text: {str(part)[:40]}")


def _check_turns(messages: tuple[dict[str, Any], ...]) -> None:
    answers = [m for m in messages if m["role"] == "assistant"]
    if not answers:
        raise MalformedRow("no turn is the assistant's: there is nothing to learn")
    if not any(m["content"].strip() or m.get("tool_calls") for m in answers):
        raise MalformedRow("all of the assistant's turns are empty")
    if all(m.get("weight") == 0 for m in answers):
        raise MalformedRow("all of the assistant's turns have weight 0: there is nothing to learn")


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise MalformedRow(f"{key} is {_kind(value)}, not text")
    if not value.strip():
        raise MalformedRow(f"{key} is empty")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
