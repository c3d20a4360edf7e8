"""What a chat template leaves out of a conversation without a word: system prompts, thoughts, words beside calls.

A part stands in the rendered text if it does to the letter, as JSON or Python write it, or with other white space.
"""

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lit_efficient.data.text.chat_formats import Document

_THOUGHT_ENDS = "</think>"  # in the content itself; templates take what precedes it out of earlier turns


def left_out(document: Document, text: str) -> Counter[str]:
    """In how many turns which part has text that the rendered ``text`` lacks."""
    found: Counter[str] = Counter()
    for message in document.messages:
        lacking = {part for part, words in _parts(message) if not stands(words, text)}
        content = message["content"]
        if not stands(content, text):
            spoken_alone = _THOUGHT_ENDS in content and stands(spoken(content), text)
            lacking.add("thoughts" if spoken_alone else f"the {message['role']}'s text")
        found.update(lacking)
    tools = [tool.get("function", tool).get("name", "") for tool in document.tools if isinstance(tool, Mapping)]
    if any(not stands(str(name), text) for name in tools):
        found["the tools"] += 1
    return found


def stands(words: str, text: str) -> bool:
    """Whether ``words`` can be read in ``text``."""
    words = words.strip()
    if words in text or any(form in text for form in _escaped(words)):
        return True
    whole = _whole(text)
    return any(_squeezed(form) in whole for form in (words, *_escaped(words)))


def spoken(content: str) -> str:
    """An answer without the thoughts in it."""
    return content.rpartition(_THOUGHT_ENDS)[2]


def call_words(message: Mapping[str, Any]) -> list[str]:
    """Names and arguments of a message's calls of tools, as far as they are texts."""
    words = list[str]()
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        words += [str(function.get("name", "")), *_leaves(arguments)]
    return words


def _parts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from (("calls of tools", words) for words in call_words(message))
    for key, value in message.items():
        if isinstance(value, str) and key not in ("role", "content") and not key.endswith("id"):
            yield repr(key), value


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)


def _escaped(words: str) -> Iterator[str]:
    once = [json.dumps(words, ensure_ascii=ascii)[1:-1] for ascii in (False, True)] + [repr(words)[1:-1]]
    yield from once
    yield from (json.dumps(form)[1:-1] for form in once)  # arguments that are a text already are written as one


def _squeezed(text: str) -> str:
    return "".join(text.split())


_whole = functools.lru_cache(maxsize=2)(_squeezed)  # of a conversation, which is asked for each of its parts
