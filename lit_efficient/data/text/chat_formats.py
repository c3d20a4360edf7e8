"""Rows of common data sets, recognised by their keys, as documents.

    tokens       {"input_ids": [...]}, perhaps with labels, attention_mask and loss_mask: see `token_rows`
    messages     {"messages": [{"role": "user", "content": ...}, ...]}
    sharegpt     {"conversations": [{"from": "human", "value": ...}, ...]}
    alpaca       {"instruction": ..., "input": ... or "", "output": ...}
    completion   {"prompt": ..., "completion": ...}: two texts, or two lists of messages
    text         {"text": ...}

A row that does not match its format raises `MalformedRow` with the reason, and the caller counts it. A source has one
format; the format of single rows is not guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal, get_args

from lit_efficient.data.text.message_images import IMAGE_COLUMNS, PARTS, Part, UnplacedImage, is_image, place_images
from lit_efficient.errors import ConfigurationError, listed

Format = Literal["tokens", "messages", "sharegpt", "alpaca", "completion", "text"]
Message = dict[str, Any]
Row = Mapping[str, Any]

# In the order in which formats are tried: exports of conversations often have a rendered "text" as well, and rows that
# somebody has tokenised often keep what they were made from.
KEYS: dict[str, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
# Further keys that a row of a format may have.
FURTHER = ("tools", "functions", "system", "chat_template_kwargs", *IMAGE_COLUMNS)
# Masks of rows of tokens that are 1 for a token with loss: of Megatron, of transformers, and of TRL.
LOSS_MASKS = ("loss_mask", "assistant_masks", "completion_mask")
TOKEN_KEYS = ("labels", "attention_mask", *LOSS_MASKS)
_FURTHER: dict[str, tuple[str, ...]] = {
    "tokens": (*TOKEN_KEYS, "position_ids"),
    "messages": FURTHER,
    "sharegpt": FURTHER,
    "alpaca": (*FURTHER, "input"),
    "completion": FURTHER,
    "text": (),
}
# List of turns as JSON or as Python prints it, without anything after it.
_TURNS = re.compile(r"""\s*\[\s*\{.*?["'](role|from)["']\s*:.*\]\s*\Z""", re.DOTALL)
# Content that no text DataModule reads, except images with a processor.
MEDIA = ("image", "video", "audio")
# Keys of a turn that decide whether it contributes to the loss, as in axolotl.
_TAGS = ("train", "training")
ROLES = ("system", "user", "assistant", "tool")
_ROLE_OF = {
    **{name: name for name in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "model", "bot"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response", "ipython"), "tool"),
    "developer": "system",
}


class MalformedRow(ValueError):
    """A row that does not match its format. The message is the reason."""


@dataclass(frozen=True)
class Document:
    """Conversation, text of which a first part may be a prompt, or tokens."""

    # Messages with at least ``role`` and ``content``; empty for a text. A message with ``weight`` 0 (OpenAI's format)
    # does not contribute to the loss.
    messages: tuple[Message, ...] = ()
    text: str = ""  # the text, if there are no messages
    given: int = 0  # number of characters of ``text`` that are a prompt, without loss
    given_turns: int = 0  # number of ``messages`` that are a prompt; assistant turns among them have no loss either
    tools: tuple[Any, ...] = ()  # descriptions of tools, for templates that use them
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables for the chat template
    ids: tuple[int, ...] = ()  # the tokens, if there is neither a message nor a text
    trained: tuple[bool, ...] = ()  # True for ids that contribute to the loss
    images: tuple[Any, ...] = ()  # the images of the messages, in their order
    desirable: bool | None = None  # judgement of the answer, if the row has one

    @property
    def documents(self) -> tuple[Document, ...]:
        """Documents of a row, which is this document alone."""
        return (self,)

    @property
    def identity(self) -> list[Any]:
        """Content that must not occur on both sides of a split."""
        pictures = [sha256(image).hexdigest() if isinstance(image, bytes) else image for image in self.images]
        return [self.messages, self.text, *self.ids, *pictures]

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers that are stored with the row: its judgement, if it has one."""
        return () if self.desirable is None else (float(self.desirable),)

    def texts(self) -> Iterator[str]:
        """Yield all texts of the document."""
        if not self.messages:
            yield self.text
        for message in self.messages:
            yield message["content"]


def recognise(rows: Iterable[Row], where: str, hint: str = "", among: Iterable[str] = KEYS) -> tuple[Format, str]:
    """Return the format of a source, from its first rows.

    The format that matches most rows wins. A tie goes to the earlier format in `KEYS`.

    Args:
        rows: First rows of the source.
        where: Name of the source, for messages.
        hint: Sentence for the error, about a likely mistake.
        among: Formats to try.

    Returns:
        The format, and a sentence with its keys and with other formats that would match.

    Raises:
        ConfigurationError: If no row has the keys of any format.
    """
    rows = list(rows)
    formats = {name: KEYS[name] for name in among}
    votes = dict.fromkeys(formats, 0)
    seen: dict[str, None] = {}  # a set that keeps the order
    for row in rows:
        seen.update(dict.fromkeys(row))
        for name, keys in formats.items():
            if not _missing(row, keys):
                votes[name] += 1
    # max() returns the first of equal votes, which is the earlier format.
    best = max(votes, key=lambda name: votes[name])
    if not votes[best]:
        known = "; ".join(f"{name} ({', '.join(keys)})" for name, keys in formats.items())
        raise ConfigurationError(
            f"{where}: no format has the keys {keys_shown(seen)}. Formats and their keys: {known}. Map your keys with "
            f"columns, as in columns: {{prompt: question, completion: answer}}.{hint}"
        )
    sentence = f"{where}: format {best}, by the keys {', '.join(KEYS[best])}"
    further = _FURTHER[best]
    if best == "completion" and not any(holds_turns(row.get("prompt")) for row in rows):
        further = ()  # texts use no chat template
    sentence += unread(seen, KEYS[best] + further)
    also = [name for name, count in votes.items() if count and name != best]
    if also:
        sentence += f" (set format to read it as {' or '.join(also)})"
    return best, sentence  # type: ignore[return-value]


def unread(seen: Iterable[str], known: Iterable[str]) -> str:
    """Return a clause with the keys of rows that are not read, or an empty text."""
    names = [name for name in seen if name not in known]
    return f"; not read: {listed(keys_shown(names), 5)}" if names else ""


def keys_shown(keys: Iterable[str | None]) -> list[str]:
    """Return names of columns for a message. A name that is data by mistake may be long, and is cut."""
    names = [str(key) for key in keys]
    return [name if len(name) <= 40 else f"{name[:40]}..." for name in names]


def check_keys(row: Row, keys: Iterable[str]) -> None:
    """Raise an error if a row lacks a key.

    Raises:
        MalformedRow: If a key is missing or null.
    """
    missing = _missing(row, keys)
    if missing:
        raise MalformedRow(f"no {' and no '.join(missing)}")


def _missing(row: Row, keys: Iterable[str]) -> list[str]:
    return [key for key in keys if row.get(key) is None]


def read_row(row: Row, kind: Format, images: bool = False) -> Document:
    """Return the document of a row.

    Args:
        row: The row.
        kind: Its format.
        images: Read images in the messages of conversations. Rows of other formats are malformed.

    Raises:
        MalformedRow: If the row does not match the format.
    """
    assert kind in get_args(Format)
    check_keys(row, KEYS[kind])
    _check_label(row, kind)
    document = Document(text=_text(row, "text")) if kind == "text" else _conversation(row, kind, images)
    if not document.messages:
        if images:
            raise MalformedRow("it is no conversation, and a processor reads conversations only")
        return document
    _check_media(row, images)
    document = replace(document, tools=_tools(row), template_kwargs=_template_kwargs(row))
    if not images:
        return document
    try:
        placed, found = place_images(document.messages, row)
    except UnplacedImage as reason:
        raise MalformedRow(str(reason)) from reason
    return replace(document, messages=placed, images=found)


def _conversation(row: Row, kind: Format, images: bool) -> Document:
    """Return the messages of a row, or the text of a prompt with a completion."""
    if kind == "alpaca":
        return Document(messages=_alpaca(row))
    if kind == "completion":
        return _completion(row, images)
    (key,) = KEYS[kind]
    messages = _behind_system(row, _messages(row[key], key, images))
    _check_turns(messages)
    return Document(messages=messages)


def _check_label(row: Row, kind: Format) -> None:
    """Raise an error if a row holds a bad answer: "label" in TRL's format for KTO, "kto_tag" in LLaMA-Factory's."""
    for key in ("label", "kto_tag") if kind == "completion" else ("kto_tag",):
        if str(row.get(key)).lower() == "false":
            raise MalformedRow(
                f"{key} is false, which marks a bad answer (as for KTO), and training would teach it: leave out such "
                "rows, or give pairs of answers to PreferenceData"
            )


def _check_media(row: Row, images: bool) -> None:
    """Raise an error for a row whose messages refer to videos, sounds, or unless ``images`` images in other columns."""
    for medium in MEDIA[images:]:
        for name in (f"{medium}s", medium):
            if row.get(name):
                raise MalformedRow(f"it holds {medium}s (in {name!r}), and {_read(medium, images)}")


def _read(medium: str, images: bool) -> str:
    """Return a clause about what is read, for a row with another medium."""
    if images:
        return "only text and images are read"
    hint = " (LanguageData reads images with a processor)" if medium == "image" else ""
    return f"only text is read{hint}"


def _template_kwargs(row: Row) -> Mapping[str, Any]:
    name = "chat_template_kwargs"
    value = _of_json(row.get(name), name)
    return {} if value in (None, "") else _object(value, name)


def holds_turns(value: object) -> bool:
    """Return whether a value is a list of turns, or its text as JSON or as Python prints it."""
    return isinstance(value, list) or (isinstance(value, str) and _TURNS.match(value) is not None)


def turns_in(value: object, name: str) -> object:
    """Return the list of turns whose JSON text a value is, as in tables; another value as it is.

    Raises:
        MalformedRow: If the text of turns is no JSON.
    """
    return _of_json(value, name) if holds_turns(value) else value


def system_message(row: Row) -> tuple[Message, ...]:
    """Return the message of a row's key "system"; nothing if there is none."""
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        return ({"role": "system", "content": system},)
    return ()


def _behind_system(row: Row, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return messages with the row's key "system" before them, unless they begin with a system message."""
    if messages[0]["role"] == "system":
        return messages
    return (*system_message(row), *messages)


def _tools(row: Row) -> tuple[Any, ...]:
    """Return descriptions of tools: the key "tools", or "functions", as OpenAI called it before."""
    value = _of_json(row.get("tools"), "tools")
    if value in (None, "", [], {}):
        functions = _listed(_of_json(row.get("functions"), "functions"), "functions")
        value = [{"type": "function", "function": function} for function in functions]
    return tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(_listed(value, "tools")))


def _tool(value: object, name: str) -> Mapping[str, Any]:
    """Return the description of a tool. The whole, or its parameters, may be the JSON text of an object."""
    tool = _object(_of_json(value, name), name)
    if "function" in tool:
        return {**tool, "function": _tool(tool["function"], f"{name}.function")}
    if isinstance(tool.get("parameters"), str):
        return {**tool, "parameters": _object(_of_json(tool["parameters"], f"{name}.parameters"), f"{name}.parameters")}
    return tool


def _of_json(value: object, name: str) -> Any:
    """Return a value that may be given as its JSON text, as in tables whose rows have different keys."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise MalformedRow(f"{name} is a text that is no JSON: {error}") from error


def _listed(value: object, name: str) -> list[Any]:
    """Return a list; an empty one for a value that is missing or empty."""
    if value in (None, "", [], {}):
        return []
    if not isinstance(value, list):
        raise MalformedRow(f"{name} is {_kind(value)}, not a list")
    return value


def _object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise MalformedRow(f"{name} is {_kind(value)}, not an object")
    return value


def _alpaca(row: Row) -> tuple[Message, ...]:
    request = _text(row, "instruction")
    extra = row.get("input")
    if extra is not None and not isinstance(extra, str):
        raise MalformedRow(f"input is {_kind(extra)}, not text")
    if extra and extra.strip():
        request += f"\n\n{extra}"
    answer = _text(row, "output")
    return (*system_message(row), {"role": "user", "content": request}, {"role": "assistant", "content": answer})


def _completion(row: Row, images: bool) -> Document:
    prompt = row["prompt"]
    completion = row["completion"]
    if holds_turns(prompt) != holds_turns(completion):
        raise MalformedRow(f"prompt is {_kind(prompt)} and completion {_kind(completion)}: both must be of one kind")
    if holds_turns(prompt):
        asked = _behind_system(row, _messages(prompt, "prompt", images))
        messages = (*asked, *_messages(completion, "completion", images))
        _check_turns(messages)
        return Document(messages=messages, given_turns=len(asked))
    if not isinstance(prompt, str):
        raise MalformedRow(f"prompt is {_kind(prompt)}, not text")
    return Document(text=prompt + _text(row, "completion"), given=len(prompt))


def _messages(turns: object, name: str, images: bool = False) -> tuple[Message, ...]:
    if not turns:
        raise MalformedRow(f"{name} is empty, not a list of turns")
    turns = turns_in(turns, name)
    if not isinstance(turns, list):
        raise MalformedRow(f"{name} is {_kind(turns)}, not a list of turns")
    return tuple(_message(turn, f"{name}[{index}]", images) for index, turn in enumerate(turns))


def _message(turn: object, name: str, images: bool) -> Message:
    if not isinstance(turn, Mapping):
        raise MalformedRow(f"{name} is {_kind(turn)}, not a turn")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role.lower() not in _ROLE_OF:
        raise MalformedRow(f"{name} has the role {role!r}; known roles are {', '.join(sorted(_ROLE_OF))}")
    # A null means the same as an absent key, and a template would print it.
    kept = {key: value for key, value in turn.items() if key not in ("role", "from", "value") and value is not None}
    calls = _calls(kept, name)
    if calls:
        kept["tool_calls"] = calls
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        parts = [_part(part, name, images) for part in content]
        content = "".join(part["text"] for part in parts if not is_image(part))
        if images:
            kept[PARTS] = parts
    # A turn that only calls tools has no text.
    if content is None and calls:
        content = ""
    _read_tags(kept, _ROLE_OF[role.lower()], name)
    if not isinstance(content, str):
        raise MalformedRow(f"{name} has no text: its content is {_kind(content)}")
    return {**kept, "role": _ROLE_OF[role.lower()], "content": content}


def _read_tags(turn: dict[str, Any], role: str, name: str) -> None:
    """Replace the tags "train" and "training" of a turn by the equal "weight", in place."""
    if turn.get("weight", 1) not in (0, 1):
        raise MalformedRow(f"{name} has the weight {turn['weight']!r}, which must be 1 (with loss) or 0 (without)")
    for tag in _TAGS:
        wanted = turn.pop(tag, None)
        if wanted is None:
            continue
        if wanted not in (False, True):
            raise MalformedRow(f"{name} has {tag}: {wanted!r}, which must be true (with loss) or false (without)")
        if wanted and role != "assistant":
            raise MalformedRow(f"{name} has {tag}: true and the role {role}: only assistant turns have a loss")
        if turn.get("weight", wanted) != wanted:
            raise MalformedRow(f"{name} has {tag}: {wanted} and the weight {turn['weight']!r}")
        turn["weight"] = int(wanted)


def _calls(turn: dict[str, Any], name: str) -> list[Any]:
    """Return the tool calls of a turn, which may be JSON texts. OpenAI's former "function_call" is taken out of it."""
    calls = _listed(_of_json(turn.get("tool_calls"), f"{name}.tool_calls"), f"{name}.tool_calls")
    function = turn.pop("function_call", None)
    if function and not calls:
        calls = [{"type": "function", "function": function}]
    read = []
    for index, one in enumerate(calls):
        where = f"{name}.tool_calls[{index}]"
        call = _object(_of_json(one, where), where)
        if "function" in call:
            call = {**call, "function": _object(_of_json(call["function"], where), f"{where}.function")}
        read.append(call)
    return read


def _part(part: object, name: str, images: bool) -> Part:
    """Return a part of a content that is a list: a text, or an image."""
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if isinstance(part, Mapping) and images and is_image(part):
        return dict(part)
    kind = str(part.get("type")) if isinstance(part, Mapping) else ""
    for medium in MEDIA:
        if kind.startswith((medium, f"input_{medium}")):  # as "image", "image_url" or "input_image"
            raise MalformedRow(f"{name} holds a part of the type {kind!r}, and {_read(medium, images)}")
    raise MalformedRow(f"{name} holds a part that is no text: {str(part)[:40]}")


def _check_turns(messages: tuple[Message, ...]) -> None:
    """Raise an error if a conversation holds nothing that contributes to the loss."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise MalformedRow("no turn has the role assistant, so there is nothing to learn")
    if not any(answer["content"].strip() or answer.get("tool_calls") for answer in answers):
        raise MalformedRow("all assistant turns are empty")
    if all(answer.get("weight") == 0 for answer in answers):
        raise MalformedRow("all assistant turns have weight 0, so there is nothing to learn")


def _text(row: Row, key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise MalformedRow(f"{key} is {_kind(value)}, not text")
    if not value.strip():
        raise MalformedRow(f"{key} is empty")
    return value


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
