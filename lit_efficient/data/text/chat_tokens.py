"""Documents -> token ids, and which of them are learned: the assistant's turns, each with the token that ends it.

    trained[t] = the token begins inside a span of text that the assistant writes

The spans come from the template's own ``{% generation %}`` marks. A template without them is rendered for each prefix
of the conversation: the assistant's turn i is what follows the text of turns 0..i-1 with the generation prompt. That
text must be a prefix of the whole; where it is not, nothing is guessed and the template is refused. If only the turn's
end moves (templates that drop earlier turns' thoughts), it is the first end-of-turn token after its beginning.

A model that does not learn the end-of-turn token never stops. Templates that leave it out of their marks are common,
so a probe conversation is checked before any data is read.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lit_efficient.data.text.chat_formats import Document, MalformedRow
from lit_efficient.errors import ConfigurationError

TrainOn = Literal["assistant", "completion", "all"]
OnUntrainedEnd = Literal["refuse", "warn", "train"]
Span = tuple[int, int | None]
"""Characters from, to; None: to the end of the turn."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "Zebra-7"


@dataclass
class Encoded:
    """A document as tokens.

    Args:
        ids: ``[n]`` int64.
        trained: ``[n]`` bool: which ids are learned.
        num_bytes: ``[n]`` int64: bytes of text that each id stands for, 0 for special tokens.
        cuttable: whether it may be cut into pieces (a text), because all of it is learned.
        turns: how many turns are learned.
        ended: how many of these have their end learned.
    """

    ids: np.ndarray
    trained: np.ndarray
    num_bytes: np.ndarray
    cuttable: bool = False
    turns: int = 0
    ended: int = 0


