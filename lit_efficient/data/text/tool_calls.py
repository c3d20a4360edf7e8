"""Tool calls in the form that a chat template reads.

The arguments of a call are an object, or, as in OpenAI's API, the JSON text of an object. A template that writes
``arguments | tojson`` turns a text into a doubly encoded one, and a template that joins texts raises an error for an
object. So the template is rendered with a short conversation in both forms, once, and the form that it writes as one
call is used for all rows. An object is preferred, because it does not depend on the spaces of a JSON text.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lit_efficient.data.text.chat_formats import Document, MalformedRow, Message
from lit_efficient.internals.hugging_face import chat_environment

_NAME, _VALUE = "zebra_7", "Quagga-7"
_ARGUMENTS = {_NAME: _VALUE}
_TOOL = {
    "type": "function",
    "function": {
        "name": "find_zebra",
        "description": "Finds it.",
        "parameters": {"type": "object", "properties": {_NAME: {"type": "string", "description": "Name."}}},
    },
}


Form = Literal["object", "text"]
"""Form of the arguments of tool calls."""


def as_template_reads(
    template: str, messages: Sequence[Message], tools: Sequence[Any], tokens: Mapping[str, Any]
) -> list[Message]:
    """Return messages whose tool calls have the form that the template reads.

    Args:
        template: The chat template.
        messages: The conversation.
        tools: Descriptions of tools.
        tokens: Special tokens of the tokenizer by name.

    Raises:
        MalformedRow: If the template needs an object, and the arguments of a call are no JSON text of one.
    """
    if not any(message.get("tool_calls") for message in messages):
        return list(messages)
    form = _form(template, bool(tools), tuple(sorted((name, str(token)) for name, token in tokens.items())))
    if form is None:  # the template writes no calls, which `left_out` reports
        return list(messages)
    return [_message_as(message, form) if message.get("tool_calls") else message for message in messages]


def control_texts(document: Document) -> Iterator[tuple[str, str]]:
    """Yield all texts of a conversation that a template may write, with their places for messages."""
    for message in document.messages:
        for key, value in message.items():
            where = "the text of a turn" if key == "content" else f"{key!r} of a turn"
            yield from ((where, text) for text in _texts(value))
    for tool in document.tools:
        yield from (("the description of a tool", text) for text in _texts(tool))
    yield from (("chat_template_kwargs", text) for text in _texts(document.template_kwargs))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _message_as(message: Message, form: Form) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if "arguments" not in function:
            calls.append(call)
            continue
        function = {**function, "arguments": _arguments_as(function["arguments"], form)}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _arguments_as(arguments: object, form: Form) -> object:
    if form == "text":
        # As templates write JSON: with the characters themselves.
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():  # a call without arguments
        return {}
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise MalformedRow(f"the arguments of a tool call are a text that is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise MalformedRow(f"the arguments of a tool call are the JSON of a {type(found).__name__}, not of an object")
    return found


@functools.lru_cache(maxsize=32)
def _form(template: str, has_tools: bool, tokens: tuple[tuple[str, str], ...]) -> Form | None:
    """Return the form of calls that a template reads; None if it writes a call in no form."""
    # A template may write calls only if there are descriptions of tools.
    for with_tools in (True,) if has_tools else (False, True):
        as_object = _written(template, "object", with_tools, dict(tokens))
        as_text = _written(template, "text", with_tools, dict(tokens))
        # With Python's form of an object, the template joins texts and is not meant for objects.
        if as_object is not None and (as_text is None or repr(_ARGUMENTS) not in as_object):
            return "object"
        if as_text is not None:
            return "text"
    return None


def _written(template: str, form: Form, with_tools: bool, tokens: dict[str, str]) -> str | None:
    """Return the text of a conversation with a call; None if the template raises an error or omits the call."""
    call = {"id": "zebra7abc", "type": "function", "function": {"name": "find_zebra", "arguments": _ARGUMENTS}}
    messages = [
        {"role": "user", "content": "Question"},
        _message_as({"role": "assistant", "content": "", "tool_calls": [call]}, form),
    ]
    try:
        text = (
            chat_environment(template)
            .from_string(template)
            .render(
                **tokens,
                messages=messages,
                tools=[_TOOL] if with_tools else None,
                documents=None,
                add_generation_prompt=False,
            )
        )
    except Exception:  # a template raises errors of Jinja and of Python: it does not read this form
        return None
    return text if _VALUE in text else None
