"""Which part of a conversation's text the assistant writes, as the chat template renders it.

The spans come from the template's own ``{% generation %}`` marks. Of a template without them a twin with marks is made
(:mod:`~lit_efficient.data.text.turn_marks`): the assistant's turn is what its message writes, less the beginning that
the generation prompt would write there. Where a twin does not show the turns, each prefix of the conversation is
rendered: turn i is what the text of turns 0..i has more than that of turns 0..i-1 with the generation prompt. Both must
be prefixes of the whole; where they are not, nothing is guessed: the row is malformed, or the template is refused if
that is so of a plain conversation.
"""

import bisect
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lit_efficient.data.text.chat_formats import Document, MalformedRow
from lit_efficient.data.text.left_out import call_words, spoken, stands
from lit_efficient.data.text.template_limits import limited
from lit_efficient.data.text.turn_marks import Placed, place
from lit_efficient.errors import ConfigurationError

TrainOn = Literal["assistant", "completion", "all"]
Span = tuple[int, int]
"""Characters from, to."""
Turn = list[Span]
"""What is learned of a turn, the end of which is its last part's."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASKED, PROBE = {"role": "user", "content": "Question"}, "Zebra-7"
ANSWERED = {"role": "assistant", "content": PROBE}


class _Inseparable(MalformedRow):
    """Turns that the template writes differently when more follows."""


class TurnSpans:
    """Renders conversations with a tokenizer's chat template, and finds what is learned of them."""

    def __init__(self, tokenizer: Any, train_on: TrainOn, control: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.train_on = train_on
        longest_first = sorted(control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if control else None

    @functools.cached_property
    def template(self) -> str:
        """The chat template."""
        if self.tokenizer.chat_template is None:
            raise ConfigurationError(
                "tokenizer: it has no chat template, and conversations need one. Name the one that the model was "
                "trained with as chat_template (Jinja, or a file), or for a new model the package's own: "
                "chat_template: chatml."
            )
        return str(self.tokenizer.get_chat_template())

    @functools.cached_property
    def marked(self) -> bool:
        """Whether the template marks what the assistant writes."""
        return _GENERATION.search(self.template) is not None

    def of(self, document: Document) -> tuple[str, list[Turn]]:
        """The text of a conversation, and the turns in it that are learned.

        Raises:
            MalformedRow: If the template does not write it, or turns of it cannot be separated.
            ConfigurationError: If the template is one whose turns cannot be separated.
        """
        from jinja2 import TemplateError

        for message in document.messages:
            spelled = self._control.search(message["content"]) if self._control else None
            if spelled:  # tokenised, it would end the turn or begin another one in somebody else's name
                raise MalformedRow(f"the text of a turn spells the control token {spelled[0]!r}")
        try:
            text, marks = self._rendered_with_marks(document)
            said = [index for index, message in enumerate(document.messages) if message["role"] == "assistant"]
            if self.train_on == "all":
                for index in said:
                    _check_written(document.messages[index], index, text, [(0, len(text))])
                return encodable(text), [[(0, len(text))]]
            turns = [index for index in said if index >= document.given_turns]
            last_alone = self.train_on == "completion" and not document.given_turns
            turns = [i for i in turns[-1 if last_alone else 0 :] if document.messages[i].get("weight") != 0]
            if self.marked:
                spans = self._marked_turns(document, marks, said, turns)
            else:
                spans = self._turns_by_twin(document, text, turns) or self._turns_by_prefixes(document, text, turns)
        except _Inseparable as error:
            if self._separates:
                raise
            raise ConfigurationError(
                f"tokenizer: {error}. Give a chat_template with {{% generation %}} marks around what the assistant "
                "writes."
            ) from error
        except (TemplateError, TypeError) as error:  # as where arguments of a call are no text
            raise MalformedRow(f"the chat template refuses it: {error}") from error
        if not spans:
            raise MalformedRow("nothing of it is the assistant's and to be learned")
        for index, turn in zip(turns, spans if len(spans) == len(turns) else [[(0, len(text))]] * len(turns)):
            _check_written(document.messages[index], index, text, turn)
        return encodable(text), spans

    @functools.cached_property
    def _separates(self) -> bool:
        """Whether the turns of a plain conversation can be separated: where not, the template is at fault."""
        from jinja2 import TemplateError

        plain = Document((ASKED, ANSWERED, ASKED, ANSWERED))
        try:
            text = self.rendered(plain.messages, ())
            return bool(self._turns_by_twin(plain, text, [1, 3]) or self._turns_by_prefixes(plain, text, [1, 3]))
        except (MalformedRow, TemplateError):
            return False

    def _marked_turns(self, document: Document, marks: list[Span], said: list[int], turns: list[int]) -> list[Turn]:
        if len(marks) == len(said):
            return [[span] for index, span in zip(said, marks) if index in turns]
        found = self._placed(document.messages, document.tools)
        if found is None:  # then a turn's marks cannot be separated from another's
            if turns != said:
                raise MalformedRow(
                    f"the chat template marks {len(marks)} turns of the {len(said)} that are the assistant's"
                )
            return [[span] for span in marks]
        begins = [start for start, _ in found.spans.values()]
        of = [list(found.spans)[max(bisect.bisect(begins, start) - 1, 0)] for start, _ in marks]
        return [turn for i in turns if (turn := [span for index, span in zip(of, marks) if index == i])]

    def rendered(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], prompt: bool = False) -> str:
        """The text that the template makes of messages."""
        with limited(self.tokenizer.get_chat_template(tools=list(tools) or None)):
            text = self.tokenizer.apply_chat_template(
                list(messages), list(tools) or None, tokenize=False, add_generation_prompt=prompt
            )
        return str(text)

    def _rendered_with_marks(self, document: Document) -> tuple[str, list[Span]]:
        if not self.marked or self.train_on == "all":
            return self.rendered(document.messages, document.tools), []
        from transformers.utils.chat_template_utils import render_jinja_template

        with limited(self.template):
            rendered: Any = render_jinja_template(  # declared to return a text
                conversations=[list(document.messages)],
                tools=list(document.tools) or None,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        (text,), (marks,) = rendered
        return text, sorted((start, stop) for start, stop in marks if stop > start)

    def _placed(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], prompt: bool = False) -> Placed | None:
        template = str(self.tokenizer.get_chat_template(tools=list(tools) or None))
        with limited(template):
            return place(template, messages, tools, self.tokenizer.special_tokens_map, prompt=prompt)

    def _turns_by_twin(self, document: Document, text: str, turns: list[int]) -> list[Turn] | None:
        """The turns as the template's twin shows them; None if it does not."""
        messages, tools = document.messages, document.tools
        found = self._placed(messages, tools)
        if found is None or found.text != text:
            return None
        for index, message in enumerate(messages):
            content = message["content"].strip()
            if index not in found.spans and message["role"] != "system" and content:
                if content not in text:
                    raise MalformedRow(f"the chat template leaves turn {index + 1} out, of the role {message['role']}")
                return None  # written elsewhere, it may stand in the assistant's turn
        parts = list[Turn]()
        for index in turns:
            before = messages[:index] if any(m["role"] == "user" for m in messages[:index]) else [ASKED]
            asked = self._placed(before, tools, prompt=True)
            if asked is None or index not in found.spans:
                return None
            start, stop = found.spans[index]
            turn = text[start:stop]
            given = self._given(asked, before, turn, messages[index]["content"].strip())
            if given is None:
                return None
            parts.append([(start + given, start + len(turn.rstrip()))])
        return parts

    def _given(self, asked: Placed, before: Sequence[dict[str, Any]], turn: str, content: str) -> int | None:
        """How many characters of a turn the generation prompt writes; None if that is not certain.

        Who begins with white space may write it in another place: it counts for nothing. A template that asks for
        thoughts and writes a turn without any shares the prompt's beginning alone: it is cut at the edge of a line or
        control token, to no less than what tells the assistant's turns from the user's.
        """
        prompt = asked.text[asked.tail :].lstrip()
        if turn.lstrip().startswith(prompt):
            return len(turn) - len(turn.lstrip()) + len(prompt) if prompt else 0
        users = [asked.text[slice(*asked.spans[i])] for i in asked.spans if before[i]["role"] == "user"]
        edges = {token.end() for token in self._control.finditer(prompt)} if self._control else set[int]()
        edges |= {place + 1 for place, sign in enumerate(prompt) if sign == "\n"} | {len(prompt)}
        for edge in sorted(edges, reverse=True):
            header = prompt[:edge]
            if header in turn and not any(header in user for user in users):
                given = turn.index(header) + edge
                return given if content not in turn or given <= turn.rindex(content) else None
        return None

    def _turns_by_prefixes(self, document: Document, text: str, turns: list[int]) -> list[Turn]:
        messages, parts = document.messages, list[Turn]()
        for index in turns:
            if index == 0:
                raise MalformedRow("the first turn is the assistant's, and this chat template cannot begin with it")
            before = self.rendered(messages[:index], document.tools, prompt=True)
            until = self.rendered(messages[: index + 1], document.tools)
            if not (text.startswith(before) and text.startswith(until)):
                raise _Inseparable(
                    "the chat template writes the beginning of a conversation differently when more follows "
                    f"(seen at turn {index + 1} of {len(messages)}), so the assistant's turns cannot be separated"
                )
            parts.append([(len(before), len(until.rstrip()))])
        return parts


def _check_written(message: Mapping[str, Any], index: int, text: str, turn: Turn) -> None:
    """Refuse a turn that is learned without what it says; its beginning may stand in what the prompt writes."""
    own = "".join(text[start:stop] for start, stop in turn)
    lacking = [f"the call of {words!r}" for words in call_words(message) if not stands(words, own)]
    words = spoken(message["content"]).strip()
    if not stands(words, text[max(turn[0][0] - len(words) + 1, 0) : turn[-1][1]]):
        lacking.append("the text")
    if lacking:
        raise MalformedRow(f"the chat template leaves {lacking[0][:80]} in turn {index + 1} out")


def encodable(text: str) -> str:
    """The text, if it can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MalformedRow(f"it holds half a character ({text[error.start]!r})") from error
    return text
