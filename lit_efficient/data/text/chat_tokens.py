"""Documents -> token ids, and which of them are learned: the assistant's turns, each with the token that ends it.

    trained[t] = the token begins inside a span of text that the assistant writes, or in white space before it

The spans are those of :mod:`~lit_efficient.data.text.turn_spans`. A turn ends with its own last token, if that is a
special one, else with the special token that follows. GLM's templates write none after an answer: the token that begins
the next turn ends it, and is put after the last one, too. A model that does not learn the end of a turn never stops.
Templates that leave it out of their marks are common, so a probe conversation is checked before any data is read.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from lit_efficient.data.text.chat_formats import Document, MalformedRow
from lit_efficient.data.text.left_out import left_out
from lit_efficient.data.text.turn_spans import ANSWERED, ASKED, PROBE, TrainOn, Turn, TurnSpans, encodable
from lit_efficient.errors import ConfigurationError

OnUntrainedEnd = Literal["refuse", "warn", "train"]


@dataclass
class Encoded:
    """A document as tokens."""

    ids: np.ndarray  # ``[n]`` int64
    trained: np.ndarray  # ``[n]`` bool: which ids are learned
    num_bytes: np.ndarray  # ``[n]`` int64: bytes of text that each id stands for, 0 for special tokens
    cuttable: bool = False  # whether it may be cut into pieces (a text), because all of it is learned
    turns: int = 0  # how many turns are learned
    ended: int = 0  # how many of these have their end learned
    # parts of its messages that the template does not write, with the number of turns
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
        control = {str(added[i]) for i in self.special_ids if i in added} - {tokenizer.unk_token}
        self.turns = TurnSpans(tokenizer, train_on, sorted(control))

    @functools.cached_property
    def end_of_turn(self) -> int | None:
        """The id of the special token that follows an answer in the template; None if there is none."""
        own = self._id_after([ASKED, ANSWERED], anywhere=True)
        return self.next_turn if own is None else own

    @functools.cached_property
    def next_turn(self) -> int | None:
        """The id that begins the user's turn and so ends an answer that has no end of its own; else None."""
        if self.turns.marked or self._id_after([ASKED, ANSWERED], anywhere=True) is not None:
            return None
        return self._id_after([ASKED, ANSWERED, ASKED])

    def _id_after(self, probe: Sequence[dict[str, Any]], anywhere: bool = False) -> int | None:
        """The special token that follows the probe's answer."""
        from jinja2 import TemplateError

        try:
            text = self.turns.rendered(probe, ())
        except TemplateError as error:
            raise ConfigurationError(f"tokenizer: the chat template refuses a short conversation: {error}") from error
        if PROBE not in text:
            raise ConfigurationError("tokenizer: the chat template does not write an answer that is a text.")
        ids, starts, stops = self._tokens([text])[0]
        after = int(np.searchsorted(starts, text.rindex(PROBE) + len(PROBE)))
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
            (found,) = self.encode([Document(messages=(ASKED, ANSWERED))])
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
                    chats.append((index, *self.turns.of(document)))
                else:
                    texts.append((index, encodable(document.text)))
            except MalformedRow as reason:
                found[index] = reason
        for (index, text, spans), tokens in zip(chats, self._tokens([text for _, text, _ in chats])):
            found[index] = replace(self._chat(text, spans, *tokens), left_out=left_out(documents[index], text))
        for (index, _), tokens in zip(texts, self._tokens([text for _, text in texts], plain=True)):
            found[index] = self._text(documents[index], *tokens)
        return found

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
            if end is not None and (not self.turns.marked or self.untrained_end == "train"):
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


def _first_token(text: str, place: int, starts: np.ndarray, stops: np.ndarray) -> int:
    """The first token of what begins at ``place``: " yes" of "Answer: " and "yes", as most words have their space."""
    first = int(np.searchsorted(starts, place))
    shared = first > 0 and stops[first - 1] > place and not text[starts[first - 1] : place].strip()
    return first - int(shared)
