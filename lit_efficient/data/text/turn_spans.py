"""Spans of a rendered conversation that the assistant writes.

The spans come from the ``{% generation %}`` marks of the chat template. For a template without them, `turn_marks` adds
marks to a copy: the assistant's turn is the text of its message without the beginning that the generation prompt would
write. If the copy writes another text, or does not show where each message is, each prefix of the conversation is
rendered instead: turn i is the text of turns 0..i without the text of turns 0..i-1 with the generation prompt. Both
must be prefixes of the whole text. If they are not, the row is malformed. If they are not for a plain conversation of
two questions and answers either, the template is refused.
"""

import bisect
import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from lit_efficient.data.text.chat_formats import Document, MalformedRow, Message
from lit_efficient.data.text.left_out import call_texts, occurs, without_thoughts
from lit_efficient.data.text.message_images import as_parts, texts_of
from lit_efficient.data.text.template_limits import limited
from lit_efficient.data.text.tool_calls import as_template_reads, control_texts
from lit_efficient.data.text.turn_marks import Placed, place_messages
from lit_efficient.errors import ConfigurationError, listed
from lit_efficient.internals.hugging_face import chat_environment

TrainOn = Literal["assistant", "completion", "all"]
Span = tuple[int, int]
"""First character, and the character after the last."""
Turn = list[Span]
"""Spans of a turn that contribute to the loss. The last span holds the end of the turn."""

# Variables and functions that transformers passes to each template.
_SET = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "Zebra-7"
ASKED: Message = {"role": "user", "content": "Question"}
ANSWERED: Message = {"role": "assistant", "content": PROBE}


class _Inseparable(MalformedRow):
    """Error of a template that writes a turn differently when more turns follow."""


