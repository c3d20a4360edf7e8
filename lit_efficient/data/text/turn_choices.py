"""Choices of the user about conversations: their system prompt, the thoughts of the assistant, and template variables.

Thoughts are in a field of a message (``reasoning_content``, ``reasoning`` or ``thinking``), or in its content between
``<think>`` and ``</think>``.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lit_efficient.data.text.chat_formats import Document, MalformedRow, Message
from lit_efficient.data.text.left_out import occurs

Reasoning = Literal["as_template", "keep", "drop"]
# Names of the field with thoughts that transformers knows.
_FIELDS = ("reasoning_content", "thinking", "reasoning")
_THOUGHTS = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class TurnChoices:
    """Changes of conversations before the chat template writes them.

    Args:
        template_kwargs: Further variables for the chat template. Those of a row take precedence.
        system: System prompt of conversations that have none. None: they get none here.
        replace_system: Let ``system`` replace the system prompts of the rows, too. An empty one removes them.
        reasoning: Treatment of thoughts. ``as_template``: the template decides. ``drop``: they are removed. ``keep``: a
            row is malformed if the template omits them, and a template that reads no field gets them in the content.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    replace_system: bool = False
    reasoning: Reasoning = "as_template"

    @property
    def given(self) -> list[str]:
        """Names of the choices that differ from the defaults."""
        default = TurnChoices()
        return [name for name in vars(default) if getattr(self, name) != getattr(default, name)]

    def apply(self, document: Document, reads_fields: bool) -> Document:
        """Return a conversation with the chosen system prompt and thoughts.

        Args:
            document: The conversation.
            reads_fields: True if the chat template writes thoughts that are in a field.
        """
        messages = document.messages
        if self.reasoning == "drop":
            messages = tuple(map(_without_thoughts, messages))
        elif self.reasoning == "keep" and not reads_fields:
            messages = tuple(map(_with_thoughts_in_content, messages))
        document = replace(document, messages=messages)
        return document if self.system is None else self._with_system(document, self.system)

    def check_written(self, document: Document, text: str) -> None:
        """Raise an error if thoughts that are to be kept are not in the text that the template has written.

        Raises:
            MalformedRow: If a thought is missing.
        """
        if self.reasoning != "keep":
            return
        for index, message in enumerate(document.messages):
            for thought in _thoughts(message):
                if not occurs(thought, text):
                    raise MalformedRow(
                        f"the chat template omits the thoughts of turn {index + 1}, and chat.reasoning is keep"
                    )

    def _with_system(self, document: Document, system: str) -> Document:
        first = document.messages[0]
        has_system = first["role"] == "system"
        if has_system and not self.replace_system:
            return document
        rest = document.messages[1:] if has_system else document.messages
        own: tuple[Message, ...] = ({"role": "system", "content": system},) if system.strip() else ()
        given = document.given_turns
        if given:
            given += len(own) - has_system
        return replace(document, messages=(*own, *rest), given_turns=given)


def _without_thoughts(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    kept = {name: value for name, value in message.items() if name not in _FIELDS}
    return {**kept, "content": _THOUGHTS.sub("", message["content"])}


def _with_thoughts_in_content(message: Message) -> Message:
    thoughts = next((message[name] for name in _FIELDS if isinstance(message.get(name), str)), "")
    if message["role"] != "assistant" or not thoughts.strip():
        return message
    kept = {name: value for name, value in message.items() if name not in _FIELDS}
    return {**kept, "content": f"<think>\n{thoughts.strip()}\n</think>\n\n{message['content']}"}


def _thoughts(message: Message) -> Iterator[str]:
    if message["role"] != "assistant":
        return
    for name in _FIELDS:
        if isinstance(message.get(name), str):
            yield message[name]
    for found in _THOUGHTS.finditer(message["content"]):
        yield found[1]
