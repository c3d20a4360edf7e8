"""Tokenizers: loaded from Hugging Face or a bare ``tokenizer.json``, trained on texts, and stored in checkpoints.

`load_chat_tokenizer` and `train_chat_tokenizer` return a fast tokenizer of transformers, with a chat template if it has
one. No code of a tokenizer is run.

A checkpoint holds the tokenizer as texts: its JSON (https://huggingface.co/docs/tokenizers) and, for a tokenizer of
transformers, the other files that ``save_pretrained`` writes. So weights are never used with the tokens of another
tokenizer unnoticed, a checkpoint needs no file and no download, and an exported tokenizer keeps the class, the side of
the padding, the largest length and all other settings of the original.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lit_efficient.data.text.token_cache import END_OF_TEXT, train_tokenizer
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.files.checkpoints import missing_folder
from lit_efficient.files.sums import check_sums
from lit_efficient.models.libraries.gguf_file import is_gguf, read_tokenizer

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
# Bytes, and the three special tokens.
SMALLEST_VOCABULARY = 256 + 3

# ChatML. The text between generation and endgeneration is written by the assistant, including its end of turn.
_TOOLS = (
    "{% if messages and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{{ 'These tools can be called:\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    '{{ \'A call is written as\n<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>\' }}'
)
_CALLS = (
    "{% for call in message['tool_calls'] or [] %}{% set function = call['function'] or call %}"
    "{{ '\n' if message['content'] or not loop.first }}"
    "{{ '<tool_call>\n' + {'name': function['name'], 'arguments': function['arguments']} | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}"
)
# ChatML, with tools and their calls as Hermes 2 Pro and Qwen write them.
CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' }}" + _TOOLS + "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] or '' }}" + _CALLS + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Names of the end of a text in a bare tokenizer.json.
_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>")
_JSON = "tokenizer.json"
# Options with which transformers loaded a tokenizer, which it writes into tokenizer_config.json.
_LOADING = ("cache_dir", "is_local", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


def load_chat_tokenizer(name: str, chat_template: str | None = None) -> Any:
    """Load a tokenizer as a ``PreTrainedTokenizerFast`` or a subclass.

    Args:
        name: Folder or name on the Hugging Face hub, ``tokenizer.json``, GGUF file, or checkpoint (``.ckpt``) of
            `LanguageModeling`, whose tokenizer is used.
        chat_template: Jinja template, path of a file that holds one, or "chatml", to replace the tokenizer's own.

    Raises:
        ConfigurationError: If there is no such tokenizer, or it is slow (a Python-only one cannot tell the characters
            of a token).
    """
    path = Path(name).expanduser()
    # A tokenizer that is damaged may still load, and give other ids.
    check_sums(path, weights=False)
    if not path.is_file() or is_gguf(name):
        tokenizer = _pretrained(name)
    elif path.suffix == ".ckpt":
        tokenizer = _of_checkpoint(path)
    else:
        tokenizer = _bare(path)
    check_fast(tokenizer, name)
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def check_fast(tokenizer: Any, name: str) -> None:
    """Raise ConfigurationError for a tokenizer that cannot tell the characters of a token."""
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigurationError(
            f"tokenizer: {name} is a {type(tokenizer).__name__}, and only fast tokenizers are supported. Convert it to "
            "one (tokenizer.json)."
        )


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


def unknown_ids(tokenizer: Any, base: str) -> list[int]:
    """Return the ids of the tokens that the tokenizer of a base lacks, or has under another id.

    Args:
        tokenizer: Tokenizer of the tokenizers library, or a fast tokenizer of transformers.
        base: Folder or name of a model. The list is empty if it has no tokenizer that can be loaded.
    """
    try:
        known = _pretrained(base).get_vocab()
    except Exception:  # it may need packages that are absent, and each class raises errors of its own
        return []
    return sorted(index for token, index in tokenizer.get_vocab().items() if known.get(token) != index)


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
    """Return a hash of a tokenizer with all of its settings and its template.

    Settings that change no id of a text are included, because a run takes its tokenizer from the cache.
    """
    return hashlib.sha256(json.dumps(pack_tokenizer(tokenizer), sort_keys=True).encode()).hexdigest()


def pack_tokenizer(
    tokenizer: Any, stop: Iterable[int] = (), beside: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return a tokenizer as strings and numbers for a checkpoint.

    Args:
        tokenizer: Tokenizer of the tokenizers library, or a fast tokenizer of transformers.
        stop: Further ids that end a text or a turn.
        beside: The processor of a model of images and text, as of `pack_processor`.

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
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(tokenizer, Path(folder))
            packed["files"] = _texts_in(Path(folder))
    if beside:
        packed |= {"files": {**beside["files"], **packed["files"]}, "processor": beside["processor"]}
    return packed


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer of transformers as ``save_pretrained`` does, without the options with which it was loaded."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    kept = {name: value for name, value in settings.items() if name not in _LOADING}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _texts_in(folder: Path) -> dict[str, str]:
    """Return the texts of the files in a folder by their relative paths, except the tokenizer's JSON."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _JSON)
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in files}


def unpack_tokenizer(packed: Mapping[str, Any]) -> Any:
    """Return the tokenizer that `pack_tokenizer` packed, of the same kind."""
    from tokenizers import Tokenizer

    if "files" not in packed:
        return Tokenizer.from_str(packed["json"])
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(packed, folder)
        return _pretrained(folder)


def of_transformers(tokenizer: Any) -> Any:
    """Return a tokenizer as one of transformers. One of the tokenizers library ends texts by `END_OF_TEXT`."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    ends = {}
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        ends = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


def save_tokenizer(packed: Mapping[str, Any], folder: str | Path) -> None:
    """Write a packed tokenizer as files that ``AutoTokenizer.from_pretrained`` loads.

    Raises:
        ConfigurationError: If the name of a file leads out of the folder.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(packed["json"])
    if "files" not in packed:
        of_transformers(backend).save_pretrained(str(folder))
        return
    root = Path(folder).resolve()
    for name, text in packed["files"].items():
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise ConfigurationError(f"tokenizer: the checkpoint has a file {name!r}, which leads out of its folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    backend.save(str(root / _JSON))


def declare_class(folder: Path, base: str) -> None:
    """Name the class of a saved tokenizer as its base names it, if the tokenizer then loads as before.

    For some models transformers replaces the class that ``tokenizer_config.json`` names, and saves the other name.

    Args:
        folder: Folder of a model with its tokenizer.
        base: Name or folder of the model's base.
    """
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    path = folder / "tokenizer_config.json"
    saved = path.read_text("utf-8")
    settings = json.loads(saved)
    try:
        declared = None if is_gguf(base) else get_tokenizer_config(base, local_files_only=True).get("tokenizer_class")
    except (OSError, ValueError):
        return
    if declared in (None, settings["tokenizer_class"]):
        return
    path.write_text(json.dumps(settings | {"tokenizer_class": declared}, indent=2, ensure_ascii=False) + "\n", "utf-8")
    whole = json.loads((folder / _JSON).read_text("utf-8"))
    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        is_same = json.loads(loaded.backend_tokenizer.to_str()) == whole
    except Exception:  # the class is unknown, slow, or needs other files, and each class raises errors of its own
        is_same = False
    if not is_same:
        path.write_text(saved, "utf-8")


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
    missing = None if is_gguf(name) else missing_folder(name)
    if missing is not None:
        raise ConfigurationError(f"tokenizer: {missing}")
    try:
        return read_tokenizer(name, use_fast=True)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(f"tokenizer: {name} cannot be loaded: {reason}") from error