class TurnSpans:
    """Renders conversations with the chat template of a tokenizer, and finds the spans that contribute to the loss.

    Args:
        tokenizer: Fast tokenizer of transformers.
        train_on: As in `ChatTokens`.
        control: Special tokens that the text of a turn must not contain.
        template_kwargs: Further variables for the chat template. Those of a document take precedence.
        in_parts: Give the template contents as lists of texts and images, as those of processors read them.
    """

    def __init__(
        self,
        tokenizer: Any,
        train_on: TrainOn,
        control: Sequence[str],
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        in_parts: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.in_parts = in_parts
        self.train_on = train_on
        self.template_kwargs = dict(template_kwargs)
        # Longest first, so that the error names "<|end|>x" and not its prefix "<|end|>".
        longest_first = sorted(control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if control else None

    @functools.cached_property
    def template(self) -> str:
        """Chat template of the tokenizer."""
        if self.tokenizer.chat_template is None:
            raise ConfigurationError(
                "tokenizer: it has no chat template, and conversations need one. Set chat_template to the template "
                "that the model was trained with (Jinja, or a file); for a new model chat_template: chatml."
            )
        unread = sorted(self.template_kwargs.keys() - self.variables)
        if unread:
            raise ConfigurationError(
                f"chat.template_kwargs names {listed(unread, 5)}, which the chat template does not read. It reads "
                f"{listed(sorted(self.variables), 10) or 'no variable'}."
            )
        return str(self.tokenizer.get_chat_template())

    @functools.cached_property
    def variables(self) -> set[str]:
        """Names of the variables that the chat templates read, except those that transformers sets."""
        from jinja2 import TemplateSyntaxError, meta

        templates = self.tokenizer.chat_template
        found: set[str] = set()
        for template in templates.values() if isinstance(templates, dict) else [templates]:
            # Rendering raises the error of a template that is wrong.
            with contextlib.suppress(TemplateSyntaxError):
                found |= meta.find_undeclared_variables(chat_environment(template).parse(template))
        return {name for name in found if name not in _SET and not name.endswith("_token")}

    @functools.cached_property
    def marked(self) -> bool:
        """True if the template marks the text that the assistant writes."""
        return _GENERATION.search(self.template) is not None

    def find(self, document: Document) -> tuple[str, list[Turn]]:
        """Return the text of a conversation, and the turns that contribute to the loss.

        Raises:
            MalformedRow: If the template cannot write the conversation, or its turns cannot be separated.
            ConfigurationError: If the template is one whose turns cannot be separated.
        """
        from jinja2 import TemplateError

        self._check_control_tokens(document)
        try:
            with limited(self.template):  # once for all renderings of a conversation: it takes as long as one of them
                text, turns = self._text_and_turns(document)
        except _Inseparable as error:
            if self._separates:
                raise
            raise ConfigurationError(
                f"tokenizer: {error}. Give a chat_template with {{% generation %}} marks around the text that the "
                "assistant writes."
            ) from error
        except (TemplateError, TypeError) as error:  # TypeError: arguments of a tool call may be no text
            raise MalformedRow(f"the chat template raises an error: {error}") from error
        if not turns:
            raise MalformedRow("it holds no assistant text that contributes to the loss")
        return encodable(text), turns

    def control_token_in(self, text: str) -> str:
        """Return the first control token that a text spells, or an empty text."""
        found = None if self._control is None else self._control.search(text)
        return "" if found is None else found[0]

    def _check_control_tokens(self, document: Document) -> None:
        """Refuse turns with control tokens in their text: tokenised, these would end the turn or begin a forged one."""
        for where, text in control_texts(document):
            spelled = self.control_token_in(text)
            if spelled:
                raise MalformedRow(
                    f"{where} spells the control token {spelled!r} (name a token of your own in chat.new_tokens)"
                )

    def _text_and_turns(self, document: Document) -> tuple[str, list[Turn]]:
        messages = document.messages
        text, marks = self._rendered_with_marks(document)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        whole: Turn = [(0, len(text))]
        if self.train_on == "all":
            for index in answers:
                if messages[index].get("weight") == 0:
                    raise MalformedRow(f"turn {index + 1} is marked as one without loss, and train_on is all")
                _check_written(messages[index], index, text, whole)
            return text, [whole]
        wanted = [index for index in answers if index >= document.given_turns]
        if self.train_on == "completion" and not document.given_turns:
            wanted = wanted[-1:]
        wanted = [index for index in wanted if messages[index].get("weight") != 0]
        if self.marked:
            turns = self._marked_turns(document, marks, answers, wanted)
        else:
            turns = self._turns_by_marked_copy(document, text, wanted)
            if not turns:
                turns = self._turns_by_prefixes(document, text, wanted)
        if turns:
            for number, index in enumerate(wanted):
                _check_written(messages[index], index, text, turns[number] if len(turns) == len(wanted) else whole)
        return text, turns

    @functools.cached_property
    def _separates(self) -> bool:
        """True if the turns of a plain conversation can be separated. If not, the template is at fault."""
        from jinja2 import TemplateError

        plain = Document((ASKED, ANSWERED, ASKED, ANSWERED))
        try:
            text = self.rendered(plain)
            turns = self._turns_by_marked_copy(plain, text, [1, 3]) or self._turns_by_prefixes(plain, text, [1, 3])
        except (MalformedRow, TemplateError):
            return False
        return bool(turns)

    def _marked_turns(self, document: Document, marks: list[Span], answers: list[int], wanted: list[int]) -> list[Turn]:
        """Return the wanted turns by the template's own marks; ``answers`` are all assistant turns."""
        if len(marks) == len(answers):
            return [[span] for index, span in zip(answers, marks) if index in wanted]
        placed = self._placed(document)
        # The marks of different turns cannot be told apart.
        if placed is None:
            if wanted != answers:
                raise MalformedRow(f"the chat template marks {len(marks)} of the {len(answers)} assistant turns")
            return [[span] for span in marks]
        begins = [start for start, _ in placed.spans.values()]
        indices = list(placed.spans)
        turn_of: dict[int, Turn] = {}
        for span in marks:
            index = indices[max(bisect.bisect(begins, span[0]) - 1, 0)]
            turn_of.setdefault(index, []).append(span)
        return [turn_of[index] for index in wanted if index in turn_of]

    def rendered(self, document: Document, prompt: bool = False) -> str:
        """Return the text that the template writes for messages, with the generation prompt if ``prompt``."""
        tools = list(document.tools)
        template = str(self.tokenizer.get_chat_template(tools=tools or None))
        with limited(template):
            text = self.tokenizer.apply_chat_template(
                self._read_by(template, document.messages, tools),
                tools or None,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._kwargs(document),
            )
        return str(text)

    def _rendered_with_marks(self, document: Document) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans that the template marks."""
        if not self.marked or self.train_on == "all":
            return self.rendered(document), []
        from transformers.utils.chat_template_utils import render_jinja_template

        with limited(self.template):
            rendered: Any = render_jinja_template(  # annotated as returning a text
                conversations=[self._read_by(self.template, document.messages, document.tools)],
                tools=list(document.tools) or None,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
                **self._kwargs(document),
            )
        (text,), (marks,) = rendered
        return text, sorted((start, stop) for start, stop in marks if stop > start)

    def _placed(self, document: Document, prompt: bool = False) -> Placed | None:
        tools = document.tools
        template = str(self.tokenizer.get_chat_template(tools=list(tools) or None))
        with limited(template):
            read = self._read_by(template, document.messages, tools)
            variables = {**self.tokenizer.special_tokens_map, **self._kwargs(document)}
            return place_messages(template, read, tools, variables, prompt=prompt)

    def _kwargs(self, document: Document) -> dict[str, Any]:
        """Return the variables for the template of a document that the template reads."""
        given = {**self.template_kwargs, **document.template_kwargs}
        return {name: value for name, value in given.items() if name in self.variables}

    def _read_by(self, template: str, messages: Sequence[Message], tools: Sequence[Any]) -> list[Message]:
        """Return messages with their tool calls and contents in the form that the template reads."""
        found = as_template_reads(template, messages, tools, self.tokenizer.special_tokens_map)
        return [as_parts(message) for message in found] if self.in_parts else found

    def _turns_by_marked_copy(self, document: Document, text: str, wanted: list[int]) -> list[Turn]:
        """Return the wanted turns by a copy of the template with marks; nothing if the copy does not show them."""
        messages = document.messages
        placed = self._placed(document)
        # A template that writes something else with marks (for example by the length of a text) is not trusted.
        if placed is None or placed.text != text:
            return []
        for index, message in enumerate(messages):
            content = message["content"].strip()
            if index not in placed.spans and message["role"] != "system" and content:
                if any(words.strip() not in text for words in texts_of(message)):
                    raise MalformedRow(f"the chat template omits turn {index + 1}, of the role {message['role']}")
                # The message is written elsewhere, perhaps inside an assistant turn.
                return []
        turns: list[Turn] = []
        for index in wanted:
            before = messages[:index]
            # Many templates raise an error without a user turn, so the probe's question stands in.
            if not any(message["role"] == "user" for message in before):
                before = (ASKED,)
            asked = self._placed(replace(document, messages=before), prompt=True)
            if asked is None or index not in placed.spans:
                return []
            start, stop = placed.spans[index]
            turn = text[start:stop]
            given = self._prompt_length(asked, before, turn, messages[index]["content"].strip())
            if given is None:
                return []
            turns.append([(start + given, start + len(turn.rstrip()))])
        return turns

    def _prompt_length(self, asked: Placed, before: Sequence[Message], turn: str, content: str) -> int | None:
        """Return the number of characters of a turn that the generation prompt writes; None if it is uncertain.

        White space at the beginning does not count, because templates may write it at another place. A template that
        asks for thoughts, and writes a turn without any, shares only a first part of its prompt with the turn. This
        part ends at a line or a control token, and must tell an assistant turn from a user turn.

        Args:
            asked: The conversation before the turn, with the generation prompt.
            before: The messages before the turn.
            turn: Text of the turn.
            content: Content of the message, without white space around it.
        """
        prompt = asked.text[asked.tail :].lstrip()
        if turn.lstrip().startswith(prompt):
            return len(turn) - len(turn.lstrip()) + len(prompt) if prompt else 0
        users = [asked.text[start:stop] for i, (start, stop) in asked.spans.items() if before[i]["role"] == "user"]
        edges = {len(prompt)}
        edges.update(position + 1 for position, character in enumerate(prompt) if character == "\n")
        if self._control is not None:
            edges.update(token.end() for token in self._control.finditer(prompt))
        for edge in sorted(edges, reverse=True):
            header = prompt[:edge]
            if header in turn and not any(header in user for user in users):
                given = turn.index(header) + edge
                if content in turn and given > turn.rindex(content):
                    return None
                return given
        return None

    def _turns_by_prefixes(self, document: Document, text: str, wanted: list[int]) -> list[Turn]:
        """Return the wanted turns by rendering each prefix of the conversation."""
        messages = document.messages
        turns: list[Turn] = []
        for index in wanted:
            if index == 0:
                raise MalformedRow("the first turn is the assistant's, and this chat template cannot begin with it")
            before = self.rendered(replace(document, messages=messages[:index]), prompt=True)
            until = self.rendered(replace(document, messages=messages[: index + 1]))
            if not (text.startswith(before) and text.startswith(until)):
                raise _Inseparable(
                    "the chat template writes the beginning of a conversation differently when more follows "
                    f"(seen at turn {index + 1} of {len(messages)}), so the assistant's turns cannot be separated"
                )
            turns.append([(len(before), len(until.rstrip()))])
        return turns


def _check_written(message: Message, index: int, text: str, turn: Turn) -> None:
    """Raise an error if a turn lacks text or tool calls of its message.

    The beginning of the text may be in the generation prompt, before the turn.
    """
    own = "".join(text[start:stop] for start, stop in turn)
    for words in call_texts(message):
        if not occurs(words, own):
            raise MalformedRow(
                f"the chat template omits the call of {words[:60]!r} of turn {index + 1} (chat.template: chatml writes "
                "calls)"
            )
    words = without_thoughts(message["content"]).strip()
    first = max(turn[0][0] - len(words) + 1, 0)
    if not occurs(words, text[first : turn[-1][1]]):
        raise MalformedRow(f"the chat template omits the text of turn {index + 1}")


def encodable(text: str) -> str:
    """Return the text, if it can be written as UTF-8.

    Raises:
        MalformedRow: If it holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MalformedRow(f"it holds half a character ({text[error.start]!r})") from error
    return text
