"""Documents as token ids, and a mask of the tokens that contribute to the loss: those of the assistant's turns.

    trained[t] = the token begins in a span that the assistant writes, or in white space before it

`turn_spans` finds the spans. A turn ends with its last token if this is a special token, else with the special token
that follows. The templates of GLM write no such token: there the token that begins the next turn ends an answer, and it
is appended after the last answer.

A model that is not trained on the end of a turn never stops, and many templates leave the end out of their marks. So a
probe conversation is checked before any data is read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

from lit_efficient.data.text.chat_formats import Document, MalformedRow, Message
from lit_efficient.data.text.left_out import left_out
from lit_efficient.data.text.message_images import PicturedText, UnplacedImage, as_parts
from lit_efficient.data.text.pair_formats import Example
from lit_efficient.data.text.turn_choices import TurnChoices
from lit_efficient.data.text.turn_spans import ANSWERED, ASKED, PROBE, TrainOn, Turn, TurnSpans, encodable
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.hugging_face import chat_environment, encodes_alone

if TYPE_CHECKING:
    from lit_efficient.data.text.image_texts import ImageTexts

# Token of a single byte, in vocabularies of SentencePiece.
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_NOWHERE = np.zeros(0, dtype=np.int64)
OnUntrainedEnd = Literal["refuse", "warn", "train"]


@dataclass
class Encoded:
    """Document as tokens."""

    ids: np.ndarray  # [n] int64
    trained: np.ndarray  # [n] bool: True for ids that contribute to the loss
    num_bytes: np.ndarray  # [n] int64: bytes of text that each id stands for; 0 for special tokens, or if not wanted
    cuttable: bool = False  # True for a text that contributes as a whole, and may be cut into pieces
    turns: int = 0  # number of turns that contribute to the loss
    ended: int = 0  # number of these whose end contributes, too
    left_out: Mapping[str, int] = field(default_factory=dict)  # see `left_out.left_out`
    is_text: bool = False  # True for a text, False for a conversation
    control: str = ""  # first control token that a text spells
    end: int | None = None  # special token that ends a rendered text
    pictured: PicturedText | None = field(default=None, init=False)  # text and images, for the processor


class SplitRow(NamedTuple):
    """Row of a source with its split."""

    split: str
    entry: int  # number of the entry of ``train`` or ``val`` that the row belongs to
    place: str
    row: Example | MalformedRow  # content, or the reason why the row has none


class _Tokens(NamedTuple):
    """Tokens of a text, with the characters that they stand for."""

    ids: np.ndarray  # [n] int64
    starts: np.ndarray  # [n] first character; never decreases
    stops: np.ndarray  # [n] character after the last


class ChatTokens:
    """Tokenises documents with a tokenizer and its chat template.

    Args:
        tokenizer: Fast tokenizer of transformers.
        train_on: Parts that contribute to the loss. ``assistant``: all assistant turns. ``completion``: the last
            assistant turn, and the completion of a prompt with a completion. ``all``: all tokens.
        untrained_end: Reaction to a template whose end-of-turn token would not contribute to the loss: ``refuse``
            raises an error, ``warn`` keeps it so, ``train`` lets the token contribute.
        new_tokens: Tokens of the tokenizer that texts and messages may contain, each as one id.
        rendered: Texts hold the chat template already: their control tokens become ids, and nothing is added. Else
            control tokens in a text are tokenised as text.
        choices: Changes of conversations before the chat template writes them.
        processor: Processor to which the tokenizer belongs, for conversations with images.

    Raises:
        ConfigurationError: If the tokenizer has no token that ends a text.
    """

    def __init__(
        self,
        tokenizer: Any,
        train_on: TrainOn = "assistant",
        untrained_end: OnUntrainedEnd = "refuse",
        new_tokens: Sequence[str] = (),
        rendered: bool = False,
        choices: TurnChoices = TurnChoices(),  # noqa: B008 (frozen)
        processor: ImageTexts | None = None,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigurationError(
                "tokenizer: it has no eos_token, so a model could not be trained to end a text. Set one in "
                "tokenizer_config.json."
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.untrained_end = untrained_end
        self.rendered = rendered
        self.choices = choices
        self.processor = processor
        added = tokenizer.added_tokens_decoder
        self.special_ids = {index for index, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        # New tokens are content, also if the tokenizer calls them special.
        self.special_ids -= {tokenizer.convert_tokens_to_ids(token) for token in new_tokens}
        self.new_special = [str(token) for token in added.values() if token.special and str(token) in new_tokens]
        # The token for unknown text is no control token: it stands for text, and any text may contain its spelling. But
        # GPT-2 and others have one token for it and for the end of a text.
        shared = tokenizer.unk_token in (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
        if not shared and _may_be_unknown(tokenizer):
            self.special_ids.discard(tokenizer.unk_token_id)
        control = sorted(str(added[i]) for i in self.special_ids if i in added)
        if processor is not None:
            control += processor.placeholders  # a tokenizer need not call them special
        self.turns = TurnSpans(tokenizer, train_on, control, choices.template_kwargs, processor is not None)

    @functools.cached_property
    def end_of_turn(self) -> int | None:
        """Id of the special token that follows an answer in the template; None if there is none."""
        own = self._id_after([ASKED, ANSWERED], anywhere=True)
        return self.next_turn if own is None else own

    @functools.cached_property
    def next_turn(self) -> int | None:
        """Id of the token that begins the user's turn, and ends an answer that has no other end; else None."""
        if self.turns.marked or self._id_after([ASKED, ANSWERED], anywhere=True) is not None:
            return None
        return self._id_after([ASKED, ANSWERED, ASKED])

    def _way_out(self, probe: Sequence[Message]) -> str:
        """Return advice for a template that does not write a conversation."""
        from jinja2 import TemplateError

        template = str(self.tokenizer.get_chat_template())
        variables = {**self.tokenizer.special_tokens_map, **self.choices.template_kwargs}
        parts = [as_parts(message) for message in probe]
        with contextlib.suppress(TemplateError, TypeError):
            if PROBE in chat_environment(template).from_string(template).render(messages=parts, **variables):
                return "It reads lists of texts and images: name the model as processor in the place of tokenizer."
        return "Give another chat_template."

    def _id_after(self, probe: Sequence[Message], anywhere: bool = False) -> int | None:
        """Return the special token that follows the answer of a probe, directly or, with ``anywhere``, later."""
        from jinja2 import TemplateError

        try:
            text = self.turns.rendered(Document(tuple(probe)))
        except TemplateError as error:
            raise ConfigurationError(
                f"tokenizer: the chat template raises an error for a short conversation: {error}. Give another "
                "chat_template."
            ) from error
        if PROBE not in text:
            raise ConfigurationError(
                f"tokenizer: the chat template does not write the text of an answer. {self._way_out(probe)}"
            )
        tokens = self._tokens([text])[0]
        after = int(np.searchsorted(tokens.starts, text.rindex(PROBE) + len(PROBE)))
        if anywhere:
            return next((int(i) for i in tokens.ids[after:] if int(i) in self.special_ids), None)
        place = self._end_after(text, after, tokens)
        return None if place is None else int(tokens.ids[place])

    def check_end_of_turn(self) -> str | None:
        """Encode a probe conversation. Return None if its end of turn contributes to the loss, else the problem.

        Raises:
            ConfigurationError: If it does not contribute, and ``untrained_end`` is "refuse".
        """
        if self.end_of_turn is None:
            problem = "the chat template ends an answer with no special token"
            solution = "Give a chat_template that writes one after each answer, or set untrained_end to 'warn'"
        else:
            (found,) = self.encode([Document(messages=(ASKED, ANSWERED))])
            if isinstance(found, MalformedRow):  # some processors read no text without an image
                raise ConfigurationError(f"tokenizer: a short conversation without images cannot be read: {found}")
            if found.ended == found.turns:
                return None
            name = self.tokenizer.convert_ids_to_tokens(self.end_of_turn)
            problem = f"the chat template leaves its end-of-turn token {name} out of what is trained"
            solution = (
                "Set untrained_end to 'train' to train on the token nevertheless, or to 'warn' to keep it so, or give "
                "a chat_template that marks it"
            )
        if self.untrained_end == "refuse":
            raise ConfigurationError(f"tokenizer: {problem}, so a model trained on it would never stop. {solution}.")
        return problem

    def encode_rows(
        self, rows: Sequence[Example | MalformedRow], sized: Sequence[bool] = ()
    ) -> list[list[Encoded] | MalformedRow]:
        """Return the tokens of the documents of each row, or the reason why a row has none.

        Args:
            rows: The rows.
            sized: Whether the bytes of the tokens of each row are wanted. Empty: of no row.

        Raises:
            ConfigurationError: As in `encode`.
        """
        documents: list[Document] = []
        wanted: list[bool] = []
        for index, row in enumerate(rows):
            if not isinstance(row, MalformedRow):
                documents += row.documents
                wanted += [bool(sized) and sized[index]] * len(row.documents)
        remaining = iter(self.encode(documents, wanted))
        found: list[list[Encoded] | MalformedRow] = []
        for row in rows:
            if isinstance(row, MalformedRow):
                found.append(row)
                continue
            encoded: list[Encoded] = []
            reason = None
            for _ in row.documents:
                one = next(remaining)
                if isinstance(one, Encoded):
                    encoded.append(one)
                else:
                    reason = reason or one
            found.append(reason or encoded)
        return found

    def encode_chunk(self, chunk: Sequence[SplitRow]) -> list[list[Encoded] | MalformedRow]:
        """Return `encode_rows` of rows with splits and places. Other processes call it and need few imports for it."""
        return self.encode_rows([one.row for one in chunk], [one.split == "val" for one in chunk])

    def encode(self, documents: Sequence[Document], sized: Sequence[bool] = ()) -> list[Encoded | MalformedRow]:
        """Return the tokens of each document, or the reason why it has none. Batches of a few hundred are fast.

        Args:
            documents: The documents.
            sized: Whether the bytes of the tokens of each document are wanted. Empty: of all.

        Raises:
            ConfigurationError: If the turns that the template writes cannot be separated.
        """
        found: list[Encoded | MalformedRow] = [MalformedRow("")] * len(documents)
        chats: list[tuple[int, str, list[Turn]]] = []
        texts: list[tuple[int, str]] = []
        lost: dict[int, Counter[str]] = {}
        for index, document in enumerate(documents):
            try:
                if document.ids:
                    found[index] = self._ids(document)
                elif document.messages:
                    chosen = self.choices.apply(document, self._reads_thoughts)
                    text, turns = self.turns.find(chosen)
                    self.choices.check_written(chosen, text)
                    lost[index] = left_out(chosen, text) + self._unread_kwargs(chosen)
                    if self.processor is None:
                        chats.append((index, text, turns))
                    else:
                        found[index] = self._pictured(chosen, text, turns, lost[index])
                else:
                    texts.append((index, encodable(document.text)))
            except MalformedRow as reason:
                found[index] = reason
        for (index, text, turns), tokens in zip(chats, self._tokens([text for _, text, _ in chats])):
            encoded = self._chat(text, turns, tokens, not sized or sized[index])
            encoded.left_out = lost[index]
            found[index] = encoded
        for with_places in (True, False):
            group = []
            for index, text in texts:
                reads = not sized or sized[index] or self.rendered or self._leaves_prompt(documents[index])
                if reads == with_places:
                    group.append((index, text))
            tokenised = self._tokens([text for _, text in group], not self.rendered, with_places)
            for (index, _), tokens in zip(group, tokenised):
                found[index] = self._text(documents[index], tokens, not sized or sized[index])
        return found

    def _leaves_prompt(self, document: Document) -> bool:
        """Return whether a text begins with a prompt that does not contribute to the loss."""
        return bool(document.given) and self.train_on != "all"

    def _pictured(self, document: Document, text: str, turns: list[Turn], lost: Counter[str]) -> Encoded:
        """Return the tokens of a rendered conversation, in which the processor writes the tokens of images."""
        assert self.processor is not None
        if self.next_turn is not None and document.messages[-1]["role"] == "assistant":
            text += str(self.tokenizer.convert_ids_to_tokens(self.next_turn))
        try:
            row = self.processor.tokens(text, document.images)
        except UnplacedImage as reason:
            raise MalformedRow(str(reason)) from reason
        moved = [[(row.moved(start), row.moved(stop)) for start, stop in turn] for turn in turns]
        starts = np.maximum.accumulate(row.offsets[:, 0])
        found = self._chat(row.text, moved, _Tokens(row.ids, starts, row.offsets[:, 1]))
        for start, stop in row.spans:  # no model has to write the tokens of an image
            first, beyond = (int(i) for i in np.searchsorted(starts, (start, stop)))
            found.trained[first:beyond] = False
        found = replace(found, left_out=lost)
        found.pictured = PicturedText(text, document.images, row.sizes)
        return found

    @functools.cached_property
    def _reads_thoughts(self) -> bool:
        """True if the chat template writes thoughts that are in a field of a message."""
        from jinja2 import TemplateError

        thought = "Quagga-7"
        probe = Document((ASKED, {**ANSWERED, "reasoning_content": thought}))
        try:
            return self.choices.reasoning == "keep" and thought in self.turns.rendered(probe)
        except TemplateError:
            return False

    def _unread_kwargs(self, document: Document) -> Counter[str]:
        """Return the variables of a row for the chat template that the template does not read."""
        unread = document.template_kwargs.keys() - self.turns.variables
        return Counter(f"the variable {name!r}" for name in unread)

    def _ids(self, document: Document) -> Encoded:
        """Return the tokens of a row of tokens."""
        ids = np.asarray(document.ids, dtype=np.int64)
        unknown = ids[(ids < 0) | (ids >= len(self._token_bytes))]
        if len(unknown):
            raise MalformedRow(f"the tokenizer has {len(self._token_bytes)} ids, and input_ids holds {unknown[0]}")
        trained = np.asarray(document.trained, dtype=bool) | (self.train_on == "all")
        end = int(ids[-1]) if int(ids[-1]) in self.special_ids else None
        return Encoded(ids, trained, self._token_bytes[ids], cuttable=bool(trained.all()), end=end)

    @functools.cached_property
    def _token_bytes(self) -> np.ndarray:
        """Bytes of text that each id stands for, [V] int64; 0 for special tokens."""
        backend = self.tokenizer.backend_tokenizer
        by_bytes = "ByteLevel" in backend.to_str().partition('"decoder"')[2].partition('"model"')[0]
        added = self.tokenizer.added_tokens_decoder
        sizes = np.zeros(len(self.tokenizer), dtype=np.int64)
        for token, index in self.tokenizer.get_vocab().items():
            if index in self.special_ids or index >= len(sizes):
                continue
            if by_bytes and index not in added:  # one character for each byte
                sizes[index] = len(token)
            elif _BYTE.fullmatch(token):
                sizes[index] = 1
            else:
                sizes[index] = len(token.removeprefix("##").replace("\u2581", " ").encode())
        return sizes

    def _chat(self, text: str, turns: list[Turn], tokens: _Tokens, sized: bool = True) -> Encoded:
        """Return the tokens of a rendered conversation, in which the assistant writes ``turns``."""
        starts = tokens.starts
        trained = np.full(len(tokens.ids), self.train_on == "all")
        sizes = self._bytes(text, tokens) if sized else np.zeros_like(tokens.ids)
        ended = 0
        for turn in turns:
            for start, stop in turn:
                first, beyond = (int(i) for i in np.searchsorted(starts, (start, stop)))
                # An empty span, of an answer without text, must not take the token before it.
                if start < stop:
                    first = _first_token(text, start, tokens)
                trained[first:beyond] = True
            after = int(np.searchsorted(starts, start + len(text[start:stop].rstrip())))
            end = self._end_after(text, after, tokens)
            # A special token may end a part of the turn, such as a call, and the end of the turn follows.
            goes_on = end is not None and int(tokens.ids[end]) == self.end_of_turn != int(tokens.ids[after - 1])
            if first < after and int(tokens.ids[after - 1]) in self.special_ids and not goes_on:
                ended += 1
                continue
            if end is None and after == len(tokens.ids) and self.next_turn is not None:
                end = after
                tokens = tokens._replace(ids=np.append(tokens.ids, self.next_turn))
                sizes = np.append(sizes, 0)
                trained = np.append(trained, True)
            if end is None:
                continue
            if not self.turns.marked or self.untrained_end == "train":
                trained[first : end + 1] = True
            ended += bool(trained[end])
        return Encoded(tokens.ids, trained, sizes, turns=len(turns), ended=ended)

    def _end_after(self, text: str, place: int, tokens: _Tokens) -> int | None:
        """Return the place of the special token that follows with only white space before it, or None.

        The token that begins a text is no end.
        """
        ids, starts, stops = tokens
        # Some tokenizers use one token for both, which then does end a turn.
        ends = self.special_ids - ({self.tokenizer.bos_token_id} - {self.tokenizer.eos_token_id})
        while place < len(ids):
            if int(ids[place]) in ends:
                return place
            if text[starts[place] : stops[place]].strip():
                return None
            place += 1
        return None

    def _text(self, document: Document, tokens: _Tokens, sized: bool) -> Encoded:
        """Return the tokens of a text. One that is not rendered ends with the token that ends a text."""
        ids = tokens.ids
        if not self.rendered and (not len(ids) or ids[-1] != self.tokenizer.eos_token_id):
            ids = np.append(ids, self.tokenizer.eos_token_id)
        sizes = np.zeros(len(ids), dtype=np.int64)
        if sized:
            sizes[: len(tokens.ids)] = self._bytes(document.text, tokens)
        trained = np.ones(len(ids), dtype=bool)
        first = 0
        if self._leaves_prompt(document):
            first = _first_token(document.text, document.given, tokens)
            trained[:first] = False
        control = self.turns.control_token_in(document.text)
        if not self.rendered:
            return Encoded(ids, trained, sizes, cuttable=first == 0, is_text=True, control=control)
        end = self._last_control(document.text, tokens)
        return Encoded(ids, trained, sizes, turns=1, ended=int(end is not None), is_text=True, control=control, end=end)

    def _last_control(self, text: str, tokens: _Tokens) -> int | None:
        """Return the special token that ends a text, with only white space after it; None if there is none."""
        for index in reversed(range(len(tokens.ids))):
            if int(tokens.ids[index]) in self.special_ids:
                return int(tokens.ids[index])
            if text[tokens.starts[index] : tokens.stops[index]].strip():
                return None
        return None

    def _tokens(self, texts: list[str], plain: bool = False, with_places: bool = True) -> list[_Tokens]:
        """Return the tokens of each text.

        Args:
            texts: The texts.
            plain: Tokenise special tokens in the text as text.
            with_places: Return the characters that tokens stand for. Without them, ``starts`` and ``stops`` are empty.
        """
        if not texts:
            return []
        tokenizer = self._plain if plain else self.tokenizer
        if plain and not with_places and encodes_alone(tokenizer):
            # The Rust tokenizer is a quarter faster without places.
            backend = tokenizer.backend_tokenizer
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = True
            encodings = backend.encode_batch_fast(texts)
            return [_Tokens(np.array(one.ids, dtype=np.int64), _NOWHERE, _NOWHERE) for one in encodings]
        found = tokenizer(
            texts,
            add_special_tokens=plain,
            split_special_tokens=plain,
            return_offsets_mapping=with_places,
            return_attention_mask=False,
            verbose=False,  # it would warn about documents that are cut later
        )
        tokens = []
        if not with_places:
            return [_Tokens(np.asarray(ids, dtype=np.int64), _NOWHERE, _NOWHERE) for ids in found["input_ids"]]
        for ids, offsets in zip(found["input_ids"], found["offset_mapping"]):
            places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
            # Special tokens that a tokenizer adds have the place (0, 0). Sorted starts allow a binary search.
            starts = np.maximum.accumulate(places[:, 0])
            tokens.append(_Tokens(np.asarray(ids, dtype=np.int64), starts, places[:, 1]))
        return tokens

    @functools.cached_property
    def _plain(self) -> Any:
        """Tokenizer for texts. It differs from the given one if that calls new tokens special, and spells them out."""
        if not self.new_special:
            return self.tokenizer
        from transformers import PreTrainedTokenizerFast

        rules = json.loads(self.tokenizer.backend_tokenizer.to_str())
        for token in rules["added_tokens"]:
            if token["content"] in self.new_special:
                token["special"] = False
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(rules)))

    def _bytes(self, text: str, tokens: _Tokens) -> np.ndarray:
        """Return the bytes of text of each token [n]. A space that belongs to no token counts for the next token."""
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        lengths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000).astype(np.int64)  # in UTF-8
        # The bytes up to the end of each token; the difference of neighbours is the size of a token.
        until = np.concatenate(([0], np.cumsum(lengths)))[np.maximum.accumulate(tokens.stops)]
        special = np.isin(tokens.ids, list(self.special_ids))
        return np.where(special, 0, np.diff(until, prepend=0))


def _may_be_unknown(tokenizer: Any) -> bool:
    """Whether a text can have a part that the tokenizer does not know. BPE over bytes knows each byte."""
    model = tokenizer.backend_tokenizer.model
    return not isinstance(model, BPE) or model.byte_fallback or model.unk_token is not None


def _first_token(text: str, place: int, tokens: _Tokens) -> int:
    """Return the first token of the text at ``place``.

    A token that begins in white space before it counts: " yes" is the first token of "yes" in "Answer: yes".
    """
    first = int(np.searchsorted(tokens.starts, place))
    if first > 0 and tokens.stops[first - 1] > place and not text[tokens.starts[first - 1] : place].strip():
        return first - 1
    return first
