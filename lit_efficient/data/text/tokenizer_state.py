"""A tokenizer as primitives in a checkpoint, and back: weights must never meet tokens of another one unnoticed.

What is kept is the tokenizer's own JSON (https://huggingface.co/docs/tokenizers) and, for one of transformers, its
special tokens and chat template. No file is needed to read it back, and nothing is downloaded.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lit_efficient.errors import refusal

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def pack_tokenizer(tokenizer: Any, stop: Iterable[int] = ()) -> dict[str, Any]:
    """A tokenizer as strings and numbers, with the ids that end a text or a turn besides its own.

    Raises:
        ConfigurationError: for a tokenizer that cannot be written as JSON.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        allowed = "a tokenizers.Tokenizer or a fast tokenizer of transformers"
        raise refusal("data", "tokenizer", allowed, type(tokenizer).__name__)
    packed: dict[str, Any] = {"json": backend.to_str(), "stop": sorted(stop)}
    if backend is not tokenizer:
        packed["special"] = {name: str(token) for name in _SPECIAL if (token := getattr(tokenizer, name, None))}
        packed["chat_template"] = tokenizer.chat_template
    return packed


def unpack_tokenizer(packed: Mapping[str, Any]) -> Any:
    """The tokenizer that `pack_tokenizer` has written, of the same kind."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(packed["json"])
    if "special" not in packed:
        return backend
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **packed["special"])
    tokenizer.chat_template = packed["chat_template"]
    return tokenizer


def save_tokenizer(packed: Mapping[str, Any], folder: str | Path) -> None:
    """Write the files from which ``AutoTokenizer.from_pretrained`` loads a packed tokenizer."""
    from transformers import PreTrainedTokenizerFast

    from lit_efficient.data.text.token_cache import END_OF_TEXT

    tokenizer = unpack_tokenizer(packed)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        end = {} if tokenizer.token_to_id(END_OF_TEXT) is None else {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **end)
    tokenizer.save_pretrained(str(folder))


def token_ids(tokenizer: Any) -> dict[str, int]:
    """Number of ids as ``vocab_size``, and the ids of special tokens, as a model's configuration names them."""
    if hasattr(tokenizer, "backend_tokenizer"):
        ids = {f"{name}_id": getattr(tokenizer, f"{name}_id", None) for name in _SPECIAL[:3]}
        return {"vocab_size": len(tokenizer)} | {name: value for name, value in ids.items() if value is not None}
    from lit_efficient.data.text.token_cache import END_OF_TEXT

    end = tokenizer.token_to_id(END_OF_TEXT)
    ends = {} if end is None else {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    return {"vocab_size": tokenizer.get_vocab_size()} | ends
