"""Conversations that grow while a model writes them: what their chat template puts behind a turn of the model.

    tokens of the prompt | tokens that the model wrote | tokens of the answers, and of the next prompt | ...

What the model wrote is never tokenised again. For the tokens behind it, a short conversation is rendered with a probe
in the place of the model's words, and the text behind the end of the probe's turn is tokenised. A row therefore equals
the tokens of the whole rendered conversation if the template writes each turn in the same way whatever follows, and the
model wrote its turns as the template writes them.

Tool calls are read by the ``response_template`` of the tokenizer (transformers), or else as JSON: a rendered probe
shows the keys of a function's name and of its arguments, and the word before a call.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lit_efficient.data.text.chat_formats import Document, MalformedRow, Message
from lit_efficient.data.text.chat_tokens import ChatTokens
from lit_efficient.data.text.tool_calls import control_texts
from lit_efficient.data.text.turn_spans import ASKED, PROBE, encodable
from lit_efficient.errors import ConfigurationError, listed

_FUNCTION = "find_zebra"
_ARGUMENTS = {"zebra_7": PROBE}
_JSON = json.JSONDecoder()
_Call = tuple[str, Mapping[str, Any]]
"""Name of a function, and the arguments."""


class _CallForm(NamedTuple):
    """Form of a tool call in a text."""

    word: str  # before the JSON of calls; empty if a turn with a call is nothing but JSON
    name: str  # key of the function's name
    arguments: str  # key of the arguments


class GrowingChat:
    """Writes and reads the turns of conversations in the chat template of a tokenizer.

    Args:
        tokenizer: Fast tokenizer of transformers with a chat template.
        tools: Descriptions of tools, as JSON schemas of functions.
        stop: Ids that end what the model writes. The attribute of this name also has the one that ends a turn.

    Raises:
        ConfigurationError: If the template cannot write a conversation of the model with tools or a user.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Any], stop: set[int]) -> None:
        self.tokenizer = tokenizer
        self.tools = tuple(tools)
        tokens = ChatTokens(tokenizer, "all")
        self.stop = set(stop)
        if tokens.end_of_turn is not None:
            self.stop.add(tokens.end_of_turn)
        self._ends = [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(self.stop))]
        self._turns = tokens.turns
        self._form: _CallForm | None = None  # None: calls are read by the response_template
        message: Message = {"role": "assistant", "content": PROBE}
        answer = ASKED
        if tools:
            if getattr(tokenizer, "response_template", None) is None:
                self._form = self._form_of_json()
            message["tool_calls"] = [_call(0, _FUNCTION, _ARGUMENTS)]
            answer = {"role": "tool", "name": _FUNCTION, "tool_call_id": call_id(0), "content": "3"}
        try:
            self.behind(message, [answer], True)
        except MalformedRow as error:
            raise ConfigurationError(f"tokenizer: {error}. Give another chat_template") from error

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text of messages, followed by the beginning of the model's turn.

        Raises:
            MalformedRow: If the template cannot write the messages, or a message spells a control token.
        """
        self._check_control_tokens(messages)
        return self._rendered(messages, True)

    def message(self, before: Sequence[int], ids: Sequence[int], text: str, number: int) -> Message:
        """Return what the model wrote as a message, with its tool calls if there are tools.

        Args:
            before: All ids before the turn.
            ids: Ids of the turn.
            text: Text of the turn, without its end.
            number: Number of calls before the turn, which are counted for the identifiers of calls.
        """
        message: Message = {"role": "assistant", "content": text}
        if not self.tools:
            return message
        if self._form is None:
            content, calls = self._calls_by_template(before, ids)
        else:
            content, calls = _calls_by_json(text, self._form)
        if calls:
            message["content"] = content.strip()
            message["tool_calls"] = [_call(number + i, *call) for i, call in enumerate(calls)]
        return message

    def behind(self, message: Message, answers: Sequence[Message], ended: bool) -> list[int]:
        """Return the ids between a turn of the model and its next turn: answers, and the beginning of the next turn.

        Args:
            message: The turn, as of `message`.
            answers: Answers to it.
            ended: The turn has the token that ends it. If not, the ids begin with this token.

        Raises:
            MalformedRow: If the template cannot write the answers, or an answer spells a control token.
        """
        probe: Message = {"role": "assistant", "content": PROBE}
        if message.get("tool_calls"):
            *others, last = message["tool_calls"]
            name = last["function"]["name"]
            calls = [*others, {**last, "function": {"name": name, "arguments": _ARGUMENTS}}]
            probe = {"role": "assistant", "content": "", "tool_calls": calls}
        self._check_control_tokens(answers)
        rest = self._rendered([ASKED, probe, *answers], True).partition(PROBE)[2]
        places = {rest.index(end): end for end in self._ends if end in rest}
        if not places:
            raise MalformedRow(
                f"the chat template ends a turn of the model with none of the tokens that end generation "
                f"({listed(self._ends, 5)})"
            )
        # The end is tokenised, too, because some tokenizers write the beginning of a text differently.
        ids = self.tokenizer.encode(rest[min(places) :], add_special_tokens=False)
        return list(ids[1:] if ended else ids)

    def _check_control_tokens(self, messages: Sequence[Message]) -> None:
        for message in messages:
            for where, text in control_texts(Document((message,))):
                spelled = self._turns.control_token_in(text)
                if spelled:
                    raise MalformedRow(f"{where} of the role {message['role']} spells the control token {spelled!r}")

    def _rendered(self, messages: Sequence[Message], prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return encodable(self._turns.rendered(Document(tuple(messages), tools=self.tools), prompt))
        except (TemplateError, TypeError) as error:  # TypeError: arguments of a tool call may be no text
            raise MalformedRow(f"the chat template raises an error: {error}") from error

    def _form_of_json(self) -> _CallForm:
        asked = self._rendered([ASKED], True)
        message = {"role": "assistant", "content": "", "tool_calls": [_call(0, _FUNCTION, _ARGUMENTS)]}
        text = self._rendered([ASKED, message], False)
        for place, character in enumerate(text):
            value = _json_at(text, place)[0] if character == "{" else None
            keys = [key for key in value if value[key] == _FUNCTION] if isinstance(value, dict) else []
            named = [key for key in value if value[key] == _ARGUMENTS] if isinstance(value, dict) else []
            if keys and named:
                own = text[:place].removeprefix(asked).rstrip("[ \n")
                return _CallForm(own.split()[-1] if own.split() else "", keys[0], named[0])
        raise ConfigurationError(
            "tokenizer: its chat template writes no tool calls as JSON, so calls of the model cannot be read. Give a "
            "tokenizer with a response_template"
        )

    def _calls_by_template(self, before: Sequence[int], ids: Sequence[int]) -> tuple[str, list[_Call]]:
        try:
            found = self.tokenizer.parse_response(list(ids), prefix=list(before), tools=list(self.tools))
            calls = [one.get("function", one) for one in found.get("tool_calls") or ()]
            content = str(found.get("content") or "")
            for end in self._ends:
                content = content.removesuffix(end)
            return content, [(str(call["name"]), dict(call["arguments"])) for call in calls]
        except (ValueError, TypeError, KeyError, AttributeError):  # no message, or a call without its parts
            return "", []


def call_id(number: int) -> str:
    """Return the identifier of a call. Templates of Mistral need nine letters and digits."""
    return f"call{number:05d}"


def _call(number: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id(number), "type": "function", "function": {"name": name, "arguments": arguments}}


def _calls_by_json(text: str, form: _CallForm) -> tuple[str, list[_Call]]:
    """Return the text before calls, and the calls. A turn in which one cannot be read has none."""
    calls: list[_Call] = []
    place = text.find(form.word)
    content = text[:place]
    while place >= 0:
        value, place = _json_at(text, place + len(form.word))
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                return "", []
            name = one.get(form.name)
            arguments = one.get(form.arguments)
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return "", []
            calls.append((name, arguments))
        place = text.find(form.word, place) if form.word else -1
    return content, calls


def _json_at(text: str, place: int) -> tuple[Any, int]:
    """Return the JSON value at a place or behind white space there, and the place behind it; None if there is none."""
    while place < len(text) and text[place].isspace():
        place += 1
    try:
        return _JSON.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, place
