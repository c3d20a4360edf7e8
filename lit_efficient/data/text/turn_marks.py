"""Where the messages of a conversation stand in the text that a chat template makes of them: a training twin of it.

    {% for m in messages %} ... {% endfor %}   ->   {% for m in messages %} MARK(m) ... {% endfor %} MARK

The twin is the template itself, parsed, with a mark at the beginning of every round of a loop, and one after the loop.
A mark writes something only where the loop is at a message. Without its marks the text must be the template's own to
the letter, and every message must stand in one place: then what lies between two marks is one message, as it was
written in this conversation, whatever the template would write in another one. What marks do not show is for the caller
to find otherwise. Costs one more rendering.
Source: the twins that TRL ships, https://github.com/huggingface/trl/tree/main/trl/chat_templates, made by hand.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_efficient.internals.hugging_face import chat_environment, template_messages

_MARK = re.compile("\ufdd0(\\d+);(-?\\d+)\ufdd1")  # noncharacters, which no text holds
_NAME = "lit_efficient_mark"


@dataclass(frozen=True)
class Placed:
    """A rendered conversation."""

    text: str  # what the template writes
    spans: Mapping[int, tuple[int, int]]  # message -> characters from, to; a message that writes nothing has none
    tail: int  # where the text after the last message begins


def place(
    template: str, messages: Sequence[Any], tools: Sequence[Any], tokens: Mapping[str, Any], *, prompt: bool = False
) -> Placed | None:
    """Render a conversation with the template's twin; None if the twin does not show where each message stands.

    ``tokens`` are the tokenizer's special ones by name; ``prompt`` begins the assistant's next turn.

    Raises:
        jinja2.TemplateError: If the template refuses the conversation.
    """
    seen = template_messages(messages)
    index_of = {id(message): index for index, message in enumerate(seen)}
    running: set[int] = set()

    def mark(loop: int, item: Any = None) -> str:
        index = index_of.get(id(item))
        if index is None and (item is not None or loop not in running):
            return ""
        running.add(loop) if index is not None else running.discard(loop)
        return f"\ufdd0{loop};{-1 if index is None else index}\ufdd1"

    rendered = _twin(template).render(
        **tokens,
        messages=seen,
        tools=list(tools) or None,
        documents=None,
        add_generation_prompt=prompt,
        **{_NAME: mark},
    )
    return _read(_MARK.split(rendered))


def _read(parts: list[str]) -> Placed | None:
    """Text, and between two texts the number of a loop and that of a message, -1 after the loop."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    began: dict[str, tuple[int, int]] = {}
    tails: dict[str, int] = {}
    at = len(parts[0])
    for loop, index, text in zip(parts[1::3], parts[2::3], parts[3::3]):
        if loop in began:
            message, start = began.pop(loop)
            if start < at and found.setdefault(loop, {}).setdefault(message, (start, at)) != (start, at):
                return None
        if int(index) >= 0:
            began[loop] = int(index), at
        else:
            tails[loop] = at
        at += len(text)
    if len(found) != 1:
        return None
    ((loop, spans),) = found.items()
    return Placed("".join(parts[::3]), spans, tails[loop])


@functools.lru_cache(maxsize=8)
def _twin(template: str) -> Any:
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    def mark(*arguments: nodes.Expr) -> nodes.Output:
        return nodes.Output([nodes.Call(nodes.Name(_NAME, "load"), list(arguments), [], None, None)])

    class Marks(NodeTransformer):
        loops = 0

        def visit_For(self, node: nodes.For) -> list[nodes.Node]:
            self.loops += 1
            number = nodes.Const(self.loops)
            self.generic_visit(node)
            if isinstance(node.target, nodes.Name):
                node.body.insert(0, mark(number, nodes.Name(node.target.name, "load")))
            return [node, mark(number)]

    environment = chat_environment(template)
    tree = Marks().visit(environment.parse(template))
    for node in tree.find_all(nodes.Node):
        node.set_lineno(node.lineno or 1).set_environment(environment)
    return environment.from_string(tree)
