"""Tokenizers: loaded from Hugging Face or a bare ``tokenizer.json``, trained on texts, and stored in checkpoints.

`load_chat_tokenizer` and `train_chat_tokenizer` return a fast tokenizer of transformers, with a chat template if it has
one. No code of a tokenizer is run.

A checkpoint holds the tokenizer as primitives: its JSON (https://huggingface.co/docs/tokenizers) and, for a tokenizer
of transformers, its special tokens and chat template. So weights are never used with the tokens of another tokenizer
unnoticed, and a checkpoint needs no file and no download.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_efficient.data.text.token_cache import END_OF_TEXT, train_tokenizer
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.files.checkpoints import missing_folder
from lit_efficient.files.sums import check_sums

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
# Bytes, and the three special tokens.
SMALLEST_VOCABULARY = 256 + 3

# ChatML. The text between generation and endgeneration is written by the assistant, including its end of turn.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Names of the end of a text in a bare tokenizer.json.
_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_chat_tokenizer(name: str, chat_template: str | None = None) -> Any:
    """Load a tokenizer as a ``PreTrainedTokenizerFast`` or a subclass.

    Args:
        name: Folder or name on the Hugging Face hub, ``tokenizer.json``, or checkpoint (``.ckpt``) of
            `LanguageModeling`, whose tokenizer is used.
        chat_template: Jinja template, path of a file that holds one, or "chatml", to replace the tokenizer's own.

    Raises:
        ConfigurationError: If there is no such tokenizer, or it is slow (a Python-only one cannot tell the characters
            of a token).
    """
    path = Path(name).expanduser()
    # A tokenizer that is damaged may still load, and give other ids.
    check_sums(path, weights=False)
    if not path.is_file():
        tokenizer = _pretrained(name)
    elif path.suffix == ".ckpt":
        tokenizer = _of_checkpoint(path)
    else:
        tokenizer = _bare(path)
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigurationError(
            f"tokenizer: {name} is a {type(tokenizer).__name__}, and only fast tokenizers are supported. Convert it to "
            "one (tokenizer.json)."
        )
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def train_chat_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE with a ChatML template, for models that are trained from scratch.

    Args:
        texts: Texts to train on. With few texts the tokenizer may have fewer ids than ``vocab_size``.
        vocab_size: Number of ids, at least `SMALLEST_VOCABULARY`.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(texts, vocab_size, (END_OF_TEXT, TURN_START, TURN_END)),
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START, TURN_END],
        chat_template=CHATML,
    )


def add_new_tokens(tokenizer: Any, tokens: Sequence[str]) -> None:
    """Add the tokens that a tokenizer lacks, in place.

    They are not special, so that decoding a generated text keeps them.

    Raises:
        ConfigurationError: If a token is one that the tokenizer needs for another purpose.
    """
    from tokenizers import AddedToken

    taken = {str(token) for token in tokenizer.special_tokens_map.values() if isinstance(token, str)}
    for token in tokens:
        if token in taken:
            raise refusal("data", "chat.new_tokens", "tokens without another purpose in the tokenizer", token)
    known = tokenizer.get_vocab()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens if token not in known])


def read_template(given: str) -> str:
    """Return the Jinja text of a template that is given as text, as the path of a file, or as "chatml".

    Raises:
        ConfigurationError: If a path names no file that can be read.
    """
    if given == "chatml":
        return CHATML
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"chat_template: neither Jinja nor a file that can be read: {given!r}.") from error


def fingerprint(tokenizer: Any) -> str:
    """Return a hash of all that decides the ids of a text: vocabulary, rules, special tokens and template."""
    # The template is included, because it decides the text that is tokenised.
    about = [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def pack_tokenizer(tokenizer: Any, stop: Iterable[int] = ()) -> dict[str, Any]:
    """Return a tokenizer as strings and numbers for a checkpoint.

    Args:
        tokenizer: Tokenizer of the tokenizers library, or a fast tokenizer of transformers.
        stop: Further ids that end a text or a turn.

    Raises:
        ConfigurationError: If the tokenizer cannot be written as JSON.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        allowed = "a tokenizers.Tokenizer or a fast tokenizer of transformers"
        raise refusal("data", "tokenizer", allowed, type(tokenizer).__name__)
    # Strings and numbers only: a checkpoint is loaded with weights_only=True.
    packed: dict[str, Any] = {"json": backend.to_str(), "stop": sorted(stop)}
    if backend is not tokenizer:
        special = {name: getattr(tokenizer, name, None) for name in _SPECIAL}
        packed["special"] = {name: str(token) for name, token in special.items() if token}
        packed["chat_template"] = tokenizer.chat_template
    return packed


def unpack_tokenizer(packed: Mapping[str, Any]) -> Any:
    """Return the tokenizer that `pack_tokenizer` packed, of the same kind."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(packed["json"])
    if "special" not in packed:
        return backend
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **packed["special"])
    tokenizer.chat_template = packed["chat_template"]
    return tokenizer


def save_tokenizer(packed: Mapping[str, Any], folder: str | Path) -> None:
    """Write a packed tokenizer as files that ``AutoTokenizer.from_pretrained`` loads."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = unpack_tokenizer(packed)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        ends = {}
        if tokenizer.token_to_id(END_OF_TEXT) is not None:
            ends = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)
    tokenizer.save_pretrained(str(folder))


def token_ids(tokenizer: Any) -> dict[str, int]:
    """Return ``vocab_size`` and the ids of special tokens, with the names of a model's configuration."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    if hasattr(tokenizer, "backend_tokenizer"):
        ids = {name: getattr(tokenizer, name, None) for name in names}
        size = len(tokenizer)
    else:
        ids = dict.fromkeys(names, tokenizer.token_to_id(END_OF_TEXT))
        size = tokenizer.get_vocab_size()
    return {"vocab_size": size, **{name: value for name, value in ids.items() if value is not None}}


def _of_checkpoint(path: Path) -> Any:
    from lit_efficient.files.checkpoints import read

    packed = read(path).get("language_modeling", {}).get("tokenizer")
    if packed is None:
        raise ConfigurationError(f"tokenizer: {path} is no checkpoint of LanguageModeling, or has no tokenizer.")
    return unpack_tokenizer(packed)


def _bare(path: Path) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigurationError(f"tokenizer: {path} holds no tokenizer of the tokenizers library.") from error
    known = [token for token in _ENDS if tokenizer.token_to_id(token) is not None]
    if not known:
        raise ConfigurationError(
            f"tokenizer: {path} has none of the tokens {', '.join(_ENDS)}, so the token that ends a text is unknown. "
            "Give the folder with tokenizer_config.json, which names the token."
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=known[0], pad_token=known[0])


def _pretrained(name: str) -> Any:
    from transformers import AutoTokenizer

    missing = missing_folder(name)
    if missing is not None:
        raise ConfigurationError(f"tokenizer: {missing}")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, use_fast=True)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(f"tokenizer: {name} cannot be loaded: {reason}") from error