class ChatTokens:
    """Turns documents into tokens with one tokenizer and its chat template.

    Args:
        tokenizer: a fast tokenizer of transformers.
        train_on: ``assistant``: all of the assistant's turns; ``completion``: the last one, and of a prompt with a
            completion the completion; ``all``: everything.
        untrained_end: what to do about a template whose end-of-turn token would not be learned.

    Raises:
        ConfigurationError: If the tokenizer cannot end a text.
    """

    def __init__(
        self, tokenizer: Any, train_on: TrainOn = "assistant", untrained_end: OnUntrainedEnd = "refuse"
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigurationError("tokenizer: it has no eos_token, so a text's end could not be learned.")
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.untrained_end = untrained_end
        added = tokenizer.added_tokens_decoder
        self.special_ids = {index for index, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        control = sorted({str(added[i]) for i in self.special_ids if i in added} - {tokenizer.unk_token}, key=len)
        self._control = re.compile("|".join(map(re.escape, reversed(control)))) if control else None

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

    @functools.cached_property
    def end_of_turn(self) -> int | None:
        """The id of the special token that follows an answer in the template; None if there is none."""
        probe = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _PROBE}]
        text = self._rendered(probe, ())
        after = text.rindex(_PROBE) + len(_PROBE)
        ids, starts, _ = self._tokens([text])[0]
        return next((int(i) for i, start in zip(ids, starts) if start >= after and int(i) in self.special_ids), None)

    def check_end_of_turn(self) -> str | None:
        """Encode a probe conversation: None if its end of turn is learned, else what is wrong.

        Raises:
            ConfigurationError: If it is not, and ``untrained_end`` is "refuse".
        """
        if self.end_of_turn is None:
            wrong = "the chat template ends an answer with no special token"
        else:
            probe = ({"role": "user", "content": "Question"}, {"role": "assistant", "content": _PROBE})
            (found,) = self.encode([Document(messages=probe)])
            assert isinstance(found, Encoded)
            if found.ended == found.turns:
                return None
            name = self.tokenizer.convert_ids_to_tokens(self.end_of_turn)
            wrong = f"the chat template leaves its end-of-turn token {name} out of what is trained"
        if self.untrained_end == "refuse":
            raise ConfigurationError(
                f"tokenizer: {wrong}, so a model trained on it would never stop. Set untrained_end to 'train' to learn "
                "the token nevertheless, to 'warn' to go on as it is, or give a chat_template that marks it."
            )
        return wrong

    def encode(self, documents: Sequence[Document]) -> list[Encoded | MalformedRow]:
        """The tokens of each document, or why there are none; a few hundred at a time are fast.

        Raises:
            ConfigurationError: If the template is one whose turns cannot be separated.
        """
        found: list[Encoded | MalformedRow] = [MalformedRow("")] * len(documents)
        chats: list[tuple[int, str, list[Span]]] = []
        texts: list[tuple[int, str]] = []
        for index, document in enumerate(documents):
            try:
                if document.messages:
                    chats.append((index, *self._render(document)))
                else:
                    texts.append((index, _encodable(document.text)))
            except MalformedRow as reason:
                found[index] = reason
        for (index, text, spans), tokens in zip(chats, self._tokens([text for _, text, _ in chats])):
            found[index] = self._chat(text, spans, *tokens)
        for (index, _), tokens in zip(texts, self._tokens([text for _, text in texts], plain=True)):
            found[index] = self._text(documents[index], *tokens)
        return found

    def _render(self, document: Document) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError

        for message in document.messages:
            spelled = self._control.search(message["content"]) if self._control else None
            if spelled:  # tokenised, it would end the turn or begin another one in somebody else's name
                raise MalformedRow(f"the text of a turn spells the control token {spelled[0]!r}")
        try:
            text, marks = self._rendered_with_marks(document)
            if self.train_on == "all":
                return _encodable(text), [(0, len(text))]
            given = sum(message["role"] == "assistant" for message in document.messages[: document.given_turns])
            spans = marks[given:] if self.marked else self._spans_by_prefixes(document, text)
        except TemplateError as error:
            raise MalformedRow(f"the chat template refuses it: {error}") from error
        if not spans:
            raise MalformedRow("the chat template marks nothing of it as the assistant's")
        last_alone = self.train_on == "completion" and not document.given_turns
        return _encodable(text), spans[-1:] if last_alone else spans

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], prompt: bool = False) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), list(tools) or None, tokenize=False, add_generation_prompt=prompt
            )
        )

    def _rendered_with_marks(self, document: Document) -> tuple[str, list[Span]]:
        if not self.marked or self.train_on == "all":
            return self._rendered(document.messages, document.tools), []
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(  # declared to return a text
            conversations=[list(document.messages)],
            tools=list(document.tools) or None,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        (text,), (marks,) = rendered
        return text, sorted((start, stop) for start, stop in marks if stop > start)

    def _spans_by_prefixes(self, document: Document, text: str) -> list[Span]:
        messages, spans = document.messages, list[Span]()
        own = range(document.given_turns, len(messages))
        turns = [index for index in own if messages[index]["role"] == "assistant"]
        last_alone = self.train_on == "completion" and not document.given_turns
        for index in turns[-1:] if last_alone else turns:
            if index == 0:
                raise MalformedRow("the first turn is the assistant's, and this chat template cannot begin with it")
            before = self._rendered(messages[:index], document.tools, prompt=True)
            if not text.startswith(before):
                raise ConfigurationError(
                    "tokenizer: the chat template writes the beginning of a conversation differently when more follows "
                    f"(seen at turn {index + 1} of {len(messages)}), so the assistant's turns cannot be separated. "
                    "Give a chat_template with {% generation %} marks, or set train_on to 'completion'."
                )
            until = self._rendered(messages[: index + 1], document.tools)
            spans.append((len(before), len(until) if text.startswith(until) else None))
        return spans

    def _chat(self, text: str, spans: list[Span], ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Encoded:
        trained = np.zeros(len(ids), dtype=bool)
        ends = np.flatnonzero(ids == self.end_of_turn)
        ended = 0
        for start, stop in spans:
            first = int(np.searchsorted(starts, start))
            place = int(np.searchsorted(ends, first))
            end = int(ends[place]) if place < len(ends) else None  # the end of this turn
            if stop is not None:
                after = int(np.searchsorted(starts, stop))
                trained[first:after] = True
                if end is not None and end >= after:  # of a later turn, if this one ends with another special token
                    others = np.flatnonzero(np.isin(ids[after : end + 1], list(self.special_ids)))
                    end = after + int(others[0]) if len(others) else end
            elif end is None:
                raise ConfigurationError("tokenizer: the chat template ends an earlier turn with no special token.")
            if end is not None and self.train_on != "all":
                if stop is None or self.untrained_end == "train":
                    trained[first : end + 1] = True
                if trained[end] and not self.marked:
                    trained[end + 1 : None if stop is None else np.searchsorted(starts, stop)] = False  # a line break
            ended += bool(end is not None and trained[end])
        turns = len(spans)
        return Encoded(ids, trained, self._bytes(text, ids, stops), turns=turns, ended=ended)

    def _text(self, document: Document, ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Encoded:
        num_bytes = self._bytes(document.text, ids, stops)
        if not len(ids) or ids[-1] != self.tokenizer.eos_token_id:
            ids, num_bytes = np.append(ids, self.tokenizer.eos_token_id), np.append(num_bytes, 0)
        trained = np.ones(len(ids), dtype=bool)
        if document.given and self.train_on != "all":
            trained[: np.searchsorted(starts, document.given)] = False
        return Encoded(ids, trained, num_bytes, cuttable=bool(trained.all()))

    def _tokens(self, texts: list[str], plain: bool = False) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each text ids ``[n]`` and their characters from and to; ``plain`` spells special tokens out."""
        if not texts:
            return []
        found = self.tokenizer(
            texts,
            add_special_tokens=plain,
            split_special_tokens=plain,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,  # it would warn of lengths that are cut later
        )
        tokens = []
        for ids, offsets in zip(found["input_ids"], found["offset_mapping"]):
            places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
            # Special tokens that a tokenizer adds stand at (0, 0): keep the order, so that it can be searched.
            tokens.append((np.asarray(ids, dtype=np.int64), np.maximum.accumulate(places[:, 0]), places[:, 1]))
        return tokens

    def _bytes(self, text: str, ids: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Bytes of text for each token; a space that no token claims counts for the next one."""
        sizes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        lengths = 1 + (sizes >= 0x80) + (sizes >= 0x800) + (sizes >= 0x10000).astype(np.int64)
        until = np.concatenate(([0], np.cumsum(lengths)))[np.maximum.accumulate(stops)]
        special = np.isin(ids, list(self.special_ids))
        return np.where(special, 0, np.diff(until, prepend=0))


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MalformedRow(f"it holds half a character ({text[error.start]!r})") from error
    return text
