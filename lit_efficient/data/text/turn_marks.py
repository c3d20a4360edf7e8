"""Places of the messages in the text that a chat template writes, found by rendering a copy of the template with marks.

    {% for m in messages %} ... {% endfor %}   ->   {% for m in messages %} MARK(m) ... {% endfor %} MARK

The copy is the parsed template, with a mark at the beginning of every iteration of a loop, and one after the loop. A
mark writes something only if the loop variable is a message. The caller compares the text without marks with that of
the template, and every message must be at one place. Then the text between two marks is one message, exactly as the
template writes it in this conversation. For other templates the caller uses another method. Costs one more rendering.

Source: the marked templates of TRL, https://github.com/huggingface/trl/tree/main/trl/chat_templates, made by hand.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_efficient.data.text.chat_formats import Message
from lit_efficient.internals.hugging_face import chat_environment, template_messages

if TYPE_CHECKING:
    from jinja2 import Template

# Noncharacters, which no text holds.
_MARK = re.compile("\ufdd0(\\d+);(-?\\d+)\ufdd1")
_NAME = "lit_efficient_mark"


@dataclass(frozen=True)
class Placed:
    """Rendered conversation with the places of its messages."""

    text: str  # the text without marks
    spans: Mapping[int, tuple[int, int]]  # first character and end of each message that writes something
    tail: int  # place of the text after the last message


def place_messages(
    template: str,
    messages: Sequence[Message],
    tools: Sequence[object],
    tokens: Mapping[str, object],
    *,
    prompt: bool = False,
) -> Placed | None:
    """Render a conversation with marks. Return None if they do not show the place of each message.

    Args:
        template: The chat template.
        messages: The conversation.
        tools: Descriptions of tools.
        tokens: Special tokens of the tokenizer, and further variables of the template, by name.
        prompt: Begin the assistant's next turn.

    Raises:
        jinja2.TemplateError: If the template raises an error for the conversation.
    """
    # The template gets exactly these objects, so that a mark can recognise a message by identity.
    seen = template_messages(messages)
    index_of = {id(message): index for index, message in enumerate(seen)}
    loops_at_message: set[int] = set()

    def mark(loop: int, item: object = None) -> str:
        """Return the mark of an iteration over a message, or of the end of such a loop."""
        index = index_of.get(id(item))
        if index is not None:
            loops_at_message.add(loop)
            return f"\ufdd0{loop};{index}\ufdd1"
        if item is None and loop in loops_at_message:
            loops_at_message.discard(loop)
            return f"\ufdd0{loop};-1\ufdd1"
        return ""

    rendered = _marked(template).render(
        **tokens,
        messages=seen,
        tools=list(tools) or None,
        documents=None,
        add_generation_prompt=prompt,
        **{_NAME: mark},
    )
    return _read(_MARK.split(rendered))


def _read(parts: list[str]) -> Placed | None:
    """Return the places of the messages.

    Args:
        parts: Text, and then for each mark the number of its loop, the number of its message (-1 after the loop), and
            the text that follows.
    """
    found: dict[str, dict[int, tuple[int, int]]] = {}
    began: dict[str, tuple[int, int]] = {}
    tails: dict[str, int] = {}
    position = len(parts[0])
    for loop, index, text in zip(parts[1::3], parts[2::3], parts[3::3]):
        if loop in began:
            message, start = began.pop(loop)
            if start < position:
                spans = found.setdefault(loop, {})
                if spans.setdefault(message, (start, position)) != (start, position):
                    return None  # one message at two places
        if int(index) >= 0:
            began[loop] = int(index), position
        else:
            tails[loop] = position
        position += len(text)
    if len(found) != 1:
        return None
    ((loop, spans),) = found.items()
    return Placed("".join(parts[::3]), spans, tails[loop])


@functools.lru_cache(maxsize=8)
def _marked(template: str) -> "Template":
    """Return the template with marks."""
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
    # Nodes that were made by hand have no line and no environment, which the compiler needs.
    for node in tree.find_all(nodes.Node):
        node.set_lineno(node.lineno or 1).set_environment(environment)
    return environment.from_string(tree)
