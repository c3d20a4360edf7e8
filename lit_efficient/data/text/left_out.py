"""Parts of a conversation that a chat template omits silently: system prompts, thoughts, text beside tool calls.

A part is found in the rendered text if it occurs literally, as JSON or Python write it, or with other white space.
"""

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping

from lit_efficient.data.text.chat_formats import Document, Message
from lit_efficient.data.text.message_images import texts_of

# End of the thoughts in a content. Templates remove the text before it from earlier turns.
_THOUGHT_ENDS = "</think>"


def left_out(document: Document, text: str) -> Counter[str]:
    """Return the parts with text that the rendered ``text`` lacks, and the number of turns that have them."""
    found: Counter[str] = Counter()
    for message in document.messages:
        lacking = {part for part, words in _parts(message) if not occurs(words, text)}
        content = message["content"]
        if not all(occurs(words, text) for words in texts_of(message)):
            if _THOUGHT_ENDS in content and occurs(without_thoughts(content), text):
                lacking.add("thoughts")
            else:
                lacking.add(f"the {message['role']}'s text")
        found.update(lacking)
    for tool in document.tools:
        if isinstance(tool, Mapping) and not occurs(str(tool.get("function", tool).get("name", "")), text):
            found["the tools"] = 1
    return found


def occurs(words: str, text: str) -> bool:
    """Return whether ``words`` occur in ``text``."""
    words = words.strip()
    if words in text:
        return True
    # Templates write tool calls as JSON, in which the text is escaped.
    forms = [words, *_escaped(words)]
    if any(form in text for form in forms):
        return True
    squeezed = _squeezed_text(text)
    return any(_squeezed(form) in squeezed for form in forms)


def without_thoughts(content: str) -> str:
    """Return an answer without the thoughts in it."""
    return content.rpartition(_THOUGHT_ENDS)[2]


def call_texts(message: Message) -> list[str]:
    """Return the names and the textual arguments of the tool calls of a message."""
    words: list[str] = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        words.append(str(function.get("name", "")))
        words += _leaves(arguments)
    return words


def _parts(message: Message) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the parts of a message, except its content."""
    for words in call_texts(message):
        yield "calls of tools", words
    for key, value in message.items():
        if isinstance(value, str) and key not in ("role", "content") and not key.endswith("id"):
            yield repr(key), value


def _leaves(value: object) -> Iterator[str]:
    """Yield the texts in a nested JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _leaves(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)


def _escaped(words: str) -> list[str]:
    """Return a text as JSON and Python write it, and these forms in JSON again: arguments may be JSON in a text."""
    once = [json.dumps(words, ensure_ascii=False)[1:-1], json.dumps(words)[1:-1], repr(words)[1:-1]]
    return once + [json.dumps(form)[1:-1] for form in once]


def _squeezed(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())


# `occurs` is called for each part of one conversation.
_squeezed_text = functools.lru_cache(maxsize=2)(_squeezed)
