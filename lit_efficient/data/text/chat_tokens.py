"""Documents -> token ids, and which of them are learned: the assistant's turns, each with the token that ends it.

    trained[t] = the token begins inside a span of text that the assistant writes, or in white space before it

The spans come from the template's own ``{% generation %}`` marks. Of a template without them a twin with marks is made
(:mod:`~lit_efficient.data.text.turn_marks`): the assistant's turn is what its message writes, less the beginning that
the generation prompt would write there. Where a twin does not show the turns, each prefix of the conversation is
rendered: turn i is what the text of turns 0..i has more than that of turns 0..i-1 with the generation prompt. Both must
be prefixes of the whole; where they are not, nothing is guessed: the row is malformed, or the template is refused if
that is so of a plain conversation.

A turn ends with its own last token, if that is a special one, else with the special token that follows. GLM's templates
write none after an answer: the token that begins the next turn ends it, and is put after the last one, too. A model
that does not learn the end of a turn never stops. Templates that leave it out of their marks are common, so a probe
conversation is checked before any data is read.
"""

import bisect
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from lit_efficient.data.text.chat_formats import Document, MalformedRow
from lit_efficient.data.text.left_out import call_words, left_out, spoken, stands
from lit_efficient.data.text.turn_marks import Placed, place
from lit_efficient.errors import ConfigurationError

