"""The tokenizer of a run: one from Hugging Face, a bare ``tokenizer.json``, or a small one trained on the spot.

Whatever it was made of, the rest of the package sees a fast tokenizer of transformers with a chat template, if there is
one. No code that comes with a tokenizer is run.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lit_efficient.data.text.token_cache import END_OF_TEXT, train_tokenizer
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.checkpoints import missing_folder
from lit_efficient.files.sums import check_sums

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SMALLEST_VOCABULARY = 256 + 3  # bytes, and the three special tokens

# ChatML. What stands between generation and endgeneration is what the assistant writes, its end of turn included.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>")  # what a bare tokenizer.json may call the end of a text


def load_chat_tokenizer(name: str, chat_template: str | None = None) -> Any:
    """Load a tokenizer as a ``PreTrainedTokenizerFast`` or a subclass.

    Args:
        name: a folder or a name on the Hugging Face hub, a ``tokenizer.json``, or a checkpoint (``.ckpt``) of
            `LanguageModeling`, whose own it is.
        chat_template: a Jinja template, a file that holds one, or "chatml", to use instead of the tokenizer's own.

    Raises:
        ConfigurationError: If there is none, or if it is slow (Python-only ones cannot say where a token came from).
    """
    path = Path(name).expanduser()
    check_sums(path, weights=False)
    reader = _of_checkpoint if path.suffix == ".ckpt" else _bare
    tokenizer = reader(path) if path.is_file() else _pretrained(name)
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigurationError(f"tokenizer: {name} is a {type(tokenizer).__name__}; only fast tokenizers will do.")
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def train_chat_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE with a ChatML template, for runs that need no other model's tokens.

    Few texts may end below ``vocab_size``, which is at least `SMALLEST_VOCABULARY`.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(texts, vocab_size, (END_OF_TEXT, TURN_START, TURN_END)),
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START, TURN_END],
        chat_template=CHATML,
    )


def read_template(given: str) -> str:
    """The Jinja text of a template that was given as text, as the path of a file, or as "chatml".

    Raises:
        ConfigurationError: If it is a path of no file.
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
    """Hash of all that decides which ids a text becomes: vocabulary, rules, special tokens and template."""
    about = [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def _of_checkpoint(path: Path) -> Any:
    from lit_efficient.data.text.tokenizer_state import unpack_tokenizer
    from lit_efficient.files.checkpoints import read

    packed = read(path).get("language_modeling", {}).get("tokenizer")
    if packed is None:
        raise ConfigurationError(f"tokenizer: {path} is no checkpoint of LanguageModeling, or one without a tokenizer.")
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
            f"tokenizer: {path} has none of the tokens {', '.join(_ENDS)}, so a text's end would be unknown; give the "
            "folder that says which it is (tokenizer_config.json)."
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=known[0], pad_token=known[0])


def _pretrained(name: str) -> Any:
    from transformers import AutoTokenizer

    if (missing := missing_folder(name)) is not None:
        raise ConfigurationError(f"tokenizer: {missing}")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, use_fast=True)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(f"tokenizer: {name} cannot be loaded: {reason}") from error
