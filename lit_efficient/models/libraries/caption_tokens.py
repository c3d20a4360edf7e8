"""Tokenizers of captions, which return ids of one fixed length; one of them needs no files and has a token per byte."""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.files.sums import check_sums

USUAL_LENGTH = 77  # of CLIP
_NO_LIMIT = 100_000  # tokenizers without a limit declare a number of thirty digits


class CaptionTokens:
    """Tokenizer of the library ``tokenizers`` that truncates and pads to one length, special tokens included.

    It warns about the first caption that is truncated.

    Args:
        json: The tokenizer in the format of the library.
        pad: Id of the padding.
        end: Id of the token that ends a text, or ``None``.
        length: Length of the result.
        side: Side of the padding.
        around: Text before and after each caption.
    """

    def __init__(
        self,
        json: str,
        pad: int,
        end: int | None,
        length: int,
        side: Literal["right", "left"],
        around: Sequence[str] = ("", ""),
    ) -> None:
        from tokenizers import Tokenizer

        self.json = json
        self.pad = pad
        self.end = end
        self.length = length
        self.side = side
        self.around = list(around)
        self._tokenizer = Tokenizer.from_str(json)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(length)
        self._warned = False
        self._words: dict[str, str] = {}  # words that stand for several tokens, and these tokens

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids."""
        return self._tokenizer.get_vocab_size()

    def encode(self, caption: str) -> tuple[Tensor, Tensor]:
        """Return ids [L] int64, and true for tokens that are not padding [L] bool.

        A caption without tokens gets one true padding token, since attention needs at least one.
        """
        (row,) = self.encode_chunks(caption, 1)
        return row

    def encode_chunks(self, caption: str, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return ``count`` chunks of a caption, each as :meth:`encode` returns it, with special tokens of its own.

        Chunks after the end of the caption are those of the empty caption.
        """
        before, after = self.around
        if self._words:
            words = sorted(map(re.escape, self._words), key=len, reverse=True)
            caption = re.sub("|".join(words), lambda found: self._words[found[0]], caption)
        encoding = self._tokenizer.encode(before + caption + after)
        chunks = [encoding, *encoding.overflowing]
        if len(chunks) > count and not self._warned:
            self._warned = True
            limit = f"max_length={self.length} tokens"
            if count > 1:
                limit = f"{count} chunks of {limit}"
            warnings.warn(
                f"A caption has more than {limit} and is truncated. Others will be, too, without further warnings: "
                f"{caption[:80]!r}",
                stacklevel=3,
            )
        while len(chunks) < count:
            chunks.append(self._tokenizer.encode(before + after))
        return [self._padded(chunk.ids) for chunk in chunks[:count]]

    def _padded(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        ids = ids or [self.pad]
        missing = self.length - len(ids)
        row = torch.tensor(ids)
        seen = torch.ones(len(ids), dtype=torch.bool)
        sides = (0, missing) if self.side == "right" else (missing, 0)
        return torch.nn.functional.pad(row, sides, value=self.pad), torch.nn.functional.pad(seen, sides)

    def ids_of(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def id_of(self, token: str) -> int:
        """Return the id of a token."""
        found: int | None = self._tokenizer.token_to_id(token)
        assert found is not None, token
        return found

    def with_words(self, words: Mapping[str, Sequence[str]], who: str) -> "CaptionTokens":
        """Return the same tokenizer with new tokens.

        Args:
            words: For each new word the tokens that it stands for in captions, the first of which is the word itself.
            who: Argument, for messages.

        Raises:
            ConfigurationError: If the tokenizer has one of the tokens already.
        """
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.json)
        for token in (token for tokens in words.values() for token in tokens):
            if tokenizer.token_to_id(token) is not None:
                raise ConfigurationError(f"{who}: the tokenizer has {token!r} already: choose another word")
            tokenizer.add_tokens([token])
        grown = CaptionTokens(**(self.state() | {"json": tokenizer.to_str()}))
        grown._words = {word: " ".join(tokens) for word, tokens in words.items() if len(tokens) > 1}
        return grown

    def piece(self, token: int) -> str:
        """Return the text of a token as the tokenizer stores it."""
        return str(self._tokenizer.id_to_token(token))

    def state(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {name: getattr(self, name) for name in ("json", "pad", "end", "length", "side", "around")}


def replace_length(tokens: CaptionTokens, length: int) -> CaptionTokens:
    """Return the same tokenizer for captions of another length."""
    made = CaptionTokens(**(tokens.state() | {"length": length}))
    made._words = tokens._words
    return made


def load_tokenizer(
    name: str,
    subfolder: str,
    revision: str | None,
    length: int | None,
    side: Literal["right", "left"],
    around: Sequence[str] | None = ("", ""),
) -> CaptionTokens:
    """Load a tokenizer.

    Args:
        name: ``bytes``, a ``tokenizer.json``, a folder, or a name on a hub.
        subfolder: Folder of the tokenizer in a pipeline.
        revision: Branch, tag or commit on a hub.
        length: Length of encoded captions, in tokens. ``None`` takes the tokenizer's own limit, or 77.
        side: Side of the padding.
        around: Text before and after each caption. ``None`` takes a user's turn of the tokenizer's chat template.

    Raises:
        ConfigurationError: If there is no tokenizer, or it is not one of the library ``tokenizers``.
    """
    if name == "bytes":
        return CaptionTokens(_bytes(), 0, 1, length or USUAL_LENGTH, side, around or ("", ""))
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    check_sums(name, subfolder, weights=False)
    try:
        if Path(name).is_file():
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                name, subfolder=subfolder, revision=revision, trust_remote_code=False
            )
        json = tokenizer.backend_tokenizer.to_str()
        if around is None:
            around = _turn(tokenizer)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        allowed = f"bytes, a tokenizer.json, a folder or a hub's name with a fast tokenizer (cannot be read: {reason})"
        raise refusal("TextEncoderConfig", "captions.tokenizer", allowed, f"{name}/{subfolder}".rstrip("/")) from error
    if length is None:
        length = USUAL_LENGTH
        if tokenizer.model_max_length < _NO_LIMIT:
            length = tokenizer.model_max_length
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = end or 0
    return CaptionTokens(json, pad, end, length, side, around)


def _turn(tokenizer: Any) -> list[str]:
    """Return the text before and after a user's message in a chat that the model is to answer."""
    mark = "CAPTION"
    messages = [{"role": "user", "content": mark}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    before, _, after = text.partition(mark)
    return [before, after]


def _bytes() -> str:
    """Return a tokenizer in which padding is 0, the end token 1, and byte b is b + 2. The end token follows every
    caption.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    symbols = _byte_symbols()
    vocabulary = {"<pad>": 0, "<end>": 1} | {symbol: 2 + byte for byte, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    return str(tokenizer.to_str())


def _byte_symbols() -> list[str]:
    """Return the visible character that ``tokenizers`` uses for each byte: itself if visible, else one from code 256
    on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]