TrainOn = Literal["assistant", "completion", "all"]
OnUntrainedEnd = Literal["refuse", "warn", "train"]
Span = tuple[int, int]
"""Characters from, to."""
Turn = list[Span]
"""What is learned of a turn, the end of which is its last part's."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASKED, _PROBE = {"role": "user", "content": "Question"}, "Zebra-7"
_ANSWERED = {"role": "assistant", "content": _PROBE}


class _Inseparable(MalformedRow):
    """Turns that the template writes differently when more follows."""


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
        left_out: parts of its messages that the template does not write, with the number of turns.
    """

    ids: np.ndarray
    trained: np.ndarray
    num_bytes: np.ndarray
    cuttable: bool = False
    turns: int = 0
    ended: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)


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
        own = self._id_after([_ASKED, _ANSWERED], anywhere=True)
        return self.next_turn if own is None else own

    @functools.cached_property
    def next_turn(self) -> int | None:
        """The id that begins the user's turn and so ends an answer that has no end of its own; else None."""
        if self.marked or self._id_after([_ASKED, _ANSWERED], anywhere=True) is not None:
            return None
        return self._id_after([_ASKED, _ANSWERED, _ASKED])

    def _id_after(self, probe: Sequence[dict[str, Any]], anywhere: bool = False) -> int | None:
        """The special token that follows the probe's answer."""
        from jinja2 import TemplateError

        try:
            text = self._rendered(probe, ())
        except TemplateError as error:
            raise ConfigurationError(f"tokenizer: the chat template refuses a short conversation: {error}") from error
        if _PROBE not in text:
            raise ConfigurationError("tokenizer: the chat template does not write an answer that is a text.")
        ids, starts, stops = self._tokens([text])[0]
        after = int(np.searchsorted(starts, text.rindex(_PROBE) + len(_PROBE)))
        if anywhere:
            return next((int(i) for i in ids[after:] if int(i) in self.special_ids), None)
        place = self._end_after(text, after, ids, starts, stops)
        return None if place is None else int(ids[place])

    def check_end_of_turn(self) -> str | None:
        """Encode a probe conversation: None if its end of turn is learned, else what is wrong.

        Raises:
            ConfigurationError: If it is not, and ``untrained_end`` is "refuse".
        """
        if self.end_of_turn is None:
            wrong = "the chat template ends an answer with no special token"
            way_out = "Give a chat_template that writes one after each answer, or set untrained_end to 'warn'"
        else:
            (found,) = self.encode([Document(messages=(_ASKED, _ANSWERED))])
            assert isinstance(found, Encoded)
            if found.ended == found.turns:
                return None
            name = self.tokenizer.convert_ids_to_tokens(self.end_of_turn)
            wrong = f"the chat template leaves its end-of-turn token {name} out of what is trained"
            way_out = (
                "Set untrained_end to 'train' to learn the token nevertheless, to 'warn' to go on as it is, or give a "
                "chat_template that marks it"
            )
        if self.untrained_end == "refuse":
            raise ConfigurationError(f"tokenizer: {wrong}, so a model trained on it would never stop. {way_out}.")
        return wrong

    def encode(self, documents: Sequence[Document]) -> list[Encoded | MalformedRow]:
        """The tokens of each document, or why there are none; a few hundred at a time are fast.

        Raises:
            ConfigurationError: If the template is one whose turns cannot be separated.
        """
        found: list[Encoded | MalformedRow] = [MalformedRow("")] * len(documents)
        chats: list[tuple[int, str, list[Turn]]] = []
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
            found[index] = replace(self._chat(text, spans, *tokens), left_out=left_out(documents[index], text))
        for (index, _), tokens in zip(texts, self._tokens([text for _, text in texts], plain=True)):
            found[index] = self._text(documents[index], *tokens)
        return found

    def _render(self, document: Document) -> tuple[str, list[Turn]]:
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
                return _encodable(text), [[(0, len(text))]]
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
        return _encodable(text), spans

    @functools.cached_property
    def _separates(self) -> bool:
        """Whether the turns of a plain conversation can be separated: where not, the template is at fault."""
        from jinja2 import TemplateError

        plain = Document((_ASKED, _ANSWERED, _ASKED, _ANSWERED))
        try:
            text = self._rendered(plain.messages, ())
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

    def _placed(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], prompt: bool = False) -> Placed | None:
        template = str(self.tokenizer.get_chat_template(tools=list(tools) or None))
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
            before = messages[:index] if any(m["role"] == "user" for m in messages[:index]) else [_ASKED]
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
            before = self._rendered(messages[:index], document.tools, prompt=True)
            until = self._rendered(messages[: index + 1], document.tools)
            if not (text.startswith(before) and text.startswith(until)):
                raise _Inseparable(
                    "the chat template writes the beginning of a conversation differently when more follows "
                    f"(seen at turn {index + 1} of {len(messages)}), so the assistant's turns cannot be separated"
                )
            parts.append([(len(before), len(until.rstrip()))])
        return parts

    def _chat(self, text: str, turns: list[Turn], ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Encoded:
        trained = np.full(len(ids), self.train_on == "all")
        sizes = self._bytes(text, ids, stops)
        ended = 0
        for turn in turns:
            for start, stop in turn:
                first, beyond = (int(i) for i in np.searchsorted(starts, (start, stop)))
                if start < stop:
                    first = _first_token(text, start, starts, stops)
                trained[first:beyond] = True
            after = int(np.searchsorted(starts, start + len(text[start:stop].rstrip())))
            if first < after and int(ids[after - 1]) in self.special_ids:
                ended += 1
                continue
            end = self._end_after(text, after, ids, starts, stops)
            if end is None and after == len(ids) and self.next_turn is not None:
                end, ids, sizes = after, np.append(ids, self.next_turn), np.append(sizes, 0)
                trained = np.append(trained, True)
            if end is not None and (not self.marked or self.untrained_end == "train"):
                trained[first : end + 1] = True
            ended += bool(end is not None and trained[end])
        return Encoded(ids, trained, sizes, turns=len(turns), ended=ended)

    def _end_after(self, text: str, place: int, ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> int | None:
        """Where the special token stands that follows, with nothing but white space before it; none begins a text."""
        ends = self.special_ids - ({self.tokenizer.bos_token_id} - {self.tokenizer.eos_token_id})
        while place < len(ids) and int(ids[place]) not in ends and not text[starts[place] : stops[place]].strip():
            place += 1
        return place if place < len(ids) and int(ids[place]) in ends else None

    def _text(self, document: Document, ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Encoded:
        num_bytes = self._bytes(document.text, ids, stops)
        if not len(ids) or ids[-1] != self.tokenizer.eos_token_id:
            ids, num_bytes = np.append(ids, self.tokenizer.eos_token_id), np.append(num_bytes, 0)
        trained = np.ones(len(ids), dtype=bool)
        if document.given and self.train_on != "all":
            trained[: _first_token(document.text, document.given, starts, stops)] = False
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


def _check_written(message: Mapping[str, Any], index: int, text: str, turn: Turn) -> None:
    """Refuse a turn that is learned without what it says; its beginning may stand in what the prompt writes."""
    own = "".join(text[start:stop] for start, stop in turn)
    lacking = [f"the call of {words!r}" for words in call_words(message) if not stands(words, own)]
    words = spoken(message["content"]).strip()
    if not stands(words, text[max(turn[0][0] - len(words) + 1, 0) : turn[-1][1]]):
        lacking.append("the text")
    if lacking:
        raise MalformedRow(f"the chat template leaves {lacking[0][:80]} in turn {index + 1} out")


def _first_token(text: str, place: int, starts: np.ndarray, stops: np.ndarray) -> int:
    """The first token of what begins at ``place``: " yes" of "Answer: " and "yes", as most words have their space."""
    first = int(np.searchsorted(starts, place))
    shared = first > 0 and stops[first - 1] > place and not text[starts[first - 1] : place].strip()
    return first - int(shared)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MalformedRow(f"it holds half a character ({text[error.start]!r})") from error
    return text
